// Path "sm90", backward: K = V = 128 in bf16 and fp16 on Hopper.
#include "cuda/generic/launch.h"
#include "cuda/paths.h"
#include "cuda/sm90/chunk_bwd/launch.h"
#include "cuda/sm90/chunk_bwd/traits.h"

namespace flash_qla {
namespace cuda::sm90 {
namespace {

using Arguments = flash_qla_backward_arguments;

// Rows of 128 elements side by side, every row on a 16-byte boundary, no dimension repeated: what the copy engine
// takes.
bool copy_engine_takes(const Tensor& t) {
  const int last = t.ndim - 1;
  if (t.stride[last] != 1 || reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return false;
  constexpr int64_t kMostStride = int64_t{1} << 39;  // elements: the engine's strides are below 2^40 bytes
  for (int i = 0; i < last; ++i) {
    if (t.shape[i] > 1 && (t.stride[i] % 8 != 0 || t.stride[i] <= 0 || t.stride[i] >= kMostStride)) return false;
  }
  return true;
}

// Pairs of 16-bit elements can be stored as one word.
bool rows_of_pairs(const Tensor& t) {
  if (t.stride[3] != 1 || reinterpret_cast<uintptr_t>(t.data) % 4 != 0) return false;
  for (int i = 0; i < 3; ++i) {
    if (t.shape[i] > 1 && t.stride[i] % 2 != 0) return false;
  }
  return true;
}

bool is_hopper(int device) {
  int major = 0, minor = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9 &&
         minor == 0;
}

bool copies_d_o(const Arguments& args) {
  return present(args.d_o) && (args.d_o.dtype != args.q.dtype || !copy_engine_takes(args.d_o));
}

std::string reject(const Arguments& args, const Problem& p) {
  if (p.K != kDim || p.V != kDim) return "needs K = V = 128";
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) return "needs bf16 or fp16";
  if (args.options.use_qk_l2norm_in_kernel) return "does not normalise q and k in the kernel";
  if (args.options.use_gate_in_kernel) return "does not apply the gate activation in the kernel";
  if (args.options.use_beta_sigmoid_in_kernel) return "does not apply the sigmoid of beta in the kernel";
  if (p.T == 0 || p.N == 0) return "needs tokens and sequences";
  // Coordinates and block numbers are 32-bit.
  constexpr int64_t kMost = int64_t{1} << 31;
  if (p.B * p.T >= kMost || p.chunk_bound * p.Hv >= kMost || 4 * p.N * p.Hv >= kMost) {
    return "needs fewer than 2^31 tokens, chunks times value heads, and sequences times value heads times 4";
  }
  for (const Tensor* t : {&args.q, &args.k, &args.v, &args.A, &args.dv}) {
    if (present(*t) && !copy_engine_takes(*t)) return "needs q, k, v, A and dv in rows of 16-byte boundaries";
  }
  if (present(args.A) && args.A.dtype != args.k.dtype) return "needs A in k's dtype";
  for (const Tensor* t : {&args.dq, &args.dk}) {
    if (present(*t) && !rows_of_pairs(*t)) return "needs dq and dk in rows of 4-byte boundaries";
  }
  for (const Tensor* t : {&args.initial_state, &args.dht, &args.dh0, &args.dg, &args.dbeta}) {
    if (present(*t) && !is_float(dtype(*t))) return "needs states and gate gradients in fp32, bf16 or fp16";
  }
  if (!is_hopper(args.options.device_index)) return "needs a GPU of compute capability 9.0";
  return {};
}

StridedTensor strided(const Tensor& t) {
  StridedTensor s{};
  if (!present(t)) return s;
  s.data = t.data;
  for (int i = 0; i < t.ndim; ++i) s.stride[i] = t.stride[i];
  s.type = dtype(t);
  return s;
}

ChunkBackwardParams make_params(const Arguments& args, const Problem& p) {
  ChunkBackwardParams params{};
  params.B = static_cast<int32_t>(p.B);
  params.T = static_cast<int32_t>(p.T);
  params.N = static_cast<int32_t>(p.N);
  params.Hq = static_cast<int32_t>(p.Hq);
  params.Hv = static_cast<int32_t>(p.Hv);
  params.group = static_cast<int32_t>(p.group);
  params.chunk_bound = static_cast<int32_t>(p.chunk_bound);
  params.per_sequence = p.varlen ? 0 : static_cast<int32_t>(ceil_div(p.T, kChunkSize));
  params.scale = static_cast<float>(p.scale);
  params.g_is_cumsum = args.g_is_cumsum != 0;
  params.state_v_first = args.options.state_v_first != 0;
  params.has_d_o = present(args.d_o);
  if (p.varlen) {
    params.cu_seqlens = args.cu_seqlens.data;
    params.cu_seqlens_64 = dtype(args.cu_seqlens) == DType::kInt64;
    params.cu_seqlens_stride = args.cu_seqlens.stride[0];
  }
  params.g = strided(args.g);
  params.beta = strided(args.beta);
  params.A = strided(args.A);
  params.k = strided(args.k);
  params.v = strided(args.v);
  params.initial_state = strided(args.initial_state);
  params.dht = strided(args.dht);
  params.dq = strided(args.dq);
  params.dk = strided(args.dk);
  params.dv = strided(args.dv);
  params.dg = strided(args.dg);
  params.dbeta = strided(args.dbeta);
  params.dh0 = strided(args.dh0);
  return params;
}

// A contiguous [B, T, Hv, 128] of q's type at `data`.
StridedTensor contiguous_values(const Problem& p, void* data) {
  return {data, {p.T * p.Hv * kDim, p.Hv * kDim, kDim, 1}, p.dtype};
}

size_t workspace_size(const Arguments& args, const Problem& p) {
  Workspace workspace(nullptr);
  if (copies_d_o(args)) workspace.take<uint16_t>(p.B * p.T * p.Hv * kDim);
  return workspace.bytes() + chunk_backward_workspace_size(make_params(args, p), present(args.dv));
}

Status run(const Arguments& args, const Problem& p, void* memory, void* stream_handle) {
  const DeviceGuard guard(args.options.device_index);
  FLASH_QLA_RETURN_IF_ERROR(guard.status());
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  ChunkBackwardParams params = make_params(args, p);
  Workspace workspace(memory);
  StridedTensor d_o = strided(args.d_o);
  if (copies_d_o(args)) {
    const StridedTensor copy = contiguous_values(p, workspace.take<uint16_t>(p.B * p.T * p.Hv * kDim));
    FLASH_QLA_RETURN_IF_ERROR(cuda_status(launch_copy_rows(d_o, copy, p.B, p.T, p.Hv, stream), "copying d_o"));
    d_o = copy;
  }
  bind_chunk_backward_workspace(&params, present(args.dv), static_cast<char*>(memory) + workspace.bytes());
  ChunkBackwardMaps maps;
  FLASH_QLA_RETURN_IF_ERROR(
      cuda_status(make_chunk_backward_maps(params, strided(args.q), d_o, &maps), "describing the tensors"));
  return cuda_status(launch_chunk_backward(params, maps, ChunkBackwardStage{}, stream), "the sm90 chunk backward");
}

}  // namespace
}  // namespace cuda::sm90

// Only by name for now: its kernels have passed their harness on an H200, but this file, which binds them to the C
// interface, has not run on a device. It becomes the first choice when cuda_generic_test's group for it has passed.
const BackwardPath kSm90ChunkBackward = {
    "sm90", FLASH_QLA_CUDA, true, cuda::sm90::reject, cuda::sm90::workspace_size, cuda::sm90::run};

}  // namespace flash_qla
