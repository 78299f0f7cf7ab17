// Path "sm90", backward: K = V = 128 in bf16 and fp16 on Hopper. Around the kernels: strides that the copy engine does
// not take are copied, the wrapping options are applied before and chained through after (cuda/common/prepare.cuh),
// and heads go through in groups where all at once would take too much scratch.
#include <algorithm>
#include <utility>

#include "cuda/common/few_tokens.h"
#include "cuda/common/heads.h"
#include "cuda/common/prepare.cuh"
#include "cuda/paths.h"
#include "cuda/sm90/chunk_bwd/launch.h"
#include "cuda/sm90/chunk_bwd/traits.h"
#include "cuda/sm90/common/tensor_map.h"

namespace flash_qla {
namespace cuda::sm90::bwd {
namespace {

using Arguments = flash_qla_backward_arguments;

// Rows of 128 elements side by side, every row on a 16-byte boundary, no dimension repeated: what the copy engine
// takes.
bool copy_engine_takes(const Tensor& t) {
  const int last = t.ndim - 1;
  if (t.stride[last] != 1 || reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return false;
  constexpr int64_t kMostStride = int64_t{1} << 39;  // elements: the engine's strides are below 2^40 bytes
  for (int i = 0; i < last; ++i) {
    if (t.shape[i] > 1 && (t.stride[i] % 8 != 0 || t.stride[i] <= 0 || t.stride[i] >= kMostStride)) return false;
  }
  return true;
}

// Chunks of a forced cut's segments: as many edges as there can be with chunks inside.
constexpr int32_t kForcedSegment = 2;

std::string reject(const Arguments& args, const Problem& p) {
  if (p.K != kHeadDim || p.V != kHeadDim) return "needs K = V = 128";
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) return "needs bf16 or fp16";
  if (p.T == 0 || p.N == 0) return "needs tokens and sequences";
  // Coordinates and block numbers are 32-bit.
  constexpr int64_t kMost = int64_t{1} << 31;
  if (p.B * p.T >= kMost || p.chunk_bound * p.Hv >= kMost || 4 * p.N * p.Hv >= kMost) {
    return "needs fewer than 2^31 tokens, chunks times value heads, and sequences times value heads times 4";
  }
  for (const Tensor* t : {&args.g, &args.beta, &args.initial_state, &args.dht, &args.dh0, &args.dg, &args.dbeta}) {
    if (present(*t) && !is_float(dtype(*t))) return "needs gates, states and their gradients in fp32, bf16 or fp16";
  }
  if (!is_hopper(args.options.device_index)) return "needs a GPU of compute capability 9.0";
  if (wants_float32(args.options, p)) return "needs more than 64 tokens";
  return {};
}

StridedTensor strided(const Tensor& t) {
  StridedTensor s{};
  if (!present(t)) return s;
  s.data = t.data;
  for (int i = 0; i < t.ndim; ++i) s.stride[i] = t.stride[i];
  s.type = dtype(t);
  return s;
}

Args make_params(const Arguments& args, const Problem& p) {
  Args params{};
  params.B = static_cast<int32_t>(p.B);
  params.T = static_cast<int32_t>(p.T);
  params.N = static_cast<int32_t>(p.N);
  params.Hq = static_cast<int32_t>(p.Hq);
  params.Hv = static_cast<int32_t>(p.Hv);
  params.group = static_cast<int32_t>(p.group);
  params.chunk_bound = static_cast<int32_t>(p.chunk_bound);
  params.per_sequence = p.varlen ? 0 : static_cast<int32_t>(ceil_div(p.T, kChunkSize));
  params.scale = static_cast<float>(p.scale);
  params.decay_threshold = decay_threshold(args.options);
  params.g_is_cumsum = args.g_is_cumsum != 0;
  params.state_v_first = args.options.state_v_first != 0;
  params.has_d_o = present(args.d_o);
  params.has_dq_and_dk = present(args.dq) && present(args.dk);
  // As with a sequence's cuts, its bits may depend on what is computed beside it in one mode alone.
  const bool by_call = args.options.cp_mode == FLASH_QLA_CP_AUTO, exact_dg = present(args.dht) && present(args.dg);
  params.may_be_exact = by_call && exact_dg;
  const auto dense_pairs = static_cast<int32_t>(ceil_div(p.T, 2 * kChunkSize));
  params.exact_by_sequence = !by_call && exact_dg && (p.varlen || wants_exact(dense_pairs));
  params.exact_short = has_exact_short(args.options, p);
  if (p.varlen) {
    // Where only a size is asked for there may be no memory, but there are offsets all the same.
    static const char kSomewhere = 0;
    params.cu_seqlens = args.cu_seqlens.data != nullptr ? args.cu_seqlens.data : &kSomewhere;
    params.cu_seqlens_64 = dtype(args.cu_seqlens) == DType::kInt64;
    params.cu_seqlens_stride = args.cu_seqlens.stride[0];
  }
  params.g = strided(args.g);
  params.beta = strided(args.beta);
  params.A = strided(args.A);
  params.k = strided(args.k);
  params.q = strided(args.q);
  params.d_o = strided(args.d_o);
  params.v = strided(args.v);
  params.initial_state = strided(args.initial_state);
  params.dht = strided(args.dht);
  params.dq = strided(args.dq);
  params.dk = strided(args.dk);
  params.dv = strided(args.dv);
  params.dg = strided(args.dg);
  params.dbeta = strided(args.dbeta);
  params.dh0 = strided(args.dh0);
  return params;
}

// Sets how sequences are cut into segments; returns the kernels' bytes of scratch. Those must grow with tokens and
// sequences, and a cut does not: one long sequence is cut where several are not. So the room for what segments leave at
// their edges is there whenever one sequence of all the tokens would be cut, and a cut that does not fit is made
// coarser.
size_t plan_segments(const flash_qla_options& options, Args* params) {
  params->segment_chunks = 0;
  const size_t whole = chunk_backward_workspace_size(*params);
  if (options.cp_mode != FLASH_QLA_CP_AUTO) return whole;  // whole sequences are planned from nothing but themselves
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount, options.device_index);
  if (multiprocessors == 0) return whole;
  const auto choose = [&](const Args& of) {
    return options.force_intra_cp ? kForcedSegment : choose_segment_chunks(of, multiprocessors);
  };
  const auto bytes_with = [&](Args of, int32_t segment_chunks) {
    of.segment_chunks = segment_chunks;
    return chunk_backward_workspace_size(of);
  };
  Args longest = *params;
  longest.N = 1;
  if (params->cu_seqlens == nullptr) {
    longest.per_sequence = params->chunk_bound;
  } else {
    longest.chunk_bound = params->chunk_bound - params->N + 1;
  }
  if (choose(longest) == 0) return whole;
  // An eighth of what the chunks take: segments shorter than 24 chunks would leave more.
  constexpr size_t kLeastRoom = size_t{64} << 20;
  const size_t most = whole + std::max(kLeastRoom, whole / 8);
  int32_t segment = choose(*params);
  while (segment > 0 && bytes_with(*params, segment) > most) segment = segment < params->chunk_bound ? 2 * segment : 0;
  params->segment_chunks = segment;
  const int32_t finest = options.force_intra_cp ? kForcedSegment : kLeastSegmentChunks;
  return std::min(most, bytes_with(*params, finest));
}

// What surrounds the kernels of a call. Decided from the whole call, so that both halves of its heads have the same
// scratch.
struct Wrapping {
  bool l2norm, gate, sigmoid;  // options that are on
  bool q, k, v, A, d_o;        // inputs that the copy engine does not take as they are: copied
  bool dq, dk, dv;             // outputs that the kernels cannot store to: made in scratch, then copied

