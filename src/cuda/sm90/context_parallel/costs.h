// What the planner takes the kernels' parts to cost, and the bounds of its choices.
#pragma once

#include <cstdint>

#include "cuda/common/host_device.h"

namespace flash_qla::cuda::sm90::cp {

// Costs, in microseconds on an H200: what fits best to the times of up to 150 choices each of 26 calls, in rows of
// calls, and of calls without a cut (docs/kernels/context_parallel.md): near what was measured of each alone, but for
// what they stand for besides. One number stands for two costs where a second one changes no choice of the recorded
// rows.
struct Costs {
  // Where sequences are cut. A chunk takes longer the fewer value heads share a key head: more is read from memory.
  float step = 1.74f;        // a chunk of one head in the kernel that writes O
  float warm_step = 0.84f;   // ... of a warm-up, without Q, P and O
  float state_step = 1.48f;  // ... in the kernel that makes states alone
  float key_share = 0.044f;  // more of all, of a key head to each value head beside one to none
  float item_edge = 4.2f;    // an item's first and last state, and filling the pipeline; or a block's start before it
  float state_edge = 2.9f;   // ... of a state item, which starts from zero
  float scan_start = 2.4f;   // before the first transition of a scan
  float scan_step = 0.36f;   // one transition applied to a state at a cut
  float load = 0.215f;       // of all work, evenly shared: SMs at work hold up each other
  float plan = 15.5f;        // planning; or reading the lengths, where one SM to a head then finds nothing to be cut
  // ... and more of it for each place where a sequence may be cut: of a key head and up to four value heads, until the
  // constructor has counted them.
  float boundary = 0.045f;
  // Where nothing is cut: by two SMs to a head, by one.
  float two_cta_step = 1.11f, two_cta_edge = 10.0f;
  float one_cta_step = 1.925f, one_cta_edge = 5.3f;
  float crowd = 0.215f;  // more of such a step, times the square of the share of SMs that are at work, on average
  float late = 8.0f;     // a kernel of several SMs to a head behind one that reads lengths: it starts late, unevenly

  Costs() = default;
  Costs(int32_t key_heads, int32_t heads) {
    // The measured calls' fit is at four value heads to a key head.
    const float scale = 1.0f + key_share * (static_cast<float>(key_heads) / static_cast<float>(heads) - 0.25f);
    step *= scale;
    warm_step *= scale;
    state_step *= scale;
    boundary *= static_cast<float>(key_heads * ((heads / key_heads + 3) / 4));
  }

  FLASH_QLA_HOST_DEVICE float planning(int32_t boundaries) const {
    return plan + boundary * static_cast<float>(boundaries);
  }
};

// No segment is shorter: below it edges and warm-up cost more than the segment.
inline constexpr int32_t kMinSpacing = 4;
inline constexpr int32_t kForcedSpacing = 2;  // under force_intra_cp: two whole chunks, so that everything is met
// A sequence may be cut into pieces of about (all chunks of all heads) / (this * SMs): three items to an SM let the
// planner join them into nearly full waves. Where lengths are known beforehand, up to four are tried: they bound the
// states at cuts to 70 MB on a card of 132 SMs.
inline constexpr int32_t kItemsPerSm = 3;
inline constexpr int32_t kMostItemsPerSm = 4;
// Mode::kInvariant: as many pieces as whole spacings fit, up to a number that keeps scans of transitions short.
inline constexpr int32_t kInvariantSpacing = 32;
inline constexpr int32_t kInvariantPieces = 16;
inline constexpr int32_t kMostPieces =
    1 << 15;  // its square is a 32-bit number: 64-bit divisions take long on the device
// Longest warm-up, in chunks; kept in a byte.
inline constexpr int32_t kMaxWarmup = 64;
// A call is planned if the estimate promises this gain where a quarter of the heads do not decay and the others do by 3
// a chunk (a warm-up of five), and no more than kMostLossOfExact is lost where half of them do not: the gates are not
// known before, and on the device no cut is among the choices.
inline constexpr float kLeastGain = 0.08f;
inline constexpr float kMostLossOfExact = 0.15f;
// Spacings that are tried beside that of kItemsPerSm, where lengths are known beforehand: kFinerSpacings of them from
// that of kMostItemsPerSm on, and kCoarserSpacings up to twice as far apart. Coarser ones have fewer boundaries to look
// at, and fewer ways to join pieces: what half of the heads without decay would take, or none, counts kWeightOfOthers
// each beside a quarter of them. A spacing must promise kLeastOfSpacing more than that of kItemsPerSm, for with many
// pieces some choice always looks well.
inline constexpr int32_t kFinerSpacings = 3, kCoarserSpacings = 8;
inline constexpr float kLeastOfSpacing = 0.015f, kWeightOfOthers = 0.1f;
// What is lost if no head decays counts so much beside what a quarter of such heads promises, where lengths are known.
inline constexpr float kWeightOfAll = 0.1f;
// ... and this of equal lengths, where only the device knows the lengths and unequal ones promise kLeastGain: the
// estimate's own error, for equal ones must not lose. Measured, they gain up to 2 % then.
inline constexpr float kLeastOfEqual = 0.03f;
// Several sequences of lengths that only the device knows are asked for where that costs no more than this of what
// equal lengths take; a cut must promise kLeastUnequal of what it takes at best before the device goes on to the gates.
inline constexpr float kMostLoss = 0.03f;
// ... and where there are no more of them: one that holds most of many sequences' tokens is rare, and all others pay.
inline constexpr int32_t kMostByLengths = 3;
inline constexpr float kLeastUnequal = 1.2f;
inline constexpr float kLeastPossible = 1.05f;  // ... of lengths that are known: the choice has the last word
inline constexpr int32_t kUsualWarmup = 5;
// With this many items to an SM and no cut the waves are even enough for any lengths that matter: no planning.
inline constexpr int64_t kItemsPerSmUncut = 16;

}  // namespace flash_qla::cuda::sm90::cp
