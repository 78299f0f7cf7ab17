// Calls whose shapes are right and whose device memory holds anything: offsets that go back, slots that are not there,
// NaN, infinities, any bits at all. Drawn as well-formed calls (calls.h), then broken.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "checker.h"

namespace flash_qla::testing {

// --- numbers ---

// Words that numbers are replaced by, of the width of an element.
struct Specials {
  static constexpr int kMost = 12;
  uint32_t words[kMost];
  int count;
};

inline Specials specials_of(DType type) {
  switch (type) {
    case DType::kBFloat16:  // NaN, infinities, the largest, the smallest, -0, 1e30, 88, -1e4
      return {{0x7fc0, 0x7f80, 0xff80, 0x7f7f, 0xff7f, 0x0001, 0x8000, 0x7149, 0x42b0, 0xc61c}, 10};
    case DType::kFloat16:  // likewise; 88, -1e4
      return {{0x7e00, 0x7c00, 0xfc00, 0x7bff, 0xfbff, 0x0001, 0x8000, 0x5580, 0xf0e2}, 9};
    default:  // float
      return {{0x7fc00000, 0x7f800000, 0xff800000, 0x7f7fffff, 0xff7fffff, 0x00000001, 0x80000000, 0x7149f2ca,
               0x42b00000, 0xc61c4000},
              10};
  }
}

__device__ inline uint64_t scrambled(int64_t i, uint32_t seed) {
  uint64_t x = (static_cast<uint64_t>(i) + 1) * 0x9e3779b97f4a7c15ull + seed * 0xd1342543de82ef95ull;
  x ^= x >> 31;
  x *= 0xbf58476d1ce4e5b9ull;
  return x ^ x >> 29;
}

// Numbers of [low, high), one in so many of them replaced by a special word; or all by one, or by any bits.
enum class Words : int32_t { kNumbers, kSomeSpecial, kAllAlike, kAnyBits };
template <typename Element, typename Bits>
__global__ void fill_malformed_kernel(Bits* data, int64_t n, float low, float high, Words words, int one_in,
                                      Specials specials, uint32_t seed) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    const uint64_t x = scrambled(i, seed);
    const Element number = static_cast<Element>(low + (high - low) * static_cast<float>(x >> 40) * 0x1p-24f);
    Bits bits;
    memcpy(&bits, &number, sizeof(bits));
    if (words == Words::kAnyBits) bits = static_cast<Bits>(x >> 8);
    if (words == Words::kAllAlike) bits = static_cast<Bits>(specials.words[seed % specials.count]);
    if (words == Words::kSomeSpecial && static_cast<int>(x % static_cast<uint64_t>(one_in)) == 0) {
      bits = static_cast<Bits>(specials.words[(x >> 20) % static_cast<uint64_t>(specials.count)]);
    }
    data[i] = bits;
  }
}

// Fills an uploaded tensor of floats, what lies between its rows included.
inline void fill_malformed(Buffer& x, float low, float high, Random& random) {
  if (!x.present() || x.bytes().empty()) return;
  const DType type = dtype(x.shape_view());
  const double kind = random.uniform();
  const Words words = kind < 0.55   ? Words::kNumbers
                      : kind < 0.8  ? Words::kSomeSpecial
                      : kind < 0.92 ? Words::kAllAlike
                                    : Words::kAnyBits;
  const int one_in = static_cast<int>(std::exp2(random.uniform(1.0, 14.0)));
  const auto seed = static_cast<uint32_t>(random.integer(0, INT32_MAX));
  const int64_t n = static_cast<int64_t>(x.bytes().size()) / size_of(type);
  void* const data = x.storage();
  const auto fill = [&]<typename Element, typename Bits>(Element, Bits) {
    fill_malformed_kernel<Element>
        <<<256, 256>>>(static_cast<Bits*>(data), n, low, high, words, one_in, specials_of(type), seed);
    check_cuda(cudaGetLastError(), "fill_malformed_kernel");
  };
  if (type == DType::kBFloat16) fill(__nv_bfloat16{}, uint16_t{});
  if (type == DType::kFloat16) fill(__half{}, uint16_t{});
  if (type == DType::kFloat32) fill(float{}, uint32_t{});
}

// --- offsets and indices ---

// A number that no index vector of this dtype may lead anywhere with: far outside, on either side.
inline int64_t far_outside(DType type, Random& random) {
  static const std::vector<int64_t> kNarrow = {INT32_MAX, INT32_MIN, INT32_MIN + 1, -(int64_t{1} << 30)};
  static const std::vector<int64_t> kWide = {int64_t{1} << 31, int64_t{1} << 40, int64_t{1} << 62, INT64_MIN,
                                             -(int64_t{1} << 40)};
  return random.pick(type == DType::kInt64 && random.chance(0.6) ? kWide : kNarrow);
}

