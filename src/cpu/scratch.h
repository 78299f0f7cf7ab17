// Carving typed arrays out of a workspace. The same layout code, run on a null base, tells the size.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels.h"

namespace flash_qla::cpu {

class Arena {
 public:
  explicit Arena(void* base) : base_(reinterpret_cast<uintptr_t>(base)) {}

  template <class T>
  T* take(int64_t count) {
    const uintptr_t at = base_ + used_;
    // A cache line and an AVX-512 register: no array straddles or shares one.
    constexpr size_t kAlignment = 64;
    used_ += (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(at);
  }

  size_t used() const { return used_; }

 private:
  uintptr_t base_;
  size_t used_ = 0;
};

// Arrays of a chunk, beside those of its matrices that live elsewhere.
template <class T>
void take_chunk(Arena* arena, int64_t K, int64_t V, Chunk<T>* chunk) {
  chunk->K = K;
  chunk->V = V;
  chunk->q = arena->take<T>(64 * K);
  chunk->k = arena->take<T>(64 * K);
  chunk->v = arena->take<T>(64 * V);
  chunk->G = arena->take<T>(64 * 64);
  chunk->rows = arena->take<T>(64 * K);
  chunk->pairs = arena->take<T>(64 * 64);
  chunk->w = arena->take<T>(64 * V);
}

}  // namespace flash_qla::cpu
