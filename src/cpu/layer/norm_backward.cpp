// The gradients of the gated norm: r and the gate are computed again. A task is some rows, and leaves a part of the
// sums over rows; the parts are added in their order, in double.
#include <vector>

#include "cpu/layer/norm_rows.h"
#include "cpu/layer/paths.h"
#include "cpu/threads.h"

namespace flash_qla {
namespace cpu {
namespace {

using Arguments = flash_qla_norm_gated_backward_arguments;

template <class T>
struct Scratch {
  T *x, *z, *gate, *d, *other;  // [rows, stride]
  T* r;                         // [rows]

  Scratch(Arena* arena, int64_t V) {
    for (T** array : {&x, &z, &gate, &d, &other}) *array = arena->take<T>(norm_rows(V) * padded(V));
    r = arena->take<T>(norm_rows(V));
  }
};

template <class T>
struct Layout {
  T *weight, *bias;    // [stride], or null
  T *dweight, *dbias;  // [tasks, stride] parts of the sums, or null
  std::vector<Scratch<T>> scratch;

  Layout(Arena* arena, const Arguments& args, const NormProblem& p, bool fill) {
    weight = load_norm_vector<T>(args.weight, p.V, arena, fill);
    bias = load_norm_vector<T>(args.bias, p.V, arena, fill);
    const int64_t tasks = ceil_div(p.rows, norm_rows(p.V));
    dweight = present(args.dweight) ? arena->take<T>(tasks * padded(p.V)) : nullptr;
    dbias = present(args.dbias) ? arena->take<T>(tasks * padded(p.V)) : nullptr;
    const int64_t threads = thread_count(args.options.num_threads, tasks);
    for (int64_t i = 0; i < threads; ++i) scratch.emplace_back(arena, p.V);
  }
};

// With n the normalised row and h its gradient: the gradient of what was normalised is r (h - n mean(h n)).
template <class T>
void run_rows(const Arguments& args, const NormProblem& p, const Layout<T>& layout, int64_t begin, int64_t end,
              const Scratch<T>& scratch) {
  const LayerKernels<T>& kernel = layer_kernels<T>();
  const int64_t stride = padded(p.V), rows = end - begin, count = rows * stride, task = begin / norm_rows(p.V);
  const bool gated = present(args.z);
  const T scale = static_cast<T>(1.0 / static_cast<double>(p.V));
  T *n = scratch.x, *d = scratch.d, *other = scratch.other;
  load_norm_rows(args.x, begin, end, p.V, stride, n);
  load_norm_rows(args.dy, begin, end, p.V, stride, d);
  if (gated) {
    load_norm_rows(args.z, begin, end, p.V, stride, scratch.z);
    activate(args.activation, scratch.z, count, scratch.gate);
    if (args.gate_first) kernel.multiply(n, scratch.gate, count, n);
  }
  kernel.normalise(n, rows, p.V, stride, scale, static_cast<T>(args.eps), scratch.r);
  if (gated && !args.gate_first) {
    if (present(args.dz)) {  // dz = dy (n w + b) act'(z)
      kernel.affine(n, rows, stride, layout.weight, layout.bias, other);
      kernel.multiply(other, d, count, other);
      activate_backward(args.activation, scratch.z, count, other);
      store_norm_rows(other, begin, end, p.V, stride, args.dz);
    }
    kernel.multiply(d, scratch.gate, count, d);
  }
  for (const auto& [sums, with] : {std::pair{layout.dweight, n}, std::pair{layout.dbias, static_cast<T*>(nullptr)}}) {
    if (sums == nullptr) continue;
    std::fill_n(sums + task * stride, stride, T(0));
    kernel.column_sums(d, with, rows, stride, sums + task * stride);
  }
  if (!present(args.dx) && !(present(args.dz) && args.gate_first)) return;
  if (layout.weight != nullptr) kernel.affine(d, rows, stride, layout.weight, nullptr, d);
  kernel.normalise_backward(n, scratch.r, rows, p.V, stride, scale, d);
  if (gated && args.gate_first) {
    if (present(args.dz)) {  // dz = dv x act'(z)
      load_norm_rows(args.x, begin, end, p.V, stride, other);
      kernel.multiply(other, d, count, other);
      activate_backward(args.activation, scratch.z, count, other);
      store_norm_rows(other, begin, end, p.V, stride, args.dz);
    }
    kernel.multiply(d, scratch.gate, count, d);
  }
  if (present(args.dx)) store_norm_rows(d, begin, end, p.V, stride, args.dx);
}

template <class T>
void add_tasks(const T* sums, int64_t tasks, int64_t V, const Tensor& out) {
  for (int64_t v = 0; sums != nullptr && v < V; ++v) {
    double sum = 0.0;
    for (int64_t task = 0; task < tasks; ++task) sum += sums[task * padded(V) + v];
    store(out, offset_of(out, v), sum);
  }
}

template <class T>
Status run_in(const Arguments& args, const NormProblem& p, void* workspace) {
  Arena arena(workspace);
  const Layout<T> layout(&arena, args, p, true);
  const int64_t step = norm_rows(p.V), tasks = ceil_div(p.rows, step);
  const double operations = 2 * kNormOperations * static_cast<double>(p.rows * p.V);
  parallel_for(tasks, worthwhile_threads(static_cast<int64_t>(layout.scratch.size()), operations),
               [&](int64_t task, int64_t worker) {
                 run_rows(args, p, layout, task * step, std::min((task + 1) * step, p.rows),
                          layout.scratch[static_cast<size_t>(worker)]);
               });
  add_tasks(layout.dweight, tasks, p.V, args.dweight);
  add_tasks(layout.dbias, tasks, p.V, args.dbias);
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

const NormBackwardPath kCpuNormGatedBackward = {"cpu",       FLASH_QLA_CPU,       false,
                                                cpu::accept, cpu::workspace_size, cpu::run};

}  // namespace flash_qla
