// The gated norm and its gradients, row by row.
#include "core/host_tensor.h"
#include "reference/layer/convolution.h"
#include "reference/layer/paths.h"
#include "reference/tokens.h"

namespace flash_qla {
namespace reference {
namespace {

// One row, with what both passes need of it.
struct Row {
  Vector x, z, weight, bias, gate;  // as given; ones and zeros where absent; gate = act(z)
  Vector normed;                    // what is normalised, times r: x r, or x act(z) r
  double r = 0.0;
};

Vector load_row(const Tensor& t, int64_t row, int64_t V, double absent) {
  Vector values(static_cast<size_t>(V), absent);
  const RowView view = row_view(t);
  for (int64_t i = 0; present(t) && i < V; ++i) {
    values[static_cast<size_t>(i)] = load(t, view.offset(row) + i * view.column);
  }
  return values;
}

void store_row(const Tensor& t, int64_t row, const Vector& values) {
  if (!present(t)) return;
  const RowView view = row_view(t);
  for (size_t i = 0; i < values.size(); ++i)
    store(t, view.offset(row) + static_cast<int64_t>(i) * view.column, values[i]);
}

Vector load_vector(const Tensor& t, int64_t V, double absent) {
  Vector values(static_cast<size_t>(V), absent);
  for (int64_t i = 0; present(t) && i < V; ++i) values[static_cast<size_t>(i)] = load(t, offset_of(t, i));
  return values;
}

template <class Arguments>
Row prepare(const Arguments& args, int64_t i, const NormProblem& p) {
  Row row{load_row(args.x, i, p.V, 0.0),
          load_row(args.z, i, p.V, 0.0),
          load_vector(args.weight, p.V, 1.0),
          load_vector(args.bias, p.V, 0.0),
          Vector(static_cast<size_t>(p.V), 1.0),
          {},
          0.0};
  for (size_t v = 0; present(args.z) && v < row.gate.size(); ++v) row.gate[v] = activate(args.activation, row.z[v]);
  row.normed = row.x;
  for (size_t v = 0; args.gate_first && v < row.x.size(); ++v) row.normed[v] *= row.gate[v];
  row.r = 1.0 / std::sqrt(dot(row.normed, row.normed) / static_cast<double>(p.V) + args.eps);
  for (double& value : row.normed) value *= row.r;
  return row;
}

Status forward(const flash_qla_norm_gated_arguments& args, const NormProblem& p, void*, void*) {
  for (int64_t i = 0; i < p.rows; ++i) {
    const Row row = prepare(args, i, p);
    Vector y = row.normed;
    for (size_t v = 0; v < y.size(); ++v) {
      y[v] = y[v] * row.weight[v] + row.bias[v];
      if (!args.gate_first) y[v] *= row.gate[v];
    }
    store_row(args.y, i, y);
    if (present(args.inverse_rms)) store(args.inverse_rms, offset_of(args.inverse_rms, i), row.r);
  }
  return Status();
}

// dx = r (h - xn mean(h xn)) with h the gradient of xn; the same of v = x act(z) where the gate comes first.
Status backward(const flash_qla_norm_gated_backward_arguments& args, const NormProblem& p, void*, void*) {
  Vector dweight(static_cast<size_t>(p.V), 0.0), dbias = dweight;
  for (int64_t i = 0; i < p.rows; ++i) {
    const Row row = prepare(args, i, p);
    const Vector dy = load_row(args.dy, i, p.V, 0.0);
    Vector h = dy, dx(dy.size()), dz(dy.size());
    for (size_t v = 0; v < dy.size(); ++v) {
      const double through_gate = args.gate_first ? dy[v] : dy[v] * row.gate[v];
      dweight[v] += through_gate * row.normed[v];
      dbias[v] += through_gate;
      h[v] = through_gate * row.weight[v];
      const double slope = activation_slope(args.activation, row.z[v]);
      dz[v] = dy[v] * (row.normed[v] * row.weight[v] + row.bias[v]) * slope;
    }
    const double mean = dot(h, row.normed) / static_cast<double>(p.V);
    for (size_t v = 0; v < dy.size(); ++v) {
      dx[v] = row.r * (h[v] - row.normed[v] * mean);
      if (!args.gate_first) continue;
      dz[v] = dx[v] * row.x[v] * activation_slope(args.activation, row.z[v]);
      dx[v] *= row.gate[v];
    }
    store_row(args.dx, i, dx);
    store_row(args.dz, i, dz);
  }
  for (int64_t v = 0; v < p.V; ++v) {
    if (present(args.dweight)) store(args.dweight, offset_of(args.dweight, v), dweight[static_cast<size_t>(v)]);
    if (present(args.dbias)) store(args.dbias, offset_of(args.dbias, v), dbias[static_cast<size_t>(v)]);
  }
  return Status();
}

template <class Arguments>
std::string accept(const Arguments&, const NormProblem&) {
  return {};
}
template <class Arguments>
size_t no_workspace(const Arguments&, const NormProblem&) {
  return 0;
}

}  // namespace
}  // namespace reference

const NormPath kReferenceNormGated = {"reference",
                                      FLASH_QLA_CPU,
                                      true,
                                      reference::accept<flash_qla_norm_gated_arguments>,
                                      reference::no_workspace<flash_qla_norm_gated_arguments>,
                                      reference::forward};
const NormBackwardPath kReferenceNormGatedBackward = {"reference",
                                                      FLASH_QLA_CPU,
                                                      true,
                                                      reference::accept<flash_qla_norm_gated_backward_arguments>,
                                                      reference::no_workspace<flash_qla_norm_gated_backward_arguments>,
                                                      reference::backward};

}  // namespace flash_qla
