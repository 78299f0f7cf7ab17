#include "cpu/tensors.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace flash_qla::cpu {

void fill_zero(const Tensor& t, int dim, int64_t begin, int64_t end) {
  if (!present(t)) return;
  int64_t first[4] = {0, 0, 0, 0}, last[4] = {1, 1, 1, 1};
  for (int32_t i = 0; i < t.ndim; ++i) last[i] = t.shape[i];
  first[dim] = std::max<int64_t>(begin, 0);
  last[dim] = std::min(end, last[dim]);
  const size_t bytes = static_cast<size_t>(size_of(dtype(t)));
  for (int64_t i = first[0]; i < last[0]; ++i) {
    for (int64_t j = first[1]; j < last[1]; ++j) {
      for (int64_t k = first[2]; k < last[2]; ++k) {
        for (int64_t l = first[3]; l < last[3]; ++l) {
          // Zero is all bits zero in every dtype.
          std::memset(static_cast<char*>(t.data) + offset_of(t, i, j, k, l) * static_cast<int64_t>(bytes), 0, bytes);
        }
      }
    }
  }
}

void zero_outside(const Tensor& t, const std::vector<Sequence>& sequences, const Problem& p) {
  if (!p.varlen) return;
  // Sequences of a packed batch follow each other without gaps.
  const bool any = !sequences.empty();
  fill_zero(t, 1, 0, any ? sequences.front().begin : p.T);
  if (any) fill_zero(t, 1, sequences.back().begin + sequences.back().length, p.T);
}

void zero_head(const Tensor& t, const Sequence& s, int64_t head) {
  if (!present(t)) return;
  Tensor part = t;
  part.data = view_at(t, offset_of(t, s.b, 0, head), 0, 0).data;
  part.shape[0] = part.shape[2] = 1;
  fill_zero(part, 1, s.begin, s.begin + s.length);
}

std::vector<int64_t> longest_first(const std::vector<Sequence>& sequences) {
  std::vector<int64_t> order(sequences.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return sequences[static_cast<size_t>(a)].length > sequences[static_cast<size_t>(b)].length;
  });
  return order;
}

}  // namespace flash_qla::cpu
