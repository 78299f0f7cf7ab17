// What the planner of a context parallelism and the kernels that follow its plan have in common.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "cuda/sm90/common/sizes.h"

namespace flash_qla::cuda::sm90::cp {

enum class Mode : int32_t {
  kOff = 0,        // no sequence is cut
  kAuto = 1,       // cut as the whole batch, the heads and the card ask for
  kInvariant = 2,  // cut by each sequence's own length alone
};

inline constexpr int32_t kChunk = 64;  // tokens of a chunk

inline constexpr int32_t kItemFromStart = 1;     // starts from the sequence's initial state
inline constexpr int32_t kItemToEnd = 2;         // ends with the sequence: its state is the final one
inline constexpr int32_t kItemFromCutState = 4;  // starts from state at a cut `slot`
inline constexpr int32_t kItemToCutState = 8;    // a state item: its last state is state at a cut `slot`, no outputs
inline constexpr int32_t kItemTransition = 16;   // with kItemToCutState: starts from the identity with V = 0, so that
                                                 // its last state is the transition that leads to boundary `slot`

struct WorkItem {
  int32_t row;       // first token, warm-up included
  int32_t tokens;    // warm-up included
  int32_t sequence;  // position in cu_seqlens
  int32_t chunk;     // its first chunk, counted over all sequences
  int32_t position;  // ... and in its sequence
  int32_t slot;      // state at a cut read or written, -1: none
  int16_t head;      // value head
  int16_t warmup;    // chunks at its start that leave nothing after
  int32_t flags;
};
static_assert(sizeof(WorkItem) == 32);

inline constexpr int32_t kStateWarps = 8;   // that make and store a state item's last state, each its own rows
inline constexpr int32_t kScanSlices = 16;  // pieces that a scan is taken in, of eight columns of V

// Boundary states first_slot + 1 .. first_slot + transitions follow from first_slot, one transition each.
struct Scan {
  int32_t first_slot;
  int32_t transitions;
};

}  // namespace flash_qla::cuda::sm90::cp
