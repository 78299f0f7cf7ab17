/* The causal depthwise convolution in front of the delta rule, with what a layer does around it: SiLU, the l2 norm of
 * the heads of q and k, and the gates. flash_qla.h includes it.
 *
 * Per channel, a sequence x_0 .. x_{n-1} with a history from a state (or zero) and weights w_0 .. w_{W-1}:
 *     u_t = bias + sum_j w_j x_{t-(W-1)+j};   y_t = act(u_t) + residual_t;   yn_t = y_t / sqrt(sum y_t^2 + 1e-6)
 * the last with l2norm, over the channels of a head. Sums are in float32 (float64 for float64), and results are rounded
 * once.
 */
#ifndef FLASH_QLA_CONVOLUTION_H_
#define FLASH_QLA_CONVOLUTION_H_

#include "flash_qla/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Most parts of a call, and largest number of weights of a channel. */
#define FLASH_QLA_MAX_CONV_PARTS 3
#define FLASH_QLA_MAX_CONV_WIDTH 8

typedef enum flash_qla_activation {
  FLASH_QLA_ACTIVATION_NONE = 0,
  FLASH_QLA_ACTIVATION_SILU = 1,
  FLASH_QLA_ACTIVATION_SIGMOID = 2 /* of gated norms */
} flash_qla_activation;

/* H heads of D channels. The parts of a call have the same tokens, and channels of their own, in the parts' order.
 * "float" is float32, bfloat16 or float16, and float64 beside a float64 x. */
typedef struct flash_qla_conv_part {
  flash_qla_tensor x;             /* [B, T, H, D] float (or float64 on the CPU), one dtype in all parts */
  flash_qla_tensor weight;        /* [H * D, W] float, W from 1 to 8, the same in all parts */
  flash_qla_tensor bias;          /* [H * D] float, optional */
  flash_qla_tensor residual;      /* as x, optional; not with l2norm */
  flash_qla_tensor initial_state; /* [N, H * D, L] float, or a pool [slots, H * D, L] with initial_state_indices;
                                     optional. L >= W - 1 inputs, oldest first */
  flash_qla_tensor final_state;   /* as initial_state, and may be the same memory: the last L of state and inputs */
  flash_qla_tensor y;             /* out, as x; conv_update: may be x */
  flash_qla_tensor inverse_norm; /* out, optional, with l2norm: [B, T, H] float32 (float64), 1 / sqrt(..) of each row */
  int32_t l2norm;                /* normalise each head: D is at most 256 */
} flash_qla_conv_part;

/* conv_forward: whole sequences. conv_update: the next tokens of each sequence, whose states are read and written. */
typedef struct flash_qla_conv_arguments {
  size_t struct_size;        /* sizeof(flash_qla_conv_arguments), set by the init function; another one is refused */
  flash_qla_options options; /* of which the layer's operations read allow_neg_eigval (beta is doubled),
                                check_device_data, num_threads, path, operation and the device */
  flash_qla_conv_part parts[FLASH_QLA_MAX_CONV_PARTS];
  int32_t num_parts;
  int32_t activation; /* FLASH_QLA_ACTIVATION_NONE or FLASH_QLA_ACTIVATION_SILU */

  /* sequences: B of T tokens; or N packed in B = 1; or a token's terms are those whose seq_idx is its own */
  flash_qla_tensor cu_seqlens; /* [N + 1] int32 or int64 packed token offsets. Tokens outside all of them: y = 0 */
  flash_qla_tensor seq_idx;    /* [B, T] int32 or int64; negative: y = 0. Excludes cu_seqlens and states */

  /* states in a pool */
  flash_qla_tensor initial_state_indices; /* [N] int32 or int64, slots of initial_state */
  flash_qla_tensor final_state_indices;   /* [N] slots of final_state; absent: the initial ones */
  flash_qla_tensor has_initial_state;     /* [N] bool, optional, with any states; false: start from zero */
  int64_t null_index; /* an initial index <= this, or past the pool, skips the sequence: y = 0, nothing read or written
                         (not where has_initial_state is false); such a final index skips that write alone */

  /* conv_update alone */
  flash_qla_tensor num_accepted_tokens; /* [N] int32 or int64, from 1: with o = accepted - 1, inputs o .. o + W - 2 of
                                           the state are read; it is left as s[o + 1 .. o + W - 2] and the new inputs,
                                           L >= W - 2 + the tokens of the longest sequence */
  flash_qla_tensor cache_seqlens;       /* [N] int32 or int64 = c: the state is a ring, read at (c - W + 1 .. c - 1)
                                           mod L, input i written at (c + i) mod L */
  flash_qla_tensor draft_states;        /* [rows, T, channels of all parts, W - 1] float: the last W - 1 inputs after
                                           each token */
  flash_qla_tensor draft_state_indices; /* [N] int32 or int64 rows of draft_states; absent: 0 .. N - 1. Below 0 or past
                                           the rows: not written */

  /* conv_forward alone: the state as it is before listed tokens, for prefix caches */
  flash_qla_tensor checkpoint_offsets; /* [M] int32 or int64 packed positions */
  flash_qla_tensor checkpoint_indices; /* [M] int32 or int64 slots of final_state: none that another sequence starts
                                          from. final_state_indices or initial_state_indices must be given */

  /* gates, optional: g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b), doubled with allow_neg_eigval */
  flash_qla_tensor a, b;    /* [B, T, Hv], or [B * T, Hq, Hv / Hq], float: raw gates */
  flash_qla_tensor A_log;   /* [Hv] float, with a */
  flash_qla_tensor dt_bias; /* [Hv] float, optional, with a */
  flash_qla_tensor g;       /* out [B, T, Hv] float32 (float64), with a: log decay */
  flash_qla_tensor beta;    /* out [B, T, Hv] float32 (float64), with b: step size */
} flash_qla_conv_arguments;

