// Inputs as the recurrence uses them, and gradients back to the inputs as they were given: what the wrapping options
// (l2 norm, gate activation, beta sigmoid, cumsum) need before and after the core. Real is float, or double for the
// oracle.
#pragma once

#include "cuda/common/gates.cuh"
#include "cuda/common/pool.cuh"

namespace flash_qla::cuda {

// [B, T, Hq, K] -> rows of norm 1 in x's dtype, and where wanted what they were multiplied by, [B * T, Hq]. Statistics
// in Real. out_size: elements of a row of `out` where these are more than K; the others become zero.
template <class Real>
Status launch_normalize(const Problem& p, const DeviceTensor& x, const DeviceTensor& out, float* inverse_norms,
                        cudaStream_t stream, int64_t out_size = 0);

// [B, T, heads, size] float32, bf16 or fp16, into another layout or dtype of them. to_size: elements of a row of `to`
// where these are more than `size`; the others become zero.
Status launch_copy_rows(const Problem& p, int64_t heads, int64_t size, const DeviceTensor& from, const DeviceTensor& to,
                        cudaStream_t stream, int64_t to_size = 0);

// Clamped log decay and beta of every token, [B, T, Hv] Real; a NULL is not wanted.
template <class Real>
Status launch_prepare_gates(const Problem& p, const SequenceTable& sequences, const Gates& gates, Real* log_decay,
                            Real* beta, cudaStream_t stream);

// dx [B, T, Hq, K] from the parts of each value head, [B * T, Hv, K] Real: summed over a group's heads in order,
// chained through the l2 norm of x where `l2norm`, or through that which made x, with `inverse_norm` [B, T, Hq] where
// it is there; rounded once. Tokens outside all sequences get zero.
template <class Real>
Status launch_finish_keys(const Problem& p, const SequenceTable& sequences, const Real* parts, const DeviceTensor& x,
                          bool l2norm, const DeviceTensor& inverse_norm, const DeviceTensor& dx, cudaStream_t stream);

// The same of both dq and dk of a call; without parts nothing is left to do.
template <class Real>
Status finish_keys(const flash_qla_backward_arguments& args, const Problem& p, const SequenceTable& sequences,
                   const Real* dq_parts, const Real* dk_parts, cudaStream_t stream) {
  const auto finish = [&](const Real* parts, const Tensor& x, const Tensor& norm, const Tensor& dx) {
    if (parts == nullptr || !present(dx)) return Status();
    return launch_finish_keys<Real>(p, sequences, parts, device_tensor(x), args.options.use_qk_l2norm_in_kernel != 0,
                                    device_tensor(norm), device_tensor(dx), stream);
  };
  FLASH_QLA_RETURN_IF_ERROR(finish(dq_parts, args.q, args.q_inverse_norm, args.dq));
  return finish(dk_parts, args.k, args.k_inverse_norm, args.dk);
}

// Gradients of g, beta, A_log and dt_bias from those of the log decay and the effective beta, [B * T, Hv] Real.
struct GateGradients {
  DeviceTensor dg, dbeta;         // [B, T, Hv]
  DeviceTensor dA_log, ddt_bias;  // [Hv]
};
// Scratch for the sums over tokens: elements of double.
int64_t gate_sum_scratch(const Problem& p);
template <class Real>
Status launch_finish_gates(const Problem& p, const SequenceTable& sequences, const Gates& gates,
                           const Real* d_log_decay, const Real* d_beta, const GateGradients& out, double* scratch,
                           cudaStream_t stream);

// Zero to the rows [B, T, heads, size] of tokens outside all sequences.
Status launch_zero_outside(const Problem& p, const SequenceTable& sequences, const DeviceTensor& x, int64_t heads,
                           int64_t size, cudaStream_t stream);

// Zero to the rows of h that no chunk has, and to those of skipped rows of the batch.
Status launch_zero_unused_h(const Problem& p, const SequenceTable& sequences, const PoolIndices& pool,
                            const DeviceStates& h, cudaStream_t stream);

}  // namespace flash_qla::cuda
