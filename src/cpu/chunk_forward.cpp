// Chunked forward: one task is one (sequence, value head), whose chunks follow each other. No task looks at another,
// so that bits depend on neither the batch nor the number of threads.
#include <algorithm>
#include <type_traits>
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

// One thread's memory.
template <class T>
struct Scratch {
  Chunk<T> chunk;
  T* o;         // [64, V]
  T* S;         // [K, V]
  T* S_inside;  // [K, V] state after some of a chunk's tokens

  Scratch(Arena* arena, const Problem& p) {
    take_chunk(arena, p.K, p.V, &chunk);
    chunk.KK = arena->take<T>(64 * 64);
    chunk.A = arena->take<T>(64 * 64);
    chunk.v_new = arena->take<T>(64 * p.V);
    o = arena->take<T>(64 * p.V);
    S = arena->take<T>(p.K * p.V);
    S_inside = arena->take<T>(p.K * p.V);
  }
};

// A state wanted after the first `tokens` tokens of a sequence.
struct Checkpoint {
  int64_t n, tokens, index;
};

// The listed checkpoints, by sequence and place. A position between two sequences belongs to the first of them.
std::vector<Checkpoint> listed_checkpoints(const Arguments& args, const Problem& p,
                                           const std::vector<Sequence>& sequences) {
  std::vector<Checkpoint> list;
  if (!present(args.checkpoint_offsets)) return list;
  const auto end = [&p](const Sequence& s) { return s.b * p.T + s.begin + s.length; };
  for (int64_t m = 0; m < args.checkpoint_offsets.shape[0]; ++m) {
    const int64_t position = load_index(args.checkpoint_offsets, m);
    const auto s = std::partition_point(sequences.begin(), sequences.end(),
                                        [&](const Sequence& sequence) { return end(sequence) < position; });
    if (s == sequences.end()) continue;
    const int64_t tokens = position - (s->b * p.T + s->begin);
    if (tokens > 0) list.push_back({s - sequences.begin(), tokens, load_index(args.checkpoint_indices, m)});
  }
  std::stable_sort(list.begin(), list.end(), [](const Checkpoint& a, const Checkpoint& b) {
    return a.n != b.n ? a.n < b.n : a.tokens < b.tokens;
  });
  return list;
}

template <class T>
class Forward {
 public:
  Forward(const Arguments& args, const Problem& p)
      : args_(args),
        p_(p),
        gates_(args, false),
        sequences_(host_sequences(args.cu_seqlens, p)),
        checkpoints_(listed_checkpoints(args, p, sequences_)) {}

  void run(void* workspace) {
    for (const Tensor* t : {&args_.o, &args_.g_cumsum, &args_.A}) zero_outside(*t, sequences_, p_);
    const Sequence last = sequences_.empty() ? Sequence{} : sequences_.back();
    fill_zero(args_.h, 0, last.first_chunk + last.chunks(), args_.h.shape[0]);

    Arena arena(workspace);
    std::vector<Scratch<T>> scratch;
    const int64_t tasks = p_.N * p_.Hv, threads = thread_count(args_.options.num_threads, tasks);
    for (int64_t i = 0; i < threads; ++i) scratch.emplace_back(&arena, p_);
    const std::vector<int64_t> order = longest_first(sequences_);
    // 6 K V operations a token for the products with the state, twice that with the chunk's own.
    const double operations = 12.0 * static_cast<double>(p_.B * p_.T * p_.Hv * p_.K) * static_cast<double>(p_.V);
    parallel_for(tasks, worthwhile_threads(threads, operations), [&](int64_t task, int64_t worker) {
      run_head(order[static_cast<size_t>(task / p_.Hv)], task % p_.Hv, &scratch[static_cast<size_t>(worker)]);
    });
  }

 private:
  void run_head(int64_t n, int64_t head, Scratch<T>* scratch) {
    const Sequence& s = sequences_[static_cast<size_t>(n)];
    const StateIo io(args_, n);
    if (io.skipped()) return zero_sequence(s, head);
    io.read(p_, head, false, scratch->S);
    const HeadGates gates(gates_, head);
    auto checkpoint =
        std::partition_point(checkpoints_.begin(), checkpoints_.end(), [n](const Checkpoint& c) { return c.n < n; });
    for (int64_t i = 0; i < s.chunks(); ++i) {
      const int64_t done = i * kChunkSize;
      if (present(args_.h) && s.first_chunk + i < args_.h.shape[0]) {
        io.store(args_.h, p_, s.first_chunk + i, head, false, scratch->S);
      }
      run_chunk(s, done, head, gates, scratch);
      const int64_t after = done + scratch->chunk.n;
      for (; checkpoint != checkpoints_.end() && checkpoint->n == n && checkpoint->tokens <= after; ++checkpoint) {
        kernels<T>().advance(scratch->chunk, checkpoint->tokens - done, scratch->S, scratch->S_inside);
        io.write_slot(p_, checkpoint->index, head, false, scratch->S_inside);
      }
      kernels<T>().advance(scratch->chunk, scratch->chunk.n, scratch->S, scratch->S);
      round_state(scratch->S);
      if (args_.checkpoint_every > 0 && after % args_.checkpoint_every == 0) {
        const int64_t row = load_index(args_.checkpoint_cu_starts, n) + after / args_.checkpoint_every - 1;
        if (row >= 0 && row < args_.checkpoints.shape[0]) {
          io.store(args_.checkpoints, p_, row, head, false, scratch->S);
        }
      }
    }
    io.write_final(p_, head, false, scratch->S);
  }

