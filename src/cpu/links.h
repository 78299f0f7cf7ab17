// What the two summaries of parts have in common: the part's row, a chunk's inputs, and where a head forgets.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/context_parallel.h"
#include "core/host_tensor.h"
#include "cpu/gates.h"
#include "cpu/kernels.h"
#include "cpu/tensors.h"

namespace flash_qla::cpu {

inline bool flag(const Tensor& t, int64_t part) { return load(t, part * t.stride[0]) != 0.0; }

// The sequence of a part's first token (`end` 0) or last one (1); NULL without.
inline const Sequence* row_of_part(const Tensor& rows, int64_t part, int64_t end,
                                   const std::vector<Sequence>& sequences) {
  const int64_t row = load_index(rows, part, end);
  if (row < 0 || row >= static_cast<int64_t>(sequences.size())) return nullptr;
  const Sequence& s = sequences[static_cast<size_t>(row)];
  return s.length > 0 ? &s : nullptr;
}

// Zeroes a [K, columns] matrix of a link.
inline void zero_matrix(const Tensor& t, int64_t part, int64_t head) {
  for (int64_t i = 0; i < t.shape[2]; ++i) {
    for (int64_t j = 0; j < t.shape[3]; ++j) store(t, offset_of(t, part, head, i, j), 0.0);
  }
}

// Keys and gates of chunks of one sequence and value head.
template <class T, class Arguments>
class LinkChunks {
 public:
  LinkChunks(const Arguments& args, const GateArguments& gate_arguments, const Problem& p, const Sequence& s,
             int64_t head)
      : args_(args), p_(p), s_(s), head_(head), gates_(gate_arguments, head) {}

  int64_t count() const { return s_.chunks(); }
  int64_t token(int64_t i) const { return s_.begin + i * kChunkSize; }
  int64_t tokens(int64_t i) const { return std::min(kChunkSize, s_.length - i * kChunkSize); }

  void load_keys(const Tensor& x, int64_t i, T* to) const {
    kernels<T>().load(token_rows(x, s_.b, token(i), head_ / p_.group), tokens(i), p_.K, to);
    if (args_.options.use_qk_l2norm_in_kernel) kernels<T>().l2norm(to, tokens(i), p_.K, p_.dtype);
  }

  // Keys, gates, and what comes of them alone: G, gamma and A.
  void prepare(int64_t i, Chunk<T>* chunk) const {
    chunk->n = tokens(i);
    chunk->scale = static_cast<T>(p_.scale);
    load_keys(args_.k, i, chunk->k);
    gates_.cumsum(s_.b, token(i), chunk->n, chunk->c);
    for (int64_t t = 0; t < chunk->n; ++t) chunk->beta[t] = static_cast<T>(gates_.beta(s_.b, token(i) + t));
    kernels<T>().decays(*chunk);
    kernels<T>().inverse(*chunk);
  }

  // The logarithm of the most that a chunk leaves of any state before it: sum g + sum log max(1, |1 - beta |k|^2|).
  // `keys` is scratch of [64, K].
  double log_norm(int64_t i, T* keys) const {
    load_keys(args_.k, i, keys);
    double sum = 0.0;
    for (int64_t t = 0; t < tokens(i); ++t) {
      double square = 0.0;
      for (int64_t j = 0; j < p_.K; ++j) square += static_cast<double>(keys[t * p_.K + j]) * keys[t * p_.K + j];
      const double factor = std::abs(1.0 - gates_.beta(s_.b, token(i) + t) * square);
      sum += gates_.log_decay(s_.b, token(i) + t);
      if (!(factor <= 1.0)) sum += std::log(factor);  // a NaN stays one, and forgets nothing
    }
    return sum;
  }

  // The chunks from the last one on whose product leaves at most e^threshold of a state before them, or all of them and
  // one more (`count() + 1`) if even they leave more.
  int64_t last_window(double threshold, T* keys) const {
    double sum = 0.0;
    for (int64_t chunks = 1; chunks <= count(); ++chunks) {
      sum += log_norm(count() - chunks, keys);
      if (sum <= threshold) return chunks;
    }
    return count() + 1;
  }

  // The same of chunks from the first one on, for gradients.
  int64_t first_window(double threshold, T* keys) const {
    double sum = 0.0;
    for (int64_t chunks = 1; chunks <= count(); ++chunks) {
      sum += log_norm(chunks - 1, keys);
      if (sum <= threshold) return chunks;
    }
    return count() + 1;
  }

 private:
  const Arguments& args_;
  const Problem& p_;
  const Sequence& s_;
  int64_t head_;
  HeadGates gates_;
};

}  // namespace flash_qla::cpu
