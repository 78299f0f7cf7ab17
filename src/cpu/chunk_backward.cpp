// Backward of the chunked forward. One task is one (sequence, value head): the chunks' states are computed again from
// the left, then the gradients from the right. The forward's A and o are not read: K K^T is needed in any case, from it
// A costs 1 % of the backward, and it is more exact than A rounded to k's dtype; the gate's gradient needs no o.
#include <algorithm>
#include <vector>

#include "core/host_tensor.h"
#include "cpu/gates.h"
#include "cpu/kernels.h"
#include "cpu/layer/kernels.h"
#include "cpu/paths.h"
#include "cpu/scratch.h"
#include "cpu/tensors.h"
#include "cpu/threads.h"

namespace flash_qla {
namespace cpu {
namespace {

using Arguments = flash_qla_backward_arguments;

// Chunks whose states are kept at once. A longer sequence is cut into segments of as many: the first pass keeps the
// state at each segment's start, and the segments are computed again from there, last one first. 128 chunks (8192
// tokens) of K = V = 128 in float32 take 16 MiB a thread, and the second computation adds 1/4 to longer sequences.
constexpr int64_t kSegmentChunks = 128;

// What is kept of one chunk between the passes.
template <class T>
struct Kept {
  T* S;      // [K, V] at its start
  T* KK;     // [64, 64]
  T* A;      // [64, 64]
  T* v_new;  // [64, V]
};

template <class T>
struct Scratch {
  Chunk<T> chunk;
  ChunkBackward<T> grad;
  T* d_o;                         // [64, V]
  T* S;                           // [K, V]
  std::vector<Kept<T>> kept;      // [chunks of a segment]
  std::vector<T*> segment_state;  // [segments] each [K, V]

  Scratch(Arena* arena, const Problem& p) {
    take_chunk(arena, p.K, p.V, &chunk);
    d_o = arena->take<T>(64 * p.V);
    S = arena->take<T>(p.K * p.V);
    grad.d_o = d_o;
    grad.dS = arena->take<T>(p.K * p.V);
    grad.dq = arena->take<T>(64 * p.K);
    grad.dk = arena->take<T>(64 * p.K);
    grad.dv = arena->take<T>(64 * p.V);
    grad.z = arena->take<T>(64 * p.V);
    grad.gates = arena->take<T>(64 * 64);
    grad.d_pairs = arena->take<T>(64 * 64);
    grad.value_rows = arena->take<T>(64 * p.V);
    const int64_t chunks = ceil_div(p.T, kChunkSize);
    for (int64_t i = 0; i < std::min(chunks, kSegmentChunks); ++i) {
      kept.push_back(
          {arena->take<T>(p.K * p.V), arena->take<T>(64 * 64), arena->take<T>(64 * 64), arena->take<T>(64 * p.V)});
    }
    for (int64_t i = 0; i < ceil_div(chunks, kSegmentChunks); ++i) segment_state.push_back(arena->take<T>(p.K * p.V));
  }
};

// Sums that several tasks add to, each in a place of its own.
template <class T>
struct Shared {
  // [Hv, B, T, K] parts of dq and dk, where a key head has several value heads
  T* dq = nullptr;
  T* dk = nullptr;
  GateParameterGradients* gate;  // [N, Hv]

  Shared(Arena* arena, const Arguments& args, const Problem& p) {
    const int64_t parts = p.group > 1 ? p.Hv * p.B * p.T * p.K : 0;
    if (present(args.dq)) dq = arena->take<T>(parts);
    if (present(args.dk)) dk = arena->take<T>(parts);
    gate = arena->take<GateParameterGradients>(p.N * p.Hv);
  }
};

template <class T>
class Backward {
 public:
  Backward(const Arguments& args, const Problem& p)
      : args_(args), p_(p), gates_(args, args.g_is_cumsum != 0), sequences_(host_sequences(args.cu_seqlens, p)) {}