  explicit Wrapping(const Arguments& args)
      : l2norm(args.options.use_qk_l2norm_in_kernel != 0),
        gate(args.options.use_gate_in_kernel != 0),
        sigmoid(args.options.use_beta_sigmoid_in_kernel != 0),
        q(l2norm || !taken_as_is(args.q, args)),
        k(l2norm || !taken_as_is(args.k, args)),
        v(!taken_as_is(args.v, args)),
        A(present(args.A) && !taken_as_is(args.A, args)),
        d_o(present(args.d_o) && !taken_as_is(args.d_o, args)),
        dq(present(args.dq) && !copy_engine_takes(args.dq)),
        dk(present(args.dk) && !copy_engine_takes(args.dk)),
        dv(!present(args.dv) || !copy_engine_takes(args.dv)) {}

 private:
  static bool taken_as_is(const Tensor& t, const Arguments& args) {
    return t.dtype == args.q.dtype && copy_engine_takes(t);
  }
};

// The backward of some heads: the options and strides around the kernels, and the kernels. The constructor lays out the
// workspace.
class HeadsBackward {
 public:
  HeadsBackward(const Wrapping& wrapping, const Arguments& args, const Problem& p, Workspace* workspace)
      : args_(args), p_(p), wrapping_(wrapping), core_(args) {
    const auto token = [&](bool wanted, int64_t heads, int64_t size, Tensor* t) {
      if (wanted) *t = tensor(workspace->take<uint16_t>(p.B * p.T * heads * size), p.dtype, {p.B, p.T, heads, size});
    };
    token(wrapping.q, p.Hq, kHeadDim, &core_.q);
    token(wrapping.k, p.Hq, kHeadDim, &core_.k);
    token(wrapping.v, p.Hv, kHeadDim, &core_.v);
    token(wrapping.A, p.Hv, kChunk, &core_.A);
    token(wrapping.d_o, p.Hv, kHeadDim, &core_.d_o);
    token(wrapping.dq, p.Hq, kHeadDim, &core_.dq);
    token(wrapping.dk, p.Hq, kHeadDim, &core_.dk);
    token(wrapping.dv, p.Hv, kHeadDim, &core_.dv);

    const auto gate = [&](bool wanted, Tensor* t) {
      if (wanted) *t = tensor(workspace->take<float>(p.B * p.T * p.Hv), DType::kFloat32, {p.B, p.T, p.Hv});
    };
    if (wrapping.l2norm) {
      q_inverse_norms_ = workspace->take<float>(p.B * p.T * p.Hq);
      k_inverse_norms_ = workspace->take<float>(p.B * p.T * p.Hq);
    }
    for (const auto& [norms, given] :
         {std::pair{&q_inverse_norms_, &args_.q_inverse_norm}, std::pair{&k_inverse_norms_, &args_.k_inverse_norm}}) {
      if (!present(*given)) continue;
      *norms = dense(*given) ? static_cast<float*>(given->data) : workspace->take<float>(p.B * p.T * p.Hq);
    }
    gate(wrapping.gate, &core_.g);
    gate(wrapping.sigmoid, &core_.beta);
    wants_gate_ = wrapping.gate && (present(args.dg) || present(args.dA_log) || present(args.ddt_bias));
    wants_beta_ = wrapping.sigmoid && present(args.dbeta);
    gate(wants_gate_, &core_.dg);
    gate(wants_beta_, &core_.dbeta);
    if (wants_gate_) gate_sums_ = workspace->take<double>(gate_sum_scratch(p));
    if (wrapping.gate || wrapping.sigmoid) sequences_ = take_sequences(p, workspace);

    params_ = make_params(core_, p);
    params_.q_inverse_norms = q_inverse_norms_;
    params_.k_inverse_norms = k_inverse_norms_;
    kernels_ = workspace->take<char>(static_cast<int64_t>(plan_segments(args.options, &params_)));
  }

