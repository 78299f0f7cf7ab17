// The sequences of a convolution whose offsets and indices lie in host memory: where each one's states come from and go
// to, and which input or entry each place of a state is made of.
#pragma once

#include <vector>

#include "core/convolution.h"
#include "core/host_tensor.h"

namespace flash_qla {

// What a place of a state, or a term of the convolution, is read from.
struct ConvSource {
  enum class Kind { kZero, kState, kInput };
  Kind kind = Kind::kZero;
  int64_t index = 0;  // entry of the state, or token counted from the sequence's start
};

struct ConvSequence {
  int64_t b = 0, begin = 0, length = 0;
  bool skipped = false;    // y = 0, nothing read or written
  int64_t read_row = -1;   // of initial_state; -1: zeros
  int64_t write_row = -1;  // of final_state; -1: not written
  int64_t draft_row = -1;  // of draft_states
  int64_t accepted = -1;   // num_accepted_tokens - 1; -1: not given
  int64_t ring = -1;       // cache_seqlens mod L; -1: not given

  // The input `steps` places before the sequence's first token, 1 .. W - 1.
  ConvSource before(int64_t steps, const ConvProblem& p) const {
    if (read_row < 0) return {};
    if (ring >= 0) return {ConvSource::Kind::kState, (ring - steps % p.L + p.L) % p.L};
    if (accepted >= 0) return {ConvSource::Kind::kState, std::clamp<int64_t>(accepted + p.W - 1 - steps, 0, p.L - 1)};
    return {ConvSource::Kind::kState, p.L - steps};
  }

  // The input at position `token`, which may lie before the sequence.
  ConvSource input(int64_t token, const ConvProblem& p) const {
    return token >= 0 ? ConvSource{ConvSource::Kind::kInput, token} : before(-token, p);
  }

  // Entry `entry` of the state after `tokens` tokens. In a state that is not a window (a ring, or one with accepted
  // tokens) entries that the call does not set stay as they were.
  ConvSource after(int64_t entry, int64_t tokens, const ConvProblem& p) const {
    const ConvSource stays = read_row < 0 ? ConvSource{} : ConvSource{ConvSource::Kind::kState, entry};
    if (ring >= 0) {
      const int64_t first = (entry - ring + p.L) % p.L;  // the first token that is written there
      return first < tokens ? ConvSource{ConvSource::Kind::kInput, first + (tokens - 1 - first) / p.L * p.L} : stays;
    }
    if (accepted >= 0) {
      if (tokens == 0 || entry >= p.W - 2 + tokens) return stays;
      return input(entry - (p.W - 2), p);
    }
    const int64_t token = tokens - p.L + entry;
    if (token >= 0) return {ConvSource::Kind::kInput, token};
    return read_row < 0 ? ConvSource{} : ConvSource{ConvSource::Kind::kState, p.L + token};
  }
};

// A position of the call at which the state goes to a slot.
struct ConvCheckpoint {
  int64_t n, tokens, slot;
};

inline std::vector<Sequence> host_sequences(const Tensor& cu_seqlens, const ConvProblem& p) {
  Problem sizes;
  sizes.B = p.B;
  sizes.T = p.T;
  sizes.N = p.N;
  sizes.varlen = p.varlen;
  return host_sequences(cu_seqlens, sizes);
}

inline std::vector<ConvSequence> conv_sequences(const flash_qla_conv_backward_arguments& args, const ConvProblem& p) {
  std::vector<ConvSequence> sequences(static_cast<size_t>(p.N));
  const std::vector<Sequence> places = host_sequences(args.cu_seqlens, p);
  for (size_t n = 0; n < sequences.size(); ++n) {
    sequences[n] = {places[n].b, places[n].begin, places[n].length};
    if (present(args.parts[0].initial_state)) sequences[n].read_row = static_cast<int64_t>(n);
  }
  return sequences;
}

inline std::vector<ConvSequence> conv_sequences(const flash_qla_conv_arguments& args, const ConvProblem& p) {
  std::vector<ConvSequence> sequences(static_cast<size_t>(p.N));
  const std::vector<Sequence> places = host_sequences(args.cu_seqlens, p);
  const bool pool = present(args.initial_state_indices), has_states = present(args.parts[0].initial_state);
  const Tensor& finals = present(args.final_state_indices) ? args.final_state_indices : args.initial_state_indices;
  for (int64_t n = 0; n < p.N; ++n) {
    ConvSequence& s = sequences[static_cast<size_t>(n)];
    const Sequence& place = places[static_cast<size_t>(n)];
    s = {place.b, place.begin, place.length};
    const bool from_zero = !has_states || (present(args.has_initial_state) &&
                                           load(args.has_initial_state, offset_of(args.has_initial_state, n)) == 0.0);
    const auto slot = [&](const Tensor& indices) {
      return pool ? slot_or_skip(load_index(indices, n), args.null_index, p.slots) : n;
    };
    if (!from_zero) s.read_row = slot(args.initial_state_indices);
    s.skipped = pool && !from_zero && s.read_row < 0;
    if (present(args.parts[0].final_state) && !s.skipped) s.write_row = slot(finals);
    if (present(args.draft_states) && !s.skipped) {
      const int64_t row = present(args.draft_state_indices) ? load_index(args.draft_state_indices, n) : n;
      s.draft_row = row >= 0 && row < args.draft_states.shape[0] ? row : -1;
    }
    if (present(args.num_accepted_tokens)) {
      s.accepted = std::max<int64_t>(load_index(args.num_accepted_tokens, n) - 1, 0);
    }
    if (present(args.cache_seqlens)) s.ring = (load_index(args.cache_seqlens, n) % p.L + p.L) % p.L;
  }
  return sequences;
}

// The listed positions, sequence by sequence. One between two sequences belongs to the first of them.
inline std::vector<ConvCheckpoint> conv_checkpoints(const flash_qla_conv_arguments& args, const ConvProblem& p,
                                                    const std::vector<ConvSequence>& sequences) {
  std::vector<ConvCheckpoint> list;
  if (!present(args.checkpoint_offsets)) return list;
  const auto end = [&p](const ConvSequence& s) { return s.b * p.T + s.begin + s.length; };
  for (int64_t m = 0; m < args.checkpoint_offsets.shape[0]; ++m) {
    const int64_t position = load_index(args.checkpoint_offsets, m);
    const auto s = std::partition_point(sequences.begin(), sequences.end(),
                                        [&](const ConvSequence& sequence) { return end(sequence) < position; });
    if (s == sequences.end() || s->skipped) continue;
    const int64_t tokens = position - (s->b * p.T + s->begin);
    const int64_t slot = slot_or_skip(load_index(args.checkpoint_indices, m), args.null_index, p.slots);
    if (tokens > 0 && slot >= 0) list.push_back({s - sequences.begin(), tokens, slot});
  }
  std::stable_sort(list.begin(), list.end(),
                   [](const ConvCheckpoint& x, const ConvCheckpoint& y) { return x.n < y.n; });
  return list;
}

// Which sequence a token of seq_idx belongs to; negative: none.
inline int64_t sequence_index(const Tensor& seq_idx, int64_t b, int64_t t) { return load_index(seq_idx, b, t); }

}  // namespace flash_qla