// Around [0, end]: inside, just outside, far outside.
inline int64_t any_index(DType type, int64_t end, Random& random) {
  const double kind = random.uniform();
  if (kind < 0.5) return random.integer(0, end);
  if (kind < 0.7) return end + random.integer(0, 2);
  if (kind < 0.9) return -random.integer(1, 3);
  return far_outside(type, random);
}

// Offsets of packed sequences: well-formed ones now and then.
inline void break_offsets(Buffer& offsets, int64_t tokens, Random& random) {
  if (!offsets.present()) return;
  const DType type = dtype(offsets.shape_view());
  const int64_t kind = random.integer(0, 9), last = offsets.shape_view().shape[0] - 1;
  const Tensor given = offsets.host();
  offsets.fill([&](int64_t n, int64_t, int64_t, int64_t) -> double {
    const auto as_drawn = static_cast<int64_t>(load(given, n));
    const auto value = [&]() -> int64_t {
      switch (kind) {
        case 0:  // all tokens, again and again
          return n % 2 * tokens;
        case 1:  // backwards
          return tokens - as_drawn;
        case 2:  // anywhere
          return random.integer(0, tokens);
        case 3:  // each overlaps the one before it
          return n * tokens / (2 * std::max<int64_t>(last, 1)) + n % 2 * tokens / 2;
        case 4:  // some negative
          return random.chance(0.4) ? -random.integer(1, tokens + 1) : as_drawn;
        case 5:  // some past the end
          return random.chance(0.4) ? tokens + random.integer(1, tokens + 1) : as_drawn;
        case 6:
          return random.chance(0.3) ? far_outside(type, random) : as_drawn;
        case 7:  // of everything
          return any_index(type, tokens, random);
        case 8:  // one that is wrong
          return n == last / 2 ? any_index(type, tokens, random) : as_drawn;
        default:
          return as_drawn;
      }
    };
    return static_cast<double>(value());
  });
}

// Slots, rows and counts: in range or not, the same again and again.
inline void break_indices(Buffer& indices, int64_t end, Random& random) {
  if (!indices.present() || random.chance(0.3)) return;
  const DType type = dtype(indices.shape_view());
  const bool all_alike = random.chance(0.2);
  const int64_t one = random.integer(0, end);
  indices.fill([&](int64_t, int64_t, int64_t, int64_t) {
    return static_cast<double>(all_alike ? one : any_index(type, end, random));
  });
}

// --- calls ---

// Of which group, and how much of it.
struct MalformedSize {
  bool generic = false;   // any head dimensions and dtypes, few tokens
  int64_t most = 160000;  // tokens times value heads
};

inline Shape draw_malformed_shape(const MalformedSize& size, Random& random) {
  static const std::vector<int64_t> kLengths = {64,   65,   127,  128,  200,  256,   300,   640,  1000,
                                                1537, 2048, 2100, 4096, 8192, 12288, 16384, 20000};
  static const std::vector<int64_t> kLong = {4096, 8192, 12288, 16384, 20000};
  static const std::vector<int64_t> kHeads = {1, 2, 3, 4, 6, 8};
  static const std::vector<int64_t> kDims = {16, 33, 64, 64, 64, 100, 128, 256};
  Shape s;
  s.Hv = random.pick(kHeads);
  do {
    s.Hq = random.integer(1, s.Hv);
  } while (s.Hv % s.Hq != 0);
  s.dtype = random.chance(0.5) ? DType::kBFloat16 : DType::kFloat16;
  s.K = s.V = 128;
  int64_t longest = 20000;
  if (size.generic) {
    longest = 700;
    if (random.chance(0.3)) s.dtype = DType::kFloat32;
    s.K = random.pick(kDims);
    s.V = random.pick(kDims);
  }
  const bool cut = random.chance(0.4);  // long, in a few sequences: planned for a split
  s.T = cut                  ? random.pick(kLong)
        : random.chance(0.7) ? random.pick(kLengths)
                             : static_cast<int64_t>(std::exp2(random.uniform(6.0, 14.3)));
  while (s.T > longest || s.T * s.Hv > size.most) s.T = (s.T + 1) / 2;
  if (random.chance(0.85)) {
    const int64_t sequences = cut                  ? random.integer(1, 4)
                              : random.chance(0.7) ? random.integer(1, 6)
                                                   : random.integer(7, 40);
    s.cu_seqlens = {0, s.T};
    for (int64_t n = 1; n < sequences; ++n) s.cu_seqlens.push_back(random.integer(0, s.T));
    std::sort(s.cu_seqlens.begin(), s.cu_seqlens.end());
  } else {
    s.B = random.integer(1, 3);
    s.T = std::max<int64_t>(s.T / s.B, 1);
  }
  return s;
}

inline Features draw_malformed_features(const Shape& s, Random& random) {
  static const std::vector<flash_qla_cp_mode> kModes = {FLASH_QLA_CP_AUTO, FLASH_QLA_CP_OFF, FLASH_QLA_CP_INVARIANT};
  Features f = draw_features(s.dtype, random);
  f.drawn_on_device = true;
  f.strided = f.strided && s.T <= 2100;  // else more than copies by the path that takes any strides
  f.cp_mode = random.pick(kModes);
  f.force_intra_cp = random.chance(0.4);
  return f;
}

