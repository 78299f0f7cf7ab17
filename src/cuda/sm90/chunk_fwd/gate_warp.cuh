// The gates of chunks: g and beta on their way into shared memory, and the gate warp, which has the chunk queue too.
#pragma once

#include <cstddef>

#include "cuda/common/bulk.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/sm90/chunk_fwd/chunk_descriptor.cuh"
#include "cuda/sm90/chunk_fwd/work_queue.cuh"
#include "cuda/sm90/common/device.cuh"
#include "cuda/sm90/common/gate_vectors.cuh"

namespace flash_qla::cuda::sm90::fwd {

// Every beta of a call without any.
static __device__ const float kOne = 1.0f;

// g and beta of a chunk into their stage, zeros past the end, by 128 threads, all of which `barrier` counts: half of
// them fetch g, the others beta.
template <typename Traits>
__device__ __forceinline__ void load_gates(const Args& args, const ChunkDescriptor& chunk, uint32_t raw,
                                           uint32_t barrier, int thread) {
  const int4 place = *reinterpret_cast<const int4*>(&chunk);  // row, valid, flags, head
  const int token = thread % kChunk;
  const bool is_beta = thread >= kChunk;
  const float* data = is_beta ? args.beta : args.g;
  const bool given = data != nullptr;
  // Strides below 2^29 elements: the launcher has looked.
  const int token_bytes = 4 * static_cast<int>(is_beta ? args.beta_token_stride : args.g_token_stride);
  const int head_bytes = 4 * static_cast<int>(is_beta ? args.beta_head_stride : args.g_head_stride);
  const void* base = given ? static_cast<const void*>(data) : is_beta ? static_cast<const void*>(&kOne) : args.q;
  // With nothing to read, any mapped address does: zero bytes are taken from it.
  const bool have = token < place.y && (given || is_beta);
  const bool moves = have && given;
  const void* head = advance(base, moves ? place.w : 0, head_bytes);
  copy_async_4(raw + (is_beta ? Traits::kInputBeta : Traits::kInputG) + 4 * token,
               advance(head, moves ? place.x + token : 0, token_bytes), have);
  copy_async_arrive(barrier);
}

// One warp: the gates of every chunk, and the chunk queue.
template <typename Traits>
struct GateWarp : WarpRole<Traits> {
  using Base = WarpRole<Traits>;
  using Base::descriptor;
  using Base::p;

  // g and beta of a chunk, if there is one, on their way, as load_gates() does it, with fewer instructions: half of the
  // lanes fetch g, the others beta.
  __device__ void fetch(uint32_t m) const {
    const int4 place = *reinterpret_cast<const int4*>(&descriptor(m));  // row, valid, flags, head
    if (place.y < 0) return;
    const int number = this->lane();
    const bool is_beta = number >= 16;
    const float* data = is_beta ? p.args.beta : p.args.g;
    const bool given = data != nullptr;
    // With nothing to read, any mapped address does: zero bytes are taken from it.
    const void* base = given ? static_cast<const void*>(data) : is_beta ? static_cast<const void*>(&kOne) : p.args.q;
    // Strides below 2^29 elements: the launcher has looked.
    const int token_bytes =
        given ? 4 * static_cast<int>(is_beta ? p.args.beta_token_stride : p.args.g_token_stride) : 0;
    const int head_bytes = given ? 4 * static_cast<int>(is_beta ? p.args.beta_head_stride : p.args.g_head_stride) : 0;
    const void* from = advance(advance(base, place.w, head_bytes), place.x, token_bytes);
    const uint32_t to = this->stage_input(m) + (is_beta ? Traits::kInputBeta : Traits::kInputG);
    const int valid = given || is_beta ? place.y : 0;
#pragma unroll
    for (int token = number & 15; token < kChunk; token += 16) {
      const bool have = token < valid;
      copy_async_4(to + 4 * token, have ? advance(from, token, token_bytes) : base, have);
    }
    copy_async_arrive(Traits::FullInput::barrier(m));
  }

  // The sums of g up to the lane's two tokens, for the backward.
  __device__ void save_sums(uint32_t m, float x, float y) const {
    if (p.args.g_cumsum == nullptr) return;
    const ChunkDescriptor& c = descriptor(m);
    const int token = 2 * this->lane(), heads = p.args.num_value_heads;
    float* out = p.args.g_cumsum + int64_t{c.row + token} * heads + c.head;
    if (token < c.valid) out[0] = x;
    if (token + 1 < c.valid) out[heads] = y;
  }

