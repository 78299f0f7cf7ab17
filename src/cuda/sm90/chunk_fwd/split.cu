#include "split.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "chunk_stream.cuh"
#include "clear.cuh"
#include "launch_kernel.h"

namespace flash_qla::cuda::sm90 {
namespace {

constexpr int kPlanThreads = kClearThreads;
constexpr int kPlanWarps = kPlanThreads / 32;

// Of all lengths, by a whole block. Ends with a barrier.
__device__ LengthSummary summarise_lengths(const ChunkForwardArgs& args) {
  __shared__ int32_t totals[3];
  if (args.cu_seqlens == nullptr) {
    const int32_t chunks = chunks_in(static_cast<int32_t>(args.dense_length));
    return {static_cast<int64_t>(chunks) * args.num_sequences, chunks > 0 ? args.num_sequences : 0, chunks};
  }
  if (threadIdx.x < 3) totals[threadIdx.x] = 0;
  __syncthreads();
  int32_t chunks = 0, sequences = 0, longest = 0;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < args.num_sequences; i += kPlanThreads) {
    const int32_t count = chunks_in(sequence_at(args, i).length);
    chunks += count;
    sequences += count > 0;
    longest = max(longest, count);
  }
  chunks = __reduce_add_sync(0xffffffffu, chunks);
  sequences = __reduce_add_sync(0xffffffffu, sequences);
  longest = __reduce_max_sync(0xffffffffu, longest);
  if (threadIdx.x % 32 == 0 && sequences > 0) {
    atomicAdd(&totals[0], chunks);
    atomicAdd(&totals[1], sequences);
    atomicMax(&totals[2], longest);
  }
  __syncthreads();
  return {totals[0], totals[1], totals[2]};
}

__device__ SplitGrid choose_grid(const SplitKernelParams& p, const LengthSummary& lengths) {
  return choose_grid(p.args.split, p.args.force_split != 0, lengths, p.args.num_value_heads, p.sms, p.costs);
}

// --- which boundaries are light ---

// A round looks at eight chunks of four value heads that share a key head: a warp each.
constexpr int kRoundChunks = 8;
constexpr int kRoundHeads = 4;
static_assert(kRoundChunks * kRoundHeads == kPlanWarps);
// A token's key by four threads.
constexpr int kThreadsPerKey = 4;
// Bounds the blocks: a unit takes a few microseconds, and the card's SMs share them.
constexpr int kClassifyBlocksPerSm = 2;

template <typename Element>
__device__ float sum_of_squares(uint4 x) {
  const uint32_t words[4] = {x.x, x.y, x.z, x.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Element low, high;
    const uint16_t bits[2] = {static_cast<uint16_t>(words[i] & 0xffff), static_cast<uint16_t>(words[i] >> 16)};
    memcpy(&low, &bits[0], 2);
    memcpy(&high, &bits[1], 2);
    const float a = static_cast<float>(low), b = static_cast<float>(high);
    sum = fmaf(a, a, fmaf(b, b, sum));
  }
  return sum;
}

__device__ float warp_sum(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}

// Warm-ups of the boundaries, a block for each boundary and up to four value heads of a key head.
template <typename Element>
__global__ void __launch_bounds__(kPlanThreads)
    classify_boundaries_kernel(const __grid_constant__ SplitKernelParams p) {
  asm volatile("griddepcontrol.launch_dependents;");
  const ChunkForwardArgs& args = p.args;
  const int first_block = args.cu_seqlens != nullptr ? kClearBlocks : 0;
  if (static_cast<int>(blockIdx.x) < first_block) {
    clear_outside(args, static_cast<int>(blockIdx.x), kClearBlocks);
    return;
  }
  const SplitGrid grid = choose_grid(p, summarise_lengths(args));
  if (grid.spacing == 0) return;

  __shared__ PlannedSequence found;
  __shared__ float key_squares[kRoundChunks * kChunk];
  __shared__ float decay[kRoundChunks][kRoundHeads], total[kRoundChunks][kRoundHeads];
  __shared__ float sums[kRoundHeads];
  __shared__ int32_t warmups[kRoundHeads];
  __shared__ int32_t needed, open_heads;

  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int group = args.num_value_heads / args.num_key_heads;
  const int parts = (group + kRoundHeads - 1) / kRoundHeads;
  const int units_per_boundary = args.num_key_heads * parts;
  const int64_t units = static_cast<int64_t>(p.capacity.boundaries) * units_per_boundary;
  const int32_t limit = warmup_limit(grid);
  for (int64_t unit = blockIdx.x - first_block; unit < units; unit += gridDim.x - first_block) {
    const int32_t number = static_cast<int32_t>(unit / units_per_boundary);
    const int32_t part = static_cast<int32_t>(unit % units_per_boundary);
    const int32_t key_head = part / parts, first_head = key_head * group + part % parts * kRoundHeads;
    const int32_t heads = min(kRoundHeads, (key_head + 1) * group - first_head);

    // The one sequence that can have this boundary began before the boundary's window: it holds the token before it.
    const int64_t before = static_cast<int64_t>(number) * grid.spacing * kChunk - 1;
    __syncthreads();
    if (thread == 0) found.length = 0;
    if (thread < kRoundHeads) {
      sums[thread] = 0.0f;
      warmups[thread] = -1;
    }
    __syncthreads();
    if (args.cu_seqlens == nullptr) {
      if (thread == 0 && before >= 0 && args.dense_length > 0 && before / args.dense_length < args.num_sequences) {
        found = sequence_at(args, static_cast<int32_t>(before / args.dense_length));
      }
    } else {
      for (int32_t i = thread; i < args.num_sequences; i += kPlanThreads) {
        const PlannedSequence s = sequence_at(args, i);
        if (s.start <= before && before < static_cast<int64_t>(s.start) + s.length) found = s;
      }
    }
    __syncthreads();
    const PlannedSequence s = found;
    const int32_t boundary = find_boundary(s, grid, number);
    if (boundary == 0) continue;
    const int32_t chunks = chunks_in(s.length), at = boundary_chunk(chunks, pieces_of(chunks, grid), boundary);

    for (int32_t round = 0; round * kRoundChunks < limit; ++round) {
      // Gates first: keys are read only where the gates alone would do.
      const int j = warp / kRoundHeads, h = warp % kRoundHeads;
      const int32_t chunk = at - 1 - round * kRoundChunks - j;
      const bool used = h < heads && chunk >= 0;
      float beta[2] = {1.0f, 1.0f};
      float gate = 0.0f;
      if (used) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int64_t row = s.start + static_cast<int64_t>(chunk) * kChunk + lane + 32 * i;
          if (args.g != nullptr) {
            const float g = args.g[row * args.g_token_stride + (first_head + h) * args.g_head_stride];
            gate += g < kGateFloor ? kGateFloor : g;
          }
          if (args.beta != nullptr) {
            beta[i] = args.beta[row * args.beta_token_stride + (first_head + h) * args.beta_head_stride];
          }
        }
      }
      gate = warp_sum(gate);
      if (lane == 0) decay[j][h] = gate;
      __syncthreads();
      if (thread == 0) {
        // Chunks whose keys count: up to where the gates alone reach the threshold; all, where they may yet reach it at
        // this rate; none of a head that decays too slowly.
        int32_t most = 0, open = 0;
        for (int i = 0; i < heads; ++i) {
          if (warmups[i] >= 0) continue;
          float sum = sums[i];
          int32_t need = kRoundChunks;
          for (int c = 0; c < kRoundChunks; ++c) {
            if (at - 1 - round * kRoundChunks - c < 0) break;
            sum += decay[c][i];
            if (sum <= args.decay_threshold && need == kRoundChunks) need = min(c + 2, kRoundChunks);
          }
          const float rate = args.decay_threshold / static_cast<float>(limit);
          if (sum <= rate * static_cast<float>((round + 1) * kRoundChunks)) {
            most = max(most, need);
            ++open;
          } else {
            warmups[i] = 0;
          }
        }
        needed = most;
        open_heads = open;
      }
      __syncthreads();
      if (open_heads == 0) break;
      for (int t = thread / kThreadsPerKey; t < needed * kChunk; t += kPlanThreads / kThreadsPerKey) {
        const int32_t key_chunk = at - 1 - round * kRoundChunks - t / kChunk;
        float sum = 0.0f;
        if (key_chunk >= 0) {
          const int64_t row = s.start + static_cast<int64_t>(key_chunk) * kChunk + t % kChunk;
          const uint4* key = reinterpret_cast<const uint4*>(static_cast<const Element*>(args.k) +
                                                            row * args.k_token_stride + key_head * args.k_head_stride);
#pragma unroll
          for (int i = 0; i < kHeadDim / 8 / kThreadsPerKey; ++i) {
            sum += sum_of_squares<Element>(key[i * kThreadsPerKey + thread % kThreadsPerKey]);
          }
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (thread % kThreadsPerKey == 0) key_squares[t] = sum;
      }
      __syncthreads();
      float growth = 0.0f;
      if (used && j < needed) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float factor = fabsf(1.0f - beta[i] * key_squares[j * kChunk + lane + 32 * i]);
          // Not fmaxf: NaN must stay, and make the boundary heavy.
          growth += factor <= 1.0f ? 0.0f : logf(factor);
        }
      }
      growth = warp_sum(growth);
      if (lane == 0) total[j][h] = gate + growth;
      __syncthreads();
      if (thread < heads && warmups[thread] < 0) {
        float sum = sums[thread];
        int32_t result = -1;
        for (int c = 0; c < needed && result < 0; ++c) {
          const int32_t w = round * kRoundChunks + c + 1;
          if (w > at || w > limit) break;
          sum += total[c][thread];
          if (sum <= args.decay_threshold) result = w;
        }
        // Where keys that grow made the gates fall short within the chunks that were read.
        if (result < 0 && (needed < kRoundChunks || (round + 1) * kRoundChunks >= min(limit, at))) result = 0;
        sums[thread] = sum;
        warmups[thread] = result;
      }
      __syncthreads();
      const bool done = (heads < 1 || warmups[0] >= 0) && (heads < 2 || warmups[1] >= 0) &&
                        (heads < 3 || warmups[2] >= 0) && (heads < 4 || warmups[3] >= 0);
      if (done) break;
    }
    __syncthreads();
    if (thread < heads) {
      p.workspace.warmups[static_cast<int64_t>(number) * args.num_value_heads + first_head + thread] =
          static_cast<uint8_t>(max(warmups[thread], 0));
    }
  }
}

