// The convolution's gradients. u is computed again from the inputs. One task is a run of tokens and a block of
// channels: it has du of its tokens and of the W - 1 after them, so that no task adds to another's dx. Sums over tokens
// (weights, bias) leave one part a run, which are added in the order of the runs, in double.
#include "cpu/layer/conv_rows.h"
#include "cpu/layer/paths.h"
#include "cpu/threads.h"

namespace flash_qla {
namespace cpu {
namespace {

using Arguments = flash_qla_conv_backward_arguments;
using Part = flash_qla_conv_backward_part;

std::vector<ChannelBlock> channel_blocks(const Arguments& args) {
  std::vector<ChannelBlock> blocks;
  int64_t before = 0;
  for (int32_t i = 0; i < args.num_parts; ++i) {
    const Part& part = args.parts[i];
    append_blocks(&blocks, i, part.x, part.l2norm != 0, {&part.x, &part.dy, &part.dx, &part.dresidual}, before);
    before += part.x.shape[2] * part.x.shape[3];
  }
  return blocks;
}

template <class T>
struct Scratch {
  ConvRows<T> rows;
  T *u, *du;        // [tokens + W - 1, stride]
  T* r;             // [tokens + W - 1]
  T* dx;            // [tokens, stride]; [L, stride] of a state
  T* reversed;      // [W, stride] weights, last one first
  const T** after;  // [tokens, W] rows of du that a token's dx is made of

  Scratch(Arena* arena, const ConvProblem& p, int64_t most)
      : rows(arena, std::min(p.T, kRunTokens) + p.W - 1, p.W, most) {
    const int64_t tokens = std::min(p.T, kRunTokens);
    u = arena->take<T>((tokens + p.W - 1) * most);
    du = arena->take<T>((tokens + p.W - 1) * most);
    r = arena->take<T>(tokens + p.W - 1);
    dx = arena->take<T>(std::max(tokens, p.L) * most);
    reversed = arena->take<T>(p.W * most);
    after = arena->take<const T*>(tokens * p.W);
  }
};

// The workspace of a call: the runs' sums, and a scratch for each thread.
template <class T>
struct Layout {
  T* sums;  // [blocks] [runs, W + 1, stride]
  std::vector<Scratch<T>> scratch;

  Layout(Arena* arena, const Arguments& args, const ConvProblem& p, const std::vector<ChannelBlock>& blocks) {
    const int64_t runs = p.B * ceil_div(p.T, kRunTokens),
                  tasks = std::max(runs, p.N) * static_cast<int64_t>(blocks.size());
    int64_t columns = 0;
    for (const ChannelBlock& block : blocks) columns += padded(block.columns);
    sums = arena->take<T>(runs * (p.W + 1) * columns);
    const int64_t threads = thread_count(args.options.num_threads, tasks);
    for (int64_t i = 0; i < threads; ++i) scratch.emplace_back(arena, p, most_columns(blocks));
  }
};

template <class T>
class ConvBackward {
 public:
  ConvBackward(const Arguments& args, const ConvProblem& p)
      : args_(args), p_(p), sequences_(conv_sequences(args, p)), blocks_(channel_blocks(args)) {
    runs_of_row_ = ceil_div(p.T, kRunTokens);
    runs_ = p.B * runs_of_row_;
  }

  void run(void* workspace) {
    Arena arena(workspace);
    Layout<T> layout(&arena, args_, p_, blocks_);
    std::vector<Scratch<T>>& scratch = layout.scratch;
    T* sums = layout.sums;
    for (const ChannelBlock& block : blocks_) {
      sums_.push_back(sums);
      sums += runs_ * (p_.W + 1) * padded(block.columns);
    }
    const int64_t blocks = static_cast<int64_t>(blocks_.size());
    const double operations = 2 * kConvOperations * static_cast<double>(p_.B * p_.T * p_.channels);
    const int64_t threads = worthwhile_threads(static_cast<int64_t>(scratch.size()), operations);
    parallel_for(runs_ * blocks, threads, [&](int64_t task, int64_t worker) {
      run_tokens(task % blocks, task / blocks, &scratch[static_cast<size_t>(worker)]);
    });
    parallel_for(blocks, threads, [&](int64_t task, int64_t) { add_runs(task); });
    const bool states = std::any_of(args_.parts, args_.parts + args_.num_parts,
                                    [](const Part& part) { return present(part.dinitial_state); });
    if (!states) return;
    parallel_for(p_.N * blocks, threads, [&](int64_t task, int64_t worker) {
      run_state(task / blocks, blocks_[static_cast<size_t>(task % blocks)], &scratch[static_cast<size_t>(worker)]);
    });
  }

