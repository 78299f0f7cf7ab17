// The convolution's forward and update.
#include "reference/layer/convolution.h"

#include "reference/layer/paths.h"

namespace flash_qla {
namespace reference {
namespace {

using Arguments = flash_qla_conv_arguments;

void outputs(const Arguments& args, const flash_qla_conv_part& part, const ConvSequence& s, const ConvProblem& p) {
  const int64_t H = part.x.shape[2], D = part.x.shape[3];
  // Last token first: an update may write y over x.
  for (int64_t t = s.length - 1; t >= 0; --t) {
    for (int64_t head = 0; head < H && has_output(args, s, t); ++head) {
      Vector y = convolve_row(args, part, s, t, head, p);
      for (double& value : y) value = activate(args.activation, value);
      const double r = inverse_norm(y);
      for (int64_t i = 0; i < D; ++i) {
        double value = y[static_cast<size_t>(i)];
        if (part.l2norm) value *= r;
        if (present(part.residual)) value += load(part.residual, offset_of(part.residual, s.b, s.begin + t, head, i));
        store(part.y, offset_of(part.y, s.b, s.begin + t, head, i), value);
      }
      if (present(part.inverse_norm)) {
        store(part.inverse_norm, offset_of(part.inverse_norm, s.b, s.begin + t, head), r);
      }
    }
  }
}

// The state of one sequence and channel after some tokens, whole.
std::vector<double> state_after(const flash_qla_conv_part& part, const ConvSequence& s, int64_t tokens, int64_t head,
                                int64_t dim, const ConvProblem& p) {
  std::vector<double> state;
  for (int64_t l = 0; l < p.L; ++l) state.push_back(load_source(part, s, s.after(l, tokens, p), head, dim));
  return state;
}

void store_entries(const Tensor& t, int64_t row, int64_t channel, const std::vector<double>& state) {
  for (size_t l = 0; l < state.size(); ++l) store(t, offset_of(t, row, channel, static_cast<int64_t>(l)), state[l]);
}

// The states that one channel of a sequence leaves: in slots, after draft tokens, at the end.
void states(const Arguments& args, const flash_qla_conv_part& part, int64_t first_channel, const ConvSequence& s,
            int64_t n, const std::vector<ConvCheckpoint>& checkpoints, int64_t head, int64_t dim,
            const ConvProblem& p) {
  const int64_t channel = head * part.x.shape[3] + dim;
  if (s.draft_row >= 0) {
    for (int64_t t = 0; t < std::min(s.length, args.draft_states.shape[1]); ++t) {
      for (int64_t i = 0; i < p.W - 1; ++i) {
        const ConvSource source = s.input(t + 1 - (p.W - 1) + i, p);
        store(args.draft_states, offset_of(args.draft_states, s.draft_row, t, first_channel + channel, i),
              load_source(part, s, source, head, dim));
      }
    }
  }
  std::vector<std::pair<int64_t, std::vector<double>>> left;  // all is read before anything is written
  for (const ConvCheckpoint& c : checkpoints) {
    if (c.n == n) left.emplace_back(c.slot, state_after(part, s, c.tokens, head, dim, p));
  }
  if (s.write_row >= 0) left.emplace_back(s.write_row, state_after(part, s, s.length, head, dim, p));
  for (const auto& [row, state] : left) store_entries(part.final_state, row, channel, state);
}

void gates(const Arguments& args, const ConvProblem& p) {
  const GateView a = gate_view(args.a, p), b = gate_view(args.b, p);
  for (int64_t i = 0; i < p.B; ++i) {
    for (int64_t t = 0; t < p.T; ++t) {
      for (int64_t h = 0; h < p.gate_heads; ++h) {
        if (present(args.g)) {
          const double bias = present(args.dt_bias) ? load(args.dt_bias, offset_of(args.dt_bias, h)) : 0.0;
          const double rate = std::exp(load(args.A_log, offset_of(args.A_log, h)));
          store(args.g, offset_of(args.g, i, t, h), -rate * softplus(load(a.tensor, a.offset(i, t, h)) + bias));
        }
        if (present(args.beta)) {
          const double raw = load(b.tensor, b.offset(i, t, h));
          store(args.beta, offset_of(args.beta, i, t, h), beta_range(args.options) * sigmoid(raw));
        }
      }
    }
  }
}

// The outputs of a sequence that has some are all written by it; what belongs to none is zero.
void zero_outputs(const flash_qla_conv_part& part, int64_t b, int64_t begin, int64_t end) {
  Tensor y = part.y, norm = part.inverse_norm;
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t head = 0; head < y.shape[2]; ++head) {
      for (int64_t i = 0; i < y.shape[3]; ++i) store(y, offset_of(y, b, t, head, i), 0.0);
      if (present(norm)) store(norm, offset_of(norm, b, t, head), 1.0 / std::sqrt(kL2NormEps));
    }
  }
}

Status run(const Arguments& args, const ConvProblem& p, void*, void*) {
  const std::vector<ConvSequence> sequences = conv_sequences(args, p);
  const std::vector<ConvCheckpoint> checkpoints = conv_checkpoints(args, p, sequences);
  int64_t first_channel = 0;
  for (int32_t i = 0; i < args.num_parts; ++i) {
    const flash_qla_conv_part& part = args.parts[i];
    const int64_t H = part.x.shape[2], D = part.x.shape[3];
    // States come first: an update's outputs may take the place of its inputs. They are written last, for the outputs
    // read them: so each is kept until then.
    for (int64_t n = 0; n < p.N; ++n) {
      const ConvSequence& s = sequences[static_cast<size_t>(n)];
      flash_qla_conv_part before = part;
      std::vector<double> inputs, entries;
      // A copy of the sequence's inputs and state, contiguous and in fp64.
      for (int64_t t = 0; t < s.length; ++t) {
        for (int64_t c = 0; c < H * D; ++c)
          inputs.push_back(load(part.x, offset_of(part.x, s.b, s.begin + t, c / D, c % D)));
      }
      ConvSequence own = s;
      own.b = 0;
      own.begin = 0;
      before.x = tensor(inputs.data(), DType::kFloat64, {1, s.length, H, D});
      if (s.read_row >= 0) {
        for (int64_t c = 0; c < H * D; ++c) {
          for (int64_t l = 0; l < p.L; ++l)
            entries.push_back(load(part.initial_state, offset_of(part.initial_state, s.read_row, c, l)));
        }
        own.read_row = 0;
        before.initial_state = tensor(entries.data(), DType::kFloat64, {1, H * D, p.L});
      }
      if (s.skipped) {
        zero_outputs(part, s.b, s.begin, s.begin + s.length);
        continue;
      }
      if (present(args.seq_idx)) {
        zero_outputs(part, s.b, s.begin, s.begin + s.length);
        outputs(args, part, s, p);
      } else {
        flash_qla_conv_part shifted = before;  // outputs of the sequence's own place
        for (Tensor* t : {&shifted.y, &shifted.residual, &shifted.inverse_norm}) {
          if (!present(*t)) continue;
          t->data = static_cast<char*>(t->data) + (s.b * t->stride[0] + s.begin * t->stride[1]) * size_of(dtype(*t));
        }
        outputs(args, shifted, own, p);
      }
      for (int64_t head = 0; head < H; ++head) {
        for (int64_t dim = 0; dim < D; ++dim) states(args, before, first_channel, own, n, checkpoints, head, dim, p);
      }
    }
    if (p.varlen) {
      zero_outputs(part, 0, 0, p.N > 0 ? sequences.front().begin : p.T);
      if (p.N > 0) zero_outputs(part, 0, sequences.back().begin + sequences.back().length, p.T);
    }
    first_channel += H * D;
  }
  gates(args, p);
  return Status();
}

std::string accept(const Arguments&, const ConvProblem&) { return {}; }
size_t no_workspace(const Arguments&, const ConvProblem&) { return 0; }

}  // namespace
}  // namespace reference

const ConvPath kReferenceConvForward = {"reference",       FLASH_QLA_CPU,           true,
                                        reference::accept, reference::no_workspace, reference::run};
const ConvPath kReferenceConvUpdate = kReferenceConvForward;

}  // namespace flash_qla
