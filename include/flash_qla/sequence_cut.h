/* Which sequences a rank holds, where one stream of packed tokens is cut over ranks (docs/several_cards.md).
 *
 * A part is a contiguous run of the stream's tokens; a rank holds P of them, one behind the other in its tensors: one
 * part, or two that do not lie beside each other (zigzag). The parts of all ranks cover the stream without overlap.
 * flash_qla.h includes this header and explains the three calls of an operation.
 */
#ifndef FLASH_QLA_SEQUENCE_CUT_H_
#define FLASH_QLA_SEQUENCE_CUT_H_

#include "flash_qla/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* "index" is int32 or int64, in each tensor as it likes. An output that is absent is not wanted. */
typedef struct flash_qla_sequence_cut_arguments {
  size_t struct_size; /* sizeof(flash_qla_sequence_cut_arguments), set by the init function */
  flash_qla_options options;

  /* inputs */
  flash_qla_tensor cu_seqlens; /* [N + 1] index, offsets of the sequences in the whole stream, from 0, never falling */
  flash_qla_tensor bounds;     /* [P, 2] index, first token of each part in the stream and the one after its last;
                                  ascending. Tokens at and after cu_seqlens[N] belong to no sequence */
  int64_t last_part; /* the part with which the whole stream ends, -1: another rank has it. It also holds the empty
                        sequences at the stream's end */
  int32_t all_rows;  /* 1: R is P * N, row p * N + n is sequence n, empty where part p has none of it, so that no shape
                        depends on the offsets. 0: rows are the sequences that part 0 touches, then those of part 1;
                        R is at least as many, N + P always enough; rows behind them are empty */

  /* outputs: this rank's R rows (sequences of its own calls) */
  flash_qla_tensor local_cu_seqlens; /* [R + 1] index, offsets in this rank's tokens. Always wanted: it says R */
  flash_qla_tensor sequences;        /* [R] index, the row's number among the N sequences, -1 behind the last */
  flash_qla_tensor starts_here; /* [R] bool, the sequence has its first token here (an empty one: is listed here) */
  flash_qla_tensor ends_here;   /* [R] bool, its last token */

  /* outputs: of each part */
  flash_qla_tensor row_counts;    /* [P] index, its rows. R has to be at least their sum */
  flash_qla_tensor rows;          /* [P, 2] index, row of the part's first token and of its last, -1 without tokens */
  flash_qla_tensor enters;        /* [P] bool, the first token's sequence began before the part */
  flash_qla_tensor leaves;        /* [P] bool, the last token's sequence goes on after the part */
  flash_qla_tensor through;       /* [P] bool, both, and it is one sequence */
  flash_qla_tensor entering_rows; /* [P] index, rows[p, 0] where a sequence enters, else -1 */
  flash_qla_tensor leaving_rows;  /* [P] index, rows[p, 1] where one leaves, else -1 */
  flash_qla_tensor halo_tokens;   /* [P] index, tokens of the entering sequence before the part; else 0 */
} flash_qla_sequence_cut_arguments;

/* Fills in the defaults: the structure's size, everything absent, last_part -1. Does nothing with NULL. */
FLASH_QLA_API void flash_qla_sequence_cut_arguments_init(flash_qla_sequence_cut_arguments* args);

FLASH_QLA_API flash_qla_status flash_qla_sequence_cut_can_implement(const flash_qla_sequence_cut_arguments* args);
FLASH_QLA_API flash_qla_status flash_qla_sequence_cut_workspace_size(const flash_qla_sequence_cut_arguments* args,
                                                                     size_t* bytes);
FLASH_QLA_API flash_qla_status flash_qla_sequence_cut_run(const flash_qla_sequence_cut_arguments* args, void* workspace,
                                                          size_t workspace_bytes, void* stream);
FLASH_QLA_API flash_qla_status flash_qla_sequence_cut_explain(const flash_qla_sequence_cut_arguments* args, char* text,
                                                              size_t size);

#ifdef __cplusplus
}
#endif
#endif /* FLASH_QLA_SEQUENCE_CUT_H_ */
