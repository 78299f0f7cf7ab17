// What the serial pass needs of a chunk and does not depend on the state: the triangular inverses, the products of
// queries and keys, and the gates (docs/kernels/sm80.md). A block takes a chunk of 64 tokens of a key head, and the
// value heads of its group one pair after another.
#pragma once

#include "cuda/common/dynamic_shared.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/mbarrier.cuh"
#include "cuda/sm80/substitution.cuh"
#include "cuda/sm80/tile.cuh"

namespace flash_qla::cuda::sm80 {

inline constexpr int kPrepareWarps = 4, kPrepareThreads = 32 * kPrepareWarps;
// Value heads at a time: two of them are four substitutions of 32 columns, one a warp.
inline constexpr int kHeadsAtOnce = 2;
inline constexpr int kChunk = static_cast<int>(kChunkSize);

struct HeadGates {
  float sum_high[kChunk], sum_low[kChunk];  // c from the step's start, as a sum of two floats
  float beta[kChunk];
};

// In the place of the tiles of keys and queries, once these are multiplied.
struct PrepareMemory {
  float kk[kLowerFloats];  // K K^T
  float qk[kLowerFloats];  // Q K^T
  float inverse[kHeadsAtOnce][kLowerFloats];
  float ones[kChunk];
  HeadGates gates[kHeadsAtOnce];
};
static_assert(sizeof(PrepareMemory) <= 48 * 1024);  // two blocks of it fit into the smallest multiprocessor

template <int kKeys>
constexpr size_t prepare_shared_bytes() {
  constexpr size_t kTiles = 2 * kChunk * kKeys * 2;
  return kTiles > sizeof(PrepareMemory) ? kTiles : sizeof(PrepareMemory);
}

// Where a block works.
struct PreparePlace {
  int64_t b, token, chunk;  // the chunk's first token in its batch row, and its number
  int count;                // tokens
  int key_head, first_head, last_head;
  bool writes_rows;  // of several blocks to a group one writes the normalised rows
  bool skipped;      // the sequence is
};

__device__ inline bool find_place(const PrepareParams& p, PreparePlace* place) {
  const unsigned parts = (p.group + p.heads_per_block - 1) / p.heads_per_block;
  const unsigned of_group = blockIdx.x % parts, rest = blockIdx.x / parts;
  place->chunk = rest / p.Hq;
  if (place->chunk >= (p.parts != nullptr ? p.chunks : total_chunks(p.sequences))) return false;
  if (p.parts != nullptr) {
    const DeviceSequence part = p.parts[place->chunk];
    place->b = part.b;
    place->token = part.begin;
    place->count = static_cast<int>(part.length);
    place->skipped = false;
  } else {
    const int64_t n = sequence_of_chunk(p.sequences, place->chunk);
    const DeviceSequence sequence = sequence_at(p.sequences, n);
    const int64_t t0 = (place->chunk - sequence.first_chunk) * kChunk, left = sequence.length - t0;
    place->b = sequence.b;
    place->token = sequence.begin + t0;
    place->count = static_cast<int>(left < kChunk ? left : kChunk);
    place->skipped = read_slot(p.pool_indices, n) == kSkipRow;
  }
  place->key_head = static_cast<int>(rest % p.Hq);
  place->first_head = place->key_head * p.group + static_cast<int>(of_group) * p.heads_per_block;
  place->last_head = min(place->first_head + p.heads_per_block, (place->key_head + 1) * p.group);
  place->writes_rows = of_group == 0;
  return place->count > 0;
}

// Divides the rows of a tile by their norms, in place and in `out` (elements of a row side by side).
template <class T, int kKeys>
__device__ void normalize_rows(char* tile, uint16_t* out, int64_t out_stride, int K, int count) {
  constexpr int kWords = kKeys / 2, kPerLane = (kWords + 31) / 32;
  constexpr int kAtOnce = 4;  // rows of a warp: their shuffles wait beside each other
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int first = warp; first < count; first += kPrepareWarps * kAtOnce) {
    float2 x[kAtOnce][kPerLane];
    float sum[kAtOnce];
    const auto word = [&](int n, int i) {
      const int w = lane + 32 * i;
      return reinterpret_cast<uint32_t*>(tile + piece_offset<kKeys>(first + n * kPrepareWarps, w / 4) + w % 4 * 4);
    };
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      sum[n] = 0.f;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const bool inside = lane + 32 * i < kWords && first + n * kPrepareWarps < count;
        x[n][i] = inside ? unpack2<T>(*word(n, i)) : make_float2(0.f, 0.f);
        sum[n] = fmaf(x[n][i].x, x[n][i].x, fmaf(x[n][i].y, x[n][i].y, sum[n]));
      }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) sum[n] += __shfl_xor_sync(0xffffffffu, sum[n], distance);
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int row = first + n * kPrepareWarps;
      const float scale = 1.f / sqrtf(sum[n] + static_cast<float>(kL2NormEps));
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int w = lane + 32 * i;
        if (row >= count || w >= kWords) continue;
        const uint32_t packed = pack2<T>(x[n][i].x * scale, x[n][i].y * scale);
        *word(n, i) = packed;
        if (out != nullptr && 2 * w < K) *reinterpret_cast<uint32_t*>(out + row * out_stride + 2 * w) = packed;
      }
    }
  }
}

