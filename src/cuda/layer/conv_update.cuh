// The convolution of the next tokens of each sequence. A warp has one sequence and up to 256 channels (a head, where it
// is normalised), a lane the channels l, l + 32 ..: what a lane reads it alone writes, so states and inputs are
// replaced in place.
#pragma once

#include "cuda/common/overlap.cuh"
#include "cuda/layer/conv_any.cuh"
#include "cuda/layer/vector.cuh"

namespace flash_qla::cuda {

constexpr int kUpdateThreads = 64;  // small blocks: one sequence of 8192 channels has 32 of them

constexpr int kUpdateChannels = 128;  // of a warp where no norm joins more: four of a lane

// A lane's channels.
template <int kPer>
struct LaneChannels {
  const ConvPart& part;
  const ConvUnit& unit;
  int lane;

  __device__ __forceinline__ bool has(int i) const { return lane + 32 * i < unit.count; }
  __device__ __forceinline__ int dim(int i) const { return unit.first + lane + 32 * i; }
  __device__ __forceinline__ int channel(int i) const { return unit.head * part.dim + dim(i); }
  // Of a tensor like x.
  __device__ __forceinline__ int64_t offset(const DeviceTensor& t, const ConvSpan& span, int64_t token, int i) const {
    return offset_of(t, span.b, token, unit.head, dim(i));
  }
};

// From u of a token to its output, which put(i, y) stores. exact: it is not rounded to 16 bits.
template <int kPer, class Put>
__device__ __forceinline__ void finish_token(const ConvParams& p, const LaneChannels<kPer>& own, const ConvSpan& span,
                                             int64_t t, bool skip, bool exact, float (&u)[kPer], Put&& put) {
  const ConvPart& part = own.part;
  float sum = 0.0f, r = 1.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (p.silu) u[i] *= exact ? sigmoid_for<float>(u[i]) : sigmoid_for<__half>(u[i]);
    if (own.has(i)) sum = fmaf(u[i], u[i], sum);
  }
  if (part.l2norm) {
    r = 1.0f / sqrtf((skip ? 0.0f : group_sum(sum, 32)) + static_cast<float>(kL2NormEps));
    if (part.inverse_norm.data != nullptr && own.lane == 0) {
      store<float>(part.inverse_norm, offset_of(part.inverse_norm, span.b, t, own.unit.head), r);
    }
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (!own.has(i)) continue;
    float y = skip ? 0.0f : u[i] * r;
    if (part.residual.data != nullptr && !skip) y += load<float>(part.residual, own.offset(part.residual, span, t, i));
    put(i, y);
  }
}

// Sequence and channels of a warp of conv_update.
struct UpdateItem {
  int64_t n;
  ConvUnit unit;

  __device__ __forceinline__ UpdateItem(const ConvParams& p, int32_t units) {
    const uint32_t item = blockIdx.x * (kUpdateThreads / 32) + threadIdx.x / 32, row = item / units;
    n = row;
    unit = unit_at<kUpdateChannels>(p.parts, p.num_parts, static_cast<int>(item - row * units));
  }
};

// Inputs of a state, and weights of a channel, at most, in conv_update_kernel.
constexpr int kShortWindow = 4;

template <class T>
using BitsOf = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;

template <class T>
__device__ __forceinline__ float float_of(uint32_t bits) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(bits);
  } else {
    float both[2];
    unpack_word(bits, static_cast<T*>(nullptr), both);
    return both[0];
  }
}

// The last elements of a row, the last one last and zero in front of them. Bits alone: converting would wait for them.
template <class T>
struct ShortRow {
  uint32_t bits[sizeof(T)] = {};

