// Tensors with a copy on the host and one on the device, for tests and benchmarks that call the C++ interface.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/host_tensor.h"

namespace flash_qla::testing {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}

// Device memory handed out in pieces and taken back all at once.
class Arena {
 public:
  // Pieces of one allocation of so many bytes, in order, each followed by a canary.
  explicit Arena(size_t bytes) : bytes_(bytes) { check_cuda(cudaMalloc(&base_, bytes), "cudaMalloc"); }
  // Pieces that are allocations of their own: exact ones, so that compute-sanitizer sees every access past their ends,
  // or between two canaries.
  enum class Pieces { kExact, kGuarded };
  explicit Arena(Pieces pieces) : apart_(true), guard_(pieces == Pieces::kGuarded ? kCanary : 0) {}
  ~Arena() {
    reset();
    cudaFree(base_);
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void* take(size_t bytes) {
    if (apart_) return take_apart(bytes);
    const size_t size = (bytes + 255) / 256 * 256 + kCanary;
    if (used_ + size > bytes_) {
      std::fprintf(stderr, "arena: %zu bytes wanted, %zu of %zu taken\n", size, used_, bytes_);
      std::exit(2);
    }
    char* p = static_cast<char*>(base_) + used_;
    used_ += size;
    guard(p + bytes, size - bytes);
    return p;
  }
  // Whether no canary was overwritten.
  bool intact() const {
    std::vector<uint8_t> bytes;
    for (const auto& [canary, size] : canaries_) {
      bytes.resize(size);
      check_cuda(cudaMemcpy(bytes.data(), canary, size, cudaMemcpyDeviceToHost), "cudaMemcpy");
      for (uint8_t byte : bytes) {
        if (byte != kPattern) return false;
      }
    }
    return true;
  }
  void reset() {
    used_ = 0;
    canaries_.clear();
    for (void* p : allocations_) check_cuda(cudaFree(p), "cudaFree");
    allocations_.clear();
  }

 private:
  static constexpr size_t kCanary = 256;
  static constexpr uint8_t kPattern = 0xa5;
  void* take_apart(size_t bytes) {
    void* p = nullptr;
    check_cuda(cudaMalloc(&p, std::max<size_t>(bytes + 2 * guard_, 1)), "cudaMalloc");
    allocations_.push_back(p);
    char* const piece = static_cast<char*>(p) + guard_;
    if (guard_ > 0) {
      guard(static_cast<char*>(p), guard_);
      guard(piece + bytes, guard_);
    }
    return piece;
  }
  void guard(char* p, size_t bytes) {
    check_cuda(cudaMemset(p, kPattern, bytes), "cudaMemset");
    canaries_.push_back({p, bytes});
  }

  size_t bytes_ = 0, used_ = 0;
  void* base_ = nullptr;
  const bool apart_ = false;
  const size_t guard_ = 0;
  std::vector<std::pair<const char*, size_t>> canaries_;
  std::vector<void*> allocations_;
};

// How a tensor lies in memory.
enum class Layout { kContiguous, kPadded, kTransposed, kReversed, kPaddedRows };

// A tensor on the host and, after upload(), on the device. Outputs start as NaN (or 0xff.. for integers).
class Buffer {
 public:
  Buffer() = default;
  Buffer(DType type, std::vector<int64_t> shape, Layout layout = Layout::kContiguous) {
    view_.dtype = static_cast<int32_t>(type);
    view_.ndim = static_cast<int32_t>(shape.size());
    std::vector<int> order(shape.size());
    std::iota(order.begin(), order.end(), 0);
    // Transposed: dimensions 1 and 2 change places in memory ([B, T, H, D] stored as [B, H, T, D]).
    if (layout == Layout::kTransposed && shape.size() >= 3) std::swap(order[1], order[2]);
    int64_t stride = 1;
    for (size_t i = shape.size(); i-- > 0;) {
      const int d = order[i];
      view_.shape[d] = shape[static_cast<size_t>(d)];
      view_.stride[d] = stride;
      stride *= shape[static_cast<size_t>(d)];
      if (layout == Layout::kPadded && i + 1 == shape.size()) stride += 3;
      if (layout == Layout::kPaddedRows && i == 1) stride += 16;  // each index of dimension 0 stays contiguous
    }
    bytes_ = static_cast<size_t>(stride * size_of(type));
    if (layout == Layout::kReversed && view_.ndim >= 2 && view_.shape[1] > 0) {
      offset_ = (view_.shape[1] - 1) * view_.stride[1];
      view_.stride[1] = -view_.stride[1];
    }
    host_.assign(bytes_, 0xff);
    elements_ = 1;
    for (int64_t n : shape) elements_ *= n;
  }

  bool present() const { return view_.ndim > 0; }
  int64_t elements() const { return elements_; }
  const Tensor& shape_view() const { return view_; }
  Tensor host() {
    Tensor t = view_;
    t.data = host_.data() + offset_ * size_of(dtype(t));
    return t;
  }
  Tensor device() const {
    Tensor t = view_;
    if (t.ndim > 0) t.data = static_cast<char*>(device_) + offset_ * size_of(dtype(t));
    return t;
  }

  // Where its bytes lie on the device.
  void* storage() const { return device_; }

  // Sets every element to value(i, j, k, l).
  template <class Function>
  void fill(Function value) {
    if (!present()) return;
    const Tensor t = host();
    int64_t s[4] = {1, 1, 1, 1};
    for (int i = 0; i < t.ndim; ++i) s[i] = t.shape[i];
    for (int64_t i = 0; i < s[0]; ++i) {
      for (int64_t j = 0; j < s[1]; ++j) {
        for (int64_t k = 0; k < s[2]; ++k) {
          for (int64_t l = 0; l < s[3]; ++l) put(t, offset_of(t, i, j, k, l), value(i, j, k, l));
        }
      }
    }
  }

