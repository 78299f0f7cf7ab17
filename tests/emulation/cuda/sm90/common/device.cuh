// The emulated SM; src/cuda/sm90/common/device.cuh says what each is for.
#pragma once

#include <cstdint>

#include "cuda/common/mbarrier.cuh"

namespace flash_qla::cuda::sm90 {

inline uint32_t tpc() { return 0; }

template <typename Number>
uint32_t load_now(const Number* data) {
  static_assert(sizeof(Number) == 4);
  return static_cast<uint32_t>(*data);
}

}  // namespace flash_qla::cuda::sm90
