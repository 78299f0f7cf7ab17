// Links to what enters each part. A task is one (part, stream, value head), or one (stream, value head) of the composed
// link.
#include "core/link_chain.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/host_tensor.h"
#include "cpu/links.h"
#include "cpu/paths.h"
#include "cpu/scratch.h"
#include "cpu/threads.h"

namespace flash_qla {
namespace cpu {
namespace {

using Arguments = flash_qla_summary_combine_arguments;

template <class T>
struct Scratch {
  T *M, *composed, *next_M;  // [K, K]
  T *S, *next_S;             // [K, V]

  Scratch(Arena* arena, const CombineProblem& p) {
    M = arena->take<T>(p.K * p.K);
    composed = arena->take<T>(p.K * p.K);
    next_M = arena->take<T>(p.K * p.K);
    S = arena->take<T>(p.K * p.V);
    next_S = arena->take<T>(p.K * p.V);
  }
};

template <class T>
class Combine {
 public:
  Combine(const Arguments& args, const CombineProblem& p)
      : args_(args), p_(p), backward_(args.backward != 0), composes_(present(args.composed_S)) {}

  int64_t tasks() const { return (p_.P + (composes_ ? 1 : 0)) * p_.C * p_.Hv; }

  void run(void* workspace) {
    Arena arena(workspace);
    std::vector<Scratch<T>> scratch;
    const int64_t threads = thread_count(args_.options.num_threads, tasks());
    for (int64_t i = 0; i < threads; ++i) scratch.emplace_back(&arena, p_);
    const double operations = 2.0 * static_cast<double>(tasks() * p_.L * p_.K * p_.K) * static_cast<double>(p_.V);
    parallel_for(tasks(), worthwhile_threads(threads, operations), [&](int64_t task, int64_t worker) {
      const int64_t part = task / (p_.C * p_.Hv), stream = task / p_.Hv % p_.C, head = task % p_.Hv;
      Scratch<T>* mine = &scratch[static_cast<size_t>(worker)];
      part < p_.P ? state_of(part, stream, head, mine) : compose(stream, head, mine);
    });
  }

 private:
  // Row of the tensors with the link at a place of the stream.
  int64_t link_at(int64_t place) const {
    return present(args_.order) ? std::clamp<int64_t>(load_index(args_.order, place), 0, p_.L - 1) : place;
  }

  View view(const Tensor& t, int64_t link, int64_t stream, int64_t head) const {
    return view_at(t, offset_of(t, link, stream, head), t.stride[3], t.stride[4]);
  }

  double kind_at(int64_t place, int64_t stream, int64_t head) const {
    return load(args_.kind, offset_of(args_.kind, link_at(place), stream, head));
  }

  void load_state(int64_t place, int64_t stream, int64_t head, T* S) const {
    kernels<T>().load(view(args_.S, link_at(place), stream, head), p_.K, p_.V, S);
  }
  void load_transition(int64_t place, int64_t stream, int64_t head, T* M) const {
    kernels<T>().load(view(args_.M, link_at(place), stream, head), p_.K, p_.K, M);
  }

  // S goes through the link at a place. `is_zero`: S is nothing yet.
  void apply(int64_t place, int64_t stream, int64_t head, bool is_zero, Scratch<T>* scratch) const {
    load_state(place, stream, head, scratch->next_S);
    if (!is_zero) {
      load_transition(place, stream, head, scratch->M);
      kernels<T>().add_product(scratch->M, backward_, scratch->S, p_.K, p_.V, scratch->next_S);
    }
    std::swap(scratch->S, scratch->next_S);
  }

