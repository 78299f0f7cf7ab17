// The convolution of the next tokens of each sequence. A warp has one sequence and up to 256 channels (a head, where it
// is normalised), a lane the channels l, l + 32 ..: what a lane reads it alone writes, so states and inputs are
// replaced in place.
#pragma once

#include "cuda/common/bulk.cuh"
#include "cuda/layer/conv_any.cuh"
#include "cuda/layer/vector.cuh"

namespace flash_qla::cuda {

constexpr int kUpdateThreads = 64;  // small blocks: one sequence of 8192 channels has 32 of them

// Channels of a warp where no norm joins more: four of a lane.
constexpr int kUpdateChannels = 128;

// Inputs of a state, and weights of a channel, at most, that go through registers: as many as are read at once.
constexpr int kShortWindow = 4;

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

// The `size` elements of a row of a state or of weights, at most four and the last one last, as one access where their
// layout allows it; zero in front of them.
__device__ __forceinline__ RawQuad load_row(const DeviceTensor& t, int64_t offset, int64_t stride, int size) {
  if (t.quads) return load_raw_quad(t, offset, 0, kShortWindow);
  RawQuad raw{};
#pragma unroll
  for (int j = 0; j < kShortWindow; ++j) {
    const int i = j - (kShortWindow - size);
    if (i >= 0) raw.x[j] = load_raw(t, offset + i * stride);
  }
  return raw;
}

// store() without float64, whose case would be most of the code of a kernel that stores often.
__device__ __forceinline__ uint32_t pair_of(const DeviceTensor& t, float low, float high) {
  return t.dtype == static_cast<int32_t>(DType::kBFloat16) ? pack_word(low, high, static_cast<__nv_bfloat16*>(nullptr))
                                                           : pack_word(low, high, static_cast<__half*>(nullptr));
}
__device__ __forceinline__ void store_narrow(const DeviceTensor& t, int64_t offset, float x) {
  if (is_wide(t)) {
    static_cast<float*>(t.data)[offset] = x;
  } else {
    static_cast<uint16_t*>(t.data)[offset] = static_cast<uint16_t>(pair_of(t, x, 0.0f));
  }
}

__device__ __forceinline__ void store_row(const DeviceTensor& t, int64_t offset, int64_t stride, int size,
                                          const float (&x)[kShortWindow]) {
  if (t.quads) {
    if (is_wide(t)) {
      *reinterpret_cast<float4*>(static_cast<float*>(t.data) + offset) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(t.data) + offset) =
          make_uint2(pair_of(t, x[0], x[1]), pair_of(t, x[2], x[3]));
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kShortWindow; ++j) {
    const int i = j - (kShortWindow - size);
    if (i >= 0) store_narrow(t, offset + i * stride, x[j]);
  }
}

__device__ __forceinline__ void unpack_row(const DeviceTensor& t, const RawQuad& raw, float (&x)[kShortWindow]) {
  const float4 all = unpack(t, raw);
  x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
}

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
#pragma unroll 1
      for (int i = 0; i < kPer; ++i) {
#pragma unroll 1
        for (int k = 0; own.has(i) && k < width - 1; ++k) {
          store_narrow(p.drafts, offset_of(p.drafts, row, t, part.channel + own.channel(i), k),
                       input_or_history(t + 1 - (width - 1) + k, i));
        }
      }
    }
  }
  if (slots.write == kNoSlot) return;
  const DeviceTensor& state = part.final_state;
  const auto put = [&](int64_t entry, int i, float x) {
    store_narrow(state, offset_of(state, slots.write, own.channel(i), entry), x);
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

// kPer: channels of a lane; kWidth: weights of a channel, at most. kShort: the state has at most four entries, which
// are the last inputs in order: they stay in registers between load and store.
template <int kPer, int kWidth, bool kShort>
__global__ void __launch_bounds__(kUpdateThreads, 4)
    conv_update_kernel(const __grid_constant__ ConvParams p, int32_t units, int64_t blocks) {
  begin_after_predecessors();
  if (blockIdx.x >= blocks) return finish_gates(p.gates, blockIdx.x - blocks, gridDim.x - blocks);
  static_assert(!kShort || kWidth == kShortWindow);
  const ConvSequences& s = p.sequences;
  const uint32_t item = blockIdx.x * (kUpdateThreads / 32) + threadIdx.x / 32, n = item / units;
  if (n >= s.N) return;
  const int width = p.width;
  const ConvUnit unit = unit_at<kUpdateChannels>(p.parts, p.num_parts, static_cast<int>(item - n * units));
  const ConvPart& part = p.parts[unit.part];
  const LaneChannels<kPer> own = {part, unit, static_cast<int>(threadIdx.x) % 32};

  // Everything is on its way before anything is waited for, apart from the place of the state.
  const ConvSpan span = span_of(s, n);
  uint32_t raw_bias[kPer], raw_x[kPer];
  float w[kPer][kWidth], window[kPer][kWidth];  // the last one last; zero in front of them
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    raw_bias[i] =
        own.has(i) && part.bias.data != nullptr ? load_raw(part.bias, offset_of(part.bias, own.channel(i))) : 0;
    raw_x[i] = span.begin < span.end ? own.raw_x(span.b, span.begin, i) : 0;
  }
  const DeviceTensor &weight = part.weight, &state = part.initial_state;
  ConvSlots slots;
  if constexpr (kShort) {
    RawQuad raw_weights[kPer] = {}, raw_state[kPer] = {};
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (own.has(i)) {
        raw_weights[i] = load_row(weight, offset_of(weight, own.channel(i)), weight.stride[1], width);
      }
    }
    slots = conv_slots(s, n);
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (own.has(i) && slots.read >= 0) {
        raw_state[i] =
            load_row(state, offset_of(state, slots.read, own.channel(i)), state.stride[2], static_cast<int>(s.L));
      }
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      unpack_row(weight, raw_weights[i], w[i]);
      unpack_row(state, raw_state[i], window[i]);
    }
  } else {
    slots = conv_slots(s, n);
    uint32_t raw_weights[kPer][kWidth], raw_state[kPer][kWidth];
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const int tap = j - (kWidth - width);
        const bool wanted = own.has(i) && tap >= 0;
        raw_weights[i][j] = wanted ? load_raw(weight, offset_of(weight, own.channel(i), tap)) : 0;
        raw_state[i][j] = 0;
        if (!wanted || tap == 0 || slots.read < 0) continue;
        const int64_t entry = entry_before(s, n, kWidth - j, width);
        raw_state[i][j] = load_raw(state, offset_of(state, slots.read, own.channel(i), entry));
      }
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        w[i][j] = unpack(weight, raw_weights[i][j]);
        window[i][j] = unpack(state, raw_state[i][j]);
      }
    }
    if (slots.read != kSkipRow) update_states<kPer>(p, own, span, slots, width);
  }
  const bool skip = slots.read == kSkipRow;

  for (int64_t t = span.begin; t < span.end; ++t) {
    float u[kPer], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
#pragma unroll
      for (int j = 0; j + 1 < kWidth; ++j) window[i][j] = window[i][j + 1];
      window[i][kWidth - 1] = unpack(part.x, t == span.begin ? raw_x[i] : own.raw_x(span.b, t, i));
      u[i] = part.bias.data != nullptr ? unpack(part.bias, raw_bias[i]) : 0.0f;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        if (j >= kWidth - width) u[i] = fmaf(w[i][j], window[i][j], u[i]);
      }
      if (p.silu) u[i] *= is_wide(part.x) ? sigmoid_for<float>(u[i]) : sigmoid_for<__half>(u[i]);
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
      store_narrow(part.y, offset_of(part.y, span.b, t, unit.head, own.dim(i)), y);
    }
  }
  if constexpr (kShort) {
    if (slots.write == kNoSlot) return;
    const DeviceTensor& left = part.final_state;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (!own.has(i)) continue;
      store_row(left, offset_of(left, slots.write, own.channel(i)), left.stride[2], static_cast<int>(s.L), window[i]);
    }
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