  Status run(cudaStream_t stream) {
    FLASH_QLA_RETURN_IF_ERROR(prepare(stream));
    bind_chunk_backward_workspace(&params_, kernels_);
    Maps maps;
    FLASH_QLA_RETURN_IF_ERROR(cuda_status(
        make_chunk_backward_maps(params_, strided(core_.q), strided(core_.d_o), &maps), "describing the tensors"));
    FLASH_QLA_RETURN_IF_ERROR(
        cuda_status(launch_chunk_backward(params_, maps, Parts{}, stream), "the sm90 chunk backward"));
    return finish(stream);
  }

 private:
  Status copy(bool wanted, const Tensor& from, const Tensor& to, cudaStream_t stream) const {
    if (!wanted) return Status();
    return launch_copy_rows(p_, to.shape[2], to.shape[3], device_tensor(from), device_tensor(to), stream);
  }

  // [B, T, Hq] without gaps, as the kernels read inverse norms.
  static bool dense(const Tensor& t) {
    return (t.shape[2] == 1 || t.stride[2] == 1) && (t.shape[1] == 1 || t.stride[1] == t.shape[2]) &&
           (t.shape[0] == 1 || t.stride[0] == t.shape[1] * t.shape[2]);
  }

  Status copy_norms(Tensor given, float* norms, cudaStream_t stream) const {
    if (!present(given) || dense(given)) return Status();
    // As rows of all heads, or of one where there are more than a row may have.
    const bool rows = p_.Hq <= kHeadDim;
    given.ndim = 4;
    given.shape[3] = rows ? p_.Hq : 1;
    given.stride[3] = given.stride[2];
    given.shape[2] = rows ? 1 : p_.Hq;
    const Tensor to = tensor(norms, DType::kFloat32, {p_.B, p_.T, given.shape[2], given.shape[3]});
    return copy(true, given, to, stream);
  }

