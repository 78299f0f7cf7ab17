// Path "sm80" of the two summaries: the links of parts by calls of the chunked forward and backward of this path. S is
// the final state of a forward, M that of a forward with values of zero which starts from the identity, and R the
// gradient of the initial state. Which tokens a call takes is decided on the device (link_plan.cu): it writes the
// call's two offsets, equal ones where nothing is wanted. All heads of a part take the tokens that any of them needs.
#include <algorithm>

#include "cuda/generic/links.cuh"
#include "cuda/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

using ForwardLinks = flash_qla_chunk_summary_arguments;
using BackwardLinks = flash_qla_chunk_summary_backward_arguments;

constexpr int kThreads = 256;

struct PartPasses {
  int64_t from, to;
  bool any, starts, is_affine;
};

// What the heads of a part need together.
__device__ PartPasses passes_of(const LinkParams& p, int64_t part) {
  PartPasses all{INT64_MAX, 0, false, false, false};
  for (int head = 0; head < p.in.Hv; ++head) {
    const LinkPass pass = p.passes[part * p.in.Hv + head];
    if (pass.row < 0) continue;
    all.any = true;
    if (pass.from < all.from) all.from = pass.from;
    if (pass.to > all.to) all.to = pass.to;
    all.starts |= pass.starts != 0;
    all.is_affine |= pass.is_affine != 0;
  }
  return all;
}

// The offsets of a part's two calls: [P][S or R, M][2], in tokens of the flat batch. One thread a part.
__global__ void __launch_bounds__(kThreads)
    link_offsets_kernel(const __grid_constant__ LinkParams p, int64_t T, int64_t* offsets) {
  const int64_t part = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (part >= p.P) return;
  const PartPasses passes = passes_of(p, part);
  int64_t first = 0;
  if (passes.any) {
    const DeviceSequence sequence = sequence_at(p.sequences, p.passes[part * p.in.Hv].row);
    first = sequence.b * T + sequence.begin;
  }
  int64_t* of_part = offsets + part * 4;
  of_part[0] = passes.any ? first + passes.from : 0;
  of_part[1] = passes.any ? first + passes.to : 0;
  of_part[2] = passes.is_affine ? first : 0;
  of_part[3] = passes.is_affine ? first + passes.to : 0;
}

// What a call of a part starts from, as [Hv, K, V]: the caller's state of the row, or zero. With kIdentity the
// identity.
template <bool kIdentity>
__global__ void __launch_bounds__(kThreads)
    link_start_kernel(const __grid_constant__ LinkParams p, int64_t part, float* states) {
  const int64_t head = blockIdx.x;
  const int K = p.in.K, columns = kIdentity ? p.in.K : p.in.V;
  const int32_t row = p.passes[part * p.in.Hv].row;
  const bool given = !kIdentity && p.given.data != nullptr && passes_of(p, part).starts;
  for (int i = threadIdx.x; i < K * columns; i += kThreads) {
    const int key = i / columns, column = i % columns;
    float x = kIdentity && key == column ? 1.f : 0.f;
    if (given) {
      x = load<float>(p.given, row * p.given.row + head * p.given.head + key * p.given.key + column * p.given.value);
    }
    states[head * K * columns + i] = x;
  }
}

// Values of zero for the calls that make M, if any part needs one.
__global__ void __launch_bounds__(kThreads)
    link_zero_values_kernel(const __grid_constant__ LinkParams p, uint4* values, int64_t count) {
  bool needed = false;
  for (int64_t part = 0; part < p.P; ++part) needed |= passes_of(p, part).is_affine;
  if (!needed) return;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    values[i] = uint4{0, 0, 0, 0};
  }
}

// A part's states into its link, zero where it has none. One block a value head.
__global__ void __launch_bounds__(kThreads)
    store_links_kernel(const __grid_constant__ LinkParams p, int64_t part, bool transition, const float* states) {
  const int64_t head = blockIdx.x;
  const int K = p.in.K, columns = transition ? p.in.K : p.in.V;
  const DeviceStates& out = transition ? p.M : p.S;
  const LinkPass pass = p.passes[part * p.in.Hv + head];
  const bool wanted = pass.row >= 0 && (!transition || pass.is_affine != 0);
  for (int i = threadIdx.x; i < K * columns; i += kThreads) {
    const int key = i / columns, column = i % columns;
    store<float>(out, part * out.row + head * out.head + key * out.key + column * out.value,
                 wanted ? states[head * K * columns + i] : 0.f);
  }
}

