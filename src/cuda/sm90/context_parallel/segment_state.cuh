// Context parallelism, the kernel between plan and outputs: last states and transitions of segments, then the states at
// the cuts. Names are those of docs/math.md. It is the forward (chunk_fwd/kernel.cuh) without Q, P and O, so that what
// bounds a chunk is the time that A_g takes, and three producer warpgroups make it in turns.
//
//   state items by ticket -> queue of chunks; all of a chunk is one stage [K, V, A, gates x5]
//     thread 0 of a producer warpgroup   K, V, g, beta -kFull-> stage
//     producer warpgroups 0, 1, 2        every third chunk each: K K^T, inverse, gates -> A_g  -kFullA-> stage
//     state warpgroups 0, 1              S K | A_g W | update of S;  end of a chunk -kDone-
//   after the last item: S' = M S + B along the segments of each exact head (scan.cuh), by the same warps
//
// While the plan is being made all roles go through one dummy chunk, so that their instructions are fetched.
#pragma once

#include "cuda/sm90/context_parallel/scan.cuh"
#include "cuda/sm90/context_parallel/segment_state_roles.cuh"

namespace flash_qla::cuda::sm90::cp {

using fwd::open_queue;

// Of two SMs that share a cache of instructions a block took 3.3 us a chunk in place of 1.7 with another kernel on its
// neighbour, and so do the items that write O concurrently: state items go to as few whole TPCs as hold them,
// beginning after the planner's, which has an SM that comes late.
// TPCs whose blocks come late, as boundaries are classified on them, come last (list_items_kernel()).
__device__ __forceinline__ uint32_t place_of_tpc(const PlanStart* start) {
  return load_now(&start->place[min(tpc(), PlanStart::kTpcs - 1u)]);
}
__device__ __forceinline__ bool has_tpc(uint32_t place, uint32_t tiles) { return place <= (tiles + 1) / 2; }

// A block without a TPC leaves before the plan is there, as soon as the number of items is, while as many blocks stay
// as there are items. The first always stays: a kernel must not end before those it depends on, and it waits for them.
// So does the planner's neighbour, so that the next kernel's instructions do not hold up the planner.
inline constexpr int32_t kLeft = -1;  // QueueProducer::opened of a block that did
__device__ __forceinline__ bool leaves_early(PlanStart* start, uint32_t tiles, uint32_t planner_tpc) {
  return tpc() != planner_tpc && blockIdx.x != 0 && atomicAdd(&start->left, 1u) + tiles < gridDim.x;
}

// Before anything else, by one thread: whether the block leaves. One that is likely to does nothing but wait until the
// number of items is published: instructions that come for the first time, and the warm-up chunk, would hold up the
// kernel after this one.
__device__ __forceinline__ bool leaves_at_once(const KernelArgs& p) {
  const uint32_t likely_items = load_now(&p.start->likely_items);
  const uint32_t place = place_of_tpc(p.start);  // asked for beside it
  if (likely_items == 0 || has_tpc(place, (likely_items - 1) & 0xffff)) return false;
  uint32_t published_items = 0;
  while (published_items == 0 && load_now(&p.counters->made) != 1)
    published_items = load_now(&p.start->published_items);
  // The plan was there before: as all other blocks do, if there is no state to be made, as where all have been carried.
  if (published_items == 0) {
    return load_acquire(&p.counters->made) == 1 && p.sizes->items == 0 && blockIdx.x != 0;
  }
  const uint32_t tiles = (published_items - 1) & 0xffff, planner_tpc = (published_items - 1) >> 16;
  return !has_tpc(place, tiles) && leaves_early(p.start, tiles, planner_tpc);
}

// Other blocks without a TPC let those that have one take the items, and take what is left, if anything is, after some
// microseconds.
__device__ __forceinline__ void leave_items_to_whole_tpcs(const KernelArgs& p) {
  const uint32_t tiles = static_cast<uint32_t>(p.sizes->items);
  if (has_tpc(place_of_tpc(p.start), tiles)) return;
  constexpr int kLooks = 6;  // each is most of a microsecond
#pragma unroll 1
  for (int i = 0; i < kLooks && load_now(&p.tickets->ticket) < tiles; ++i) {
  }
}

// The plan, not the end of the kernel that makes it, which comes a microsecond later. False: the block leaves. early: a
// ticket that the block has taken meanwhile, if it is to have an item; else -1.
__device__ __forceinline__ bool stays_for_plan(const KernelArgs& p, int32_t* early) {
  bool asked = false;
  *early = -1;
  while (load_acquire(&p.counters->made) != 1) {
    const uint32_t published_items = asked ? 0 : load_now(&p.start->published_items);
    const uint32_t place = place_of_tpc(p.start);  // asked for beside it
    if (published_items == 0) continue;
    asked = true;
    const uint32_t tiles = (published_items - 1) & 0xffff, planner_tpc = (published_items - 1) >> 16;
    if (has_tpc(place, tiles)) {
      *early = static_cast<int32_t>(atomicAdd(&p.tickets->ticket, 1u));
    } else if (leaves_early(p.start, tiles, planner_tpc)) {
      return false;
    }
  }
  launch_dependents();
  fence_proxy_async_all();
  return true;
}

// The first chunks of the block's items, and where its producer stands then.
template <typename Traits>
struct FoundChunks {
  QueueProducer producer;
  ChunkDescriptor descriptors[Traits::kStages - 1];
};
template <typename Traits>
__device__ __forceinline__ FoundChunks<Traits>& found_chunks() {
  static_assert(sizeof(FoundChunks<Traits>) <= Traits::kBytesStage);
  return *reinterpret_cast<FoundChunks<Traits>*>(shared_memory() + Traits::kSmemFound);
}
// Opens the second queue, by one thread that the warm-up chunk has no use for: waits for the plan, and finds the first
// chunks, which is three or four reads one after the other, by instructions that come for the first time.
template <typename Traits>
__device__ __forceinline__ void open_second_stream(const KernelArgs& p) {
  FoundChunks<Traits>& found = found_chunks<Traits>();
  int32_t early;
  const bool stays = stays_for_plan(p, &early);
  if (stays && early < 0) leave_items_to_whole_tpcs(p);
  // Concurrently with the warm-up chunk, whose producer and descriptors are the queue's own; else there at once.
  const bool beside = !mbarrier_test(smem() + Traits::kReset, 0);
  QueueProducer& producer = beside ? found.producer : queue_producer<Traits>();
  ChunkDescriptor* const descriptors = beside ? found.descriptors : queue_descriptors<Traits>();
  open_queue<Traits>(p, producer);
  producer.item = early;
  if (!stays) {
    producer.opened = kLeft;
    producer.items = 0;
  }
#pragma unroll 1
  for (uint32_t m = 0; m < Traits::kStages - 1; ++m) produce_chunk<Traits>(p, producer, descriptors[m]);
  if (beside) {
    mbarrier_wait(smem() + Traits::kReset, 0);
    queue_producer<Traits>() = found.producer;
#pragma unroll 1
    for (uint32_t m = 0; m < Traits::kStages - 1; ++m) queue_descriptors<Traits>()[m] = found.descriptors[m];
  }
  // The copy engine takes `found` for chunks, and what it reads comes after the plan.
  fence_proxy_async_all();
  mbarrier_arrive(smem() + Traits::kOpen);
}

// The warm-up of instructions: a single chunk, the first tokens' of the first head, from zero, of which nothing is
// stored.
template <typename Traits>
__device__ __forceinline__ void open_warmup_chunk(const KernelArgs& p) {
  QueueProducer& producer = queue_producer<Traits>();
  producer.items = 0;
  producer.remaining = -1;
  ChunkDescriptor first{};
  // A block that comes when the plan is made, on the planner's SM, goes on at once.
  first.valid = load_now(&p.counters->made) == 1 ? -1 : kChunk;
  first.flags = kFirstChunk;
  first.slot_in = kNoSlot;
  queue_descriptors<Traits>()[0] = first;
  for (uint32_t m = 1; m < Traits::kStages - 1; ++m) queue_descriptors<Traits>()[m].valid = -1;
  mbarrier_arrive(smem() + Traits::kOpen);
}

// Of the second producer warpgroup, whose first chunk the warm-up does not have.
inline constexpr uint32_t kOpeningThread = 128;
// The producer warp that brings transitions: not the one that waits for the kernels before this one.
inline constexpr uint32_t kTransitionWarp = 1;

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    sm90_segment_states_kernel(const __grid_constant__ KernelArgs p) {
  const int group = warpgroup_number<8>();
  const int thread = threadIdx.x % 128;
  // If the next kernel's blocks wait for the plan as well they take the SMs that are left to them at once.
  if (p.followed != 0) launch_dependents();
  if (p.cut != nullptr && *p.cut == 0) {
    // A kernel must not end before those it depends on.
    if (blockIdx.x == 0) wait_for_predecessors();
    return;
  }
  if (__syncthreads_or(threadIdx.x == 0 && leaves_at_once(p))) return;
  if (threadIdx.x == 0) {
    mbarrier_init(smem() + Traits::kWarmedUp, Traits::kThreads / 32 * kWarpArrivals);
    mbarrier_init(smem() + Traits::kOpen, 1);
    mbarrier_init(smem() + Traits::kReset, 1);
    tma_prefetch_map(&p.k);
    tma_prefetch_map(&p.v);
  }
  __syncthreads();

  // Twice: while the plan is being made, a chunk without any consequences is gone through, for the sake of the
  // instructions, which each role else waits for in its first chunk.
  if (group < Traits::kProducerGroups) {
    release_registers<Traits::kProducerRegisters>();
#pragma unroll 1
    for (bool warming_up = true;; warming_up = false) {
      if (threadIdx.x == 0) {
        if (!warming_up) mbarrier_wait(smem() + Traits::kWarmedUp, 0);
        reset_stream<Traits>(!warming_up);
        if (warming_up) {
          open_warmup_chunk<Traits>(p);
        } else {
          mbarrier_arrive(smem() + Traits::kReset);
        }
      }
      __syncwarp();
      mbarrier_wait(smem() + Traits::kOpen, warming_up ? 0 : 1);
      ProducerWarpgroup<Traits>{p, static_cast<uint32_t>(group), thread_from_shuffle(thread, thread & 31)}.run();
      if (!warming_up) break;
      __syncwarp();  // all lanes are through with the barriers of the first queue
      mbarrier_arrive_warp(smem() + Traits::kWarmedUp, threadIdx.x % 32);
      if (threadIdx.x == kOpeningThread) open_second_stream<Traits>(p);
      __syncwarp();
    }
    if (threadIdx.x == 0 && opened_items<Traits>() != kLeft) wait_for_predecessors();
    if (threadIdx.x / 32 == kTransitionWarp) scan_cut_states<Traits, true>(p, 0, thread % 32);
  } else {
    claim_registers<Traits::kStateRegisters>();
    const StateWarpgroup<Traits> role{{p, group - Traits::kProducerGroups, FragmentPosition{}}};
#pragma unroll 1
    for (bool warming_up = true;; warming_up = false) {
      mbarrier_wait(smem() + Traits::kOpen, warming_up ? 0 : 1);
      role.run(thread_from_shuffle(thread, thread & 31));
      if (!warming_up) break;
      __syncwarp();  // all lanes are through with the barriers of the first queue
      mbarrier_arrive_warp(smem() + Traits::kWarmedUp, threadIdx.x % 32);
    }
    scan_cut_states<Traits, false>(p, static_cast<int>(threadIdx.x) / 32 - 4 * Traits::kProducerGroups, thread % 32);
  }
}

template <typename Traits>
Kernel describe_kernel() {
  return {reinterpret_cast<const void*>(&sm90_segment_states_kernel<Traits>), Traits::kThreads, Traits::kSmemBytes,
          Traits::kStateGroups, Traits::kClusterCtas};
}

}  // namespace flash_qla::cuda::sm90::cp
