/* What the neighbours of a rank need of its part of a sequence: its link (docs/several_cards.md).
 *
 * A link says how a state goes through a part: S_out = M S_in + S, for each value head, in float32. Links are [K, V]
 * whatever state_v_first says. Every element of a link is written. flash_qla.h includes this header and explains the
 * three calls of an operation.
 */
#ifndef FLASH_QLA_CHUNK_SUMMARY_H_
#define FLASH_QLA_CHUNK_SUMMARY_H_

#include "flash_qla/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a link is. `kind` tensors hold these as floating-point numbers, so that a link is one packed row of floats. */
typedef enum flash_qla_link_kind {
  FLASH_QLA_LINK_NONE = 0,     /* no tokens: S_out = S_in. S and M are zero */
  FLASH_QLA_LINK_CONSTANT = 1, /* S_out = S: the sequence begins in the part, or what entered is forgotten. M is zero */
  FLASH_QLA_LINK_AFFINE = 2    /* S_out = M S_in + S */
} flash_qla_link_kind;

/* Forward links: of each part the one of its last token's sequence, where that goes on after the part. */
typedef struct flash_qla_chunk_summary_arguments {
  size_t struct_size;        /* sizeof(flash_qla_chunk_summary_arguments), set by the init function */
  flash_qla_options options; /* cp_mode off, and float64: nothing is forgotten (cp_tolerance) */

  /* inputs, as in flash_qla_forward_arguments: this rank's tokens */
  flash_qla_tensor k;             /* [B, T, Hq, K] float (or float64 on the CPU) */
  flash_qla_tensor v;             /* [B, T, Hv, V] as k */
  flash_qla_tensor g;             /* [B, T, Hv] float, optional */
  flash_qla_tensor beta;          /* [B, T, Hv] float, optional */
  flash_qla_tensor A_log;         /* [Hv] float, with use_gate_in_kernel */
  flash_qla_tensor dt_bias;       /* [Hv] float, optional, with use_gate_in_kernel */
  flash_qla_tensor cu_seqlens;    /* [R + 1] index, this rank's offsets; absent: R = B sequences of T tokens */
  flash_qla_tensor initial_state; /* [R, Hv, K, V] float, optional: of sequences that begin here */

  /* inputs, as flash_qla_sequence_cut writes them. A row out of range counts as none */
  flash_qla_tensor rows;    /* [P, 2] index */
  flash_qla_tensor leaves;  /* [P] bool */
  flash_qla_tensor through; /* [P] bool */

  /* outputs, any strides */
  flash_qla_tensor S;    /* [P, Hv, K, V] float32 (float64 with float64 inputs) */
  flash_qla_tensor M;    /* [P, Hv, K, K] as S */
  flash_qla_tensor kind; /* [P, Hv] as S: a flash_qla_link_kind */

  /* output, optional: what the forward of the same tokens can go on from, which then does not compute it again
   * (flash_qla_forward_arguments.carry); [P, n] float32, contiguous, on a 16-byte boundary, with the n of
   * flash_qla_chunk_summary_carry_size. What is in it is known to this version and this device alone */
  flash_qla_tensor carry;
} flash_qla_chunk_summary_arguments;

/* Fills in the defaults, as flash_qla_forward_arguments_init does. Does nothing with NULL. */
FLASH_QLA_API void flash_qla_chunk_summary_arguments_init(flash_qla_chunk_summary_arguments* args);

FLASH_QLA_API flash_qla_status flash_qla_chunk_summary_can_implement(const flash_qla_chunk_summary_arguments* args);
FLASH_QLA_API flash_qla_status flash_qla_chunk_summary_workspace_size(const flash_qla_chunk_summary_arguments* args,
                                                                      size_t* bytes);
/* Floats of a part's carry; 0: the path that would compute the call makes none, and `carry` must be absent. */
FLASH_QLA_API flash_qla_status flash_qla_chunk_summary_carry_size(const flash_qla_chunk_summary_arguments* args,
                                                                  int64_t* floats);
FLASH_QLA_API flash_qla_status flash_qla_chunk_summary_run(const flash_qla_chunk_summary_arguments* args,
                                                           void* workspace, size_t workspace_bytes, void* stream);
FLASH_QLA_API flash_qla_status flash_qla_chunk_summary_explain(const flash_qla_chunk_summary_arguments* args,
                                                               char* text, size_t size);

#ifdef __cplusplus
}
#endif
#endif /* FLASH_QLA_CHUNK_SUMMARY_H_ */
