// dbeta and dg of a sequence's last tokens once more, in fp32, where they are those of a few tokens
// (common/few_tokens.h): a final state's gradient reaches few tokens where gates are strong, and outweighs all else in
// them. Each of their dbeta is then one inner product, and each dg may be less than what sums of larger terms leave
// when these cancel.
//
// The tokens are at most two chunks and end with the sequence. S0 is the state before them, H the final state's
// gradient, G_ji = e^(c_j - c_i). With A_ji = scale G_ji (q_j k_i) for i <= j, B_ji = G_ji (k_j k_i) for i < j,
//   x_j = gamma_j S0^T k_j + sum over i < j of B_ji u_i        e = v - x, u = beta e
//   y_j = scale gamma_j S0^T q_j + sum over i < j of A_ji u_i
//   h_i = gC / gamma_i H^T k_i
//   z_i = sum over j > i of A_ji dO_j - B_ji dv_j              du = h + z + A_ii dO_i, dv = beta du
// it is dbeta = <du, e> and
//   dg_t = gC <H, S0> + sum over j >= t of <dO_j, y_j> - <dv_j, x_j> - <u_j, z_j> + sum over j < t of <u_j, h_j>
// in which nothing cancels but by its own: a token's product with itself is in no sum.
#pragma once

#include "cuda/common/few_tokens.h"
#include "cuda/common/gates.cuh"

namespace flash_qla::cuda {

// States before chunks, in 16 bits: [chunks, Hv, value blocks, key blocks] 8x8 blocks whose rows are value columns.
struct ChunkStates {
  const uint16_t* data;
  int32_t value_blocks, key_blocks;
};

struct LastTokensParams {
  SequenceTable sequences;
  DeviceTensor q, k;    // [B, T, Hq, K], divided by their norms where they are to be
  DeviceTensor v, d_o;  // [B, T, Hv, V]; d_o absent: zero
  Gates gates;
  DeviceStates initial_state;   // [N, Hv, K, V]; absent: zero
  DeviceStates dht;             // [N, Hv, K, V]; absent: zero
  ChunkStates states;           // read where a sequence has tokens before its last two chunks
  float* scratch;               // last_tokens_scratch()
  float *d_log_decay, *d_beta;  // [B * T, Hv], those of the tokens are replaced
  float scale;
  int32_t K, V, Hv, group, type;  // type: a DType, of the states
  int32_t exact_short;            // sequences of no more tokens than that are looked at as a whole
};
static_assert(std::is_trivially_copyable_v<LastTokensParams>);

// Whether a call may have such tokens at all.
bool has_last_tokens(const Problem& p, const Tensor& dht);
// Elements of float.
int64_t last_tokens_scratch(const Problem& p);
Status launch_last_tokens(const Problem& p, const LastTokensParams& params, cudaStream_t stream);

}  // namespace flash_qla::cuda