 private:
  // [W + 1, stride] sums of a run and a block.
  T* sums_of(int64_t block, int64_t run) const {
    return sums_[static_cast<size_t>(block)] + run * (p_.W + 1) * padded(blocks_[static_cast<size_t>(block)].columns);
  }

  void load_task(const Part& part, const ChannelBlock& block, Scratch<T>* scratch) const {
    scratch->rows.load_weights(part, block, p_.W);
    const int64_t stride = scratch->rows.stride;
    for (int64_t j = 0; j < p_.W; ++j) {
      std::copy_n(scratch->rows.weights + (p_.W - 1 - j) * stride, stride, scratch->reversed + j * stride);
    }
  }

  // du of tokens [from, to) of a sequence, in row t - at of the scratch; leaves their taps.
  void gradient_of_u(const Part& part, const ChannelBlock& block, const ConvSequence& s, int64_t from, int64_t to,
                     int64_t at, Scratch<T>* scratch) const {
    const LayerKernels<T>& kernel = layer_kernels<T>();
    ConvRows<T>& rows = scratch->rows;
    const int64_t stride = rows.stride, count = to - from;
    T *u = scratch->u + (from - at) * stride, *du = scratch->du + (from - at) * stride;
    if (from < s.begin + p_.W - 1) rows.load_history(part.initial_state, block, s, p_);
    rows.set_taps(args_.seq_idx, s, from, to, at, p_.W);
    if (!present(part.dy)) return static_cast<void>(std::fill_n(du, count * stride, T(0)));
    load_rows(block_rows(part.dy, block, s.b, from), count, block.columns, stride, du);
    const bool silu = args_.activation == FLASH_QLA_ACTIVATION_SILU;
    if (silu || part.l2norm) {
      kernel.convolve(rows.taps + (from - at) * p_.W, count, p_.W, rows.weights, rows.bias, stride, u);
    }
    if (part.l2norm) {
      T* normed = scratch->dx;  // free until dx is made
      for (int64_t begin = 0; begin < count; begin += kRunTokens) {
        const int64_t n = std::min(kRunTokens, std::min(p_.T, count - begin));
        T* row_u = u + begin * stride;
        if (silu) {
          kernel.silu(row_u, n * stride, normed);
        } else {
          std::copy_n(row_u, n * stride, normed);
        }
        kernel.normalise(normed, n, block.columns, stride, T(1), static_cast<T>(kL2NormEps), scratch->r);
        kernel.normalise_backward(normed, scratch->r, n, block.columns, stride, T(1), du + begin * stride);
      }
    }
    if (silu) kernel.silu_backward(u, count * stride, du);
    for (int64_t t = from; present(args_.seq_idx) && t < to; ++t) {
      if (sequence_index(args_.seq_idx, s.b, t) < 0) {
        std::fill_n(scratch->du + (t - at) * stride, stride, T(0));
      }
    }
  }

