// Which heads forget, and which tokens make a link: decided on the device, so that lengths and gates may change under a
// captured graph.
#include "cuda/common/warp.cuh"
#include "cuda/generic/links.cuh"

namespace flash_qla::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;

// The part's row at one end, or -1 where it has none.
__device__ int64_t row_of_part(const LinkParams& p, int64_t part, int end) {
  const int64_t row = load_index(p.rows, part, end);
  return row >= 0 && row < p.sequences.N && sequence_at(p.sequences, row).length > 0 ? row : -1;
}

__device__ bool flag(const DeviceTensor& t, int64_t part) {
  return static_cast<const uint8_t*>(t.data)[part * t.stride[0]] != 0;
}

// The chunk that a block takes of all, -1: none; or, with a bound of windows, of those next to either end of the parts'
// rows: the first ones of a part's row, then, going forward, the last.
__device__ int64_t chunk_of_block(const LinkParams& p, int64_t block, bool backward) {
  if (p.most_window == 0) {
    if (block >= total_chunks(p.sequences)) return -1;
    const int64_t row = sequence_of_chunk(p.sequences, block);
    for (int64_t part = 0; part < p.P; ++part) {
      if (load_index(p.rows, part, 0) == row || load_index(p.rows, part, 1) == row) return block;
    }
    return -1;
  }
  const int64_t i = block % p.most_window, part = block / p.most_window % p.P, from_end = block / p.most_window / p.P;
  const int64_t row = row_of_part(p, part, backward ? 0 : 1);
  if (row < 0 || !flag(p.crosses, part)) return -1;
  const DeviceSequence sequence = sequence_at(p.sequences, row);
  const int64_t chunks = ceil_div(sequence.length, kChunkSize), at = from_end == 0 ? i : chunks - 1 - i;
  if (i >= chunks || (from_end != 0 && at < p.most_window)) return -1;  // none, or one of the first ones
  return sequence.first_chunk + at;
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
    chunk_log_norms_kernel(const __grid_constant__ LinkParams p, bool backward, float* log_norms) {
  __shared__ float s_squares[kChunkSize];
  const int key_heads = p.in.Hv / p.in.group;
  const int64_t chunk = chunk_of_block(p, blockIdx.x / key_heads, backward);
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

// The chunks from one end of a row on whose product leaves at most e^threshold of a state, chunks + 1 if even all of
// them, or as many as a window may have, leave more. A warp; the sums are in the order of the chunks, 32 at a time.
__device__ int64_t window(const LinkParams& p, const DeviceSequence& sequence, int head, bool from_end) {
  const int64_t chunks = ceil_div(sequence.length, kChunkSize);
  const int64_t most = p.most_window > 0 && p.most_window < chunks ? p.most_window : chunks;
  const int lane = threadIdx.x % kWarp;
  float before = 0.f;
  for (int64_t base = 0; base < most; base += kWarp) {
    const int64_t i = base + lane, at = from_end ? chunks - 1 - i : i;
    float sum = i < most ? p.log_norms[(sequence.first_chunk + at) * p.in.Hv + head] : 0.f;
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const float left = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += left;
    }
    sum += before;
    const unsigned found = __ballot_sync(0xffffffffu, i < most && sum <= p.threshold);
    if (found != 0) return base + __ffs(static_cast<int>(found));
    before = __shfl_sync(0xffffffffu, sum, kWarp - 1);
  }
  return chunks + 1;
}

// One warp a (part, value head).
__global__ void __launch_bounds__(kWarp) plan_links_kernel(const __grid_constant__ LinkParams p, bool backward) {
  const int64_t part = blockIdx.x / p.in.Hv;
  const int head = static_cast<int>(blockIdx.x % p.in.Hv);
  const int64_t row = row_of_part(p, part, backward ? 0 : 1);
  const bool crosses = row >= 0 && flag(p.crosses, part), through = crosses && flag(p.through, part);
  LinkPass pass{-1, 0, 0, 0, 0};
  float kind = row < 0 ? static_cast<float>(FLASH_QLA_LINK_NONE) : static_cast<float>(FLASH_QLA_LINK_CONSTANT);
  if (crosses) {
    const DeviceSequence sequence = sequence_at(p.sequences, row);
    const int64_t chunks = ceil_div(sequence.length, kChunkSize);
    // Going backward, a part that is gone through forgets where the forward has said so.
    const bool was_constant =
        backward && is_constant(load<double>(p.forward_kind, offset_of(p.forward_kind, part, head)));
    const bool may_forget = p.log_norms != nullptr && !(backward && through && !was_constant);
    int64_t length = chunks + 1;
    if (may_forget) length = window(p, sequence, head, !backward);
    // One decision for both directions: the state and its gradient must both be forgotten.
    if (may_forget && !backward && through && length <= chunks && window(p, sequence, head, false) > chunks) {
      length = chunks + 1;
    }
    const bool forgets = length <= chunks;
    const bool affine = through && !(backward ? was_constant : forgets);
    pass.row = static_cast<int32_t>(row);
    pass.from = forgets && !backward ? static_cast<int32_t>((chunks - length) * kChunkSize) : 0;
    const int64_t end = length * kChunkSize;
    pass.to = static_cast<int32_t>(forgets && backward && end < sequence.length ? end : sequence.length);
    pass.starts = !through && !forgets;
    pass.is_affine = affine;
    if (affine) kind = static_cast<float>(FLASH_QLA_LINK_AFFINE);
  }
  if (threadIdx.x == 0) {
    p.passes[part * p.in.Hv + head] = pass;
    store<float>(p.kind, offset_of(p.kind, part, head), kind);
  }
}

}  // namespace

Status launch_chunk_log_norms(const Problem& p, const LinkParams& params, bool backward, float* log_norms,
                              cudaStream_t stream) {
  const int64_t ends = backward ? 1 : 2;
  const int64_t chunks = params.most_window == 0 ? p.chunk_bound : ends * params.P * params.most_window;
  return launch("chunk_log_norms", chunk_log_norms_kernel, chunks * (p.Hv / p.group), kThreads, 0, stream, params,
                backward, log_norms);
}

Status launch_plan_links(const Problem& p, const LinkParams& params, bool backward, cudaStream_t stream) {
  return launch("plan_links", plan_links_kernel, params.P * p.Hv, kWarp, 0, stream, params, backward);
}

}  // namespace flash_qla::cuda
