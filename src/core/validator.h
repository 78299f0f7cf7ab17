// The rules that the operations' arguments have in common: shapes, dtypes, memory. Each refusal names operation,
// argument, rule and what was given. Reads no tensor memory.
#pragma once

#include <cstdio>
#include <initializer_list>
#include <string>

#include "core/overlap.h"
#include "core/problem.h"
#include "core/status.h"
#include "flash_qla/flash_qla.hpp"

namespace flash_qla {

const char* dtype_name(const Tensor& t);

// A tensor with the name that its caller knows it by.
struct Named {
  const char* name;
  const Tensor& tensor;
};

// One extent that a shape must have: a value and where it comes from.
struct Extent {
  int64_t size;
  std::string source;
};

enum class Role { kInput, kOutput };

class Validator {
 public:
  Validator(const char* operation, const flash_qla_options& options, bool need_data)
      : operation_(operation), options_(options), need_data_(need_data) {}

  template <class... Values>
  Status value_error(const char* format, Values... values) const {
    return error(FLASH_QLA_INVALID_VALUE, format, values...);
  }
  template <class... Values>
  Status type_error(const char* format, Values... values) const {
    return error(FLASH_QLA_INVALID_TYPE, format, values...);
  }

  Status sizes(const Named& q, const Named& k, const Named& v, const Tensor& cu_seqlens, Problem* p) const;
  Status gates(const Tensor& g, const Tensor& beta, const Tensor& A_log, const Tensor& dt_bias, const Problem& p) const;

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
        return value_error("%s.shape[%d] (%lld) must be %s (%lld)", t.name, i, as_ll(t.tensor.shape[i]),
                           extent.source.c_str(), as_ll(extent.size));
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

  // float32, bfloat16 or float16; float64 beside float64 inputs.
  Status dtype_float(const Named& t, const Problem& p) const {
    if (is_float(dtype(t.tensor))) return Status();
    if (dtype(t.tensor) == DType::kFloat64 && p.dtype == DType::kFloat64) return Status();
    return type_error("%s.dtype (%s) must be float32, bfloat16 or float16%s", t.name, dtype_name(t.tensor),
                      dtype(t.tensor) == DType::kFloat64 ? " (float64 only with float64 q, k, v)" : "");
  }

  Status dtype_index(const Named& t) const {
    if (is_index(dtype(t.tensor))) return Status();
    return type_error("%s.dtype (%s) must be int32 or int64", t.name, dtype_name(t.tensor));
  }

  // The dtype of results that are kept in full precision.
  Status dtype_accumulator(const Named& t, const Problem& p) const {
    return p.dtype == DType::kFloat64 ? dtype_is(t, DType::kFloat64, "float64, as q is")
                                      : dtype_is(t, DType::kFloat32, "float32");
  }

  // [rows, Hv, K, V], or [rows, Hv, V, K] with state_v_first.
  Status state_shape(const Named& t, Role role, const Extent& rows, const Problem& p) const {
    const Extent key{p.K, "q.shape[3]"}, value{p.V, "v.shape[3]"}, heads{p.Hv, "v.shape[2]"};
    if (options_.state_v_first) return shape(t, role, {rows, heads, value, key});
    return shape(t, role, {rows, heads, key, value});
  }

  // Each state, the last three dimensions, is contiguous.
  Status whole_states(const Named& t) const {
    int64_t expected = 1;
    const int32_t first = t.tensor.ndim - 3;
    for (int32_t i = t.tensor.ndim - 1; i >= first; expected *= t.tensor.shape[i], --i) {
      if (t.tensor.shape[i] > 1 && t.tensor.stride[i] != expected) {
        return value_error("%s.stride[%d] (%lld) must be %lld: each slot is contiguous", t.name, i,
                           as_ll(t.tensor.stride[i]), as_ll(expected));
      }
    }
    return Status();
  }

  Status token_shape(const Named& t, Role role, const Problem& p) const {
    return shape(t, role, {{p.B, "q.shape[0]"}, {p.T, "q.shape[1]"}, {p.Hv, "v.shape[2]"}});
  }

  // [B, T, Hv, V]
  Status value_rows(const Named& t, Role role, const Problem& p) const {
    return shape(t, role, {{p.B, "q.shape[0]"}, {p.T, "q.shape[1]"}, {p.Hv, "v.shape[2]"}, {p.V, "v.shape[3]"}});
  }

  // T of a call that takes the tokens of one row as drafts.
  Status draft_tokens(const Problem& p) const {
    if (p.T <= FLASH_QLA_MAX_DRAFT_TOKENS) return Status();
    return value_error("q.shape[1] (%lld) must be at most %d draft tokens", as_ll(p.T), FLASH_QLA_MAX_DRAFT_TOKENS);
  }

  Status vector_of_sequences(const Named& t, const Problem& p, int64_t extra) const {
    FLASH_QLA_RETURN_IF_ERROR(
        shape(t, Role::kInput, {{p.N + extra, extra ? "the number of sequences + 1" : "the number of sequences"}}));
    return dtype_index(t);
  }

  Status options() const {
    if (options_.device_type != FLASH_QLA_CPU && options_.device_type != FLASH_QLA_CUDA) {
      return type_error("device_type (%d) must be FLASH_QLA_CPU or FLASH_QLA_CUDA", options_.device_type);
    }
    if (options_.cp_mode < FLASH_QLA_CP_OFF || options_.cp_mode > FLASH_QLA_CP_INVARIANT) {
      return value_error("cp_mode (%d) must be 0 (off), 1 (auto) or 2 (invariant)", options_.cp_mode);
    }
    if (!(options_.cp_tolerance <= kLargestTolerance)) {
      return value_error("cp_tolerance (%g) must be at most %g", options_.cp_tolerance, kLargestTolerance);
    }
    if (options_.num_threads < 0) return value_error("num_threads (%d) must not be negative", options_.num_threads);
    if (options_.allow_neg_eigval && !options_.use_beta_sigmoid_in_kernel) {
      return value_error("allow_neg_eigval (True) must come with use_beta_sigmoid_in_kernel (False)");
    }
    return Status();
  }

  // What a caller hands over to be written shares no memory with what is read, nor with each other.
  template <size_t kWritten, size_t kOthers>
  Status apart(const Named (&written)[kWritten], const Named (&others)[kOthers]) const {
    const Named* placed[kWritten + kOthers];  // those with elements, and where these lie
    ByteRange ranges[kWritten + kOthers];
    size_t count = 0;
    for (const Named& t : others) {
      if (!has_elements(t.tensor)) continue;
      ranges[count] = byte_range(t.tensor, 0);
      placed[count++] = &t;
    }
    for (const Named& t : written) {
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

  static long long as_ll(int64_t x) { return static_cast<long long>(x); }

 private:
  template <class... Values>
  Status error(flash_qla_code code, const char* format, Values... values) const {
    const std::string full = std::string("%s: ") + format;
    flash_qla_status status{};
    status.code = code;
    // The formats are literals of this file; the operation's name goes in front of each.
    std::snprintf(status.message, sizeof(status.message), full.c_str(), operation_, values...);
    return Status(status);
  }

  const char* operation_;
  const flash_qla_options& options_;
  bool need_data_;
};

}  // namespace flash_qla
