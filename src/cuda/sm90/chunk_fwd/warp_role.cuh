// Where the producer warps find a chunk's descriptor and stages, and what they wait for.
#pragma once

#include <cstdint>

#include "cuda/common/mbarrier.cuh"
#include "cuda/sm90/chunk_fwd/chunk_descriptor.cuh"
#include "cuda/sm90/common/compiler.cuh"
#include "cuda/sm90/common/device.cuh"

namespace flash_qla::cuda::sm90::fwd {

// Where the producer warps find a chunk's descriptor and stages.
template <typename Traits>
struct ChunkStages {
  __device__ const ChunkDescriptor& descriptor(uint32_t m) const {
    return reinterpret_cast<const ChunkDescriptor*>(shared_memory() +
                                                    Traits::kSmemDescriptors)[m % Traits::kDescriptorRing];
  }
  __device__ uint32_t stage_k(uint32_t m) const { return Traits::TilesK::tile(m); }
  __device__ uint32_t stage_q(uint32_t m) const { return Traits::TilesQ::tile(m); }
  __device__ uint32_t stage_v(uint32_t m) const { return Traits::TilesV::tile(m); }
};

template <typename Traits>
struct WarpRole : ChunkStages<Traits> {
  using Element = typename Traits::Element;
  using Places = ChunkStages<Traits>;
  using Places::descriptor, Places::stage_k, Places::stage_q, Places::stage_v;
  const KernelArgs& p;
  int thread;  // of those that share the role

  __device__ int lane() const { return recompute(thread); }  // of a role of one warp
  __device__ uint32_t stage_gate(uint32_t m) const { return Traits::Gates::tile(m); }
  __device__ uint32_t stage_input(uint32_t m) const { return Traits::Input::tile(m); }
  __device__ uint32_t tile_a(uint32_t m) const { return Traits::TilesA::tile(m); }
  __device__ uint32_t full_p(uint32_t m) const { return Traits::FullP::barrier(m); }
  __device__ void wait_done(uint32_t m) const { Traits::Done::wait(m); }
  __device__ void wait_gates(uint32_t m) const { Traits::FullGate::wait(m); }
  __device__ void wait_input(uint32_t m) const { Traits::FullInput::wait(m); }
};

}  // namespace flash_qla::cuda::sm90::fwd
