// The C++ side of the operations for streams that are cut over ranks: flash_qla/sequence_cut.h, chunk_summary.h,
// chunk_summary_backward.h and summary_combine.h. flash_qla.hpp includes it.
#pragma once

#include <string>

#include "flash_qla/chunk_summary.h"
#include "flash_qla/chunk_summary_backward.h"
#include "flash_qla/flash_qla.hpp"
#include "flash_qla/sequence_cut.h"
#include "flash_qla/summary_combine.h"

namespace flash_qla {

struct SequenceCutArguments : ArgumentsOf<flash_qla_sequence_cut_arguments> {
  SequenceCutArguments() { flash_qla_sequence_cut_arguments_init(this); }
};
struct ChunkSummaryArguments : ArgumentsOf<flash_qla_chunk_summary_arguments> {
  ChunkSummaryArguments() { flash_qla_chunk_summary_arguments_init(this); }
};
struct ChunkSummaryBackwardArguments : ArgumentsOf<flash_qla_chunk_summary_backward_arguments> {
  ChunkSummaryBackwardArguments() { flash_qla_chunk_summary_backward_arguments_init(this); }
};
struct SummaryCombineArguments : ArgumentsOf<flash_qla_summary_combine_arguments> {
  SummaryCombineArguments() { flash_qla_summary_combine_arguments_init(this); }
};

// Which sequences a rank holds, and which of them go on at its neighbours.
struct SequenceCut {
  static Status can_implement(const SequenceCutArguments& args) { return flash_qla_sequence_cut_can_implement(&args); }
  static Status workspace_size(const SequenceCutArguments& args, size_t* bytes) {
    return flash_qla_sequence_cut_workspace_size(&args, bytes);
  }
  static Status run(const SequenceCutArguments& args, void* workspace, size_t bytes, void* stream = nullptr) {
    return flash_qla_sequence_cut_run(&args, workspace, bytes, stream);
  }
  static std::string explain(const SequenceCutArguments& args) {
    return detail::whole_text(
        [&](char* text, size_t size) { return flash_qla_sequence_cut_explain(&args, text, size); });
  }
};

// Links of a rank's parts, forward.
struct ChunkSummary {
  static Status can_implement(const ChunkSummaryArguments& args) {
    return flash_qla_chunk_summary_can_implement(&args);
  }
  static Status workspace_size(const ChunkSummaryArguments& args, size_t* bytes) {
    return flash_qla_chunk_summary_workspace_size(&args, bytes);
  }
  static Status carry_size(const ChunkSummaryArguments& args, int64_t* floats) {
    return flash_qla_chunk_summary_carry_size(&args, floats);
  }
  static Status run(const ChunkSummaryArguments& args, void* workspace, size_t bytes, void* stream = nullptr) {
    return flash_qla_chunk_summary_run(&args, workspace, bytes, stream);
  }
  static std::string explain(const ChunkSummaryArguments& args) {
    return detail::whole_text(
        [&](char* text, size_t size) { return flash_qla_chunk_summary_explain(&args, text, size); });
  }
};

// Links of a rank's parts, backward.
struct ChunkSummaryBackward {
  static Status can_implement(const ChunkSummaryBackwardArguments& args) {
    return flash_qla_chunk_summary_backward_can_implement(&args);
  }
  static Status workspace_size(const ChunkSummaryBackwardArguments& args, size_t* bytes) {
    return flash_qla_chunk_summary_backward_workspace_size(&args, bytes);
  }
  static Status run(const ChunkSummaryBackwardArguments& args, void* workspace, size_t bytes, void* stream = nullptr) {
    return flash_qla_chunk_summary_backward_run(&args, workspace, bytes, stream);
  }
  static std::string explain(const ChunkSummaryBackwardArguments& args) {
    return detail::whole_text(
        [&](char* text, size_t size) { return flash_qla_chunk_summary_backward_explain(&args, text, size); });
  }
};

// All parts' links to what enters a rank's own parts.
struct SummaryCombine {
  static Status can_implement(const SummaryCombineArguments& args) {
    return flash_qla_summary_combine_can_implement(&args);
  }
  static Status workspace_size(const SummaryCombineArguments& args, size_t* bytes) {
    return flash_qla_summary_combine_workspace_size(&args, bytes);
  }
  static Status run(const SummaryCombineArguments& args, void* workspace, size_t bytes, void* stream = nullptr) {
    return flash_qla_summary_combine_run(&args, workspace, bytes, stream);
  }
  static std::string explain(const SummaryCombineArguments& args) {
    return detail::whole_text(
        [&](char* text, size_t size) { return flash_qla_summary_combine_explain(&args, text, size); });
  }
};

}  // namespace flash_qla