  void poison() { std::fill(host_.begin(), host_.end(), uint8_t{0xff}); }
  void upload(Arena& arena) {
    if (!present()) return;
    device_ = arena.take(bytes_);
    write_device();
  }
  void write_device() {
    if (present() && bytes_ > 0) {
      check_cuda(cudaMemcpy(device_, host_.data(), bytes_, cudaMemcpyHostToDevice), "cudaMemcpy to the device");
    }
  }
  void download() {
    if (present() && bytes_ > 0) {
      check_cuda(cudaMemcpy(host_.data(), device_, bytes_, cudaMemcpyDeviceToHost), "cudaMemcpy to the host");
    }
  }
  const std::vector<uint8_t>& bytes() const { return host_; }

  // Rows [begin, end) of dimension `dim`, contiguous.
  Buffer slice(int dim, int64_t begin, int64_t end) {
    std::vector<int64_t> shape(view_.shape, view_.shape + view_.ndim);
    shape[static_cast<size_t>(dim)] = end - begin;
    Buffer part(dtype(view_), shape);
    const Tensor from = host();
    part.fill([&](int64_t i, int64_t j, int64_t k, int64_t l) {
      int64_t at[4] = {i, j, k, l};
      at[dim] += begin;
      return load(from, offset_of(from, at[0], at[1], at[2], at[3]));
    });
    return part;
  }

 private:
  static void put(const Tensor& t, int64_t offset, double x) {
    switch (dtype(t)) {
      case DType::kInt32:
        static_cast<int32_t*>(t.data)[offset] = static_cast<int32_t>(x);
        break;
      case DType::kInt64:
        static_cast<int64_t*>(t.data)[offset] = static_cast<int64_t>(x);
        break;
      case DType::kBool:
        static_cast<uint8_t*>(t.data)[offset] = x != 0.0;
        break;
      default:
        store(t, offset, x);
    }
  }

  Tensor view_{};
  int64_t offset_ = 0, elements_ = 0;  // of the first element in the storage
  size_t bytes_ = 0;
  std::vector<uint8_t> host_;
  void* device_ = nullptr;
};

// Standard normal numbers, fast enough for a million tokens.
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  double uniform() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }
  double uniform(double low, double high) { return low + (high - low) * uniform(); }
  int64_t integer(int64_t low, int64_t high) {  // both included
    return low + static_cast<int64_t>(engine_() % static_cast<uint64_t>(high - low + 1));
  }
  bool chance(double probability) { return uniform() < probability; }
  double normal() { return uniform() + uniform() + uniform() + uniform() - 2.0 + (uniform() - 0.5) * 0.5; }
  template <class T>
  const T& pick(const std::vector<T>& from) {
    return from[static_cast<size_t>(integer(0, static_cast<int64_t>(from.size()) - 1))];
  }

 private:
  std::mt19937_64 engine_;
};

// Result of comparing a tensor with its reference: positions of NaN and infinity first, then the largest relative L2
// error of the whole and of each index of `head_dim` (-1: the whole alone). A reference whose norm is below
// least_element sqrt(n) is compared absolutely, at that. Infinite: the non-finite positions differ.
// least_norm: what a head's norm counts as where it is smaller.
inline double relative_error(Buffer& actual, Buffer& expected, int head_dim, double least_norm = 0.0,
                             double least_element = 1e-6) {
  const Tensor a = actual.host(), e = expected.host();
  int64_t s[4] = {1, 1, 1, 1};
  for (int i = 0; i < a.ndim; ++i) s[i] = a.shape[i];
  const int64_t heads = head_dim < 0 ? 1 : s[head_dim];
  std::vector<double> difference(static_cast<size_t>(heads), 0.0), norm(static_cast<size_t>(heads), 0.0);
  std::vector<int64_t> count(static_cast<size_t>(heads), 0);
  int64_t x[4];
  for (x[0] = 0; x[0] < s[0]; ++x[0]) {
    for (x[1] = 0; x[1] < s[1]; ++x[1]) {
      for (x[2] = 0; x[2] < s[2]; ++x[2]) {
        for (x[3] = 0; x[3] < s[3]; ++x[3]) {
          const double got = load(a, offset_of(a, x[0], x[1], x[2], x[3]));
          const double want = load(e, offset_of(e, x[0], x[1], x[2], x[3]));
          if (std::isnan(got) != std::isnan(want)) return INFINITY;
          if (std::isinf(got) || std::isinf(want)) {
            if (got != want) return INFINITY;
            continue;
          }
          if (std::isnan(want)) continue;
          const size_t h = head_dim < 0 ? 0 : static_cast<size_t>(x[head_dim]);
          difference[h] += (got - want) * (got - want);
          norm[h] += want * want;
          ++count[h];
        }
      }
    }
  }
  double worst = 0.0;
  const auto relative = [=](double d, double n, int64_t c) {
    const double floor = least_element * std::sqrt(static_cast<double>(c));
    return std::sqrt(d) / std::max({std::sqrt(n), floor, least_norm, 1e-300});
  };
  for (int64_t h = 0; h < heads; ++h) {
    const size_t i = static_cast<size_t>(h);
    worst = std::max(worst, relative(difference[i], norm[i], count[i]));
  }
  return worst;
}

}  // namespace flash_qla::testing
