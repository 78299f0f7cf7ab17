// Path "sm90" of the two summaries: the links of parts by segments of the fused kernels, without their outputs. Which
// tokens make a link, and what it is to be, is decided on the device (cuda/generic/link_pass.cuh), per value head.
//   windows (windows.cu) -> passes, items (link_chains.cu) -> matrices of segments (link_states.cuh) -> scan -> S, M
// Going backward the forward's kernel makes transitions alone, and reverse passes (chunk_bwd/links.cuh) the gradients.
#include "cuda/paths.h"
#include "cuda/sm90/chunk_bwd/links.h"
#include "cuda/sm90/chunk_fwd/call.h"
#include "cuda/sm90/links/links.h"

namespace flash_qla {
namespace cuda::sm90::links {
namespace {

using ForwardArguments = flash_qla_chunk_summary_arguments;
using BackwardArguments = flash_qla_chunk_summary_backward_arguments;

// The forward call that has a link's inputs; going backward its values are the gradients of o.
template <class Arguments>
flash_qla_forward_arguments forward_of(const Arguments& args) {
  flash_qla_forward_arguments call{};
  call.struct_size = sizeof(call);
  call.options = args.options;
  call.options.cp_mode = FLASH_QLA_CP_OFF;  // no plan of its own
  call.k = args.k;
  call.v = values_of(args);
  call.g = args.g;
  call.beta = args.beta;
  call.A_log = args.A_log;
  call.dt_bias = args.dt_bias;
  call.cu_seqlens = args.cu_seqlens;
  if constexpr (std::is_same_v<Arguments, BackwardArguments>) {
    call.q = args.q;
  } else {
    call.initial_state = args.initial_state;
  }
  return call;
}

// One call; the constructor lays out the workspace.
template <class Arguments>
class Links {
  static constexpr bool kBackward = std::is_same_v<Arguments, BackwardArguments>;

 public:
  Links(const Arguments& args, const SummaryProblem& p, Workspace* workspace)
      : args_(args), p_(p), call_(forward_of(args), p, workspace) {
    sequences_ = take_sequences(p, workspace);
    passes_ = workspace->take<LinkPass>(p.P * p.Hv);
    if (may_forget(args.options, p.dtype)) windows_ = workspace->take<int32_t>(kLinkEnds * p.P * p.Hv);
    const int sms = fwd::multiprocessors(args.options.device_index);
    bool has_given = false;
    cp::Carry carry;
    if constexpr (kBackward) {
      has_given = present(args.dht);
    } else {
      carry = fwd::carry_of(args.carry, p.Hv);
    }
    workspace_ = take_link_workspace(p.P * p.Hv, kBackward ? p.chunk_bound : 0, p.Hv, has_given,
                                     args.options.cp_mode != FLASH_QLA_CP_AUTO, sms, carry, workspace);
    if constexpr (kBackward) {
      scratch_ = workspace->take<uint8_t>(
          bwd::link_gradients_scratch(p.B * p.T, p.Hv, workspace_.most_tiles, !present(args.A)));
    }
  }

  Status run(cudaStream_t stream) const {
    FLASH_QLA_RETURN_IF_ERROR(call_.prepare(stream));
    FLASH_QLA_RETURN_IF_ERROR(plan_sequences(args_.cu_seqlens, p_, sequences_, stream));
    const LinkParams params = make_params();
    if (may_forget(args_.options, p_.dtype)) {
      FLASH_QLA_RETURN_IF_ERROR(launch_link_windows(params, kBackward, windows_, stream));
    }
    FLASH_QLA_RETURN_IF_ERROR(launch_link_items(params, workspace_, windows_, stream));
    FLASH_QLA_RETURN_IF_ERROR(
        cuda_status(fwd::launch_link_states(call_.kernel(), matrices(), stream), "the states of links"));
    if constexpr (kBackward) {
      FLASH_QLA_RETURN_IF_ERROR(cuda_status(bwd::launch_link_gradients(gradients(), stream), "the gradients of links"));
    }
    return launch_link_scan(params, workspace_, stream);
  }

 private:
  // Going backward the forward's kernel makes transitions, which the scan reads by columns.
  fwd::LinkMatrices matrices() const {
    LinkCounters* counters = workspace_.counters;
    return {workspace_.items, &counters->plan, &counters->tickets, workspace_.cells, workspace_.sms, kBackward};
  }

  // Tokens as the kernels of the forward read them.
  LinkParams make_params() const {
    const fwd::Args& kernel = call_.kernel();
    LinkParams params{};
    fill_link_params(args_, &params);
    params.sequences = sequences_;
    params.rows = device_tensor(args_.rows);
    params.passes = passes_;
    params.threshold = decay_threshold(args_.options);
    params.P = p_.P;
    params.in.k = {const_cast<void*>(kernel.k),
                   {p_.T * kernel.k_token_stride, kernel.k_token_stride, kernel.k_head_stride, 1},
                   static_cast<int32_t>(kernel.type),
                   0};
    const auto gate = [&](const float* data, int64_t token_stride, int64_t head_stride) {
      return DeviceTensor{const_cast<float*>(data),
                          {p_.T * token_stride, token_stride, head_stride, 0},
                          static_cast<int32_t>(DType::kFloat32),
                          0};
    };
    params.in.g = gate(kernel.g, kernel.g_token_stride, kernel.g_head_stride);
    params.in.beta = gate(kernel.beta, kernel.beta_token_stride, kernel.beta_head_stride);
    params.in.K = static_cast<int32_t>(p_.K);
    params.in.V = static_cast<int32_t>(p_.V);
    params.in.Hv = static_cast<int32_t>(p_.Hv);
    params.in.group = static_cast<int32_t>(p_.group);
    return params;
  }