  // The inputs as the kernels take them.
  Status prepare(cudaStream_t stream) const {
    if (wrapping_.l2norm) {
      FLASH_QLA_RETURN_IF_ERROR(
          launch_normalize<float>(p_, device_tensor(args_.q), device_tensor(core_.q), q_inverse_norms_, stream));
      FLASH_QLA_RETURN_IF_ERROR(
          launch_normalize<float>(p_, device_tensor(args_.k), device_tensor(core_.k), k_inverse_norms_, stream));
    } else {
      FLASH_QLA_RETURN_IF_ERROR(copy(wrapping_.q, args_.q, core_.q, stream));
      FLASH_QLA_RETURN_IF_ERROR(copy(wrapping_.k, args_.k, core_.k, stream));
    }
    FLASH_QLA_RETURN_IF_ERROR(copy_norms(args_.q_inverse_norm, q_inverse_norms_, stream));
    FLASH_QLA_RETURN_IF_ERROR(copy_norms(args_.k_inverse_norm, k_inverse_norms_, stream));
    FLASH_QLA_RETURN_IF_ERROR(copy(wrapping_.v, args_.v, core_.v, stream));
    FLASH_QLA_RETURN_IF_ERROR(copy(wrapping_.A, args_.A, core_.A, stream));
    FLASH_QLA_RETURN_IF_ERROR(copy(wrapping_.d_o, args_.d_o, core_.d_o, stream));
    if (!wrapping_.gate && !wrapping_.sigmoid) return Status();
    FLASH_QLA_RETURN_IF_ERROR(plan_sequences(args_.cu_seqlens, p_, sequences_, stream));
    return launch_prepare_gates<float>(p_, sequences_, gates(),
                                       wrapping_.gate ? static_cast<float*>(core_.g.data) : nullptr,
                                       wrapping_.sigmoid ? static_cast<float*>(core_.beta.data) : nullptr, stream);
  }

  // The kernels' gradients back through the options, to where the caller wants them.
  Status finish(cudaStream_t stream) const {
    FLASH_QLA_RETURN_IF_ERROR(copy(wrapping_.dq, core_.dq, args_.dq, stream));
    FLASH_QLA_RETURN_IF_ERROR(copy(wrapping_.dk, core_.dk, args_.dk, stream));
    FLASH_QLA_RETURN_IF_ERROR(copy(wrapping_.dv && present(args_.dv), core_.dv, args_.dv, stream));
    if (!wants_gate_ && !wants_beta_) return Status();
    GateGradients out{};
    if (wants_gate_) {
      out.dg = device_tensor(args_.dg);
      out.dA_log = device_tensor(args_.dA_log);
      out.ddt_bias = device_tensor(args_.ddt_bias);
    }
    if (wants_beta_) out.dbeta = device_tensor(args_.dbeta);
    return launch_finish_gates<float>(p_, sequences_, gates(), static_cast<const float*>(core_.dg.data),
                                      static_cast<const float*>(core_.dbeta.data), out, gate_sums_, stream);
  }

  Gates gates() const { return device_gates(args_, args_.g_is_cumsum != 0); }

  const Arguments args_;
  const Problem p_;
  const Wrapping wrapping_;
  Arguments core_;  // as the kernels take them
  bool wants_gate_ = false, wants_beta_ = false;
  float *q_inverse_norms_ = nullptr, *k_inverse_norms_ = nullptr;
  double* gate_sums_ = nullptr;
  SequenceTable sequences_{};
  Args params_{};
  char* kernels_ = nullptr;
};

size_t bytes_for(const Arguments& args, const Problem& p, const Wrapping& wrapping, int64_t key_heads) {
  return heads_bytes<HeadsBackward>(wrapping, args, p, key_heads);
}

// Scratch up to which all heads go through together. Beyond it they go in two halves, one after the other in the same
// scratch, while a half has heads enough to fill a GPU with one sequence: 32 value heads are 128 blocks of the serial
// passes. Halves of 16 cost 6 to 47 % of the time on an H200 (docs/notebook/sm90_backward.md). Halves save nothing that
// matters below the bound.
constexpr size_t kWholeScratch = size_t{768} << 20;
constexpr int64_t kLeastValueHeads = 32;

// Few heads never do, and then the scratch of all is not worked out.
bool goes_in_halves(const Arguments& args, const Problem& p, const Wrapping& wrapping) {
  return p.Hq > 1 && p.Hq / 2 * p.group >= kLeastValueHeads && bytes_for(args, p, wrapping, p.Hq) > kWholeScratch;
}

size_t workspace_size(const Arguments& args, const Problem& p) {
  const Wrapping wrapping(args);
  if (!goes_in_halves(args, p, wrapping)) return bytes_for(args, p, wrapping, p.Hq);
  // Not less than a smaller call that goes as a whole.
  return std::max(kWholeScratch, bytes_for(args, p, wrapping, ceil_div(p.Hq, 2)));
}

Status run(const Arguments& args, const Problem& p, void* memory, void* stream) {
  const Wrapping wrapping(args);
  const int64_t at_once = goes_in_halves(args, p, wrapping) ? ceil_div(p.Hq, 2) : p.Hq;
  return run_heads<HeadsBackward>(wrapping, args, p, at_once, memory, stream);
}

}  // namespace
}  // namespace cuda::sm90::bwd

const BackwardPath kSm90ChunkBackward = {
    "sm90", FLASH_QLA_CUDA, false, cuda::sm90::bwd::reject, cuda::sm90::bwd::workspace_size, cuda::sm90::bwd::run};

}  // namespace flash_qla