// --- the lists ---

// Visits the segments of one sequence and head by `width` neighbouring lanes of a warp, 1 .. 32 and a power of two; how
// many slots they take. All of the warp's groups of lanes go through `most_pieces` boundaries together; those whose
// plan is not `wanted` come along.
template <typename Warmups, typename Sink>
__device__ int32_t emit_head(const HeadPlan<Warmups>& plan, bool wanted, int32_t first_slot, Sink& sink, int lane,
                             int width, int32_t most_pieces) {
  const int first_lane = lane / width * width;
  const uint32_t mask = width == 32 ? ~0u : (1u << width) - 1;
  SegmentCarry carry;
  for (int32_t base = 1; base <= most_pieces; base += width) {
    const int32_t i = base + lane - first_lane;
    bool ends = false, heavy = false;
    if (wanted && i <= plan.pieces) plan.classify(i, &ends, &heavy);
    SegmentRound round;
    round.base = base;
    round.ends = __ballot_sync(0xffffffffu, ends) >> first_lane & mask;
    round.heavy = __ballot_sync(0xffffffffu, heavy) >> first_lane & mask;
    if (ends) plan.emit(round, carry, lane - first_lane, first_slot, sink);
    plan.advance(round, &carry);
  }
  return carry.slots;
}

// Does nothing but let slots be counted.
struct NoSink {
  __device__ void tile(const Tile&) const {}
  __device__ void chain(const TransitionChain&) const {}
};

