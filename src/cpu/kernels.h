// What is compiled once per instruction set: the arithmetic of one chunk, of a few recurrent steps, and the conversion
// of rows. Everything around it (sequences, options, states, threads) is compiled once, for the plain instruction set.
#pragma once

#include <cstdint>

#include "flash_qla/flash_qla.hpp"

namespace flash_qla::cpu {

// A matrix inside a tensor; strides in elements, any value.
struct View {
  void* data;
  DType type;
  int64_t row_stride, col_stride;
};

// One chunk of one (sequence, value head). Matrices are row-major without gaps; those with two token dimensions have
// rows of 64 whatever n is. Names are docs/math.md's. T is float or double.
template <class T>
struct Chunk {
  int64_t n, K, V;  // n tokens, 1 .. 64
  T scale;

  // inputs
  double c[64];  // cumulative log decay
  T beta[64];
  T* q;  // [n, K]
  T* k;  // [n, K]
  T* v;  // [n, V]

  // results of decays(), inverse() and correct()
  T gamma[64];  // e^c
  T* G;         // [n, 64]: e^(c_i - c_j) for i >= j, else 0
  T* KK;        // [n, 64]: K K^T, right where i >= j
  T* A;         // [n, 64]: (I + strict_lower(diag(beta) K K^T))^-1, zero elsewhere
  T* v_new;     // [n, V]

  // scratch
  T* rows;   // [n, K]
  T* pairs;  // [n, 64]
  T* w;      // [n, V]
};

// What the backward of a chunk adds to it.
template <class T>
struct ChunkBackward {
  const T* S;      // [K, V] state at the chunk's start
  const T* d_o;    // [n, V]
  T* dS;           // [K, V] in: gradient of the state at the chunk's end; out: of that at its start
  bool correct_w;  // w must be computed for dbeta, and v is loaded: some beta is too small to divide by

  T* dq;  // [n, K]
  T* dk;  // [n, K]
  T* dv;  // [n, V]
  T dbeta[64];
  double dg[64];

  // scratch
  T* z;           // [n, V]
  T* gates;       // [n, 64]
  T* d_pairs;     // [n, 64]
  T* value_rows;  // [n, V]
};

// A |beta| below this is not divided by in dbeta = <Z, V'> / beta: V' = beta E would be near float32's smallest normal
// number (1.2e-38) for errors E near 1e-8, and inexact.
inline constexpr double kSmallestDivisor = 1e-30;

// Up to 64 recurrent steps of one (sequence, value head), the state held as [V, K].
template <class T>
struct Steps {
  int64_t n, K, V;
  T scale;
  T decay[64];  // e^g
  T beta[64];
  T* q;  // [n, K]
  T* k;  // [n, K]
  T* v;  // [n, V]
  T* S;  // [V, K], updated
  T* o;  // [n, V]
};

template <class T>
struct Kernels {
  void (*load)(const View& from, int64_t rows, int64_t cols, T* to);
  void (*store)(const T* from, int64_t rows, int64_t cols, const View& to);
  // x -> x / sqrt(sum x^2 + 1e-6), row by row, rounded to `type`.
  void (*l2norm)(T* x, int64_t rows, int64_t cols, DType type);
  // Takes d from the gradient of the normalised rows to that of the rows x.
  void (*l2norm_backward)(const T* x, T* d, int64_t rows, int64_t cols);
  void (*add)(const T* from, int64_t count, T* to);

  void (*decays)(Chunk<T>& chunk);               // c -> gamma, G
  void (*inverse)(Chunk<T>& chunk);              // k, beta -> KK, A
  void (*correct)(Chunk<T>& chunk, const T* S);  // v, A, G, S -> v_new
  void (*output)(Chunk<T>& chunk, const T* S, T* o);
  // The state after the first m tokens, in place or not.
  void (*advance)(Chunk<T>& chunk, int64_t m, const T* S, T* S_out);
  void (*backward)(Chunk<T>& chunk, ChunkBackward<T>& grad);

  void (*recurrent)(const Steps<T>& steps);

  // For links of parts (docs/several_cards.md). The gradient dS [K, V] of the state at the chunk's end becomes that at
  // its start; d_o [n, V] or NULL.
  void (*reverse_state)(Chunk<T>& chunk, const T* d_o, T* dS);
  // out += M x, or M^T x: M [K, K], x and out [K, cols].
  void (*add_product)(const T* M, bool transposed, const T* x, int64_t K, int64_t cols, T* out);
};

struct KernelTable {
  const char* name;
  Kernels<float> f32;
  Kernels<double> f64;
};

extern const KernelTable kKernelsPlain;
#if defined(__x86_64__)
extern const KernelTable kKernelsAvx2;
extern const KernelTable kKernelsAvx512;
#endif

// The table for this machine.
const KernelTable& kernel_table();

template <class T>
const Kernels<T>& kernels();
template <>
inline const Kernels<float>& kernels<float>() {
  return kernel_table().f32;
}
template <>
inline const Kernels<double>& kernels<double>() {
  return kernel_table().f64;
}

}  // namespace flash_qla::cpu