// [B, T, ..] as [1, B * T, ..].
bool is_flat(const Tensor& t) { return !present(t) || t.shape[0] == 1 || t.stride[0] == t.shape[1] * t.stride[1]; }
Tensor flat(Tensor t) {
  if (!present(t)) return t;
  t.shape[1] *= t.shape[0];
  t.shape[0] = 1;
  return t;
}

// One call of either operation by calls of kPath; the constructor lays out the workspace.
template <const auto* kPath, class Arguments>
class LinkCalls {
  static constexpr bool kBackward = std::is_same_v<Arguments, BackwardLinks>;
  using Call = std::conditional_t<kBackward, flash_qla_backward_arguments, flash_qla_forward_arguments>;

 public:
  LinkCalls(const Arguments& args, const SummaryProblem& p, void* memory)
      : args_(args),
        p_(p),
        memory_(static_cast<char*>(memory)),
        workspace_(memory),
        plan_(args, p, may_forget(args.options, p.dtype), &workspace_) {
    const int64_t tokens = p.B * p.T, size = size_of(p.dtype);
    offsets_ = workspace_.take<int64_t>(4 * p.P);
    start_ = workspace_.take<float>(p.Hv * p.K * std::max(p.K, p.V));
    states_ = workspace_.take<float>(p.Hv * p.K * std::max(p.K, p.V));
    if constexpr (!kBackward) {
      o_ = workspace_.take<char>(tokens * p.Hv * std::max(p.K, p.V) * size);
      zeros_ = workspace_.take<uint4>(ceil_div(tokens * p.Hv * p.K * size, static_cast<int64_t>(sizeof(uint4))));
    }
  }

  std::string reject() const {
    for (const Tensor* t : {&args_.k, &values_of(args_), &args_.g, &args_.beta}) {
      if (!is_flat(*t)) return "needs the rows of a batch one behind the other";
    }
    if constexpr (kBackward) {
      if (!is_flat(args_.q)) return "needs the rows of a batch one behind the other";
      if (!present(args_.d_o) || dtype(args_.d_o) != p_.dtype) return "needs the gradient of o in the dtype of q";
    }
    std::string why = kPath->reject(call(0, false), problem(false));
    if (why.empty() && !kBackward) why = kPath->reject(call(0, true), problem(true));
    return why;
  }

  size_t workspace_size() const {
    size_t bytes = kPath->workspace_size(call(0, false), problem(false));
    if (!kBackward) bytes = std::max(bytes, kPath->workspace_size(call(0, true), problem(true)));
    return workspace_.bytes() + bytes;
  }

  Status run(cudaStream_t stream) const {
    LinkParams params{};
    fill_link_params(args_, &params);
    FLASH_QLA_RETURN_IF_ERROR(plan_.prepare(values_of(args_), args_.rows, &params, stream));
    FLASH_QLA_RETURN_IF_ERROR(launch_plan_links(p_, params, kBackward, stream));
    FLASH_QLA_RETURN_IF_ERROR(launch("link_offsets", link_offsets_kernel, ceil_div(p_.P, kThreads), kThreads, 0, stream,
                                     params, p_.T, offsets_));
    if constexpr (!kBackward) {
      const int64_t count =
          ceil_div(p_.B * p_.T * p_.Hv * p_.K * size_of(p_.dtype), static_cast<int64_t>(sizeof(uint4)));
      constexpr int64_t kMostBlocks =
          1056;  // eight for each of an H100's multiprocessors; each goes on with the next values
      FLASH_QLA_RETURN_IF_ERROR(launch("link_zero_values", link_zero_values_kernel,
                                       std::min(ceil_div(count, kThreads), kMostBlocks), kThreads, 0, stream, params,
                                       zeros_, count));
    }
    for (int64_t part = 0; part < p_.P; ++part) {
      FLASH_QLA_RETURN_IF_ERROR(run_part(params, part, false, stream));
      if (!kBackward) FLASH_QLA_RETURN_IF_ERROR(run_part(params, part, true, stream));
    }
    return Status();
  }

