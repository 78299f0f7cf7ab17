// Rows of the convolution in scratch: which channels a task has, its inputs, the terms of each token, and states.
//
// A task is a run of tokens of one batch row and a block of channels. Runs and blocks follow from shapes alone, so that
// bits depend on neither the number of threads nor the sequences beside.
#pragma once

#include <algorithm>
#include <vector>

#include "core/convolution_host.h"
#include "cpu/layer/kernels.h"
#include "cpu/scratch.h"
#include "cpu/tensors.h"

namespace flash_qla::cpu {

// Tokens of a run, and channels of a block whose head is not normalised: inputs and outputs of 128 x 256 in float32
// take 270 KiB, half of a small second-level cache. Narrower blocks touch too many pages: 256 x 64 takes 1.2 times as
// long in float32 and 1.35 times in bfloat16 (2048 tokens of 2048 channels). The rows before a run are converted once
// more.
constexpr int64_t kRunTokens = 128;
constexpr int64_t kBlockChannels = 256;

// `columns` channels from `first` on of head `head` of part `part`. Heads that follow each other without a gap in all
// tensors of a part are one head.
struct ChannelBlock {
  int32_t part;
  int64_t head, first, columns;
  int64_t channel;      // of `first` within the part
  int64_t all_channel;  // within the call
};

inline bool heads_follow(const Tensor& t) {
  return !present(t) || t.shape[2] == 1 || t.stride[2] == t.shape[3] * t.stride[3];
}

// The blocks of a part that has `tensors` of [B, T, H, D].
inline void append_blocks(std::vector<ChannelBlock>* blocks, int32_t part, const Tensor& x, bool l2norm,
                          std::initializer_list<const Tensor*> tensors, int64_t channels_before) {
  int64_t heads = x.shape[2], dim = x.shape[3];
  const bool joined = std::all_of(tensors.begin(), tensors.end(), [](const Tensor* t) { return heads_follow(*t); });
  if (!l2norm && joined) {
    dim *= heads;
    heads = 1;
  }
  for (int64_t head = 0; head < heads; ++head) {
    const int64_t step = l2norm ? dim : kBlockChannels;
    for (int64_t first = 0; first < dim; first += step) {
      const int64_t channel = head * dim + first;
      blocks->push_back({part, head, first, std::min(step, dim - first), channel, channels_before + channel});
    }
  }
}

inline int64_t most_columns(const std::vector<ChannelBlock>& blocks) {
  int64_t most = 0;
  for (const ChannelBlock& block : blocks) most = std::max(most, padded(block.columns));
  return most;
}

// The tokens of a block in a [B, T, H, D] tensor, from `token` on.
inline View block_rows(const Tensor& t, const ChannelBlock& block, int64_t b, int64_t token) {
  const int64_t offset = offset_of(t, b, token, block.head) + block.first * t.stride[3];
  return view_at(t, offset, t.stride[1], t.stride[3]);
}

// The entries of a block's state, from `entry` on, a row each.
inline View state_rows(const Tensor& t, const ChannelBlock& block, int64_t row, int64_t entry) {
  return view_at(t, offset_of(t, row, block.channel, entry), t.stride[2], t.stride[1]);
}

// Rows to and from scratch whose rows are `stride` apart.
template <class T>
void load_rows(View from, int64_t rows, int64_t columns, int64_t stride, T* to) {
  if (stride == columns) return kernels<T>().load(from, rows, columns, to);
  const int64_t bytes = from.row_stride * size_of(from.type);
  for (int64_t i = 0; i < rows; ++i, from.data = static_cast<char*>(from.data) + bytes) {
    kernels<T>().load(from, 1, columns, to + i * stride);
    std::fill(to + i * stride + columns, to + (i + 1) * stride, T(0));
  }
}

template <class T>
void store_rows(const T* from, int64_t rows, int64_t columns, int64_t stride, View to) {
  if (stride == columns) return kernels<T>().store(from, rows, columns, to);
  const int64_t bytes = to.row_stride * size_of(to.type);
  for (int64_t i = 0; i < rows; ++i, to.data = static_cast<char*>(to.data) + bytes) {
    kernels<T>().store(from + i * stride, 1, columns, to);
  }
}

// One thread's rows of one task. Positions are tokens of the batch row.
template <class T>
struct ConvRows {
  T* x;            // [tokens + W - 1, stride] inputs, from position `x_begin` on
  T* history;      // [W - 1, stride] inputs before a sequence, oldest first
  T* zero;         // [stride]
  T* weights;      // [W, stride]
  T* bias;         // [stride]
  const T** taps;  // [tokens, W]
  int64_t x_begin, stride;

