/* Links of all parts of a stream to the states that enter a rank's own parts, or to the gradients that do from the
 * right (docs/several_cards.md). flash_qla.h includes this header and explains the three calls of an operation.
 *
 * A state that enters a part comes from the nearest constant link before it (of the sequence's beginning, or of heads
 * that forget), through every link between. A chain without a constant link starts from zero. Sums are in float32 (in
 * float64 for float64 links), in one order: the same links give the same bits.
 */
#ifndef FLASH_QLA_SUMMARY_COMBINE_H_
#define FLASH_QLA_SUMMARY_COMBINE_H_

#include "flash_qla/chunk_summary.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of L parts, each with links of C independent streams (batch rows; 1 where sequences are packed). */
typedef struct flash_qla_summary_combine_arguments {
  size_t struct_size; /* sizeof(flash_qla_summary_combine_arguments), set by the init function */
  flash_qla_options options;

  /* inputs, any strides: views of what a collective has gathered */
  flash_qla_tensor S;      /* [L, C, Hv, K, V] float32 or float64: S of the forward links, R of the backward ones */
  flash_qla_tensor M;      /* [L, C, Hv, K, K] as S: that of the forward links in both directions */
  flash_qla_tensor kind;   /* [L, C, Hv] as S: a flash_qla_link_kind */
  flash_qla_tensor order;  /* [L] index, optional: row of S, M and kind with the link of the stream's i-th part; absent:
                              they lie in the stream's order */
  flash_qla_tensor place;  /* [P] index: where this rank's parts stand among the stream's parts; L (backward: -1) is
                              beyond them all */
  flash_qla_tensor wanted; /* [P] bool: enters, or leaves with `backward`. Absent: all */
  int32_t backward;        /* 0: states, from left to right. 1: gradients of states, from right to left, with M^T */

  /* outputs; absent: not wanted */
  flash_qla_tensor state;         /* [P, C, Hv, K, V] as S: what enters each part; zero where it is not wanted */
  flash_qla_tensor composed_S;    /* [C, Hv, K, V] as S: the L links as one, as for the parts of one machine ... */
  flash_qla_tensor composed_M;    /* [C, Hv, K, K] ... with all three or none of them ... */
  flash_qla_tensor composed_kind; /* [C, Hv] */
} flash_qla_summary_combine_arguments;

/* Fills in the defaults: the structure's size, everything absent or off, device CPU. Does nothing with NULL. */
FLASH_QLA_API void flash_qla_summary_combine_arguments_init(flash_qla_summary_combine_arguments* args);

FLASH_QLA_API flash_qla_status flash_qla_summary_combine_can_implement(const flash_qla_summary_combine_arguments* args);
FLASH_QLA_API flash_qla_status flash_qla_summary_combine_workspace_size(const flash_qla_summary_combine_arguments* args,
                                                                        size_t* bytes);
FLASH_QLA_API flash_qla_status flash_qla_summary_combine_run(const flash_qla_summary_combine_arguments* args,
                                                             void* workspace, size_t workspace_bytes, void* stream);
FLASH_QLA_API flash_qla_status flash_qla_summary_combine_explain(const flash_qla_summary_combine_arguments* args,
                                                                 char* text, size_t size);

#ifdef __cplusplus
}
#endif
#endif /* FLASH_QLA_SUMMARY_COMBINE_H_ */
