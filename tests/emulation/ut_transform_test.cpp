// The UT transform of Hopper's kernels on the CPU: by one warp and by four, which must have the same bits, and against
// the inverse in double precision.
#include "cuda/sm90/common/ut_transform.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/common/dynamic_shared.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/mbarrier.cuh"
#include "cuda/sm90/common/gate_vectors.cuh"
#include "scheduler.h"

namespace flash_qla::cuda::sm90 {
namespace {

using cuda_emulation::Where;

// A gate stage, as traits.h of the kernels have it, behind the tile.
template <typename Element_>
struct TestTraits {
  using Element = Element_;
  static constexpr uint32_t kVector = 80 * 4, kRow = kChunk * 4;
  static constexpr uint32_t kGateDecay = 0, kGateScaled = kVector, kGateToEnd = 2 * kVector;
  static constexpr uint32_t kGateColumnA = 3 * kVector, kGateColumnP = 4 * kVector;
  static constexpr uint32_t kGateRow = 5 * kVector, kGateBeta = kGateRow + kRow, kGateSum = kGateBeta + kRow;
  static constexpr uint32_t kGateScaleP = kGateSum + kRow, kGatePair = kGateScaleP + kRow;
  static constexpr uint32_t kGateMild = kGatePair + 16 * 4, kBytesGate = kGateMild + 16;
  static constexpr uint32_t kBytesTile = kChunk * kChunk * 2, kBytes = kBytesTile + kBytesGate;
};

// A chunk: -M below the diagonal and K K^T above it, as the kernels leave it in the blocks on the diagonal; in fp16.
struct Chunk {
  uint16_t minus_m[kChunk][kChunk];
  float g[kChunk], beta[kChunk];
};

uint16_t* tile_element(void* tile, int row, int column) {
  return reinterpret_cast<uint16_t*>(static_cast<char*>(tile) + row * 128 + ((column / 8 ^ row % 8) << 4)) + column % 8;
}

// By lanes: block (i, j) of -M into the tile, transposed.
void store_block(void* tile, const Chunk& chunk, int i, int j, int lane) {
  for (int n = lane; n < 256; n += 32) {
    const int row = 16 * i + n / 16, column = 16 * j + n % 16;
    *tile_element(tile, column, row) = chunk.minus_m[row][column];
  }
}

template <typename Traits>
void prepare(const Chunk& chunk, uint32_t gate, int lane) {
  store_shared_f2(gate + Traits::kGateBeta + 8 * lane, chunk.beta[2 * lane], chunk.beta[2 * lane + 1]);
  make_gates<Traits>(
      1.0f, make_float2(chunk.g[2 * lane], chunk.g[2 * lane + 1]),
      [&] { return make_float2(chunk.beta[2 * lane], chunk.beta[2 * lane + 1]); }, false, gate, gate, lane);
}

// What is right of the diagonal and not in the first two pairs of blocks is not for use.
void take_result(uint16_t* out, void* tile, int first, int threads) {
  for (int n = first; n < kChunk * kChunk; n += threads) {
    const int row = n / kChunk, column = n % kChunk;
    out[n] = column / 32 > row / 32 ? 0 : *tile_element(tile, row, column);
  }
}

template <typename Traits>
__global__ void by_one_warp(const Chunk* chunk, uint16_t* out) {
  char* tile = dynamic_shared<char>();
  const uint32_t address = smem_address(tile), gate = address + Traits::kBytesTile;
  const int lane = static_cast<int>(threadIdx.x);
  std::memset(tile + lane * (Traits::kBytes / 32), 0xff, Traits::kBytes / 32);  // NaN
  __syncwarp();
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j <= i; ++j) store_block(tile, *chunk, i, j, lane);
  }
  prepare<Traits>(*chunk, gate, lane);
  __syncwarp();
  UtTransform<Traits>::run(address, gate, gate + Traits::kGateBeta, gate + Traits::kGateMild, lane, [] {});
  __syncwarp();
  take_result(out, tile, lane, 32);
}