  void run(void* workspace) {
    for (const Tensor* t : {&args_.dq, &args_.dk, &args_.dv, &args_.dg, &args_.dbeta}) {
      zero_outside(*t, sequences_, p_);
    }
    Arena arena(workspace);
    const Shared<T> shared(&arena, args_, p_);
    std::vector<Scratch<T>> scratch;
    const int64_t tasks = p_.N * p_.Hv, threads = thread_count(args_.options.num_threads, tasks);
    for (int64_t i = 0; i < threads; ++i) scratch.emplace_back(&arena, p_);
    const std::vector<int64_t> order = longest_first(sequences_);
    // 22 products with the state's K V elements a token, and as much again for those of the chunk.
    const double operations = 40.0 * static_cast<double>(p_.B * p_.T * p_.Hv * p_.K) * static_cast<double>(p_.V);
    const int64_t workers = worthwhile_threads(threads, operations);
    parallel_for(tasks, workers, [&](int64_t task, int64_t worker) {
      const int64_t n = order[static_cast<size_t>(task / p_.Hv)], head = task % p_.Hv;
      run_head(n, head, shared, &scratch[static_cast<size_t>(worker)]);
    });
    if (p_.group > 1) {
      parallel_for(p_.N * p_.Hq, workers, [&](int64_t task, int64_t worker) {
        const Sequence& s = sequences_[static_cast<size_t>(order[static_cast<size_t>(task / p_.Hq)])];
        Chunk<T>& chunk = scratch[static_cast<size_t>(worker)].chunk;
        sum_group(args_.dq, args_.q, args_.q_inverse_norm, shared.dq, s, task % p_.Hq, &chunk);
        sum_group(args_.dk, args_.k, args_.k_inverse_norm, shared.dk, s, task % p_.Hq, &chunk);
      });
    }
    store_gate_parameters(shared);
  }

 private:
  void run_head(int64_t n, int64_t head, const Shared<T>& shared, Scratch<T>* scratch) {
    const Kernels<T>& kernel = kernels<T>();
    const Sequence& s = sequences_[static_cast<size_t>(n)];
    const HeadGates gates(gates_, head);
    load_state(args_.initial_state, args_.entering_rows, args_.entering_state, n, head, scratch->S);
    load_state(args_.dht, args_.leaving_rows, args_.leaving_dht, n, head, scratch->grad.dS);
    GateParameterGradients* sums = &shared.gate[n * p_.Hv + head];
    *sums = {};

    const int64_t chunks = s.chunks(), segments = ceil_div(chunks, kSegmentChunks);
    const auto segment_end = [chunks](int64_t segment) { return std::min(chunks, (segment + 1) * kSegmentChunks); };
    for (int64_t segment = 0; segment < segments; ++segment) {
      std::copy_n(scratch->S, p_.K * p_.V, scratch->segment_state[static_cast<size_t>(segment)]);
      if (segment + 1 == segments) break;
      for (int64_t i = segment * kSegmentChunks; i < segment_end(segment); ++i) {
        recompute(s, i, head, gates, scratch->kept[0], scratch);
      }
    }
    for (int64_t segment = segments - 1; segment >= 0; --segment) {
      const int64_t begin = segment * kSegmentChunks;
      std::copy_n(scratch->segment_state[static_cast<size_t>(segment)], p_.K * p_.V, scratch->S);
      for (int64_t i = begin; i < segment_end(segment); ++i) {
        recompute(s, i, head, gates, scratch->kept[static_cast<size_t>(i - begin)], scratch);
      }
      for (int64_t i = segment_end(segment) - 1; i >= begin; --i) {
        run_chunk(s, i, head, gates, scratch->kept[static_cast<size_t>(i - begin)], shared, sums, scratch);
      }
    }
    if (present(args_.dh0)) {
      kernel.store(scratch->grad.dS, p_.K, p_.V, state_view(args_.dh0, v_first(), n, head));
    }
  }

  // The chunk's corrected values and the state after it; keeps what its backward needs.
  void recompute(const Sequence& s, int64_t i, int64_t head, const HeadGates& gates, const Kept<T>& kept,
                 Scratch<T>* scratch) {
    const Kernels<T>& kernel = kernels<T>();
    Chunk<T>& chunk = scratch->chunk;
    prepare(s, i, head, gates, kept, &chunk);
    kernel.load(token_rows(args_.v, s.b, s.begin + i * kChunkSize, head), chunk.n, p_.V, chunk.v);
    kernel.inverse(chunk);
    std::copy_n(scratch->S, p_.K * p_.V, kept.S);
    kernel.correct(chunk, scratch->S);
    kernel.advance(chunk, chunk.n, scratch->S, scratch->S);
  }

