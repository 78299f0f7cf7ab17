#include "cuda/common/kept_states.cuh"

namespace flash_qla::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    checkpoint_lists_kernel(DeviceTensor offsets, int64_t M, int64_t tokens, CheckpointLists lists) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t m = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; m < M; m += step) {
    const int64_t position = load_index(offsets, m);
    if (position < 1 || position > tokens) continue;
    // The order of a list varies from run to run; what is written does not, as every entry has its own slot.
    lists.next[m] = atomicExch(&lists.first[position - 1], static_cast<int32_t>(m));
  }
}

// One block a (row, head).
__global__ void __launch_bounds__(kThreads)
    zero_unused_h_kernel(int64_t Hv, int K, int V, SequenceTable sequences, const __grid_constant__ PoolIndices pool,
                         DeviceStates h) {
  const int64_t row = blockIdx.x / Hv, head = blockIdx.x % Hv;
  if (row < total_chunks(sequences) && read_slot(pool, sequence_of_chunk(sequences, row)) != kSkipRow) return;
  for (int e = threadIdx.x; e < K * V; e += kThreads) {
    store<float>(h, row * h.row + head * h.head + e / V * h.key + e % V * h.value, 0.f);
  }
}

}  // namespace

CheckpointLists take_checkpoint_lists(const flash_qla_forward_arguments& args, const Problem& p, Workspace* workspace) {
  CheckpointLists lists{};
  if (!present(args.checkpoint_offsets)) return lists;
  lists.indices = device_tensor(args.checkpoint_indices);
  lists.first = workspace->take<int32_t>(p.B * p.T);
  lists.next = workspace->take<int32_t>(args.checkpoint_offsets.shape[0]);
  return lists;
}

Status launch_checkpoint_lists(const Tensor& offsets, int64_t tokens, const CheckpointLists& lists,
                               cudaStream_t stream) {
  if (lists.first == nullptr) return Status();
  // Every byte 0xff: -1.
  FLASH_QLA_RETURN_IF_ERROR(cuda_status(
      cudaMemsetAsync(lists.first, 0xff, static_cast<size_t>(tokens) * sizeof(int32_t), stream), "cudaMemsetAsync"));
  return launch("checkpoint_lists", checkpoint_lists_kernel, blocks_for(offsets.shape[0], kThreads), kThreads, 0,
                stream, device_tensor(offsets), offsets.shape[0], tokens, lists);
}

Status launch_zero_unused_h(const Problem& p, const SequenceTable& sequences, const PoolIndices& pool,
                            const DeviceStates& h, cudaStream_t stream) {
  if (h.data == nullptr || (!p.varlen && !pool.used)) return Status();
  return launch("zero_unused_h", zero_unused_h_kernel, h.rows * p.Hv, kThreads, 0, stream, p.Hv, static_cast<int>(p.K),
                static_cast<int>(p.V), sequences, pool, h);
}

}  // namespace flash_qla::cuda
