// Draft tokens in chains and trees, from states that are only read. One task is one (sequence, value head).
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/verify.h"
#include "cpu/gates.h"
#include "cpu/kernels.h"
#include "cpu/paths.h"
#include "cpu/scratch.h"
#include "cpu/tensors.h"
#include "cpu/threads.h"

namespace flash_qla {
namespace cpu {
namespace {

using Arguments = flash_qla_verify_arguments;

// What one thread works with. `states`: those after each token of a tree, or the one that a chain moves on, [V, K]
// each.
template <class T>
struct Scratch {
  Steps<T> steps;
  T *q, *k, *v, *o, *states;

  Scratch(Arena* arena, const Arguments& args, const Problem& p) {
    steps.n = 1;
    steps.K = p.K;
    steps.V = p.V;
    steps.scale = static_cast<T>(p.scale);
    q = arena->take<T>(FLASH_QLA_MAX_DRAFT_TOKENS * p.K);
    k = arena->take<T>(FLASH_QLA_MAX_DRAFT_TOKENS * p.K);
    v = arena->take<T>(FLASH_QLA_MAX_DRAFT_TOKENS * p.V);
    o = arena->take<T>(FLASH_QLA_MAX_DRAFT_TOKENS * p.V);
    states = arena->take<T>((present(args.parents) ? p.T : 1) * p.K * p.V);
  }
};

template <class T>
class Verify {
 public:
  Verify(const Arguments& args, const Problem& p) : args_(args), p_(p), gates_(args, false) {}

  void run(void* workspace) {
    Arena arena(workspace);
    std::vector<Scratch<T>> scratch;
    const int64_t tasks = p_.N * p_.Hv, threads = thread_count(args_.options.num_threads, tasks);
    for (int64_t i = 0; i < threads; ++i) scratch.emplace_back(&arena, args_, p_);
    // 7 K V operations a token; reading a state takes as long as about as many, and so does writing one for each token.
    const double operations =
        7.0 * static_cast<double>((2 * p_.T + 1) * p_.N * p_.Hv * p_.K) * static_cast<double>(p_.V);
    parallel_for(tasks, worthwhile_threads(threads, operations), [&](int64_t task, int64_t worker) {
      run_head(task / p_.Hv, task % p_.Hv, &scratch[static_cast<size_t>(worker)]);
    });
  }

 private:
  void run_head(int64_t n, int64_t head, Scratch<T>* scratch) {
    const Kernels<T>& kernel = kernels<T>();
    const int64_t slot = verify_slot(args_, n), row = verify_row(args_, n);
    if (slot < 0) return zero_head(args_.o, Sequence{n, 0, p_.T, 0}, head);
    const bool v_first = args_.options.state_v_first != 0, tree = present(args_.parents);
    load_tokens(n, head, scratch);
    const HeadGates gates(gates_, head);
    const int64_t size = p_.K * p_.V;
    for (int64_t t = 0; t < p_.T; ++t) {
      T* state = scratch->states + (tree ? t * size : 0);
      const int64_t parent = verify_parent(args_, n, t);
      if (parent < 0) {
        kernel.load(transposed(state_view(args_.state_pool, v_first, slot, head)), p_.V, p_.K, state);
      } else if (tree) {
        std::copy_n(scratch->states + parent * size, size, state);
      }
      Steps<T>& steps = scratch->steps;
      steps.decay[0] = static_cast<T>(std::exp(gates.log_decay(n, t)));
      steps.beta[0] = static_cast<T>(gates.beta(n, t));
      steps.q = scratch->q + t * p_.K;
      steps.k = scratch->k + t * p_.K;
      steps.v = scratch->v + t * p_.V;
      steps.o = scratch->o + t * p_.V;
      steps.S = state;
      kernel.recurrent(steps);
      if (row >= 0) {
        const Tensor after = states_after(args_.states_out, t);
        kernel.store(state, p_.V, p_.K, transposed(state_view(after, v_first, row, head)));
      }
    }
    kernel.store(scratch->o, p_.T, p_.V, token_rows(args_.o, n, 0, head));
  }

  void load_tokens(int64_t n, int64_t head, Scratch<T>* scratch) const {
    const Kernels<T>& kernel = kernels<T>();
    const int64_t key_head = head / p_.group;
    kernel.load(token_rows(args_.q, n, 0, key_head), p_.T, p_.K, scratch->q);
    kernel.load(token_rows(args_.k, n, 0, key_head), p_.T, p_.K, scratch->k);
    kernel.load(token_rows(args_.v, n, 0, head), p_.T, p_.V, scratch->v);
    if (args_.options.use_qk_l2norm_in_kernel) {
      kernel.l2norm(scratch->q, p_.T, p_.K, p_.dtype);
      kernel.l2norm(scratch->k, p_.T, p_.K, p_.dtype);
    }
  }

  const Arguments& args_;
  const Problem& p_;
  const GateArguments gates_;
};

std::string accept(const Arguments&, const Problem&) { return {}; }

template <class T>
size_t size_for(const Arguments& args, const Problem& p) {
  Arena of_thread(nullptr);
  Scratch<T> scratch(&of_thread, args, p);
  return of_thread.used() * static_cast<size_t>(thread_count(args.options.num_threads, p.N * p.Hv));
}

size_t workspace_size(const Arguments& args, const Problem& p) {
  return computes_in_double(p) ? size_for<double>(args, p) : size_for<float>(args, p);
}

Status run(const Arguments& args, const Problem& p, void* workspace, void*) {
  computes_in_double(p) ? Verify<double>(args, p).run(workspace) : Verify<float>(args, p).run(workspace);
  return Status();
}

}  // namespace
}  // namespace cpu

const VerifyPath kCpuVerify = {"cpu", FLASH_QLA_CPU, false, cpu::accept, cpu::workspace_size, cpu::run};

}  // namespace flash_qla