  void run_chunk(const Sequence& s, int64_t i, int64_t head, const HeadGates& gates, const Kept<T>& kept,
                 const Shared<T>& shared, GateParameterGradients* sums, Scratch<T>* scratch) {
    const Kernels<T>& kernel = kernels<T>();
    Chunk<T>& chunk = scratch->chunk;
    ChunkBackward<T>& grad = scratch->grad;
    const int64_t token = s.begin + i * kChunkSize, key_head = head / p_.group;
    prepare(s, i, head, gates, kept, &chunk);
    kernel.load(token_rows(args_.q, s.b, token, key_head), chunk.n, p_.K, chunk.q);
    if (args_.options.use_qk_l2norm_in_kernel) kernel.l2norm(chunk.q, chunk.n, p_.K, p_.dtype);
    if (present(args_.d_o)) {
      kernel.load(token_rows(args_.d_o, s.b, token, head), chunk.n, p_.V, scratch->d_o);
    } else {
      std::fill_n(scratch->d_o, chunk.n * p_.V, T(0));
    }
    grad.S = kept.S;
    grad.correct_w = std::any_of(chunk.beta, chunk.beta + chunk.n,
                                 [](T beta) { return std::abs(beta) < static_cast<T>(kSmallestDivisor); });
    if (grad.correct_w) kernel.load(token_rows(args_.v, s.b, token, head), chunk.n, p_.V, chunk.v);
    kernel.backward(chunk, grad);

    if (present(args_.dv)) kernel.store(grad.dv, chunk.n, p_.V, token_rows(args_.dv, s.b, token, head));
    finish_keys(args_.dq, args_.q, args_.q_inverse_norm, shared.dq, s, token, head, grad.dq, &chunk);
    finish_keys(args_.dk, args_.k, args_.k_inverse_norm, shared.dk, s, token, head, grad.dk, &chunk);
    double dbeta[kChunkSize];
    std::copy_n(grad.dbeta, chunk.n, dbeta);
    gates.gradients(s.b, token, chunk.n, grad.dg, dbeta, sums);
    for (int64_t t = 0; t < chunk.n; ++t) {
      if (present(args_.dg)) store(args_.dg, offset_of(args_.dg, s.b, token + t, head), grad.dg[t]);
      if (present(args_.dbeta)) store(args_.dbeta, offset_of(args_.dbeta, s.b, token + t, head), dbeta[t]);
    }
  }

  // Keys, gates and decays of chunk i, in the kept arrays.
  void prepare(const Sequence& s, int64_t i, int64_t head, const HeadGates& gates, const Kept<T>& kept,
               Chunk<T>* chunk) {
    const Kernels<T>& kernel = kernels<T>();
    const int64_t token = s.begin + i * kChunkSize;
    chunk->n = std::min(kChunkSize, s.length - i * kChunkSize);
    chunk->scale = static_cast<T>(p_.scale);
    chunk->KK = kept.KK;
    chunk->A = kept.A;
    chunk->v_new = kept.v_new;
    kernel.load(token_rows(args_.k, s.b, token, head / p_.group), chunk->n, p_.K, chunk->k);
    if (args_.options.use_qk_l2norm_in_kernel) kernel.l2norm(chunk->k, chunk->n, p_.K, p_.dtype);
    gates.cumsum(s.b, token, chunk->n, chunk->c);
    for (int64_t t = 0; t < chunk->n; ++t) chunk->beta[t] = static_cast<T>(gates.beta(s.b, token + t));
    kernel.decays(*chunk);
  }

  // dq or dk of one value head's chunk: the result where a key head has one value head, else a part of it.
  void finish_keys(const Tensor& out, const Tensor& x, const Tensor& inverse_norm, T* parts, const Sequence& s,
                   int64_t token, int64_t head, T* d, Chunk<T>* chunk) {
    if (!present(out)) return;
    if (p_.group == 1) return store_keys(out, x, inverse_norm, s.b, token, head, chunk->n, d, chunk->rows);
    std::copy_n(d, chunk->n * p_.K, part_of(parts, s.b, token, head));
  }

  T* part_of(T* parts, int64_t b, int64_t token, int64_t head) const {
    return parts + ((head * p_.B + b) * p_.T + token) * p_.K;
  }

