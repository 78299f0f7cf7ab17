// One channel of a call, where a thread has one.
#pragma once

#include "cuda/layer/conv_sequences.cuh"

namespace flash_qla::cuda {

constexpr int kStateThreads = 128;

// One channel of a call.
struct ConvChannel {
  int part, head, dim;
  int64_t channel;  // within the part
};

template <class Part>
__device__ inline ConvChannel channel_at(const Part* parts, int num_parts, int64_t channel) {
  int i = 0;
  while (i + 1 < num_parts && channel >= parts[i + 1].channel) ++i;
  channel -= parts[i].channel;
  return {i, static_cast<int>(channel / parts[i].dim), static_cast<int>(channel % parts[i].dim), channel};
}

}  // namespace flash_qla::cuda
