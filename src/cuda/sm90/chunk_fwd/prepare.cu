#include "cuda/sm90/chunk_fwd/prepare.h"

#include <algorithm>
#include <iterator>

#include "cuda/common/bulk.cuh"
#include "cuda/sm90/chunk_fwd/traits.h"

namespace flash_qla::cuda::sm90::fwd {
namespace {

constexpr int kThreads = 256;
constexpr int kRowLanes = 16;  // of a row of 128 16-bit elements, 16 bytes each
constexpr int kRowsAtOnce = kThreads / kRowLanes;
constexpr int kRowsPerLane = 4;  // loads in flight
constexpr int kBlockRows = kRowsAtOnce * kRowsPerLane;
constexpr int kGatesPerThread = 4;

// Blocks [first_block, ..) of the grid do one part of the work.
struct RowWork {
  DeviceTensor from, to;
  int64_t rows;
  uint32_t d1, heads;
  uint32_t first_block;
  bool normalize, octets;  // octets: 16-bit elements on both sides, eight of them at a time
};
struct GateWork {
  Gates gates;
  float* log_decay;
  float* beta;
  uint32_t T, Hv;
  int64_t items;
  uint32_t blocks;
};
struct Work {
  GateWork gates;
  RowWork rows[kMostRowCopies];
  int copies;
};

// Sum over the lanes of a row.
__device__ float row_sum(float x) {
#pragma unroll
  for (int distance = kRowLanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

__device__ float inverse_norm(float squares) { return rsqrtf(row_sum(squares) + static_cast<float>(kL2NormEps)); }

// Two 16-bit elements, as floats and back.
__device__ float2 unpack_pair(int32_t dtype, uint32_t raw) {
  if (dtype == static_cast<int32_t>(DType::kBFloat16)) {
    return make_float2(__uint_as_float(raw << 16), __uint_as_float(raw & 0xffff0000u));
  }
  return __half22float2(*reinterpret_cast<const __half2*>(&raw));
}
__device__ uint32_t pack_pair(int32_t dtype, float2 x) {
  if (dtype == static_cast<int32_t>(DType::kBFloat16)) {
    const __nv_bfloat162 pair = __float22bfloat162_rn(x);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  const __half2 pair = __float22half2_rn(x);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

struct RowPlace {
  uint32_t i, j, head;  // indices of a row: below d0, d1 and heads
};

__device__ RowPlace row_place(const RowWork& work, int64_t row) {
  // Rows beyond 2^32 divide slowly; there are few tensors of that size.
  uint32_t head, token;
  if (row <= UINT32_MAX) {
    const uint32_t r = static_cast<uint32_t>(row);
    head = r % work.heads;
    token = r / work.heads;
  } else {
    head = static_cast<uint32_t>(row % work.heads);
    token = static_cast<uint32_t>(row / work.heads);
  }
  return {token / work.d1, token % work.d1, head};
}

// Read once: worth no place in L1, and the first to leave L2, so that what is written stays there for the kernel that
// reads it and reaches memory beside that kernel's work.
__device__ uint4 load_octet(const void* p, uint64_t policy) {
  uint4 x;
  asm("ld.global.nc.L1::no_allocate.L2::cache_hint.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
      : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
      : "l"(p), "l"(policy));
  return x;
}

__device__ void copy_octets(const RowWork& work, int64_t first_row) {
  const int lane = threadIdx.x % kRowLanes;
  uint64_t first_to_leave;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first_to_leave));
  uint4 x[kRowsPerLane];
  uint16_t* to[kRowsPerLane];
  // One division for all of the lane's rows, which are kRowsAtOnce apart: one to a row took as long as the memory.
  RowPlace at = row_place(work, min(first_row, work.rows - 1));
  const uint32_t tokens_on = kRowsAtOnce / work.heads, heads_on = kRowsAtOnce % work.heads;
#pragma unroll
  for (int n = 0; n < kRowsPerLane; ++n) {
    x[n] = make_uint4(0, 0, 0, 0);
    to[n] = static_cast<uint16_t*>(work.to.data) + offset_of(work.to, at.i, at.j, at.head) + 8 * lane;
    if (first_row + n * kRowsAtOnce < work.rows) {
      const int64_t from = offset_of(work.from, at.i, at.j, at.head) + 8 * lane;
      x[n] = load_octet(static_cast<const uint16_t*>(work.from.data) + from, first_to_leave);
    }
    at.head += heads_on;
    at.j += tokens_on;
    if (at.head >= work.heads) at.head -= work.heads, ++at.j;
    while (at.j >= work.d1) at.j -= work.d1, ++at.i;
  }
#pragma unroll
  for (int n = 0; n < kRowsPerLane; ++n) {
    if (work.normalize) {
      uint32_t raw[4] = {x[n].x, x[n].y, x[n].z, x[n].w};
      float2 pairs[4];
      float squares = 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        pairs[j] = unpack_pair(work.from.dtype, raw[j]);
        squares = fmaf(pairs[j].x, pairs[j].x, fmaf(pairs[j].y, pairs[j].y, squares));
      }
      const float scale = inverse_norm(squares);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        raw[j] = pack_pair(work.to.dtype, make_float2(pairs[j].x * scale, pairs[j].y * scale));
      }
      x[n] = make_uint4(raw[0], raw[1], raw[2], raw[3]);
    }
    if (first_row + n * kRowsAtOnce < work.rows) *reinterpret_cast<uint4*>(to[n]) = x[n];
  }
}

__device__ void copy_elements(const RowWork& work, int64_t first_row) {
  const int lane = threadIdx.x % kRowLanes;
  constexpr int kPerLane = kHeadDim / kRowLanes;
  for (int i = 0; i < kRowsPerLane; ++i) {
    const int64_t row = first_row + i * kRowsAtOnce;
    // All lanes of a warp take part in the sum.
    const bool valid = row < work.rows;
    const RowPlace place = row_place(work, valid ? row : 0);
    const int64_t from = offset_of(work.from, place.i, place.j, place.head);
    const int64_t to = offset_of(work.to, place.i, place.j, place.head);
    float x[kPerLane], squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      x[j] = load<float>(work.from, from + (lane + kRowLanes * j) * work.from.stride[3]);
      squares = fmaf(x[j], x[j], squares);
    }
    const float scale = work.normalize ? inverse_norm(squares) : 1.0f;
    if (!valid) continue;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      store<float>(work.to, to + (lane + kRowLanes * j) * work.to.stride[3], x[j] * scale);
    }
  }
}