  void run_tokens(int64_t block_index, int64_t run, Scratch<T>* scratch) {
    const ChannelBlock& block = blocks_[static_cast<size_t>(block_index)];
    const Part& part = args_.parts[block.part];
    const int64_t b = run / runs_of_row_, begin = run % runs_of_row_ * kRunTokens;
    const int64_t end = std::min(begin + kRunTokens, p_.T), beyond = std::min(end + p_.W - 1, p_.T);
    ConvRows<T>& rows = scratch->rows;
    load_task(part, block, scratch);
    const int64_t stride = rows.stride;
    rows.load_inputs(part.x, block, b, begin - (p_.W - 1), beyond);
    T* sums = sums_of(block_index, run);
    std::fill_n(sums, (p_.W + 1) * stride, T(0));
    // Each sequence by itself: the history in scratch is one sequence's.
    for_segments(sequences_, p_.varlen, b, begin, beyond, [&](int64_t n, int64_t from, int64_t to) {
      const ConvSequence& s = sequences_[static_cast<size_t>(n)];
      gradient_of_u(part, block, s, from, to, begin, scratch);
      const int64_t own = std::min(to, end) - from;  // tokens whose terms are this run's to add
      if (own > 0) {
        layer_kernels<T>().weight_sums(rows.taps + (from - begin) * p_.W, scratch->du + (from - begin) * stride, own,
                                       p_.W, stride, sums);
      }
    });
    if (present(part.dx)) store_dx(part, block, b, begin, end, scratch);
    if (present(part.dresidual)) store_residual(part, block, b, begin, end, scratch);
  }

  void store_dx(const Part& part, const ChannelBlock& block, int64_t b, int64_t begin, int64_t end,
                Scratch<T>* scratch) const {
    const int64_t stride = scratch->rows.stride;
    int64_t done = begin;
    const auto zero = [&](int64_t from, int64_t to) {
      std::fill(scratch->dx + (from - begin) * stride, scratch->dx + (to - begin) * stride, T(0));
    };
    // No bias: a row of zeros.
    for_segments(sequences_, p_.varlen, b, begin, end, [&](int64_t n, int64_t from, int64_t to) {
      const ConvSequence& s = sequences_[static_cast<size_t>(n)];
      zero(done, from);
      done = to;
      for (int64_t t = from; t < to; ++t) {
        const T** token = scratch->after + (t - from) * p_.W;
        for (int64_t i = 0; i < p_.W; ++i) {
          const bool inside = t + i < s.begin + s.length && same_index(s.b, t, t + i);
          token[i] = inside ? scratch->du + (t + i - begin) * stride : scratch->rows.zero;
        }
      }
      T* dx = scratch->dx + (from - begin) * stride;
      layer_kernels<T>().convolve(scratch->after, to - from, p_.W, scratch->reversed, scratch->rows.zero, stride, dx);
      add_final_state(part, block, s, n, from, to, begin, scratch);
    });
    zero(done, end);
    store_rows(scratch->dx, end - begin, block.columns, stride, block_rows(part.dx, block, b, begin));
  }

  bool same_index(int64_t b, int64_t t, int64_t later) const {
    return !present(args_.seq_idx) || sequence_index(args_.seq_idx, b, t) == sequence_index(args_.seq_idx, b, later);
  }

  // The final state holds the last L inputs.
  void add_final_state(const Part& part, const ChannelBlock& block, const ConvSequence& s, int64_t n, int64_t from,
                       int64_t to, int64_t at, Scratch<T>* scratch) const {
    if (!present(part.dfinal_state)) return;
    const int64_t stride = scratch->rows.stride, last = s.begin + s.length;
    T* row = scratch->u;  // free by now
    for (int64_t t = std::max(from, last - p_.L); t < to; ++t) {
      load_rows(state_rows(part.dfinal_state, block, n, t - (last - p_.L)), 1, block.columns, stride, row);
      kernels<T>().add(row, stride, scratch->dx + (t - at) * stride);
    }
  }

  void store_residual(const Part& part, const ChannelBlock& block, int64_t b, int64_t begin, int64_t end,
                      Scratch<T>* scratch) const {
    const int64_t stride = scratch->rows.stride;
    T* rows = scratch->du;  // free by now
    std::fill_n(rows, (end - begin) * stride, T(0));
    for_segments(sequences_, p_.varlen, b, begin, end, [&](int64_t, int64_t from, int64_t to) {
      if (!present(part.dy)) return;
      load_rows(block_rows(part.dy, block, b, from), to - from, block.columns, stride, rows + (from - begin) * stride);
      for (int64_t t = from; present(args_.seq_idx) && t < to; ++t) {
        if (sequence_index(args_.seq_idx, b, t) < 0) std::fill_n(rows + (t - begin) * stride, stride, T(0));
      }
    });
    store_rows(rows, end - begin, block.columns, stride, block_rows(part.dresidual, block, b, begin));
  }

