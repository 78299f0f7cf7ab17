// What the chunked forward hands out beside the recurrence: A, the cumsum of the gates, and zeros where no chunk
// writes. Real is float, or double for the oracle.
#pragma once

#include "cuda/common/gates.cuh"
#include "cuda/common/pool.cuh"

namespace flash_qla::cuda {

// A [B, T, Hv, 64]: rows of each chunk's (I + strict_lower(diag(beta) K K^T))^-1. k and beta as the recurrence uses
// them (beta absent: ones).
template <class Real>
Status launch_chunk_inverse(const Problem& p, const SequenceTable& sequences, const PoolIndices& pool,
                            const DeviceTensor& k, const DeviceTensor& beta, const DeviceTensor& A,
                            cudaStream_t stream);

// Sum of the clamped log decays from each chunk's start, [B, T, Hv].
template <class Real>
Status launch_gate_cumsum(const Problem& p, const SequenceTable& sequences, const PoolIndices& pool, const Gates& gates,
                          const DeviceTensor& g_cumsum, cudaStream_t stream);

}  // namespace flash_qla::cuda
