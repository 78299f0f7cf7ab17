// Where the producer warps find a chunk's descriptor and stages, and what they wait for.
#pragma once

#include <cstdint>

#include "cuda/common/mbarrier.cuh"
#include "cuda/sm90/chunk_fwd/chunk_descriptor.cuh"
#include "cuda/sm90/common/device.cuh"

namespace flash_qla::cuda::sm90::fwd {

// Where the producer warps find a chunk's descriptor and stages.
template <typename Traits>
struct ChunkStages {
  // Hides a number from the compiler, so that addresses made from it are recomputed, not kept: registers are short
  // here.
  template <typename Number>
  static __device__ Number opaque(Number value) {
    asm volatile("" : "+r"(value));
    return value;
  }
  __device__ const ChunkDescriptor& descriptor(uint32_t m) const {
    return reinterpret_cast<const ChunkDescriptor*>(shared_memory() +
                                                    Traits::kSmemDescriptors)[m % Traits::kDescriptorRing];
  }
  __device__ uint32_t stage_k(uint32_t m) const {
    return smem() + Traits::kSmemK + m % Traits::kStagesK * Traits::kBytesK;
  }
  __device__ uint32_t stage_q(uint32_t m) const {
    return smem() + Traits::kSmemQ + m % Traits::kStagesQ * Traits::kBytesK;
  }
  __device__ uint32_t stage_v(uint32_t m) const {
    return smem() + Traits::kSmemV + m % Traits::kStagesV * Traits::kBytesV;
  }
};

template <typename Traits>
struct WarpRole : ChunkStages<Traits> {
  using Element = typename Traits::Element;
  using Places = ChunkStages<Traits>;
  using Places::opaque, Places::descriptor, Places::stage_k, Places::stage_q, Places::stage_v;
  const KernelArgs& p;
  int thread;  // of those that share the role

  __device__ int lane() const { return opaque(thread); }  // of a role of one warp
  __device__ uint32_t stage_gate(uint32_t m) const {
    return smem() + Traits::kSmemGate + m % Traits::kStagesGate * Traits::kBytesGate;
  }
  __device__ uint32_t stage_input(uint32_t m) const {
    return smem() + Traits::kSmemInput + m % Traits::kStagesInput * Traits::kBytesInput;
  }
  __device__ uint32_t tile_a(uint32_t m) const {
    return smem() + Traits::kSmemA + m % Traits::kStagesA * Traits::kBytesMatrix;
  }
  __device__ uint32_t full_p(uint32_t m) const { return smem() + Traits::kFullP + 8 * (m & 1); }
  __device__ void wait_done(uint32_t m) const {
    mbarrier_wait(smem() + Traits::kDone + 8 * (m % Traits::kBarriersDone), m / Traits::kBarriersDone & 1);
  }
  __device__ void wait_gates(uint32_t m) const {
    mbarrier_wait(smem() + Traits::kFullGate + 8 * (m % Traits::kStagesGate), m / Traits::kStagesGate & 1);
  }
  __device__ void wait_input(uint32_t m) const {
    mbarrier_wait(smem() + Traits::kFullInput + 8 * (m % Traits::kStagesInput), m / Traits::kStagesInput & 1);
  }
};

}  // namespace flash_qla::cuda::sm90::fwd