// Products of rows of the chunk, by blocks of 16x16 on and below the diagonal. A pass of short steps needs those within
// its steps; the 64x64 inverse needs all of K K^T.
struct ProductBlock {
  bool of_queries;
  int i, j;
};

template <int kStep>
__device__ __forceinline__ int product_blocks(bool whole) {
  return kStep == kChunk ? 20 : whole ? 16 : 12;
}

template <int kStep>
__device__ __forceinline__ ProductBlock product_block(int number) {
  // Numbers of blocks, row by row, a hexadecimal digit each.
  constexpr uint32_t kWithin = 0x985210, kBetween = 0x7643;
  int block;
  bool of_queries;
  if (kStep == kChunk) {
    of_queries = number >= 10;
    block = number % 10;
  } else {
    of_queries = number >= 6 && number < 12;
    block = (number < 12 ? kWithin >> number % 6 * 4 : kBetween >> (number - 12) * 4) & 15;
  }
  const int i = block >= 6 ? 3 : block >= 3 ? 2 : block >= 1 ? 1 : 0;
  return {of_queries, i, block - i * (i + 1) / 2};
}

template <class T, int kKeys>
__device__ void multiply_rows(char* memory, bool whole) {
  constexpr int kStep = step_tokens(kKeys), kMost = (kStep == kChunk ? 20 : 16) / kPrepareWarps;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t keys = smem_address(memory), queries = keys + kChunk * kKeys * 2;
  const int blocks = product_blocks<kStep>(whole);
  float sums[kMost][8];
#pragma unroll
  for (int n = 0; n < kMost; ++n) {
#pragma unroll
    for (int e = 0; e < 8; ++e) sums[n][e] = 0.f;
    const int number = warp + n * kPrepareWarps;
    if (number >= blocks) continue;
    const ProductBlock block = product_block<kStep>(number);
    const BlockReader<kKeys> left(block.of_queries ? queries : keys, lane, Order::kLeftOperand);
    const BlockReader<kKeys> right(keys, lane, Order::kRightOperand);
#pragma unroll 4
    for (int k = 0; k < kKeys / 16; ++k) {
      uint32_t a[4], b[4];
      load_matrix_x4(left.at(block.i, k), a);
      load_matrix_x4(right.at(block.j, k), b);
      mma_m16n8k16<T>(sums[n], a[0], a[1], a[2], a[3], b[0], b[1]);
      mma_m16n8k16<T>(sums[n] + 4, a[0], a[1], a[2], a[3], b[2], b[3]);
    }
  }
  __syncthreads();  // the tiles have been read: the products take their place
  PrepareMemory& s = *reinterpret_cast<PrepareMemory*>(memory);
#pragma unroll
  for (int n = 0; n < kMost; ++n) {
    const int number = warp + n * kPrepareWarps;
    if (number >= blocks) continue;
    const ProductBlock block = product_block<kStep>(number);
    float* to = (block.of_queries ? s.qk : s.kk) + lower_block(block.i, block.j) + lane / 4 * kSide + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<float2*>(to + 8 * half) = make_float2(sums[n][4 * half], sums[n][4 * half + 1]);
      *reinterpret_cast<float2*>(to + 8 * kSide + 8 * half) = make_float2(sums[n][4 * half + 2], sums[n][4 * half + 3]);
    }
  }
}

template <int kStep>
__device__ __forceinline__ StepRecord<kStep>* record_at(const PrepareParams& p, int64_t chunk, int head, int step) {
  constexpr int kSteps = kChunk / kStep;
  return reinterpret_cast<StepRecord<kStep>*>(p.records) + (chunk * p.Hv + head) * kSteps + step;
}