  // The state at a chunk's end as a float32 final state would hand it over: a sequence that is cut there goes on with
  // the same bits.
  void round_state(T* S) const {
    if (!std::is_same_v<T, double> || p_.dtype == DType::kFloat64) return;
    for (int64_t i = 0; i < p_.K * p_.V; ++i) S[i] = static_cast<T>(static_cast<float>(S[i]));
  }

  // Everything of the chunk after the sequence's first `done` tokens but the state after it.
  void run_chunk(const Sequence& s, int64_t done, int64_t head, const HeadGates& gates, Scratch<T>* scratch) {
    const Kernels<T>& kernel = kernels<T>();
    Chunk<T>& chunk = scratch->chunk;
    const int64_t token = s.begin + done, key_head = head / p_.group;
    chunk.n = std::min(kChunkSize, s.length - done);
    chunk.scale = static_cast<T>(p_.scale);
    kernel.load(token_rows(args_.q, s.b, token, key_head), chunk.n, p_.K, chunk.q);
    kernel.load(token_rows(args_.k, s.b, token, key_head), chunk.n, p_.K, chunk.k);
    kernel.load(token_rows(args_.v, s.b, token, head), chunk.n, p_.V, chunk.v);
    if (args_.options.use_qk_l2norm_in_kernel) {
      kernel.l2norm(chunk.q, chunk.n, p_.K, p_.dtype);
      kernel.l2norm(chunk.k, chunk.n, p_.K, p_.dtype);
    }
    gates.cumsum(s.b, token, chunk.n, chunk.c);
    for (int64_t i = 0; i < chunk.n; ++i) chunk.beta[i] = static_cast<T>(gates.beta(s.b, token + i));

    kernel.decays(chunk);
    kernel.inverse(chunk);
    kernel.correct(chunk, scratch->S);
    kernel.output(chunk, scratch->S, scratch->o);
    kernel.store(scratch->o, chunk.n, p_.V, token_rows(args_.o, s.b, token, head));
    if (present(args_.A)) kernel.store(chunk.A, chunk.n, kChunkSize, token_rows(args_.A, s.b, token, head));
    for (int64_t i = 0; present(args_.g_cumsum) && i < chunk.n; ++i) {
      store(args_.g_cumsum, offset_of(args_.g_cumsum, s.b, token + i, head), chunk.c[i]);
    }
  }

  // The outputs of a row that is skipped.
  void zero_sequence(const Sequence& s, int64_t head) {
    for (const Tensor* t : {&args_.o, &args_.A, &args_.g_cumsum}) zero_head(*t, s, head);
    if (!present(args_.h)) return;
    Tensor part = args_.h;
    part.data = view_at(args_.h, offset_of(args_.h, 0, head), 0, 0).data;
    part.shape[1] = 1;
    fill_zero(part, 0, s.first_chunk, s.first_chunk + s.chunks());
  }

  const Arguments& args_;
  const Problem& p_;
  const GateArguments gates_;
  const std::vector<Sequence> sequences_;
  const std::vector<Checkpoint> checkpoints_;
};

std::string accept(const Arguments&, const Problem&) { return {}; }

template <class T>
size_t size_for(const Arguments& args, const Problem& p) {
  Arena of_thread(nullptr);
  Scratch<T>(&of_thread, p);
  return of_thread.used() * static_cast<size_t>(thread_count(args.options.num_threads, p.N * p.Hv));
}

size_t workspace_size(const Arguments& args, const Problem& p) {
  return computes_in_double(p) ? size_for<double>(args, p) : size_for<float>(args, p);
}

Status run(const Arguments& args, const Problem& p, void* workspace, void*) {
  computes_in_double(p) ? Forward<double>(args, p).run(workspace) : Forward<float>(args, p).run(workspace);
  return Status();
}

}  // namespace
}  // namespace cpu

const ForwardPath kCpuChunkForward = {"cpu", FLASH_QLA_CPU, false, cpu::accept, cpu::workspace_size, cpu::run};

}  // namespace flash_qla