 private:
  Status run_part(const LinkParams& params, int64_t part, bool transition, cudaStream_t stream) const {
    FLASH_QLA_RETURN_IF_ERROR(launch("link_start", transition ? link_start_kernel<true> : link_start_kernel<false>,
                                     p_.Hv, kThreads, 0, stream, params, part, start_));
    FLASH_QLA_RETURN_IF_ERROR(kPath->run(call(part, transition), problem(transition),
                                         memory_ == nullptr ? nullptr : memory_ + workspace_.bytes(), stream));
    return launch("store_links", store_links_kernel, p_.Hv, kThreads, 0, stream, params, part, transition,
                  static_cast<const float*>(states_));
  }

  // A call for one sequence of one part.
  Problem problem(bool transition) const {
    Problem p = p_;
    p.T = p_.B * p_.T;
    p.B = p.N = 1;
    p.varlen = true;
    p.chunk_bound = p.T / kChunkSize + 1;
    if (transition) p.V = p.K;
    return p;
  }

  Call call(int64_t part, bool transition) const {
    const Problem p = problem(transition);
    Call call{};
    call.struct_size = sizeof(call);
    call.options = args_.options;
    call.options.state_v_first = 0;
    call.k = flat(args_.k);
    call.g = flat(args_.g);
    call.beta = flat(args_.beta);
    call.A_log = args_.A_log;
    call.dt_bias = args_.dt_bias;
    call.cu_seqlens = tensor(offsets_ == nullptr ? nullptr : offsets_ + 4 * part + 2 * transition, DType::kInt64, {2});
    const Tensor start = tensor(start_, DType::kFloat32, {1, p.Hv, p.K, p.V});
    const Tensor states = tensor(states_, DType::kFloat32, {1, p.Hv, p.K, p.V});
    if constexpr (kBackward) {
      call.q = flat(args_.q);
      call.v = call.d_o = flat(args_.d_o);  // R does not depend on v: any values will do
      call.dht = start;
      call.dh0 = states;
    } else {
      call.q = call.k;  // o is not wanted: any rows will do
      call.v = transition ? tensor(zeros_, p.dtype, {1, p.T, p.Hv, p.V}) : flat(args_.v);
      call.initial_state = start;
      call.final_state = states;
      call.o = tensor(o_, p.dtype, {1, p.T, p.Hv, p.V});
    }
    return call;
  }

  const Arguments& args_;
  const SummaryProblem& p_;
  char* memory_;
  Workspace workspace_;
  LinkCall<float> plan_;
  int64_t* offsets_ = nullptr;  // [P, 2, 2]
  float *start_ = nullptr, *states_ = nullptr;
  char* o_ = nullptr;
  uint4* zeros_ = nullptr;
};

template <const auto* kPath, class Arguments>
struct Functions {
  using Calls = LinkCalls<kPath, Arguments>;
  static std::string reject(const Arguments& args, const SummaryProblem& p) {
    if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) return "needs bf16 or fp16";
    if (p.B * p.T == 0) return "needs tokens";
    return Calls(args, p, nullptr).reject();
  }
  static size_t workspace_size(const Arguments& args, const SummaryProblem& p) {
    return Calls(args, p, nullptr).workspace_size();
  }
  static Status run(const Arguments& args, const SummaryProblem& p, void* memory, void* stream) {
    const DeviceGuard guard(args.options.device_index);
    FLASH_QLA_RETURN_IF_ERROR(guard.status());
    return Calls(args, p, memory).run(static_cast<cudaStream_t>(stream));
  }
};

template <const auto* kPath, class Arguments>
constexpr Path<Arguments, SummaryProblem> path(const char* name) {
  using F = Functions<kPath, Arguments>;
  return {name, FLASH_QLA_CUDA, false, F::reject, F::workspace_size, F::run};
}

}  // namespace
}  // namespace cuda

const ChunkSummaryPath kSm80ChunkSummary = cuda::path<&kSm80ChunkForward, cuda::ForwardLinks>("sm80");
const ChunkSummaryBackwardPath kSm80ChunkSummaryBackward = cuda::path<&kSm80ChunkBackward, cuda::BackwardLinks>("sm80");

}  // namespace flash_qla
