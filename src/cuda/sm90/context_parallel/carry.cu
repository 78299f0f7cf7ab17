// States at the cuts of carried heads (carry.h), from the state that enters: beside the planner's first kernel. The
// planner's last one waits for both, so that items find these states.
#include <cuda_runtime.h>

#include "cuda/common/dynamic_shared.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/overlap.cuh"
#include "cuda/sm90/context_parallel/chain_scan.cuh"
#include "cuda/sm90/context_parallel/cut_states.cuh"
#include "cuda/sm90/context_parallel/plan_args.h"

namespace flash_qla::cuda::sm90::cp {
namespace {

struct CarryParams {
  Carry carry;
  const float* initial;  // [rows, Hv, K, V], or V first; null: zeros
  int64_t row_stride, head_stride;
  int32_t v_first;
  int32_t heads;
  float* cut_states;  // from the carry's first slot on
};
static_assert(std::is_trivially_copyable_v<CarryParams>);

// Of S^T's element in row v and column k, in the order of cut_state_position().
__device__ int cut_state_element(int v, int k) {
  const int lane = 4 * (v % 8) + k % 8 / 2;
  return 4 * cut_state_position(v / 64, v % 64 / 16, k / 8, lane) + 2 * (v % 16 / 8) + k % 2;
}

// S <- S + M X at each cut, where X is what enters the chain: the links' scan has left both. A block takes 16 columns
// of a cut.
__global__ void __launch_bounds__(kChainThreads, 2) enter_carried_kernel(const __grid_constant__ CarryParams p) {
  __shared__ int32_t s_index;
  // What came before the plan's first kernel was there when that let this one start.
  launch_dependents();
  const ChainPlace at;
  for (int32_t work = static_cast<int32_t>(blockIdx.x);; work += static_cast<int32_t>(gridDim.x)) {
    const int32_t cut = work / kChainSlices, column0 = work % kChainSlices * kChainColumns;
    __syncthreads();  // all have seen the work before
    if (threadIdx.x == 0) s_index = -1;
    __syncthreads();
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < p.carry.parts * p.heads; i += kChainThreads) {
      const LinkChain& chain = p.carry.chains[i];
      if (cut >= chain.first_cut && cut - chain.first_cut < chain.cuts()) s_index = i;
    }
    __syncthreads();
    const int32_t index = s_index;
    if (index < 0) break;
    const LinkChain chain = p.carry.chains[index];
    const int32_t segment = cut - chain.first_cut;
    const bool is_affine = chain.is_affine != 0;  // else the sequence begins here, and S is the true state
    const auto matrix = [&](int32_t number) { return p.carry.cells + static_cast<int64_t>(number) * kMatrix; };
    const auto left = [&](ChainShare& columns) {
      const float* from = matrix(chain.state_cell(segment));
#pragma unroll
      for (int i = 0; i < kChainColumns; ++i) columns[i] = from[(column0 + i) * kHeadDim + at.row];
    };
    ChainShare state = {};
    if (!is_affine) {
      left(state);
    } else if (p.initial != nullptr) {
      const float* from = p.initial + chain.row * p.row_stride + index % p.heads * p.head_stride;
#pragma unroll
      for (int i = 0; i < kChainColumns; ++i) {
        const int key = at.row, value = column0 + i;
        state[i] = from[p.v_first != 0 ? value * kHeadDim + key : key * kHeadDim + value];
      }
    }
    scan_chain(
        *dynamic_shared<ChainMemory>(), matrix(is_affine ? p.carry.entering_cell(chain, segment) : 0),
        is_affine ? 1 : 0, state, [&](int32_t, ChainShare& added) { left(added); }, [](int32_t, const ChainShare&) {});
    float* to = p.cut_states + static_cast<int64_t>(chain.state_cell(segment)) * kMatrix;
#pragma unroll
    for (int i = 0; i < kChainColumns; ++i) to[cut_state_element(column0 + i, at.row)] = state[i];
  }
  // A kernel must not end before those it depends on.
  if (blockIdx.x == 0) wait_for_predecessors();
}

}  // namespace

cudaError_t launch_carried(const PlanArgs& plan, cudaStream_t stream) {
  const Args& args = plan.args;
  CarryParams params{plan.carry,
                     static_cast<const float*>(args.initial.data),
                     args.initial.slot_stride,
                     args.initial.head_stride,
                     args.state_v_first,
                     args.num_value_heads,
                     reinterpret_cast<float*>(plan.workspace.cut_states) + plan.capacity.slots * kMatrix};
  const cudaError_t error =
      cudaFuncSetAttribute(enter_carried_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(ChainMemory));
  if (error != cudaSuccess) return error;
  // As many blocks as run at once.
  const LaunchConfig shape(2 * plan.sms, kChainThreads, sizeof(ChainMemory), stream, true);
  return cudaLaunchKernelEx(&shape.config, enter_carried_kernel, params);
}

}  // namespace flash_qla::cuda::sm90::cp
