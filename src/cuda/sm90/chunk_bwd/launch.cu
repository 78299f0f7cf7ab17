#include "cuda/sm90/chunk_bwd/launch.h"

#include <cuda_runtime.h>

#include "cuda/generic/launch.h"
#include "cuda/sm90/chunk_bwd/plan.cuh"
#include "cuda/sm90/chunk_bwd/traits.h"

namespace flash_qla::cuda::sm90 {
namespace {

size_t take_all(ChunkBackwardParams* p, void* base) {
  Workspace workspace(base);
  const int64_t tiles = static_cast<int64_t>(p->chunk_bound) * p->Hv;
  p->chunk_map = workspace.take<ChunkInfo>(p->chunk_bound);
  p->first_slot = workspace.take<int32_t>(p->N);
  p->total_chunks = workspace.take<int32_t>(1);
  p->small_count = workspace.take<int32_t>(1);
  p->small_tiles = workspace.take<int32_t>(tiles);
  p->gates = workspace.take<float>(tiles * kGateVectors * kChunk);
  p->GA = workspace.take<uint8_t>(tiles * kTileBytes);
  p->P = workspace.take<uint8_t>(tiles * kTileBytes);
  p->states = workspace.take<uint8_t>(tiles * kStateBytes);
  p->state_grads = workspace.take<uint8_t>(tiles * kStateBytes);
  p->v_new = workspace.take<uint8_t>(tiles * kTokensBytes);
  return workspace.bytes();
}

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's encoder, found at run time so that the library does not link against the driver.
cudaError_t find_encoder(EncodeTiled* encode) {
  static void* entry = nullptr;
  static const cudaError_t error = [] {
    cudaDriverEntryPointQueryResult found;
    // 12000: the version that introduced it.
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    return status != cudaSuccess ? status : found == cudaDriverEntryPointSuccess ? cudaSuccess : cudaErrorNotSupported;
  }();
  *encode = reinterpret_cast<EncodeTiled>(entry);
  return error;
}

cudaError_t make_map(EncodeTiled encode, const StridedTensor& t, int64_t B, int64_t T, int64_t heads,
                     CUtensorMap* map) {
  const cuuint64_t dims[5] = {64, static_cast<cuuint64_t>(T), 2, static_cast<cuuint64_t>(heads),
                              static_cast<cuuint64_t>(B)};
  // The stride of a dimension of one element means nothing and may be anything: the encoder wants a legal one.
  auto bytes = [](int64_t size, int64_t stride) { return static_cast<cuuint64_t>(size == 1 ? 128 : stride * 2); };
  const cuuint64_t strides[4] = {bytes(T, t.stride[1]), 128, bytes(heads, t.stride[2]), bytes(B, t.stride[0])};
  const cuuint32_t box[5] = {64, kChunk, 1, 1, 1}, steps[5] = {1, 1, 1, 1, 1};
  const CUtensorMapDataType type =
      t.type == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult result =
      encode(map, type, 5, t.data, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

size_t chunk_backward_workspace_size(const ChunkBackwardParams& params) {
  ChunkBackwardParams copy = params;
  return take_all(&copy, nullptr);
}

void bind_chunk_backward_workspace(ChunkBackwardParams* params, void* workspace) { take_all(params, workspace); }

cudaError_t make_chunk_backward_maps(const ChunkBackwardParams& p, const StridedTensor& q, const StridedTensor& d_o,
                                     ChunkBackwardMaps* maps) {
  EncodeTiled encode = nullptr;
  cudaError_t error = find_encoder(&encode);
  if (error == cudaSuccess) error = make_map(encode, q, p.B, p.T, p.Hq, &maps->q);
  if (error == cudaSuccess) error = make_map(encode, p.k, p.B, p.T, p.Hq, &maps->k);
  if (error == cudaSuccess) error = make_map(encode, p.v, p.B, p.T, p.Hv, &maps->v);
  // Without dO its map only has to exist: all its loads lie outside.
  if (error == cudaSuccess) error = make_map(encode, p.has_d_o ? d_o : p.v, p.B, p.T, p.Hv, &maps->d_o);
  if (error == cudaSuccess) error = make_map(encode, p.dv, p.B, p.T, p.Hv, &maps->dv);
  return error;
}

cudaError_t launch_chunk_backward(const ChunkBackwardParams& p, const ChunkBackwardMaps& maps,
                                  const ChunkBackwardStage& stage, cudaStream_t stream) {
  if (stage.plan) {
    FLASH_QLA_RETURN_IF_CUDA_ERROR(launch_chained(
        sm90_chunk_bwd_plan_kernel, p.cu_seqlens == nullptr ? 1 : 1 + kPaddingBlocks, kPlanThreads, 0, stream, p));
  }
  return p.v.type == DType::kBFloat16 ? launch_chunk_backward_bf16(p, maps, stage, stream)
                                      : launch_chunk_backward_fp16(p, maps, stage, stream);
}

}  // namespace flash_qla::cuda::sm90
