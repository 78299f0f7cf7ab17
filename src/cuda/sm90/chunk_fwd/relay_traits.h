// Compile-time shape of the forward in relays: a cluster of four blocks works on a tile; of two blocks with the same
// half of V one carries the state, the other makes O.
#pragma once

#include "cluster_traits.h"

namespace flash_qla::cuda::sm90 {

template <typename Element_, bool kSave_>
struct RelayForwardTraits : ClusterForwardShape {
  using Element = Element_;
  static constexpr int kBlocks = 4;
  static constexpr int kLeaders = 2;  // the first blocks, one for each half of V; each has a follower
  static constexpr bool kSave = kSave_;

  // A block prepares one of kBlocks chunks of the stream, each of its auxiliary groups every second of those.
  static constexpr uint32_t kGroupStep = kAuxGroups * kBlocks;  // chunks from one of an auxiliary group to its next

  // K of the recurrence, in all blocks: loaded once the follower, a step behind, is through with the chunk so far
  // before. What is prepared has K and Q of its own, since it lies up to eight chunks ahead.
  static constexpr int kStagesK = 4;
  static constexpr int kStagesV = 4;  // leader
  static constexpr int kStagesA = 4;  // leader
  static constexpr int kStagesQ = 2;  // follower
  static constexpr int kStagesP = 3;  // follower
  // Follower: V'' from the leader, as P takes it. The stage takes O once V'' is used. Where the decay is not mild the
  // state takes it otherwise, which has the next chunk's stage.
  static constexpr int kStagesC = 3;
  static constexpr uint32_t kOwnGates = 2;  // one for each auxiliary group

  static constexpr uint32_t kSmemOwnK = 0;  // of each auxiliary group's chunk
  static constexpr uint32_t kSmemOwnQ = kSmemOwnK + kAuxGroups * kBytesK;
  static constexpr uint32_t kSmemOwnA = kSmemOwnQ + kBytesK;  // of each group
  static constexpr uint32_t kSmemOwnP = kSmemOwnA + kAuxGroups * kBytesMatrix;
  static constexpr uint32_t kSmemK = kSmemOwnP + kBytesMatrix;
  static constexpr uint32_t kSmemRole = kSmemK + kStagesK * kBytesK;
  // Of a leader ..
  static constexpr uint32_t kSmemV = kSmemRole;
  static constexpr uint32_t kSmemA = kSmemV + kStagesV * kBytesV;
  static constexpr uint32_t kSmemGateLead = kSmemA + kStagesA * kBytesMatrix;
  // .. and of a follower.
  static constexpr uint32_t kSmemQ = kSmemRole;
  static constexpr uint32_t kSmemC = kSmemQ + kStagesQ * kBytesK;
  static constexpr uint32_t kSmemP = kSmemC + kStagesC * kBytesMatrix;
  static constexpr uint32_t kSmemGateFollow = kSmemP + kStagesP * kBytesMatrix;

  // The block's own gates, those that state groups read and the factors that A_g and P need.
  static constexpr uint32_t kSmemGate = kSmemGateFollow + kStagesP * kBytesGate;
  static_assert(kSmemGateLead + kStagesA * kBytesGate <= kSmemGate);
  static constexpr uint32_t kSmemFactors = kSmemGate + kOwnGates * kBytesGate;

  static constexpr uint32_t kSmemChunks = kSmemFactors + kOwnGates * kBytesFactors;
  static constexpr int kChunkRing = 24;  // records, kBurst of them written together
  // As in pair_traits.h: gates are fetched kBlocks chunks ahead of those that are prepared.
  static constexpr int kRecordsAhead = 14;
  // Ends of the list, for each auxiliary group one of its own.
  static constexpr int kEndBursts = kGroupStep / kBurst;
  static constexpr uint32_t kSmemBarriers = kSmemChunks + kChunkRing * kBytesRecord;

  // Barriers, 8 bytes each.
  static constexpr uint32_t kFullOwnK = kSmemBarriers;               // by groups
  static constexpr uint32_t kFullOwnQ = kFullOwnK + 8 * kAuxGroups;  // by groups
  static constexpr uint32_t kFullGate = kFullOwnQ + 8 * kAuxGroups;
  static constexpr uint32_t kFullK = kFullGate + 8 * kBarriersGate;
  static constexpr uint32_t kFullA = kFullK + 8 * kStagesK;  // leader: A_g, gates and V
  static constexpr uint32_t kFullP = kFullA + 8 * kStagesA;  // follower: P and gates
  static constexpr uint32_t kFullQ = kFullP + 8 * kStagesP;
  static constexpr uint32_t kFreeQ = kFullQ + 8 * kStagesQ;
  static constexpr uint32_t kFullC = kFreeQ + 8 * kStagesQ;
  static constexpr uint32_t kFreeC = kFullC + 8 * kStagesC;  // leader
  static constexpr uint32_t kFreeNext =
      kFreeC + 8 * kStagesC;  // leader: a stage that was lent to the chunk before its own
  static constexpr uint32_t kFullO = kFreeNext + 8;
  static constexpr uint32_t kLeadDone = kFullO + 8 * kStagesC;
  static constexpr uint32_t kFollowDone = kLeadDone + 8 * kBarriersDone;
  static constexpr uint32_t kOutputDone = kFollowDone + 8 * kBarriersDone;
  static constexpr uint32_t kFullRecord = kOutputDone + 8 * kBarriersDone;
  static constexpr uint32_t kSmemBytes = kFullRecord + 8 * kChunkRing / kBurst;
  static_assert(kSmemBytes <= 227 * 1024);
};

}  // namespace flash_qla::cuda::sm90
