// The convolution's gradients, term by term.
#include "reference/layer/convolution.h"
#include "reference/layer/paths.h"

namespace flash_qla {
namespace reference {
namespace {

using Arguments = flash_qla_conv_backward_arguments;
using Part = flash_qla_conv_backward_part;

// Sums that several tokens add to, in fp64 until they are rounded once.
struct Sums {
  Vector dx;              // [B, T, H * D]
  Vector dinitial_state;  // [N, H * D, L]
  Vector dweight;         // [H * D, W]
  Vector dbias;           // [H * D]
};

// The gradient of u of one head's row, given that of its result.
Vector row_gradient(const Arguments& args, const Part& part, const ConvSequence& s, int64_t t, int64_t head,
                    const ConvProblem& p) {
  const int64_t D = part.x.shape[3];
  const Vector u = convolve_row(args, part, s, t, head, p);
  Vector d(static_cast<size_t>(D), 0.0), y = u;
  for (int64_t i = 0; i < D; ++i) {
    const size_t at = static_cast<size_t>(i);
    if (present(part.dy)) d[at] = load(part.dy, offset_of(part.dy, s.b, s.begin + t, head, i));
    y[at] = activate(args.activation, u[at]);
  }
  if (part.l2norm) {
    const double r = inverse_norm(y), along = dot(y, d) * r * r;
    for (size_t i = 0; i < d.size(); ++i) d[i] = r * (d[i] - along * y[i]);
  }
  for (size_t i = 0; i < d.size(); ++i) d[i] *= activation_slope(args.activation, u[i]);
  return d;
}

void add_row(const Arguments& args, const Part& part, const ConvSequence& s, int64_t n, int64_t t, int64_t head,
             const ConvProblem& p, Sums* sums) {
  const int64_t D = part.x.shape[3], channels = part.x.shape[2] * D;
  const Vector du = row_gradient(args, part, s, t, head, p);
  for (int64_t i = 0; i < D; ++i) {
    const int64_t channel = head * D + i;
    const double d = du[static_cast<size_t>(i)];
    sums->dbias[static_cast<size_t>(channel)] += d;
    for (int64_t j = 0; j < p.W; ++j) {
      const ConvSource source = term(args, s, t, j, p);
      sums->dweight[static_cast<size_t>(channel * p.W + j)] += d * load_source(part, s, source, head, i);
      const double share = d * load(part.weight, offset_of(part.weight, channel, j));
      if (source.kind == ConvSource::Kind::kInput) {
        sums->dx[static_cast<size_t>((s.b * p.T + s.begin + source.index) * channels + channel)] += share;
      } else if (source.kind == ConvSource::Kind::kState) {
        sums->dinitial_state[static_cast<size_t>((n * channels + channel) * p.L + source.index)] += share;
      }
    }
  }
}

void add_final_state(const Part& part, const ConvSequence& s, int64_t n, const ConvProblem& p, Sums* sums) {
  const int64_t channels = part.x.shape[2] * part.x.shape[3];
  for (int64_t channel = 0; present(part.dfinal_state) && channel < channels; ++channel) {
    for (int64_t l = 0; l < p.L; ++l) {
      const double d = load(part.dfinal_state, offset_of(part.dfinal_state, n, channel, l));
      const ConvSource source = s.after(l, s.length, p);
      if (source.kind == ConvSource::Kind::kInput) {
        sums->dx[static_cast<size_t>((s.b * p.T + s.begin + source.index) * channels + channel)] += d;
      } else if (source.kind == ConvSource::Kind::kState) {
        sums->dinitial_state[static_cast<size_t>((n * channels + channel) * p.L + source.index)] += d;
      }
    }
  }
}

// dresidual is dy where there is an output.
void store_residual(const Arguments& args, const Part& part, const std::vector<ConvSequence>& sequences) {
  if (!present(part.dresidual)) return;
  fill_zero(part.dresidual);
  for (const ConvSequence& s : sequences) {
    for (int64_t t = 0; t < s.length && present(part.dy); ++t) {
      if (!has_output(args, s, t)) continue;
      for (int64_t c = 0; c < part.x.shape[2] * part.x.shape[3]; ++c) {
        const int64_t head = c / part.x.shape[3], i = c % part.x.shape[3];
        store(part.dresidual, offset_of(part.dresidual, s.b, s.begin + t, head, i),
              load(part.dy, offset_of(part.dy, s.b, s.begin + t, head, i)));
      }
    }
  }
}

void store_sums(const Part& part, const Sums& sums, const ConvProblem& p) {
  const int64_t D = part.x.shape[3], channels = part.x.shape[2] * D;
  for (int64_t i = 0; present(part.dx) && i < p.B * p.T * channels; ++i) {
    const int64_t token = i / channels, channel = i % channels;
    store(part.dx, offset_of(part.dx, token / p.T, token % p.T, channel / D, channel % D),
          sums.dx[static_cast<size_t>(i)]);
  }
  for (int64_t i = 0; present(part.dinitial_state) && i < p.N * channels * p.L; ++i) {
    store(part.dinitial_state, offset_of(part.dinitial_state, i / p.L / channels, i / p.L % channels, i % p.L),
          sums.dinitial_state[static_cast<size_t>(i)]);
  }
  for (int64_t i = 0; present(part.dweight) && i < channels * p.W; ++i) {
    store(part.dweight, offset_of(part.dweight, i / p.W, i % p.W), sums.dweight[static_cast<size_t>(i)]);
  }
  for (int64_t i = 0; present(part.dbias) && i < channels; ++i) {
    store(part.dbias, offset_of(part.dbias, i), sums.dbias[static_cast<size_t>(i)]);
  }
}

Status run(const Arguments& args, const ConvProblem& p, void*, void*) {
  const std::vector<ConvSequence> sequences = conv_sequences(args, p);
  for (int32_t i = 0; i < args.num_parts; ++i) {
    const Part& part = args.parts[i];
    const size_t channels = static_cast<size_t>(part.x.shape[2] * part.x.shape[3]);
    Sums sums{Vector(static_cast<size_t>(p.B * p.T) * channels, 0.0),
              Vector(static_cast<size_t>(p.N * p.L) * channels, 0.0), Vector(channels * static_cast<size_t>(p.W), 0.0),
              Vector(channels, 0.0)};
    for (int64_t n = 0; n < p.N; ++n) {
      const ConvSequence& s = sequences[static_cast<size_t>(n)];
      for (int64_t t = 0; t < s.length; ++t) {
        for (int64_t head = 0; head < part.x.shape[2] && has_output(args, s, t); ++head) {
          add_row(args, part, s, n, t, head, p, &sums);
        }
      }
      add_final_state(part, s, n, p, &sums);
    }
    store_residual(args, part, sequences);
    store_sums(part, sums, p);
  }
  return Status();
}

std::string accept(const Arguments&, const ConvProblem&) { return {}; }
size_t no_workspace(const Arguments&, const ConvProblem&) { return 0; }

}  // namespace
}  // namespace reference

const ConvBackwardPath kReferenceConvBackward = {"reference",       FLASH_QLA_CPU,           true,
                                                 reference::accept, reference::no_workspace, reference::run};

}  // namespace flash_qla
