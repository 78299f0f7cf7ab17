// Forward links: the state pass of chunk_forward alone, over the last sequence of each part. A task is one (part, value
// head). Where M is wanted, it is K more columns of the state, which start from the identity and whose values are zero:
// so they share A.
#include <algorithm>
#include <vector>

#include "cpu/links.h"
#include "cpu/paths.h"
#include "cpu/scratch.h"
#include "cpu/threads.h"

namespace flash_qla {
namespace cpu {
namespace {

using Arguments = flash_qla_chunk_summary_arguments;

// One thread's memory, for V columns or V + K.
template <class T>
struct Scratch {
  Chunk<T> chunk;
  T* values;  // [64, V]
  T* S;       // [K, V + K]

  Scratch(Arena* arena, const Problem& p) {
    take_chunk(arena, p.K, p.V + p.K, &chunk);
    chunk.KK = arena->take<T>(64 * 64);
    chunk.A = arena->take<T>(64 * 64);
    chunk.v_new = arena->take<T>(64 * (p.V + p.K));
    values = arena->take<T>(64 * p.V);
    S = arena->take<T>(p.K * (p.V + p.K));
  }
};

template <class T>
class Summary {
 public:
  Summary(const Arguments& args, const SummaryProblem& p)
      : args_(args), p_(p), gates_(args, false), sequences_(host_sequences(args.cu_seqlens, p)) {}

  void run(void* workspace) {
    Arena arena(workspace);
    std::vector<Scratch<T>> scratch;
    const int64_t tasks = p_.P * p_.Hv, threads = thread_count(args_.options.num_threads, tasks);
    for (int64_t i = 0; i < threads; ++i) scratch.emplace_back(&arena, p_);
    // 6 K V operations a token for S and 6 K^2 for M, and those of A.
    const double operations = 12.0 * static_cast<double>(p_.B * p_.T * p_.Hv * p_.K) * static_cast<double>(p_.V + p_.K);
    parallel_for(tasks, worthwhile_threads(threads, operations), [&](int64_t task, int64_t worker) {
      run_head(task / p_.Hv, task % p_.Hv, &scratch[static_cast<size_t>(worker)]);
    });
  }

 private:
  void run_head(int64_t part, int64_t head, Scratch<T>* scratch) {
    const Sequence* s = row_of_part(args_.rows, part, 1, sequences_);
    const flash_qla_link_kind kind = s == nullptr ? FLASH_QLA_LINK_NONE : make_link(part, head, *s, scratch);
    store(args_.kind, offset_of(args_.kind, part, head), static_cast<double>(kind));
    if (kind != FLASH_QLA_LINK_AFFINE) zero_matrix(args_.M, part, head);
    // Nobody reads the link of a part that no sequence leaves.
    if (kind == FLASH_QLA_LINK_NONE || !flag(args_.leaves, part)) zero_matrix(args_.S, part, head);
  }

  // S, and M where the kind is affine.
  flash_qla_link_kind make_link(int64_t part, int64_t head, const Sequence& s, Scratch<T>* scratch) {
    if (!flag(args_.leaves, part)) return FLASH_QLA_LINK_CONSTANT;
    const LinkChunks<T, Arguments> chunks(args_, gates_, p_, s, head);
    const bool through = flag(args_.through, part);
    const double threshold = decay_threshold(args_.options);
    int64_t window = chunks.count() + 1;
    if (may_forget(args_.options, p_.dtype)) {
      window = chunks.last_window(threshold, scratch->chunk.k);
      // One decision for both directions: the gradient, too, must be forgotten.
      if (through && window <= chunks.count() && chunks.first_window(threshold, scratch->chunk.k) > chunks.count()) {
        window = chunks.count() + 1;
      }
    }
    const bool forgets = window <= chunks.count(), affine = through && !forgets;
    const int64_t columns = affine ? p_.V + p_.K : p_.V;
    scratch->chunk.V = columns;
    std::fill_n(scratch->S, p_.K * columns, T(0));
    if (affine) {
      for (int64_t i = 0; i < p_.K; ++i) scratch->S[i * columns + p_.V + i] = T(1);
    }
    if (!through && !forgets && present(args_.initial_state)) {
      const int64_t row = load_index(args_.rows, part, 1);
      const View state = state_view(args_.initial_state, args_.options.state_v_first != 0, row, head);
      kernels<T>().load(state, p_.K, p_.V, scratch->S);
    }
    for (int64_t i = forgets ? chunks.count() - window : 0; i < chunks.count(); ++i) {
      step(chunks, s, i, head, scratch);
    }
    store_columns(args_.S, part, head, scratch->S, columns, p_.V);
    if (affine) store_columns(args_.M, part, head, scratch->S + p_.V, columns, p_.K);
    return affine ? FLASH_QLA_LINK_AFFINE : FLASH_QLA_LINK_CONSTANT;
  }

  void step(const LinkChunks<T, Arguments>& chunks, const Sequence& s, int64_t i, int64_t head, Scratch<T>* scratch) {
    Chunk<T>& chunk = scratch->chunk;
    chunks.prepare(i, &chunk);
    const View values = token_rows(args_.v, s.b, chunks.token(i), head);
    if (chunk.V == p_.V) {
      kernels<T>().load(values, chunk.n, p_.V, chunk.v);
    } else {
      kernels<T>().load(values, chunk.n, p_.V, scratch->values);
      for (int64_t t = 0; t < chunk.n; ++t) {
        std::copy_n(scratch->values + t * p_.V, p_.V, chunk.v + t * chunk.V);
        std::fill_n(chunk.v + t * chunk.V + p_.V, p_.K, T(0));
      }
    }
    kernels<T>().correct(chunk, scratch->S);
    kernels<T>().advance(chunk, chunk.n, scratch->S, scratch->S);
  }

  // `count` columns of a [K, stride] matrix.
  void store_columns(const Tensor& t, int64_t part, int64_t head, const T* from, int64_t stride, int64_t count) const {
    for (int64_t i = 0; i < p_.K; ++i) {
      kernels<T>().store(from + i * stride, 1, count,
                         view_at(t, offset_of(t, part, head, i), t.stride[2], t.stride[3]));
    }
  }

  const Arguments& args_;
  const SummaryProblem& p_;
  const GateArguments gates_;
  const std::vector<Sequence> sequences_;
};

std::string accept(const Arguments&, const SummaryProblem&) { return {}; }

template <class T>
size_t size_for(const Arguments& args, const SummaryProblem& p) {
  Arena of_thread(nullptr);
  Scratch<T>(&of_thread, p);
  return of_thread.used() * static_cast<size_t>(thread_count(args.options.num_threads, p.P * p.Hv));
}

size_t workspace_size(const Arguments& args, const SummaryProblem& p) {
  return computes_in_double(p) ? size_for<double>(args, p) : size_for<float>(args, p);
}

Status run(const Arguments& args, const SummaryProblem& p, void* workspace, void*) {
  computes_in_double(p) ? Summary<double>(args, p).run(workspace) : Summary<float>(args, p).run(workspace);
  return Status();
}

}  // namespace
}  // namespace cpu

const ChunkSummaryPath kCpuChunkSummary = {"cpu", FLASH_QLA_CPU, false, cpu::accept, cpu::workspace_size, cpu::run};

}  // namespace flash_qla
