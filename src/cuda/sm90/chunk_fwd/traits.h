// Compile-time shape of the fused Hopper forward: tile sizes, shared-memory map, barriers, register budgets.
#pragma once

#include <cstdint>

#include "cuda/sm90/common/ring.cuh"
#include "cuda/sm90/common/sizes.h"

namespace flash_qla::cuda::sm90::fwd {

// Listed tokens of a call whose forward writes the states after them itself: a block keeps them in shared memory, and
// looks at all of them at each of its items and at each of them that is in an item, 32 at a time.
inline constexpr int kMostListed = 128;

// What a kernel leaves behind beside O and final states.
enum class Saves {
  kNothing,
  kStates,  // checkpoints, states at and before listed tokens
  kH,       // h as well
  kA,       // A and the gates' sums, for the backward
};

// Of the kernel of whole heads. That of half heads, for cards with more SMs than work items, is in
// chunk_fwd_2cta/traits.h.
template <typename Element_, Saves kSaves>
struct OneCtaTraits {
  using Element = Element_;
  static constexpr int kStateGroups = 2;                                          // of 64 rows of S^T each
  static constexpr bool kSave = kSaves == Saves::kStates || kSaves == Saves::kH;  // states on the way
  static constexpr bool kStateOnly = false;                                       // see SegmentStateTraits
  static constexpr int kClusterCtas = 1;     // that work through one queue of chunks
  static constexpr int kProducerGroups = 2;  // one with a role to each warp, one for products (kernel.cuh)
  // The chunks of warm-ups without Q, P and O, which they do not leave behind: a third of their products.
  // Calls that keep A are not cut where this kernel makes them.
  static constexpr bool kSkipsWarmup = kSaves == Saves::kNothing;
  // Chunks end where a state is kept: after every n-th chunk of a sequence and at listed tokens, wherever those lie.
  static constexpr bool kEndsAtCheckpoints = kSave;
  // What mild chunks execute in one piece. Kernels that save h are faster without.
  static constexpr bool kCompactCode = kSaves != Saves::kH;
  // h leaves by the copy engine, from a tile in shared memory that the two state groups, half a chunk apart, take turns
  // in: by stores from registers, 32 bytes of a row each, it took a step and a half where this takes one.
  static constexpr bool kStoresHByTma = kSaves == Saves::kH;
  // The tile of A_g holds A itself where decay is mild, so that it can be sent as it lies: the factors of its columns
  // are applied to W (kGateFactor).
  static constexpr bool kSavesA = kSaves == Saves::kA;
  static constexpr int kThreads = 128 * (kProducerGroups + kStateGroups);
  static constexpr int kDv = 64 * kStateGroups;

  // 64 is the least that holds one 32-register accumulator without serialising wgmma; a state group needs S (64), two
  // accumulators (64; one without O) and packed operands (32).
  static constexpr int kProducerRegisters = 64;
  static constexpr int kStateRegisters = 192;

  // Stages. K lives longest: from K K^T, three steps ahead, so that the inverse need not wait for it, to its state
  // update. Q is given back when Q K^T and S Q are made, not at its chunk's end. V's stage takes O once V is used. For
  // h's tile a stage of K makes room.
  static constexpr int kStagesK = kStoresHByTma ? 4 : 5;
  static constexpr int kStagesQ = 2;
  // Whoever waits for a chunk's end may come two chunks late, and must not take the end of that one for it.
  static constexpr int kBarriersDone = 4;
  static constexpr int kStagesV = 3;
  static constexpr int kStagesGate = 4;
  static constexpr int kStagesInput = 8;  // of g and beta as they come: K K^T, whose rows take beta, is ahead of gates
  static constexpr int kStagesP = 2;
  static constexpr int kStagesA = 4;  // a chunk's inverse is made in the tile that its A_g then takes

  static constexpr uint32_t kBytesK = kChunk * kHeadDim * 2;  // [half][token][64], each half 64 rows of 128 B, swizzled
  static constexpr uint32_t kHalf = kChunk * 128;
  static constexpr uint32_t kBytesV = kChunk * kDv * 2;
  static constexpr uint32_t kBytesMatrix = kChunk * kChunk * 2;  // [row][column], 128 B rows, swizzled

  static constexpr uint32_t kSmemK = 0;
  static constexpr uint32_t kSmemQ = kSmemK + kStagesK * kBytesK;
  static constexpr uint32_t kSmemV = kSmemQ + kStagesQ * kBytesK;
  static constexpr uint32_t kSmemA = kSmemV + kStagesV * kBytesV;
  static constexpr uint32_t kSmemP = kSmemA + kStagesA * kBytesMatrix;
  static constexpr uint32_t kSmemH =
      kSmemP + kStagesP * kBytesMatrix;  // half of a state: 64 rows of V, of either layout
  static constexpr uint32_t kSmemGate = kSmemH + (kStoresHByTma ? kHeadDim * 64 * 2 : 0);

