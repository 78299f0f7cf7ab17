// Reading and writing host tensors of any dtype, one element at a time: for the reference, index vectors and checks.
// Code that needs speed converts rows instead.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/half.h"
#include "core/problem.h"

namespace flash_qla {

inline int64_t offset_of(const Tensor& t, int64_t i, int64_t j = 0, int64_t k = 0, int64_t l = 0) {
  return i * t.stride[0] + j * t.stride[1] + k * t.stride[2] + l * t.stride[3];
}

inline double load(const Tensor& t, int64_t offset) {
  switch (dtype(t)) {
    case DType::kFloat64:
      return static_cast<const double*>(t.data)[offset];
    case DType::kFloat32:
      return static_cast<const float*>(t.data)[offset];
    case DType::kBFloat16:
      return to_float(static_cast<const BFloat16*>(t.data)[offset]);
    case DType::kFloat16:
      return to_float(static_cast<const Float16*>(t.data)[offset]);
    case DType::kInt32:
      return static_cast<const int32_t*>(t.data)[offset];
    case DType::kInt64:
      return static_cast<double>(static_cast<const int64_t*>(t.data)[offset]);
    case DType::kBool:
      return static_cast<const uint8_t*>(t.data)[offset];
  }
  return 0.0;
}

inline void store(const Tensor& t, int64_t offset, double x) {
  switch (dtype(t)) {
    case DType::kFloat64:
      static_cast<double*>(t.data)[offset] = x;
      break;
    case DType::kFloat32:
      static_cast<float*>(t.data)[offset] = static_cast<float>(x);
      break;
    case DType::kBFloat16:
      static_cast<BFloat16*>(t.data)[offset] = to_bfloat16(static_cast<float>(x));
      break;
    case DType::kFloat16:
      static_cast<Float16*>(t.data)[offset] = to_float16(static_cast<float>(x));
      break;
    default:  // outputs are floating point: validation has seen to it
      break;
  }
}

// Element of an index vector or matrix (int32 or int64).
inline int64_t load_index(const Tensor& t, int64_t i, int64_t j = 0) {
  const int64_t offset = i * t.stride[0] + (t.ndim > 1 ? j * t.stride[1] : 0);
  return dtype(t) == DType::kInt32 ? static_cast<const int32_t*>(t.data)[offset]
                                   : static_cast<const int64_t*>(t.data)[offset];
}

// Where one sequence lies: tokens [begin, begin + length) of batch row `b`; its chunks start at row `first_chunk` of h.
struct Sequence {
  int64_t b = 0;
  int64_t begin = 0;
  int64_t length = 0;
  int64_t first_chunk = 0;
  int64_t chunks() const { return ceil_div(length, kChunkSize); }
};

// The N sequences of a call whose cu_seqlens lies in host memory. Offsets out of order or out of range are clamped, so
// that no value in cu_seqlens can lead outside the tensors.
inline std::vector<Sequence> host_sequences(const Tensor& cu_seqlens, const Problem& p) {
  std::vector<Sequence> sequences(static_cast<size_t>(p.N));
  int64_t chunk = 0, end = 0;
  if (p.varlen) end = std::clamp<int64_t>(load_index(cu_seqlens, 0), 0, p.T);
  for (int64_t n = 0; n < p.N; ++n) {
    Sequence& s = sequences[static_cast<size_t>(n)];
    if (p.varlen) {
      s.begin = end;
      end = std::clamp<int64_t>(load_index(cu_seqlens, n + 1), end, p.T);
      s.length = end - s.begin;
    } else {
      s.b = n;
      s.length = p.T;
    }
    s.first_chunk = chunk;
    chunk += s.chunks();
  }
  return sequences;
}

// The part whose entering state a sequence starts from, or whose leaving gradient it ends with (`rows`: entering_rows
// or leaving_rows): -1 for none.
inline int64_t part_of_row(const Tensor& rows, int64_t n) {
  for (int64_t part = 0; present(rows) && part < rows.shape[0]; ++part) {
    if (load_index(rows, part) == n) return part;
  }
  return -1;
}

// The pool slot of an index, or -1 where it is null or past the pool: a row that starts there is skipped, a write to it
// is left out.
inline int64_t slot_or_skip(int64_t index, int64_t null_index, int64_t slots) {
  return index > null_index && index >= 0 && index < slots ? index : -1;
}

}  // namespace flash_qla
