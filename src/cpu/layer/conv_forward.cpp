// The convolution over whole sequences: first the outputs, run by run, then the states that the sequences leave, which
// may take the place of those that the outputs are made from.
#include "cpu/layer/conv_output.h"
#include "cpu/layer/conv_states.h"
#include "cpu/layer/paths.h"
#include "cpu/threads.h"

namespace flash_qla {
namespace cpu {
namespace {

using Arguments = flash_qla_conv_arguments;

bool any_residual(const Arguments& args) {
  return std::any_of(args.parts, args.parts + args.num_parts,
                     [](const flash_qla_conv_part& part) { return present(part.residual); });
}

template <class T>
struct Scratch {
  ConvRows<T> rows;
  ConvOutput<T> out;
  ConvStateRows<T> states;

  Scratch(Arena* arena, const Arguments& args, const ConvProblem& p, int64_t most)
      : rows(arena, std::min(p.T, kRunTokens), p.W, most),
        out(arena, std::min(p.T, kRunTokens), most, any_residual(args)),
        states(arena, p, most) {}
};

template <class T>
class ConvForward {
 public:
  ConvForward(const Arguments& args, const ConvProblem& p)
      : args_(args),
        p_(p),
        sequences_(conv_sequences(args, p)),
        checkpoints_(conv_checkpoints(args, p, sequences_)),
        blocks_(channel_blocks(args)) {}

  void run(void* workspace) {
    Arena arena(workspace);
    std::vector<Scratch<T>> scratch;
    const int64_t blocks = static_cast<int64_t>(blocks_.size()), runs_of_row = ceil_div(p_.T, kRunTokens);
    const int64_t runs = p_.B * runs_of_row, tasks = std::max(runs, p_.N) * blocks;
    const int64_t threads = thread_count(args_.options.num_threads, tasks);
    for (int64_t i = 0; i < threads; ++i) scratch.emplace_back(&arena, args_, p_, most_columns(blocks_));
    const double operations = kConvOperations * static_cast<double>(p_.B * p_.T * p_.channels);
    parallel_for(runs * blocks, worthwhile_threads(threads, operations), [&](int64_t task, int64_t worker) {
      const int64_t run = task / blocks, begin = run % runs_of_row * kRunTokens;
      run_tokens(blocks_[static_cast<size_t>(task % blocks)], run / runs_of_row, begin,
                 std::min(begin + kRunTokens, p_.T), &scratch[static_cast<size_t>(worker)]);
    });
    if (present(args_.parts[0].final_state)) {
      const double moved = kConvOperations * static_cast<double>(p_.N * p_.L * p_.channels);
      parallel_for(p_.N * blocks, worthwhile_threads(threads, moved), [&](int64_t task, int64_t worker) {
        store_states(task / blocks, blocks_[static_cast<size_t>(task % blocks)], &scratch[static_cast<size_t>(worker)]);
      });
    }
    conv_gates(args_, p_);
  }

 private:
  void run_tokens(const ChannelBlock& block, int64_t b, int64_t begin, int64_t end, Scratch<T>* scratch) {
    const flash_qla_conv_part& part = args_.parts[block.part];
    ConvRows<T>& rows = scratch->rows;
    rows.load_weights(part, block, p_.W);
    rows.load_inputs(part.x, block, b, begin - (p_.W - 1), end);
    int64_t done = begin;
    for_segments(sequences_, p_.varlen, b, begin, end, [&](int64_t n, int64_t from, int64_t to) {
      const ConvSequence& s = sequences_[static_cast<size_t>(n)];
      scratch->out.zero(done, from, begin, rows.stride);
      done = to;
      if (s.skipped) return scratch->out.zero(from, to, begin, rows.stride);
      if (from < s.begin + p_.W - 1) rows.load_history(part.initial_state, block, s, p_);
      rows.set_taps(args_.seq_idx, s, from, to, from, p_.W);
      layer_kernels<T>().convolve(rows.taps, to - from, p_.W, rows.weights, rows.bias, rows.stride,
                                  scratch->out.u + (from - begin) * rows.stride);
      scratch->out.finish(part, args_.activation, block, b, from, to, begin, rows.stride);
      zero_negative(args_.seq_idx, b, from, to, begin, rows.stride, &scratch->out);
    });
    scratch->out.zero(done, end, begin, rows.stride);
    scratch->out.store(part, block, b, begin, end, rows.stride);
  }

  void store_states(int64_t n, const ChannelBlock& block, Scratch<T>* scratch) {
    const ConvSequence& s = sequences_[static_cast<size_t>(n)];
    if (s.skipped) return;
    const flash_qla_conv_part& part = args_.parts[block.part];
    const int64_t stride = padded(block.columns);
    const auto input = [&](int64_t t, T* to) {
      load_rows(block_rows(part.x, block, s.b, s.begin + t), 1, block.columns, stride, to);
    };
    load_state(part, block, s, p_, stride, scratch->states);
    const auto listed = std::partition_point(checkpoints_.begin(), checkpoints_.end(),
                                             [n](const ConvCheckpoint& c) { return c.n < n; });
    for (auto c = listed; c != checkpoints_.end() && c->n == n; ++c) {
      store_state(part, block, s, c->tokens, c->slot, p_, stride, scratch->states, input);
    }
    if (s.write_row >= 0) store_state(part, block, s, s.length, s.write_row, p_, stride, scratch->states, input);
  }

  const Arguments& args_;
  const ConvProblem& p_;
  const std::vector<ConvSequence> sequences_;
  const std::vector<ConvCheckpoint> checkpoints_;
  const std::vector<ChannelBlock> blocks_;
};

std::string accept(const Arguments&, const ConvProblem&) { return {}; }

template <class T>
size_t size_for(const Arguments& args, const ConvProblem& p) {
  const std::vector<ChannelBlock> blocks = channel_blocks(args);
  const int64_t tasks = std::max(p.B * ceil_div(p.T, kRunTokens), p.N) * static_cast<int64_t>(blocks.size());
  Arena of_thread(nullptr);
  Scratch<T>(&of_thread, args, p, most_columns(blocks));
  return of_thread.used() * static_cast<size_t>(thread_count(args.options.num_threads, tasks));
}

size_t workspace_size(const Arguments& args, const ConvProblem& p) {
  return p.dtype == DType::kFloat64 ? size_for<double>(args, p) : size_for<float>(args, p);
}

Status run(const Arguments& args, const ConvProblem& p, void* workspace, void*) {
  p.dtype == DType::kFloat64 ? ConvForward<double>(args, p).run(workspace) : ConvForward<float>(args, p).run(workspace);
  return Status();
}

}  // namespace
}  // namespace cpu

const ConvPath kCpuConvForward = {"cpu", FLASH_QLA_CPU, false, cpu::accept, cpu::workspace_size, cpu::run};

}  // namespace flash_qla