  // The open item of the chunk queue, a word of its next descriptor to a lane, so that the chunks in an item's middle
  // are listed without reading anything: by the producer in shared memory, which opens the items, it took a third of
  // the warp's time.
  struct OpenItem {
    int word, remaining, warmup;  // as in QueueProducer
    ChunkEnd end;                 // likewise; only where chunks end at checkpoints
  };
  // Words of a descriptor.
  static constexpr int kDescriptorWords = sizeof(ChunkDescriptor) / 4;
  static constexpr int kRow = offsetof(ChunkDescriptor, row) / 4, kValid = offsetof(ChunkDescriptor, valid) / 4,
                       kFlags = offsetof(ChunkDescriptor, flags) / 4, kNumber = offsetof(ChunkDescriptor, chunk) / 4,
                       kPosition = offsetof(ChunkDescriptor, position) / 4;
  __device__ QueueProducer& producer() const {
    return *reinterpret_cast<QueueProducer*>(shared_memory() + Traits::kSmemProducer);
  }
  __device__ OpenItem read_item() const {
    const QueueProducer& from = producer();
    const int word = reinterpret_cast<const int*>(&from.next)[min(this->lane(), kDescriptorWords - 1)];
    OpenItem item{word, from.remaining, from.warmup, {}};
    if constexpr (Traits::kEndsAtCheckpoints) item.end = from.end;
    return item;
  }
  // For the open item's next chunk, `skipped` tokens after that of item.word.
  __device__ int32_t find_checkpoint(const OpenItem& item, int skipped) const {
    const int row = __shfl_sync(0xffffffffu, item.word, kRow) + skipped;
    const int position = __shfl_sync(0xffffffffu, item.word, kPosition) + (skipped > 0 && item.end.inside == 0);
    return static_cast<int32_t>(
        __reduce_min_sync(0xffffffffu, static_cast<uint32_t>(tokens_to_checkpoint<Traits>(
                                           p.args, row, position, item.end.inside, item.remaining, this->lane(), 32))));
  }
  __device__ void queue_chunk(uint32_t m, OpenItem& item) const {
    const int number = this->lane();
    int* to = reinterpret_cast<int*>(shared_memory() + Traits::kSmemDescriptors) +
              m % Traits::kDescriptorRing * kDescriptorWords + number;
    if (item.remaining <= 0) {
      if (number == 0) {
        producer().remaining = -1;
        open_next_item<Traits>(p, producer());
      }
      __syncwarp();
      item = read_item();
      if (item.remaining < 0) {
        if (number == kValid) *to = -1;
        return;
      }
      if constexpr (Traits::kEndsAtCheckpoints) {
        item.end.inside = 0;
        item.end.kept = find_checkpoint(item, 0);
      }
    }
    int valid = min(item.remaining, kChunk), end_flags = 0;
    if constexpr (Traits::kEndsAtCheckpoints) valid = min(valid, min(kChunk - item.end.inside, item.end.kept));
    const int tokens = item.remaining;
    item.remaining -= valid;
    if constexpr (Traits::kEndsAtCheckpoints) {
      end_flags = end_chunk(item.end, valid, tokens, [&] { return find_checkpoint(item, valid); });
    }
    int word = number == kValid ? valid : item.word;
    const bool is_flags = number == kFlags;
    if (is_flags) word |= end_flags | (item.remaining == 0 ? kLastChunk : 0) | (item.warmup > 0 ? kWarmupChunk : 0);
    if (number < kDescriptorWords) *to = word;
    item.warmup -= item.warmup > 0;
    const int row_step = Traits::kEndsAtCheckpoints ? valid : kChunk;
    const int chunk_step = Traits::kEndsAtCheckpoints && item.end.inside != 0 ? 0 : 1;
    const int step = number == kRow ? row_step : number == kNumber || number == kPosition ? chunk_step : 0;
    item.word = is_flags ? item.word & kFlagsOfTile : item.word + step;
  }

  __device__ void run() const {
    static_assert(Traits::kStagesInput == 2 * Traits::kStagesGate);
    OpenItem item = read_item();
#pragma unroll 1
    for (uint32_t m = 0; m < Traits::kStagesGate && descriptor(m).valid >= 0; ++m) fetch(m);
#pragma unroll 1
    for (uint32_t m = 0; descriptor(m).valid >= 0; ++m) {
      // The stages of chunk m - 4 are free then: that of its gates for this chunk's, that of its g and beta for chunk
      // m + 4.
      if (m >= Traits::kStagesGate) this->wait_done(m - Traits::kStagesGate);
      this->wait_input(m);
      const uint32_t gate = this->stage_gate(m), raw = this->stage_input(m) + 8 * this->lane();
      make_gates<Traits>(
          p.args.scale, load_shared_f2(raw + Traits::kInputG), [&] { return load_shared_f2(raw + Traits::kInputBeta); },
          is_short_last_chunk<Traits>(descriptor(m)), gate, gate, this->lane(),
          [&](float x, float y) {
            if constexpr (Traits::kSavesA) save_sums(m, x, y);
          });
      __syncwarp();
      Traits::FullGate::arrive(m, this->lane());
      fetch(m + Traits::kStagesGate);
      queue_chunk(m + kFirstDescriptors, item);
      __syncwarp();
    }
  }
};

}  // namespace flash_qla::cuda::sm90::fwd