template <typename Traits>
__global__ void by_four_warps(const Chunk* chunk, uint16_t* out, bool* mild_chunk) {
  char* tile = dynamic_shared<char>();
  const uint32_t address = smem_address(tile), gate = address + Traits::kBytesTile;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  std::memset(tile + thread * (Traits::kBytes / 128), 0xff, Traits::kBytes / 128);
  __syncthreads();
  const auto sync = [] { named_barrier_sync(1, 128); };
  // As store_kkt(): first what solve_pair() reads, and all of warps 0 and 1.
  for (int j = 0; j <= warp; ++j) {
    if (warp < 2 || j == warp || (warp == 3 && j == 2)) store_block(tile, *chunk, warp, j, lane);
  }
  sync();
  if (warp < 2) {
    UtTransform<Traits>::solve_pair(address, warp, lane);
  } else {
    for (int j = 0; j < 2; ++j) store_block(tile, *chunk, warp, j, lane);
    if (warp == 3) prepare<Traits>(*chunk, gate, lane);
  }
  sync();
  UtTransform<Traits>::finish_by_four(
      address, gate, gate + Traits::kGateBeta, gate + Traits::kGateMild, warp, lane,
      [](bool waits) { waits ? named_barrier_sync(2, 128) : cuda_emulation::barrier_arrive(2, 128, Where::current()); },
      [&](auto mild, float factor) {
        EXPECT_EQ(decltype(mild)::value, factor != 0.0f);
        *mild_chunk = decltype(mild)::value;
      });
  __syncthreads();
  take_result(out, tile, thread, 128);
}

enum class Keys { kRandom, kCorrelated, kNearlyIdentical, kIdentical };

// Unit keys, as the norm before the kernels leaves them. beta < 0: drawn between 0 and 1.
Chunk draw_chunk(std::mt19937_64& random, Keys keys, float beta, float g) {
  constexpr int kDim = 128;
  const double common = keys == Keys::kRandom       ? 0.0
                        : keys == Keys::kCorrelated ? 1.0
                        : keys == Keys::kIdentical  ? 1e9
                                                    : 30.0;
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<float> uniform;
  std::vector<double> direction(kDim), k(kChunk * kDim);
  for (double& x : direction) x = normal(random);
  for (int t = 0; t < kChunk; ++t) {
    double square = 0.0;
    double* key = k.data() + t * kDim;
    for (int c = 0; c < kDim; ++c) {
      key[c] = common * direction[static_cast<size_t>(c)] + (keys == Keys::kIdentical ? 0.0 : normal(random));
      square += key[c] * key[c];
    }
    for (int c = 0; c < kDim; ++c) key[c] /= std::sqrt(square);
  }
  Chunk chunk{};
  for (int t = 0; t < kChunk; ++t) {
    chunk.beta[t] = beta < 0.0f ? uniform(random) : beta;
    chunk.g[t] = g * uniform(random);
    for (int s = 0; s < kChunk; ++s) {
      double product = 0.0;
      for (int c = 0; c < kDim; ++c)
        product += k[static_cast<size_t>(t * kDim + c)] * k[static_cast<size_t>(s * kDim + c)];
      chunk.minus_m[t][s] = emulation_bits<uint16_t>(__float2half_rn(-chunk.beta[t] * static_cast<float>(product)));
    }
  }
  return chunk;
}

using Matrix = std::vector<double>;
double& at(Matrix& m, int row, int column) { return m[static_cast<size_t>(row * kChunk + column)]; }
double norm(const Matrix& m) {
  double sum = 0.0;
  for (const double x : m) sum += x * x;
  return std::sqrt(sum);
}

