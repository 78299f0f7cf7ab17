// What each source of this folder's instantiations compiles.
#pragma once

#include "cuda/sm80/forward_pass.cuh"
#include "cuda/sm80/launch.h"
#include "cuda/sm80/prepare.cuh"

namespace flash_qla::cuda::sm80 {

template <class T, int kKeys>
Status launch_prepare(const PrepareParams& params, int64_t blocks, cudaStream_t stream) {
  return launch("sm80_prepare", sm80_prepare_kernel<T, kKeys>, blocks, kPrepareThreads,
                prepare_shared_bytes<kKeys>(params.A.data != nullptr), stream, params);
}

template <class T, int kKeys, bool kOutputs>
Status launch_forward(const ForwardParams& given, int64_t blocks, cudaStream_t stream) {
  using Tr = Traits<kKeys>;
  ForwardParams params = given;
  params.stages = Tr::stages(params.strips);
  params.stage_bytes = Tr::stage_bytes(params.strips);
  return launch(kOutputs ? "sm80_forward" : "sm80_states", sm80_forward_kernel<T, kKeys, kOutputs>, blocks,
                32 * (params.strips + 1), static_cast<size_t>(Tr::shared_bytes(params.strips)), stream, params);
}

template <class T, int kKeys>
inline constexpr Kernels kKernels = {launch_prepare<T, kKeys>, launch_forward<T, kKeys, true>,
                                     launch_forward<T, kKeys, false>};

}  // namespace flash_qla::cuda::sm80
