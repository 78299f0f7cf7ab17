// Which boundaries are decaying.

#include "cuda/common/bulk.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/sm90/common/key_squares.cuh"
#include "cuda/sm90/context_parallel/plan_device.cuh"

namespace flash_qla::cuda::sm90::cp {
namespace {

static_assert(kRoundChunks * kRoundHeads == kClassifyThreads / 32);
// The sequence that holds a token, by a whole warp; its length is 0 where none does, as it may be where offsets are out
// of order. own: see summarise_lengths().
__device__ SequenceSpan find_sequence(const Args& args, int64_t token, const SequenceSpan& own, int lane) {
  SequenceSpan none{0, 0, 0, 0};
  if (token < 0 || token >= args.num_tokens) return none;
  if (args.cu_seqlens != nullptr && args.num_sequences <= 32) {
    const bool holds = own.start <= token && token < static_cast<int64_t>(own.start) + own.length;
    const uint32_t found = __ballot_sync(0xffffffffu, holds);
    if (found == 0) return none;
    const int holder = __ffs(static_cast<int>(found)) - 1;
    return {__shfl_sync(0xffffffffu, own.start, holder), __shfl_sync(0xffffffffu, own.length, holder), holder, 0};
  }
  const SequenceSpan s = sequence_at(args, sequence_before(args, static_cast<int32_t>(token), lane));
  return s.start <= token && token < static_cast<int64_t>(s.start) + s.length ? s : none;
}

// Sums over the chunks of a round up to the lane's own; lane c * kRoundHeads + h looks at chunk c of head h.
__device__ float sum_of_chunks_before(float x, int lane) {
#pragma unroll
  for (int step = kRoundHeads; step < 32; step *= 2) {
    const float below = __shfl_up_sync(0xffffffffu, x, step);
    if (lane >= step) x += below;
  }
  return x;
}
// Of lanes that look at the lane's head, which hold `x`: the first chunk, kRoundChunks if none.
__device__ int first_chunk_where(bool x, int lane) {
  constexpr uint32_t kOneHead = 0x11111111u;
  static_assert(kRoundHeads == 4);
  const uint32_t found = __ballot_sync(0xffffffffu, x) >> (lane % kRoundHeads) & kOneHead;
  return found == 0 ? kRoundChunks : (__ffs(static_cast<int>(found)) - 1) / kRoundHeads;
}

// Warm-ups of the boundaries, a block for each boundary and up to four value heads of a key head. What a round decides
// every warp works out for itself, from sums in shared memory: few barriers.
template <typename Element>
__global__ void __launch_bounds__(kClassifyThreads) classify_cuts_kernel(const __grid_constant__ PlanArgs p) {
  if (p.least_longest != 0) {
    // What the kernels before the call wrote, and the answer, were there before the uncut kernel's blocks let this
    // one start. Its end is waited for by the first block alone, as kernels must not end before those they depend on.
    launch_dependents();
    const bool cut = load_now(p.workspace.cut) != 0;
    if (blockIdx.x == 0) wait_for_predecessors();
    if (!cut) return;
  } else {
    // For what the kernels before this one write, which the one after it reads as well.
    wait_for_predecessors();
    if (blockIdx.x == 0) {
      if (threadIdx.x == 0) {
        reset_plan_start(p.workspace, true);
        __threadfence();
      }
      __syncthreads();  // whoever asks for it starts after this block has said that it may
    }
    launch_dependents();
  }
  const Args& args = p.args;
  if (p.in_place != 0) {
    const int64_t counts = 2 * static_cast<int64_t>(args.num_sequences) * args.num_value_heads;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kClassifyThreads + threadIdx.x; i < counts;
         i += static_cast<int64_t>(gridDim.x) * kClassifyThreads) {
      p.workspace.readers[i] = 0;
    }
  }
  const int units_blocks = static_cast<int>(gridDim.x) - p.zero_fill_blocks;
  if (static_cast<int>(blockIdx.x) >= units_blocks) {
    zero_outside(args, static_cast<int>(blockIdx.x) - units_blocks, p.zero_fill_blocks);
    return;
  }
  SequenceSpan own{0, 0, 0, 0};
  const CutSpacing cut_spacing = choose_cut_spacing(p, summarise_lengths<kClassifyThreads>(args, &own));
  if (cut_spacing.spacing == 0) return;

