#include "cuda/sm80/scan.h"

#include "cuda/common/dynamic_shared.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/sm80/block.cuh"

namespace flash_qla::cuda::sm80 {
namespace {

// A number as a sum of two of 16 bits: 2^-17 of it is left, and no range is lost. Of a product of two such sums three
// of four terms are made, so that 2^-16 of it is lost; operands of the pass itself lose 2^-9 (bf16) or 2^-12 (fp16).
using Piece = __nv_bfloat16;

__device__ __forceinline__ void split_pair(float x, float y, uint32_t& high, uint32_t& low) {
  high = pack2<Piece>(x, y);
  const float2 kept = unpack2<Piece>(high);
  low = pack2<Piece>(x - kept.x, y - kept.y);
}

// Shapes of a block: a warp to 16 keys.
template <int kKeys>
struct ScanShape {
  static constexpr int kTiles = kKeys / 16, kThreads = 32 * kTiles, kStrips = scan_strips(kKeys);
  // Tiles [16 columns x 16 keys] of transitions that a warp has on their way, as many as the shared memory holds: with
  // 64 keys those of two segments, with 128 those of one.
  static constexpr int kAhead = kKeys <= 128 ? 8 : kKeys == 192 ? 6 : 4;
  static constexpr int kTileBytes = 16 * 16 * 4, kPieceBytes = 32 * 16, kStripBytes = 2 * kPieceBytes;
  static constexpr int kRingsAt = kTiles * kStrips * kStripBytes;
  static constexpr size_t kSharedBytes = kRingsAt + kTiles * kAhead * kTileBytes;
  static_assert(kSharedBytes <= kMostSharedBytes);
};

// A warp's tiles of the transitions of one segment after another. In a tile, row 4 q + r is where lanes with
// lane % 4 = q read, all of them two keys at a time: rows of one r lie behind each other, and their 16-byte pieces
// change places, for the sake of the banks.
template <int kKeys>
class TransitionTiles {
 public:
  using Shape = ScanShape<kKeys>;
  // `from`: the warp's 16 keys in column 0 of the first transition, behind whose columns the next one's lie.
  __device__ __forceinline__ TransitionTiles(uint32_t ring, const float* from, int segments)
      : ring_(ring), left_(segments * Shape::kTiles) {
    const int lane = threadIdx.x % 32, row = lane / 4, piece = lane % 4, q = lane % 4, pair = lane / 4;
    from_ = from + row * kKeys + 4 * piece;
    to_ = static_cast<uint32_t>((row % 4 * 4 + row / 4) * 64 + piece * 16);
    read_ = static_cast<uint32_t>(q * 64 + ((pair / 2) ^ (q & 2)) * 16 + pair % 2 * 8);
#pragma unroll
    for (int i = 0; i < Shape::kAhead; ++i) start_copy(ring_ + i * Shape::kTileBytes);
  }
  // The next tile: of columns 4 q to 4 q + 3 the lane's two keys.
  __device__ __forceinline__ void take(float2 (&m)[4]) {
    cp_async_wait<Shape::kAhead - 1>();
    __syncwarp();
    const uint32_t tile = ring_ + at_;
#pragma unroll
    for (int r = 0; r < 4; ++r) m[r] = load_shared_f2(tile + read_ + r * 256);
    __syncwarp();  // all lanes have read
    start_copy(tile);
    at_ = at_ == (Shape::kAhead - 1) * Shape::kTileBytes ? 0 : at_ + Shape::kTileBytes;
  }

