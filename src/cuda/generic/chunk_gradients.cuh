// Gradients of q, k, the log decays and beta, all chunks beside each other. What is serial has been done by the two
// recurrences, which leave the errors e_t = v_t - S~_t^T k_t, the gradients du_t, and the states and their gradients at
// chunk boundaries. With S0 the state at the chunk's start, D1 the gradient of the state at its end, c the cumsum of
// the log decays, gamma_i = e^{c_i}, G_ij = e^{c_i - c_j}, u = beta e, de = beta du, and rows as vectors:
//     P_ij = G_ij <do_i, u_j>   (j <= i)        R_ij = G_ij <de_i, u_j>   (j < i)
//     dq_i = scale (gamma_i S0 do_i + sum_j P_ij k_j)
//     dk_i = -gamma_i S0 de_i + (gamma_C / gamma_i) D1 u_i + sum_j (scale P_ji q_j - (R_ij + R_ji) k_j)
//     dbeta_i = <du_i, e_i>
// and, each token's decay reaching everything that crosses it, with M_ij = scale <q_i, k_j> P_ij - <k_i, k_j> R_ij,
//     dg_t = sum_{i >= t, j < t} M_ij + sum_{i >= t} gamma_i (scale <q_i, S0 do_i> - <k_i, S0 de_i>)
//            + sum_{j < t} (gamma_C / gamma_j) <k_j, D1 u_j> + gamma_C <S0, D1>
// No term is the small difference of large ones, so strong decay costs no digits.
#pragma once

#include "cuda/generic/recurrence.cuh"

namespace flash_qla::cuda {

struct GradientParams {
  SequenceTable sequences;
  TokenInputs in;               // x is the gradient of o
  DeviceStates initial_state;   // [N, Hv, K, V]; absent: zero
  DeviceStates dht;             // [N, Hv, K, V]; absent: zero
  BoundaryStates states;        // at chunk boundaries inside sequences
  BoundaryStates gradients;     // of those states
  DeviceTensor errors, du;      // [B, T, Hv, V]
  float *dq, *dk;               // [B * T, Hv, K] parts of each value head
  float *d_log_decay, *d_beta;  // [B * T, Hv]
  double scale;
};
static_assert(std::is_trivially_copyable_v<GradientParams>);

Status launch_chunk_gradients(const Problem& p, const GradientParams& params, cudaStream_t stream);

}  // namespace flash_qla::cuda
