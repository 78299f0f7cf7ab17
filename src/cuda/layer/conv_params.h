// What the convolution's kernels are given.
#pragma once

#include "core/convolution.h"
#include "cuda/common/device_tensor.cuh"

namespace flash_qla::cuda {

struct ConvPart {
  DeviceTensor x, residual, y;              // [B, T, H, D]
  DeviceTensor weight, bias;                // [H * D, W], [H * D]
  DeviceTensor initial_state, final_state;  // [N or slots, H * D, L]
  DeviceTensor inverse_norm;                // [B, T, H]
  int64_t channel;                          // the first one, among those of all parts
  int32_t heads, dim, l2norm;
};

// Where sequences lie and where their states come from and go to. Offsets and indices are device memory that may hold
// anything: whatever is read from them is clamped or skipped.
struct ConvSequences {
  DeviceTensor cu_seqlens;                              // [N + 1]; absent: N = B rows of T tokens
  DeviceTensor seq_idx;                                 // [B, T]
  DeviceTensor initial, final, has;                     // [N]; `initial` absent: states are [N, ..]
  DeviceTensor accepted, ring;                          // [N]
  DeviceTensor checkpoint_offsets, checkpoint_indices;  // [M]
  int64_t B, T, N, L, slots, checkpoints, null_index;
  int32_t has_states, writes_states;  // there are initial states, and final ones
};

struct ConvGates {
  DeviceTensor a, b;                   // raw, by the strides of GateView
  int64_t a_strides[4], b_strides[4];  // batch, token, key head, head within it
  int64_t a_group, b_group;
  DeviceTensor A_log, dt_bias, g, beta;  // [Hv]; [B, T, Hv]
  int64_t heads, tokens, T;              // tokens of all rows
  float range;                           // of beta
};

struct ConvParams {
  ConvPart parts[FLASH_QLA_MAX_CONV_PARTS];
  ConvSequences sequences;
  ConvGates gates;
  DeviceTensor drafts, draft_rows;  // [rows, T, C, W - 1], [N]
  int64_t draft_count, draft_tokens;
  int32_t num_parts, width, silu;
};
static_assert(std::is_trivially_copyable_v<ConvParams> && sizeof(ConvParams) <= 4000,
              "what a kernel may be given is 4 KiB");

struct ConvBackwardPart {
  DeviceTensor x, dy, dx, dresidual;                         // [B, T, H, D]
  DeviceTensor weight, bias, dweight, dbias;                 // [H * D, W], [H * D]
  DeviceTensor initial_state, dfinal_state, dinitial_state;  // [N, H * D, L]
  int64_t channel;
  int32_t heads, dim, l2norm;
};

struct ConvBackwardParams {
  ConvBackwardPart parts[FLASH_QLA_MAX_CONV_PARTS];
  ConvSequences sequences;
  float* du;    // [B * T, C] where it goes through memory
  float* sums;  // [runs, W + 1, C] parts of the sums over tokens
  int64_t channels, runs;
  int32_t num_parts, width, silu;
};
static_assert(std::is_trivially_copyable_v<ConvBackwardParams> && sizeof(ConvBackwardParams) <= 4000);

}  // namespace flash_qla::cuda
