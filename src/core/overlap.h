// Whether tensors share memory. Decided by addresses and strides: what cannot be shown to lie apart counts as shared.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem.h"

namespace flash_qla {

// The bytes from the first of some elements to the last. Unsigned: strides that no memory has wrap around.
struct ByteRange {
  uint64_t begin, size;
};

inline uint64_t byte_distance(const Tensor& t, int32_t dimension) {
  const uint64_t stride = static_cast<uint64_t>(t.stride[dimension]);
  return (t.stride[dimension] < 0 ? 0 - stride : stride) * static_cast<uint64_t>(size_of(dtype(t)));
}

// Of all elements; with a pitch, of those that lie in one period of it: dimensions of whole multiples do not count.
inline ByteRange byte_range(const Tensor& t, uint64_t pitch) {
  ByteRange range{reinterpret_cast<uint64_t>(t.data), static_cast<uint64_t>(size_of(dtype(t)))};
  for (int32_t i = 0; i < t.ndim; ++i) {
    const uint64_t distance = byte_distance(t, i);
    if (t.shape[i] <= 1 || (pitch > 0 && distance % pitch == 0)) continue;
    const uint64_t reach = static_cast<uint64_t>(t.shape[i] - 1) * distance;
    range.size += reach;
    if (t.stride[i] < 0) range.begin -= reach;
  }
  return range;
}

inline bool has_elements(const Tensor& t) {
  return present(t) && t.data != nullptr && std::find(t.shape, t.shape + t.ndim, 0) == t.shape + t.ndim;
}

// Whether two tensors, whose elements lie in `all_a` and `all_b`, share a byte. Apart are those of separate ranges, and
// columns of one wider matrix: elements that no distance between rows brings together.
inline bool share_memory(const Tensor& a, const ByteRange& all_a, const Tensor& b, const ByteRange& all_b) {
  if (all_a.begin + all_a.size <= all_b.begin || all_b.begin + all_b.size <= all_a.begin) return false;
  for (const Tensor* t : {&a, &b}) {
    for (int32_t i = 0; i < t->ndim; ++i) {
      const uint64_t pitch = byte_distance(*t, i);
      if (t->shape[i] <= 1 || pitch == 0) continue;
      const ByteRange of_a = byte_range(a, pitch), of_b = byte_range(b, pitch);
      const uint64_t from_a_to_b = (of_b.begin % pitch + pitch - of_a.begin % pitch) % pitch;
      if (of_a.size <= from_a_to_b && of_b.size <= pitch - from_a_to_b) return false;
    }
  }
  return true;
}

// Whether two of a tensor's elements share a byte. Apart are those whose every stride passes all elements of the
// smaller strides.
inline bool repeats_memory(const Tensor& t) {
  for (int32_t i = 0; i < t.ndim; ++i) {
    if (t.shape[i] <= 1) continue;
    const uint64_t distance = byte_distance(t, i);
    uint64_t passed = static_cast<uint64_t>(size_of(dtype(t)));
    for (int32_t j = 0; j < t.ndim; ++j) {
      const uint64_t other = byte_distance(t, j);
      const bool is_smaller = other < distance || (other == distance && j < i);
      if (t.shape[j] > 1 && is_smaller) passed += static_cast<uint64_t>(t.shape[j] - 1) * other;
    }
    if (distance < passed) return true;
  }
  return false;
}

}  // namespace flash_qla
