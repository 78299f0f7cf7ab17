#include "cuda/common/dynamic_shared.cuh"
#include "cuda/oracle/recurrence.cuh"
#include "cuda/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

// A block steps kColumns columns of one (sequence, value head), eight lanes a column, the state in shared memory.
constexpr int kThreads = kLanes * kColumns;

__device__ double lane_sum(double x) {
  for (int distance = 1; distance < kLanes; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

__global__ void __launch_bounds__(kThreads)
    oracle_forward_kernel(const __grid_constant__ ForwardParams p, double* boundaries, bool float_at_chunks) {
  const int K = p.in.K, V = p.in.V, Hv = p.in.Hv;
  double* s_q = dynamic_shared<double>();  // [K]
  double* s_k = s_q + K;                   // [K]
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  double* s_state = s_k + K + group * (K + 1);  // [K] of this thread's column

  const BlockPlace place = block_place(Hv, V);
  const DeviceSequence sequence = sequence_at(p.sequences, place.n);
  const int column = place.column0 + group;
  const bool valid = column < V;
  const int64_t slot = read_slot(p.pool_indices, place.n);
  const int64_t first_token = sequence.b * p.sequences.T + sequence.begin;

  const auto load_state = [&](const DeviceStates& from, int64_t row) {
    for (int i = lane; valid && i < K; i += kLanes) {
      s_state[i] = load<double>(from, row * from.row + place.head * from.head + i * from.key + column * from.value);
    }
  };
  const auto store_state = [&](const DeviceStates& to, int64_t row) {
    for (int i = lane; valid && row >= 0 && row < to.rows && i < K; i += kLanes) {
      store<double>(to, row * to.row + place.head * to.head + i * to.key + column * to.value, s_state[i]);
    }
  };

  for (int i = lane; i < K; i += kLanes) s_state[i] = 0.0;
  if (slot >= 0) load_state(p.pool, slot);
  if (p.initial_state.data != nullptr) load_state(p.initial_state, place.n);

  for (int64_t t = 0; t < sequence.length; ++t) {
    const int64_t token = sequence.begin + t;
    if (slot == kSkipRow) {
      if (valid && lane == 0) store<double>(p.o, offset_of(p.o, sequence.b, token, place.head, column), 0.0);
      continue;
    }
    if (t % kChunkSize == 0) {
      for (int i = lane; float_at_chunks && t > 0 && i < K; i += kLanes) s_state[i] = static_cast<float>(s_state[i]);
      if (p.h.data != nullptr) store_state(p.h, sequence.first_chunk + t / kChunkSize);
      for (int i = lane; boundaries != nullptr && t > 0 && valid && i < K; i += kLanes) {
        boundaries[((((first_token + t) / kChunkSize) * Hv + place.head) * K + i) * V + column] = s_state[i];
      }
    }
    __syncthreads();  // the rows of the token before have been read
    for (int i = threadIdx.x; i < K; i += kThreads) {
      const int key_head = place.head / p.in.group;
      s_q[i] = load<double>(p.in.q, offset_of(p.in.q, sequence.b, token, key_head, i));
      s_k[i] = load<double>(p.in.k, offset_of(p.in.k, sequence.b, token, key_head, i));
    }
    __syncthreads();

    // S~ = e^g S, u = beta (v - S~^T k), S = S~ + k u^T, o = scale S^T q
    const double decay = oracle_decay(p.in, sequence.b, token, place.head);
    double along_k = 0.0, along_q = 0.0;
    for (int i = lane; i < K; i += kLanes) {
      s_state[i] *= decay;
      along_k += s_state[i] * s_k[i];
    }
    const double v = valid ? load<double>(p.in.x, offset_of(p.in.x, sequence.b, token, place.head, column)) : 0.0;
    const double u = oracle_beta(p.in, sequence.b, token, place.head) * (v - lane_sum(along_k));
    for (int i = lane; i < K; i += kLanes) {
      s_state[i] += s_k[i] * u;
      along_q += s_state[i] * s_q[i];
    }
    const double o = p.scale * lane_sum(along_q);
    if (p.o.data != nullptr && valid && lane == 0) {
      store<double>(p.o, offset_of(p.o, sequence.b, token, place.head, column), o);
    }

    if (p.pool_indices.per_token) store_state(p.pool, write_slot(p.pool_indices, place.n, t));
    if (p.checkpoint_every > 0 && (t + 1) % p.checkpoint_every == 0) {
      store_state(p.checkpoints, load_index(p.checkpoint_starts, place.n) + (t + 1) / p.checkpoint_every - 1);
    }
    if (p.lists.first != nullptr) {
      for (int32_t m = p.lists.first[first_token + t]; m >= 0; m = p.lists.next[m]) {
        store_state(p.pool, slot_or_none(p.pool_indices, load_index(p.lists.indices, m)));
      }
    }
  }
  if (slot == kSkipRow) return;
  if (p.final_state.data != nullptr) store_state(p.final_state, place.n);
  if (!p.pool_indices.per_token) store_state(p.pool, write_slot(p.pool_indices, place.n, 0));
}

std::string accept(const flash_qla_forward_arguments&, const Problem&) { return {}; }

Status run(const flash_qla_forward_arguments& args, const Problem& p, void* memory, void* cuda_stream) {
  const DeviceGuard guard(args.options.device_index);
  FLASH_QLA_RETURN_IF_ERROR(guard.status());
  Workspace workspace(memory);
  const auto recurrence = [](const Problem& problem, const ForwardParams& params, cudaStream_t stream) {
    return launch_oracle_forward(problem, params, nullptr, false, stream);
  };
  return ForwardCall<double>(args, p, &workspace).run(recurrence, static_cast<cudaStream_t>(cuda_stream));
}

}  // namespace

Status launch_oracle_forward(const Problem& p, const ForwardParams& params, double* boundaries, bool float_at_chunks,
                             cudaStream_t stream) {
  const size_t shared = sizeof(double) * static_cast<size_t>(2 * p.K + kColumns * (p.K + 1));
  return launch("oracle_forward", oracle_forward_kernel, recurrence_blocks(p), kThreads, shared, stream, params,
                boundaries, float_at_chunks);
}

}  // namespace cuda

const ForwardPath kCudaOracleChunkForward = {
    "cuda_reference", FLASH_QLA_CUDA, true, cuda::accept, cuda::workspace_bytes<cuda::ForwardCall<double>>, cuda::run};
const ForwardPath kCudaOracleRecurrent = kCudaOracleChunkForward;

}  // namespace flash_qla