struct CountingSink {
  int32_t* buckets;  // [kTileBuckets], shared
  __device__ void tile(const Tile& t) const { atomicAdd(&buckets[tile_bucket(t)], 1); }
  __device__ void chain(const TransitionChain&) const {}
};

struct PlacingSink {
  int32_t* next;  // [kTileBuckets] shared: where the bucket's next tile goes in its list
  int32_t* chains_used;
  SplitWorkspace workspace;
  int32_t early, free, dependent;  // of the tiles that write O
  __device__ void tile(const Tile& t) const {
    const int32_t n = atomicAdd(&next[tile_bucket(t)], 1);
    if (t.flags & kTileToSlot) {
      workspace.state_tiles[n] = t;
    } else {
      workspace.output_tiles[output_place(n, early, free, dependent)] = t;
    }
  }
  __device__ void chain(const TransitionChain& c) const { workspace.chains[atomicAdd(chains_used, 1)] = c; }
};

// kTilesPerSmUnsplit to an SM of a card of up to 144.
constexpr int32_t kMostSummaries = 2304;

// One block. The order of tiles within a bucket and the numbers of slots vary from run to run; what is computed does
// not depend on either.
__global__ void __launch_bounds__(kPlanThreads) list_tiles_kernel(const __grid_constant__ SplitKernelParams p) {
  asm volatile("griddepcontrol.launch_dependents;");
  const ChunkForwardArgs& args = p.args;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int32_t heads = args.num_value_heads, n = args.num_sequences;
  const SplitWorkspace& ws = p.workspace;
  const LengthSummary lengths = summarise_lengths(args);
  const SplitGrid grid = choose_grid(p, lengths);
  const int32_t most_pieces = pieces_of(lengths.longest, grid);
  // Lanes that a sequence and head get.
  int width = 1;
  while (width < 32 && width < most_pieces) width *= 2;

  __shared__ int32_t buckets[kTileBuckets];
  __shared__ int32_t list_sizes[2], free_tiles, slots_used, chains_used, chunks_before;
  __shared__ int32_t warp_chunks[kPlanWarps];
  __shared__ float choice_steps[kMergeChoices];
  __shared__ int32_t choice_early[kMergeChoices];
  __shared__ HeadSummary summaries[kMostSummaries];
  for (int i = thread; i < kTileBuckets; i += kPlanThreads) buckets[i] = 0;
  if (thread == 0) slots_used = chains_used = chunks_before = 0;
  __syncthreads();

  const bool number_chunks = args.h != nullptr && args.cu_seqlens != nullptr;
  if (number_chunks) {
    for (int32_t first = 0; first < n; first += kPlanThreads) {
      const int32_t i = first + thread;
      const int32_t chunks = i < n ? chunks_in(sequence_at(args, i).length) : 0;
      int32_t inclusive = chunks;
      for (int step = 1; step < 32; step *= 2) {
        const int32_t below = __shfl_up_sync(0xffffffffu, inclusive, step);
        if (lane >= step) inclusive += below;
      }
      if (lane == 31) warp_chunks[warp] = inclusive;
      __syncthreads();
      int32_t before = chunks_before;
      for (int w = 0; w < warp; ++w) before += warp_chunks[w];
      if (i < n) ws.first_chunks[i] = before + inclusive - chunks;
      __syncthreads();
      if (thread == kPlanThreads - 1) chunks_before = before + inclusive;
      __syncthreads();
    }
  }
  auto sequence = [&](int32_t i) {
    PlannedSequence s = sequence_at(args, i);
    if (number_chunks) s.first_chunk = ws.first_chunks[i];
    // A skipped sequence has no state tiles: the chains wait for all that are listed.
    if (initial_slot(args, i) == kSkipSequence) s.length = 0;
    return s;
  };
  // The boundaries' kernel is waited for here.
  asm volatile("griddepcontrol.wait;" ::: "memory");
  auto warmups_of = [&](int32_t head) {
    return [&ws, heads, head](int32_t number) {
      return static_cast<int32_t>(ws.warmups[static_cast<int64_t>(number) * heads + head]);
    };
  };
  const int32_t pairs = n * heads;
  auto head_plan = [&](int32_t pair, const SplitMerge& merge) {
    const int32_t head = pair % heads;
    return HeadPlan(sequence(min(pair / heads, n - 1)), head, grid, merge, p.capacity.boundaries, warmups_of(head));
  };

  SplitMerge merge;
  int32_t early = INT32_MAX;  // free tiles that go before the dependent ones
  const int32_t first_pair = thread / width, pairs_at_once = kPlanThreads / width;
  // Heads beyond the room for their summaries do not take part in the choice; there is always room for as many as a
  // call may have that is planned without being forced to.
  const int32_t summarised = min(pairs, kMostSummaries);
  if (args.split == SplitMode::kAuto && args.force_split == 0 && grid.spacing > 0) {
    for (int32_t pair = first_pair; pair - lane / width < summarised; pair += pairs_at_once) {
      const auto plan = head_plan(pair, merge);
      const int first_lane = lane / width * width;
      const uint32_t group = (width == 32 ? ~0u : (1u << width) - 1) << first_lane;
      int32_t heavy = 0, warmups = 0;
      for (int32_t i = 1 + lane - first_lane; i < plan.pieces; i += width) {
        const int32_t warmup = plan.warmup_at(i);
        heavy += warmup == 0;
        warmups += warmup;
      }
      heavy = __reduce_add_sync(group, heavy);
      warmups = __reduce_add_sync(group, warmups);
      if (lane == first_lane && pair < summarised) summaries[pair] = {plan.chunks, plan.pieces, heavy, warmups};
    }
    __syncthreads();
    for (int choice = warp; choice < kMergeChoices; choice += kPlanWarps) {
      SplitEstimate estimate;
      estimate.costs = p.costs;
      for (int32_t pair = lane; pair < summarised; pair += 32) estimate.add(summaries[pair], merge_choice(choice));
      for (int i = 16; i > 0; i /= 2) {
        SplitEstimate other;
        other.state_work = __shfl_xor_sync(0xffffffffu, estimate.state_work, i);
        other.free_work = __shfl_xor_sync(0xffffffffu, estimate.free_work, i);
        other.dependent_work = __shfl_xor_sync(0xffffffffu, estimate.dependent_work, i);
        other.state_tiles = __shfl_xor_sync(0xffffffffu, estimate.state_tiles, i);
        other.free_tiles = __shfl_xor_sync(0xffffffffu, estimate.free_tiles, i);
        other.dependent_tiles = __shfl_xor_sync(0xffffffffu, estimate.dependent_tiles, i);
        other.longest_state = __shfl_xor_sync(0xffffffffu, estimate.longest_state, i);
        other.longest_free = __shfl_xor_sync(0xffffffffu, estimate.longest_free, i);
        other.longest_dependent = __shfl_xor_sync(0xffffffffu, estimate.longest_dependent, i);
        other.longest_chain = __shfl_xor_sync(0xffffffffu, estimate.longest_chain, i);
        estimate.add(other);
      }
      if (lane == 0) {
        choice_steps[choice] = estimate.steps(p.sms);
        choice_early[choice] = estimate.early_tiles(p.sms);
      }
    }
    __syncthreads();
    int best = 0;
    for (int i = 1; i < kMergeChoices; ++i) best = choice_steps[i] < choice_steps[best] ? i : best;
    merge = merge_choice(best);
    early = choice_early[best];
  }

  CountingSink counting{buckets};
  for (int32_t pair = first_pair; pair - lane / width < pairs; pair += pairs_at_once) {
    emit_head(head_plan(pair, merge), pair < pairs, 0, counting, lane, width, most_pieces);
  }
  __syncthreads();
  // Exclusive sums, the state tiles' buckets by one warp and the others' by another.
  if (warp < 2) {
    const int first = warp == 0 ? 0 : kLengthBuckets, per_lane = (warp == 0 ? 1 : 2) * kLengthBuckets / 32;
    int32_t sum = 0;
    for (int i = 0; i < per_lane; ++i) sum += buckets[first + lane * per_lane + i];
    int32_t inclusive = sum;
    for (int step = 1; step < 32; step *= 2) {
      const int32_t below = __shfl_up_sync(0xffffffffu, inclusive, step);
      if (lane >= step) inclusive += below;
    }
    if (lane == 31) list_sizes[warp] = inclusive;
    if (warp == 1 && lane == 15) free_tiles = inclusive;
    int32_t before = inclusive - sum;
    for (int i = 0; i < per_lane; ++i) {
      const int32_t count = buckets[first + lane * per_lane + i];
      buckets[first + lane * per_lane + i] = before;
      before += count;
    }
  }
  __syncthreads();
  PlacingSink placing{buckets, &chains_used, ws, min(early, free_tiles), free_tiles, list_sizes[1] - free_tiles};
  for (int32_t pair = first_pair; pair - lane / width < pairs; pair += pairs_at_once) {
    const auto plan = head_plan(pair, merge);
    NoSink none;
    const int32_t slots = most_pieces > 1 ? emit_head(plan, pair < pairs, 0, none, lane, width, most_pieces) : 0;
    int32_t first_slot = 0;
    if (lane % width == 0 && slots > 0) first_slot = atomicAdd(&slots_used, slots);
    first_slot = __shfl_sync(0xffffffffu, first_slot, 0, width);
    emit_head(plan, pair < pairs, first_slot, placing, lane, width, most_pieces);
  }
  __syncthreads();
  if (thread == 0) {
    SplitCounters counters{};
    counters.state_tiles = list_sizes[0];
    counters.output_tiles = list_sizes[1];
    counters.chains = chains_used;
    counters.slots = slots_used;
    counters.spacing = grid.spacing;
    counters.light_merge = merge.light;
    counters.heavy_merge = merge.heavy;
    counters.early_tiles = min(early, free_tiles);
    *ws.counters = counters;
  }
}

}  // namespace

