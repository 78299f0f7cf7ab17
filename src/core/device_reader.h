// Reading integers from a device while a call is checked: only under check_device_data, for it waits.
#pragma once

#include <cstdint>
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

}  // namespace flash_qla
