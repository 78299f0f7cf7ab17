// The C++ side of flash_qla/verify.h. flash_qla.hpp includes it.
#pragma once

#include <string>

#include "flash_qla/flash_qla.hpp"
#include "flash_qla/verify.h"

namespace flash_qla {

struct VerifyArguments : ArgumentsOf<flash_qla_verify_arguments> {
  VerifyArguments() { flash_qla_verify_arguments_init(this); }
};

// Draft tokens in chains or trees, from states that are read and not written.
struct Verify {
  static Status can_implement(const VerifyArguments& args) { return flash_qla_verify_can_implement(&args); }
  static Status workspace_size(const VerifyArguments& args, size_t* bytes) {
    return flash_qla_verify_workspace_size(&args, bytes);
  }
  static Status run(const VerifyArguments& args, void* workspace, size_t bytes, void* stream = nullptr) {
    return flash_qla_verify_run(&args, workspace, bytes, stream);
  }
  static std::string explain(const VerifyArguments& args) {
    return detail::whole_text([&](char* text, size_t size) { return flash_qla_verify_explain(&args, text, size); });
  }
};

}  // namespace flash_qla