  // The gradient of one sequence's initial state: through the first W - 1 outputs, and through the final state.
  void run_state(int64_t n, const ChannelBlock& block, Scratch<T>* scratch) {
    const Part& part = args_.parts[block.part];
    if (!present(part.dinitial_state)) return;
    const ConvSequence& s = sequences_[static_cast<size_t>(n)];
    ConvRows<T>& rows = scratch->rows;
    load_task(part, block, scratch);
    const int64_t stride = rows.stride, first = std::min(s.length, p_.W - 1);
    rows.load_inputs(part.x, block, s.b, s.begin, s.begin + first);
    if (first > 0) gradient_of_u(part, block, s, s.begin, s.begin + first, s.begin, scratch);
    std::fill_n(scratch->dx, p_.L * stride, T(0));
    for (int64_t entry = 0; entry < p_.L; ++entry) {
      T* d = scratch->dx + entry * stride;
      const int64_t steps = p_.L - entry;  // before the first token
      // Term j of token t is `steps` before the first where t - (W - 1) + j = -steps.
      for (int64_t t = 0; t < first && t + steps <= p_.W - 1; ++t) {
        const T *w = rows.weights + (p_.W - 1 - steps - t) * stride, *du = scratch->du + t * stride;
        for (int64_t c = 0; c < stride; ++c) d[c] += w[c] * du[c];
      }
      if (!present(part.dfinal_state) || entry < s.length) continue;
      T* row = scratch->u;
      load_rows(state_rows(part.dfinal_state, block, n, entry - s.length), 1, block.columns, stride, row);
      kernels<T>().add(row, stride, d);
    }
    store_rows(scratch->dx, p_.L, block.columns, stride, state_rows(part.dinitial_state, block, n, 0));
  }

  void add_runs(int64_t block_index) const {
    const ChannelBlock& block = blocks_[static_cast<size_t>(block_index)];
    const Part& part = args_.parts[block.part];
    const int64_t stride = padded(block.columns);
    for (int64_t j = 0; j <= p_.W; ++j) {
      if (!present(j < p_.W ? part.dweight : part.dbias)) continue;
      for (int64_t c = 0; c < block.columns; ++c) {
        double sum = 0.0;
        for (int64_t run = 0; run < runs_; ++run) sum += sums_of(block_index, run)[j * stride + c];
        if (j < p_.W) {
          store(part.dweight, offset_of(part.dweight, block.channel + c, j), sum);
        } else {
          store(part.dbias, offset_of(part.dbias, block.channel + c), sum);
        }
      }
    }
  }

  const Arguments& args_;
  const ConvProblem& p_;
  const std::vector<ConvSequence> sequences_;
  const std::vector<ChannelBlock> blocks_;
  int64_t runs_of_row_ = 0, runs_ = 0;
  std::vector<T*> sums_;  // [blocks]
};

std::string accept(const Arguments&, const ConvProblem&) { return {}; }

template <class T>
size_t size_for(const Arguments& args, const ConvProblem& p) {
  Arena arena(nullptr);
  Layout<T>(&arena, args, p, channel_blocks(args));
  return arena.used();
}

size_t workspace_size(const Arguments& args, const ConvProblem& p) {
  return p.dtype == DType::kFloat64 ? size_for<double>(args, p) : size_for<float>(args, p);
}

Status run(const Arguments& args, const ConvProblem& p, void* workspace, void*) {
  p.dtype == DType::kFloat64 ? ConvBackward<double>(args, p).run(workspace)
                             : ConvBackward<float>(args, p).run(workspace);
  return Status();
}

}  // namespace
}  // namespace cpu

const ConvBackwardPath kCpuConvBackward = {"cpu", FLASH_QLA_CPU, false, cpu::accept, cpu::workspace_size, cpu::run};

}  // namespace flash_qla
