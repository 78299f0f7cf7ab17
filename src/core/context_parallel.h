// Validated calls of the operations for streams that are cut over ranks, their tables of paths, and rules that they
// have in common.
#pragma once

#include "core/registry.h"
#include "core/validator.h"
#include "flash_qla/context_parallel.hpp"

namespace flash_qla {

// sequence_cut
struct CutProblem {
  int64_t N = 0;  // sequences of the stream
  int64_t P = 0;  // this rank's parts
  int64_t R = 0;  // its rows
};

// chunk_summary and chunk_summary_backward: this rank's tokens, whose N are its rows
struct SummaryProblem : Problem {
  int64_t P = 0;  // parts
};

// summary_combine
struct CombineProblem {
  int64_t L = 0, C = 0, Hv = 0, K = 0, V = 0;
  int64_t P = 0;                  // 0 without `state`
  DType dtype = DType::kFloat32;  // of the links, float32 or float64
};

using SequenceCutPath = Path<flash_qla_sequence_cut_arguments, CutProblem>;
using ChunkSummaryPath = Path<flash_qla_chunk_summary_arguments, SummaryProblem>;
using ChunkSummaryBackwardPath = Path<flash_qla_chunk_summary_backward_arguments, SummaryProblem>;
using SummaryCombinePath = Path<flash_qla_summary_combine_arguments, CombineProblem>;

const std::vector<const SequenceCutPath*>& sequence_cut_paths();
const std::vector<const ChunkSummaryPath*>& chunk_summary_paths();
const std::vector<const ChunkSummaryBackwardPath*>& chunk_summary_backward_paths();
const std::vector<const SummaryCombinePath*>& summary_combine_paths();

// A kind as a link's float says it: a NaN or any other value counts as affine, so that nothing is dropped by accident.
constexpr bool is_none(double kind) { return kind == static_cast<double>(FLASH_QLA_LINK_NONE); }
constexpr bool is_constant(double kind) { return kind == static_cast<double>(FLASH_QLA_LINK_CONSTANT); }

// Whether heads may forget: what a gate has let decay is then left out of a link.
inline bool may_forget(const flash_qla_options& options, DType type) {
  return options.cp_mode != FLASH_QLA_CP_OFF && type != DType::kFloat64;
}

// The vectors that a summary reads beside its tokens: rows [P, 2], and flags [P].
Status validate_parts(const Validator& check, const Named& rows, const Named& first_flag, const Named& second_flag,
                      SummaryProblem* p);

// A tensor of links: a float32 (float64) output.
Status validate_link(const Validator& check, const Named& link, std::initializer_list<Extent> extents,
                     const Problem& p);

// The offsets of a call, as for chunk_forward (device_check.h).
Status check_offsets(const flash_qla_options& options, const Tensor& cu_seqlens, const char* operation,
                     const Problem& p, void* stream);

}  // namespace flash_qla
