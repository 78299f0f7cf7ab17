// Links between ranks' parts, the kernel that makes last states and transitions of segments (link_items.h lists them),
// each a matrix of its own in memory. The roles are those of cuts (segment_state_roles.cuh), without the warm-up of
// instructions and the scan: the plan is there when the kernel begins, and link_chains.cu goes along the segments.
#pragma once

#include "cuda/sm90/context_parallel/segment_state_roles.cuh"

namespace flash_qla::cuda::sm90::links {

using cp::ProducerWarpgroup, cp::StateWarpgroup, cp::reset_stream, cp::queue_descriptors, cp::queue_producer;
using fwd::Kernel, fwd::KernelArgs, fwd::QueueProducer, fwd::produce_chunk;

// No least number of blocks a multiprocessor is asked for: with one ptxas uses as many registers, and serialises the
// products (C7512).
template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads) sm90_link_states_kernel(const __grid_constant__ KernelArgs p) {
  const int group = warpgroup_number<8>();
  const int thread = threadIdx.x % 128;
  if (threadIdx.x == 0) {
    reset_stream<Traits>(false);
    tma_prefetch_map(&p.k);
    tma_prefetch_map(&p.v);
  }
  wait_for_predecessors();
  launch_dependents();
  if (threadIdx.x == 0) {
    QueueProducer producer;
    fwd::open_queue<Traits>(p, producer);
#pragma unroll 1
    for (uint32_t m = 0; m < Traits::kStages - 1; ++m)
      produce_chunk<Traits>(p, producer, queue_descriptors<Traits>()[m]);
    queue_producer<Traits>() = producer;
  }
  __syncthreads();
  if (group < Traits::kProducerGroups) {
    release_registers<Traits::kProducerRegisters>();
    ProducerWarpgroup<Traits>{p, static_cast<uint32_t>(group), thread_from_shuffle(thread, thread & 31)}.run();
  } else {
    claim_registers<Traits::kStateRegisters>();
    StateWarpgroup<Traits>{{p, group - Traits::kProducerGroups, FragmentPosition{}}}.run(
        thread_from_shuffle(thread, thread & 31));
  }
}

template <typename Traits>
Kernel describe_link_kernel() {
  return {reinterpret_cast<const void*>(&sm90_link_states_kernel<Traits>), Traits::kThreads, Traits::kSmemBytes,
          Traits::kStateGroups, Traits::kClusterCtas};
}

}  // namespace flash_qla::cuda::sm90::links
