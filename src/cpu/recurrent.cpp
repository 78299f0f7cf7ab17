// Token-by-token forward: decode, draft tokens, short steps. One task is one (sequence, value head).
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/host_tensor.h"
#include "cpu/gates.h"
#include "cpu/kernels.h"
#include "cpu/paths.h"
#include "cpu/scratch.h"
#include "cpu/states.h"
#include "cpu/tensors.h"
#include "cpu/threads.h"

namespace flash_qla {
namespace cpu {
namespace {

using Arguments = flash_qla_forward_arguments;

// Tokens that go through a row of the state at once: as many as Steps holds.
constexpr int64_t kMaxSteps = 64;

template <class T>
Steps<T> take_steps(Arena* arena, const Problem& p) {
  Steps<T> steps;
  steps.K = p.K;
  steps.V = p.V;
  steps.scale = static_cast<T>(p.scale);
  steps.q = arena->take<T>(kMaxSteps * p.K);
  steps.k = arena->take<T>(kMaxSteps * p.K);
  steps.v = arena->take<T>(kMaxSteps * p.V);
  steps.o = arena->take<T>(kMaxSteps * p.V);
  steps.S = arena->take<T>(p.K * p.V);
  return steps;
}

template <class T>
class Recurrent {
 public:
  Recurrent(const Arguments& args, const Problem& p)
      : args_(args), p_(p), gates_(args, false), sequences_(host_sequences(args.cu_seqlens, p)) {}

  void run(void* workspace) {
    zero_outside(args_.o, sequences_, p_);
    Arena arena(workspace);
    std::vector<Steps<T>> scratch;
    const int64_t tasks = p_.N * p_.Hv, threads = thread_count(args_.options.num_threads, tasks);
    for (int64_t i = 0; i < threads; ++i) scratch.push_back(take_steps<T>(&arena, p_));
    const std::vector<int64_t> order = longest_first(sequences_);
    // 7 K V operations a token; moving the state in and out takes as long as about as many more for each sequence.
    const double operations =
        7.0 * static_cast<double>((p_.B * p_.T + p_.N) * p_.Hv * p_.K) * static_cast<double>(p_.V);
    parallel_for(tasks, worthwhile_threads(threads, operations), [&](int64_t task, int64_t worker) {
      run_head(order[static_cast<size_t>(task / p_.Hv)], task % p_.Hv, &scratch[static_cast<size_t>(worker)]);
    });
  }

 private:
  void run_head(int64_t n, int64_t head, Steps<T>* steps) {
    const Sequence& s = sequences_[static_cast<size_t>(n)];
    const StateIo io(args_, n);
    if (io.skipped()) return zero_head(args_.o, s, head);
    io.read(p_, head, true, steps->S);
    const HeadGates gates(gates_, head);
    const int64_t most = io.per_token() ? 1 : kMaxSteps;
    for (int64_t done = 0; done < s.length; done += steps->n) {
      steps->n = std::min(most, s.length - done);
      run_steps(s, s.begin + done, head, gates, steps);
      if (io.per_token()) io.write_token(p_, done, head, true, steps->S);
    }
    io.write_final(p_, head, true, steps->S);
  }

  void run_steps(const Sequence& s, int64_t token, int64_t head, const HeadGates& gates, Steps<T>* steps) {
    const Kernels<T>& kernel = kernels<T>();
    const int64_t key_head = head / p_.group;
    kernel.load(token_rows(args_.q, s.b, token, key_head), steps->n, p_.K, steps->q);
    kernel.load(token_rows(args_.k, s.b, token, key_head), steps->n, p_.K, steps->k);
    kernel.load(token_rows(args_.v, s.b, token, head), steps->n, p_.V, steps->v);
    if (args_.options.use_qk_l2norm_in_kernel) {
      kernel.l2norm(steps->q, steps->n, p_.K, p_.dtype);
      kernel.l2norm(steps->k, steps->n, p_.K, p_.dtype);
    }
    for (int64_t i = 0; i < steps->n; ++i) {
      steps->decay[i] = static_cast<T>(std::exp(gates.log_decay(s.b, token + i)));
      steps->beta[i] = static_cast<T>(gates.beta(s.b, token + i));
    }
    kernel.recurrent(*steps);
    kernel.store(steps->o, steps->n, p_.V, token_rows(args_.o, s.b, token, head));
  }

  const Arguments& args_;
  const Problem& p_;
  const GateArguments gates_;
  const std::vector<Sequence> sequences_;
};

std::string accept(const Arguments&, const Problem&) { return {}; }

template <class T>
size_t size_for(const Arguments& args, const Problem& p) {
  Arena of_thread(nullptr);
  take_steps<T>(&of_thread, p);
  return of_thread.used() * static_cast<size_t>(thread_count(args.options.num_threads, p.N * p.Hv));
}

size_t workspace_size(const Arguments& args, const Problem& p) {
  return computes_in_double(p) ? size_for<double>(args, p) : size_for<float>(args, p);
}

Status run(const Arguments& args, const Problem& p, void* workspace, void*) {
  computes_in_double(p) ? Recurrent<double>(args, p).run(workspace) : Recurrent<float>(args, p).run(workspace);
  return Status();
}

}  // namespace
}  // namespace cpu

const ForwardPath kCpuRecurrent = {"cpu", FLASH_QLA_CPU, false, cpu::accept, cpu::workspace_size, cpu::run};

}  // namespace flash_qla
