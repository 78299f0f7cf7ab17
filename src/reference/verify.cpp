// Draft tokens in chains and trees: the token recurrence along the path of each (docs/math.md, "Token recurrence").
#include "core/verify.h"
#include "core/registry.h"
#include "reference/paths.h"
#include "reference/tokens.h"

namespace flash_qla {
namespace reference {
namespace {

using Arguments = flash_qla_verify_arguments;

void run_sequence(const Arguments& args, const Problem& p, int64_t n, int64_t head) {
  const int64_t slot = verify_slot(args, n), row = verify_row(args, n);
  if (slot < 0) return;
  const bool v_first = args.options.state_v_first != 0;
  const Vector start = load_state(args.state_pool, v_first, slot, head, p.K, p.V);
  const Sequence s{n, 0, p.T, 0};
  std::vector<Vector> states;  // after each token
  for (int64_t t = 0; t < p.T; ++t) {
    const int64_t parent = verify_parent(args, n, t);
    Vector S = parent < 0 ? start : states[static_cast<size_t>(parent)];
    const Token token = load_token(args, false, p, s, t, head);
    step(token, &S);
    const Vector o = read_state(S, token.q, p.V);
    for (int64_t j = 0; j < p.V; ++j) {
      store(args.o, offset_of(args.o, n, t, head, j), p.scale * o[static_cast<size_t>(j)]);
    }
    if (row >= 0) store_state(states_after(args.states_out, t), v_first, row, head, p.K, p.V, S);
    states.push_back(std::move(S));
  }
}

Status run(const Arguments& args, const Problem& p, void*, void*) {
  fill_zero(args.o);
  for (int64_t n = 0; n < p.N; ++n) {
    for (int64_t head = 0; head < p.Hv; ++head) run_sequence(args, p, n, head);
  }
  return Status();
}

std::string accept(const Arguments&, const Problem&) { return {}; }
size_t no_workspace(const Arguments&, const Problem&) { return 0; }

}  // namespace
}  // namespace reference

const VerifyPath kReferenceVerify = {"reference",       FLASH_QLA_CPU,           true,
                                     reference::accept, reference::no_workspace, reference::run};

}  // namespace flash_qla
