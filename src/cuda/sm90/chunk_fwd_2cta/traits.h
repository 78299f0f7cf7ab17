// Compile-time shape of the forward of half heads: a cluster of two blocks works on one tile, each with half of V.
#pragma once

#include <cstdint>

#include "cuda/sm90/chunk_fwd/traits.h"
#include "cuda/sm90/common/ring.cuh"

namespace flash_qla::cuda::sm90::fwd_2cta {

// Names that the roles of a whole head's kernel have too mean the same here (traits.h).
template <typename Element_, bool kSave_>
struct TwoCtaTraits {
  using Element = Element_;
  static constexpr int kClusterCtas =
      2;  // each prepares every second chunk, each of its producer warpgroups every fourth
  static constexpr bool kSave = kSave_;
  static constexpr int kStateGroups = 1;
  static constexpr bool kStateOnly = false;
  static constexpr bool kEndsAtCheckpoints = false;

  // Warpgroups: two make A_g and P, one holds S^T, of one each warp has a role of its own (kernel.cuh).
  static constexpr int kProducerGroups = 2;
  static constexpr int kThreads = 128 * 4;
  // They share out the 128 a thread that the launch has: 56 + 2 * 112 + 232.
  static constexpr int kServiceRegisters = 56;
  static constexpr int kProducerRegisters = 112;
  static constexpr int kStateRegisters = 232;

  static constexpr uint32_t kBytesK = kChunk * kHeadDim * 2;
  static constexpr uint32_t kHalf = kChunk * 128;
  static constexpr uint32_t kBytesV = kHalf;
  static constexpr uint32_t kBytesMatrix = kChunk * kChunk * 2;
  static constexpr uint32_t kBytesRows = kBytesMatrix / 4;  // a warp's 16 rows of A_g or P

  // The gates of a chunk that state groups read, of which other blocks get a copy ..
  static constexpr uint32_t kVector = 80 * 4;
  static constexpr uint32_t kGateDecay = 0;
  static constexpr uint32_t kGateScaled = kVector;
  static constexpr uint32_t kGateToEnd = 2 * kVector;
  static constexpr uint32_t kGateMild = 3 * kVector;
  static constexpr uint32_t kBytesGate = kGateMild + 16;  // whole 16 bytes
  static constexpr uint32_t kGateLast = (3 * 20 + 14 + 1) * 4;
  // .. and those that A_g and P alone need.
  static constexpr uint32_t kGateColumnA = 0;
  static constexpr uint32_t kGateColumnP = kVector;
  static constexpr uint32_t kGateRow = 2 * kVector;
  static constexpr uint32_t kGateBeta = kGateRow + kChunk * 4;
  static constexpr uint32_t kGateSum = kGateBeta + kChunk * 4;
  static constexpr uint32_t kGateScaleP = kGateSum + kChunk * 4;
  static constexpr uint32_t kGatePair = kGateScaleP + kChunk * 4;
  static constexpr uint32_t kBytesFactors = kGatePair + 16 * 4;

  static constexpr int kBatch = 4;  // descriptors that are written together
  static constexpr uint32_t kBytesDescriptor = 48;
  static constexpr int kBarriersGate = 4;   // by a block's own chunks: two for each producer warpgroup
  static constexpr int kBarriersDone = 16;  // more than kDescriptorsAhead, so that none is a phase ahead of who waits

  // K is fetched a step before its chunk's preparation starts, four before its last use; Q a step before Q K^T.
  static constexpr int kStagesK = 5;
  static constexpr int kStagesQ = 3;
  static constexpr int kStagesV = 3;      // V's stage takes O once V is used
  static constexpr int kStagesP = 4;      // of every chunk, made here or in the other block
  static constexpr int kStagesA = 4;      // a chunk's inverse is made in the tile that its A_g then takes
  static constexpr int kLocalGates = 3;   // made ahead, before the chunk that had the stage's A_g is done
  static constexpr int kRemoteGates = 2;  // come with A_g and P

