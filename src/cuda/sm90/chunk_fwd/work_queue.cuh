// The numbered queue of chunks a block works through: descriptors in shared memory, filled item by item by one thread.
#pragma once

#include <cstdint>

#include "cuda/common/bulk.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/sm90/chunk_fwd/chunk_descriptor.cuh"
#include "cuda/sm90/chunk_fwd/work_sources.cuh"
#include "cuda/sm90/common/device.cuh"

namespace flash_qla::cuda::sm90::fwd {

// Opens the next item that has anything to do.
template <typename Traits>
__device__ __forceinline__ void open_item(const KernelArgs& p, QueueProducer& producer) {
  const Args& args = p.args;
  while (producer.item < producer.items) {
    int32_t item = producer.item;
    const int32_t opened = producer.opened++;
    if (opened > 0) {
      item = next_item<Traits>(p, item, opened - 1, static_cast<int32_t>(gridDim.x) / Traits::kClusterCtas);
      producer.item = item;
      if (item >= producer.items) return;
    }
    const int32_t rank = item / args.num_value_heads;
    const SequenceSpan sequence = sequence_of_rank<Traits>(p, rank);
    ChunkDescriptor& r = producer.next;
    r.slot_out = final_slot_of<Traits>(p, sequence.index);
    if (sequence.length <= 0 && r.slot_out < 0) continue;
    r.slot_in = initial_slot_of<Traits>(p, sequence.index);
    if (r.slot_in == kSkipSequence) continue;
    r.row = sequence.start;
    r.flags = kFirstChunk;
    if (kPrefetchesState<Traits> && p.prefetched_initial != 0 && r.slot_in >= 0) {
      r.flags |= kPrefetchedState | (producer.prefetched++ & 3) << kPrefetchedCountShift;
    }
    r.head = item - rank * args.num_value_heads;
    r.sequence = sequence.index;
    r.half = 0;
    r.key_head = static_cast<int16_t>(r.head / (args.num_value_heads / args.num_key_heads));
    r.chunk = sequence.first_chunk;
    r.position = 0;
    producer.remaining = max(sequence.length, 0);
    producer.warmup = 0;
    // Not of a block's first item, whose K is more urgent: its state groups read the state when that is there.
    if (producer.opened > 1 && r.slot_in >= 0) {
      l2_prefetch(state_matrix(args.initial, r.slot_in, r.head),
                  kHeadDim * kHeadDim * static_cast<uint32_t>(element_size(args.initial.type)));
    }
    return;
  }
}

// Opens the producer's next item, if there is one.
template <typename Traits>
__device__ __forceinline__ void open_next_item(const KernelArgs& p, QueueProducer& producer) {
  if (Traits::kStateOnly || p.list != nullptr) {
    open_planned_item<Traits>(p, producer);
  } else {
    open_item<Traits>(p, producer);
  }
}

// What an item's first chunk hands on to the next.
inline constexpr int kFlagsOfTile = kNoValues | kToTransition | kCountedReader;

// Starts of chunks ahead that are looked at together for states that are kept there (Args::start_lists): one to a lane.
// At the last of them a chunk ends as if one were, so that the next are looked at.
inline constexpr int32_t kStartsAhead = 32;

// ChunkEnd::kept of a chunk that starts with token `row`, `inside` tokens after the start of its sequence's chunk
// `position`, in an item that has `tokens` from there on. Of listed tokens and of starts only every `step`th from
// `first` on is looked at.
template <typename Traits>
__device__ __forceinline__ int32_t tokens_to_checkpoint(const Args& args, int32_t row, int32_t position, int32_t inside,
                                                        int32_t tokens, int32_t first, int32_t step) {
  int64_t least = kNoCheckpoint;
  if (args.checkpoints != nullptr) {
    least = int64_t{args.checkpoint_every_chunks - position % args.checkpoint_every_chunks} * kChunk - inside;
  }
#pragma unroll 4
  for (int32_t i = first; i < args.num_listed; i += step) {
    const int32_t after = listed_tokens<Traits>()[i].token - row;
    if (after > 0) least = min(least, int64_t{after});
  }
  if (args.start_lists != nullptr) {
#pragma unroll 4
    for (int32_t i = first; i < kStartsAhead; i += step) {
      const int32_t after = (i + 1) * kChunk - inside;
      if (after < tokens && (i == kStartsAhead - 1 || args.start_lists[row + after] >= 0)) {
        least = min(least, int64_t{after});
      }
    }
  }
  return least <= tokens ? static_cast<int32_t>(least) : kNoCheckpoint;
}

// Takes `valid` tokens off, of `tokens` that the item has, and says what flags their chunk has from that.
// find_checkpoint(): the next ChunkEnd::kept, asked where it has to be found.
template <typename FindKept>
__device__ __forceinline__ int32_t end_chunk(ChunkEnd& end, int32_t valid, int32_t tokens, FindKept find_checkpoint) {
  int32_t flags = (end.inside != 0 ? kStartsInsideChunk : 0) | (tokens >= kChunk ? kRowsFollow : 0);
  end.inside = (end.inside + valid) % kChunk;
  end.kept -= valid;
  if (end.kept == 0) {
    flags |= end.inside == 0 ? kCheckpointChunk | kEndsWholeChunk : kCheckpointChunk;
    end.kept = find_checkpoint();
  }
  return flags;
}

// The descriptor of the next chunk.
template <typename Traits>
__device__ __forceinline__ void produce_chunk(const KernelArgs& p, QueueProducer& producer,
                                              ChunkDescriptor& descriptor) {
  if (producer.remaining < 0) open_next_item<Traits>(p, producer);
  if (producer.remaining < 0) {
    descriptor.valid = -1;
    return;
  }
  ChunkDescriptor r = producer.next;
  r.valid = min(producer.remaining, kChunk);
  if constexpr (Traits::kEndsAtCheckpoints) {
    const auto find_checkpoint = [&](int32_t row, int32_t position, int32_t tokens) {
      return tokens_to_checkpoint<Traits>(p.args, row, position, producer.end.inside, tokens, 0, 1);
    };
    if (r.flags & kFirstChunk) {
      producer.end.inside = 0;
      producer.end.kept = find_checkpoint(r.row, r.position, producer.remaining);
    }
    r.valid = min(r.valid, min(kChunk - producer.end.inside, producer.end.kept));
    r.flags |= end_chunk(producer.end, r.valid, producer.remaining, [&] {
      return find_checkpoint(r.row + r.valid, r.position + (producer.end.inside == 0), producer.remaining - r.valid);
    });
  }
  producer.remaining -= r.valid;
  if (producer.remaining == 0) {
    r.flags |= kLastChunk;
    producer.remaining = -1;
  }
  if (producer.warmup > 0) {
    r.flags |= kWarmupChunk;
    --producer.warmup;
  }
  descriptor = r;
  producer.next.flags = r.flags & kFlagsOfTile;
  if constexpr (Traits::kEndsAtCheckpoints) {
    producer.next.row = r.row + r.valid;
    producer.next.chunk = r.chunk + (producer.end.inside == 0);
    producer.next.position = r.position + (producer.end.inside == 0);
  } else {
    producer.next.row = r.row + kChunk;
    producer.next.chunk = r.chunk + 1;
    producer.next.position = r.position + 1;
  }
}

// ... of chunk m, in the ring, by the producer in shared memory.
template <typename Traits>
__device__ __forceinline__ void produce_chunk(const KernelArgs& p, uint32_t m) {
  produce_chunk<Traits>(
      p, *reinterpret_cast<QueueProducer*>(shared_memory() + Traits::kSmemProducer),
      reinterpret_cast<ChunkDescriptor*>(shared_memory() + Traits::kSmemDescriptors)[m % Traits::kDescriptorRing]);
}

// What the first chunk of a block's item takes, into L2, by one warp, while the kernels before this one may still run.
// Nothing is kept of it: should they write the offsets or anything else of the call, what was read here is only a wrong
// guess of a place, within the tensors. With a plan the item is not known yet.
template <typename Traits>
__device__ __forceinline__ void prefetch_first_chunk(const KernelArgs& p, int lane) {
  if (p.list != nullptr || p.plan != nullptr) return;
  const Args& args = p.args;
  const int32_t item = static_cast<int32_t>(blockIdx.x) / Traits::kClusterCtas;
  const int32_t part = static_cast<int32_t>(blockIdx.x) % Traits::kClusterCtas;  // of V, and of the chunks' preparation
  const int32_t place = item / args.num_value_heads, head = item - place * args.num_value_heads;
  const bool sorted = p.order == SequenceOrder::kSorted;
  int32_t sequence = sorted ? min(lane, args.num_sequences - 1) : place;
  SequenceSpan s = args.cu_seqlens != nullptr
                       ? sequence_at(args, sequence)
                       : SequenceSpan{sequence * static_cast<int32_t>(args.dense_length), 1, sequence, 0};
  if (sorted) {
    const int32_t rank = sorted_rank(s, args.num_sequences, lane);
    sequence = __ffs(__ballot_sync(0xffffffffu, lane < args.num_sequences && rank == place)) - 1;
    s.start = __shfl_sync(0xffffffffu, s.start, sequence);
  }
  const int32_t row = s.start;
  if (sequence < 0 || row >= args.num_tokens) return;
  if (lane == 0) {
    const int32_t key_head = head / (args.num_value_heads / args.num_key_heads);
    tma_prefetch_4d(&p.k, 0, row + part * kChunk, 0, key_head);
    tma_prefetch_4d(&p.q, 0, row + part * kChunk, 0, key_head);
    if (part < 2) tma_prefetch_4d(&p.v, 0, row, part, head);
    const auto prefetch_state = [&](int64_t slot) {
      l2_prefetch(state_matrix(args.initial, slot, head),
                  kHeadDim * kHeadDim * static_cast<uint32_t>(element_size(args.initial.type)));
    };
    if constexpr (Traits::kEndsAtCheckpoints) {
      if (const int64_t slot = initial_slot<true>(args, sequence); slot >= 0) prefetch_state(slot);
    } else {
      if (args.initial.data != nullptr && args.initial.indices == nullptr && part == 0) prefetch_state(sequence);
    }
  }
#pragma unroll 1
  for (int64_t token = row + lane; token < min(int64_t{row} + kChunk, args.num_tokens); token += 32) {
    if (args.g != nullptr) l2_prefetch_line(args.g + token * args.g_token_stride + head * args.g_head_stride);
    if (args.beta != nullptr)
      l2_prefetch_line(args.beta + token * args.beta_token_stride + head * args.beta_head_stride);
  }
}

// Descriptors that are there before the first chunk. Descriptor m + 5 follows the gates of chunk m: whoever has seen P
// of chunk m, or its end, sees descriptor m + 4.
inline constexpr uint32_t kFirstDescriptors = 5;

// The plan, not the end of the kernel that makes it, which comes a microsecond later: by one warp. The
// kernels after this one start after that. Who has to wait takes a ticket meanwhile, which lane 0 gets; else -1.
__device__ __forceinline__ int32_t wait_for_plan(const KernelArgs& p, int lane) {
  int32_t early = -1;
  if (lane == 0) {
    if (load_acquire(&p.counters->made) != 1) {
      early = static_cast<int32_t>(atomicAdd(&p.tickets->ticket, 1u));
      while (load_acquire(&p.counters->made) != 1) {
      }
    }
    fence_proxy_async_all();  // the copy engine's reads come after it as well
  }
  __syncwarp();
  return early;
}

// ... by one warp.
template <typename Traits>
__device__ __forceinline__ void queue_first_chunks(const KernelArgs& p, int lane) {
  const Args& args = p.args;
  int32_t early = -1;
  if (p.list != nullptr) {
    early = wait_for_plan(p, lane);
    launch_dependents();
  }
  const bool sorted = p.order == SequenceOrder::kSorted, finds = p.order != SequenceOrder::kGiven;
  const int32_t rank =
      static_cast<int32_t>(blockIdx.x) / Traits::kClusterCtas / args.num_value_heads;  // of the first item
  const int32_t mine = sorted ? min(lane, args.num_sequences - 1) : rank;
  SequenceSpan s{};
  if (finds) s = sequence_at(args, mine);
  // Where blocks find their sequences, the list is made while the kernels before this one may still run, of offsets
  // that they might write, and once more if they have.
  bool waits = p.list == nullptr;
#pragma unroll 1
  while (true) {
    // A ticket is taken once, and is zero when the kernel before this one has ended: the first descriptors must need
    // none.
    bool guesses = finds && waits;
    if (finds) {
      const int32_t place = sorted ? sorted_rank(s, args.num_sequences, lane) : 0;
      if (lane < (sorted ? args.num_sequences : 1)) found_sequences<Traits>()[place] = s;
      __syncwarp();
      if (sorted && p.ticket == nullptr) assign_items<Traits>(p, lane);
      if (p.ticket != nullptr) {
        guesses &= found_sequences<Traits>()[rank].length > static_cast<int32_t>(kFirstDescriptors - 1) * kChunk;
      }
      // Slots are looked at again where they are at hand. They may skip a block's first item, which takes a ticket
      // then.
      if constexpr (Traits::kEndsAtCheckpoints) {
        guesses &= ((sorted && p.ticket == nullptr) || !has_slots(args)) && args.start_lists == nullptr;
      }
    }
    if (guesses || !waits) {
      if constexpr (Traits::kEndsAtCheckpoints) fetch_listed_and_slots<Traits>(p, lane);
      if (lane == 0) {
        QueueProducer producer;  // in registers for as long as it goes on at once
        open_queue<Traits>(p, producer);
        if (p.list != nullptr) producer.item = early;
#pragma unroll 1
        for (uint32_t m = 0; m < kFirstDescriptors; ++m) {
          produce_chunk<Traits>(p, producer,
                                reinterpret_cast<ChunkDescriptor*>(shared_memory() + Traits::kSmemDescriptors)[m]);
        }
        *reinterpret_cast<QueueProducer*>(shared_memory() + Traits::kSmemProducer) = producer;
      }
      if (!waits) return;
      __syncwarp();
    }
    wait_for_predecessors();
    if (p.followed != 0) launch_dependents();
    waits = false;
    if (finds) {
      const SequenceSpan now = sequence_at(args, mine);
      if constexpr (Traits::kEndsAtCheckpoints) guesses = guesses && listed_and_slots_stay<Traits>(p, lane);
      if (guesses && __all_sync(0xffffffffu, now.start == s.start && now.length == s.length)) return;
      s = now;
    }
  }
}

}  // namespace flash_qla::cuda::sm90::fwd