  // What load() reads, in one access where the layout allows it (DeviceTensor::quads), and a row of that.
  static __device__ __forceinline__ RawQuad load(const DeviceTensor& t, int64_t offset, int64_t stride, int size) {
    RawQuad raw{};
    const BitsOf<T>* from = static_cast<const BitsOf<T>*>(t.data) + offset;
    if (!t.quads) {
#pragma unroll
      for (int j = 0; j < kShortWindow; ++j) {
        if (j >= kShortWindow - size) raw.x[j] = from[(j - kShortWindow + size) * stride];
      }
    } else if constexpr (sizeof(T) == 4) {
      const uint4 all = *reinterpret_cast<const uint4*>(from);
      raw = {all.x, all.y, all.z, all.w};
    } else {
      const uint2 all = *reinterpret_cast<const uint2*>(from);
      raw = {all.x, all.y, 0, 0};
    }
    return raw;
  }
  __device__ __forceinline__ void set(const DeviceTensor& t, const RawQuad& raw) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) {
      bits[i] = sizeof(T) == 4 || t.quads ? raw.x[i] : raw.x[2 * i % 4] | raw.x[2 * i % 4 + 1] << 16;
    }
  }
  __device__ __forceinline__ void append(uint32_t x) {
    if constexpr (sizeof(T) == 4) {
      bits[0] = bits[1], bits[1] = bits[2], bits[2] = bits[3], bits[3] = x;
    } else {
      bits[0] = bits[0] >> 16 | bits[1] << 16;
      bits[1] = bits[1] >> 16 | x << 16;
    }
  }
  __device__ __forceinline__ uint32_t operator[](int j) const {
    return sizeof(T) == 4 ? bits[j] : bits[j / 2] >> 16 * (j % 2);
  }
  __device__ __forceinline__ void store(const DeviceTensor& t, int64_t offset, int64_t stride, int size) const {
    BitsOf<T>* to = static_cast<BitsOf<T>*>(t.data) + offset;
    if (!t.quads) {
#pragma unroll
      for (int j = 0; j < kShortWindow; ++j) {
        if (j >= kShortWindow - size) to[(j - kShortWindow + size) * stride] = static_cast<BitsOf<T>>((*this)[j]);
      }
    } else if constexpr (sizeof(T) == 4) {
      *reinterpret_cast<uint4*>(to) = make_uint4(bits[0], bits[1], bits[2], bits[3]);
    } else {
      *reinterpret_cast<uint2*>(to) = make_uint2(bits[0], bits[1]);
    }
  }
};

// Every tensor is of T, weights and state have at most four entries, and the state's are the last inputs in order: they
// stay in registers between load and store. kPer: channels of a lane.
template <class T, int kPer>
__global__ void __launch_bounds__(kUpdateThreads, 4)
    conv_update_kernel(const __grid_constant__ ConvParams p, int32_t units, int64_t blocks) {
  begin_after_predecessors();
  if (blockIdx.x >= blocks) return finish_gates<1>(p.gates, blockIdx.x - blocks, gridDim.x - blocks);
  using Row = ShortRow<T>;
  const ConvSequences& s = p.sequences;
  const UpdateItem item(p, units);
  if (item.n >= s.N) return;
  const ConvPart& part = p.parts[item.unit.part];
  const LaneChannels<kPer> own = {part, item.unit, static_cast<int>(threadIdx.x) % 32};
  const ConvSpan span = span_of(s, item.n);
  const DeviceTensor &weight = part.weight, &state = part.initial_state, &left = part.final_state;
  const int length = static_cast<int>(s.L), width = p.width;
  const auto load_x = [&](int64_t t, int i) -> uint32_t {
    return own.has(i) ? static_cast<const BitsOf<T>*>(part.x.data)[own.offset(part.x, span, t, i)] : 0;
  };

  // Everything is on its way before anything is waited for; the state's place alone is read first.
  RawQuad raw_weights[kPer] = {}, raw_state[kPer] = {};
  uint32_t first[kPer] = {}, bias[kPer] = {};
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (own.has(i)) {
      raw_weights[i] = Row::load(weight, offset_of(weight, own.channel(i)), weight.stride[1], width);
    }
    if (span.begin < span.end) first[i] = load_x(span.begin, i);
    if (part.bias.data != nullptr && own.has(i)) {
      bias[i] = static_cast<const BitsOf<T>*>(part.bias.data)[offset_of(part.bias, own.channel(i))];
    }
  }
  const ConvSlots slots = conv_slots(s, item.n);
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (own.has(i) && slots.read >= 0) {
      raw_state[i] = Row::load(state, offset_of(state, slots.read, own.channel(i)), state.stride[2], length);
    }
  }
  Row w[kPer], window[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    w[i].set(weight, raw_weights[i]);
    window[i].set(state, raw_state[i]);
  }
  for (int64_t t = span.begin; t < span.end; ++t) {
    float u[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      window[i].append(t == span.begin ? first[i] : load_x(t, i));
      u[i] = float_of<T>(bias[i]);
#pragma unroll
      for (int j = 0; j < kShortWindow; ++j) {
        if (j >= kShortWindow - width) u[i] = fmaf(float_of<T>(w[i][j]), float_of<T>(window[i][j]), u[i]);
      }
    }
    finish_token(p, own, span, t, slots.read == kSkipRow, sizeof(T) == 4, u, [&](int i, float y) {
      static_cast<T*>(part.y.data)[own.offset(part.y, span, t, i)] = static_cast<T>(y);
    });
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (slots.write == kNoSlot || !own.has(i)) continue;
    window[i].store(left, offset_of(left, slots.write, own.channel(i)), left.stride[2], length);
  }
}

