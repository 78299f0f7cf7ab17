// What the forwards of half heads share, in which a cluster works on one tile: a block's warpgroups, its tiles and
// gates.
#pragma once

#include "traits.h"

namespace flash_qla::cuda::sm90 {

// Names that the roles of a whole head's kernel have too mean the same here (traits.h).
struct ClusterForwardShape {
  static constexpr int kStateGroups = 1;
  static constexpr bool kStateOnly = false;
  static constexpr bool kEndsWhereKept = false;

  // Warpgroups: two make A_g and P, one holds S^T, of one each warp has a duty of its own (pair_kernel.cuh,
  // relay_kernel.cuh).
  static constexpr int kAuxGroups = 2;
  static constexpr int kThreads = 128 * 4;
  // They share out the 128 a thread that the launch has: 56 + 2 * 112 + 232.
  static constexpr int kServiceRegisters = 56;
  static constexpr int kAuxRegisters = 112;
  static constexpr int kStateRegisters = 232;

  static constexpr uint32_t kBytesK = kChunk * kHeadDim * 2;
  static constexpr uint32_t kHalf = kChunk * 128;
  static constexpr uint32_t kBytesV = kHalf;
  static constexpr uint32_t kBytesMatrix = kChunk * kChunk * 2;
  static constexpr uint32_t kBytesRows = kBytesMatrix / 4;  // a warp's 16 rows of A_g or P, in relays of V'' too

  // The gates of a chunk that state groups read, of which other blocks get a copy ..
  static constexpr uint32_t kVector = 80 * 4;
  static constexpr uint32_t kGateDecay = 0;
  static constexpr uint32_t kGateScaled = kVector;
  static constexpr uint32_t kGateRest = 2 * kVector;
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

  static constexpr int kBurst = 4;  // records that are written together
  static constexpr uint32_t kBytesRecord = 48;
  static constexpr int kBarriersGate = 4;   // by a block's own chunks: two for each auxiliary group
  static constexpr int kBarriersDone = 16;  // more than kRecordsAhead, lest one be a phase ahead of who waits for it
};

}  // namespace flash_qla::cuda::sm90
