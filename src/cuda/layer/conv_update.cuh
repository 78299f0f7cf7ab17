// The convolution of the next tokens of each sequence. A warp has one sequence and up to 256 channels (a head, where it
// is normalised), a lane the channels l, l + 32 ..: what a lane reads it alone writes, so states and inputs are
// replaced in place.
#pragma once

#include "cuda/common/gates.cuh"
#include "cuda/layer/conv_any.cuh"
#include "cuda/layer/conv_channel.cuh"

namespace flash_qla::cuda {

constexpr int kUpdateThreads = 64;  // small blocks: one sequence of 8192 channels has 64 of them

// Channels [first, first + count) of a head, as ConvUnit, but 128 at a time where no norm joins them.
constexpr int kUpdateChannels = 128;

template <class Part>
__host__ __device__ inline int64_t update_units_of(const Part& part) {
  return part.heads * (part.l2norm ? 1 : (part.dim + kUpdateChannels - 1) / kUpdateChannels);
}

__device__ inline ConvUnit update_unit_at(const ConvPart* parts, int num_parts, int64_t unit) {
  int i = 0;
  while (i + 1 < num_parts && unit >= update_units_of(parts[i])) unit -= update_units_of(parts[i++]);
  if (parts[i].l2norm) return {i, static_cast<int>(unit), 0, parts[i].dim};
  const int64_t of_head = update_units_of(parts[i]) / parts[i].heads;
  const int first = static_cast<int>(unit % of_head) * kUpdateChannels, rest = parts[i].dim - first;
  return {i, static_cast<int>(unit / of_head), first, rest < kUpdateChannels ? rest : kUpdateChannels};
}

// A lane's channels.
template <int kPer>
struct LaneChannels {
  const ConvPart& part;
  const ConvUnit& unit;
  int lane;

  __device__ __forceinline__ bool has(int i) const { return lane + 32 * i < unit.count; }
  __device__ __forceinline__ int dim(int i) const { return unit.first + lane + 32 * i; }
  __device__ __forceinline__ int channel(int i) const { return unit.head * part.dim + dim(i); }
  __device__ __forceinline__ uint32_t raw_x(int64_t b, int64_t t, int i) const {
    return has(i) ? load_raw(part.x, offset_of(part.x, b, t, unit.head, dim(i))) : 0;
  }
};

// What a state's entries become, and the windows after draft tokens. All inputs are still there.
template <int kPer>
__device__ inline void update_states(const ConvParams& p, const LaneChannels<kPer>& own, const ConvSpan& span,
                                     const ConvSlots& slots, int width) {
  const ConvSequences& s = p.sequences;
  const ConvPart& part = own.part;
  const int64_t tokens = span.end - span.begin;
  const auto input = [&](int64_t t, int i) {
    return load<float>(part.x, offset_of(part.x, span.b, span.begin + t, own.unit.head, own.dim(i)));
  };
  // The input at a position that may lie before the sequence. An entry is read before it is written: each is made of
  // a later one.
  const auto input_or_history = [&](int64_t t, int i) {
    if (t >= 0) return input(t, i);
    if (slots.read < 0) return 0.0f;
    const int64_t entry = entry_before(s, span.n, -t, width);
    return load<float>(part.initial_state, offset_of(part.initial_state, slots.read, own.channel(i), entry));
  };
  if (p.drafts.data != nullptr) {
    const int64_t row = p.draft_rows.data == nullptr ? span.n : load_index(p.draft_rows, span.n);
    for (int64_t t = 0; row >= 0 && row < p.draft_count && t < tokens && t < p.draft_tokens; ++t) {
      for (int i = 0; i < kPer; ++i) {
        for (int k = 0; own.has(i) && k < width - 1; ++k) {
          store<float>(p.drafts, offset_of(p.drafts, row, t, part.channel + own.channel(i), k),
                       input_or_history(t + 1 - (width - 1) + k, i));
        }
      }
    }
  }
  if (slots.write == kNoSlot) return;
  const DeviceTensor& state = part.final_state;
  const auto put = [&](int64_t entry, int i, float x) {
    store<float>(state, offset_of(state, slots.write, own.channel(i), entry), x);
  };
  // Entries that stay as they were are copied where the state goes elsewhere.
  const auto stays = [&](int64_t entry, int i) {
    return slots.read < 0
               ? 0.0f
               : load<float>(part.initial_state, offset_of(part.initial_state, slots.read, own.channel(i), entry));
  };
  if (s.ring.data != nullptr) {
    const int64_t start = entry_before(s, span.n, 0, width);
    for (int64_t l = 0; l < s.L; ++l) {
      const int64_t first = (l - start + s.L) % s.L;  // the first token that is written there
      for (int i = 0; i < kPer; ++i) {
        if (own.has(i)) put(l, i, first < tokens ? input(first + (tokens - 1 - first) / s.L * s.L, i) : stays(l, i));
      }
    }
    return;
  }
  for (int64_t l = 0; l < s.L; ++l) {
    // The window of draft tokens begins behind what was accepted; what lies past its end stays.
    const bool kept = s.accepted.data != nullptr && (tokens == 0 || l >= width - 2 + tokens);
    const int64_t t = s.accepted.data != nullptr ? l - (width - 2) : tokens - s.L + l;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (!own.has(i)) continue;
      if (kept || (s.accepted.data == nullptr && t < 0)) {
        put(l, i, stays(kept ? l : s.L + t, i));
      } else {
        put(l, i, input_or_history(t, i));
      }
    }
  }
}

