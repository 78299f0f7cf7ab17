// Reference of the links of parts: the token recurrence in fp64, forward from the identity for M, and its own reverse
// for the gradient of the state. Nothing is forgotten, whatever the options say.
#include "core/host_tensor.h"
#include "core/link_chain.h"
#include "reference/paths.h"
#include "reference/tokens.h"

namespace flash_qla {
namespace reference {
namespace {

using SummaryArguments = flash_qla_chunk_summary_arguments;
using BackwardArguments = flash_qla_chunk_summary_backward_arguments;
using CombineArguments = flash_qla_summary_combine_arguments;

bool flag(const Tensor& t, int64_t part) { return load(t, part * t.stride[0]) != 0.0; }

// The part's first (`end` 0) or last (1) sequence, or NULL.
const Sequence* row_of_part(const Tensor& rows, int64_t part, int64_t end, const std::vector<Sequence>& sequences) {
  const int64_t row = load_index(rows, part, end);
  if (row < 0 || row >= static_cast<int64_t>(sequences.size())) return nullptr;
  const Sequence& s = sequences[static_cast<size_t>(row)];
  return s.length > 0 ? &s : nullptr;
}

Vector identity(int64_t K) {
  Vector M(static_cast<size_t>(K * K), 0.0);
  for (int64_t i = 0; i < K; ++i) M[static_cast<size_t>(i * K + i)] = 1.0;
  return M;
}

template <class Arguments>
Token load_inputs(const Arguments& args, const Problem& p, const Sequence& s, int64_t t, int64_t head) {
  Token token;
  token.k = load_key(args.k, s.b, s.begin + t, head / p.group, args.options.use_qk_l2norm_in_kernel != 0);
  token.decay = std::exp(clamp_log_decay(log_decay(args, false, s, t, head)));
  token.beta = load_beta(args, s, t, head);
  return token;
}

Status run_summary(const SummaryArguments& args, const SummaryProblem& p, void*, void*) {
  const std::vector<Sequence> sequences = host_sequences(args.cu_seqlens, p);
  const bool v_first = args.options.state_v_first != 0;
  for (int64_t part = 0; part < p.P; ++part) {
    const Sequence* s = row_of_part(args.rows, part, 1, sequences);
    const bool leaves = s != nullptr && flag(args.leaves, part), through = leaves && flag(args.through, part);
    const flash_qla_link_kind kind = s == nullptr ? FLASH_QLA_LINK_NONE
                                     : through    ? FLASH_QLA_LINK_AFFINE
                                                  : FLASH_QLA_LINK_CONSTANT;
    for (int64_t head = 0; head < p.Hv; ++head) {
      Vector S(static_cast<size_t>(p.K * p.V), 0.0), M(static_cast<size_t>(p.K * p.K), 0.0);
      if (through) M = identity(p.K);
      if (leaves && !through && present(args.initial_state)) {
        S = load_state(args.initial_state, v_first, load_index(args.rows, part, 1), head, p.K, p.V);
      }
      for (int64_t t = 0; leaves && t < s->length; ++t) {
        Token token = load_inputs(args, p, *s, t, head);
        if (through) {
          token.v = Vector(static_cast<size_t>(p.K), 0.0);
          step(token, &M);
        }
        token.v = load_row(args.v, s->b, s->begin + t, head);
        step(token, &S);
      }
      store_state(args.S, false, part, head, p.K, p.V, S);
      store_state(args.M, false, part, head, p.K, p.K, M);
      store(args.kind, offset_of(args.kind, part, head), static_cast<double>(kind));
    }
  }
  return Status();
}

// dS from the gradient of the state after the token to that of the state before it.
void reverse_step(const Token& token, double scale, const Vector& d_o, Vector* dS) {
  add_outer(dS, scale, token.q, d_o);
  Vector dv = read_state(*dS, token.k, static_cast<int64_t>(d_o.size()));
  scale_by(&dv, token.beta);
  add_outer(dS, -1.0, token.k, dv);
  scale_by(dS, token.decay);
}

Status run_backward(const BackwardArguments& args, const SummaryProblem& p, void*, void*) {
  const std::vector<Sequence> sequences = host_sequences(args.cu_seqlens, p);
  const bool v_first = args.options.state_v_first != 0, l2norm = args.options.use_qk_l2norm_in_kernel != 0;
  for (int64_t part = 0; part < p.P; ++part) {
    const Sequence* s = row_of_part(args.rows, part, 0, sequences);
    const bool enters = s != nullptr && flag(args.enters, part), through = enters && flag(args.through, part);
    for (int64_t head = 0; head < p.Hv; ++head) {
      const bool affine = through && !is_constant(load(args.forward_kind, offset_of(args.forward_kind, part, head)));
      Vector dS(static_cast<size_t>(p.K * p.V), 0.0);
      if (enters && !through && present(args.dht)) {
        dS = load_state(args.dht, v_first, load_index(args.rows, part, 0), head, p.K, p.V);
      }
      for (int64_t t = enters ? s->length - 1 : -1; t >= 0; --t) {
        Token token = load_inputs(args, p, *s, t, head);
        token.q = load_key(args.q, s->b, s->begin + t, head / p.group, l2norm);
        const Vector d_o =
            present(args.d_o) ? load_row(args.d_o, s->b, s->begin + t, head) : Vector(static_cast<size_t>(p.V), 0.0);
        reverse_step(token, p.scale, d_o, &dS);
      }
      store_state(args.R, false, part, head, p.K, p.V, dS);
      const flash_qla_link_kind kind = s == nullptr ? FLASH_QLA_LINK_NONE
                                       : affine     ? FLASH_QLA_LINK_AFFINE
                                                    : FLASH_QLA_LINK_CONSTANT;
      store(args.kind, offset_of(args.kind, part, head), static_cast<double>(kind));
    }
  }
  return Status();
}

// One (stream, value head) of all links, in fp64.
class Links {
 public:
  Links(const CombineArguments& args, const CombineProblem& p, int64_t stream, int64_t head)
      : args_(args), p_(p), stream_(stream), head_(head) {}

