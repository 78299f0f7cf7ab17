// The emulation itself: that right kernels run as on a GPU, and that wrong ones are found.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <vector>

#include "cuda/common/cp_async.cuh"
#include "cuda/common/dynamic_shared.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/mma.cuh"

namespace flash_qla::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void reverse_kernel(int* data, bool waits) {
  __shared__ int s_data[kThreads];
  s_data[threadIdx.x] = data[threadIdx.x];
  if (waits) __syncthreads();
  data[threadIdx.x] = s_data[kThreads - 1 - threadIdx.x];
}

bool reverses(bool waits) {
  static int first = 0;  // other numbers each time: shared variables keep the last block's
  first += 1000;
  std::vector<int> data(kThreads);
  for (int i = 0; i < kThreads; ++i) data[static_cast<size_t>(i)] = first + i;
  EXPECT_TRUE(launch("reverse", reverse_kernel, 1, kThreads, 0, nullptr, data.data(), waits).ok());
  for (int i = 0; i < kThreads; ++i) {
    if (data[static_cast<size_t>(i)] != first + kThreads - 1 - i) return false;
  }
  return true;
}

TEST(Emulation, FindsAMissingBarrier) {
  EXPECT_TRUE(reverses(true));
  EXPECT_FALSE(reverses(false));
}

__global__ void barrier_kernel(int threads) {
  if (static_cast<int>(threadIdx.x) < threads) __syncthreads();
}

TEST(Emulation, ReportsThreadsThatNeverCome) {
  EXPECT_TRUE(launch("barrier", barrier_kernel, 1, kThreads, 0, nullptr, kThreads).ok());
  EXPECT_DEATH(static_cast<void>(launch("barrier", barrier_kernel, 1, kThreads, 0, nullptr, 128)),
               "all threads wait:.*barrier of the block.*\n.*has returned");
}

__global__ void divergent_kernel(int* out) {
  if (threadIdx.x % 2 == 0) {
    *out = __shfl_xor_sync(0xffffffffu, 1, 1);
  } else {
    *out = __shfl_xor_sync(0xffffffffu, 2, 1);
  }
}

TEST(Emulation, ReportsLanesThatDiverge) {
  int out = 0;
  EXPECT_DEATH(static_cast<void>(launch("divergent", divergent_kernel, 1, 32, 0, nullptr, &out)), "lanes .* diverge");
}

__global__ void shuffle_kernel(int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  int sum = lane;
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  const uint32_t half = lane < 16 ? 0xffffu : 0xffff0000u;
  const int partner = __shfl_xor_sync(half, lane, 1, 16);
  out[lane] = sum * 10000 + partner * 100 + __shfl_up_sync(0xffffffffu, lane, 3, 8);
  if (__ballot_sync(0xffffffffu, lane % 2) != 0xaaaaaaaau || __any_sync(0xffffffffu, lane > 31)) out[lane] = -1;
}

TEST(Emulation, Shuffles) {
  int out[32];
  EXPECT_TRUE(launch("shuffle", shuffle_kernel, 1, 32, 0, nullptr, &out[0]).ok());
  for (int lane = 0; lane < 32; ++lane) {
    EXPECT_EQ(out[lane], 496 * 10000 + (lane ^ 1) * 100 + (lane % 8 < 3 ? lane : lane - 3)) << lane;
  }
}

// o [16x8] = a [16x16] b [8x16]^T; and b transposed on the way where it is [16x8].
template <class T>
__global__ void product_kernel(const T* a, const T* b, float* o, bool b_transposed) {
  T* s = dynamic_shared<T>();
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = lane; i < 256; i += 32) s[i] = a[i];
  for (int i = lane; i < 128; i += 32) s[256 + i] = b[i];
  __syncwarp();
  uint32_t fa[4], fb[4];
  load_matrix_x4(smem_address(s + lane % 16 * 16 + lane / 16 * 8), fa);
  const T* s_b = s + 256;
  if (b_transposed) {
    load_matrix_x4_trans(smem_address(s_b + lane % 16 * 8), fb[0], fb[1], fb[2], fb[3]);
  } else {
    load_matrix_x4(smem_address(s_b + lane % 8 * 16 + lane / 8 % 2 * 8), fb);
  }
  float sum[4] = {};
  mma_m16n8k16<T>(sum, fa[0], fa[1], fa[2], fa[3], fb[0], fb[1]);
  // Out through the transpose of the transpose.
  const uint32_t low = transpose_8x8(transpose_8x8(pack2<T>(sum[0], sum[1])));
  const float2 top = unpack2<T>(low);
  o[lane / 4 * 8 + lane % 4 * 2] = top.x;
  o[lane / 4 * 8 + lane % 4 * 2 + 1] = top.y;
  o[(lane / 4 + 8) * 8 + lane % 4 * 2] = sum[2];
  o[(lane / 4 + 8) * 8 + lane % 4 * 2 + 1] = sum[3];
}

template <class T>
void check_product(bool b_transposed) {
  T a[256], b[128];
  float o[128];
  for (int i = 0; i < 256; ++i) a[i] = T(static_cast<float>(i * 7 % 5 - 2));
  for (int i = 0; i < 128; ++i) b[i] = T(static_cast<float>(i * 5 % 7 - 3));
  const T *ca = a, *cb = b;
  ASSERT_TRUE(launch("product", product_kernel<T>, 1, 32, 1024, nullptr, ca, cb, &o[0], b_transposed).ok());
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 8; ++j) {
      float sum = 0;
      for (int k = 0; k < 16; ++k) {
        sum += static_cast<float>(a[i * 16 + k]) * static_cast<float>(b_transposed ? b[k * 8 + j] : b[j * 16 + k]);
      }
      EXPECT_EQ(o[i * 8 + j], sum) << i << " " << j;
    }
  }
}

