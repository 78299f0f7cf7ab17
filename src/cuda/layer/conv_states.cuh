// The states that sequences leave. A thread has one channel of one sequence. It goes through the entries in order, of
// which each is made from a later one or from an input: so a state is replaced in place.
#pragma once

#include "cuda/layer/conv_channel.cuh"

namespace flash_qla::cuda {

// The state after the first `tokens` tokens of a sequence that starts from `read`, into row `write` of final_state.
__device__ inline void store_window(const ConvPart& part, const ConvSequences& s, const ConvSpan& span,
                                    const ConvChannel& c, int64_t read, int64_t write, int64_t tokens) {
  for (int64_t l = 0; l < s.L; ++l) {
    const int64_t token = tokens - s.L + l;
    float x = 0.0f;
    if (token >= 0) {
      x = load<float>(part.x, offset_of(part.x, span.b, span.begin + token, c.head, c.dim));
    } else if (read >= 0) {
      x = load<float>(part.initial_state, offset_of(part.initial_state, read, c.channel, s.L + token));
    }
    store<float>(part.final_state, offset_of(part.final_state, write, c.channel, l), x);
  }
}

__global__ void __launch_bounds__(kStateThreads)
    conv_states_kernel(const __grid_constant__ ConvParams p, int64_t channels, int64_t blocks_of_sequence) {
  const ConvSequences& s = p.sequences;
  const int64_t n = blockIdx.x / blocks_of_sequence;
  const int64_t channel = blockIdx.x % blocks_of_sequence * kStateThreads + threadIdx.x;
  if (channel >= channels) return;
  const ConvSpan span = span_of(s, n);
  const ConvSlots slots = conv_slots(s, n);
  if (slots.read == kSkipRow) return;
  const ConvChannel c = channel_at(p.parts, p.num_parts, channel);
  const ConvPart& part = p.parts[c.part];
  // What takes the place of the state that the sequence started from comes last: everything else reads it.
  for (int last = 0; last < 2; ++last) {
    for (int64_t m = 0; m < s.checkpoints; ++m) {
      const int64_t tokens = load_index(s.checkpoint_offsets, m) - (span.b * s.T + span.begin);
      if (tokens <= 0 || tokens > span.end - span.begin) continue;
      const int64_t slot = conv_slot(s, s.checkpoint_indices, m);
      if (slot == kNoSlot || (slot == slots.read) != (last != 0)) continue;
      store_window(part, s, span, c, slots.read, slot, tokens);
    }
    if (slots.write != kNoSlot && (slots.write == slots.read) == (last != 0)) {
      store_window(part, s, span, c, slots.read, slots.write, span.end - span.begin);
    }
  }
}

}  // namespace flash_qla::cuda
