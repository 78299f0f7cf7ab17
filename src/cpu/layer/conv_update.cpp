// The convolution of the next tokens of each sequence. A task is one sequence and a block of channels: it reads all
// that it needs before it writes anything, so that states and inputs are replaced in place.
#include "cpu/layer/conv_output.h"
#include "cpu/layer/conv_states.h"
#include "cpu/layer/paths.h"
#include "cpu/threads.h"

namespace flash_qla {
namespace cpu {
namespace {

using Arguments = flash_qla_conv_arguments;

template <class T>
struct Scratch {
  ConvRows<T> rows;
  ConvOutput<T> out;
  ConvStateRows<T> states;

  Scratch(Arena* arena, const ConvProblem& p, int64_t most)
      : rows(arena, p.T, p.W, most), out(arena, p.T, most, true), states(arena, p, most) {}
};

template <class T>
class ConvUpdate {
 public:
  ConvUpdate(const Arguments& args, const ConvProblem& p)
      : args_(args), p_(p), sequences_(conv_sequences(args, p)), blocks_(channel_blocks(args)) {}

  void run(void* workspace) {
    Arena arena(workspace);
    std::vector<Scratch<T>> scratch;
    const int64_t blocks = static_cast<int64_t>(blocks_.size()), tasks = p_.N * blocks;
    const int64_t threads = thread_count(args_.options.num_threads, tasks);
    for (int64_t i = 0; i < threads; ++i) scratch.emplace_back(&arena, p_, most_columns(blocks_));
    const double operations = kConvOperations * static_cast<double>((p_.B * p_.T + p_.N * p_.L) * p_.channels);
    parallel_for(tasks, worthwhile_threads(threads, operations), [&](int64_t task, int64_t worker) {
      run_sequence(sequences_[static_cast<size_t>(task / blocks)], blocks_[static_cast<size_t>(task % blocks)],
                   &scratch[static_cast<size_t>(worker)]);
    });
    if (p_.varlen) zero_outside_sequences();
    conv_gates(args_, p_);
  }

 private:
  void run_sequence(const ConvSequence& s, const ChannelBlock& block, Scratch<T>* scratch) {
    const flash_qla_conv_part& part = args_.parts[block.part];
    const int64_t begin = s.begin, end = s.begin + s.length;
    ConvRows<T>& rows = scratch->rows;
    rows.load_weights(part, block, p_.W);
    const int64_t stride = rows.stride;
    if (s.skipped) {
      scratch->out.zero(begin, end, begin, stride);
      return scratch->out.store(part, block, s.b, begin, end, stride);
    }
    rows.load_inputs(part.x, block, s.b, begin, end);
    rows.load_history(part.initial_state, block, s, p_);
    rows.set_taps(args_.seq_idx, s, begin, end, begin, p_.W);
    layer_kernels<T>().convolve(rows.taps, s.length, p_.W, rows.weights, rows.bias, stride, scratch->out.u);
    scratch->out.finish(part, args_.activation, block, s.b, begin, end, begin, stride);
    load_state(part, block, s, p_, stride, scratch->states);
    if (s.draft_row >= 0) store_drafts(s, block, rows, scratch->states.after);
    if (s.write_row >= 0) {
      store_state(part, block, s, s.length, s.write_row, p_, stride, scratch->states,
                  [&](int64_t t, T* to) { std::copy_n(rows.input(begin + t), stride, to); });
    }
    scratch->out.store(part, block, s.b, begin, end, stride);
  }

  // The W - 1 inputs after each token. `window` is scratch of as many rows.
  void store_drafts(const ConvSequence& s, const ChannelBlock& block, const ConvRows<T>& rows, T* window) {
    const Tensor& t = args_.draft_states;
    for (int64_t token = 0; token < std::min(s.length, t.shape[1]); ++token) {
      for (int64_t i = 0; i < p_.W - 1; ++i) {
        const int64_t position = s.begin + token + 1 - (p_.W - 1) + i;
        std::copy_n(rows.input_or_history(position, s, p_.W), rows.stride, window + i * rows.stride);
      }
      const View to = view_at(t, offset_of(t, s.draft_row, token, block.all_channel), t.stride[3], t.stride[2]);
      store_rows(window, p_.W - 1, block.columns, rows.stride, to);
    }
  }

  void zero_outside_sequences() {
    const int64_t first = p_.N > 0 ? sequences_.front().begin : p_.T;
    const int64_t last = p_.N > 0 ? sequences_.back().begin + sequences_.back().length : p_.T;
    for (int32_t i = 0; i < args_.num_parts; ++i) {
      const Tensor &y = args_.parts[i].y, &norm = args_.parts[i].inverse_norm;
      fill_zero(y, 1, 0, first);
      fill_zero(y, 1, last, p_.T);
      for (int64_t t = 0; present(norm) && t < p_.T; ++t) {
        for (int64_t h = 0; (t < first || t >= last) && h < norm.shape[2]; ++h) {
          store(norm, offset_of(norm, 0, t, h), 1.0 / std::sqrt(kL2NormEps));
        }
      }
    }
  }

  const Arguments& args_;
  const ConvProblem& p_;
  const std::vector<ConvSequence> sequences_;
  const std::vector<ChannelBlock> blocks_;
};

std::string accept(const Arguments&, const ConvProblem&) { return {}; }

template <class T>
size_t size_for(const Arguments& args, const ConvProblem& p) {
  const std::vector<ChannelBlock> blocks = channel_blocks(args);
  Arena of_thread(nullptr);
  Scratch<T>(&of_thread, p, most_columns(blocks));
  const int64_t tasks = p.N * static_cast<int64_t>(blocks.size());
  return of_thread.used() * static_cast<size_t>(thread_count(args.options.num_threads, tasks));
}

size_t workspace_size(const Arguments& args, const ConvProblem& p) {
  return p.dtype == DType::kFloat64 ? size_for<double>(args, p) : size_for<float>(args, p);
}

Status run(const Arguments& args, const ConvProblem& p, void* workspace, void*) {
  p.dtype == DType::kFloat64 ? ConvUpdate<double>(args, p).run(workspace) : ConvUpdate<float>(args, p).run(workspace);
  return Status();
}

}  // namespace
}  // namespace cpu

const ConvPath kCpuConvUpdate = {"cpu", FLASH_QLA_CPU, false, cpu::accept, cpu::workspace_size, cpu::run};

}  // namespace flash_qla
