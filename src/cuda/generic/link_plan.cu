// Which heads forget, and which tokens make a link: decided on the device, so that lengths and gates may change under a
// captured graph.
#include "cuda/common/warp.cuh"
#include "cuda/generic/link_pass.cuh"

namespace flash_qla::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;

// The chunk that a block takes of all, -1: none.
__device__ int64_t chunk_of_block(const LinkParams& p, int64_t block) {
  if (block >= total_chunks(p.sequences)) return -1;
  const int64_t row = sequence_of_chunk(p.sequences, block);
  for (int64_t part = 0; part < p.P; ++part) {
    if (load_index(p.rows, part, 0) == row || load_index(p.rows, part, 1) == row) return block;
  }
  return -1;
}

// |k|^2 of a chunk's tokens. A warp takes some at a time, so that it has several loads in flight.
constexpr int kTogether = 8;

__device__ void square_keys(const DeviceTensor& k, int64_t base, int count, int K, float* s_squares) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (int first = warp * kTogether; first < count; first += kWarps * kTogether) {
    float squares[kTogether] = {};
    for (int j = 4 * lane; j < K; j += 4 * kWarp) {
      float4 x[kTogether];
      const auto row = [&](int i) { return base + min(first + i, count - 1) * k.stride[1]; };
      if (k.dtype == static_cast<int32_t>(DType::kFloat64)) {  // which has no raw loads
        const auto at = [&](int i, int n) { return j + n < K ? load<float>(k, row(i) + (j + n) * k.stride[3]) : 0.f; };
#pragma unroll
        for (int i = 0; i < kTogether; ++i) x[i] = make_float4(at(i, 0), at(i, 1), at(i, 2), at(i, 3));
      } else {
        RawQuad raw[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) raw[i] = load_raw_quad(k, row(i), j, K);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) x[i] = unpack(k, raw[i]);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        squares[i] = fmaf(x[i].x, x[i].x, fmaf(x[i].y, x[i].y, fmaf(x[i].z, x[i].z, fmaf(x[i].w, x[i].w, squares[i]))));
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const float square = warp_sum(squares[i]);
      if (lane == 0 && first + i < count) s_squares[first + i] = square;
    }
  }
}

// One block a (chunk, key head): its value heads have one |k|^2, and a warp each in turn.
__global__ void __launch_bounds__(kThreads)
    chunk_log_norms_kernel(const __grid_constant__ LinkParams p, float* log_norms) {
  __shared__ float s_squares[kChunkSize];
  const int key_heads = p.in.Hv / p.in.group;
  const int64_t chunk = chunk_of_block(p, blockIdx.x / key_heads);
  const int key_head = static_cast<int>(blockIdx.x % key_heads);
  if (chunk < 0) return;
  const DeviceSequence sequence = sequence_at(p.sequences, sequence_of_chunk(p.sequences, chunk));
  const int64_t first = (chunk - sequence.first_chunk) * kChunkSize, left = sequence.length - first;
  const int64_t token = sequence.begin + first;
  const int count = static_cast<int>(left < kChunkSize ? left : kChunkSize);
  square_keys(p.in.k, offset_of(p.in.k, sequence.b, token, key_head), count, p.in.K, s_squares);
  __syncthreads();
  for (int in_group = threadIdx.x / kWarp; in_group < p.in.group; in_group += kWarps) {
    const int head = key_head * p.in.group + in_group;
    float sum = 0.f;
    for (int i = threadIdx.x % kWarp; i < count; i += kWarp) {
      const auto of_token = [&](const DeviceTensor& t) {
        return load<float>(t, offset_of(t, sequence.b, token + i, head));
      };
      const float beta = p.in.beta.data == nullptr ? 1.f : of_token(p.in.beta);
      const float factor = fabsf(1.f - beta * s_squares[i]);
      if (p.in.g.data != nullptr) sum += clamp_log_decay(of_token(p.in.g));
      if (!(factor <= 1.f)) sum += logf(factor);  // a NaN stays one, and forgets nothing
    }
    sum = warp_sum(sum);
    if (threadIdx.x % kWarp == 0) log_norms[chunk * p.in.Hv + head] = sum;
  }
}

// The chunks from one end of a row on whose product leaves at most e^threshold of a state, 0 if even all of them leave
// more. A warp.
__device__ int64_t window(const LinkParams& p, const DeviceSequence& sequence, int head, bool from_end) {
  const int64_t chunks = ceil_div(sequence.length, kChunkSize);
  return first_below(chunks, p.threshold, [&](int64_t i) {
    return p.log_norms[(sequence.first_chunk + (from_end ? chunks - 1 - i : i)) * p.in.Hv + head];
  });
}

// One warp a (part, value head).
__global__ void __launch_bounds__(kWarp) plan_links_kernel(const __grid_constant__ LinkParams p, bool backward) {
  const int64_t part = blockIdx.x / p.in.Hv;
  const int head = static_cast<int>(blockIdx.x % p.in.Hv);
  float kind;
  const LinkPass pass = link_pass(
      p, part, head, backward, p.log_norms != nullptr,
      [&](const DeviceSequence& sequence, bool from_end) { return window(p, sequence, head, from_end); }, &kind);
  if (threadIdx.x == 0) {
    p.passes[part * p.in.Hv + head] = pass;
    store<float>(p.kind, offset_of(p.kind, part, head), kind);
  }
}

}  // namespace

Status launch_chunk_log_norms(const Problem& p, const LinkParams& params, float* log_norms, cudaStream_t stream) {
  return launch("chunk_log_norms", chunk_log_norms_kernel, p.chunk_bound * (p.Hv / p.group), kThreads, 0, stream,
                params, log_norms);
}

Status launch_plan_links(const Problem& p, const LinkParams& params, bool backward, cudaStream_t stream) {
  return launch("plan_links", plan_links_kernel, params.P * p.Hv, kWarp, 0, stream, params, backward);
}

}  // namespace flash_qla::cuda
