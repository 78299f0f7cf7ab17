// Forward of the reference: docs/math.md, "Token recurrence".
#include "core/host_tensor.h"
#include "core/registry.h"
#include "reference/paths.h"
#include "reference/tokens.h"

namespace flash_qla {
namespace reference {
namespace {

using Arguments = flash_qla_forward_arguments;

// Where a sequence's state comes from and goes to.
struct StateIo {
  bool skipped = false;    // the row reads a null slot: zero output, nothing written
  int64_t read_slot = -1;  // -1: start from zero (or from initial_state)
};

StateIo plan_state(const Arguments& args, int64_t n) {
  StateIo io;
  if (!present(args.state_pool)) return io;
  if (present(args.has_initial_state) && load(args.has_initial_state, offset_of(args.has_initial_state, n)) == 0.0) {
    return io;
  }
  int64_t column = 0;
  if (present(args.num_accepted_tokens)) {
    column =
        std::clamp<int64_t>(load_index(args.num_accepted_tokens, n) - 1, 0, args.initial_state_indices.shape[1] - 1);
  }
  io.read_slot =
      slot_or_skip(load_index(args.initial_state_indices, n, column), args.null_index, args.state_pool.shape[0]);
  io.skipped = io.read_slot < 0;
  return io;
}

void store_to_slot(const Arguments& args, const Problem& p, int64_t index, int64_t head, const Vector& S) {
  const int64_t slot = slot_or_skip(index, args.null_index, args.state_pool.shape[0]);
  if (slot >= 0) store_state(args.state_pool, args.options.state_v_first, slot, head, p.K, p.V, S);
}

// Row `t` of A = (I + strict_lower(diag(beta) K K^T))^-1 by substitution: A_t = e_t - beta_t sum_j <k_t, k_j> A_j.
void store_A_row(const Arguments& args, const Sequence& s, int64_t head, int64_t t, const Token& token,
                 std::vector<Vector>* keys, std::vector<Vector>* rows) {
  if (t % kChunkSize == 0) {
    keys->clear();
    rows->clear();
  }
  Vector row(kChunkSize, 0.0);
  row[rows->size()] = 1.0;
  for (size_t j = 0; j < rows->size(); ++j) {
    const double factor = token.beta * dot(token.k, (*keys)[j]);
    for (size_t c = 0; c < row.size(); ++c) row[c] -= factor * (*rows)[j][c];
  }
  for (int64_t c = 0; c < kChunkSize; ++c) {
    store(args.A, offset_of(args.A, s.b, s.begin + t, head, c), row[static_cast<size_t>(c)]);
  }
  keys->push_back(token.k);
  rows->push_back(row);
}

void run_sequence(const Arguments& args, const Problem& p, const Sequence& s, int64_t n, int64_t head) {
  const bool v_first = args.options.state_v_first != 0;
  const StateIo io = plan_state(args, n);
  if (io.skipped) return;
  Vector S =
      load_boundary_state(args.initial_state, args.entering_rows, args.entering_state, v_first, n, head, p.K, p.V);
  if (io.read_slot >= 0) S = load_state(args.state_pool, v_first, io.read_slot, head, p.K, p.V);

  const Tensor& final_indices =
      present(args.final_state_indices) ? args.final_state_indices : args.initial_state_indices;
  const bool state_per_token = present(args.state_pool) && final_indices.ndim == 2;
  double cumsum = 0.0;
  std::vector<Vector> chunk_keys, A_rows;
  for (int64_t t = 0; t < s.length; ++t) {
    if (present(args.h) && t % kChunkSize == 0 && s.first_chunk + t / kChunkSize < args.h.shape[0]) {
      store_state(args.h, v_first, s.first_chunk + t / kChunkSize, head, p.K, p.V, S);
    }
    const Token token = load_token(args, false, p, s, t, head);
    if (present(args.g_cumsum)) {
      cumsum = (t % kChunkSize == 0 ? 0.0 : cumsum) + clamp_log_decay(log_decay(args, false, s, t, head));
      store(args.g_cumsum, offset_of(args.g_cumsum, s.b, s.begin + t, head), cumsum);
    }
    if (present(args.A)) store_A_row(args, s, head, t, token, &chunk_keys, &A_rows);
    step(token, &S);
    const Vector o = read_state(S, token.q, p.V);
    for (int64_t j = 0; j < p.V; ++j) {
      store(args.o, offset_of(args.o, s.b, s.begin + t, head, j), p.scale * o[static_cast<size_t>(j)]);
    }

    if (state_per_token) store_to_slot(args, p, load_index(final_indices, n, t), head, S);
    if (args.checkpoint_every > 0 && (t + 1) % args.checkpoint_every == 0) {
      const int64_t row = load_index(args.checkpoint_cu_starts, n) + (t + 1) / args.checkpoint_every - 1;
      if (row >= 0 && row < args.checkpoints.shape[0]) {
        store_state(args.checkpoints, v_first, row, head, p.K, p.V, S);
      }
    }
    // The state after the tokens before a position belongs to the sequence of the token just before it.
    for (int64_t m = 0; present(args.checkpoint_offsets) && m < args.checkpoint_offsets.shape[0]; ++m) {
      if (load_index(args.checkpoint_offsets, m) == s.b * p.T + s.begin + t + 1) {
        store_to_slot(args, p, load_index(args.checkpoint_indices, m), head, S);
      }
    }
  }
  if (present(args.final_state)) store_state(args.final_state, v_first, n, head, p.K, p.V, S);
  if (present(args.state_pool) && !state_per_token) store_to_slot(args, p, load_index(final_indices, n), head, S);
}

Status run(const Arguments& args, const Problem& p, void*, void*) {
  for (const Tensor* t : {&args.o, &args.g_cumsum, &args.A, &args.h}) fill_zero(*t);
  const std::vector<Sequence> sequences = host_sequences(args.cu_seqlens, p);
  for (int64_t n = 0; n < p.N; ++n) {
    for (int64_t head = 0; head < p.Hv; ++head) run_sequence(args, p, sequences[static_cast<size_t>(n)], n, head);
  }
  return Status();
}

std::string accept(const Arguments&, const Problem&) { return {}; }
size_t no_workspace(const Arguments&, const Problem&) { return 0; }

}  // namespace
}  // namespace reference

const ForwardPath kReferenceChunkForward = {"reference",       FLASH_QLA_CPU,           true,
                                            reference::accept, reference::no_workspace, reference::run};
const ForwardPath kReferenceRecurrent = kReferenceChunkForward;

}  // namespace flash_qla
