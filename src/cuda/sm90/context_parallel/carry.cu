// States at the cuts of carried heads (carry.h), from the state that enters. Beside the planner's last kernel: none of
// the plan is needed until the states are there.
#include <cuda_runtime.h>

#include "cuda/common/bulk.cuh"
#include "cuda/common/dynamic_shared.cuh"
#include "cuda/common/launch.h"
#include "cuda/sm90/context_parallel/chain_scan.cuh"
#include "cuda/sm90/context_parallel/cut_states.cuh"
#include "cuda/sm90/context_parallel/plan_args.h"

namespace flash_qla::cuda::sm90::cp {
namespace {

static_assert(kCarrySlices == kChainSlices);

struct CarryParams {
  Carry carry;
  const float* initial;  // [rows, Hv, K, V], or V first; null: zeros
  int64_t row_stride, head_stride;
  int32_t v_first;
  int32_t heads;
  float* cut_states;  // from the carry's first slot on
  PlanCounters* counters;
};
static_assert(std::is_trivially_copyable_v<CarryParams>);

// Of S^T's element in row v and column k, in the order of cut_state_position().
__device__ int cut_state_element(int v, int k) {
  const int lane = 4 * (v % 8) + k % 8 / 2;
  return 4 * cut_state_position(v / 64, v % 64 / 16, k / 8, lane) + 2 * (v % 16 / 8) + k % 2;
}

__global__ void __launch_bounds__(kChainThreads, 2) scan_carried_kernel(const __grid_constant__ CarryParams p) {
  // What came before the plan's first kernel was there when that let the next one start. The plan is made by a kernel
  // that runs.
  launch_dependents();
  ChainMemory& memory = *dynamic_shared<ChainMemory>();
  const int32_t slice = static_cast<int32_t>(blockIdx.x) % kChainSlices;
  const int32_t index = p.carry.order[blockIdx.x / kChainSlices];
  const LinkChain chain = p.carry.chains[index];
  if (chain.has_cuts()) {
    const ChainPlace at;
    const int column0 = slice * kChainColumns;
    const auto cell = [&](int32_t number, ChainShare& columns) {
      const float* from = p.carry.cells + static_cast<int64_t>(number) * kMatrix;
#pragma unroll
      for (int i = 0; i < kChainColumns; ++i) columns[i] = from[(column0 + i) * kHeadDim + at.row];
    };
    const auto put = [&](int32_t segment, const ChainShare& columns) {
      float* to = p.cut_states + static_cast<int64_t>(chain.state_cell(segment)) * kMatrix;
#pragma unroll
      for (int i = 0; i < kChainColumns; ++i) to[cut_state_element(column0 + i, at.row)] = columns[i];
    };
    // Where the sequence begins here the first segment's last state is the true one.
    const int32_t first = chain.is_affine != 0 ? 0 : 1;
    ChainShare state = {};
    if (first != 0) {
      cell(chain.state_cell(0), state);
      put(0, state);
    } else if (p.initial != nullptr) {
      const float* from = p.initial + chain.row * p.row_stride + index % p.heads * p.head_stride;
#pragma unroll
      for (int i = 0; i < kChainColumns; ++i) {
        const int key = at.row, value = column0 + i;
        state[i] = from[p.v_first != 0 ? value * kHeadDim + key : key * kHeadDim + value];
      }
    }
    scan_chain(
        memory, p.carry.cells + static_cast<int64_t>(chain.transition_cell(first)) * kMatrix, kMatrix,
        chain.segments - 1 - first, state,
        [&](int32_t step, ChainShare& added) { cell(chain.state_cell(first + step), added); },
        [&](int32_t step, const ChainShare& columns) { put(first + step, columns); });
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x != 0) return;
  // The planner counts the blocks of such chains as slices of states at cuts to come.
  if (chain.has_cuts()) {
    while (load_acquire(&p.counters->made) != 1) __nanosleep(50);
    atomicSub(&p.counters->progress.slices_left, 1u);
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
                     reinterpret_cast<float*>(plan.workspace.cut_states) + plan.capacity.slots * kMatrix,
                     plan.workspace.counters};
  const cudaError_t error =
      cudaFuncSetAttribute(scan_carried_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(ChainMemory));
  if (error != cudaSuccess) return error;
  const LaunchConfig shape(plan.carry.parts * args.num_value_heads * kCarrySlices, kChainThreads, sizeof(ChainMemory),
                           stream, true);
  return cudaLaunchKernelEx(&shape.config, scan_carried_kernel, params);
}

}  // namespace flash_qla::cuda::sm90::cp
