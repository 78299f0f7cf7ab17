#include "cuda/layer/conv_params.cuh"

namespace flash_qla::cuda {
namespace {

void set_gate(const GateView& view, int64_t (&strides)[4], int64_t* group) {
  strides[0] = view.batch;
  strides[1] = view.token;
  strides[2] = view.key_head;
  strides[3] = view.head;
  *group = view.group;
}

}  // namespace

std::string reject_conv(const flash_qla_conv_arguments&, const ConvProblem& p) {
  if (p.dtype == DType::kFloat64) return "needs fp32, bf16 or fp16";
  return p.B * p.T * p.gate_heads < int64_t{1} << 32 ? "" : "needs fewer than 2^32 gates";
}

ConvParams conv_params_of(const flash_qla_conv_arguments& args, const ConvProblem& p) {
  ConvParams params{};
  params.num_parts = args.num_parts;
  params.width = static_cast<int32_t>(p.W);
  params.silu = args.activation == FLASH_QLA_ACTIVATION_SILU;
  int64_t channel = 0;
  for (int i = 0; i < args.num_parts; ++i) {
    const flash_qla_conv_part& from = args.parts[i];
    ConvPart& part = params.parts[i];
    part.x = device_tensor(from.x);
    part.residual = device_tensor(from.residual);
    part.y = device_tensor(from.y);
    part.weight = device_tensor(from.weight);
    part.bias = device_tensor(from.bias);
    part.initial_state = device_tensor(from.initial_state);
    part.final_state = device_tensor(from.final_state);
    part.inverse_norm = device_tensor(from.inverse_norm);
    part.channel = channel;
    part.heads = static_cast<int32_t>(from.x.shape[2]);
    part.dim = static_cast<int32_t>(from.x.shape[3]);
    part.l2norm = from.l2norm != 0;
    channel += from.x.shape[2] * from.x.shape[3];
  }
  ConvSequences& s = params.sequences;
  s = conv_sequences_of(args, p);
  const Tensor& final = present(args.final_state_indices) ? args.final_state_indices : args.initial_state_indices;
  s.initial = device_tensor(args.initial_state_indices);
  s.final = device_tensor(final);
  s.has = device_tensor(args.has_initial_state);
  s.accepted = device_tensor(args.num_accepted_tokens);
  s.ring = device_tensor(args.cache_seqlens);
  s.checkpoint_offsets = device_tensor(args.checkpoint_offsets);
  s.checkpoint_indices = device_tensor(args.checkpoint_indices);
  s.checkpoints = present(args.checkpoint_offsets) ? args.checkpoint_offsets.shape[0] : 0;
  s.null_index = args.null_index;
  s.writes_states = present(args.parts[0].final_state);
  params.drafts = device_tensor(args.draft_states);
  params.draft_rows = device_tensor(args.draft_state_indices);
  if (present(args.draft_states)) {
    params.draft_count = args.draft_states.shape[0];
    params.draft_tokens = args.draft_states.shape[1];
  }
  ConvGates& gates = params.gates;
  const GateView a = gate_view(args.a, p), b = gate_view(args.b, p);
  gates.a = device_tensor(args.a);
  gates.b = device_tensor(args.b);
  set_gate(a, gates.a_strides, &gates.a_group);
  set_gate(b, gates.b_strides, &gates.b_group);
  gates.A_log = device_tensor(args.A_log);
  gates.dt_bias = device_tensor(args.dt_bias);
  gates.g = device_tensor(args.g);
  gates.beta = device_tensor(args.beta);
  gates.heads = p.gate_heads;
  gates.tokens = p.B * p.T;
  gates.T = p.T;
  gates.range = args.options.allow_neg_eigval ? 2.0f : 1.0f;
  return params;
}

ConvBackwardParams conv_backward_params_of(const flash_qla_conv_backward_arguments& args, const ConvProblem& p) {
  ConvBackwardParams params{};
  params.num_parts = args.num_parts;
  params.width = static_cast<int32_t>(p.W);
  params.silu = args.activation == FLASH_QLA_ACTIVATION_SILU;
  params.channels = p.channels;
  params.sequences = conv_sequences_of(args, p);
  int64_t channel = 0;
  for (int i = 0; i < args.num_parts; ++i) {
    const flash_qla_conv_backward_part& from = args.parts[i];
    ConvBackwardPart& part = params.parts[i];
    part.x = device_tensor(from.x);
    part.dy = device_tensor(from.dy);
    part.dx = device_tensor(from.dx);
    part.dresidual = device_tensor(from.dresidual);
    part.weight = device_tensor(from.weight);
    part.bias = device_tensor(from.bias);
    part.dweight = device_tensor(from.dweight);
    part.dbias = device_tensor(from.dbias);
    part.initial_state = device_tensor(from.initial_state);
    part.dfinal_state = device_tensor(from.dfinal_state);
    part.dinitial_state = device_tensor(from.dinitial_state);
    part.channel = channel;
    part.heads = static_cast<int32_t>(from.x.shape[2]);
    part.dim = static_cast<int32_t>(from.x.shape[3]);
    part.l2norm = from.l2norm != 0;
    channel += from.x.shape[2] * from.x.shape[3];
  }
  return params;
}

}  // namespace flash_qla::cuda
