// Where the items of a block come from: its number, tickets, a share that it works out itself, or a plan.
#pragma once

#include <cstdint>

#include "cuda/common/tma.cuh"
#include "cuda/sm90/chunk_fwd/chunk_descriptor.cuh"
#include "cuda/sm90/chunk_fwd/sequences.cuh"
#include "cuda/sm90/chunk_fwd/traits.h"
#include "cuda/sm90/common/device.cuh"

namespace flash_qla::cuda::sm90::fwd {

using cp::kItemFromCutState, cp::kItemFromStart, cp::kItemToEnd, cp::kItemTransition, cp::Progress;

// What kernels whose chunks end at checkpoints have in shared memory, so that neither the warp that opens items nor the
// state groups at a listed token, wait for memory: of each listed token position and slot, and of each sequence of
// kSorted the slots.
struct ListedToken {
  int32_t token, slot;  // the state after the tokens before `token`; 0: none. kNoSlot: it is not wanted
};
struct FoundSlots {
  int32_t in, out;  // initial_slot(), resolve_slot() of the final states
};
static_assert(sizeof(ListedToken) == 8 && sizeof(FoundSlots) == 8);
template <typename Traits>
__device__ __forceinline__ ListedToken* listed_tokens() {
  return reinterpret_cast<ListedToken*>(shared_memory() + Traits::kSmemListed);
}
template <typename Traits>
__device__ __forceinline__ FoundSlots* found_slots() {
  return reinterpret_cast<FoundSlots*>(shared_memory() + Traits::kSmemSlots);
}
__device__ __forceinline__ ListedToken read_listed(const Args& args, int32_t i) {
  const int64_t token =
      load_index<true>(args.listed_offsets, args.listed_offsets_are_64_bit, i * args.listed_offsets_stride);
  const int64_t slot = load_index<true>(args.listed_slots, args.listed_slots_are_64_bit, i * args.listed_slots_stride);
  return {token > 0 && token <= args.num_tokens ? static_cast<int32_t>(token) : 0,
          static_cast<int32_t>(usable_slot(args.final_state, slot))};
}
__device__ __forceinline__ FoundSlots read_slots(const Args& args, int32_t sequence) {
  return {static_cast<int32_t>(initial_slot<true>(args, sequence)),
          static_cast<int32_t>(resolve_slot<true>(args.final_state, sequence))};
}
// By one warp.
template <typename Traits>
__device__ __forceinline__ void fetch_listed_and_slots(const KernelArgs& p, int lane) {
  const Args& args = p.args;
#pragma unroll 1
  for (int32_t i = lane; i < args.num_listed; i += 32) listed_tokens<Traits>()[i] = read_listed(args, i);
  if (p.order == SequenceOrder::kSorted && lane < args.num_sequences)
    found_slots<Traits>()[lane] = read_slots(args, lane);
  __syncwarp();
}
// Whether they are still what fetch_listed_and_slots() has found.
template <typename Traits>
__device__ __forceinline__ bool listed_and_slots_stay(const KernelArgs& p, int lane) {
  const Args& args = p.args;
  bool same = true;
#pragma unroll 1
  for (int32_t i = lane; i < args.num_listed; i += 32) {
    const ListedToken now = read_listed(args, i), then = listed_tokens<Traits>()[i];
    same &= now.token == then.token && now.slot == then.slot;
  }
  if (p.order == SequenceOrder::kSorted && lane < args.num_sequences) {
    const FoundSlots now = read_slots(args, lane), then = found_slots<Traits>()[lane];
    same &= now.in == then.in && now.out == then.out;
  }
  return __all_sync(0xffffffffu, same);
}

template <typename Traits>
__device__ __forceinline__ int64_t final_slot_of(const KernelArgs& p, int32_t sequence) {
  if constexpr (Traits::kEndsAtCheckpoints) {
    if (p.order == SequenceOrder::kSorted) return found_slots<Traits>()[sequence].out;
  }
  return resolve_slot(p.args.final_state, sequence);
}
template <typename Traits>
__device__ __forceinline__ int64_t initial_slot_of(const KernelArgs& p, int32_t sequence) {
  if constexpr (Traits::kEndsAtCheckpoints) {
    if (p.order == SequenceOrder::kSorted) return found_slots<Traits>()[sequence].in;
  }
  return initial_slot(p.args, sequence);
}

// Whether blocks may sort their sequences by themselves.
template <typename Traits>
inline constexpr bool kMaySort = Traits::kClusterCtas == 1 && !Traits::kStateOnly;

// Of up to kMostSorted sequences, one to a lane, the lane's place: longest first, by chunks, equal ones in their order.
__device__ __forceinline__ int32_t sorted_rank(const SequenceSpan& s, int32_t sequences, int lane) {
  const int32_t chunks = (s.length + kChunk - 1) / kChunk;
  int32_t rank = 0;
#pragma unroll 1
  for (int32_t i = 0; i < sequences; ++i) {
    const int32_t other = __shfl_sync(0xffffffffu, chunks, i);
    rank += other > chunks || (other == chunks && i < lane);
  }
  return rank;
}

// The sequences that the block has found itself: kSorted: all, in their order; kOneItem: that of its item.
template <typename Traits>
__device__ __forceinline__ SequenceSpan* found_sequences() {
  return reinterpret_cast<SequenceSpan*>(shared_memory() + Traits::kSmemSequences);
}
template <typename Traits>
__device__ __forceinline__ SequenceSpan sequence_of_rank(const KernelArgs& p, int32_t rank) {
  if constexpr (kMaySort<Traits>) {
    if (p.order != SequenceOrder::kGiven)
      return found_sequences<Traits>()[p.order == SequenceOrder::kSorted ? rank : 0];
  }
  return p.plan != nullptr ? p.plan[rank] : sequence_at(p.args, rank);
}

// The items of a block that deals, after its first.
struct AssignedItems {
  int32_t count;
  uint16_t items[kMostAssigned];
};
static_assert(sizeof(AssignedItems) == 4 + 2 * kMostAssigned);
template <typename Traits>
__device__ __forceinline__ AssignedItems& assigned_items() {
  return *reinterpret_cast<AssignedItems*>(shared_memory() + Traits::kSmemAssigned);
}

// Not inlined: once an item, and so not among what is executed for every chunk.
static __device__ __noinline__ int32_t take_ticket(uint32_t* ticket) {
  return static_cast<int32_t>(atomicAdd(ticket, 1u));
}

// Which item a block takes after `item`, of which it has opened `opened` after its first. A ticket is taken when its
// item is opened, not before: a block would hold an item back that others have time for.
template <typename Traits>
__device__ __forceinline__ int32_t next_item(const KernelArgs& p, int32_t item, int32_t opened, int32_t queues) {
  if (p.ticket != nullptr) return queues + take_ticket(p.ticket);
  if constexpr (kMaySort<Traits>) {
    if (p.order == SequenceOrder::kSorted) {
      const AssignedItems& assigned = assigned_items<Traits>();
      return opened < assigned.count ? assigned.items[opened] : p.items;
    }
  }
  return item + queues;
}

// What an item of a sequence takes, in chunks: its first and last state take about as long as two. Sums of
// kMostAssigned, and five bits beside them, fit 32 bits; longer sequences than this are dealt as if they were as long.
__device__ __forceinline__ uint32_t item_cost(const SequenceSpan& s) {
  return static_cast<uint32_t>(min((s.length + kChunk - 1) / kChunk, 1 << 19)) + 2;
}

// Deals the items of sorted sequences by one warp, the same in every block: each to the block that has least to do so
// far, longest first, as tickets would do it; they need a kernel before this one. Blocks that have as much to do are a
// group, whose first, number, load and items a lane keeps: in the beginning those of a sequence, and a sequence's end
// splits one.
template <typename Traits>
__device__ __forceinline__ void assign_items(const KernelArgs& p, int lane) {
  const SequenceSpan* sequences = found_sequences<Traits>();
  AssignedItems& assigned = assigned_items<Traits>();
  const int32_t heads = p.args.num_value_heads, queues = static_cast<int32_t>(gridDim.x);
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  int32_t begin = lane * heads, blocks = 0, items = 0, count = 0;
  uint32_t load = 0;
  if (lane < p.args.num_sequences) {
    blocks = min(max(queues - begin, 0), heads);
    load = item_cost(sequences[lane]);
  }
#pragma unroll 1
  for (int32_t item = queues; item < p.items;) {
    const int32_t rank = item / heads, end = min((rank + 1) * heads, p.items);
    const uint32_t cost = item_cost(sequences[rank]);
#pragma unroll 1
    while (item < end) {
      const uint32_t place = blocks > 0 && items < kMostAssigned ? load << 5 | static_cast<uint32_t>(lane) : ~0u;
      const int least = static_cast<int>(__reduce_min_sync(0xffffffffu, place) & 31);
      const int32_t first = __shfl_sync(0xffffffffu, begin, least), have = __shfl_sync(0xffffffffu, blocks, least);
      const int32_t taken = min(have, end - item);
      if (block >= first && block < first + taken) {
        if (lane == 0) assigned.items[count] = static_cast<uint16_t>(item + block - first);
        ++count;
      }
      if (taken < have) {
        const int rest = __ffs(__ballot_sync(0xffffffffu, blocks == 0)) - 1;
        const uint32_t their_load = __shfl_sync(0xffffffffu, load, least);
        const int32_t their_tiles = __shfl_sync(0xffffffffu, items, least);
        if (lane == rest) begin = first + taken, blocks = have - taken, load = their_load, items = their_tiles;
        if (lane == least) blocks = taken;
      }
      if (lane == least) load += cost, ++items;
      item += taken;
    }
  }
  if (lane == 0) assigned.count = count;
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

}  // namespace flash_qla::cuda::sm90::fwd