// The gates of a value head, by one warp: sums in double, in shared memory and in the records. A lane has two tokens.
template <int kStep>
__device__ void sum_gates(const PrepareParams& p, const PreparePlace& place, int head, HeadGates& s) {
  constexpr int kLanesPerStep = kStep / 2;
  const int lane = threadIdx.x % 32, step = lane / kLanesPerStep;
  float g[2] = {0.f, 0.f}, beta[2] = {0.f, 0.f};
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int t = 2 * lane + e;
    if (t >= place.count) continue;
    g[e] = clamp_log_decay(log_decay<float>(p.gates, place.b, place.token + t, head, t == 0));
    beta[e] = effective_beta<float>(p.gates, place.b, place.token + t, head);
  }
  double sum = static_cast<double>(g[0]) + static_cast<double>(g[1]);
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const double other = __shfl_up_sync(0xffffffffu, sum, distance);
    if (lane >= distance) sum += other;
  }
  double before = __shfl_up_sync(0xffffffffu, sum, 1);
  if (lane == 0) before = 0.0;
  const double of_first_step = __shfl_sync(0xffffffffu, sum, kLanesPerStep - 1);
  const double of_chunk = __shfl_sync(0xffffffffu, sum, 31);
  const double start = step == 0 ? 0.0 : of_first_step;
  const double end = (step == 0 ? of_first_step : of_chunk) - start;
  const double c[2] = {before + static_cast<double>(g[0]), sum};
  StepRecord<kStep>& record = *record_at<kStep>(p, place.chunk, head, step);
  const int at = 2 * (lane % kLanesPerStep);
  float high[2], low[2], gamma[2], update[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const double local = c[e] - start;
    high[e] = static_cast<float>(local);
    low[e] = static_cast<float>(local - static_cast<double>(high[e]));
    gamma[e] = __expf(high[e]);
    update[e] = beta[e] * __expf(static_cast<float>(end - local));
    const int t = 2 * lane + e;
    if (p.g_cumsum.data != nullptr && t < place.count) {
      store<float>(p.g_cumsum, offset_of(p.g_cumsum, place.b, place.token + t, head), static_cast<float>(c[e]));
    }
  }
  const auto keep = [](float* to, const float (&x)[2]) { *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]); };
  keep(s.sum_high + 2 * lane, high);
  keep(s.sum_low + 2 * lane, low);
  keep(s.beta + 2 * lane, beta);
  keep(record.gamma + at, gamma);
  keep(record.update + at, update);
  const float scaled[2] = {p.scale * gamma[0], p.scale * gamma[1]};
  keep(record.scaled_gamma + at, scaled);
  if (lane % kLanesPerStep < 4) record.decay[lane % kLanesPerStep] = __expf(static_cast<float>(end));
}

// strict(G o T) and P B of a value head, by all warps: a warp writes a block of 128 bytes at once.
template <class T, int kStep>
__device__ void write_triangles(const PrepareParams& p, const PrepareMemory& s, int64_t chunk, int head, int slot) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const HeadGates& gates = s.gates[slot];
  for (int step = 0; step < kChunk / kStep; ++step) {
    StepRecord<kStep>& record = *record_at<kStep>(p, chunk, head, step);
    int row = 0, before = 0;  // blocks of the rows before
    for (int block = warp; block < triangle_blocks(kStep); block += kPrepareWarps) {
      while (before + row + 1 <= block) before += ++row;
      const int column = block - before;
      const int i = step * kStep + 8 * row + lane / 4, j = step * kStep + 8 * column + lane % 4 * 2;
      const float2 inverse = *reinterpret_cast<const float2*>(s.inverse[slot] + lower_index(i, j));
      const float2 product = *reinterpret_cast<const float2*>(s.qk + lower_index(i, j));
      float transform[2], output[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool within = j + e <= i, below = j + e < i;
        // The difference is exact where it is small, as the two sums are near each other then.
        const float c = (gates.sum_high[i] - gates.sum_high[j + e]) + (gates.sum_low[i] - gates.sum_low[j + e]);
        const float G = within ? __expf(c) : 0.f;  // above the diagonal the exponent may be large
        transform[e] = below ? G * (e == 0 ? inverse.x : inverse.y) : 0.f;
        output[e] = within ? p.scale * G * (e == 0 ? product.x : product.y) * gates.beta[j + e] : 0.f;
      }
      const int at = triangle_block(kStep, row, column) * kBlockBytes + lane * 4;
      *reinterpret_cast<uint32_t*>(record.transform + at) = pack2<T>(transform[0], transform[1]);
      *reinterpret_cast<uint32_t*>(record.outputs + at) = pack2<T>(output[0], output[1]);
    }
  }
}

