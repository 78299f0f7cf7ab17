// Path "sm90", chunked forward: K = V = 128 in bf16 and fp16 on Hopper.
#include "cuda/paths.h"
#include "cuda/sm90/chunk_fwd/call.h"
#include "cuda/sm90/common/tensor_map.h"

namespace flash_qla {
namespace cuda::sm90::fwd {
namespace {

using Arguments = flash_qla_forward_arguments;

std::string reject(const Arguments& args, const Problem& p) {
  if (p.K != kHeadDim || p.V != kHeadDim) return "needs K = V = 128";
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) return "needs bf16 or fp16";
  // Tokens, tiles and chunk numbers are 32-bit, head numbers 16-bit.
  constexpr int64_t kMost = INT32_MAX;
  if (p.B * p.T > kMost || p.N * p.Hv > kMost / 4 || p.chunk_bound > kMost || p.Hv > INT16_MAX) {
    return "needs fewer than 2^31 tokens and chunks, 2^29 sequences times value heads, and 2^15 heads";
  }
  // A copy brings offsets together that are apart (cudaMemcpy2DAsync), if each has a place of its own.
  if (p.varlen && p.N > 0 && args.cu_seqlens.stride[0] <= 0) return "needs cu_seqlens with a positive stride";
  for (const Tensor* t : {&args.g_cumsum, &args.A, &args.checkpoints}) {
    if (present(*t) && !contiguous(*t)) return "needs g_cumsum, A and checkpoints contiguous and on 16-byte boundaries";
  }
  if (present(args.state_pool) && !takes_states(args.state_pool)) return "needs pool slots on 16-byte boundaries";
  if (present(args.checkpoint_offsets) && args.checkpoint_offsets.shape[0] * p.Hv > kMost / 64) {
    return "needs fewer than 2^25 listed tokens times value heads";
  }
  if (!is_hopper(args.options.device_index)) return "needs a GPU of compute capability 9.0";
  return {};
}

}  // namespace
}  // namespace cuda::sm90::fwd

using cuda::run_call, cuda::workspace_bytes, cuda::sm90::fwd::Call;
const ForwardPath kSm90ChunkForward = {
    "sm90", FLASH_QLA_CUDA, false, cuda::sm90::fwd::reject, workspace_bytes<Call>, run_call<Call>, Call::notes};

}  // namespace flash_qla