 private:
  __device__ __forceinline__ void start_copy(uint32_t tile) {
    if (left_-- > 0) {
      cp_async_16(tile + to_, from_);
      cp_async_16(tile + (to_ ^ 32) + 128, from_ + 8 * kKeys);
    }
    cp_async_commit();  // an empty one behind the last: groups are counted
    from_ += 16 * kKeys;
  }
  const float* from_;
  uint32_t ring_, to_, read_, at_ = 0;
  int left_;
};

// S(j + 1) = M(j) S(j) + what is already in its place, of a strip or two of a sequence and head. A warp makes 16 keys
// of all S(j + 1), so that a block reads M(j) once; what it needs of the next segments is on its way meanwhile.
//
// A lane's four keys of a tile lie beside each other in memory. Of an instruction's 16 left columns, 2 q, 2 q + 1 of
// the left eight are keys 4 q, 4 q + 1, and those of the right eight 4 q + 2, 4 q + 3, q = lane % 4; of results, column
// i of product t is key 2 i + t.
template <int kKeys>
__global__ void __launch_bounds__(ScanShape<kKeys>::kThreads)
    sm80_scan_kernel(const __grid_constant__ ForwardParams p) {
  using Shape = ScanShape<kKeys>;
  constexpr int kTiles = Shape::kTiles, kStrips = Shape::kStrips;
  const int strips_of_head = (p.V + kStrip - 1) / kStrip, blocks_of_head = (strips_of_head + kStrips - 1) / kStrips;
  const unsigned rest = blockIdx.x / blocks_of_head;
  const int64_t n = rest / p.Hv;
  const int head = static_cast<int>(rest % p.Hv), strip = static_cast<int>(blockIdx.x % blocks_of_head) * kStrips;
  const int strips = min(kStrips, strips_of_head - strip), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const DeviceSequence sequence = sequence_at(p.sequences, n);
  const int64_t at_least = segment_chunks(p.rule, total_chunks(p.sequences));
  const int64_t segments = segments_of(p.rule, ceil_div(sequence.length, kChunkSize), at_least);
  if (segments <= 2) return;
  const int64_t row = sequence.first_chunk / at_least + 1;
  const uint32_t memory = smem_address(dynamic_shared<char>());
  TransitionTiles<kKeys> transitions(
      memory + Shape::kRingsAt + warp * Shape::kAhead * Shape::kTileBytes,
      static_cast<const float*>(p.transitions.data) + row * p.transitions.row + head * p.transitions.head + 16 * warp,
      static_cast<int>(segments - 2));

  float* start = static_cast<float*>(p.starts.data) + row * p.starts.row + head * p.starts.head +
                 (strip * kStrip + lane / 4) * kKeys + 16 * warp + lane % 4 * 4;
  struct Sums {
    float x[kStrips][2][4];  // by strip, and as two products have them
  } own = {}, sums;
  const auto load_own = [&](const float* from) {
#pragma unroll
    for (int i = 0; i < 2 * kStrips; ++i) {
      if (i / 2 >= strips) break;
      const float4 four = *reinterpret_cast<const float4*>(from + 8 * i * kKeys);
      float (&x)[2][4] = own.x[i / 2];
      const int e = i % 2 * 2;
      x[0][e] = four.x, x[1][e] = four.y, x[0][e + 1] = four.z, x[1][e + 1] = four.w;
    }
  };
  // S(j) as left operands: high and low pieces, a lane's numbers of a tile and strip together.
  const auto left_at = [&](int tile, int s) {
    return memory + static_cast<uint32_t>((tile * kStrips + s) * Shape::kStripBytes + lane * 16);
  };
  load_own(start);
  sums = own;
  load_own(start + p.starts.row);
  for (int64_t j = segments - 2; j > 0; --j) {
#pragma unroll
    for (int s = 0; s < kStrips; ++s) {
      const float (&x)[2][4] = sums.x[s];
      uint4 high, low;
      split_pair(x[0][0], x[1][0], high.x, low.x);
      split_pair(x[0][2], x[1][2], high.y, low.y);
      split_pair(x[0][1], x[1][1], high.z, low.z);
      split_pair(x[0][3], x[1][3], high.w, low.w);
      store_shared_u4(left_at(warp, s), high);
      store_shared_u4(left_at(warp, s) + Shape::kPieceBytes, low);
    }
    sums = own;
    start += p.starts.row;
    if (j > 1) load_own(start + p.starts.row);
    __syncthreads();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float2 m[4];
      transitions.take(m);
      uint32_t high[2][2], low[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        split_pair(m[2 * i].x, m[2 * i + 1].x, high[0][i], low[0][i]);
        split_pair(m[2 * i].y, m[2 * i + 1].y, high[1][i], low[1][i]);
      }
#pragma unroll
      for (int s = 0; s < kStrips; ++s) {
        const uint4 left = load_shared_u4(left_at(tile, s));
        const uint4 left_low = load_shared_u4(left_at(tile, s) + Shape::kPieceBytes);
        const auto add = [&](const uint4& a, const uint32_t (&b)[2][2]) {
#pragma unroll
          for (int t = 0; t < 2; ++t) mma_m16n8k16<Piece>(sums.x[s][t], a.x, a.y, a.z, a.w, b[t][0], b[t][1]);
        };
        add(left_low, high);
        add(left, low);
        add(left, high);
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kStrips; ++i) {
      const float (&x)[2][4] = sums.x[i / 2];
      const int e = i % 2 * 2;
      const float4 end = make_float4(x[0][e], x[1][e], x[0][e + 1], x[1][e + 1]);
      if (i / 2 < strips) *reinterpret_cast<float4*>(start + 8 * i * kKeys) = end;
    }
    __syncthreads();  // the state before has been read
  }
}

template <int kKeys>
Status launch_of(const Problem& p, const ForwardParams& params, cudaStream_t stream) {
  using Shape = ScanShape<kKeys>;
  const int64_t blocks = p.N * p.Hv * ceil_div(p.V, Shape::kStrips * kStrip);
  return launch("sm80_scan", sm80_scan_kernel<kKeys>, blocks, Shape::kThreads, Shape::kSharedBytes, stream, params);
}

}  // namespace

Status launch_scan(const Problem& p, const ForwardParams& params, cudaStream_t stream) {
  switch (padded_keys(p.K)) {
    case 64:
      return launch_of<64>(p, params, stream);
    case 96:
      return launch_of<96>(p, params, stream);
    case 128:
      return launch_of<128>(p, params, stream);
    case 192:
      return launch_of<192>(p, params, stream);
    default:
      return launch_of<256>(p, params, stream);
  }
}

}  // namespace flash_qla::cuda::sm80
