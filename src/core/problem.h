// A validated call, in numbers: what every path reads instead of working it out again.
#pragma once

#include <cmath>
#include <cstdint>

#include "flash_qla/flash_qla.hpp"

namespace flash_qla {

constexpr int64_t kChunkSize = FLASH_QLA_CHUNK_SIZE;

// A log decay below this is clamped to it: e^-80 is nothing beside 1 in float32, and a larger magnitude would ruin the
// differences of a float32 cumsum for the tokens after it (docs/math.md).
constexpr double kMinLogDecay = -80.0;

// Added to the sum of squares under the root of the l2 norm (FLA's constant).
constexpr double kL2NormEps = 1e-6;

// A state before a cut may be left out once sum g + sum log max(1, |1 - beta |k|^2|) over the warm-up behind it is at
// most this: e^-16 = 1.1e-7 is below one fp32 rounding of the largest state that the sequence has had
// (docs/numerics.md). An option asks for less, never for more.
constexpr float kDecayThreshold = -16.0f;
constexpr double kLargestTolerance = 1.2e-7;  // of cp_tolerance: what the default promises

inline float decay_threshold(const flash_qla_options& options) {
  if (!(options.cp_tolerance > 0.0)) return kDecayThreshold;
  const float asked = static_cast<float>(std::log(options.cp_tolerance));
  return asked < kDecayThreshold ? asked : kDecayThreshold;
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline bool present(const Tensor& t) { return t.ndim != 0; }
inline DType dtype(const Tensor& t) { return static_cast<DType>(t.dtype); }
inline bool is_float(DType d) { return d == DType::kFloat32 || d == DType::kBFloat16 || d == DType::kFloat16; }
inline bool is_index(DType d) { return d == DType::kInt32 || d == DType::kInt64; }

// Bytes of one element.
constexpr int64_t size_of(DType d) {
  switch (d) {
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kBool:
      return 1;
  }
  return 0;
}

// Sizes and resolved options of one call.
struct Problem {
  int64_t B = 0, T = 0;    // of q: [B, T, Hq, K]
  int64_t N = 0;           // sequences: B, or length of cu_seqlens - 1
  int64_t Hq = 0, Hv = 0;  // key heads, value heads; group = Hv / Hq
  int64_t K = 0, V = 0;
  int64_t group = 1;
  bool varlen = false;            // cu_seqlens is given, B = 1
  int64_t chunk_bound = 0;        // no call has more chunks: B * ceil(T / 64), or floor(T / 64) + N with cu_seqlens
  double scale = 0.0;             // resolved
  DType dtype = DType::kFloat32;  // of q, k, v
};

// Keys of at most this many dimensions are computed in double. They lie along each other, so that small results are
// left of large ones: in float32, dh0 missed the bound of 1e-5 by up to 140 times with K = 2 and 4 times with K = 3 (no
// beta, one value); with K = 4 the worst of 125 draws was at half of it.
constexpr int64_t kFewKeys = 4;

inline bool computes_in_double(const Problem& p) { return p.dtype == DType::kFloat64 || p.K <= kFewKeys; }

}  // namespace flash_qla
