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

// The stages of a block's ring; returns its shared memory.
template <class Tr>
size_t set_stages(ForwardParams* params) {
  params->stages = Tr::stages(params->strips);
  params->stage_bytes = Tr::stage_bytes(params->strips);
  return static_cast<size_t>(Tr::shared_bytes(params->strips));
}

template <class T, int kKeys, bool kOutputs>
Status launch_forward(const ForwardParams& given, int64_t blocks, cudaStream_t stream) {
  ForwardParams params = given;
  const size_t bytes = set_stages<Traits<kKeys>>(&params);
  return launch(kOutputs ? "sm80_forward" : "sm80_states", sm80_forward_kernel<T, kKeys, kOutputs>, blocks,
                32 * (params.strips + 1), bytes, stream, params);
}

template <class T, int kKeys>
Status launch_passes(const PassesParams& given, int64_t blocks, cudaStream_t stream) {
  PassesParams params = given;
  const size_t bytes = set_stages<ReverseTraits<kKeys>>(&params.forward);
  return launch("sm80_passes", sm80_passes_kernel<T, kKeys>, blocks, 32 * (params.forward.strips + 1), bytes, stream,
                params);
}

template <int kKeys>
Status launch_scan(const ForwardParams& params, int64_t blocks, cudaStream_t stream) {
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
                                     launch_forward<T, kKeys, true>,
                                     launch_forward<T, kKeys, false>,
                                     launch_scan<kKeys>,
                                     launch_passes<T, kKeys>,
                                     launch_gradients<T, kKeys>};

template <int kKeys>
const Kernels& kernels_of(DType type) {
  return type == DType::kBFloat16 ? kKernels<__nv_bfloat16, kKeys> : kKernels<__half, kKeys>;
}

}  // namespace flash_qla::cuda::sm80
