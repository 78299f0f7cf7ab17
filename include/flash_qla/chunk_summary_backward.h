/* The backward link of a part: how the gradient of a state goes through it, from right to left
 * (docs/several_cards.md): dS_left = M^T dS_right + R, with the M of the forward link (flash_qla/chunk_summary.h).
 * R does not depend on the state that entered, so it can be made before that is known. flash_qla.h includes this header
 * and explains the three calls of an operation.
 */
#ifndef FLASH_QLA_CHUNK_SUMMARY_BACKWARD_H_
#define FLASH_QLA_CHUNK_SUMMARY_BACKWARD_H_

#include "flash_qla/chunk_summary.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Backward links: of each part the one of its first token's sequence, where that began before the part. */
typedef struct flash_qla_chunk_summary_backward_arguments {
  size_t struct_size;        /* sizeof(flash_qla_chunk_summary_backward_arguments), set by the init function */
  flash_qla_options options; /* those of the forward link */

  /* inputs, as in flash_qla_backward_arguments: this rank's tokens */
  flash_qla_tensor q, k, g, beta, A_log, dt_bias, cu_seqlens;
  flash_qla_tensor d_o; /* [B, T, Hv, V] float, any strides; absent: zero */
  flash_qla_tensor dht; /* [R, Hv, K, V] float, optional: of sequences that end here */
  flash_qla_tensor
      A; /* [B, T, Hv, 64] in the dtype of k, optional: as flash_qla_forward_arguments.A left it; saves time */

  /* inputs, as flash_qla_sequence_cut writes them. A row out of range counts as none */
  flash_qla_tensor rows;         /* [P, 2] index */
  flash_qla_tensor enters;       /* [P] bool */
  flash_qla_tensor through;      /* [P] bool */
  flash_qla_tensor forward_kind; /* [P, Hv] float32 (float64): the kind of the forward links */

  /* outputs, any strides */
  flash_qla_tensor R;    /* [P, Hv, K, V] float32 (float64 with float64 inputs) */
  flash_qla_tensor kind; /* [P, Hv] as R: a flash_qla_link_kind; affine with the M of the forward */
} flash_qla_chunk_summary_backward_arguments;

/* Fills in the defaults, as flash_qla_backward_arguments_init does. Does nothing with NULL. */
FLASH_QLA_API void flash_qla_chunk_summary_backward_arguments_init(flash_qla_chunk_summary_backward_arguments* args);

FLASH_QLA_API flash_qla_status
flash_qla_chunk_summary_backward_can_implement(const flash_qla_chunk_summary_backward_arguments* args);
FLASH_QLA_API flash_qla_status
flash_qla_chunk_summary_backward_workspace_size(const flash_qla_chunk_summary_backward_arguments* args, size_t* bytes);
FLASH_QLA_API flash_qla_status flash_qla_chunk_summary_backward_run(
    const flash_qla_chunk_summary_backward_arguments* args, void* workspace, size_t workspace_bytes, void* stream);
FLASH_QLA_API flash_qla_status flash_qla_chunk_summary_backward_explain(
    const flash_qla_chunk_summary_backward_arguments* args, char* text, size_t size);

#ifdef __cplusplus
}
#endif
#endif /* FLASH_QLA_CHUNK_SUMMARY_BACKWARD_H_ */