// kPer: channels of a lane; kWidth: weights of a channel, at most.
template <int kPer, int kWidth>
__global__ void __launch_bounds__(kUpdateThreads, 4)
    conv_update_kernel(const __grid_constant__ ConvParams p, int64_t units, int64_t blocks) {
  if (blockIdx.x >= blocks) return gate_block(p.gates, blockIdx.x - blocks);
  const ConvSequences& s = p.sequences;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * (kUpdateThreads / 32) + threadIdx.x / 32;
  if (item >= s.N * units) return;
  const int width = p.width;
  const ConvUnit unit = update_unit_at(p.parts, p.num_parts, item % units);
  const ConvPart& part = p.parts[unit.part];
  const LaneChannels<kPer> own = {part, unit, static_cast<int>(threadIdx.x) % 32};
  const ConvSpan span = span_of(s, item / units);
  const ConvSlots slots = conv_slots(s, span.n);

  // Everything is on its way before anything is waited for.
  uint32_t raw_weights[kWidth][kPer], raw_history[kWidth][kPer], raw_bias[kPer], first[kPer];
  const bool reads = slots.read >= 0;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    raw_bias[i] =
        own.has(i) && part.bias.data != nullptr ? load_raw(part.bias, offset_of(part.bias, own.channel(i))) : 0;
    first[i] = span.begin < span.end ? own.raw_x(span.b, span.begin, i) : 0;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const bool wanted = own.has(i) && j < width;
      raw_weights[j][i] = wanted ? load_raw(part.weight, offset_of(part.weight, own.channel(i), j)) : 0;
      raw_history[j][i] = 0;
      if (!wanted || j + 1 >= width || !reads) continue;
      const int64_t entry = entry_before(s, span.n, width - 1 - j, width);
      raw_history[j][i] =
          load_raw(part.initial_state, offset_of(part.initial_state, slots.read, own.channel(i), entry));
    }
  }
  float w[kWidth][kPer], window[kWidth][kPer], bias[kPer];  // window: [j] is the input W - 1 - j places before the next
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    bias[i] = part.bias.data != nullptr ? unpack(part.bias, raw_bias[i]) : 0.0f;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      w[j][i] = unpack(part.weight, raw_weights[j][i]);
      window[j][i] = reads ? unpack(part.initial_state, raw_history[j][i]) : 0.0f;
    }
  }
  const bool skip = slots.read == kSkipRow;
  if (!skip) update_states<kPer>(p, own, span, slots, width);

  for (int64_t t = span.begin; t < span.end; ++t) {
    float u[kPer], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const float x = unpack(part.x, t == span.begin ? first[i] : own.raw_x(span.b, t, i));
      u[i] = bias[i];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        if (j == width - 1) window[j][i] = x;
        u[i] = fmaf(w[j][i], window[j][i], u[i]);
      }
#pragma unroll
      for (int j = 0; j + 1 < kWidth; ++j) window[j][i] = window[j + 1][i];
      if (p.silu) u[i] *= sigmoid(u[i]);
      if (own.has(i)) sum = fmaf(u[i], u[i], sum);
    }
    float r = 1.0f;
    if (part.l2norm) {
      r = 1.0f / sqrtf((skip ? 0.0f : warp_total(sum)) + static_cast<float>(kL2NormEps));
      if (part.inverse_norm.data != nullptr && own.lane == 0) {
        store<float>(part.inverse_norm, offset_of(part.inverse_norm, span.b, t, unit.head), r);
      }
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (!own.has(i)) continue;
      float y = skip ? 0.0f : u[i] * r;
      if (part.residual.data != nullptr && !skip) {
        y += load<float>(part.residual, offset_of(part.residual, span.b, t, unit.head, own.dim(i)));
      }
      store<float>(part.y, offset_of(part.y, span.b, t, unit.head, own.dim(i)), y);
    }
  }
}

// Zero to the outputs of tokens outside all sequences.
__global__ void __launch_bounds__(kStateThreads)
    conv_zero_outside_kernel(const __grid_constant__ ConvParams p, int64_t units, int64_t blocks) {
  const ConvSequences& s = p.sequences;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * (kStateThreads / 32) + threadIdx.x / 32;
  if (item >= s.T * units) return;
  const int64_t t = item / units;
  if (t >= clamp_to(load_index(s.cu_seqlens, 0), 0, s.T) && t < load_index(s.cu_seqlens, s.N)) return;
  const ConvUnit unit = update_unit_at(p.parts, p.num_parts, item % units);
  const ConvPart& part = p.parts[unit.part];
  for (int c = static_cast<int>(threadIdx.x) % 32; c < unit.count; c += 32) {
    store<float>(part.y, offset_of(part.y, 0, t, unit.head, unit.first + c), 0.0f);
  }
  if (part.l2norm && part.inverse_norm.data != nullptr && threadIdx.x % 32 == 0) {
    const float none = 1.0f / sqrtf(static_cast<float>(kL2NormEps));
    store<float>(part.inverse_norm, offset_of(part.inverse_norm, 0, t, unit.head), none);
  }
}

}  // namespace flash_qla::cuda
