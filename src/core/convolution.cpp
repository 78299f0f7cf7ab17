// The C entry points of the convolution.
#include "flash_qla/convolution.h"

#include "core/convolution.h"
#include "core/operation.h"

namespace flash_qla {
namespace {

template <ConvKind kKind>
struct ConvOp {
  using Arguments = flash_qla_conv_arguments;
  using Problem = ConvProblem;
  static constexpr const char* kName = kKind == ConvKind::kForward ? "conv_forward" : "conv_update";
  static const std::vector<const ConvPath*>& paths() {
    return kKind == ConvKind::kForward ? conv_forward_paths() : conv_update_paths();
  }
  static bool shapes_alone(const Arguments& a) { return a.parts[0].x.data == nullptr; }
  static Status validate(const Arguments& a, const char* name, bool need_data, Problem* p) {
    return validate_conv(a, kKind, name, need_data, p);
  }
  static Status check_data(const Arguments& a, const char* name, const Problem& p, void* stream) {
    return check_conv_data(a, name, p, stream);
  }
};
using ConvForwardOp = ConvOp<ConvKind::kForward>;
using ConvUpdateOp = ConvOp<ConvKind::kUpdate>;

struct ConvBackwardOp {
  using Arguments = flash_qla_conv_backward_arguments;
  using Problem = ConvProblem;
  static constexpr const char* kName = "conv_backward";
  static const std::vector<const ConvBackwardPath*>& paths() { return conv_backward_paths(); }
  static bool shapes_alone(const Arguments& a) { return a.parts[0].x.data == nullptr; }
  static Status validate(const Arguments& a, const char* name, bool need_data, Problem* p) {
    return validate_conv_backward(a, name, need_data, p);
  }
  static Status check_data(const Arguments& a, const char* name, const Problem& p, void* stream) {
    return check_conv_backward_data(a, name, p, stream);
  }
};

}  // namespace
}  // namespace flash_qla

using namespace flash_qla;  // this file defines the C functions of that namespace, outside of it

extern "C" {

void flash_qla_conv_arguments_init(flash_qla_conv_arguments* args) {
  if (args == nullptr) return;
  *args = flash_qla_conv_arguments{};
  args->struct_size = sizeof(*args);
  args->options = default_options();
  args->null_index = -1;
}

void flash_qla_conv_backward_arguments_init(flash_qla_conv_backward_arguments* args) {
  if (args == nullptr) return;
  *args = flash_qla_conv_backward_arguments{};
  args->struct_size = sizeof(*args);
  args->options = default_options();
}

flash_qla_status flash_qla_conv_forward_can_implement(const flash_qla_conv_arguments* args) {
  return can_implement<ConvForwardOp>(args);
}
flash_qla_status flash_qla_conv_forward_workspace_size(const flash_qla_conv_arguments* args, size_t* bytes) {
  return workspace_size<ConvForwardOp>(args, bytes);
}
flash_qla_status flash_qla_conv_forward_run(const flash_qla_conv_arguments* args, void* workspace, size_t bytes,
                                            void* stream) {
  return run<ConvForwardOp>(args, workspace, bytes, stream);
}
flash_qla_status flash_qla_conv_forward_explain(const flash_qla_conv_arguments* args, char* text, size_t size) {
  return explain<ConvForwardOp>(args, text, size);
}

flash_qla_status flash_qla_conv_update_can_implement(const flash_qla_conv_arguments* args) {
  return can_implement<ConvUpdateOp>(args);
}
flash_qla_status flash_qla_conv_update_workspace_size(const flash_qla_conv_arguments* args, size_t* bytes) {
  return workspace_size<ConvUpdateOp>(args, bytes);
}
flash_qla_status flash_qla_conv_update_run(const flash_qla_conv_arguments* args, void* workspace, size_t bytes,
                                           void* stream) {
  return run<ConvUpdateOp>(args, workspace, bytes, stream);
}
flash_qla_status flash_qla_conv_update_explain(const flash_qla_conv_arguments* args, char* text, size_t size) {
  return explain<ConvUpdateOp>(args, text, size);
}

flash_qla_status flash_qla_conv_backward_can_implement(const flash_qla_conv_backward_arguments* args) {
  return can_implement<ConvBackwardOp>(args);
}
flash_qla_status flash_qla_conv_backward_workspace_size(const flash_qla_conv_backward_arguments* args, size_t* bytes) {
  return workspace_size<ConvBackwardOp>(args, bytes);
}
flash_qla_status flash_qla_conv_backward_run(const flash_qla_conv_backward_arguments* args, void* workspace,
                                             size_t bytes, void* stream) {
  return run<ConvBackwardOp>(args, workspace, bytes, stream);
}
flash_qla_status flash_qla_conv_backward_explain(const flash_qla_conv_backward_arguments* args, char* text,
                                                 size_t size) {
  return explain<ConvBackwardOp>(args, text, size);
}

}  // extern "C"
