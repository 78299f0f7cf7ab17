// Reading integers from a device while a call is checked: only under check_device_data, for it waits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "core/host_tensor.h"
#include "core/registry.h"
#include "core/status.h"

namespace flash_qla {

// A host copy of an integer or bool tensor of at most two dimensions.
struct Integers {
  std::vector<int64_t> values;
  int64_t columns = 1;
  bool given() const { return !values.empty(); }
  int64_t rows() const { return static_cast<int64_t>(values.size()) / columns; }
  int64_t at(int64_t i, int64_t j = 0) const { return values[static_cast<size_t>(i * columns + j)]; }
};

class DeviceReader {
 public:
  // A path has been chosen: the options' device has an access.
  DeviceReader(const char* operation, const flash_qla_options& options, void* stream)
      : operation_(operation), options_(options), stream_(stream) {
    for (const DeviceAccess* access : device_accesses()) {
      if (access->device == options.device_type) access_ = access;
    }
  }

  // Whether the device's memory can be read now.
  Status possible() const {
    if (!access_->is_capturing(stream_)) return Status();
    return make_status(FLASH_QLA_INVALID_VALUE,
                       "%s: FLASH_QLA_CHECK (1) must be off while the stream is captured into a graph: the check reads "
                       "device memory and waits",
                       operation_);
  }

  // All of a tensor in one copy, or one a column where columns lie apart. Nothing of one that is absent.
  Status read(const Tensor& t, Integers* out) const {
    if (!present(t)) return Status();
    out->columns = t.ndim > 1 ? t.shape[1] : 1;
    out->values.assign(static_cast<size_t>(t.shape[0] * out->columns), 0);
    if (!out->given()) return Status();
    const bool together = out->columns == 1 || t.stride[1] == 1;
    const int64_t size = size_of(dtype(t)), width = together ? out->columns : 1;
    std::vector<unsigned char> raw(static_cast<size_t>(t.shape[0] * width * size));
    Tensor copy = t;
    copy.data = raw.data();
    copy.ndim = 1;
    copy.stride[0] = 1;
    for (int64_t j = 0; j < out->columns; j += width) {
      const auto* column = static_cast<const char*>(t.data) + (t.ndim > 1 ? j * t.stride[1] : 0) * size;
      FLASH_QLA_RETURN_IF_ERROR(access_->copy_to_host(raw.data(), column, t.stride[0] * size, width * size, t.shape[0],
                                                      options_.device_index, stream_));
      for (int64_t i = 0; i < t.shape[0] * width; ++i) {
        const int64_t value = dtype(t) == DType::kBool ? raw[static_cast<size_t>(i)] : load_index(copy, i);
        out->values[static_cast<size_t>(i / width * out->columns + j + i % width)] = value;
      }
    }
    return Status();
  }

  // cu_seqlens of at most `tokens` tokens, which are `what`: from 0, never falling.
  Status sequences(const Tensor& cu_seqlens, int64_t tokens, const char* what, Integers* out) const {
    FLASH_QLA_RETURN_IF_ERROR(read(cu_seqlens, out));
    const auto number = [](int64_t x) { return static_cast<long long>(x); };
    if (out->at(0) != 0) {
      return make_status(FLASH_QLA_INVALID_VALUE, "%s: cu_seqlens[0] (%lld) must be 0", operation_, number(out->at(0)));
    }
    const int64_t last = out->rows() - 1;
    for (int64_t n = 0; n < last; ++n) {
      if (out->at(n + 1) < out->at(n)) {
        return make_status(FLASH_QLA_INVALID_VALUE,
                           "%s: cu_seqlens[%lld] (%lld) must not be below cu_seqlens[%lld] (%lld)", operation_,
                           number(n + 1), number(out->at(n + 1)), number(n), number(out->at(n)));
      }
    }
    if (out->at(last) > tokens) {
      return make_status(FLASH_QLA_INVALID_VALUE, "%s: cu_seqlens[%lld] (%lld) must not be above %s (%lld)", operation_,
                         number(last), number(out->at(last)), what, number(tokens));
    }
    return Status();
  }

  const char* operation() const { return operation_; }

 private:
  const char* operation_;
  const flash_qla_options& options_;
  void* stream_;
  const DeviceAccess* access_ = nullptr;
};

// Which row of a call writes which slot of a pool.
class SlotLedger {
 public:
  // `pool`: what messages call the pool's tensor.
  SlotLedger(const char* operation, const char* pool) : operation_(operation), pool_(pool) {}

  void open(int64_t slots, int64_t null_index) {
    slots_ = slots;
    null_index_ = null_index;
  }

  bool is_null(int64_t index) const { return index <= null_index_; }

  // Entry i of `name`, of a row that is not skipped.
  Status in_pool(const char* name, int64_t i, int64_t index) const {
    if (is_null(index) || (index >= 0 && index < slots_)) return Status();
    return make_status(FLASH_QLA_INVALID_VALUE, "%s: %s[%lld] (%lld) must be %s %s.shape[0] (%lld)", operation_, name,
                       number(i), number(index), index < 0 ? "null_index at most, or from 0 to below" : "below", pool_,
                       number(slots_));
  }

  // Row `row` writes slot `index`, which entry i of `name` says.
  Status write(const char* name, int64_t i, int64_t index, int64_t row) {
    FLASH_QLA_RETURN_IF_ERROR(in_pool(name, i, index));
    if (is_null(index) || writer_.emplace(index, row).second) return Status();
    return make_status(FLASH_QLA_INVALID_VALUE, "%s: %s[%lld] (%lld) must not name a slot that is written twice",
                       operation_, name, number(i), number(index));
  }

  // Row `row` reads slot `slot`: the pool is read and written in one call.
  Status read(int64_t row, int64_t slot) const {
    const auto found = writer_.find(slot);
    if (found == writer_.end() || found->second == row) return Status();
    return make_status(FLASH_QLA_INVALID_VALUE,
                       "%s: initial_state_indices[%lld] (%lld) must not name a slot that another row writes",
                       operation_, number(row), number(slot));
  }

 private:
  static long long number(int64_t x) { return static_cast<long long>(x); }

  const char *operation_, *pool_;
  int64_t slots_ = 0, null_index_ = -1;
  std::unordered_map<int64_t, int64_t> writer_;  // the row that writes a slot
};

// The sequence of the token before a packed position: `cu` are the offsets, absent where rows of T tokens follow each
// other.
inline int64_t sequence_before(int64_t position, const Integers& cu, int64_t T) {
  if (!cu.given()) return (position - 1) / T;
  return std::lower_bound(cu.values.begin(), cu.values.end(), position) - cu.values.begin() - 1;
}

}  // namespace flash_qla
