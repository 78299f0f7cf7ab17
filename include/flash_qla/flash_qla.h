/* The C interface of flash_qla: Gated Delta Network attention on the CPU and on NVIDIA GPUs.
 *
 * Every operation is three calls on one arguments structure, which its init function has filled with defaults:
 *     flash_qla_<op>_can_implement(&args)                       is this call legal, and if not, why
 *     flash_qla_<op>_workspace_size(&args, &bytes)              scratch that run() needs, of any alignment
 *                                                               (q.data NULL: for all calls of no more tokens and
 *                                                               sequences too)
 *     flash_qla_<op>_run(&args, workspace, bytes, stream)       does it, in the stream
 * Nothing throws, aborts, allocates device memory or waits for the device. When a call is refused nothing is written.
 * This header needs no framework and no CUDA header; it is valid C99 and C++17.
 */
#ifndef FLASH_QLA_FLASH_QLA_H_
#define FLASH_QLA_FLASH_QLA_H_

#include "flash_qla/types.h"

#define FLASH_QLA_VERSION_MAJOR 0
#define FLASH_QLA_VERSION_MINOR 2
#define FLASH_QLA_VERSION_PATCH 0

#ifdef __cplusplus
extern "C" {
#endif

/* Forward pass, chunked (flash_qla_chunk_forward_*) or token by token (flash_qla_recurrent_*).
 * B sequences of T tokens, or with cu_seqlens N sequences packed in B = 1. Hv is a multiple of Hq.
 * States are [.., K, V], or [.., V, K] with state_v_first. "float" is float32, bfloat16 or float16. */
typedef struct flash_qla_forward_arguments {
  size_t struct_size; /* sizeof(flash_qla_forward_arguments), set by the init function; another one is refused */
  flash_qla_options options;

  /* inputs */
  flash_qla_tensor q;          /* [B, T, Hq, K] float (or float64 on the CPU) */
  flash_qla_tensor k;          /* [B, T, Hq, K] as q */
  flash_qla_tensor v;          /* [B, T, Hv, V] as q */
  flash_qla_tensor g;          /* [B, T, Hv] float, natural-log decay per token (or raw gate); absent: no decay */
  flash_qla_tensor beta;       /* [B, T, Hv] float; absent: ones */
  flash_qla_tensor A_log;      /* [Hv] float, with use_gate_in_kernel */
  flash_qla_tensor dt_bias;    /* [Hv] float, optional, with use_gate_in_kernel */
  flash_qla_tensor cu_seqlens; /* [N + 1] int32 or int64, packed token offsets; absent: N = B sequences of T tokens */
  flash_qla_tensor initial_state; /* [N, Hv, K, V] float, optional; excludes state_pool */

  /* states that entered this rank's part of a sequence (chunked forward only; flash_qla/summary_combine.h), in place of
   * rows of initial_state, which need not be there; both or neither; excludes state_pool */
  flash_qla_tensor
      entering_rows; /* [P] int32 or int64: the sequence that starts from entering_state[p]; others: none */
  flash_qla_tensor entering_state; /* [P, Hv, K, V] whatever state_v_first says, float32 (float64), any strides */
  flash_qla_tensor
      carry; /* [P, n] float32, optional: what flash_qla_chunk_summary_run has left there of the same inputs
                and options, for all of these parts; the result is that without it but for rounding */

  /* states in a pool, read and written in place */
  flash_qla_tensor state_pool; /* [slots, Hv, K, V] float; any slot stride; the inner three dims contiguous */
  flash_qla_tensor initial_state_indices; /* [N] int32 or int64; recurrent: also [N, S] with num_accepted_tokens */
  flash_qla_tensor final_state_indices;   /* [N]; absent: the initial ones. Recurrent: also [N, T], a slot per token */
  flash_qla_tensor has_initial_state;     /* [N] bool, optional; false: start from zero, the slot is not read */
  flash_qla_tensor num_accepted_tokens;   /* [N] int32 or int64 in 1..S: the column of initial_state_indices to read */
  int64_t null_index; /* an initial index <= this, or past the pool, skips the sequence: zero output, nothing read or
                         written (not where has_initial_state is false); such a final index skips that write alone */

  /* states for prefix caches (chunked forward only) */
  int64_t checkpoint_every;              /* 0, or a multiple of 64: the state after every n-th token of a sequence */
  flash_qla_tensor checkpoints;          /* [rows, Hv, K, V] float, floor(len / n) rows a sequence */
  flash_qla_tensor checkpoint_cu_starts; /* [N + 1] int32 or int64, first row of each sequence */
  flash_qla_tensor checkpoint_offsets;   /* [M] int32 or int64 packed positions: the state after the tokens before it */
  flash_qla_tensor checkpoint_indices;   /* [M] int32 or int64 pool slots that receive them: none that another sequence
                                            of the call starts from */

  /* outputs; absent: not wanted (o is always wanted) */
  flash_qla_tensor o;           /* [B, T, Hv, V] as q; every element is written */
  flash_qla_tensor final_state; /* [N, Hv, K, V] float32 (float64 with float64 inputs) */
  flash_qla_tensor g_cumsum;    /* [B, T, Hv] float32 (float64): natural-log decay summed from each chunk's start */
  flash_qla_tensor A;           /* [B, T, Hv, 64] as k: row t of its chunk's (I + strict_lower(diag(beta) K K^T))^-1 */
  flash_qla_tensor h;           /* [chunks, Hv, K, V] as k: the state at each chunk's start, sequence by sequence;
                                   chunks = B * ceil(T / 64); with cu_seqlens at least the sum of ceil(len / 64), unused
                                   rows at the end are zeroed */
} flash_qla_forward_arguments;

/* Backward pass of the chunked forward. Absent outputs are not computed. */
typedef struct flash_qla_backward_arguments {
  size_t struct_size; /* sizeof(flash_qla_backward_arguments), set by the init function; another one is refused */
  flash_qla_options options;

  /* inputs of the forward pass */
  flash_qla_tensor q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state; /* as in the forward */
  int32_t g_is_cumsum; /* g is the forward's g_cumsum; excludes use_gate_in_kernel. dg is of the log decay */

  /* kept from the forward, each optional: absent parts are computed again */
  flash_qla_tensor A; /* [B, T, Hv, 64] */
  flash_qla_tensor o; /* [B, T, Hv, V] */

  /* incoming gradients, each optional: absent is zero */
  flash_qla_tensor d_o; /* [B, T, Hv, V] float, any strides */
  flash_qla_tensor dht; /* [N, Hv, K, V] float (float64), any strides */

  /* of ranks' parts (flash_qla/summary_combine.h): entering_* as the forward had them, leaving_* in place of rows of
   * dht, both of a pair or neither. A row of dh0 whose state entered is the gradient of that state */
  flash_qla_tensor entering_rows;  /* [P] int32 or int64 */
  flash_qla_tensor entering_state; /* [P, Hv, K, V] float32 (float64), any strides */
  flash_qla_tensor leaving_rows;   /* [P] int32 or int64: the sequence whose final state's gradient is leaving_dht[p] */
  flash_qla_tensor leaving_dht;    /* [P, Hv, K, V] float32 (float64), any strides */

  /* outputs */
  flash_qla_tensor dq;       /* [B, T, Hq, K] as q: summed over the group's value heads in float32, rounded once */
  flash_qla_tensor dk;       /* [B, T, Hq, K] as k */
  flash_qla_tensor dv;       /* [B, T, Hv, V] as v */
  flash_qla_tensor dg;       /* [B, T, Hv] float (float64): of g as it was given (of the log decay for a cumsum) */
  flash_qla_tensor dbeta;    /* [B, T, Hv] float (float64): of beta as it was given */
  flash_qla_tensor dh0;      /* [N, Hv, K, V] float (float64) */
  flash_qla_tensor dA_log;   /* [Hv] float (float64), with use_gate_in_kernel */
  flash_qla_tensor ddt_bias; /* [Hv] float (float64), with use_gate_in_kernel and dt_bias */

  /* what the rows of q and k were multiplied by when the caller normalised them (conv_forward leaves it), both or
   * neither: dq and dk are then those of the rows before. Not with use_qk_l2norm_in_kernel */
  flash_qla_tensor q_inverse_norm, k_inverse_norm; /* [B, T, Hq] float32 (float64) */
} flash_qla_backward_arguments;

/* Fills in the defaults: the structure's size, everything absent or off, scale K^-1/2, auto CP, null_index -1, device
 * CPU. Does nothing with NULL. */
FLASH_QLA_API void flash_qla_forward_arguments_init(flash_qla_forward_arguments* args);
FLASH_QLA_API void flash_qla_backward_arguments_init(flash_qla_backward_arguments* args);

/* Chunked forward: prefill and training. */
FLASH_QLA_API flash_qla_status flash_qla_chunk_forward_can_implement(const flash_qla_forward_arguments* args);
FLASH_QLA_API flash_qla_status flash_qla_chunk_forward_workspace_size(const flash_qla_forward_arguments* args,
                                                                      size_t* bytes);
FLASH_QLA_API flash_qla_status flash_qla_chunk_forward_run(const flash_qla_forward_arguments* args, void* workspace,
                                                           size_t workspace_bytes, void* stream);

/* Token-by-token forward: decode, draft tokens, short steps. */
FLASH_QLA_API flash_qla_status flash_qla_recurrent_can_implement(const flash_qla_forward_arguments* args);
FLASH_QLA_API flash_qla_status flash_qla_recurrent_workspace_size(const flash_qla_forward_arguments* args,
                                                                  size_t* bytes);
FLASH_QLA_API flash_qla_status flash_qla_recurrent_run(const flash_qla_forward_arguments* args, void* workspace,
                                                       size_t workspace_bytes, void* stream);

/* Backward of the chunked forward. */
FLASH_QLA_API flash_qla_status flash_qla_chunk_backward_can_implement(const flash_qla_backward_arguments* args);
FLASH_QLA_API flash_qla_status flash_qla_chunk_backward_workspace_size(const flash_qla_backward_arguments* args,
                                                                       size_t* bytes);
FLASH_QLA_API flash_qla_status flash_qla_chunk_backward_run(const flash_qla_backward_arguments* args, void* workspace,
                                                            size_t workspace_bytes, void* stream);

/* Which path a call takes and why others do not, as text. Writes at most `size` bytes, always terminated. */
FLASH_QLA_API flash_qla_status flash_qla_chunk_forward_explain(const flash_qla_forward_arguments* args, char* text,
                                                               size_t size);
FLASH_QLA_API flash_qla_status flash_qla_recurrent_explain(const flash_qla_forward_arguments* args, char* text,
                                                           size_t size);
FLASH_QLA_API flash_qla_status flash_qla_chunk_backward_explain(const flash_qla_backward_arguments* args, char* text,
                                                                size_t size);

/* Version, commit, compiled-in paths and the instruction sets and GPUs found, as "key: value" lines. */
FLASH_QLA_API flash_qla_status flash_qla_build_info(char* text, size_t size);

#ifdef __cplusplus
}
#endif

#include "flash_qla/chunk_summary.h"
#include "flash_qla/chunk_summary_backward.h"
#include "flash_qla/convolution.h"
#include "flash_qla/norm.h"
#include "flash_qla/sequence_cut.h"
#include "flash_qla/summary_combine.h"
#include "flash_qla/verify.h"

#endif /* FLASH_QLA_FLASH_QLA_H_ */
