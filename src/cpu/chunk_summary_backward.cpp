// Backward links: the gradient of the state alone, from right to left, over the first sequence of each part. A task is
// one (part, value head).
#include <algorithm>
#include <vector>

#include "cpu/links.h"
#include "cpu/paths.h"
#include "cpu/scratch.h"
#include "cpu/threads.h"

namespace flash_qla {
namespace cpu {
namespace {

using Arguments = flash_qla_chunk_summary_backward_arguments;

template <class T>
struct Scratch {
  Chunk<T> chunk;
  T* d_o;  // [64, V]
  T* dS;   // [K, V]

  Scratch(Arena* arena, const Problem& p) {
    take_chunk(arena, p.K, p.V, &chunk);
    chunk.KK = arena->take<T>(64 * 64);
    chunk.A = arena->take<T>(64 * 64);
    chunk.v_new = arena->take<T>(64 * p.V);
    d_o = arena->take<T>(64 * p.V);
    dS = arena->take<T>(p.K * p.V);
  }
};

template <class T>
class BackwardSummary {
 public:
  BackwardSummary(const Arguments& args, const SummaryProblem& p)
      : args_(args), p_(p), gates_(args, false), sequences_(host_sequences(args.cu_seqlens, p)) {}

  void run(void* workspace) {
    Arena arena(workspace);
    std::vector<Scratch<T>> scratch;
    const int64_t tasks = p_.P * p_.Hv, threads = thread_count(args_.options.num_threads, tasks);
    for (int64_t i = 0; i < threads; ++i) scratch.emplace_back(&arena, p_);
    // 8 products with K V elements a token, and those of the chunk's own.
    const double operations = 20.0 * static_cast<double>(p_.B * p_.T * p_.Hv * p_.K) * static_cast<double>(p_.V);
    parallel_for(tasks, worthwhile_threads(threads, operations), [&](int64_t task, int64_t worker) {
      run_head(task / p_.Hv, task % p_.Hv, &scratch[static_cast<size_t>(worker)]);
    });
  }

 private:
  void run_head(int64_t part, int64_t head, Scratch<T>* scratch) {
    const Sequence* s = row_of_part(args_.rows, part, 0, sequences_);
    const flash_qla_link_kind kind = s == nullptr ? FLASH_QLA_LINK_NONE : make_link(part, head, *s, scratch);
    store(args_.kind, offset_of(args_.kind, part, head), static_cast<double>(kind));
    // Nobody reads the link of a part that no sequence enters.
    if (kind == FLASH_QLA_LINK_NONE || !flag(args_.enters, part)) zero_matrix(args_.R, part, head);
  }

  flash_qla_link_kind make_link(int64_t part, int64_t head, const Sequence& s, Scratch<T>* scratch) {
    if (!flag(args_.enters, part)) return FLASH_QLA_LINK_CONSTANT;
    const LinkChunks<T, Arguments> chunks(args_, gates_, p_, s, head);
    const bool through = flag(args_.through, part);
    const bool constant = !through || is_constant(load(args_.forward_kind, offset_of(args_.forward_kind, part, head)));
    int64_t window = chunks.count() + 1;
    if (constant && may_forget(args_.options, p_.dtype)) {
      window = chunks.first_window(decay_threshold(args_.options), scratch->chunk.k);
    }
    const bool forgets = window <= chunks.count();
    std::fill_n(scratch->dS, p_.K * p_.V, T(0));
    if (!through && !forgets && present(args_.dht)) {
      const int64_t row = load_index(args_.rows, part, 0);
      const View state = state_view(args_.dht, args_.options.state_v_first != 0, row, head);
      kernels<T>().load(state, p_.K, p_.V, scratch->dS);
    }
    Chunk<T>& chunk = scratch->chunk;
    for (int64_t i = std::min(window, chunks.count()) - 1; i >= 0; --i) {
      chunks.prepare(i, &chunk);
      const bool has_do = present(args_.d_o);
      if (has_do) {
        chunks.load_keys(args_.q, i, chunk.q);
        kernels<T>().load(token_rows(args_.d_o, s.b, chunks.token(i), head), chunk.n, p_.V, scratch->d_o);
      }
      kernels<T>().reverse_state(chunk, has_do ? scratch->d_o : nullptr, scratch->dS);
    }
    kernels<T>().store(scratch->dS, p_.K, p_.V, state_view(args_.R, false, part, head));
    return constant ? FLASH_QLA_LINK_CONSTANT : FLASH_QLA_LINK_AFFINE;
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
  computes_in_double(p) ? BackwardSummary<double>(args, p).run(workspace)
                        : BackwardSummary<float>(args, p).run(workspace);
  return Status();
}

}  // namespace
}  // namespace cpu

const ChunkSummaryBackwardPath kCpuChunkSummaryBackward = {"cpu",       FLASH_QLA_CPU,       false,
                                                           cpu::accept, cpu::workspace_size, cpu::run};

}  // namespace flash_qla
