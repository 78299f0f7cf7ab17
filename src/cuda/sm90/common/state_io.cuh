// A thread's part of S^T to and from a state matrix in memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/sm90/common/sizes.h"
#include "cuda/sm90/common/state_set.h"

namespace flash_qla::cuda::sm90 {

// One thread's 64 values of S^T, rows (V) dv and dv + 8, columns (K) 8j + 2q and the next, from or to a state matrix.
// Neighbours in K go together where they are neighbours in memory.
template <typename Store, bool kVFirst, bool kWrite>
__device__ __forceinline__ void move_state(Store* matrix, float (&s)[64], int dv, int q) {
  constexpr int kStrideK = kVFirst ? 1 : kHeadDim;
  constexpr int kStrideV = kVFirst ? kHeadDim : 1;
  Store* base = matrix + dv * kStrideV + 2 * q * kStrideK;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    if constexpr (kVFirst) {
      struct alignas(2 * sizeof(Store)) Pair {
        Store x, y;
      };
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Pair* pair = reinterpret_cast<Pair*>(base + 8 * j + 8 * i * kStrideV);
        if constexpr (kWrite) {
          *pair = Pair{static_cast<Store>(s[4 * j + 2 * i]), static_cast<Store>(s[4 * j + 2 * i + 1])};
        } else {
          const Pair loaded = *pair;
          s[4 * j + 2 * i] = static_cast<float>(loaded.x), s[4 * j + 2 * i + 1] = static_cast<float>(loaded.y);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Store* element = base + (8 * j + (i & 1)) * kStrideK + 8 * (i >> 1) * kStrideV;
        if constexpr (kWrite) {
          *element = static_cast<Store>(s[4 * j + i]);
        } else {
          s[4 * j + i] = static_cast<float>(*element);
        }
      }
    }
  }
}

template <bool kWrite>
__device__ __forceinline__ void move_state(void* matrix, DType type, bool v_first, float (&s)[64], int dv, int q) {
  if (type == DType::kFloat32) {
    v_first ? move_state<float, true, kWrite>(static_cast<float*>(matrix), s, dv, q)
            : move_state<float, false, kWrite>(static_cast<float*>(matrix), s, dv, q);
  } else if (type == DType::kBFloat16) {
    v_first ? move_state<__nv_bfloat16, true, kWrite>(static_cast<__nv_bfloat16*>(matrix), s, dv, q)
            : move_state<__nv_bfloat16, false, kWrite>(static_cast<__nv_bfloat16*>(matrix), s, dv, q);
  } else {
    v_first ? move_state<__half, true, kWrite>(static_cast<__half*>(matrix), s, dv, q)
            : move_state<__half, false, kWrite>(static_cast<__half*>(matrix), s, dv, q);
  }
}

}  // namespace flash_qla::cuda::sm90