  // Sums a sequence's dq or dk over the value heads of a key head, in their order, and rounds once.
  void sum_group(const Tensor& out, const Tensor& x, const Tensor& inverse_norm, T* parts, const Sequence& s,
                 int64_t key_head, Chunk<T>* chunk) {
    if (!present(out)) return;
    for (int64_t done = 0; done < s.length; done += kChunkSize) {
      const int64_t token = s.begin + done, n = std::min(kChunkSize, s.length - done);
      T* sum = part_of(parts, s.b, token, key_head * p_.group);
      for (int64_t i = 1; i < p_.group; ++i) {
        kernels<T>().add(part_of(parts, s.b, token, key_head * p_.group + i), n * p_.K, sum);
      }
      store_keys(out, x, inverse_norm, s.b, token, key_head, n, sum, chunk->rows);
    }
  }

  // The l2 norm's chain rule, then the rounding. `rows` is scratch of [n, K].
  void store_keys(const Tensor& out, const Tensor& x, const Tensor& inverse_norm, int64_t b, int64_t token,
                  int64_t key_head, int64_t n, T* d, T* rows) {
    if (args_.options.use_qk_l2norm_in_kernel) {
      kernels<T>().load(token_rows(x, b, token, key_head), n, p_.K, rows);
      kernels<T>().l2norm_backward(rows, d, n, p_.K);
    }
    if (present(inverse_norm)) {
      kernels<T>().load(token_rows(x, b, token, key_head), n, p_.K, rows);
      T r[kChunkSize];
      for (int64_t i = 0; i < n; ++i) {
        r[i] = static_cast<T>(load(inverse_norm, offset_of(inverse_norm, b, token + i, key_head)));
      }
      layer_kernels<T>().normalise_backward(rows, r, n, p_.K, p_.K, T(1), d);
    }
    kernels<T>().store(d, n, p_.K, token_rows(out, b, token, key_head));
  }

  void store_gate_parameters(const Shared<T>& shared) {
    for (int64_t head = 0; head < p_.Hv; ++head) {
      GateParameterGradients sum;
      for (int64_t n = 0; n < p_.N; ++n) {
        sum.A_log += shared.gate[n * p_.Hv + head].A_log;
        sum.dt_bias += shared.gate[n * p_.Hv + head].dt_bias;
      }
      if (present(args_.dA_log)) store(args_.dA_log, offset_of(args_.dA_log, head), sum.A_log);
      if (present(args_.ddt_bias)) store(args_.ddt_bias, offset_of(args_.ddt_bias, head), sum.dt_bias);
    }
  }

  // Row n of initial_state or dht, or what stands for it where ranks have parts of the sequence.
  void load_state(const Tensor& t, const Tensor& rows, const Tensor& of_parts, int64_t n, int64_t head, T* S) const {
    if (const int64_t part = part_of_row(rows, n); part >= 0) {
      return kernels<T>().load(state_view(of_parts, false, part, head), p_.K, p_.V, S);
    }
    if (present(t)) return kernels<T>().load(state_view(t, v_first(), n, head), p_.K, p_.V, S);
    std::fill_n(S, p_.K * p_.V, T(0));
  }

  bool v_first() const { return args_.options.state_v_first != 0; }

  const Arguments& args_;
  const Problem& p_;
  const GateArguments gates_;
  const std::vector<Sequence> sequences_;
};

std::string accept(const Arguments&, const Problem&) { return {}; }

template <class T>
size_t size_for(const Arguments& args, const Problem& p) {
  Arena shared(nullptr), of_thread(nullptr);
  Shared<T>(&shared, args, p);
  Scratch<T>(&of_thread, p);
  return shared.used() + of_thread.used() * static_cast<size_t>(thread_count(args.options.num_threads, p.N * p.Hv));
}

size_t workspace_size(const Arguments& args, const Problem& p) {
  return computes_in_double(p) ? size_for<double>(args, p) : size_for<float>(args, p);
}

Status run(const Arguments& args, const Problem& p, void* workspace, void*) {
  computes_in_double(p) ? Backward<double>(args, p).run(workspace) : Backward<float>(args, p).run(workspace);
  return Status();
}

}  // namespace
}  // namespace cpu

const BackwardPath kCpuChunkBackward = {"cpu", FLASH_QLA_CPU, false, cpu::accept, cpu::workspace_size, cpu::run};

}  // namespace flash_qla
