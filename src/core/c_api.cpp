// The C entry points of the delta rule, and build_info().
#include "flash_qla/flash_qla.h"

#include <string>

#include "core/commit.h"
#include "core/context_parallel.h"
#include "core/convolution.h"
#include "core/norm.h"
#include "core/operation.h"
#include "core/validate.h"

// What the CUDA kernels are compiled for, as CMake names it.
#ifndef FLASH_QLA_CUDA_ARCHITECTURES
#define FLASH_QLA_CUDA_ARCHITECTURES "none"
#endif

namespace flash_qla {
namespace {

// What differs between the operations: their arguments, rules and table.
struct ChunkForwardOp {
  using Arguments = flash_qla_forward_arguments;
  using Problem = flash_qla::Problem;
  static constexpr const char* kName = "chunk_forward";
  static const std::vector<const ForwardPath*>& paths() { return chunk_forward_paths(); }
  static bool shapes_alone(const Arguments& a) { return a.q.data == nullptr; }
  static Status validate(const Arguments& a, const char* name, bool need_data, Problem* p) {
    return validate_forward(a, ForwardKind::kChunked, name, need_data, p);
  }
  static Status check_data(const Arguments& a, const char* name, const Problem& p, void* stream) {
    return check_forward_data(a, name, p, stream);
  }
};

struct RecurrentOp {
  using Arguments = flash_qla_forward_arguments;
  using Problem = flash_qla::Problem;
  static constexpr const char* kName = "recurrent";
  static const std::vector<const ForwardPath*>& paths() { return recurrent_paths(); }
  static bool shapes_alone(const Arguments& a) { return a.q.data == nullptr; }
  static Status validate(const Arguments& a, const char* name, bool need_data, Problem* p) {
    return validate_forward(a, ForwardKind::kRecurrent, name, need_data, p);
  }
  static Status check_data(const Arguments& a, const char* name, const Problem& p, void* stream) {
    return check_forward_data(a, name, p, stream);
  }
};

struct ChunkBackwardOp {
  using Arguments = flash_qla_backward_arguments;
  using Problem = flash_qla::Problem;
  static constexpr const char* kName = "chunk_backward";
  static const std::vector<const BackwardPath*>& paths() { return chunk_backward_paths(); }
  static bool shapes_alone(const Arguments& a) { return a.q.data == nullptr; }
  static Status validate(const Arguments& a, const char* name, bool need_data, Problem* p) {
    return validate_backward(a, name, need_data, p);
  }
  static Status check_data(const Arguments& a, const char* name, const Problem& p, void* stream) {
    return check_backward_data(a, name, p, stream);
  }
};

template <class Table>
void append_names(const char* label, const Table& table, std::string* text) {
  *text += std::string(label) + ":";
  for (const auto* path : table) *text += std::string(" ") + path->name;
  *text += "\n";
}

}  // namespace
}  // namespace flash_qla

using namespace flash_qla;  // this file defines the C functions of that namespace, outside of it

extern "C" {

void flash_qla_forward_arguments_init(flash_qla_forward_arguments* args) {
  if (args == nullptr) return;
  *args = flash_qla_forward_arguments{};
  args->struct_size = sizeof(*args);
  args->options = default_options();
  args->null_index = -1;
}

void flash_qla_backward_arguments_init(flash_qla_backward_arguments* args) {
  if (args == nullptr) return;
  *args = flash_qla_backward_arguments{};
  args->struct_size = sizeof(*args);
  args->options = default_options();
}

flash_qla_status flash_qla_chunk_forward_can_implement(const flash_qla_forward_arguments* args) {
  return can_implement<ChunkForwardOp>(args);
}
flash_qla_status flash_qla_chunk_forward_workspace_size(const flash_qla_forward_arguments* args, size_t* bytes) {
  return workspace_size<ChunkForwardOp>(args, bytes);
}
flash_qla_status flash_qla_chunk_forward_run(const flash_qla_forward_arguments* args, void* workspace, size_t bytes,
                                             void* stream) {
  return run<ChunkForwardOp>(args, workspace, bytes, stream);
}
flash_qla_status flash_qla_chunk_forward_explain(const flash_qla_forward_arguments* args, char* text, size_t size) {
  return explain<ChunkForwardOp>(args, text, size);
}

flash_qla_status flash_qla_recurrent_can_implement(const flash_qla_forward_arguments* args) {
  return can_implement<RecurrentOp>(args);
}
flash_qla_status flash_qla_recurrent_workspace_size(const flash_qla_forward_arguments* args, size_t* bytes) {
  return workspace_size<RecurrentOp>(args, bytes);
}
flash_qla_status flash_qla_recurrent_run(const flash_qla_forward_arguments* args, void* workspace, size_t bytes,
                                         void* stream) {
  return run<RecurrentOp>(args, workspace, bytes, stream);
}
flash_qla_status flash_qla_recurrent_explain(const flash_qla_forward_arguments* args, char* text, size_t size) {
  return explain<RecurrentOp>(args, text, size);
}

flash_qla_status flash_qla_chunk_backward_can_implement(const flash_qla_backward_arguments* args) {
  return can_implement<ChunkBackwardOp>(args);
}
flash_qla_status flash_qla_chunk_backward_workspace_size(const flash_qla_backward_arguments* args, size_t* bytes) {
  return workspace_size<ChunkBackwardOp>(args, bytes);
}
flash_qla_status flash_qla_chunk_backward_run(const flash_qla_backward_arguments* args, void* workspace, size_t bytes,
                                              void* stream) {
  return run<ChunkBackwardOp>(args, workspace, bytes, stream);
}
flash_qla_status flash_qla_chunk_backward_explain(const flash_qla_backward_arguments* args, char* text, size_t size) {
  return explain<ChunkBackwardOp>(args, text, size);
}

flash_qla_status flash_qla_build_info(char* text, size_t size) {
  return guarded("build_info", [&]() -> Status {
    std::string info = "version: " + std::to_string(FLASH_QLA_VERSION_MAJOR) + "." +
                       std::to_string(FLASH_QLA_VERSION_MINOR) + "." + std::to_string(FLASH_QLA_VERSION_PATCH) + "\n" +
                       "commit: " + source_commit() + "\n" +
                       // docs/determinism.md
                       "determinism: repeatable\n" + "invariance: auto_cp=False; auto_cp=\"invariant\"\n" +
                       "cuda_architectures: " + FLASH_QLA_CUDA_ARCHITECTURES + "\n";
    append_names("chunk_forward", chunk_forward_paths(), &info);
    append_names("recurrent", recurrent_paths(), &info);
    append_names("chunk_backward", chunk_backward_paths(), &info);
    append_names("conv_forward", conv_forward_paths(), &info);
    append_names("conv_update", conv_update_paths(), &info);
    append_names("conv_backward", conv_backward_paths(), &info);
    append_names("norm_gated", norm_gated_paths(), &info);
    append_names("norm_gated_backward", norm_gated_backward_paths(), &info);
    append_names("sequence_cut", sequence_cut_paths(), &info);
    append_names("chunk_summary", chunk_summary_paths(), &info);
    append_names("chunk_summary_backward", chunk_summary_backward_paths(), &info);
    append_names("summary_combine", summary_combine_paths(), &info);
    append_names("verify", verify_paths(), &info);
    for (const DeviceAccess* access : device_accesses()) info += access->describe();
    return copy_text(info, text, size, "build_info");
  });
}

}  // extern "C"
