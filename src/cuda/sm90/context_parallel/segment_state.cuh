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
// beginning after the planner's, which has an SM that comes late. The plan must be there.
__device__ __forceinline__ bool has_tpc(const KernelArgs& p, uint32_t items) {
  const uint32_t all = (gridDim.x + 2) / 2;  // there is a block to each SM but one
  const uint32_t own = tpc(), planner = p.counters->planner_tpc;
  const uint32_t place = own > planner ? own - planner : all + own - planner;
  return place <= (items + 1) / 2;
}

// Other blocks let those that have a TPC take the items, and take what is left, if anything is, after some
// microseconds.
__device__ __forceinline__ void leave_items_to_whole_tpcs(const KernelArgs& p) {
  const uint32_t items = static_cast<uint32_t>(p.sizes->items);
  if (has_tpc(p, items)) return;
  constexpr int kLooks = 6;  // each is most of a microsecond
#pragma unroll 1
  for (int i = 0; i < kLooks && load_now(&p.tickets->ticket) < items; ++i) {
  }
}

// Before anything else, by one thread: whether the plan is there and has no state to be made, as where all have been
// carried. The first block always stays: a kernel must not end before those it depends on, and it waits for them.
__device__ __forceinline__ bool leaves_at_once(const KernelArgs& p) {
  uint32_t made = load_acquire(&p.counters->made);
  while (p.carried != 0 && made != 1) made = load_acquire(&p.counters->made);
  return made == 1 && p.sizes->items == 0 && blockIdx.x != 0;
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
  // The plan, not the end of the kernel that makes it, which comes a microsecond later.
  while (load_acquire(&p.counters->made) != 1) {
  }
  launch_dependents();
  fence_proxy_async_all();
  leave_items_to_whole_tpcs(p);
  // Concurrently with the warm-up chunk, whose producer and descriptors are the queue's own; else there at once.
  const bool beside = !mbarrier_test(smem() + Traits::kReset, 0);
  QueueProducer& producer = beside ? found.producer : queue_producer<Traits>();
  ChunkDescriptor* const descriptors = beside ? found.descriptors : queue_descriptors<Traits>();
  open_queue<Traits>(p, producer);
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
    if (threadIdx.x == 0) wait_for_predecessors();
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
