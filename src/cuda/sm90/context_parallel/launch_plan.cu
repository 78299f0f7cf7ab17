// Scratch of a plan, and the launch of its kernels.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/sm90/chunk_fwd/launch.h"
#include "cuda/sm90/context_parallel/cut_states.cuh"
#include "cuda/sm90/context_parallel/plan_device.cuh"

namespace flash_qla::cuda::sm90::cp {

using fwd::chunk_forward_workspace_size, fwd::kZeroFillBlocks;

size_t lay_out_plan(const Args& args, const Capacity& capacity, void* base, PlanWorkspace* workspace) {
  size_t used = 0;
  auto take = [&](size_t bytes) {
    char* place = static_cast<char*>(base) + used;
    used += (bytes + 255) / 256 * 256;
    return place;
  };
  const size_t n = static_cast<size_t>(std::max(args.num_sequences, 0));
  const size_t slots = static_cast<size_t>(capacity.slots);
  PlanWorkspace w;
  w.counters = reinterpret_cast<PlanCounters*>(take(sizeof(PlanCounters)));
  w.start = reinterpret_cast<PlanStart*>(take(sizeof(PlanStart)));
  w.warmups = reinterpret_cast<uint8_t*>(take(slots));
  w.sequences = reinterpret_cast<PlannedSequence*>(take(sizeof(PlannedSequence) * n));
  w.kinds = reinterpret_cast<int32_t*>(take(sizeof(int32_t) * n * static_cast<size_t>(args.num_value_heads)));
  w.cut = reinterpret_cast<int32_t*>(take(sizeof(int32_t)));
  w.uncut = take(chunk_forward_workspace_size(args.num_sequences));
  w.readers = reinterpret_cast<uint32_t*>(take(2 * sizeof(uint32_t) * n * static_cast<size_t>(args.num_value_heads)));
  w.state_items = reinterpret_cast<WorkItem*>(take(sizeof(WorkItem) * static_cast<size_t>(capacity.state_items)));
  const size_t carried = static_cast<size_t>(capacity.carried);
  w.output_items =
      reinterpret_cast<WorkItem*>(take(sizeof(WorkItem) * (static_cast<size_t>(capacity.output_items) + carried)));
  w.scans = reinterpret_cast<Scan*>(take(sizeof(Scan) * static_cast<size_t>(capacity.scans)));
  w.cut_states = reinterpret_cast<float4*>(take(sizeof(float) * kHeadDim * kHeadDim * (slots + carried)));
  const size_t rows = args.type == DType::kFloat16 ? sizeof(TransitionRows<kTransitionParts<__half>>)
                                                   : sizeof(TransitionRows<kTransitionParts<__nv_bfloat16>>);
  w.transitions = take(rows * kTransitionSteps * slots);
  if (workspace != nullptr) *workspace = w;
  return used;
}

cudaError_t launch_plan(PlanArgs params, cudaStream_t stream) {
  const Args& args = params.args;
  const int64_t longest = args.cu_seqlens != nullptr ? args.num_tokens : args.dense_length;
  params.expected_lengths = equal_lengths(longest, args.num_sequences, args.cu_seqlens == nullptr);
  params.group = args.num_value_heads / args.num_key_heads;
  params.parts = (params.group + kRoundHeads - 1) / kRoundHeads;
  params.by_parts = Divisor(params.parts);
  params.by_boundary_units = Divisor(args.num_key_heads * params.parts);
  params.by_heads = Divisor(args.num_value_heads);
  params.units = params.capacity.boundaries * args.num_key_heads * params.parts;
  // A block to each unit of the expected lengths, and a loop for those of others: the state kernel's blocks wait for
  // SMs where these have nothing to do.
  int64_t units = params.units;
  if (const int64_t spacing = params.expected_cut_spacing.spacing; spacing > 0) {
    const int64_t windows = divide_up(args.num_tokens, kChunk * spacing);
    units = std::min(units, windows * args.num_key_heads * params.parts);
  }
  // Behind an uncut kernel, which leaves hardly any SM idle, no more than find room at once when it ends.
  const int at_once = (params.least_longest != 0 ? 1 : kClassifyBlocksPerSm) * params.sms;
  params.gates_first = params.units > kClassifyBlocksPerSm * params.sms;
  const int64_t unit_blocks = std::clamp<int64_t>(units, 1, at_once);
  const LaunchConfig classify(unit_blocks + params.zero_fill_blocks, kClassifyThreads, 0, stream, true);
  cudaError_t error = launch_function(classify_kernel(args.type), classify, params);
  if (error == cudaSuccess && params.carry.chains != nullptr) error = launch_carried(params, stream);
  if (error != cudaSuccess) return error;
  const LaunchConfig list(1, kListThreads, 0, stream, true);
  return launch_function(list_kernel(), list, params);
}

}  // namespace flash_qla::cuda::sm90::cp
