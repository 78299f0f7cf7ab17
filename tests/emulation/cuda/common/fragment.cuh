// 8x8 matrices of 16-bit elements of one emulated warp; src/cuda/common/fragment.cuh says what each is for.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace flash_qla::cuda {

template <typename T>
uint32_t pack2(float lo, float hi);
template <>
inline uint32_t pack2<__nv_bfloat16>(float lo, float hi) {
  return emulation_bits<uint32_t>(__floats2bfloat162_rn(lo, hi));
}
template <>
inline uint32_t pack2<__half>(float lo, float hi) {
  return emulation_bits<uint32_t>(__floats2half2_rn(lo, hi));
}

template <typename T>
float2 unpack2(uint32_t packed);
template <>
inline float2 unpack2<__nv_bfloat16>(uint32_t packed) {
  return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u));
}
template <>
inline float2 unpack2<__half>(uint32_t packed) {
  return __half22float2(emulation_bits<__half2>(packed));
}

namespace emulated {

struct Matrices {
  uint32_t r[4];
};

// What lane `lane` gets of the matrix with these rows.
inline uint32_t element_pair(const uint16_t* const (&rows)[8], int lane, bool transposed) {
  const int i = lane / 4, j = lane % 4 * 2;
  const uint16_t low = transposed ? rows[j][i] : rows[i][j], high = transposed ? rows[j + 1][i] : rows[i][j + 1];
  return static_cast<uint32_t>(high) << 16 | low;
}

inline Matrices load_matrices(uint32_t address, bool transposed, cuda_emulation::Where where) {
  return cuda_emulation::collective<Matrices>(
      "ldmatrix", where, 0xffffffffu, address, [=](const uint32_t* addresses, Matrices* out) {
        ++cuda_emulation::counters().matrix_loads;
        for (int m = 0; m < 4; ++m) {
          const uint16_t* rows[8];
          // A row takes four of the 32 banks: eight rows are one pass where no two of them share banks.
          int uses[8] = {}, most = 0;
          for (int row = 0; row < 8; ++row) {
            const uint32_t at = addresses[8 * m + row];
            rows[row] = static_cast<const uint16_t*>(cuda_emulation::shared_pointer(at, 16, 16, "a row of ldmatrix"));
            most = max(most, ++uses[at / 16 % 8]);
          }
          cuda_emulation::counters().bank_conflicts += most - 1;
          for (int lane = 0; lane < 32; ++lane) out[lane].r[m] = element_pair(rows, lane, transposed);
        }
      });
}

inline void store_matrices(uint32_t address, const Matrices& matrices, bool transposed, cuda_emulation::Where where) {
  struct Item {
    uint32_t address;
    Matrices matrices;
  };
  cuda_emulation::collective<cuda_emulation::Nothing>(
      "stmatrix", where, 0xffffffffu, Item{address, matrices}, [=](const Item* in, cuda_emulation::Nothing*) {
        for (int m = 0; m < 4; ++m) {
          for (int row = 0; row < 8; ++row) {
            auto* to = static_cast<uint16_t*>(
                cuda_emulation::shared_pointer(in[8 * m + row].address, 16, 16, "a row of stmatrix"));
            for (int column = 0; column < 8; ++column) {
              const int i = transposed ? column : row, j = transposed ? row : column;
              to[column] = static_cast<uint16_t>(in[4 * i + j / 2].matrices.r[m] >> 16 * (j % 2));
            }
          }
        }
      });
}

}  // namespace emulated

inline void load_matrix_x4(uint32_t smem, uint32_t (&r)[4],
                           cuda_emulation::Where where = cuda_emulation::Where::current()) {
  const emulated::Matrices m = emulated::load_matrices(smem, false, where);
  for (int i = 0; i < 4; ++i) r[i] = m.r[i];
}

inline void load_matrix_x4_trans(uint32_t smem, uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3,
                                 cuda_emulation::Where where = cuda_emulation::Where::current()) {
  const emulated::Matrices m = emulated::load_matrices(smem, true, where);
  r0 = m.r[0];
  r1 = m.r[1];
  r2 = m.r[2];
  r3 = m.r[3];
}

inline void load_matrix_x4_trans(uint32_t smem, uint32_t (&r)[4],
                                 cuda_emulation::Where where = cuda_emulation::Where::current()) {
  load_matrix_x4_trans(smem, r[0], r[1], r[2], r[3], where);
}

inline uint32_t transpose_8x8(uint32_t x, cuda_emulation::Where where = cuda_emulation::Where::current()) {
  return cuda_emulation::of_lanes("movmatrix", where, 0xffffffffu, x, [](int lane, const uint32_t* in) {
    const auto element = [&](int row, int column) { return in[row * 4 + column / 2] >> 16 * (column % 2) & 0xffff; };
    const int i = lane / 4, j = lane % 4 * 2;
    return element(j + 1, i) << 16 | element(j, i);
  });
}

inline void store_matrix_x4(uint32_t smem, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3,
                            cuda_emulation::Where where = cuda_emulation::Where::current()) {
  emulated::store_matrices(smem, {{r0, r1, r2, r3}}, false, where);
}
inline void store_matrix_x4_trans(uint32_t smem, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3,
                                  cuda_emulation::Where where = cuda_emulation::Where::current()) {
  emulated::store_matrices(smem, {{r0, r1, r2, r3}}, true, where);
}

inline float4 load_shared_f4(uint32_t smem) {
  return *static_cast<float4*>(cuda_emulation::shared_pointer(smem, 16, 16, "a load"));
}
inline float2 load_shared_f2(uint32_t smem) { return cuda_emulation::shared<float2>(smem, "a load"); }
inline float load_shared_f1(uint32_t smem) { return cuda_emulation::shared<float>(smem, "a load"); }
inline uint4 load_shared_u4(uint32_t smem) { return cuda_emulation::shared<uint4>(smem, "a load"); }
inline void store_shared_f1(uint32_t smem, float v) { cuda_emulation::shared<float>(smem, "a store") = v; }
inline void store_shared_f2(uint32_t smem, float x, float y) {
  cuda_emulation::shared<float2>(smem, "a store") = make_float2(x, y);
}
inline void store_shared_u4(uint32_t smem, uint4 v) { cuda_emulation::shared<uint4>(smem, "a store") = v; }

inline void store_global_u2_if(bool stores, void* global, uint2 v) {
  if (stores) *static_cast<uint2*>(global) = v;
}

inline float log2_approx(float x) { return std::log2(x); }
inline float exp2_approx(float x) { return std::exp2(x); }

}  // namespace flash_qla::cuda