TEST(Emulation, Products) {
  for (const bool b_transposed : {false, true}) {
    check_product<__nv_bfloat16>(b_transposed);
    check_product<__half>(b_transposed);
  }
}

__global__ void address_kernel(uint32_t offset) {
  uint32_t r[4];
  load_matrix_x4(smem_address(dynamic_shared<char>()) + offset, r);
}

TEST(Emulation, ReportsBadSharedAddresses) {
  EXPECT_TRUE(launch("address", address_kernel, 1, 32, 1024, nullptr, 1008u).ok());
  EXPECT_DEATH(static_cast<void>(launch("address", address_kernel, 1, 32, 1024, nullptr, 1024u)), "outside");
  EXPECT_DEATH(static_cast<void>(launch("address", address_kernel, 1, 32, 1024, nullptr, 24u)), "not aligned");
}

TEST(Emulation, HasTheLimitsOfALaunch) {
  EXPECT_FALSE(launch("address", address_kernel, 1, 2048, 1024, nullptr, 0u).ok());
  EXPECT_TRUE(launch("address", address_kernel, 1, 32, cuda_emulation::kMostSharedBytes, nullptr, 0u).ok());
  EXPECT_FALSE(launch("address", address_kernel, 1, 32, cuda_emulation::kMostSharedBytes + 1, nullptr, 0u).ok());
}

// Every lane copies 16 bytes, every third one zeros; waits for them or does not.
__global__ void copy_kernel(const int* from, int* to, bool waits) {
  int* s = dynamic_shared<int>();
  const int lane = static_cast<int>(threadIdx.x);
  cp_async_16_or_zero(smem_address(s + 4 * lane), from + 4 * lane, lane % 3 != 0);
  cp_async_commit();
  if (waits) cp_async_wait<0>();
  for (int i = 0; i < 4; ++i) to[4 * lane + i] = s[4 * lane + i];
}

TEST(Emulation, CopiesAreDoneAtTheWait) {
  alignas(16) int from[128];
  int to[128];
  for (int i = 0; i < 128; ++i) from[i] = i + 1;
  const int* source = from;
  for (const bool waits : {true, false}) {
    ASSERT_TRUE(launch("copy", copy_kernel, 1, 32, 512, nullptr, source, &to[0], waits).ok());
    for (int i = 0; i < 128; ++i) EXPECT_EQ(to[i], !waits ? -1 : i / 4 % 3 != 0 ? i + 1 : 0) << i;
  }
}

// Warp 0 copies `rounds` pieces through two stages, warp 1 adds them up.
__global__ void ring_kernel(const int* from, int* sums, int rounds, bool frees) {
  char* s = dynamic_shared<char>();
  const uint32_t full = smem_address(s), free = full + 16;
  int* s_data = reinterpret_cast<int*>(s + 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < 2; ++i) mbarrier_init(full + 8 * i, 32), mbarrier_init(free + 8 * i, kWarpArrivals);
  }
  __syncthreads();
  for (int round = 0; round < rounds; ++round) {
    const uint32_t stage = static_cast<uint32_t>(round % 2), parity = static_cast<uint32_t>(round / 2 % 2);
    if (threadIdx.x < 32) {
      if (frees) mbarrier_wait(free + 8 * stage, parity ^ 1);
      cp_async_16(smem_address(s_data + 128 * stage + 4 * lane), from + 128 * round + 4 * lane);
      cp_async_arrive(full + 8 * stage);
    } else {
      mbarrier_wait(full + 8 * stage, parity);
      for (int i = 0; i < 4; ++i) sums[i * 32 + lane] += s_data[128 * stage + 127 - i * 32 - lane];
      __syncwarp();
      mbarrier_arrive_warp(free + 8 * stage, lane);
    }
  }
}

bool ring_sums(bool frees) {
  constexpr int kRounds = 7;
  alignas(16) static int from[128 * kRounds];
  int sums[128] = {};
  for (int i = 0; i < 128 * kRounds; ++i) from[i] = i;
  const int* source = from;
  EXPECT_TRUE(launch("ring", ring_kernel, 1, 64, 32 + 1024, nullptr, source, &sums[0], kRounds, frees).ok());
  for (int i = 0; i < 128; ++i) {
    if (sums[i] != kRounds * (127 - i) + 128 * kRounds * (kRounds - 1) / 2) return false;
  }
  return true;
}

TEST(Emulation, RingOfStages) {
  const uint64_t seed = cuda_emulation::settings().seed;
  int wrong = 0;
  for (uint64_t s = 1; s <= 10; ++s) {
    cuda_emulation::settings().seed = s;
    EXPECT_TRUE(ring_sums(true));
    wrong += !ring_sums(false);
  }
  cuda_emulation::settings().seed = seed;
  EXPECT_GT(wrong, 5);
}

__global__ void switching_kernel(int rounds) {
  for (int i = 0; i < rounds; ++i) __syncthreads();
}

// A report, and no bound: the machine may be busy.
TEST(Emulation, TellsWhatASwitchCosts) {
  constexpr int kRounds = 2000;
  const auto start = std::chrono::steady_clock::now();
  ASSERT_TRUE(launch("switching", switching_kernel, 1, kThreads, 0, nullptr, kRounds).ok());
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::printf("%.0f ns a switch\n", seconds * 1e9 / kRounds / kThreads);
}

}  // namespace
}  // namespace flash_qla::cuda