inline void break_pool(ForwardCall& call, Random& random) {
  if (!call.pool.present()) return;
  const int64_t slots = call.pool.shape_view().shape[0];
  break_indices(call.initial_indices, slots, random);
  break_indices(call.final_indices, slots, random);
  break_indices(call.accepted, 4, random);
  break_indices(call.checkpoint_indices, slots, random);
  break_indices(call.checkpoint_offsets, call.in.shape.B * call.in.shape.T, random);
  if (call.checkpoints.present()) {
    break_indices(call.checkpoint_starts, call.checkpoints.shape_view().shape[0], random);
  }
  call.has_initial.fill([&](int64_t, int64_t, int64_t, int64_t) { return random.chance(0.5) ? 1.0 : 0.0; });
}

inline ForwardCall draw_malformed_forward(const MalformedSize& size, Random& random) {
  const Shape s = draw_malformed_shape(size, random);
  const Features f = draw_malformed_features(s, random);
  PoolFeatures pool = draw_pool_features(false, !s.cu_seqlens.empty(), random);
  pool.pool = random.chance(0.6);
  ForwardCall call;
  call.draw(s, f, pool, false, random);
  break_offsets(call.in.cu_seqlens, s.T, random);
  break_pool(call, random);
  return call;
}

inline ForwardCall draw_malformed_decode(const MalformedSize& size, Random& random) {
  Shape s = draw_malformed_shape(size, random);
  const bool packed = random.chance(0.15) && !s.cu_seqlens.empty();
  if (packed) {
    s.T = std::min<int64_t>(s.T, 128);
    for (int64_t& offset : s.cu_seqlens) offset = std::min(offset, s.T);
  } else {
    s.cu_seqlens.clear();
    s.B = random.integer(1, 48);
    s.T = random.chance(0.5) ? 1 : random.integer(2, FLASH_QLA_MAX_DRAFT_TOKENS);
    if (!size.generic) s.K = random.chance(0.5) ? 64 : 128;
    if (!size.generic) s.V = 16 * random.integer(1, 16);
  }
  Features f = draw_malformed_features(s, random);
  f.strided = f.strided && random.chance(0.3);  // not by the kernels for decode
  PoolFeatures pool = draw_pool_features(true, packed, random);
  pool.pool = true;
  ForwardCall call;
  call.draw(s, f, pool, true, random);
  break_offsets(call.in.cu_seqlens, s.T, random);
  break_pool(call, random);
  return call;
}

inline BackwardCall draw_malformed_backward(const MalformedSize& size, Random& random) {
  const Shape s = draw_malformed_shape(size, random);
  Features f = draw_malformed_features(s, random);
  BackwardCall call;
  call.draw(s, f, f.g && !f.gate && random.chance(0.4), random.chance(0.85), random.chance(0.6), random);
  if (random.chance(0.4)) call.A = Buffer(s.dtype, {s.B, s.T, s.Hv, kChunkSize});
  if (random.chance(0.2)) {
    for (auto [name, buffer] : call.outputs()) {
      if (random.chance(0.4)) *buffer = Buffer();
    }
  }
  break_offsets(call.in.cu_seqlens, s.T, random);
  return call;
}

// What is drawn on the device of an uploaded call, and then spoiled: rows of about unit norm for q and k.
inline void draw_malformed_numbers(Inputs& in, Random& random) {
  const float unit = std::sqrt(3.0f / static_cast<float>(in.shape.K));
  const float key = random.chance(0.2) ? 100.0f : unit, state = random.chance(0.2) ? 1e30f : 0.8f;
  const auto gate = static_cast<float>(std::exp2(random.uniform(-12.0, 6.0)));
  fill_malformed(in.q, -unit, unit, random);
  fill_malformed(in.k, -key, key, random);
  fill_malformed(in.v, -1.7f, 1.7f, random);
  fill_malformed(in.g, random.chance(0.1) ? 0.0f : -gate, random.chance(0.1) ? gate : 0.0f, random);
  fill_malformed(in.beta, 0.0f, random.chance(0.2) ? 1e4f : 1.0f, random);
  fill_malformed(in.A_log, -2.0f, 2.0f, random);
  fill_malformed(in.dt_bias, -1.0f, 1.0f, random);
  fill_malformed(in.initial_state, -state, state, random);
}
inline void draw_malformed_numbers(ForwardCall& call, Random& random) {
  draw_malformed_numbers(call.in, random);
  fill_malformed(call.pool, -0.8f, 0.8f, random);
}
inline void draw_malformed_numbers(BackwardCall& call, Random& random) {
  draw_malformed_numbers(call.in, random);
  fill_malformed(call.A, -1.0f, 1.0f, random);
  fill_malformed(call.d_o, -1.7f, 1.7f, random);
  fill_malformed(call.dht, -1.7f, 1.7f, random);
}

}  // namespace flash_qla::testing
