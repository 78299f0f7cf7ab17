// What each source of this folder's instantiations compiles.
#pragma once

#include "cuda/sm80/forward_pass.cuh"
#include "cuda/sm80/gradients.cuh"
#include "cuda/sm80/prepare.cuh"
#include "cuda/sm80/reverse_pass.cuh"
#include "cuda/sm80/scan.cuh"

namespace flash_qla::cuda::sm80 {

template <class T, int kKeys, bool kBackward>
Status launch_prepare(const PrepareParams& params, int64_t blocks, cudaStream_t stream) {
  return launch(kBackward ? "sm80_backward_prepare" : "sm80_prepare", sm80_prepare_kernel<T, kKeys, kBackward>, blocks,
                kPrepareThreads, prepare_shared_bytes<kKeys>(params.A.data != nullptr), stream, params);
}

template <class T, int kKeys, Pass kPass>
Status launch_pass(const PassParams& given, int64_t blocks, cudaStream_t stream) {
  using Tr = std::conditional_t<kPass == Pass::kBackward, ReverseTraits<kKeys>, Traits<kKeys>>;
  PassParams params = given;
  params.stages = Tr::stages(params.strips);
  params.stage_bytes = Tr::stage_bytes(params.strips);
  const auto start = [&](const char* name, void (*kernel)(PassParams)) {
    return launch(name, kernel, blocks, 32 * (params.strips + 1), Tr::shared_bytes(params.strips), stream, params);
  };
  if constexpr (kPass == Pass::kBackward) return start("sm80_passes", sm80_passes_kernel<T, kKeys>);
  if constexpr (kPass == Pass::kOutputs) return start("sm80_forward", sm80_forward_kernel<T, kKeys, true>);
  if constexpr (kPass == Pass::kStates) return start("sm80_states", sm80_forward_kernel<T, kKeys, false>);
}

template <int kKeys>
Status launch_scan(const PassParams& params, int64_t blocks, cudaStream_t stream) {
  return launch("sm80_scan", sm80_scan_kernel<kKeys>, blocks, 2 * kKeys, 0, stream, params);
}

template <class T, int kKeys>
Status launch_gradients(const GradientsParams& params, int64_t blocks, cudaStream_t stream) {
  return launch("sm80_gradients", sm80_gradients_kernel<T, kKeys>, blocks, kGradientsThreads,
                gradients_shared_bytes<kKeys>(), stream, params);
}

template <class T, int kKeys>
inline constexpr Kernels kKernels = {launch_prepare<T, kKeys, false>,
                                     launch_prepare<T, kKeys, true>,
                                     launch_pass<T, kKeys, Pass::kOutputs>,
                                     launch_pass<T, kKeys, Pass::kStates>,
                                     launch_scan<kKeys>,
                                     launch_pass<T, kKeys, Pass::kBackward>,
                                     launch_gradients<T, kKeys>};

template <int kKeys>
const Kernels& kernels_of(DType type) {
  return type == DType::kBFloat16 ? kKernels<__nv_bfloat16, kKeys> : kKernels<__half, kKeys>;
}

}  // namespace flash_qla::cuda::sm80