  static constexpr uint32_t kSmemK = 0;
  static constexpr uint32_t kSmemQ = kSmemK + kStagesK * kBytesK;
  static constexpr uint32_t kSmemV = kSmemQ + kStagesQ * kBytesK;
  static constexpr uint32_t kSmemA = kSmemV + kStagesV * kBytesV;
  static constexpr uint32_t kSmemP = kSmemA + kStagesA * kBytesMatrix;
  static constexpr uint32_t kSmemGate = kSmemP + kStagesP * kBytesMatrix;

  static constexpr uint32_t kSmemFactors = kSmemGate + (kLocalGates + kRemoteGates) * kBytesGate;

  static constexpr uint32_t kSmemDescriptors = kSmemFactors + kLocalGates * kBytesFactors;
  static constexpr int kDescriptorRing = 16;  // descriptors, kBatch of them written together
  // A burst is written once the chunk so far before its first is done in both blocks: what lies where it goes is then
  // no longer read (O of a chunk leaves within three), and gates, fetched eight chunks ahead, do not wait.
  static constexpr int kDescriptorsAhead = 9;
  // The warp that fetches K and Q has its words of a descriptor long before they are written over: its lanes, brought
  // together by reductions, expect K, which the state groups wait for. Only racecheck must be told by all of them.
  static constexpr uint32_t kLoaderArrivals = kWarpArrivals == 32 ? 32 : 0;
  static constexpr uint32_t kSmemBarriers = kSmemDescriptors + kDescriptorRing * kBytesDescriptor;

  // Barriers, 8 bytes each. Rings of eight where a producer warpgroup waits for its own chunks only, every fourth: it
  // then meets a barrier again with the next phase, not one later.
  static constexpr int kBarriers = 8;
  static constexpr uint32_t kFullK = kSmemBarriers;
  static constexpr uint32_t kFullQ = kFullK + 8 * kBarriers;
  static constexpr uint32_t kDone = kFullQ + 8 * kBarriers;      // both blocks' state warps
  static constexpr uint32_t kFullP = kDone + 8 * kBarriersDone;  // A_g, P, gates and V
  static constexpr uint32_t kFullGate = kFullP + 8 * kStagesP;
  static constexpr uint32_t kFullO = kFullGate + 8 * kBarriersGate;
  // The state warps may be two chunks ahead of the warp that waits for O: V's next but two needs O to be gone.
  static constexpr int kBarriersO = 4;
  static constexpr uint32_t kTailV = kFullO + 8 * kBarriersO;
  static constexpr uint32_t kFullDescriptor = kTailV + 8;
  static constexpr uint32_t kSmemBytes = kFullDescriptor + 8 * kDescriptorRing / kBatch;
  static_assert(kSmemBytes <= 227 * 1024);

  // Rings of stages.
  using TilesK = Stages<kSmemK, kBytesK, kStagesK>;
  using TilesQ = Stages<kSmemQ, kBytesK, kStagesQ>;
  using TilesV = Stages<kSmemV, kBytesV, kStagesV>;
  using TilesA = Stages<kSmemA, kBytesMatrix, kStagesA>;
  using TilesP = Stages<kSmemP, kBytesMatrix, kStagesP>;
  // By a CTA's own chunks, every second one: use m / kClusterCtas.
  using LocalGates = Stages<kSmemGate, kBytesGate, kLocalGates>;
  using Factors = Stages<kSmemFactors, kBytesFactors, kLocalGates>;
  // Rings of barriers. FullGate goes by a CTA's own chunks as well.
  using FullK = Ring<kFullK, kBarriers>;
  using FullQ = Ring<kFullQ, kBarriers>;
  using FullGate = Ring<kFullGate, kBarriersGate>;
  using FullP = Ring<kFullP, kStagesP>;
  using FullO = Ring<kFullO, kBarriersO>;
  using Done = Ring<kDone, kBarriersDone>;
};

}  // namespace flash_qla::cuda::sm90::fwd_2cta
