// The numbered queue of chunks a block works through: where its items come from (its number, tickets, or a plan), and
// their chunks' descriptors in shared memory, filled item by item by one thread.
#pragma once

#include <cstdint>

#include "cuda/common/bulk.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/sm90/chunk_fwd/chunk_descriptor.cuh"
#include "cuda/sm90/chunk_fwd/sequences.cuh"
#include "cuda/sm90/chunk_fwd/traits.h"
#include "cuda/sm90/common/device.cuh"

namespace flash_qla::cuda::sm90::fwd {

using cp::kItemFromCutState, cp::kItemFromStart, cp::kItemToEnd, cp::kItemTransition, cp::Progress;

// What kernels whose chunks end at checkpoints have in shared memory, so that neither the warp that opens items nor the
// state groups at a listed token, wait for memory: of each listed token position and slot.
struct ListedToken {
  int32_t token, slot;  // the state after the tokens before `token`; 0: none. kNoSlot: it is not wanted
};
static_assert(sizeof(ListedToken) == 8);
template <typename Traits>
__device__ __forceinline__ ListedToken* listed_tokens() {
  return reinterpret_cast<ListedToken*>(shared_memory() + Traits::kSmemListed);
}
__device__ __forceinline__ ListedToken read_listed(const Args& args, int32_t i) {
  const int64_t token =
      load_index<true>(args.listed_offsets, args.listed_offsets_are_64_bit, i * args.listed_offsets_stride);
  const int64_t slot = load_index<true>(args.listed_slots, args.listed_slots_are_64_bit, i * args.listed_slots_stride);
  return {token > 0 && token <= args.num_tokens ? static_cast<int32_t>(token) : 0,
          static_cast<int32_t>(usable_slot(args.final_state, slot))};
}
// By one warp.
template <typename Traits>
__device__ __forceinline__ void fetch_listed(const Args& args, int lane) {
#pragma unroll 1
  for (int32_t i = lane; i < args.num_listed; i += 32) listed_tokens<Traits>()[i] = read_listed(args, i);
  __syncwarp();
}
// Whether they are still what fetch_listed() has found.
template <typename Traits>
__device__ __forceinline__ bool listed_stay(const Args& args, int lane) {
  bool same = true;
#pragma unroll 1
  for (int32_t i = lane; i < args.num_listed; i += 32) {
    const ListedToken now = read_listed(args, i), then = listed_tokens<Traits>()[i];
    same &= now.token == then.token && now.slot == then.slot;
  }
  return __all_sync(0xffffffffu, same);
}

// Whether a block that has one item at most finds its sequence by itself, while the kernels before may still run.
template <typename Traits>
inline constexpr bool kFindsSequence = Traits::kClusterCtas == 1 && !Traits::kStateOnly;

// What it has found.
template <typename Traits>
__device__ __forceinline__ SequenceSpan& found_sequence() {
  return *reinterpret_cast<SequenceSpan*>(shared_memory() + Traits::kSmemSequence);
}
template <typename Traits>
__device__ __forceinline__ SequenceSpan sequence_of_rank(const KernelArgs& p, int32_t rank) {
  if constexpr (kFindsSequence<Traits>) {
    if (p.one_item != 0) return found_sequence<Traits>();
  }
  return p.plan != nullptr ? p.plan[rank] : sequence_at(p.args, rank);
}

// Not inlined: once an item, and so not among what is executed for every chunk.
static __device__ __noinline__ int32_t take_ticket(uint32_t* ticket) {
  return static_cast<int32_t>(atomicAdd(ticket, 1u));
}

// Which item a block takes after `item`. A ticket is taken when its item is opened, not before: a block would hold an
// item back that others have time for.
__device__ __forceinline__ int32_t next_item(const KernelArgs& p, int32_t item, int32_t queues) {
  return p.ticket != nullptr ? queues + take_ticket(p.ticket) : item + queues;
}

// Before a block's first item. The plan must be there.
template <typename Traits>
__device__ __forceinline__ void open_queue(const KernelArgs& p, QueueProducer& producer) {
  producer.remaining = -1;
  producer.opened = producer.waits = 0;
  if (p.list != nullptr) {
    producer.item = -1;
    producer.items = Traits::kStateOnly ? 1 : 3;  // see take_planned_item()
  } else {
    producer.item = static_cast<int32_t>(blockIdx.x) / Traits::kClusterCtas;
    producer.items = p.cut != nullptr && *p.cut != 0 ? 0 : p.items;
  }
}

// The next item of a plan's list, or -1 after the last. producer.items: which of its two parts are not given out, 1
// and 2.
template <typename Traits>
__device__ __forceinline__ int32_t take_planned_item(const KernelArgs& p, QueueProducer& producer) {
  // By ticket from the first on, and none in advance: blocks start when others leave them room, and items are few.
  if constexpr (Traits::kStateOnly || (Traits::kSave && !Traits::kEndsAtCheckpoints)) {
    // In the order of the list (with kSave there are no registers left to ask what is ready). Its size is read beside
    // the ticket: one latency, not two.
    const int32_t items = p.sizes->items + p.sizes->dependent_items;
    int32_t item = producer.item;
    producer.item = -1;
    if (item < 0) item = static_cast<int32_t>(atomicAdd(&p.tickets->ticket, 1u));
    if (item < items) return item;
    producer.items = 0;
  } else {
    if (producer.item >= 0) {
      const int32_t item = producer.item;
      producer.item = -1;
      if (item < p.sizes->items) return item;
      producer.items = 2;
    }
    while (producer.items != 0) {
      // Whether the states at cuts are there is asked for the order alone: who reads them waits for them.
      const Progress& progress = p.counters->progress;
      const bool there = load_now(&progress.states_left) + load_now(&progress.slices_left) == 0;
      const uint32_t items = load_now(&p.sizes->items), dependent_items = load_now(&p.sizes->dependent_items);
      const bool dependent =
          producer.items == 2 || (producer.items == 3 && there &&
                                  (p.readers == nullptr || load_now(&p.tickets->ticket) >= progress.first_items));
      // Items are taken chunks ahead of their time. A block that waits leaves the other items that do to blocks that
      // are still to come: where there are as many blocks as such items, none is left over.
      if (producer.waits != 0 && !there && dependent_items <= gridDim.x) {
        producer.items = 0;
        break;
      }
      producer.waits = dependent && !there;
      const uint32_t item = atomicAdd(&p.tickets->ticket + (dependent ? 1 : 0), 1u);
      if (item < (dependent ? dependent_items : items)) return static_cast<int32_t>(dependent ? item + items : item);
      producer.items &= dependent ? ~2 : ~1;
    }
  }
  return -1;
}

// Opens an item of a context parallelism.
template <typename Traits>
__device__ __forceinline__ void open_planned_item(const KernelArgs& p, QueueProducer& producer) {
  const Args& args = p.args;
  while (producer.items != 0) {
    const int32_t item = take_planned_item<Traits>(p, producer);
    if (item < 0) return;
    // By parts, not as a copy: registers are short where this is called.
    const WorkItem& t = p.list[item];
    ChunkDescriptor& r = producer.next;
    r.row = t.row;
    r.sequence = t.sequence;
    r.half = 0;
    r.chunk = t.chunk;
    r.position = t.position;
    r.head = t.head;
    r.key_head = static_cast<int16_t>(r.head / (args.num_value_heads / args.num_key_heads));
    r.slot_in = kNoSlot;
    r.slot_out = -1;
    r.flags = kFirstChunk;
    const int64_t initial = initial_slot(args, r.sequence);
    if (initial == kSkipSequence) continue;
    if (t.flags & kItemFromStart) {
      if (p.readers != nullptr) r.flags |= kCountedReader;
      r.slot_in = initial;
      if (r.slot_in >= 0) {
        l2_prefetch(state_matrix(args.initial, r.slot_in, r.head),
                    kHeadDim * kHeadDim * static_cast<uint32_t>(element_size(args.initial.type)));
      }
    }
    if constexpr (Traits::kStateOnly) {
      r.slot_out = t.slot;
      if (t.flags & kItemTransition) r.flags |= kFromIdentity | kNoValues | kToTransition;
    } else {
      if (t.flags & kItemToEnd) r.slot_out = resolve_slot(args.final_state, r.sequence);
      if (t.tokens <= 0 && r.slot_out < 0) continue;
      if (t.flags & kItemFromCutState) {
        r.slot_in = t.slot;
        r.flags |= kFromCutState;
      }
    }
    producer.remaining = t.tokens;
    producer.warmup = t.warmup;
    if (Traits::kStateOnly && producer.opened == 0) atomicAdd(&p.counters->blocks_running, 1u);
    ++producer.opened;
    return;
  }
}

// Opens the next item that has anything to do.
template <typename Traits>
__device__ __forceinline__ void open_item(const KernelArgs& p, QueueProducer& producer) {
  const Args& args = p.args;
  while (producer.item < producer.items) {
    int32_t item = producer.item;
    const int32_t opened = producer.opened++;
    if (opened > 0) {
      item = next_item(p, item, static_cast<int32_t>(gridDim.x) / Traits::kClusterCtas);
      producer.item = item;
      if (item >= producer.items) return;
    }
    const int32_t rank = item / args.num_value_heads;
    const SequenceSpan sequence = sequence_of_rank<Traits>(p, rank);
    ChunkDescriptor& r = producer.next;
    r.slot_out = resolve_slot(args.final_state, sequence.index);
    if (sequence.length <= 0 && r.slot_out < 0) continue;
    r.slot_in = initial_slot(args, sequence.index);
    if (r.slot_in == kSkipSequence) continue;
    r.row = sequence.start;
    r.flags = kFirstChunk;
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
  const int32_t sequence = item / args.num_value_heads, head = item - sequence * args.num_value_heads;
  const int32_t row = args.cu_seqlens != nullptr ? sequence_at(args, sequence).start
                                                 : sequence * static_cast<int32_t>(args.dense_length);
  if (row >= args.num_tokens) return;
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
  const bool finds = p.one_item != 0;
  const int32_t mine = static_cast<int32_t>(blockIdx.x) / args.num_value_heads;
  SequenceSpan s{};
  if (finds) s = sequence_at(args, mine);
  // Where a block finds its sequence, the list is made while the kernels before this one may still run, of offsets that
  // they might write, and once more if they have.
  bool waits = p.list == nullptr;
#pragma unroll 1
  while (true) {
    bool guesses = finds && waits;
    if (finds) {
      if (lane == 0) found_sequence<Traits>() = s;
      __syncwarp();
      // Slots, and what lists of starts say, are not looked at again.
      if constexpr (Traits::kEndsAtCheckpoints) guesses &= !has_slots(args) && args.start_lists == nullptr;
    }
    if (guesses || !waits) {
      if constexpr (Traits::kEndsAtCheckpoints) fetch_listed<Traits>(args, lane);
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
      if constexpr (Traits::kEndsAtCheckpoints) guesses = guesses && listed_stay<Traits>(args, lane);
      if (guesses && __all_sync(0xffffffffu, now.start == s.start && now.length == s.length)) return;
      s = now;
    }
  }
}

}  // namespace flash_qla::cuda::sm90::fwd