// What a state's entries become, and the windows after draft tokens. All inputs are still there.
template <int kPer>
__device__ inline void update_states(const ConvParams& p, const LaneChannels<kPer>& own, const ConvSpan& span,
                                     const ConvSlots& slots, int width) {
  const ConvSequences& s = p.sequences;
  const ConvPart& part = own.part;
  const int64_t tokens = span.end - span.begin;
  const auto input = [&](int64_t t, int i) { return load<float>(part.x, own.offset(part.x, span, span.begin + t, i)); };
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
#pragma unroll 1
      for (int i = 0; i < kPer; ++i) {
#pragma unroll 1
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
#pragma unroll 1
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
#pragma unroll 1
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

// Any dtypes and widths, longer states, rings, accepted and draft tokens. kWidth: weights of a channel, at most.
template <int kPer, int kWidth>
__global__ void __launch_bounds__(kUpdateThreads, 4)
    conv_update_any_kernel(const __grid_constant__ ConvParams p, int32_t units, int64_t blocks) {
  begin_after_predecessors();
  if (blockIdx.x >= blocks) return finish_gates<1>(p.gates, blockIdx.x - blocks, gridDim.x - blocks);
  const ConvSequences& s = p.sequences;
  const UpdateItem item(p, units);
  if (item.n >= s.N) return;
  const int width = p.width;
  const ConvPart& part = p.parts[item.unit.part];
  const LaneChannels<kPer> own = {part, item.unit, static_cast<int>(threadIdx.x) % 32};
  const ConvSpan span = span_of(s, item.n);
  const ConvSlots slots = conv_slots(s, item.n);
  float w[kPer][kWidth], window[kPer][kWidth];  // window: [j] is the input W - 1 - j places before the next
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      w[i][j] = window[i][j] = 0.0f;
      if (!own.has(i) || j >= width) continue;
      w[i][j] = unpack(part.weight, load_raw(part.weight, offset_of(part.weight, own.channel(i), j)));
      if (j + 1 >= width || slots.read < 0) continue;
      const DeviceTensor& state = part.initial_state;
      const int64_t entry = entry_before(s, item.n, width - 1 - j, width);
      window[i][j] = unpack(state, load_raw(state, offset_of(state, slots.read, own.channel(i), entry)));
    }
  }
  if (slots.read != kSkipRow) update_states<kPer>(p, own, span, slots, width);

  for (int64_t t = span.begin; t < span.end; ++t) {
    float u[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      u[i] = 0.0f;
      if (!own.has(i)) continue;
      if (part.bias.data != nullptr) u[i] = load<float>(part.bias, offset_of(part.bias, own.channel(i)));
      const float x = load<float>(part.x, own.offset(part.x, span, t, i));
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        if (j == width - 1) window[i][j] = x;
        u[i] = fmaf(w[i][j], window[i][j], u[i]);
      }
#pragma unroll
      for (int j = 0; j + 1 < kWidth; ++j) window[i][j] = window[i][j + 1];
    }
    finish_token(p, own, span, t, slots.read == kSkipRow, is_wide(part.x), u,
                 [&](int i, float y) { store<float>(part.y, own.offset(part.y, span, t, i), y); });
  }
}

// Zero to the outputs of tokens outside all sequences.
__global__ void __launch_bounds__(kUpdateThreads)
    conv_zero_outside_kernel(const __grid_constant__ ConvParams p, int32_t units) {
  const ConvSequences& s = p.sequences;
  const uint32_t item = blockIdx.x * (kUpdateThreads / 32) + threadIdx.x / 32, t = item / units;
  if (t >= s.T) return;
  if (t >= clamp_to(load_index(s.cu_seqlens, 0), 0, s.T) && t < load_index(s.cu_seqlens, s.N)) return;
  const ConvUnit unit = unit_at<kUpdateChannels>(p.parts, p.num_parts, static_cast<int>(item - t * units));
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
