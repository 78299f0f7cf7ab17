/* Verification of draft tokens (flash_qla_verify_*): a few tokens a sequence, in a chain or a tree, from states that
 * are read and not written. flash_qla.h includes it; it is valid C99 and C++17.
 */
#ifndef FLASH_QLA_VERIFY_H_
#define FLASH_QLA_VERIFY_H_

#include "flash_qla/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* N sequences of T draft tokens, 1 to FLASH_QLA_MAX_DRAFT_TOKENS. Each token continues from the state after its parent,
 * the first ones from the sequence's slot of the pool. Hv is a multiple of Hq. States are [.., K, V], or [.., V, K]
 * with state_v_first. "float" is float32, bfloat16 or float16. Between tokens a state keeps full precision. */
typedef struct flash_qla_verify_arguments {
  size_t struct_size; /* sizeof(flash_qla_verify_arguments), set by the init function; another one is refused */
  flash_qla_options options;

  /* inputs */
  flash_qla_tensor q;       /* [N, T, Hq, K] float (or float64 on the CPU) */
  flash_qla_tensor k;       /* [N, T, Hq, K] as q */
  flash_qla_tensor v;       /* [N, T, Hv, V] as q */
  flash_qla_tensor g;       /* [N, T, Hv] float, natural-log decay per token (or raw gate); absent: no decay */
  flash_qla_tensor beta;    /* [N, T, Hv] float; absent: ones */
  flash_qla_tensor A_log;   /* [Hv] float, with use_gate_in_kernel */
  flash_qla_tensor dt_bias; /* [Hv] float, optional, with use_gate_in_kernel */

  flash_qla_tensor
      state_pool; /* [slots, Hv, K, V] float, only read; any slot stride; the inner three dims contiguous */
  flash_qla_tensor initial_state_indices; /* [N] int32 or int64: the slot that each sequence starts from */
  int64_t null_index;       /* an initial index <= this, or past the pool, skips the sequence: zero output, no states */
  flash_qla_tensor parents; /* [N, T] int32 or int64: the token before token t, from 0 to t - 1, or -1 for the pool's
                               state, as which any other value counts; absent: a chain, t - 1 */

  /* outputs */
  flash_qla_tensor o;          /* [N, T, Hv, V] as q; every element is written */
  flash_qla_tensor states_out; /* [rows, T, Hv, K, V] as state_pool: the state after each token; any row and token
                                  stride; the inner three dims contiguous. Absent: not wanted */
  flash_qla_tensor states_out_indices; /* [N] int32 or int64: the row of each sequence; one below 0 or past states_out
                                          leaves that sequence's states out. Absent: sequence n has row n */
} flash_qla_verify_arguments;

/* Fills in the defaults: the structure's size, everything absent or off, scale K^-1/2, null_index -1, device CPU. Does
 * nothing with NULL. */
FLASH_QLA_API void flash_qla_verify_arguments_init(flash_qla_verify_arguments* args);

FLASH_QLA_API flash_qla_status flash_qla_verify_can_implement(const flash_qla_verify_arguments* args);
FLASH_QLA_API flash_qla_status flash_qla_verify_workspace_size(const flash_qla_verify_arguments* args, size_t* bytes);
FLASH_QLA_API flash_qla_status flash_qla_verify_run(const flash_qla_verify_arguments* args, void* workspace,
                                                    size_t workspace_bytes, void* stream);
FLASH_QLA_API flash_qla_status flash_qla_verify_explain(const flash_qla_verify_arguments* args, char* text,
                                                        size_t size);

#ifdef __cplusplus
}
#endif
#endif /* FLASH_QLA_VERIFY_H_ */
