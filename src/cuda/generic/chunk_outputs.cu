#include "cuda/generic/chunk_outputs.cuh"

#include "cuda/common/dynamic_shared.cuh"
#include "cuda/common/prepare.cuh"

namespace flash_qla::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = static_cast<int>(kChunkSize);
constexpr int kPanel = 32;  // keys staged at once

template <class Real>
struct InverseMemory {
  Real panel[kChunk][kPanel + 1];  // keys of the chunk; the padding keeps columns in different banks
  Real lower[kChunk][kChunk + 1];  // beta_i <k_i, k_j>, j < i
  Real inverse[kChunk][kChunk + 1];
};

template <class Real>
__global__ void __launch_bounds__(kThreads)
    chunk_inverse_kernel(int64_t Hv, int64_t group, int K, SequenceTable sequences,
                         const __grid_constant__ PoolIndices pool, DeviceTensor keys, DeviceTensor beta,
                         DeviceTensor A) {
  InverseMemory<Real>& s = *dynamic_shared<InverseMemory<Real>>();
  const int64_t chunk = blockIdx.x / Hv, head = blockIdx.x % Hv;
  if (chunk >= total_chunks(sequences)) return;
  const int64_t n = sequence_of_chunk(sequences, chunk);
  const DeviceSequence sequence = sequence_at(sequences, n);
  const int64_t t0 = (chunk - sequence.first_chunk) * kChunkSize, token = sequence.begin + t0;
  const int count = static_cast<int>(sequence.length - t0 < kChunkSize ? sequence.length - t0 : kChunkSize);
  const bool skipped = read_slot(pool, n) == kSkipRow;

  // Row i = threadIdx.x / 4, columns threadIdx.x % 4 + 4 m.
  const int i = threadIdx.x / 4, j0 = threadIdx.x % 4;
  constexpr int kPerThread = kChunk / 4;
  static_assert(kThreads == 4 * kChunk);
  Real sum[kPerThread] = {};
  for (int key0 = 0; key0 < K; key0 += kPanel) {
    for (int e = threadIdx.x; e < kChunk * kPanel; e += kThreads) {
      const int row = e / kPanel, key = key0 + e % kPanel;
      s.panel[row][e % kPanel] = row < count && key < K
                                     ? load<Real>(keys, offset_of(keys, sequence.b, token + row, head / group, key))
                                     : Real(0);
    }
    __syncthreads();
    for (int r = 0; r < kPanel; ++r) {
#pragma unroll
      for (int m = 0; m < kPerThread; ++m) sum[m] += s.panel[i][r] * s.panel[j0 + 4 * m][r];
    }
    __syncthreads();
  }
  const Real beta_i = i >= count             ? Real(0)
                      : beta.data == nullptr ? Real(1)
                                             : load<Real>(beta, offset_of(beta, sequence.b, token + i, head));
#pragma unroll
  for (int m = 0; m < kPerThread; ++m) s.lower[i][j0 + 4 * m] = beta_i * sum[m];
  __syncthreads();

  // Substitution, a column a thread: A_i = e_i - sum_j lower_ij A_j.
  const int column = threadIdx.x;
  for (int row = 0; column < kChunk && row < count; ++row) {
    Real value = row == column ? Real(1) : Real(0);
    for (int j = column; j < row; ++j) value -= s.lower[row][j] * s.inverse[j][column];
    s.inverse[row][column] = value;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < count * kChunk; e += kThreads) {
    const int row = e / kChunk, col = e % kChunk;
    store<Real>(A, offset_of(A, sequence.b, token + row, head, col), skipped ? Real(0) : s.inverse[row][col]);
  }
}

// One thread a (chunk, head).
template <class Real>
__global__ void __launch_bounds__(kThreads)
    gate_cumsum_kernel(int64_t items, int64_t Hv, SequenceTable sequences, const __grid_constant__ PoolIndices pool,
                       const __grid_constant__ Gates gates, DeviceTensor g_cumsum) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t chunks = total_chunks(sequences);
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; item < items; item += step) {
    const int64_t chunk = item / Hv, head = item % Hv;
    if (chunk >= chunks) return;
    const int64_t n = sequence_of_chunk(sequences, chunk);
    const DeviceSequence sequence = sequence_at(sequences, n);
    const bool skipped = read_slot(pool, n) == kSkipRow;
    const int64_t t0 = (chunk - sequence.first_chunk) * kChunkSize;
    const int64_t end = sequence.length - t0 < kChunkSize ? sequence.length : t0 + kChunkSize;
    double sum = 0;  // a float32 sum alone would cost more than float32 inputs may lose
    for (int64_t t = sequence.begin + t0; t < sequence.begin + end; ++t) {
      if (!skipped) sum += static_cast<double>(clamp_log_decay(log_decay<Real>(gates, sequence.b, t, head, false)));
      store<double>(g_cumsum, offset_of(g_cumsum, sequence.b, t, head), sum);
    }
  }
}

}  // namespace

template <class Real>
Status launch_chunk_inverse(const Problem& p, const SequenceTable& sequences, const PoolIndices& pool,
                            const DeviceTensor& k, const DeviceTensor& beta, const DeviceTensor& A,
                            cudaStream_t stream) {
  if (A.data == nullptr) return Status();
  FLASH_QLA_RETURN_IF_ERROR(launch_zero_outside(p, sequences, A, p.Hv, kChunkSize, stream));
  return launch("chunk_inverse", chunk_inverse_kernel<Real>, p.chunk_bound * p.Hv, kThreads,
                sizeof(InverseMemory<Real>), stream, p.Hv, p.group, static_cast<int>(p.K), sequences, pool, k, beta, A);
}

template <class Real>
Status launch_gate_cumsum(const Problem& p, const SequenceTable& sequences, const PoolIndices& pool, const Gates& gates,
                          const DeviceTensor& g_cumsum, cudaStream_t stream) {
  if (g_cumsum.data == nullptr) return Status();
  FLASH_QLA_RETURN_IF_ERROR(launch_zero_outside(p, sequences, g_cumsum, p.Hv, 1, stream));
  const int64_t items = p.chunk_bound * p.Hv;
  return launch("gate_cumsum", gate_cumsum_kernel<Real>, blocks_for(items, kThreads), kThreads, 0, stream, items, p.Hv,
                sequences, pool, gates, g_cumsum);
}

template Status launch_chunk_inverse<float>(const Problem&, const SequenceTable&, const PoolIndices&,
                                            const DeviceTensor&, const DeviceTensor&, const DeviceTensor&,
                                            cudaStream_t);
template Status launch_chunk_inverse<double>(const Problem&, const SequenceTable&, const PoolIndices&,
                                             const DeviceTensor&, const DeviceTensor&, const DeviceTensor&,
                                             cudaStream_t);
template Status launch_gate_cumsum<float>(const Problem&, const SequenceTable&, const PoolIndices&, const Gates&,
                                          const DeviceTensor&, cudaStream_t);
template Status launch_gate_cumsum<double>(const Problem&, const SequenceTable&, const PoolIndices&, const Gates&,
                                           const DeviceTensor&, cudaStream_t);

}  // namespace flash_qla::cuda