  bwd::LinkGradients gradients() const {
    const fwd::Args& kernel = call_.kernel();
    const int64_t tokens = kernel.num_tokens;
    const auto rows = [&](const void* data, int64_t token_stride, int64_t head_stride, DType type) {
      return bwd::StridedTensor{const_cast<void*>(data), {tokens * token_stride, token_stride, head_stride, 1}, type};
    };
    bwd::LinkGradients links{};
    links.q = rows(kernel.q, kernel.q_token_stride, kernel.q_head_stride, kernel.type);
    links.k = rows(kernel.k, kernel.k_token_stride, kernel.k_head_stride, kernel.type);
    links.d_o = rows(kernel.v, kernel.v_token_stride, kernel.v_head_stride, kernel.type);
    links.g = rows(kernel.g, kernel.g_token_stride, kernel.g_head_stride, DType::kFloat32);
    links.beta = rows(kernel.beta, kernel.beta_token_stride, kernel.beta_head_stride, DType::kFloat32);
    if constexpr (kBackward) {
      int64_t token_stride = 0;
      if (present(args_.A) && fwd::one_token_stride(args_.A, &token_stride)) {
        links.A = rows(args_.A.data, token_stride, args_.A.stride[2], kernel.type);
      }
    }
    links.tokens = tokens;
    links.Hq = p_.Hq;
    links.Hv = p_.Hv;
    links.scale = kernel.scale;
    links.items = workspace_.reverse_items;
    links.item_count = &workspace_.counters->reverse_items;
    links.most_items = workspace_.capacity;
    links.tiles = workspace_.tiles;
    links.tile_count = &workspace_.counters->tiles;
    links.most_tiles = workspace_.most_tiles;
    links.cells = workspace_.cells;
    links.scratch = scratch_;
    return links;
  }

  const Arguments& args_;
  const SummaryProblem& p_;
  fwd::Call call_;
  SequenceTable sequences_;
  LinkPass* passes_ = nullptr;
  int32_t* windows_ = nullptr;
  LinkWorkspace workspace_;
  uint8_t* scratch_ = nullptr;  // going backward
};

// Rows of 64 elements side by side, as the kernels read them.
bool takes_A(const Tensor& A) {
  int64_t token_stride = 0;
  return fwd::one_token_stride(A, &token_stride) && token_stride % 8 == 0 && A.stride[2] % 8 == 0 && A.stride[3] == 1 &&
         fwd::on_16_bytes(A);
}

template <class Arguments>
std::string reject(const Arguments& args, const SummaryProblem& p) {
  if (p.B * p.T == 0) return "needs tokens";
  // Matrices, items and tiles are counted in 32 bits.
  if (p.P * p.Hv > INT32_MAX / (4 * kMostLinkSegments)) return "needs fewer than 2^23 parts times value heads";
  if constexpr (std::is_same_v<Arguments, BackwardArguments>) {
    if (p.chunk_bound * p.Hv > INT32_MAX) return "needs fewer than 2^31 chunks times value heads";
    if (!present(args.d_o) || dtype(args.d_o) != p.dtype) return "needs the gradient of o in the dtype of q";
    if (present(args.A) && !takes_A(args.A)) return "needs rows of A side by side, on 16-byte boundaries";
  }
  return kSm90ChunkForward.reject(forward_of(args), p);
}

template <class Arguments>
constexpr Path<Arguments, SummaryProblem> path() {
  return {
      "sm90", FLASH_QLA_CUDA, false, reject<Arguments>, workspace_bytes<Links<Arguments>>, run_call<Links<Arguments>>};
}

// Of a part. None where the forward would not go on from it: uncut (kOff).
int64_t carry_floats(const ForwardArguments& args, const SummaryProblem& p) {
  if (args.options.cp_mode == FLASH_QLA_CP_OFF || p.P == 0) return 0;
  const int64_t chains = p.P * p.Hv;
  const int64_t cells =
      link_capacity(chains, args.options.cp_mode != FLASH_QLA_CP_AUTO, fwd::multiprocessors(args.options.device_index));
  return ceil_div(cp::carry_bytes(chains, cells) / 4, p.P);
}

constexpr ChunkSummaryPath summary_path() {
  ChunkSummaryPath found = path<ForwardArguments>();
  found.carry_floats = carry_floats;
  return found;
}

}  // namespace
}  // namespace cuda::sm90::links

const ChunkSummaryPath kSm90ChunkSummary = cuda::sm90::links::summary_path();
const ChunkSummaryBackwardPath kSm90ChunkSummaryBackward =
    cuda::sm90::links::path<cuda::sm90::links::BackwardArguments>();

}  // namespace flash_qla