  __shared__ float key_squares[kRoundChunks * kChunk];
  __shared__ float decay[kRoundChunks][kRoundHeads], total[kRoundChunks][kRoundHeads];
  // Of gates that come first: in decay's place they would overtake a warp that still reads those of the round before.
  __shared__ float early_decay[kRoundChunks][kRoundHeads];

  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int32_t limit = warmup_limit(cut_spacing);
#pragma unroll 1
  for (int32_t unit = static_cast<int32_t>(blockIdx.x); unit < p.units; unit += units_blocks) {
    const int32_t number = p.by_boundary_units.divide(unit);
    const int32_t rest = unit - number * static_cast<int32_t>(p.by_boundary_units.by);
    const int32_t key_head = p.by_parts.divide(rest);
    const int32_t first_head = key_head * p.group + (rest - key_head * p.parts) * kRoundHeads;
    const int32_t heads = min(kRoundHeads, (key_head + 1) * p.group - first_head);
    // The one sequence that can have this boundary began before the boundary's window: it holds the token before it.
    const SequenceSpan s =
        find_sequence(args, static_cast<int64_t>(number) * cut_spacing.spacing * kChunk - 1, own, lane);
    const CutSequence cuts(s, cut_spacing);
    const int32_t boundary = cuts.find(number, cut_spacing);
    uint8_t* const warmups = p.workspace.warmups + number * args.num_value_heads + first_head;
    if (boundary == 0) {  // the listing kernel copies all of them
      if (thread < heads) warmups[thread] = 0;
      continue;
    }
    const int32_t at = cuts.at(boundary);

    // Of the head that this lane looks at, the same in all warps: the sum so far, and the warm-up once it is known.
    float sum = 0.0f;
    int32_t warmup = lane % kRoundHeads < heads ? -1 : 0;
#pragma unroll 1
    for (int32_t round = 0; round * kRoundChunks < limit; ++round) {
      const int32_t last_chunk = at - 1 - round * kRoundChunks;
      const int32_t seen = (round + 1) * kRoundChunks, most = min(limit, at);
      const int c = lane / kRoundHeads;
      // Keys and gates are asked for at once: of heads that decay too slowly the keys are not needed, but what is read
      // here is read soon by the items. Not so where that is more than the memory brings in a few microseconds.
      const int32_t row = last_chunk * kChunk + kChunk - kRoundChunks * kChunk + thread;
      if (p.gates_first == 0 && thread < kRoundChunks * kChunk && row >= 0) {
        l2_prefetch(static_cast<const Element*>(args.k) + (static_cast<int64_t>(s.start) + row) * args.k_token_stride +
                        key_head * args.k_head_stride,
                    kHeadDim * sizeof(Element));
      }
      // A warp adds up a chunk of a head.
      const int j = warp / kRoundHeads, h = warp % kRoundHeads;
      const bool used = h < heads && last_chunk >= j;
      float beta[2] = {1.0f, 1.0f};
      float gate = 0.0f;
      if (used) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int64_t row = s.start + static_cast<int64_t>(last_chunk - j) * kChunk + lane + 32 * i;
          if (args.g != nullptr) {
            const float g = args.g[row * args.g_token_stride + (first_head + h) * args.g_head_stride];
            gate += g < kGateFloor ? kGateFloor : g;
          }
          if (args.beta != nullptr) {
            beta[i] = args.beta[row * args.beta_token_stride + (first_head + h) * args.beta_head_stride];
          }
        }
      }
      // That the rate of a head's gates is too low, whatever the keys are.
      const auto too_slow = [&](float gates_of_round) {
        return static_cast<float>(limit) * gates_of_round > static_cast<float>(min(seen, at)) * args.decay_threshold;
      };
      constexpr int kLastChunk = 32 - kRoundHeads;  // the lanes that look at the last chunk of a round
      // Chunks whose keys are read: where gates come first, those that the gates alone would do with.
      int32_t asked = kRoundChunks;
      if (p.gates_first != 0) {
        gate = warp_sum(gate);
        if (lane == 0) early_decay[j][h] = gate;
        __syncthreads();
        const float gates = sum + sum_of_chunks_before(early_decay[c][lane % kRoundHeads], lane);
        const int enough = first_chunk_where(round * kRoundChunks + c < most && gates <= args.decay_threshold, lane);
        const bool slow = too_slow(__shfl_sync(0xffffffffu, gates, kLastChunk + lane % kRoundHeads));
        asked = warmup >= 0 ? 0 : enough < kRoundChunks ? enough + 1 : slow ? 0 : kRoundChunks;
        asked = __reduce_max_sync(0xffffffffu, asked);
      }
#pragma unroll 1
      for (;; asked = kRoundChunks) {
#pragma unroll 1
        for (int t = thread / kThreadsPerKey; t < asked * kChunk; t += kClassifyThreads / kThreadsPerKey) {
          const int32_t chunk = last_chunk - t / kChunk;
          float squares = 0.0f;
          if (chunk >= 0) {
            const int64_t token = s.start + static_cast<int64_t>(chunk) * kChunk + t % kChunk;
            squares = own_part_of_square(static_cast<const Element*>(args.k) + token * args.k_token_stride +
                                         key_head * args.k_head_stride);
          }
          squares = quad_sum(squares);
          if (thread % kThreadsPerKey == 0) key_squares[t] = squares;
        }
        __syncthreads();
        float growth = 0.0f;
        if (used && j < asked) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float factor = fabsf(1.0f - beta[i] * key_squares[j * kChunk + lane + 32 * i]);
            // Not fmaxf: NaN must stay, and make the boundary exact.
            growth += factor <= 1.0f ? 0.0f : __logf(factor);
          }
        }
        if (p.gates_first == 0) gate = warp_sum(gate);  // not before: the keys would be asked for when it is there
        growth = warp_sum(growth);
        if (lane == 0) {
          decay[j][h] = gate;
          total[j][h] = gate + growth;
        }
        __syncthreads();
        const float gates = sum + sum_of_chunks_before(decay[c][lane % kRoundHeads], lane);
        const float sums = sum + sum_of_chunks_before(total[c][lane % kRoundHeads], lane);
        const int found =
            first_chunk_where(c < asked && round * kRoundChunks + c < most && sums <= args.decay_threshold, lane);
        const float gates_of_round = __shfl_sync(0xffffffffu, gates, kLastChunk + lane % kRoundHeads);
        const float sum_of_round = __shfl_sync(0xffffffffu, sums, kLastChunk + lane % kRoundHeads);
        if (warmup < 0) {
          if (found < kRoundChunks) {
            warmup = round * kRoundChunks + found + 1;
          } else if (too_slow(gates_of_round)) {
            warmup = 0;
          } else if (asked == kRoundChunks && seen >= most) {
            warmup = reaches_start(at, limit, args.decay_threshold, sum_of_round) ? at : 0;
          }
        }
        // All keys of the round, should those have been too few.
        if (asked == kRoundChunks || __all_sync(0xffffffffu, warmup >= 0)) {
          sum = sum_of_round;
          break;
        }
      }
      if (__all_sync(0xffffffffu, warmup >= 0)) break;
    }
    if (thread < heads) warmups[thread] = static_cast<uint8_t>(max(warmup, 0));
    if (unit + units_blocks < p.units) __syncthreads();  // the sums of this unit have been read
  }
}

}  // namespace

const void* classify_kernel(DType type) {
  return type == DType::kFloat16 ? reinterpret_cast<const void*>(&classify_cuts_kernel<__half>)
                                 : reinterpret_cast<const void*>(&classify_cuts_kernel<__nv_bfloat16>);
}

}  // namespace flash_qla::cuda::sm90::cp