  // One gate stage, in bytes. Vectors over columns are permuted so that a thread's 16 tokens are 16 consecutive floats
  // (token t at (t & 7) / 2 * 20 + (t >> 3) * 2 + (t & 1)): four 16-byte loads a vector, without bank conflicts.
  static constexpr uint32_t kVector = 80 * 4;
  static constexpr uint32_t kGateDecay = 0;         // gamma_t
  static constexpr uint32_t kGateScaled = kVector;  // scale * gamma_t
  static constexpr uint32_t kGateToEnd =
      2 * kVector;  // gC / gamma_t * rounding correction of beta_t (gate_vectors.cuh)
  static constexpr uint32_t kGateColumnA = 3 * kVector;          // 2^(end of t's block - c_t) * beta_t
  static constexpr uint32_t kGateColumnP = 4 * kVector;          // 2^(end of t's block - c_t) * kGateScaleP
  static constexpr uint32_t kGateRow = 5 * kVector;              // 2^(c_t - end of the block before t's), natural order
  static constexpr uint32_t kGateBeta = kGateRow + kChunk * 4;   // beta_t, natural order
  static constexpr uint32_t kGateSum = kGateBeta + kChunk * 4;   // c_t in log2 units, natural order
  static constexpr uint32_t kGateInput = kGateSum + kChunk * 4;  // g_t as it comes
  // scale * rounding correction of beta_t, natural order; takes the place of g_t, which its lane has read
  static constexpr uint32_t kGateScaleP = kGateInput;
  static constexpr uint32_t kGatePair = kGateInput + kChunk * 4;  // 2^(end of block I-1 - end of block J), I > J
  static constexpr uint32_t kGateMild =
      kGatePair + 16 * 4;  // not 0: the chunk's decay is mild (gate_vectors.cuh), and this P's factor
  static constexpr uint32_t kGateFactor = kGateMild + 16;                        // kSavesA: of W's columns; permuted
  static constexpr uint32_t kBytesGate = kGateFactor + (kSavesA ? kVector : 0);  // whole 16 bytes
  static constexpr uint32_t kGateLast = (3 * 20 + 14 + 1) * 4;  // offset of token 63 in a permuted vector

  static constexpr uint32_t kSmemInput = kSmemGate + kStagesGate * kBytesGate;
  static constexpr uint32_t kBytesInput = 2 * kChunk * 4;
  static constexpr uint32_t kInputG = 0;
  static constexpr uint32_t kInputBeta = kChunk * 4;

  static constexpr uint32_t kSmemDescriptors = kSmemInput + kStagesInput * kBytesInput;
  static constexpr int kDescriptorRing = 16;  // descriptors: six chunks ahead of the state groups, four after
  static constexpr uint32_t kBytesDescriptor = 48;
  static constexpr uint32_t kSmemProducer = kSmemDescriptors + kDescriptorRing * kBytesDescriptor;
  static constexpr uint32_t kBytesProducer = 80;
  static constexpr uint32_t kSmemBarriers = kSmemProducer + kBytesProducer;

  // Barriers, 8 bytes each.
  static constexpr uint32_t kFullK = kSmemBarriers;
  static constexpr uint32_t kFullQ = kFullK + 8 * kStagesK;
  static constexpr uint32_t kFullA = kFullQ + 8 * kStagesQ;
  static constexpr uint32_t kFullP = kFullA + 8 * kStagesA;
  static constexpr uint32_t kDone = kFullP + 8 * kStagesP;
  static constexpr uint32_t kTailV = kDone + 8 * kBarriersDone;
  static constexpr uint32_t kFullInput = kTailV + 8 * kStagesP;
  static constexpr uint32_t kTailCount = kFullInput + 8 * kStagesInput;  // uses of each kTailV so far, 4 bytes each
  static constexpr uint32_t kFullM = kTailCount + 4 * kStagesP;          // M of a chunk
  static constexpr uint32_t kFullGate = kFullM + 8 * kStagesA;           // its gates
  static constexpr uint32_t kFreeQ = kFullGate + 8 * kStagesGate;        // Q of a chunk has been used
  static constexpr uint32_t kFreeH = kFreeQ + 8 * kStagesQ;              // kStoresHByTma: its tile has been read
  // That the block has found itself.
  static constexpr uint32_t kSmemSequence = (kFreeH + (kStoresHByTma ? 8 : 0) + 15) / 16 * 16;
  static constexpr uint32_t kSmemListed = kSmemSequence + sizeof(SequenceSpan);  // kEndsAtCheckpoints: ListedToken
  static constexpr uint32_t kSmemBytes = kSmemListed + (kEndsAtCheckpoints ? 8 * kMostListed : 0);
  static_assert(kSmemBytes <= 227 * 1024);
  // Rings of stages.
  using TilesK = Stages<kSmemK, kBytesK, kStagesK>;
  using TilesQ = Stages<kSmemQ, kBytesK, kStagesQ>;
  using TilesV = Stages<kSmemV, kBytesV, kStagesV>;
  using TilesA = Stages<kSmemA, kBytesMatrix, kStagesA>;
  using TilesP = Stages<kSmemP, kBytesMatrix, kStagesP>;
  using Gates = Stages<kSmemGate, kBytesGate, kStagesGate>;
  using Input = Stages<kSmemInput, kBytesInput, kStagesInput>;
  // Rings of barriers. TailV counts its own uses (kTailCount).
  using FullK = Ring<kFullK, kStagesK>;
  using FullQ = Ring<kFullQ, kStagesQ>;
  using FullInput = Ring<kFullInput, kStagesInput>;
  using FullGate = Ring<kFullGate, kStagesGate>;
  using FullM = Ring<kFullM, kStagesA>;
  using FullA = Ring<kFullA, kStagesA>;
  using FullP = Ring<kFullP, kStagesP>;
  using TailV = Ring<kTailV, kStagesP>;
  using FreeQ = Ring<kFreeQ, kStagesQ>;
  using Done = Ring<kDone, kBarriersDone>;
};

template <typename Element>
struct ForwardTraits : OneCtaTraits<Element, Saves::kNothing> {};
template <typename Element>
struct SaveTraits : OneCtaTraits<Element, Saves::kStates> {};
template <typename Element>
struct SaveHTraits : OneCtaTraits<Element, Saves::kH> {};
template <typename Element>
struct SaveATraits : OneCtaTraits<Element, Saves::kA> {};

}  // namespace flash_qla::cuda::sm90::fwd
