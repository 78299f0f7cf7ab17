#include "core/device_check.h"

#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "core/host_tensor.h"
#include "core/registry.h"
#include "core/status.h"

namespace flash_qla {
namespace {

long long as_ll(int64_t x) { return static_cast<long long>(x); }

// A host copy of an integer or bool tensor of at most two dimensions.
struct Integers {
  std::vector<int64_t> values;
  int64_t columns = 1;
  int64_t at(int64_t i, int64_t j = 0) const { return values[static_cast<size_t>(i * columns + j)]; }
};

Status read_integers(const Tensor& t, const flash_qla_options& options, void* stream, Integers* out) {
  out->columns = t.ndim > 1 ? t.shape[1] : 1;
  out->values.clear();
  const DeviceAccess* access = nullptr;
  for (const DeviceAccess* a : device_accesses()) {
    if (a->device == options.device_type) access = a;
  }
  if (access == nullptr) return Status();  // dispatch refuses the call for want of a path
  const int64_t bytes = size_of(dtype(t));
  for (int64_t i = 0; i < t.shape[0]; ++i) {
    for (int64_t j = 0; j < out->columns; ++j) {
      const int64_t offset = i * t.stride[0] + (t.ndim > 1 ? j * t.stride[1] : 0);
      unsigned char raw[8] = {};
      FLASH_QLA_RETURN_IF_ERROR(access->copy_to_host(raw, static_cast<const char*>(t.data) + offset * bytes,
                                                     static_cast<size_t>(bytes), options.device_index, stream));
      Tensor one = t;
      one.data = raw;
      out->values.push_back(static_cast<int64_t>(load(one, 0)));
    }
  }
  return Status();
}

}  // namespace

bool wants_device_check(const flash_qla_options& options) {
  if (options.check_device_data) return true;
  const char* value = std::getenv("FLASH_QLA_CHECK");
  return value != nullptr && std::strcmp(value, "1") == 0;
}

Status check_sequences(const Tensor& cu_seqlens, const flash_qla_options& options, const char* operation,
                       const Problem& p, void* stream) {
  if (!p.varlen) return Status();
  Integers cu;
  FLASH_QLA_RETURN_IF_ERROR(read_integers(cu_seqlens, options, stream, &cu));
  if (cu.at(0) != 0) {
    return make_status(FLASH_QLA_INVALID_VALUE, "%s: cu_seqlens[0] (%lld) must be 0", operation, as_ll(cu.at(0)));
  }
  for (int64_t n = 0; n < p.N; ++n) {
    if (cu.at(n + 1) < cu.at(n)) {
      return make_status(FLASH_QLA_INVALID_VALUE,
                         "%s: cu_seqlens[%lld] (%lld) must not be below cu_seqlens[%lld] (%lld)", operation,
                         as_ll(n + 1), as_ll(cu.at(n + 1)), as_ll(n), as_ll(cu.at(n)));
    }
  }
  if (cu.at(p.N) > p.T) {
    return make_status(FLASH_QLA_INVALID_VALUE, "%s: cu_seqlens[%lld] (%lld) must not be above q.shape[1] (%lld)",
                       operation, as_ll(p.N), as_ll(cu.at(p.N)), as_ll(p.T));
  }
  return Status();
}

Status check_pool(const flash_qla_forward_arguments& args, const char* operation, const Problem& p, void* stream) {
  if (!present(args.state_pool)) return Status();
  const int64_t slots = args.state_pool.shape[0];
  Integers initial, final, has, accepted, offsets, checkpoint_slots;
  FLASH_QLA_RETURN_IF_ERROR(read_integers(args.initial_state_indices, args.options, stream, &initial));
  const Tensor& final_tensor =
      present(args.final_state_indices) ? args.final_state_indices : args.initial_state_indices;
  FLASH_QLA_RETURN_IF_ERROR(read_integers(final_tensor, args.options, stream, &final));
  if (present(args.has_initial_state)) {
    FLASH_QLA_RETURN_IF_ERROR(read_integers(args.has_initial_state, args.options, stream, &has));
  }
  if (present(args.num_accepted_tokens)) {
    FLASH_QLA_RETURN_IF_ERROR(read_integers(args.num_accepted_tokens, args.options, stream, &accepted));
  }
  if (present(args.checkpoint_offsets)) {
    FLASH_QLA_RETURN_IF_ERROR(read_integers(args.checkpoint_offsets, args.options, stream, &offsets));
    FLASH_QLA_RETURN_IF_ERROR(read_integers(args.checkpoint_indices, args.options, stream, &checkpoint_slots));
  }

  // Who writes each slot: a row's number, or N + m for checkpoint m.
  std::unordered_map<int64_t, int64_t> writer;
  const auto in_pool = [&](const char* name, int64_t i, int64_t index) {
    if (index < slots) return Status();
    return make_status(FLASH_QLA_INVALID_VALUE, "%s: %s[%lld] (%lld) must be below state_pool.shape[0] (%lld)",
                       operation, name, as_ll(i), as_ll(index), as_ll(slots));
  };
  const auto write = [&](const char* name, int64_t i, int64_t index, int64_t who) {
    FLASH_QLA_RETURN_IF_ERROR(in_pool(name, i, index));
    if (slot_or_skip(index, args.null_index, slots) < 0) return Status();
    if (!writer.emplace(index, who).second) {
      return make_status(FLASH_QLA_INVALID_VALUE, "%s: %s[%lld] (%lld) must not name a slot that is written twice",
                         operation, name, as_ll(i), as_ll(index));
    }
    return Status();
  };
  const int64_t columns = final_tensor.ndim > 1 ? std::min<int64_t>(final.columns, p.T) : 1;
  const char* final_name = present(args.final_state_indices) ? "final_state_indices" : "initial_state_indices";
  for (int64_t n = 0; n < p.N; ++n) {
    for (int64_t t = 0; t < columns; ++t) FLASH_QLA_RETURN_IF_ERROR(write(final_name, n, final.at(n, t), n));
  }
  for (size_t m = 0; m < offsets.values.size(); ++m) {
    const int64_t i = static_cast<int64_t>(m), offset = offsets.at(i);
    if (offset < 1 || offset > p.T) {
      return make_status(FLASH_QLA_INVALID_VALUE,
                         "%s: checkpoint_offsets[%lld] (%lld) must be from 1 to q.shape[1] (%lld)", operation, as_ll(i),
                         as_ll(offset), as_ll(p.T));
    }
    FLASH_QLA_RETURN_IF_ERROR(write("checkpoint_indices", i, checkpoint_slots.at(i), p.N + i));
  }
  for (int64_t n = 0; n < p.N; ++n) {
    int64_t column = 0;
    if (!accepted.values.empty()) {
      column = accepted.at(n) - 1;
      if (column < 0 || column >= initial.columns) {
        return make_status(FLASH_QLA_INVALID_VALUE, "%s: num_accepted_tokens[%lld] (%lld) must be from 1 to %lld",
                           operation, as_ll(n), as_ll(accepted.at(n)), as_ll(initial.columns));
      }
    }
    if (!has.values.empty() && has.at(n) == 0) continue;
    const int64_t index = initial.at(n, column);
    FLASH_QLA_RETURN_IF_ERROR(in_pool("initial_state_indices", n, index));
    const auto found = writer.find(index);
    if (slot_or_skip(index, args.null_index, slots) >= 0 && found != writer.end() && found->second != n) {
      return make_status(FLASH_QLA_INVALID_VALUE,
                         "%s: initial_state_indices[%lld] (%lld) must not name a slot that another row writes",
                         operation, as_ll(n), as_ll(index));
    }
  }
  return Status();
}

Status check_checkpoint_rows(const flash_qla_forward_arguments& args, const char* operation, const Problem& p,
                             void* stream) {
  if (args.checkpoint_every <= 0) return Status();
  Integers starts, cu;
  FLASH_QLA_RETURN_IF_ERROR(read_integers(args.checkpoint_cu_starts, args.options, stream, &starts));
  if (p.varlen) FLASH_QLA_RETURN_IF_ERROR(read_integers(args.cu_seqlens, args.options, stream, &cu));
  for (int64_t n = 0; n < p.N; ++n) {
    const int64_t length = p.varlen ? cu.at(n + 1) - cu.at(n) : p.T;
    const int64_t rows = length / args.checkpoint_every;
    if (starts.at(n) < 0 || starts.at(n + 1) - starts.at(n) < rows || starts.at(n + 1) > args.checkpoints.shape[0]) {
      return make_status(FLASH_QLA_INVALID_VALUE,
                         "%s: checkpoint_cu_starts[%lld] (%lld) must leave %lld rows of checkpoints (%lld in all)",
                         operation, as_ll(n), as_ll(starts.at(n)), as_ll(rows), as_ll(args.checkpoints.shape[0]));
    }
  }
  return Status();
}

}  // namespace flash_qla