__device__ void copy_gates(const GateWork& work) {
#pragma unroll
  for (int e = 0; e < kGatesPerThread; ++e) {
    const int64_t i = (static_cast<int64_t>(blockIdx.x) * kGatesPerThread + e) * kThreads + threadIdx.x;
    if (i >= work.items) return;
    int64_t token, head;
    if (i <= UINT32_MAX) {
      token = static_cast<uint32_t>(i) / work.Hv;
      head = static_cast<uint32_t>(i) % work.Hv;
    } else {
      token = i / work.Hv;
      head = i % work.Hv;
    }
    const uint32_t b = static_cast<uint32_t>(token) / work.T, t = static_cast<uint32_t>(token) % work.T;
    if (work.log_decay != nullptr) work.log_decay[i] = log_decay<float>(work.gates, b, t, head, false);
    if (work.beta != nullptr) work.beta[i] = effective_beta<float>(work.gates, b, t, head);
  }
}

__global__ void __launch_bounds__(kThreads) sm90_chunk_fwd_prepare_kernel(const __grid_constant__ Work work) {
  // Whoever may start meanwhile waits for the rows itself.
  launch_dependents();
  if (blockIdx.x < work.gates.blocks) return copy_gates(work.gates);
  int copy = work.copies - 1;
  while (copy > 0 && blockIdx.x < work.rows[copy].first_block) --copy;
  const RowWork& rows = work.rows[copy];
  const int64_t first_row = static_cast<int64_t>(blockIdx.x - rows.first_block) * kBlockRows + threadIdx.x / kRowLanes;
  rows.octets ? copy_octets(rows, first_row) : copy_elements(rows, first_row);
}

// 16-bit elements, eight of them on a 16-byte boundary in every row. The stride of a dimension of one index means
// nothing.
bool in_octets(const DeviceTensor& t, const RowCopy& copy) {
  const DType type = static_cast<DType>(t.dtype);
  const int64_t sizes[3] = {copy.d0, copy.d1, copy.heads};
  for (int i = 0; i < 3; ++i) {
    if (sizes[i] > 1 && t.stride[i] % 8 != 0) return false;
  }
  return (type == DType::kBFloat16 || type == DType::kFloat16) && t.stride[3] == 1 &&
         reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

}  // namespace

bool prepares(const GateCopy& gates, const RowCopy (&copies)[kMostRowCopies]) {
  if ((gates.log_decay != nullptr || gates.beta != nullptr) && gates.B * gates.T * gates.Hv > 0) return true;
  return std::any_of(std::begin(copies), std::end(copies),
                     [](const RowCopy& copy) { return copy.to.data != nullptr && copy.d0 * copy.d1 * copy.heads > 0; });
}

Status launch_prepare(const GateCopy& gates, const RowCopy (&copies)[kMostRowCopies], cudaStream_t stream) {
  Work work{};
  int64_t blocks = 0;
  if (gates.log_decay != nullptr || gates.beta != nullptr) {
    work.gates = {gates.gates,
                  gates.log_decay,
                  gates.beta,
                  static_cast<uint32_t>(gates.T),
                  static_cast<uint32_t>(gates.Hv),
                  gates.B * gates.T * gates.Hv,
                  0};
    blocks = ceil_div(work.gates.items, kThreads * kGatesPerThread);
    work.gates.blocks = static_cast<uint32_t>(blocks);
  }
  for (const RowCopy& copy : copies) {
    const int64_t rows = copy.d0 * copy.d1 * copy.heads;
    if (copy.to.data == nullptr || rows == 0) continue;
    const bool same_type = copy.normalize || copy.from.dtype == copy.to.dtype;
    work.rows[work.copies++] = {copy.from,
                                copy.to,
                                rows,
                                static_cast<uint32_t>(copy.d1),
                                static_cast<uint32_t>(copy.heads),
                                static_cast<uint32_t>(blocks),
                                copy.normalize,
                                same_type && in_octets(copy.from, copy) && in_octets(copy.to, copy)};
    blocks += ceil_div(rows, kBlockRows);
  }
  return launch("sm90_chunk_fwd_prepare", sm90_chunk_fwd_prepare_kernel, blocks, kThreads, 0, stream, work);
}

}  // namespace flash_qla::cuda::sm90::fwd
