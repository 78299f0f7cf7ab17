// The gated norm: a task is some rows.
#include <vector>

#include "cpu/layer/norm_rows.h"
#include "cpu/layer/paths.h"
#include "cpu/threads.h"

namespace flash_qla {
namespace cpu {
namespace {

using Arguments = flash_qla_norm_gated_arguments;

template <class T>
struct Scratch {
  T *x, *z;  // [rows, stride]
  T* r;      // [rows]

  Scratch(Arena* arena, int64_t V) {
    x = arena->take<T>(norm_rows(V) * padded(V));
    z = arena->take<T>(norm_rows(V) * padded(V));
    r = arena->take<T>(norm_rows(V));
  }
};

template <class T>
struct Layout {
  T *weight, *bias;  // [stride], or null
  std::vector<Scratch<T>> scratch;

  Layout(Arena* arena, const Arguments& args, const NormProblem& p, bool fill) {
    weight = load_norm_vector<T>(args.weight, p.V, arena, fill);
    bias = load_norm_vector<T>(args.bias, p.V, arena, fill);
    const int64_t threads = thread_count(args.options.num_threads, ceil_div(p.rows, norm_rows(p.V)));
    for (int64_t i = 0; i < threads; ++i) scratch.emplace_back(arena, p.V);
  }
};

template <class T>
void run_rows(const Arguments& args, const NormProblem& p, const Layout<T>& layout, int64_t begin, int64_t end,
              const Scratch<T>& scratch) {
  const LayerKernels<T>& kernel = layer_kernels<T>();
  const int64_t stride = padded(p.V), rows = end - begin, count = rows * stride;
  load_norm_rows(args.x, begin, end, p.V, stride, scratch.x);
  const bool gated = present(args.z);
  if (gated) {
    load_norm_rows(args.z, begin, end, p.V, stride, scratch.z);
    activate(args.activation, scratch.z, count, scratch.z);
    if (args.gate_first) kernel.multiply(scratch.x, scratch.z, count, scratch.x);
  }
  kernel.normalise(scratch.x, rows, p.V, stride, static_cast<T>(1.0 / static_cast<double>(p.V)),
                   static_cast<T>(args.eps), scratch.r);
  if (layout.weight != nullptr || layout.bias != nullptr) {
    kernel.affine(scratch.x, rows, stride, layout.weight, layout.bias, scratch.x);
  }
  if (gated && !args.gate_first) kernel.multiply(scratch.x, scratch.z, count, scratch.x);
  store_norm_rows(scratch.x, begin, end, p.V, stride, args.y);
  for (int64_t i = begin; present(args.inverse_rms) && i < end; ++i) {
    store(args.inverse_rms, offset_of(args.inverse_rms, i), scratch.r[i - begin]);
  }
}

template <class T>
Status run_in(const Arguments& args, const NormProblem& p, void* workspace) {
  Arena arena(workspace);
  const Layout<T> layout(&arena, args, p, true);
  const int64_t step = norm_rows(p.V), tasks = ceil_div(p.rows, step);
  const double operations = kNormOperations * static_cast<double>(p.rows * p.V);
  parallel_for(tasks, worthwhile_threads(static_cast<int64_t>(layout.scratch.size()), operations),
               [&](int64_t task, int64_t worker) {
                 run_rows(args, p, layout, task * step, std::min((task + 1) * step, p.rows),
                          layout.scratch[static_cast<size_t>(worker)]);
               });
  return Status();
}

std::string accept(const Arguments&, const NormProblem&) { return {}; }

template <class T>
size_t size_for(const Arguments& args, const NormProblem& p) {
  Arena arena(nullptr);
  Layout<T>(&arena, args, p, false);
  return arena.used();
}

size_t workspace_size(const Arguments& args, const NormProblem& p) {
  return p.dtype == DType::kFloat64 ? size_for<double>(args, p) : size_for<float>(args, p);
}

Status run(const Arguments& args, const NormProblem& p, void* workspace, void*) {
  return p.dtype == DType::kFloat64 ? run_in<double>(args, p, workspace) : run_in<float>(args, p, workspace);
}

}  // namespace
}  // namespace cpu

const NormPath kCpuNormGated = {"cpu", FLASH_QLA_CPU, false, cpu::accept, cpu::workspace_size, cpu::run};

}  // namespace flash_qla