  ConvRows(Arena* arena, int64_t tokens, int64_t W, int64_t most) {
    x = arena->take<T>((tokens + W - 1) * most);
    history = arena->take<T>(W * most);
    zero = arena->take<T>(most);
    weights = arena->take<T>(W * most);
    bias = arena->take<T>(most);
    taps = arena->take<const T*>(tokens * W);
  }

  template <class Part>
  void load_weights(const Part& part, const ChannelBlock& block, int64_t W) {
    stride = padded(block.columns);
    std::fill_n(zero, stride, T(0));
    const View w =
        view_at(part.weight, block.channel * part.weight.stride[0], part.weight.stride[1], part.weight.stride[0]);
    load_rows(w, W, block.columns, stride, weights);
    if (!present(part.bias)) return static_cast<void>(std::fill_n(bias, stride, T(0)));
    load_rows(view_at(part.bias, block.channel * part.bias.stride[0], 0, part.bias.stride[0]), 1, block.columns, stride,
              bias);
  }

  // Inputs from `begin` to `end`, as far as the batch row has them.
  void load_inputs(const Tensor& tensor, const ChannelBlock& block, int64_t b, int64_t begin, int64_t end) {
    x_begin = std::max<int64_t>(begin, 0);
    if (end > x_begin) load_rows(block_rows(tensor, block, b, x_begin), end - x_begin, block.columns, stride, x);
  }

  // The inputs before a sequence.
  void load_history(const Tensor& state, const ChannelBlock& block, const ConvSequence& s, const ConvProblem& p) {
    for (int64_t steps = 1; steps < p.W; ++steps) {
      T* row = history + (p.W - 1 - steps) * stride;
      const ConvSource source = s.before(steps, p);
      if (source.kind == ConvSource::Kind::kZero) {
        std::fill_n(row, stride, T(0));
      } else {
        load_rows(state_rows(state, block, s.read_row, source.index), 1, block.columns, stride, row);
      }
    }
  }

  const T* input(int64_t position) const { return x + (position - x_begin) * stride; }

  // The input at a position, which may lie before its sequence.
  const T* input_or_history(int64_t position, const ConvSequence& s, int64_t W) const {
    return position >= s.begin ? input(position) : history + (W - 1 + position - s.begin) * stride;
  }

  // The terms of tokens [begin, end) of a sequence, of `seq_idx` where it is given; those of token i go to taps[i -
  // at].
  void set_taps(const Tensor& seq_idx, const ConvSequence& s, int64_t begin, int64_t end, int64_t at, int64_t W) const {
    for (int64_t t = begin; t < end; ++t) {
      const T** token = taps + (t - at) * W;
      const int64_t own = present(seq_idx) ? sequence_index(seq_idx, s.b, t) : 0;
      for (int64_t j = 0; j < W; ++j) {
        const int64_t position = t - (W - 1) + j;
        const bool apart = present(seq_idx) && (position < s.begin || sequence_index(seq_idx, s.b, position) != own);
        token[j] = apart ? zero : input_or_history(position, s, W);
      }
    }
  }
};

// Calls fn(sequence, begin, end) for the tokens [begin, end) of each sequence of batch row b that lie in [first, last).
template <class Function>
void for_segments(const std::vector<ConvSequence>& sequences, bool varlen, int64_t b, int64_t first, int64_t last,
                  Function&& fn) {
  auto s = varlen ? std::partition_point(sequences.begin(), sequences.end(),
                                         [&](const ConvSequence& q) { return q.begin + q.length <= first; })
                  : sequences.begin() + b;
  for (; s != sequences.end() && s->b == b && s->begin < last; ++s) {
    const int64_t begin = std::max(first, s->begin), end = std::min(last, s->begin + s->length);
    if (begin < end) fn(static_cast<int64_t>(s - sequences.begin()), begin, end);
  }
}

// Floating-point operations of an element of the convolution, by which threads are counted: its terms, and an
// exponential.
constexpr double kConvOperations = 30.0;

}  // namespace flash_qla::cpu
