// States of ranks' parts (entering_*, leaving_* of the arguments) for paths that know rows of initial_state and dht
// alone: one small kernel copies them to such rows in the workspace. It costs the memory of N states and the time to
// write them (2 MiB for a sequence of 32 heads of 128 x 128). Calls without such states go through as they are.
#pragma once

#include "core/registry.h"
#include "cuda/common/launch.h"

namespace flash_qla::cuda {

// What stands in for initial_state or dht: [N, Hv, K, V] float32 (float64) in the call's layout of states.
class RowsOfStates {
 public:
  // `rows`, `of_parts`: a pair of arguments; absent: nothing stands in. Takes memory from the workspace.
  RowsOfStates(const Tensor& rows, const Tensor& of_parts, bool v_first, const Problem& p, Workspace* workspace);

  // The rows, or `given` (initial_state or dht) where nothing stands in for it.
  const Tensor& in_place_of(const Tensor& given) const { return present(states_) ? states_ : given; }

  // Fills the rows: those of parts with theirs, the others with those of `given` or zeros.
  Status fill(const Tensor& given, const Problem& p, const Queue& queue) const;

 private:
  Tensor rows_, of_parts_, states_{};
  bool v_first_;
};

// A call with rows in place of states of parts.
struct ForwardOfRows {
  using Arguments = flash_qla_forward_arguments;

  ForwardOfRows(const Arguments& given, const Problem& p, void* memory)
      : workspace(memory),
        initial(given.entering_rows, given.entering_state, given.options.state_v_first != 0, p, &workspace),
        args(given) {
    args.initial_state = initial.in_place_of(given.initial_state);
    args.entering_rows = args.entering_state = Tensor{};
  }
  Status fill(const Arguments& given, const Problem& p, const Queue& queue) const {
    return initial.fill(given.initial_state, p, queue);
  }

  Workspace workspace;
  RowsOfStates initial;
  Arguments args;
};

struct BackwardOfRows {
  using Arguments = flash_qla_backward_arguments;

  BackwardOfRows(const Arguments& given, const Problem& p, void* memory)
      : workspace(memory),
        initial(given.entering_rows, given.entering_state, given.options.state_v_first != 0, p, &workspace),
        last(given.leaving_rows, given.leaving_dht, given.options.state_v_first != 0, p, &workspace),
        args(given) {
    args.initial_state = initial.in_place_of(given.initial_state);
    args.dht = last.in_place_of(given.dht);
    args.entering_rows = args.entering_state = args.leaving_rows = args.leaving_dht = Tensor{};
  }
  Status fill(const Arguments& given, const Problem& p, const Queue& queue) const {
    FLASH_QLA_RETURN_IF_ERROR(initial.fill(given.initial_state, p, queue));
    return last.fill(given.dht, p, queue);
  }

  Workspace workspace;
  RowsOfStates initial, last;
  Arguments args;
};

// The functions of a path that takes states of parts, around those of `kPath`.
template <const auto* kPath, class Call>
struct WithPartStates {
  using Arguments = typename Call::Arguments;

  static std::string reject(const Arguments& args, const Problem& p) {
    return kPath->reject(Call(args, p, nullptr).args, p);
  }
  static size_t workspace_size(const Arguments& args, const Problem& p) {
    const Call call(args, p, nullptr);
    return call.workspace.bytes() + kPath->workspace_size(call.args, p);
  }
  static Status run(const Arguments& args, const Problem& p, void* memory, void* stream) {
    const Call call(args, p, memory);
    const size_t used = call.workspace.bytes();
    if (used > 0) {
      const DeviceGuard guard(args.options.device_index);
      FLASH_QLA_RETURN_IF_ERROR(guard.status());
      const Queue queue{static_cast<cudaStream_t>(stream), allows_overlap(args.options.device_index)};
      FLASH_QLA_RETURN_IF_ERROR(call.fill(args, p, queue));
    }
    return kPath->run(call.args, p, memory == nullptr ? nullptr : static_cast<char*>(memory) + used, stream);
  }
  static std::string notes(const Arguments& args, const Problem& p) {
    return kPath->notes == nullptr ? std::string() : kPath->notes(Call(args, p, nullptr).args, p);
  }
};

}  // namespace flash_qla::cuda