  double kind(int64_t place) const { return load(args_.kind, offset_of(args_.kind, link(place), stream_, head_)); }
  Vector S(int64_t place) const { return matrix(args_.S, place, p_.V); }
  Vector M(int64_t place) const { return matrix(args_.M, place, p_.K); }

 private:
  int64_t link(int64_t place) const {
    return present(args_.order) ? std::clamp<int64_t>(load_index(args_.order, place), 0, p_.L - 1) : place;
  }
  Vector matrix(const Tensor& t, int64_t place, int64_t columns) const {
    Vector x(static_cast<size_t>(p_.K * columns));
    const int64_t first = offset_of(t, link(place), stream_, head_);
    for (int64_t i = 0; i < p_.K; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        x[static_cast<size_t>(i * columns + j)] = load(t, first + i * t.stride[3] + j * t.stride[4]);
      }
    }
    return x;
  }

  const CombineArguments& args_;
  const CombineProblem& p_;
  int64_t stream_, head_;
};

// x + M y, or x + M^T y: x and y [K, columns].
Vector affine(const Vector& x, const Vector& M, bool transposed, const Vector& y, int64_t K) {
  Vector sum = x;
  const int64_t columns = static_cast<int64_t>(x.size()) / K;
  const auto at = [](int64_t i) { return static_cast<size_t>(i); };
  for (int64_t i = 0; i < K; ++i) {
    for (int64_t l = 0; l < K; ++l) {
      const double factor = transposed ? M[at(l * K + i)] : M[at(i * K + l)];
      for (int64_t j = 0; j < columns; ++j) sum[at(i * columns + j)] += factor * y[at(l * columns + j)];
    }
  }
  return sum;
}

void store_matrix(const Tensor& t, int64_t first, const Vector& x, int64_t K) {
  const int64_t columns = static_cast<int64_t>(x.size()) / K;
  for (int64_t i = 0; i < K; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      store(t, first + i * t.stride[t.ndim - 2] + j * t.stride[t.ndim - 1], x[static_cast<size_t>(i * columns + j)]);
    }
  }
}

void combine_state(const CombineArguments& args, const CombineProblem& p, int64_t part, int64_t stream, int64_t head) {
  const Links links(args, p, stream, head);
  const bool backward = args.backward != 0;
  const int64_t place = load_index(args.place, part);
  Vector S(static_cast<size_t>(p.K * p.V), 0.0);
  bool is_zero = true;
  if ((!present(args.wanted) || flag(args.wanted, part)) && is_place(place, p.L, backward)) {
    const LinkChain chain = chain_to(place, p.L, backward, [&](int64_t at) { return links.kind(at); });
    for (int64_t i = 0; i < chain.steps; ++i) {
      const int64_t at = backward ? chain.first - i : chain.first + i;
      if (is_none(links.kind(at))) continue;
      S = is_zero ? links.S(at) : affine(links.S(at), links.M(at), backward, S, p.K);
      is_zero = false;
    }
  }
  store_matrix(args.state, offset_of(args.state, part, stream, head), S, p.K);
}

void compose(const CombineArguments& args, const CombineProblem& p, int64_t stream, int64_t head) {
  const Links links(args, p, stream, head);
  const bool backward = args.backward != 0;
  Vector S(static_cast<size_t>(p.K * p.V), 0.0), M = identity(p.K);
  const Vector no_transition(static_cast<size_t>(p.K * p.K), 0.0);
  flash_qla_link_kind kind = FLASH_QLA_LINK_NONE;
  for (int64_t i = 0; i < p.L; ++i) {
    const int64_t at = backward ? p.L - 1 - i : i;
    if (is_none(links.kind(at))) continue;
    if (is_constant(links.kind(at))) {
      S = links.S(at);
      kind = FLASH_QLA_LINK_CONSTANT;
      continue;
    }
    S = kind == FLASH_QLA_LINK_NONE ? links.S(at) : affine(links.S(at), links.M(at), backward, S, p.K);
    if (kind == FLASH_QLA_LINK_CONSTANT) continue;
    M = backward ? affine(no_transition, M, false, links.M(at), p.K)
                 : affine(no_transition, links.M(at), false, M, p.K);
    kind = FLASH_QLA_LINK_AFFINE;
  }
  store_matrix(args.composed_S, offset_of(args.composed_S, stream, head), S, p.K);
  store_matrix(args.composed_M, offset_of(args.composed_M, stream, head),
               kind == FLASH_QLA_LINK_AFFINE ? M : no_transition, p.K);
  store(args.composed_kind, offset_of(args.composed_kind, stream, head), static_cast<double>(kind));
}

Status run_combine(const CombineArguments& args, const CombineProblem& p, void*, void*) {
  for (int64_t stream = 0; stream < p.C; ++stream) {
    for (int64_t head = 0; head < p.Hv; ++head) {
      for (int64_t part = 0; part < p.P; ++part) combine_state(args, p, part, stream, head);
      if (present(args.composed_S)) compose(args, p, stream, head);
    }
  }
  return Status();
}

template <class Arguments, class Problem>
std::string accept(const Arguments&, const Problem&) {
  return {};
}
template <class Arguments, class Problem>
size_t no_workspace(const Arguments&, const Problem&) {
  return 0;
}

}  // namespace
}  // namespace reference

const ChunkSummaryPath kReferenceChunkSummary = {"reference",       FLASH_QLA_CPU,           true,
                                                 reference::accept, reference::no_workspace, reference::run_summary};
const ChunkSummaryBackwardPath kReferenceChunkSummaryBackward = {
    "reference", FLASH_QLA_CPU, true, reference::accept, reference::no_workspace, reference::run_backward};
const SummaryCombinePath kReferenceSummaryCombine = {
    "reference", FLASH_QLA_CPU, true, reference::accept, reference::no_workspace, reference::run_combine};

}  // namespace flash_qla