  void state_of(int64_t part, int64_t stream, int64_t head, Scratch<T>* scratch) const {
    const int64_t place = load_index(args_.place, part), step = backward_ ? -1 : 1;
    const bool wanted = !present(args_.wanted) || flag(args_.wanted, part);
    bool is_zero = true;
    if (wanted && is_place(place, p_.L, backward_)) {
      const auto kind_of = [&](int64_t at) { return kind_at(at, stream, head); };
      const LinkChain chain = chain_to(place, p_.L, backward_, kind_of);
      for (int64_t i = 0; i < chain.steps; ++i) {
        const int64_t at = chain.first + i * step;
        const double kind = kind_of(at);
        if (is_none(kind)) continue;
        apply(at, stream, head, is_zero, scratch);
        is_zero = false;
      }
    }
    if (is_zero) std::fill_n(scratch->S, p_.K * p_.V, T(0));
    kernels<T>().store(scratch->S, p_.K, p_.V, view(args_.state, part, stream, head));
  }

  // All L links as one. Its M, too, is the forward's: products of the forward ones in the stream's order.
  void compose(int64_t stream, int64_t head, Scratch<T>* scratch) const {
    flash_qla_link_kind kind = FLASH_QLA_LINK_NONE;
    for (int64_t i = 0; i < p_.L; ++i) {
      const int64_t at = backward_ ? p_.L - 1 - i : i;
      const double next = kind_at(at, stream, head);
      if (is_none(next)) continue;
      const bool restarts = is_constant(next);
      if (!restarts && kind != FLASH_QLA_LINK_CONSTANT) compose_transition(at, stream, head, kind, scratch);
      apply(at, stream, head, restarts || kind == FLASH_QLA_LINK_NONE, scratch);
      if (restarts) {
        kind = FLASH_QLA_LINK_CONSTANT;
      } else if (kind == FLASH_QLA_LINK_NONE) {
        kind = FLASH_QLA_LINK_AFFINE;
      }
    }
    if (kind == FLASH_QLA_LINK_NONE) std::fill_n(scratch->S, p_.K * p_.V, T(0));
    if (kind != FLASH_QLA_LINK_AFFINE) std::fill_n(scratch->composed, p_.K * p_.K, T(0));
    const auto whole = [&](const Tensor& t) {
      return view_at(t, offset_of(t, stream, head), t.stride[2], t.stride[3]);
    };
    kernels<T>().store(scratch->S, p_.K, p_.V, whole(args_.composed_S));
    kernels<T>().store(scratch->composed, p_.K, p_.K, whole(args_.composed_M));
    store(args_.composed_kind, offset_of(args_.composed_kind, stream, head), static_cast<double>(kind));
  }

  void compose_transition(int64_t place, int64_t stream, int64_t head, flash_qla_link_kind kind,
                          Scratch<T>* scratch) const {
    if (kind == FLASH_QLA_LINK_NONE) return load_transition(place, stream, head, scratch->composed);
    load_transition(place, stream, head, scratch->M);
    std::fill_n(scratch->next_M, p_.K * p_.K, T(0));
    const T *later = backward_ ? scratch->composed : scratch->M, *earlier = backward_ ? scratch->M : scratch->composed;
    kernels<T>().add_product(later, false, earlier, p_.K, p_.K, scratch->next_M);
    std::swap(scratch->composed, scratch->next_M);
  }

  const Arguments& args_;
  const CombineProblem& p_;
  const bool backward_, composes_;
};

std::string accept(const Arguments&, const CombineProblem&) { return {}; }

template <class T>
size_t size_for(const Arguments& args, const CombineProblem& p) {
  Arena of_thread(nullptr);
  Scratch<T>(&of_thread, p);
  return of_thread.used() * static_cast<size_t>(thread_count(args.options.num_threads, Combine<T>(args, p).tasks()));
}

size_t workspace_size(const Arguments& args, const CombineProblem& p) {
  return p.dtype == DType::kFloat64 ? size_for<double>(args, p) : size_for<float>(args, p);
}

Status run(const Arguments& args, const CombineProblem& p, void* workspace, void*) {
  p.dtype == DType::kFloat64 ? Combine<double>(args, p).run(workspace) : Combine<float>(args, p).run(workspace);
  return Status();
}

}  // namespace
}  // namespace cpu

const SummaryCombinePath kCpuSummaryCombine = {"cpu", FLASH_QLA_CPU, false, cpu::accept, cpu::workspace_size, cpu::run};

}  // namespace flash_qla
