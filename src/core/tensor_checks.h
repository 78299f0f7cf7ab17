// Rules about one tensor of a call, common to all operations: rank, extents, memory, dtype. Each refusal has the form
// "operation: argument rule (what was given)". Nothing here reads tensor memory.
#pragma once

#include <cstdio>
#include <initializer_list>
#include <string>

#include "core/overlap.h"
#include "core/problem.h"
#include "core/status.h"

namespace flash_qla {

inline const char* dtype_name(const Tensor& t) {
  switch (dtype(t)) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kFloat64:
      return "float64";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kBool:
      return "bool";
  }
  return "an unknown dtype";
}

// A tensor with the name that its caller knows it by.
struct Named {
  const char* name;
  const Tensor& tensor;
};

// One extent that a shape must have: a value and where it comes from.
struct Extent {
  int64_t size;
  const char* source;
};

enum class Role { kInput, kOutput };

class TensorChecks {
 public:
  TensorChecks(const char* operation, const flash_qla_options& options, bool need_data)
      : operation_(operation), options_(options), need_data_(need_data) {}

  template <class... Values>
  Status value_error(const char* format, Values... values) const {
    return error(FLASH_QLA_INVALID_VALUE, format, values...);
  }
  template <class... Values>
  Status type_error(const char* format, Values... values) const {
    return error(FLASH_QLA_INVALID_TYPE, format, values...);
  }

  Status require(const Named& t) const {
    if (!present(t.tensor)) return value_error("%s (None) must be given", t.name);
    return Status();
  }

  Status forbid(const Named& t, const char* rule) const {
    if (present(t.tensor)) return value_error("%s %s (it was given)", t.name, rule);
    return Status();
  }

  // Rank, extents, memory; outputs must not write one element twice.
  Status shape(const Named& t, Role role, std::initializer_list<Extent> extents) const {
    FLASH_QLA_RETURN_IF_ERROR(rank(t, static_cast<int32_t>(extents.size())));
    int32_t i = 0;
    for (const Extent& extent : extents) {
      if (extent.size >= 0 && t.tensor.shape[i] != extent.size) {
        return value_error("%s.shape[%d] (%lld) must be %s (%lld)", t.name, i, as_ll(t.tensor.shape[i]), extent.source,
                           as_ll(extent.size));
      }
      ++i;
    }
    return memory(t, role);
  }

  Status rank(const Named& t, int32_t ndim) const {
    if (t.tensor.ndim != ndim) return value_error("%s.ndim (%d) must be %d", t.name, t.tensor.ndim, ndim);
    for (int32_t i = 0; i < ndim; ++i) {
      if (t.tensor.shape[i] < 0) {
        return value_error("%s.shape[%d] (%lld) must not be negative", t.name, i, as_ll(t.tensor.shape[i]));
      }
    }
    return Status();
  }

  Status memory(const Named& t, Role role) const {
    int64_t bytes = size_of(dtype(t.tensor));
    bool fits = true;
    for (int32_t i = 0; i < t.tensor.ndim; ++i) {
      if (t.tensor.shape[i] == 0) return Status();
      fits = fits && !__builtin_mul_overflow(bytes, t.tensor.shape[i], &bytes);
    }
    if (!fits) return value_error("%s.shape (2^63 bytes or more in all) must fit into memory", t.name);
    if (need_data_ && t.tensor.data == nullptr) return value_error("%s.data (NULL) must point to memory", t.name);
    for (int32_t i = 0; role == Role::kOutput && i < t.tensor.ndim; ++i) {
      if (t.tensor.shape[i] > 1 && t.tensor.stride[i] == 0) {
        return value_error("%s.stride[%d] (0) must not be zero: it is written", t.name, i);
      }
    }
    if (role == Role::kOutput && repeats_memory(t.tensor)) {
      return value_error("%s.stride (some elements overlap) must give each element its own memory: it is written",
                         t.name);
    }
    return Status();
  }

  Status dtype_is(const Named& t, DType wanted, const char* rule) const {
    if (dtype(t.tensor) != wanted) return type_error("%s.dtype (%s) must be %s", t.name, dtype_name(t.tensor), rule);
    return Status();
  }

  // float32, bfloat16 or float16; float64 beside a float64 `wide`, of which `source` tells ("q, k, v").
  Status dtype_float(const Named& t, DType wide, const char* source) const {
    if (is_float(dtype(t.tensor))) return Status();
    const bool is_double = dtype(t.tensor) == DType::kFloat64;
    if (is_double && wide == DType::kFloat64) return Status();
    const std::string except = is_double ? std::string(" (float64 only with float64 ") + source + ")" : std::string();
    return type_error("%s.dtype (%s) must be float32, bfloat16 or float16%s", t.name, dtype_name(t.tensor),
                      except.c_str());
  }

  Status dtype_index(const Named& t) const {
    if (is_index(dtype(t.tensor))) return Status();
    return type_error("%s.dtype (%s) must be int32 or int64", t.name, dtype_name(t.tensor));
  }

  // What a caller hands over to be written shares no memory with what is read, nor with each other.
  template <size_t kWritten, size_t kOthers>
  Status apart(const Named (&written)[kWritten], const Named (&others)[kOthers]) const {
    return apart(written, kWritten, others, kOthers);
  }
  Status apart(const Named* written, size_t written_count, const Named* others, size_t other_count) const {
    constexpr size_t kMost = 96;
    const Named* placed[kMost];  // those with elements, and where these lie
    ByteRange ranges[kMost];
    size_t count = 0;
    for (size_t i = 0; i < other_count && count < kMost; ++i) {
      if (!has_elements(others[i].tensor)) continue;
      ranges[count] = byte_range(others[i].tensor, 0);
      placed[count++] = &others[i];
    }
    for (size_t j = 0; j < written_count && count < kMost; ++j) {
      const Named& t = written[j];
      if (!has_elements(t.tensor)) continue;
      const ByteRange range = byte_range(t.tensor, 0);
      for (size_t i = 0; i < count; ++i) {
        if (share_memory(t.tensor, range, placed[i]->tensor, ranges[i])) {
          return value_error("%s must not share memory with %s (they overlap)", t.name, placed[i]->name);
        }
      }
      ranges[count] = range;
      placed[count++] = &t;
    }
    return Status();
  }

  // Where the call runs, and in how many threads.
  Status device_options() const {
    if (options_.device_type != FLASH_QLA_CPU && options_.device_type != FLASH_QLA_CUDA) {
      return type_error("device_type (%d) must be FLASH_QLA_CPU or FLASH_QLA_CUDA", options_.device_type);
    }
    if (options_.num_threads < 0) return value_error("num_threads (%d) must not be negative", options_.num_threads);
    return Status();
  }

  static long long as_ll(int64_t x) { return static_cast<long long>(x); }

 protected:
  const flash_qla_options& call_options() const { return options_; }

 private:
  template <class... Values>
  Status error(flash_qla_code code, const char* format, Values... values) const {
    const std::string full = std::string("%s: ") + format;
    flash_qla_status status{};
    status.code = code;
    // The formats are literals of the rules; the operation's name goes in front of each.
    std::snprintf(status.message, sizeof(status.message), full.c_str(), operation_, values...);
    return Status(status);
  }

  const char* operation_;
  const flash_qla_options& options_;
  bool need_data_;
};

}  // namespace flash_qla