/* Absent gradients of outputs are zero, absent outputs are not computed. */
typedef struct flash_qla_conv_backward_part {
  /* inputs of the forward pass; states are not in a pool */
  flash_qla_tensor x, weight, bias, initial_state;
  int32_t l2norm;

  /* incoming gradients */
  flash_qla_tensor dy;           /* [B, T, H, D] as x, any strides */
  flash_qla_tensor dfinal_state; /* [N, H * D, L] float, any strides */

  /* outputs */
  flash_qla_tensor dx;             /* [B, T, H, D] as x */
  flash_qla_tensor dweight;        /* [H * D, W] float */
  flash_qla_tensor dbias;          /* [H * D] float */
  flash_qla_tensor dresidual;      /* [B, T, H, D] as x */
  flash_qla_tensor dinitial_state; /* [N, H * D, L] float, with initial_state */
} flash_qla_conv_backward_part;

typedef struct flash_qla_conv_backward_arguments {
  size_t struct_size; /* sizeof(flash_qla_conv_backward_arguments), set by the init function; another one is refused */
  flash_qla_options options;
  flash_qla_conv_backward_part parts[FLASH_QLA_MAX_CONV_PARTS];
  int32_t num_parts;
  int32_t activation;
  flash_qla_tensor cu_seqlens, seq_idx; /* as in the forward */
} flash_qla_conv_backward_arguments;

/* Fill in the defaults: the structure's size, everything absent or off, no activation, no parts, null_index -1, device
 * CPU. Do nothing with NULL. */
FLASH_QLA_API void flash_qla_conv_arguments_init(flash_qla_conv_arguments* args);
FLASH_QLA_API void flash_qla_conv_backward_arguments_init(flash_qla_conv_backward_arguments* args);

FLASH_QLA_API flash_qla_status flash_qla_conv_forward_can_implement(const flash_qla_conv_arguments* args);
FLASH_QLA_API flash_qla_status flash_qla_conv_forward_workspace_size(const flash_qla_conv_arguments* args,
                                                                     size_t* bytes);
FLASH_QLA_API flash_qla_status flash_qla_conv_forward_run(const flash_qla_conv_arguments* args, void* workspace,
                                                          size_t workspace_bytes, void* stream);
FLASH_QLA_API flash_qla_status flash_qla_conv_forward_explain(const flash_qla_conv_arguments* args, char* text,
                                                              size_t size);

FLASH_QLA_API flash_qla_status flash_qla_conv_update_can_implement(const flash_qla_conv_arguments* args);
FLASH_QLA_API flash_qla_status flash_qla_conv_update_workspace_size(const flash_qla_conv_arguments* args,
                                                                    size_t* bytes);
FLASH_QLA_API flash_qla_status flash_qla_conv_update_run(const flash_qla_conv_arguments* args, void* workspace,
                                                         size_t workspace_bytes, void* stream);
FLASH_QLA_API flash_qla_status flash_qla_conv_update_explain(const flash_qla_conv_arguments* args, char* text,
                                                             size_t size);

FLASH_QLA_API flash_qla_status flash_qla_conv_backward_can_implement(const flash_qla_conv_backward_arguments* args);
FLASH_QLA_API flash_qla_status flash_qla_conv_backward_workspace_size(const flash_qla_conv_backward_arguments* args,
                                                                      size_t* bytes);
FLASH_QLA_API flash_qla_status flash_qla_conv_backward_run(const flash_qla_conv_backward_arguments* args,
                                                           void* workspace, size_t workspace_bytes, void* stream);
FLASH_QLA_API flash_qla_status flash_qla_conv_backward_explain(const flash_qla_conv_backward_arguments* args,
                                                               char* text, size_t size);

#ifdef __cplusplus
}
#endif
#endif /* FLASH_QLA_CONVOLUTION_H_ */