size_t lay_out_split(const ChunkForwardArgs& args, const SplitCapacity& capacity, void* base,
                     SplitWorkspace* workspace) {
  size_t used = 0;
  auto take = [&](size_t bytes) {
    char* place = static_cast<char*>(base) + used;
    used += (bytes + 255) / 256 * 256;
    return place;
  };
  const size_t n = static_cast<size_t>(std::max(args.num_sequences, 0));
  const size_t slots = static_cast<size_t>(capacity.slots);
  SplitWorkspace w;
  w.counters = reinterpret_cast<SplitCounters*>(take(sizeof(SplitCounters)));
  w.warmups = reinterpret_cast<uint8_t*>(take(slots));
  w.first_chunks = reinterpret_cast<int32_t*>(take(sizeof(int32_t) * n));
  w.state_tiles = reinterpret_cast<Tile*>(take(sizeof(Tile) * static_cast<size_t>(capacity.state_tiles)));
  w.output_tiles = reinterpret_cast<Tile*>(take(sizeof(Tile) * static_cast<size_t>(capacity.output_tiles)));
  w.chains = reinterpret_cast<TransitionChain*>(take(sizeof(TransitionChain) * static_cast<size_t>(capacity.chains)));
  w.boundary_states = reinterpret_cast<float4*>(take(sizeof(float) * kHeadDim * kHeadDim * slots));
  w.transitions = reinterpret_cast<float4*>(take(sizeof(float) * kHeadDim * kHeadDim * slots));
  if (workspace != nullptr) *workspace = w;
  return used;
}

cudaError_t launch_split_plan(const SplitKernelParams& params, cudaStream_t stream) {
  const ChunkForwardArgs& args = params.args;
  const int group = args.num_value_heads / args.num_key_heads;
  const int64_t units =
      static_cast<int64_t>(params.capacity.boundaries) * args.num_key_heads * ((group + kRoundHeads - 1) / kRoundHeads);
  const int64_t blocks = std::clamp<int64_t>(units, 1, static_cast<int64_t>(kClassifyBlocksPerSm) * params.sms) +
                         (args.cu_seqlens != nullptr ? kClearBlocks : 0);
  if (args.type == ElementType::kFloat16) {
    classify_boundaries_kernel<__half><<<static_cast<unsigned>(blocks), kPlanThreads, 0, stream>>>(params);
  } else {
    classify_boundaries_kernel<__nv_bfloat16><<<static_cast<unsigned>(blocks), kPlanThreads, 0, stream>>>(params);
  }
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  return launch_kernel(reinterpret_cast<const void*>(&list_tiles_kernel), 1, kPlanThreads, 0, params, true, stream);
}

}  // namespace flash_qla::cuda::sm90
