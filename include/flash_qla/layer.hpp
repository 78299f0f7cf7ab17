// The C++ interface of the layer's operations, convolution and gated norm. flash_qla.hpp includes it.
//
//   flash_qla::ConvArguments args;
//   args.num_parts = 1;
//   args.parts[0].x = flash_qla::tensor(x, flash_qla::DType::kFloat32, {B, T, 1, C});
//   ...
//   if (auto s = flash_qla::ConvForward::run(args, workspace, bytes, stream); !s.ok()) return fail(s.message());
#pragma once

#include "flash_qla/flash_qla.hpp"

namespace flash_qla {

// Arguments start from the defaults of the C structures; see convolution.h and norm.h for each member's shape and unit.
struct ConvArguments : ArgumentsOf<flash_qla_conv_arguments> {
  ConvArguments() { flash_qla_conv_arguments_init(this); }
};
struct ConvBackwardArguments : ArgumentsOf<flash_qla_conv_backward_arguments> {
  ConvBackwardArguments() { flash_qla_conv_backward_arguments_init(this); }
};
struct NormGatedArguments : ArgumentsOf<flash_qla_norm_gated_arguments> {
  NormGatedArguments() { flash_qla_norm_gated_arguments_init(this); }
};
struct NormGatedBackwardArguments : ArgumentsOf<flash_qla_norm_gated_backward_arguments> {
  NormGatedBackwardArguments() { flash_qla_norm_gated_backward_arguments_init(this); }
};

namespace detail {

// The three calls of an operation, and explain(), from its C functions.
template <class Arguments, auto kCanImplement, auto kWorkspaceSize, auto kRun, auto kExplain>
struct Operation {
  static Status can_implement(const Arguments& args) { return kCanImplement(&args); }
  static Status workspace_size(const Arguments& args, size_t* bytes) { return kWorkspaceSize(&args, bytes); }
  static Status run(const Arguments& args, void* workspace, size_t bytes, void* stream = nullptr) {
    return kRun(&args, workspace, bytes, stream);
  }
  static std::string explain(const Arguments& args) {
    return whole_text([&](char* text, size_t size) { return kExplain(&args, text, size); });
  }
};

}  // namespace detail

// Whole sequences.
struct ConvForward
    : detail::Operation<ConvArguments, flash_qla_conv_forward_can_implement, flash_qla_conv_forward_workspace_size,
                        flash_qla_conv_forward_run, flash_qla_conv_forward_explain> {};

// The next tokens of each sequence.
struct ConvUpdate
    : detail::Operation<ConvArguments, flash_qla_conv_update_can_implement, flash_qla_conv_update_workspace_size,
                        flash_qla_conv_update_run, flash_qla_conv_update_explain> {};

// Gradients of whole sequences.
struct ConvBackward : detail::Operation<ConvBackwardArguments, flash_qla_conv_backward_can_implement,
                                        flash_qla_conv_backward_workspace_size, flash_qla_conv_backward_run,
                                        flash_qla_conv_backward_explain> {};

struct NormGated
    : detail::Operation<NormGatedArguments, flash_qla_norm_gated_can_implement, flash_qla_norm_gated_workspace_size,
                        flash_qla_norm_gated_run, flash_qla_norm_gated_explain> {};

struct NormGatedBackward : detail::Operation<NormGatedBackwardArguments, flash_qla_norm_gated_backward_can_implement,
                                             flash_qla_norm_gated_backward_workspace_size,
                                             flash_qla_norm_gated_backward_run, flash_qla_norm_gated_backward_explain> {
};

}  // namespace flash_qla