// Rows of A of a value head; zeros where the sequence is skipped (no inverse).
__device__ inline void write_A(const PrepareParams& p, const PreparePlace& place, int head, const float* inverse) {
  constexpr int kPerRow = kChunk / 4;  // lanes of a row, four elements each
  for (int e = threadIdx.x; e < place.count * kPerRow; e += kPrepareThreads) {
    const int row = e / kPerRow, column = e % kPerRow * 4;
    const int64_t to = offset_of(p.A, place.b, place.token + row, head, column);
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = inverse != nullptr && column + i <= row ? inverse[lower_index(row, column + i)] : 0.f;
    }
    if (p.A.quads) {
      const bool bf16 = p.A.dtype == static_cast<int32_t>(DType::kBFloat16);
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.A.data) + to) =
          bf16 ? make_uint2(pack2<__nv_bfloat16>(x[0], x[1]), pack2<__nv_bfloat16>(x[2], x[3]))
               : make_uint2(pack2<__half>(x[0], x[1]), pack2<__half>(x[2], x[3]));
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) store<float>(p.A, to + i * p.A.stride[3], x[i]);
    }
  }
}

// What a skipped sequence leaves.
__device__ inline void write_zeros(const PrepareParams& p, const PreparePlace& place) {
  for (int head = place.first_head; head < place.last_head; ++head) {
    if (p.A.data != nullptr) write_A(p, place, head, nullptr);
    if (p.g_cumsum.data != nullptr && static_cast<int>(threadIdx.x) < place.count) {
      store<float>(p.g_cumsum, offset_of(p.g_cumsum, place.b, place.token + threadIdx.x, head), 0.f);
    }
  }
}

// Three blocks: as many as the shared memory of an A100's multiprocessor holds with up to 128 keys.
template <class T, int kKeys>
__global__ void __launch_bounds__(kPrepareThreads, 3) sm80_prepare_kernel(const __grid_constant__ PrepareParams p) {
  constexpr int kStep = step_tokens(kKeys);
  char* memory = dynamic_shared<char>();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  PreparePlace place;
  if (!find_place(p, &place)) return;
  if (place.skipped) return write_zeros(p, place);

  // Rows of keys and queries.
  const uint32_t tiles = smem_address(memory);
  copy_rows<kKeys, kChunk, kPrepareThreads>(tiles, row_at(p.k, place.b, place.token, place.key_head), p.k.token, p.K,
                                            place.count, threadIdx.x);
  copy_rows<kKeys, kChunk, kPrepareThreads>(tiles + kChunk * kKeys * 2,
                                            row_at(p.q, place.b, place.token, place.key_head), p.q.token, p.K,
                                            place.count, threadIdx.x);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  if (p.normal_q != nullptr || p.normal_k != nullptr) {
    const int64_t stride = static_cast<int64_t>(p.Hq) * p.row_elements;
    const int64_t at = (place.b * p.sequences.T + place.token) * stride + place.key_head * p.row_elements;
    const auto normalize = [&](char* tile, uint16_t* out) {
      if (out == nullptr) return;
      normalize_rows<T, kKeys>(tile, place.writes_rows ? out + at : nullptr, stride, p.K, place.count);
    };
    normalize(memory, p.normal_k);
    normalize(memory + kChunk * kKeys * 2, p.normal_q);
    __syncthreads();
  }

  const bool wants_A = p.A.data != nullptr;
  multiply_rows<T, kKeys>(memory, wants_A);
  PrepareMemory& s = *reinterpret_cast<PrepareMemory*>(memory);
  if (threadIdx.x < kChunk) s.ones[threadIdx.x] = 1.f;

  for (int first = place.first_head; first < place.last_head; first += kHeadsAtOnce) {
    const int heads = min(kHeadsAtOnce, place.last_head - first);
    if (warp < heads) sum_gates<kStep>(p, place, first + warp, s.gates[warp]);
    __syncthreads();
    const int slot = warp / 2, part = warp % 2 * 2;  // a warp's head, and the first of its blocks of columns
    if (wants_A) {
      if (slot < heads) substitute(s.kk, s.gates[slot].beta, s.ones, s.inverse[slot], part, kSides, lane);
      __syncthreads();
      for (int h = 0; h < heads; ++h) write_A(p, place, first + h, s.inverse[h]);
      __syncthreads();
    }
    if (slot < heads) {
      const int last = kStep == kChunk ? kSides : part + kSides / 2;
      substitute(s.kk, s.ones, s.gates[slot].beta, s.inverse[slot], part, last, lane);
    }
    __syncthreads();
    for (int h = 0; h < heads; ++h) write_triangles<T, kStep>(p, s, place.chunk, first + h, h);
    __syncthreads();
  }
}

}  // namespace flash_qla::cuda::sm80
