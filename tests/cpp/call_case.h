// Calls that the C++ tests make: memory with a view of it, and a legal call of every operand.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/registry.h"
#include "flash_qla/flash_qla.hpp"

namespace flash_qla {

inline constexpr double kCanary = -12345.0;

// Where the operations of files run that are compiled for emulated CUDA kernels as well.
#ifdef FLASH_QLA_TESTS_EMULATED
inline constexpr DeviceType kTestedDevice = DeviceType::kCuda;
#else
inline constexpr DeviceType kTestedDevice = DeviceType::kCpu;
#endif

// Memory and a view of it. Elements are doubles or floats; a fresh buffer holds canaries.
template <class T>
struct Buffer {
  std::vector<T> data;
  std::vector<int64_t> shape;

  explicit Buffer(std::vector<int64_t> extents = {}) : shape(std::move(extents)) {
    int64_t count = shape.empty() ? 0 : 1;
    for (int64_t n : shape) count *= n;
    data.assign(static_cast<size_t>(count), static_cast<T>(kCanary));
  }
  Tensor view() {
    Tensor t{};
    t.data = data.data();
    t.dtype = static_cast<int32_t>(std::is_same_v<T, double>    ? DType::kFloat64
                                   : std::is_same_v<T, int32_t> ? DType::kInt32
                                                                : DType::kFloat32);
    t.ndim = static_cast<int32_t>(shape.size());
    int64_t stride = 1;
    for (int32_t i = t.ndim - 1; i >= 0; --i) {
      t.shape[i] = shape[static_cast<size_t>(i)];
      t.stride[i] = stride;
      stride *= t.shape[i];
    }
    return t;
  }
  bool untouched() const {
    for (const T& x : data) {
      if (x != static_cast<T>(kCanary)) return false;
    }
    return true;
  }
};

// A legal double-precision call of every operand, small enough to be read in a debugger.
struct Case {
  int64_t B, T, Hq, Hv, K, V, N;
  Buffer<double> q, k, v, g, beta, h0, o, final_state, d_o, dht, dq, dk, dv, dg, dbeta, dh0;
  Buffer<int32_t> cu_seqlens;

  explicit Case(int64_t B = 1, int64_t T = 5, int64_t Hq = 1, int64_t Hv = 2, int64_t K = 3, int64_t V = 4,
                std::vector<int32_t> offsets = {})
      : B(B),
        T(T),
        Hq(Hq),
        Hv(Hv),
        K(K),
        V(V),
        N(offsets.empty() ? B : static_cast<int64_t>(offsets.size()) - 1),
        q({B, T, Hq, K}),
        k({B, T, Hq, K}),
        v({B, T, Hv, V}),
        g({B, T, Hv}),
        beta({B, T, Hv}),
        h0({N, Hv, K, V}),
        o({B, T, Hv, V}),
        final_state({N, Hv, K, V}),
        d_o({B, T, Hv, V}),
        dht({N, Hv, K, V}),
        dq({B, T, Hq, K}),
        dk({B, T, Hq, K}),
        dv({B, T, Hv, V}),
        dg({B, T, Hv}),
        dbeta({B, T, Hv}),
        dh0({N, Hv, K, V}) {
    std::mt19937 engine(1);
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> uniform(0.0, 1.0);
    for (Buffer<double>* x : {&q, &k, &v, &h0, &d_o, &dht}) {
      for (double& value : x->data) value = 0.5 * normal(engine);
    }
    for (double& value : g.data) value = -uniform(engine);
    for (double& value : beta.data) value = uniform(engine);
    if (!offsets.empty()) {
      cu_seqlens = Buffer<int32_t>({N + 1});
      cu_seqlens.data = std::move(offsets);
    }
  }

  ForwardArguments forward(const char* path = "reference") {
    ForwardArguments args;
    args.options.path = path;
    args.q = q.view();
    args.k = k.view();
    args.v = v.view();
    args.g = g.view();
    args.beta = beta.view();
    args.initial_state = h0.view();
    args.cu_seqlens = cu_seqlens.view();
    args.o = o.view();
    args.final_state = final_state.view();
    return args;
  }

  BackwardArguments backward(const char* path = "reference") {
    BackwardArguments args;
    args.options.path = path;
    args.q = q.view();
    args.k = k.view();
    args.v = v.view();
    args.g = g.view();
    args.beta = beta.view();
    args.initial_state = h0.view();
    args.cu_seqlens = cu_seqlens.view();
    args.d_o = d_o.view();
    args.dht = dht.view();
    args.dq = dq.view();
    args.dk = dk.view();
    args.dv = dv.view();
    args.dg = dg.view();
    args.dbeta = dbeta.view();
    args.dh0 = dh0.view();
    return args;
  }
};

// Runs with a workspace of exactly the size that is asked for, filled with 0xff (NaN in every float format), at an
// address that is a multiple of nothing.
template <class Op, class Arguments>
Status run(const Arguments& args) {
  size_t bytes = 0;
  if (Status s = Op::workspace_size(args, &bytes); !s.ok()) return s;
  std::vector<unsigned char> memory(bytes + 1, 0xff);
  return Op::run(args, bytes ? memory.data() + 1 : nullptr, bytes);
}

// Paths that compute on the CPU, by name.
inline std::vector<std::string> cpu_paths() {
  std::vector<std::string> names;
  for (const ForwardPath* path : chunk_forward_paths()) {
    if (path->device == FLASH_QLA_CPU) names.push_back(path->name);
  }
  return names;
}

}  // namespace flash_qla
