// Starting the backward: scratch, tensor maps, kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>

#include "cuda/common/launch.h"
#include "cuda/sm90/chunk_bwd/args.h"

// Leaves the function with the first error. Variadic: template arguments hold commas.
#define FLASH_QLA_RETURN_IF_CUDA_ERROR(...)                                             \
  do {                                                                                  \
    if (const cudaError_t error_ = (__VA_ARGS__); error_ != cudaSuccess) return error_; \
  } while (0)

namespace flash_qla::cuda::sm90::bwd {

// Starts a kernel whose blocks may come before the stream's kernel before it has ended: it calls
// wait_for_predecessors(). kCluster blocks at a time see each other's shared memory.
template <unsigned kCluster = 1, typename... Parameters, typename... Arguments>
cudaError_t launch_chained(void (*kernel)(Parameters...), unsigned blocks, int threads, uint32_t shared_bytes,
                           cudaStream_t stream, const Arguments&... args) {
  if (shared_bytes > 0) {
    FLASH_QLA_RETURN_IF_CUDA_ERROR(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
  }
  const LaunchConfig shape(blocks, threads, shared_bytes, stream, true, kCluster);
  return cudaLaunchKernelEx(&shape.config, kernel, args...);
}

// Which kernels to start: all of them, but for a benchmark that times each.
struct Parts {
  bool plan = true, prepare = true, states = true, gradients = true;
};

// Of passes over whole sequences: two passes, halves of V.
inline int64_t states_blocks(const Args& p) { return int64_t{p.whole_values ? 2 : 4} * p.N * p.Hv; }

// The shortest segment that choose_segment_chunks() looks at.
constexpr int32_t kLeastSegmentChunks = 12;

// params' segment_chunks that is expected to be fastest, from shapes alone; 0: whole sequences.
// Set before the workspace is sized; 0 keeps a sequence's bits independent of what is computed beside it.
int32_t choose_segment_chunks(const Args& params, int multiprocessors);

// Bytes of scratch for params' B, T, N, Hv and chunk_bound; a whole A is added where the caller has none.
size_t chunk_backward_workspace_size(const Args& params);

// Sets params' scratch pointers; without an A of the caller's, that too.
void bind_chunk_backward_workspace(Args* params, void* workspace);

// Describes q, d_o [B, T, heads, 128] and params' k, v, dv to the copy engine. bf16 or fp16.
cudaError_t make_chunk_backward_maps(const Args& params, const StridedTensor& q, const StridedTensor& d_o, Maps* maps);

// Start the kernels before the passes over segments and between their two rounds (scan.cuh).
cudaError_t launch_rounds(const Args& params, int multiprocessors, cudaStream_t stream);
cudaError_t launch_scan(const Args& params, const Maps& maps, int multiprocessors, cudaStream_t stream);

// Starts the kernels in the stream. The element type is params.v's.
cudaError_t launch_chunk_backward(const Args& params, const Maps& maps, const Parts& stage, cudaStream_t stream);

// The instantiations, one file each.
cudaError_t launch_chunk_backward_bf16(const Args& params, const Maps& maps, const Parts& stage, int multiprocessors,
                                       cudaStream_t stream);
cudaError_t launch_chunk_backward_fp16(const Args& params, const Maps& maps, const Parts& stage, int multiprocessors,
                                       cudaStream_t stream);

}  // namespace flash_qla::cuda::sm90::bwd
