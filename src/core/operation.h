// The three calls of every operation, and explain(): validate, choose a path, call it. Every exception ends here.
//
// An operation is a structure `Op`:
//   Arguments, Problem     its C structure, and what validation makes of it
//   kName                  what error messages begin with where options.operation is NULL
//   paths()                its table, in order of preference (registry.h)
//   validate(args, name, need_data, &problem), check_data(args, name, problem, stream)
//   shapes_alone(args)     whether sizes are asked for before tensors exist
#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <limits>
#include <string>

#include "core/device_check.h"
#include "core/registry.h"
#include "core/status.h"
#include "flash_qla/flash_qla.hpp"

namespace flash_qla {

inline flash_qla_options default_options() {
  flash_qla_options options{};
  options.scale = std::numeric_limits<double>::quiet_NaN();
  options.cp_mode = FLASH_QLA_CP_AUTO;
  return options;
}

inline const char* device_name(int32_t type) { return type == FLASH_QLA_CUDA ? "cuda" : "cpu"; }

// Picks the path. `report`, if wanted, gets a line for each path looked at.
template <class Op>
Status choose(const typename Op::Arguments& args, const char* name, const typename Op::Problem& problem,
              const Path<typename Op::Arguments, typename Op::Problem>** chosen, std::string* report) {
  const char* wanted = args.options.path;
  std::string names, reasons;
  bool device_known = false, name_known = false;
  *chosen = nullptr;
  for (const auto* path : Op::paths()) {
    if (path->device != args.options.device_type) continue;
    device_known = true;
    names += std::string(names.empty() ? "" : ", ") + path->name;
    const bool named = wanted != nullptr && std::strcmp(path->name, wanted) == 0;
    name_known |= named;
    if (wanted != nullptr ? !named : path->only_by_name) continue;
    const std::string reason = path->reject(args, problem);
    if (report != nullptr) {
      *report += std::string(path->name) + ": " +
                 (!reason.empty()      ? reason
                  : *chosen == nullptr ? "taken"
                                       : "possible, not preferred") +
                 "\n";
    }
    if (reason.empty()) {
      if (*chosen == nullptr) *chosen = path;
      if (report == nullptr) return Status();
    }
    reasons += std::string(reasons.empty() ? "" : "; ") + path->name + " " + reason;
  }
  if (*chosen != nullptr) return Status();
  if (!device_known) {
    return make_status(FLASH_QLA_NOT_IMPLEMENTED,
                       "%s: device (%s) must be one that this build has kernels for: build with FLASH_QLA_CUDA=ON, or "
                       "move the tensors to the CPU",
                       name, device_name(args.options.device_type));
  }
  if (wanted != nullptr && !name_known) {
    return make_status(FLASH_QLA_INVALID_VALUE, "%s: path (%s) must be one of: %s", name, wanted, names.c_str());
  }
  return make_status(FLASH_QLA_NOT_IMPLEMENTED, "%s: no path computes this call on device %s (%s)", name,
                     device_name(args.options.device_type), reasons.c_str());
}

template <class Op>
const char* operation_name(const typename Op::Arguments& args) {
  return args.options.operation != nullptr ? args.options.operation : Op::kName;
}

template <class Function>
flash_qla_status guarded(const char* name, Function&& function) noexcept {
  try {
    return function().c_status();
  } catch (const std::exception& e) {
    return make_status(FLASH_QLA_RUNTIME_ERROR, "%s: %s", name, e.what()).c_status();
  } catch (...) {
    return make_status(FLASH_QLA_RUNTIME_ERROR, "%s: unknown failure", name).c_status();
  }
}

// guarded(), for arguments that are there and laid out as this library has them. `function` takes the operation's name.
template <class Op, class Function>
flash_qla_status guarded_call(const typename Op::Arguments* args, Function&& function) noexcept {
  if (args == nullptr) {
    return make_status(FLASH_QLA_INVALID_VALUE, "%s: args (NULL) must be given", Op::kName).c_status();
  }
  if (args->struct_size != sizeof(*args)) {  // nothing else in the structure can be trusted
    return make_status(FLASH_QLA_INVALID_VALUE,
                       "%s: args.struct_size (%zu) must be %zu: start from the init function of this version",
                       Op::kName, args->struct_size, sizeof(*args))
        .c_status();
  }
  const char* name = operation_name<Op>(*args);
  return guarded(name, [&] { return function(name); });
}

// Paths want their scratch aligned like this (registry.h); callers bring what malloc or an allocator gives them. So
// every size has room to move the start up.
constexpr size_t kWorkspaceAlignment = 256;

template <class Arguments, class Problem>
size_t workspace_bytes(const Path<Arguments, Problem>& path, const Arguments& args, const Problem& problem) {
  const size_t needed = path.workspace_size(args, problem);
  return needed == 0 ? 0 : needed + kWorkspaceAlignment - 1;
}

// Scratch for a call whose tensors do not exist yet: strides and addresses may make any path that takes these shapes
// the one that computes it.
template <class Op>
size_t largest_workspace(const typename Op::Arguments& args, const typename Op::Problem& problem) {
  size_t bytes = 0;
  for (const auto* path : Op::paths()) {
    if (path->device != args.options.device_type || path->only_by_name || !path->reject(args, problem).empty())
      continue;
    bytes = std::max(bytes, workspace_bytes(*path, args, problem));
  }
  return bytes;
}

inline void* aligned(void* workspace) {
  const auto address = reinterpret_cast<uintptr_t>(workspace);
  return reinterpret_cast<void*>((address + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment);
}

template <class Op>
flash_qla_status can_implement(const typename Op::Arguments* args) {
  return guarded_call<Op>(args, [&](const char* name) -> Status {
    typename Op::Problem problem;
    FLASH_QLA_RETURN_IF_ERROR(Op::validate(*args, name, false, &problem));
    const Path<typename Op::Arguments, typename Op::Problem>* path;
    return choose<Op>(*args, name, problem, &path, nullptr);
  });
}

template <class Op>
flash_qla_status workspace_size(const typename Op::Arguments* args, size_t* bytes) {
  return guarded_call<Op>(args, [&](const char* name) -> Status {
    if (bytes == nullptr) return make_status(FLASH_QLA_INVALID_VALUE, "%s: bytes (NULL) must be given", name);
    typename Op::Problem problem;
    FLASH_QLA_RETURN_IF_ERROR(Op::validate(*args, name, false, &problem));
    const Path<typename Op::Arguments, typename Op::Problem>* path;
    FLASH_QLA_RETURN_IF_ERROR(choose<Op>(*args, name, problem, &path, nullptr));
    const bool shapes_alone = Op::shapes_alone(*args) && args->options.path == nullptr;
    *bytes = shapes_alone ? largest_workspace<Op>(*args, problem) : workspace_bytes(*path, *args, problem);
    return Status();
  });
}

template <class Op>
flash_qla_status run(const typename Op::Arguments* args, void* workspace, size_t bytes, void* stream) {
  return guarded_call<Op>(args, [&](const char* name) -> Status {
    typename Op::Problem problem;
    FLASH_QLA_RETURN_IF_ERROR(Op::validate(*args, name, true, &problem));
    const Path<typename Op::Arguments, typename Op::Problem>* path;
    FLASH_QLA_RETURN_IF_ERROR(choose<Op>(*args, name, problem, &path, nullptr));
    const size_t needed = workspace_bytes(*path, *args, problem);
    if (needed > bytes || (needed > 0 && workspace == nullptr)) {
      return make_status(FLASH_QLA_INVALID_VALUE, "%s: workspace (%zu bytes%s) must hold at least %zu bytes", name,
                         bytes, workspace == nullptr ? ", NULL" : "", needed);
    }
    if (wants_device_check(args->options)) FLASH_QLA_RETURN_IF_ERROR(Op::check_data(*args, name, problem, stream));
    return path->run(*args, problem, aligned(workspace), stream);
  });
}

inline Status copy_text(const std::string& from, char* text, size_t size, const char* name) {
  if (text == nullptr || size == 0) {
    return make_status(FLASH_QLA_INVALID_VALUE, "%s: text (%zu bytes) must have room for a terminator", name, size);
  }
  const size_t n = std::min(size - 1, from.size());
  std::memcpy(text, from.data(), n);
  text[n] = '\0';
  return Status();
}

template <class Op>
flash_qla_status explain(const typename Op::Arguments* args, char* text, size_t size) {
  return guarded_call<Op>(args, [&](const char* name) -> Status {
    typename Op::Problem problem;
    FLASH_QLA_RETURN_IF_ERROR(Op::validate(*args, name, false, &problem));
    const Path<typename Op::Arguments, typename Op::Problem>* path;
    std::string report;
    FLASH_QLA_RETURN_IF_ERROR(choose<Op>(*args, name, problem, &path, &report));
    const std::string head = std::string("path: ") + path->name +
                             "\nworkspace: " + std::to_string(workspace_bytes(*path, *args, problem)) + " bytes\n";
    const std::string notes = path->notes != nullptr ? path->notes(*args, problem) : std::string();
    return copy_text(head + notes + report, text, size, name);
  });
}

}  // namespace flash_qla
