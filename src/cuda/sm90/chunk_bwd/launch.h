// Starting the backward: scratch, tensor maps, kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>

#include "cuda/sm90/chunk_bwd/params.h"

// Leaves the function with the first error. Variadic: template arguments hold commas.
#define FLASH_QLA_RETURN_IF_CUDA_ERROR(...)                                             \
  do {                                                                                  \
    if (const cudaError_t error_ = (__VA_ARGS__); error_ != cudaSuccess) return error_; \
  } while (0)

namespace flash_qla::cuda::sm90 {

// Starts a kernel whose blocks may come before the stream's kernel before it has ended: it calls
// wait_for_predecessors().
template <typename... Parameters, typename... Arguments>
cudaError_t launch_chained(void (*kernel)(Parameters...), unsigned blocks, int threads, uint32_t shared_bytes,
                           cudaStream_t stream, const Arguments&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// Which kernels to start: all of them, but for a benchmark that times each.
struct ChunkBackwardStage {
  bool plan = true, prepare = true, states = true, gradients = true;
};

// Sets params' segment_chunks and fused as is expected to be fastest, from shapes alone. Before the workspace is sized
// and bound; without it (both 0) all works too. may_split false: whole sequences, so that a sequence's bits do not
// depend on what is computed beside it (fused or not, they are the same).
void choose_chunk_backward_plan(ChunkBackwardParams* params, int multiprocessors, bool may_split);

// Bytes of scratch for params' B, T, N, Hv and chunk_bound; a whole A and a whole dv are added
// where the caller has none.
size_t chunk_backward_workspace_size(const ChunkBackwardParams& params, bool has_dv);

// Sets params' scratch pointers; without an A or a dv of the caller's, those too.
void bind_chunk_backward_workspace(ChunkBackwardParams* params, bool has_dv, void* workspace);

// Describes q, d_o [B, T, heads, 128] and params' k, v, dv to the copy engine. bf16 or fp16.
cudaError_t make_chunk_backward_maps(const ChunkBackwardParams& params, const StridedTensor& q,
                                     const StridedTensor& d_o, ChunkBackwardMaps* maps);

// Copies [B, T, heads, 128] of any strides and float type into a tensor that the copy engine takes.
cudaError_t launch_copy_rows(const StridedTensor& from, const StridedTensor& to, int64_t B, int64_t T, int64_t heads,
                             cudaStream_t stream);

// Starts the kernel between the two rounds of passes over segments (combine.cuh).
cudaError_t launch_combine(const ChunkBackwardParams& params, cudaStream_t stream);

// Starts the kernels in the stream. The element type is params.v's.
cudaError_t launch_chunk_backward(const ChunkBackwardParams& params, const ChunkBackwardMaps& maps,
                                  const ChunkBackwardStage& stage, cudaStream_t stream);

// The instantiations, one file each.
cudaError_t launch_chunk_backward_bf16(const ChunkBackwardParams& params, const ChunkBackwardMaps& maps,
                                       const ChunkBackwardStage& stage, cudaStream_t stream);
cudaError_t launch_chunk_backward_fp16(const ChunkBackwardParams& params, const ChunkBackwardMaps& maps,
                                       const ChunkBackwardStage& stage, cudaStream_t stream);

}  // namespace flash_qla::cuda::sm90