// A_g = A_ij beta_j exp(c_i - c_j); mild: A_ij beta_j exp(c_C - c_j) (gate_vectors.cuh). conditions: |A| |I + M| |A|
// with the same factors: times the unit roundoff, what a triangular inverse is off by at most, but for a factor that
// depends on the order of the sums (Higham, Accuracy and Stability of Numerical Algorithms, 14.2).
void exact_result(const Chunk& chunk, bool mild, Matrix& a_g, Matrix& conditions) {
  Matrix a(kChunk * kChunk), product(kChunk * kChunk);
  a_g = conditions = a;
  double sums[kChunk], sum = 0.0;
  for (int t = 0; t < kChunk; ++t) sums[t] = sum += static_cast<double>(chunk.g[t]);
  const auto minus_m = [&](int row, int column) {
    return static_cast<double>(__half2float(emulation_bits<__half>(chunk.minus_m[row][column])));
  };
  for (int column = 0; column < kChunk; ++column) {
    for (int row = column; row < kChunk; ++row) {
      double x = row == column ? 1.0 : 0.0, size = 0.0;
      for (int k = column; k < row; ++k) x += minus_m(row, k) * at(a, k, column);
      at(a, row, column) = x;
      for (int k = column; k <= row; ++k)
        size += (k == row ? 1.0 : std::fabs(minus_m(row, k))) * std::fabs(at(a, k, column));
      at(product, row, column) = size;
    }
  }
  for (int column = 0; column < kChunk; ++column) {
    for (int row = column; row < kChunk; ++row) {
      const double factor = static_cast<double>(chunk.beta[column]) * std::exp((mild ? sum : sums[row]) - sums[column]);
      at(a_g, row, column) = at(a, row, column) * factor;
      for (int k = column; k <= row; ++k)
        at(conditions, row, column) += std::fabs(at(a, row, k)) * at(product, k, column) * factor;
    }
  }
}

// Both versions of kinds of keys and of beta.
template <typename Element>
void compare(float g, bool expects_mild) {
  using Traits = TestTraits<Element>;
  constexpr double kHalfRoundoff = 0x1p-11, kRoundoff = std::is_same_v<Element, __half> ? 0x1p-11 : 0x1p-8;
  std::mt19937_64 random(7);
  for (const Keys keys : {Keys::kRandom, Keys::kCorrelated, Keys::kNearlyIdentical, Keys::kIdentical}) {
    for (const float beta : {-1.0f, 1.0f, 1.9f, 2.0f}) {
      SCOPED_TRACE("keys " + std::to_string(static_cast<int>(keys)) + ", beta " + std::to_string(beta));
      const Chunk chunk = draw_chunk(random, keys, beta, g);
      std::vector<uint16_t> one(kChunk * kChunk), four(kChunk * kChunk);
      bool mild = false;
      ASSERT_TRUE(launch("one", by_one_warp<Traits>, 1, 32, Traits::kBytes, nullptr, &chunk, one.data()).ok());
      for (int order = 0; order < 3; ++order) {
        ++cuda_emulation::settings().seed;  // another order of threads
        ASSERT_TRUE(
            launch("four", by_four_warps<Traits>, 1, 128, Traits::kBytes, nullptr, &chunk, four.data(), &mild).ok());
        EXPECT_EQ(mild, expects_mild);
        EXPECT_EQ(one, four);
      }
      Matrix exact, conditions, error(kChunk * kChunk);
      exact_result(chunk, mild, exact, conditions);
      for (size_t i = 0; i < exact.size(); ++i) {
        error[i] = static_cast<double>(unpack2<Element>(four[i]).x) - exact[i];
      }
      EXPECT_LE(norm(error), kHalfRoundoff * norm(conditions) + kRoundoff * norm(exact));
      // For nearly identical keys that is far more than what comes out, which is no more than what o is off by in all.
      EXPECT_LE(norm(error), 5e-3 * norm(exact));
    }
  }
}

constexpr float kMildGate = -0.05f, kStrongGate = -4.0f;  // sums of about 1.6 and 128 over a chunk

TEST(UtTransform, BFloat16MildDecay) { compare<__nv_bfloat16>(kMildGate, true); }
TEST(UtTransform, BFloat16StrongDecay) { compare<__nv_bfloat16>(kStrongGate, false); }
TEST(UtTransform, HalfMildDecay) { compare<__half>(kMildGate, true); }
TEST(UtTransform, HalfStrongDecay) { compare<__half>(kStrongGate, false); }

}  // namespace
}  // namespace flash_qla::cuda::sm90
