// The numbered stream of chunks a block works through: records in shared memory, filled tile by tile by one thread.
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include <cstdint>

#include "../../common/bulk.cuh"
#include "../../common/mbarrier.cuh"
#include "../../common/tma.cuh"
#include "kernel_params.h"
#include "traits.h"

namespace flash_qla::cuda::sm90 {

inline constexpr int kFirstChunk = 1;
inline constexpr int kLastChunk = 2;
// Where chunks end where states are kept (ChunkForwardTraits::kEndsWhereKept):
inline constexpr int kKeptChunk = 256;      // the state after it is kept
inline constexpr int kEndsOnGrid = 512;     // set beside kKeptChunk: it ends a whole chunk of its sequence
inline constexpr int kInsideOnGrid = 1024;  // it starts inside of a chunk of its sequence
inline constexpr int kRowsFollow = 16384;   // all 64 rows from its first on are of its tile
// Of a sequence split:
inline constexpr int kSilentChunk = 4;    // nothing of it is stored
inline constexpr int kNoValues = 8;       // V counts as zero
inline constexpr int kFromBoundary = 16;  // slot_in is a boundary state's
inline constexpr int kFromIdentity = 32;
inline constexpr int kToTransition = 64;    // slot_out is a transition's, else (kStateOnly) a boundary state's
inline constexpr int kCountedReader = 128;  // its tile starts from an initial state that is counted in `readers`
// The tile's initial state comes through stages of later chunks (StagedState); two bits more count such tiles.
inline constexpr int kStagedState = 2048;
inline constexpr int kStagedCountShift = 12;

// A chunk's decay is mild if no |c_C - c_t| exceeds kMildDecay (c_t: the sum of g up to token t, C the last). Then A_g
// and P need no factor for each pair of tokens: with V'' = (gC / gamma) V' in the place of V',
//   A_g'' = A diag(beta gC / gamma), O = diag(scale gamma) (Q S0 + P'' V''), P'' = lower(Q K^T) / gC, S1 = gC S0 + K^T
//   V''.
// bf16 has fp32's exponents, and e^50 either way leaves 10^16; there |c_C| is within it as well. In fp16 P'' might
// overflow: O = diag(scale gamma / gC) (gC Q S0 + P'' V'') with P'' = lower(Q K^T), and V'' is kept off the subnormals.
template <typename Element>
inline constexpr bool kWideExponents = std::is_same_v<Element, __nv_bfloat16>;
template <typename Element>
inline constexpr float kMildDecay = kWideExponents<Element> ? 50.0f : 5.0f;
// In bf16 a sequence's last chunk of so few tokens does not count as mild, whatever its decay: the rounding of beta_t
// is undone where it does not (make_gates()), and what few tokens are off by does not average out. Beyond half a chunk
// it does: the worst of some thousand heads of 33 tokens is at 4e-3, of 17 at 5e-3, of one at 7e-3 (docs/numerics.md).
inline constexpr int kFewTokens = 32;

// What the roles need to know of one chunk.
struct alignas(16) ChunkRecord {
  int32_t row;    // first token
  int32_t valid;  // tokens in it, 0 for an empty sequence; -1 after the last chunk
  int32_t flags;  // kFirstChunk, kLastChunk of its tile, and those of a split
  int32_t head;   // value head
  int32_t sequence;
  int16_t half;  // of V: the block's, in a pair of blocks; else 0
  int16_t key_head;
  int32_t chunk;     // counted over all sequences
  int32_t position;  // counted in its sequence
  int64_t slot_in;   // initial and final state slots, -1: none
  int64_t slot_out;
};
static_assert(sizeof(ChunkRecord) == 48);

// By the chunk alone, so that a sequence in parts has the bits of the whole; but where chunks end where states are kept
// one that ends early is no sequence's end.
template <typename Traits>
__device__ __forceinline__ bool has_few_tokens(const ChunkRecord& c) {
  if constexpr (!kWideExponents<typename Traits::Element>) return false;
  return c.valid <= kFewTokens && (!Traits::kEndsWhereKept || (c.flags & kLastChunk) != 0);
}

// Where chunks end where states are kept: how the next one lies in its sequence.
struct ChunkEnd {
  int32_t inside;  // tokens of the sequence's own chunk, one of every 64 tokens, that are before it
  int32_t kept;    // tokens to the next state that is kept, from the chunk's first on; kNeverKept: there is none
};
inline constexpr int32_t kNeverKept = INT32_MAX;

// The producer thread's place in the tile list.
struct alignas(16) ChunkWalker {
  ChunkRecord next;
  int32_t remaining;  // tokens of the tile not yet produced; -1: the tile is done
  int32_t tile;       // tile opened last, or to open first; of a list a ticket taken before the plan is there, -1: none
  int32_t tiles;      // how many there are; of a list which parts of it still have some
  int32_t silent;     // chunks of the tile not yet produced that leave nothing behind
  int32_t opened;     // tiles so far, also such as had nothing to do where there is no list
  union {
    int32_t waits;   // of a list: the last tile was taken before the boundary states that it waits for were there
    int32_t staged;  // else: tiles with kStagedState so far
  };
  ChunkEnd end;
};
static_assert(sizeof(ChunkWalker) == 80);

// The block's dynamic shared memory. A function, not a pointer handed down: its address is a constant that needs no
// register.
__device__ __forceinline__ char* shared_memory() {
  extern __shared__ __align__(1024) char memory[];
  return memory;
}
__device__ __forceinline__ uint32_t smem() { return smem_address(shared_memory()); }

// kFromL2: what blocks may read while the kernels before may still write it, and then again.
template <bool kFromL2 = false>
__device__ __forceinline__ int64_t load_index(const void* data, bool is_64_bit, int64_t i) {
  if constexpr (kFromL2) {
    return is_64_bit ? __ldcg(static_cast<const long long*>(data) + i) : __ldcg(static_cast<const int*>(data) + i);
  } else {
    return is_64_bit ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
}

__device__ __forceinline__ int64_t load_offset(const ChunkForwardArgs& args, int64_t i) {
  return load_index<true>(args.cu_seqlens, args.cu_seqlens_are_64_bit, i);
}

// Tokens of sequence i, kept inside the tensors whatever the offsets say: nothing is ever written out of bounds.
__device__ __forceinline__ PlannedSequence sequence_at(const ChunkForwardArgs& args, int32_t i) {
  if (args.cu_seqlens == nullptr) {
    const int32_t room = static_cast<int32_t>(args.dense_length);
    return {i * room, args.lengths != nullptr ? args.lengths[i] : room, i, i * ((room + kChunk - 1) / kChunk)};
  }
  int64_t start = load_offset(args, i), end = load_offset(args, int64_t{i} + 1);
  start = min(max(start, int64_t{0}), args.num_tokens);
  end = min(max(end, start), args.num_tokens);
  return {static_cast<int32_t>(start), static_cast<int32_t>(end - start), i, 0};
}

inline constexpr int kNoSlot = -1;
// `slot` where the set has it.
__device__ __forceinline__ int64_t usable_slot(const StateSet& set, int64_t slot) {
  return slot <= set.null_index || slot < 0 || slot >= set.slots ? kNoSlot : slot;
}

template <bool kFromL2 = false>
__device__ __forceinline__ int64_t resolve_slot(const StateSet& set, int64_t sequence) {
  if (set.data == nullptr) return kNoSlot;
  if (set.indices == nullptr) return sequence;
  return usable_slot(set, load_index<kFromL2>(set.indices, set.indices_are_64_bit, sequence * set.index_stride));
}

// The slot to start from; kNoSlot: zero; kSkipSequence: the sequence is skipped.
inline constexpr int64_t kSkipSequence = -2;
template <bool kFromL2 = false>
__device__ __forceinline__ int64_t initial_slot(const ChunkForwardArgs& args, int64_t sequence) {
  if (args.initial.data == nullptr) return kNoSlot;
  if constexpr (kFromL2) {
    const uint8_t* has = args.has_initial_state;
    if (has != nullptr && __ldcg(has + sequence * args.has_initial_state_stride) == 0) return kNoSlot;
  } else if (args.has_initial_state != nullptr &&
             args.has_initial_state[sequence * args.has_initial_state_stride] == 0) {
    return kNoSlot;
  }
  const int64_t slot = resolve_slot<kFromL2>(args.initial, sequence);
  return slot < 0 ? kSkipSequence : slot;
}

// Whether anything but their numbers says where sequences' states are.
__host__ __device__ __forceinline__ bool has_slots(const ChunkForwardArgs& args) {
  return args.initial.indices != nullptr || args.final_state.indices != nullptr || args.has_initial_state != nullptr;
}

__device__ __forceinline__ int64_t element_size(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }

__device__ __forceinline__ char* state_matrix(const StateSet& set, int64_t slot, int32_t head) {
  return static_cast<char*>(set.data) + (slot * set.slot_stride + head * set.head_stride) * element_size(set.type);
}

// Of a boundary state of one head, where the float4 j of 16 of a state group's thread lies: its values 4j .. 4j + 3 of
// S^T. What 16 neighbouring lanes have, eight rows of V, lies together: so much the combination takes at a time
// (combine.cuh). group: which 64 rows of V.
__device__ __forceinline__ int boundary_place(int group, int warp, int j, int lane) {
  return (((group * 4 + warp) * 2 + lane / 16) * 16 + j) * 16 + lane % 16;
}
inline constexpr int64_t kBoundaryVectors = kHeadDim * kHeadDim / 4;

// A transition is kept by 16 rows, as the left operands of the products that apply it (combine.cuh), 16 columns each,
// and its diagonal in fp32. What is off the diagonal is a sum of products of 16-bit operands and known to 2^-9 of
// itself in bf16: one bf16 holds it. In fp16 it is known better, and kept in two parts (pack_two_parts()). The diagonal
// may be 1 and nearly all that there is of M.
inline constexpr int kTransitionSteps = kHeadDim / 16;
template <typename Element>
inline constexpr int kTransitionParts = std::is_same_v<Element, __nv_bfloat16> ? 1 : 2;
template <int kParts>
struct TransitionRows {
  uint4 columns[kTransitionSteps][kParts][32];  // by lanes
  float diagonal[16];
};

// Before a block's first tile. The plan must be there.
template <typename Traits>
__device__ __forceinline__ void open_list(const ChunkForwardKernelParams& p, ChunkWalker& walker) {
  walker.remaining = -1;
  walker.opened = walker.waits = 0;
  if (p.list != nullptr) {
    walker.tile = -1;
    walker.tiles = Traits::kStateOnly ? 1 : 3;  // see take_listed_tile()
  } else {
    walker.tile = static_cast<int32_t>(blockIdx.x) / Traits::kBlocks;
    walker.tiles = p.cut != nullptr && *p.cut != 0 ? 0 : p.tiles;
  }
}

// SMs 2i and 2i + 1 share a cache of instructions: i of this one.
__device__ __forceinline__ uint32_t pair_of_sms() {
  uint32_t sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  return sm / 2;
}

// A number as it is in memory at this moment.
template <typename Number>
__device__ __forceinline__ uint32_t load_now(const Number* data) {
  static_assert(sizeof(Number) == 4);
  return static_cast<uint32_t>(*static_cast<const volatile Number*>(data));
}

// The next tile of a split's list, or -1 after the last. walker.tiles: which of its two parts are not given out, 1
// and 2.
template <typename Traits>
__device__ __forceinline__ int32_t take_listed_tile(const ChunkForwardKernelParams& p, ChunkWalker& walker) {
  // By ticket from the first on, and none in advance: blocks start when others leave them room, and tiles are few.
  if constexpr (Traits::kStateOnly || (Traits::kSave && !Traits::kEndsWhereKept)) {
    // In the order of the list (with kSave there are no registers left to ask what is ready). Its size is read beside
    // the ticket: one latency, not two.
    const int32_t tiles = p.sizes->tiles + p.sizes->dependent_tiles;
    int32_t tile = walker.tile;
    walker.tile = -1;
    if (tile < 0) tile = static_cast<int32_t>(atomicAdd(&p.tickets->ticket, 1u));
    if (tile < tiles) return tile;
    walker.tiles = 0;
  } else {
    if (walker.tile >= 0) {
      const int32_t tile = walker.tile;
      walker.tile = -1;
      if (tile < p.sizes->tiles) return tile;
      walker.tiles = 2;
    }
    while (walker.tiles != 0) {
      // Whether the boundary states are there is asked for the order alone: who reads them waits for them.
      const SplitProgress& progress = p.counters->progress;
      const bool there = load_now(&progress.states_left) + load_now(&progress.pieces_left) == 0;
      const uint32_t tiles = load_now(&p.sizes->tiles), dependent_tiles = load_now(&p.sizes->dependent_tiles);
      const bool dependent =
          walker.tiles == 2 || (walker.tiles == 3 && there &&
                                (p.readers == nullptr || load_now(&p.tickets->ticket) >= progress.first_tiles));
      // Tiles are taken chunks ahead of their time. A block that waits leaves the other tiles that do to blocks that
      // are still to come: where there are as many blocks as such tiles, none is left over.
      if (walker.waits != 0 && !there && dependent_tiles <= gridDim.x) {
        walker.tiles = 0;
        break;
      }
      walker.waits = dependent && !there;
      const uint32_t tile = atomicAdd(&p.tickets->ticket + (dependent ? 1 : 0), 1u);
      if (tile < (dependent ? dependent_tiles : tiles)) return static_cast<int32_t>(dependent ? tile + tiles : tile);
      walker.tiles &= dependent ? ~2 : ~1;
    }
  }
  return -1;
}

// Opens a tile of a sequence split.
template <typename Traits>
__device__ __forceinline__ void open_listed_tile(const ChunkForwardKernelParams& p, ChunkWalker& walker) {
  const ChunkForwardArgs& args = p.args;
  while (walker.tiles != 0) {
    const int32_t tile = take_listed_tile<Traits>(p, walker);
    if (tile < 0) return;
    // By parts, not as a copy: registers are short where this is called.
    const Tile& t = p.list[tile];
    ChunkRecord& r = walker.next;
    r.row = t.row;
    r.sequence = t.sequence;
    r.half = 0;
    r.chunk = t.chunk;
    r.position = t.position;
    r.head = t.head;
    r.key_head = static_cast<int16_t>(r.head / (args.num_value_heads / args.num_key_heads));
    r.slot_in = kNoSlot;
    r.slot_out = -1;
    r.flags = kFirstChunk;
    const int64_t initial = initial_slot(args, r.sequence);
    if (initial == kSkipSequence) continue;
    if (t.flags & kTileFromStart) {
      if (p.readers != nullptr) r.flags |= kCountedReader;
      r.slot_in = initial;
      if (r.slot_in >= 0) {
        l2_prefetch(state_matrix(args.initial, r.slot_in, r.head),
                    kHeadDim * kHeadDim * static_cast<uint32_t>(element_size(args.initial.type)));
      }
    }
    if constexpr (Traits::kStateOnly) {
      r.slot_out = t.slot;
      if (t.flags & kTileTransition) r.flags |= kFromIdentity | kNoValues | kToTransition;
    } else {
      if (t.flags & kTileToEnd) r.slot_out = resolve_slot(args.final_state, r.sequence);
      if (t.tokens <= 0 && r.slot_out < 0) continue;
      if (t.flags & kTileFromSlot) {
        r.slot_in = t.slot;
        r.flags |= kFromBoundary;
      }
    }
    walker.remaining = t.tokens;
    walker.silent = t.warmup;
    if (Traits::kStateOnly && walker.opened == 0) atomicAdd(&p.counters->blocks_running, 1u);
    ++walker.opened;
    return;
  }
}

// Whether blocks may sort their sequences by themselves.
template <typename Traits>
inline constexpr bool kMaySort = Traits::kBlocks == 1 && !Traits::kStateOnly;

// Of up to kMostSorted sequences, one to a lane, the lane's place: longest first, by chunks, equal ones in their order.
__device__ __forceinline__ int32_t sorted_rank(const PlannedSequence& s, int32_t sequences, int lane) {
  const int32_t chunks = (s.length + kChunk - 1) / kChunk;
  int32_t rank = 0;
#pragma unroll 1
  for (int32_t i = 0; i < sequences; ++i) {
    const int32_t other = __shfl_sync(0xffffffffu, chunks, i);
    rank += other > chunks || (other == chunks && i < lane);
  }
  return rank;
}

// The sequences that the block has found itself: kSorted: all, in their order; kOneTile: that of its tile.
template <typename Traits>
__device__ __forceinline__ PlannedSequence* found_sequences() {
  return reinterpret_cast<PlannedSequence*>(shared_memory() + Traits::kSmemSequences);
}
template <typename Traits>
__device__ __forceinline__ PlannedSequence sequence_of_rank(const ChunkForwardKernelParams& p, int32_t rank) {
  if constexpr (kMaySort<Traits>) {
    if (p.order != BlockOrder::kGiven) return found_sequences<Traits>()[p.order == BlockOrder::kSorted ? rank : 0];
  }
  return p.plan != nullptr ? p.plan[rank] : sequence_at(p.args, rank);
}

// The tiles of a block that deals, after its first.
struct DealtTiles {
  int32_t count;
  uint16_t tiles[kMostDealt];
};
static_assert(sizeof(DealtTiles) == 4 + 2 * kMostDealt);
template <typename Traits>
__device__ __forceinline__ DealtTiles& dealt_tiles() {
  return *reinterpret_cast<DealtTiles*>(shared_memory() + Traits::kSmemDealt);
}

// Not inlined: in fp16 with eight auxiliary warps of the same code (aux_role.cuh) a register would be spilled.
static __device__ __noinline__ int32_t take_ticket(uint32_t* ticket) {
  return static_cast<int32_t>(atomicAdd(ticket, 1u));
}

// Which tile a block takes after `tile`, of which it has opened `opened` after its first. A ticket is taken when its
// tile is opened, not before: a block would hold a tile back that others have time for.
template <typename Traits>
__device__ __forceinline__ int32_t next_tile(const ChunkForwardKernelParams& p, int32_t tile, int32_t opened,
                                             int32_t streams) {
  if (p.ticket != nullptr) return streams + take_ticket(p.ticket);
  if constexpr (kMaySort<Traits>) {
    if (p.order == BlockOrder::kSorted) {
      const DealtTiles& dealt = dealt_tiles<Traits>();
      return opened < dealt.count ? dealt.tiles[opened] : p.tiles;
    }
  }
  return tile + streams;
}

// What kernels whose chunks end where states are kept have in shared memory, lest the warp that opens tiles, and the
// state groups at a listed token, wait for memory: of each listed token place and slot, and of each sequence of kSorted
// the slots.
struct ListedToken {
  int32_t token, slot;  // the state after the tokens before `token`; 0: none. kNoSlot: it is not wanted
};
struct FoundSlots {
  int32_t in, out;  // initial_slot(), resolve_slot() of the final states
};
static_assert(sizeof(ListedToken) == 8 && sizeof(FoundSlots) == 8);
template <typename Traits>
__device__ __forceinline__ ListedToken* listed_tokens() {
  return reinterpret_cast<ListedToken*>(shared_memory() + Traits::kSmemListed);
}
template <typename Traits>
__device__ __forceinline__ FoundSlots* found_slots() {
  return reinterpret_cast<FoundSlots*>(shared_memory() + Traits::kSmemSlots);
}
__device__ __forceinline__ ListedToken read_listed(const ChunkForwardArgs& args, int32_t i) {
  const int64_t token =
      load_index<true>(args.listed_offsets, args.listed_offsets_are_64_bit, i * args.listed_offsets_stride);
  const int64_t slot = load_index<true>(args.listed_slots, args.listed_slots_are_64_bit, i * args.listed_slots_stride);
  return {token > 0 && token <= args.num_tokens ? static_cast<int32_t>(token) : 0,
          static_cast<int32_t>(usable_slot(args.final_state, slot))};
}
__device__ __forceinline__ FoundSlots read_slots(const ChunkForwardArgs& args, int32_t sequence) {
  return {static_cast<int32_t>(initial_slot<true>(args, sequence)),
          static_cast<int32_t>(resolve_slot<true>(args.final_state, sequence))};
}
// By one warp.
template <typename Traits>
__device__ __forceinline__ void fetch_listed_and_slots(const ChunkForwardKernelParams& p, int lane) {
  const ChunkForwardArgs& args = p.args;
#pragma unroll 1
  for (int32_t i = lane; i < args.num_listed; i += 32) listed_tokens<Traits>()[i] = read_listed(args, i);
  if (p.order == BlockOrder::kSorted && lane < args.num_sequences) found_slots<Traits>()[lane] = read_slots(args, lane);
  __syncwarp();
}
// Whether they are still what fetch_listed_and_slots() has found.
template <typename Traits>
__device__ __forceinline__ bool listed_and_slots_stay(const ChunkForwardKernelParams& p, int lane) {
  const ChunkForwardArgs& args = p.args;
  bool same = true;
#pragma unroll 1
  for (int32_t i = lane; i < args.num_listed; i += 32) {
    const ListedToken now = read_listed(args, i), then = listed_tokens<Traits>()[i];
    same &= now.token == then.token && now.slot == then.slot;
  }
  if (p.order == BlockOrder::kSorted && lane < args.num_sequences) {
    const FoundSlots now = read_slots(args, lane), then = found_slots<Traits>()[lane];
    same &= now.in == then.in && now.out == then.out;
  }
  return __all_sync(0xffffffffu, same);
}

template <typename Traits>
__device__ __forceinline__ int64_t final_slot_of(const ChunkForwardKernelParams& p, int32_t sequence) {
  if constexpr (Traits::kEndsWhereKept) {
    if (p.order == BlockOrder::kSorted) return found_slots<Traits>()[sequence].out;
  }
  return resolve_slot(p.args.final_state, sequence);
}
template <typename Traits>
__device__ __forceinline__ int64_t initial_slot_of(const ChunkForwardKernelParams& p, int32_t sequence) {
  if constexpr (Traits::kEndsWhereKept) {
    if (p.order == BlockOrder::kSorted) return found_slots<Traits>()[sequence].in;
  }
  return initial_slot(p.args, sequence);
}

template <typename Traits>
inline constexpr bool kStagesStates = requires { requires Traits::kStagesStates; };
template <typename Traits>
inline constexpr bool kKeepsA = requires { requires Traits::kKeepsA; };

// Three quarters of the initial state of the tile that starts with chunk m, K by K, come by the copy engine into stages
// that later chunks are lent out of, which are loaded when the state has been read. All are free a step before the tile
// starts: what they will hold is needed a step after that, or later. By single words from memory the same would keep
// the paths of the state groups' loads busy for the time of a step, of all SMs at once where lengths are equal.
template <typename Traits>
struct StagedState {
  static constexpr int kQuarters = 3;
  static constexpr uint32_t kBytesQuarter = kHeadDim * kHeadDim;  // of floats

  uint32_t number;  // of such tiles in the stream, modulo 4
  explicit __device__ StagedState(int32_t flags) : number(static_cast<uint32_t>(flags) >> kStagedCountShift & 3) {}

  // The chunks, ahead of m, whose V and Q, and K, are late.
  static constexpr uint32_t kLateV = 1, kLateQ = 1, kLateK = 3;
  static __device__ uint32_t stage(int quarter, uint32_t m) {
    return quarter == 0   ? smem() + Traits::kSmemV + (m + kLateV) % Traits::kStagesV * Traits::kBytesV
           : quarter == 1 ? smem() + Traits::kSmemK + (m + kLateK) % Traits::kStagesK * Traits::kBytesK
                          : smem() + Traits::kSmemQ + (m + kLateQ) % Traits::kStagesQ * Traits::kBytesK;
  }
  // Two of each: of tiles of a chunk the next one's quarters are under way before this one's are there.
  __device__ uint32_t full() const { return smem() + Traits::kFullState + 8 * (number & 1); }
  __device__ uint32_t free() const { return smem() + Traits::kFreeState + 8 * (number & 1); }
  __device__ uint32_t parity() const { return number >> 1; }
};

// Opens the next tile that has anything to do.
template <typename Traits>
__device__ __forceinline__ void open_tile(const ChunkForwardKernelParams& p, ChunkWalker& walker) {
  const ChunkForwardArgs& args = p.args;
  while (walker.tile < walker.tiles) {
    int32_t tile = walker.tile;
    const int32_t opened = walker.opened++;
    if (opened > 0) {
      tile = next_tile<Traits>(p, tile, opened - 1, static_cast<int32_t>(gridDim.x) / Traits::kBlocks);
      walker.tile = tile;
      if (tile >= walker.tiles) return;
    }
    const int32_t rank = tile / args.num_value_heads;
    const PlannedSequence sequence = sequence_of_rank<Traits>(p, rank);
    ChunkRecord& r = walker.next;
    r.slot_out = final_slot_of<Traits>(p, sequence.index);
    if (sequence.length <= 0 && r.slot_out < 0) continue;
    r.slot_in = initial_slot_of<Traits>(p, sequence.index);
    if (r.slot_in == kSkipSequence) continue;
    r.row = sequence.start;
    r.flags = kFirstChunk;
    if (kStagesStates<Traits> && p.staged_initial != 0 && r.slot_in >= 0) {
      r.flags |= kStagedState | (walker.staged++ & 3) << kStagedCountShift;
    }
    r.head = tile - rank * args.num_value_heads;
    r.sequence = sequence.index;
    r.half = 0;
    r.key_head = static_cast<int16_t>(r.head / (args.num_value_heads / args.num_key_heads));
    r.chunk = sequence.first_chunk;
    r.position = 0;
    walker.remaining = max(sequence.length, 0);
    walker.silent = 0;
    // Not of a block's first tile, whose K is more urgent: its state groups read the state when that is there.
    if (walker.opened > 1 && r.slot_in >= 0) {
      l2_prefetch(state_matrix(args.initial, r.slot_in, r.head),
                  kHeadDim * kHeadDim * static_cast<uint32_t>(element_size(args.initial.type)));
    }
    return;
  }
}

// Opens the walker's next tile, if there is one.
template <typename Traits>
__device__ __forceinline__ void open_next_tile(const ChunkForwardKernelParams& p, ChunkWalker& walker) {
  if (Traits::kStateOnly || p.list != nullptr) {
    open_listed_tile<Traits>(p, walker);
  } else {
    open_tile<Traits>(p, walker);
  }
}

// What a tile's first chunk hands on to the next.
inline constexpr int kFlagsOfTile = kNoValues | kToTransition | kCountedReader;

// ChunkEnd::kept of a chunk that starts with token `row`, `inside` tokens after the start of its sequence's chunk
// `position`, in a tile that has `tokens` from there on. Of listed tokens only those of every `step`th entry from
// `first` on are looked at.
template <typename Traits>
__device__ __forceinline__ int32_t tokens_to_kept(const ChunkForwardArgs& args, int32_t row, int32_t position,
                                                  int32_t inside, int32_t tokens, int32_t first, int32_t step) {
  int64_t least = kNeverKept;
  if (args.checkpoints != nullptr) {
    least = int64_t{args.checkpoint_every_chunks - position % args.checkpoint_every_chunks} * kChunk - inside;
  }
#pragma unroll 4
  for (int32_t i = first; i < args.num_listed; i += step) {
    const int32_t after = listed_tokens<Traits>()[i].token - row;
    if (after > 0) least = min(least, int64_t{after});
  }
  return least <= tokens ? static_cast<int32_t>(least) : kNeverKept;
}

// Takes `valid` tokens off, of `tokens` that the tile has, and says what flags their chunk has from that. find_kept():
// the next ChunkEnd::kept, asked where it has to be found.
template <typename FindKept>
__device__ __forceinline__ int32_t end_chunk(ChunkEnd& end, int32_t valid, int32_t tokens, FindKept find_kept) {
  int32_t flags = (end.inside != 0 ? kInsideOnGrid : 0) | (tokens >= kChunk ? kRowsFollow : 0);
  end.inside = (end.inside + valid) % kChunk;
  end.kept -= valid;
  if (end.kept == 0) {
    flags |= end.inside == 0 ? kKeptChunk | kEndsOnGrid : kKeptChunk;
    end.kept = find_kept();
  }
  return flags;
}

// The record of the next chunk.
template <typename Traits>
__device__ __forceinline__ void produce_chunk(const ChunkForwardKernelParams& p, ChunkWalker& walker,
                                              ChunkRecord& record) {
  if (walker.remaining < 0) open_next_tile<Traits>(p, walker);
  if (walker.remaining < 0) {
    record.valid = -1;
    return;
  }
  ChunkRecord r = walker.next;
  r.valid = min(walker.remaining, kChunk);
  if constexpr (Traits::kEndsWhereKept) {
    const auto find_kept = [&](int32_t row, int32_t position, int32_t tokens) {
      return tokens_to_kept<Traits>(p.args, row, position, walker.end.inside, tokens, 0, 1);
    };
    if (r.flags & kFirstChunk) {
      walker.end.inside = 0;
      walker.end.kept = find_kept(r.row, r.position, walker.remaining);
    }
    r.valid = min(r.valid, min(kChunk - walker.end.inside, walker.end.kept));
    r.flags |= end_chunk(walker.end, r.valid, walker.remaining, [&] {
      return find_kept(r.row + r.valid, r.position + (walker.end.inside == 0), walker.remaining - r.valid);
    });
  }
  walker.remaining -= r.valid;
  if (walker.remaining == 0) {
    r.flags |= kLastChunk;
    walker.remaining = -1;
  }
  if (walker.silent > 0) {
    r.flags |= kSilentChunk;
    --walker.silent;
  }
  record = r;
  walker.next.flags = r.flags & kFlagsOfTile;
  if constexpr (Traits::kEndsWhereKept) {
    walker.next.row = r.row + r.valid;
    walker.next.chunk = r.chunk + (walker.end.inside == 0);
    walker.next.position = r.position + (walker.end.inside == 0);
  } else {
    walker.next.row = r.row + kChunk;
    walker.next.chunk = r.chunk + 1;
    walker.next.position = r.position + 1;
  }
}

// ... of chunk m, in the ring, by the walker in shared memory.
template <typename Traits>
__device__ __forceinline__ void produce_chunk(const ChunkForwardKernelParams& p, uint32_t m) {
  produce_chunk<Traits>(p, *reinterpret_cast<ChunkWalker*>(shared_memory() + Traits::kSmemWalker),
                        reinterpret_cast<ChunkRecord*>(shared_memory() + Traits::kSmemChunks)[m % Traits::kChunkRing]);
}

// What the first chunk of a block's tile takes, into L2, by one warp, while the kernels before this one may still run.
// Nothing is kept of it: should they write the offsets or anything else of the call, what was read here is only a wrong
// guess of a place, within the tensors. With a plan the tile is not known yet.
template <typename Traits>
__device__ __forceinline__ void prefetch_first_chunk(const ChunkForwardKernelParams& p, int lane) {
  if (p.list != nullptr || p.plan != nullptr) return;
  const ChunkForwardArgs& args = p.args;
  const int32_t tile = static_cast<int32_t>(blockIdx.x) / Traits::kBlocks;
  const int32_t part = static_cast<int32_t>(blockIdx.x) % Traits::kBlocks;  // of V, and of the chunks' preparation
  const int32_t place = tile / args.num_value_heads, head = tile - place * args.num_value_heads;
  const bool sorted = p.order == BlockOrder::kSorted;
  int32_t sequence = sorted ? min(lane, args.num_sequences - 1) : place;
  PlannedSequence s = args.cu_seqlens != nullptr
                          ? sequence_at(args, sequence)
                          : PlannedSequence{sequence * static_cast<int32_t>(args.dense_length), 1, sequence, 0};
  if (sorted) {
    const int32_t rank = sorted_rank(s, args.num_sequences, lane);
    sequence = __ffs(__ballot_sync(0xffffffffu, lane < args.num_sequences && rank == place)) - 1;
    s.start = __shfl_sync(0xffffffffu, s.start, sequence);
  }
  const int32_t row = s.start;
  if (sequence < 0 || row >= args.num_tokens) return;
  if (lane == 0) {
    const int32_t key_head = head / (args.num_value_heads / args.num_key_heads);
    tma_prefetch_4d(&p.k, 0, row + part * kChunk, 0, key_head);
    tma_prefetch_4d(&p.q, 0, row + part * kChunk, 0, key_head);
    if (part < 2) tma_prefetch_4d(&p.v, 0, row, part, head);
    const auto prefetch_state = [&](int64_t slot) {
      l2_prefetch(state_matrix(args.initial, slot, head),
                  kHeadDim * kHeadDim * static_cast<uint32_t>(element_size(args.initial.type)));
    };
    if constexpr (Traits::kEndsWhereKept) {
      if (const int64_t slot = initial_slot<true>(args, sequence); slot >= 0) prefetch_state(slot);
    } else {
      if (args.initial.data != nullptr && args.initial.indices == nullptr && part == 0) prefetch_state(sequence);
    }
  }
#pragma unroll 1
  for (int64_t token = row + lane; token < min(int64_t{row} + kChunk, args.num_tokens); token += 32) {
    if (args.g != nullptr) l2_prefetch_line(args.g + token * args.g_token_stride + head * args.g_head_stride);
    if (args.beta != nullptr)
      l2_prefetch_line(args.beta + token * args.beta_token_stride + head * args.beta_head_stride);
  }
}

// Records that are there before the first chunk. With duties, record m + 5 follows the gates of chunk m: whoever has
// seen P of chunk m, or its end, sees record m + 4.
template <typename Traits>
inline constexpr uint32_t kFirstRecords = Traits::kDuties ? 5 : 4;

// What a tile of a sequence takes, in chunks: its first and last state take about as long as two. Sums of kMostDealt,
// and five bits beside them, fit 32 bits; longer sequences than this are dealt as if they were as long.
__device__ __forceinline__ uint32_t tile_cost(const PlannedSequence& s) {
  return static_cast<uint32_t>(min((s.length + kChunk - 1) / kChunk, 1 << 19)) + 2;
}

// Deals the tiles of sorted sequences by one warp, the same in every block: each to the block that has least to do so
// far, longest first, as tickets would do it; they need a kernel before this one. Blocks that have as much to do are a
// group, whose first, number, load and tiles a lane keeps: in the beginning those of a sequence, and a sequence's end
// splits one.
template <typename Traits>
__device__ __forceinline__ void deal_tiles(const ChunkForwardKernelParams& p, int lane) {
  const PlannedSequence* sequences = found_sequences<Traits>();
  DealtTiles& dealt = dealt_tiles<Traits>();
  const int32_t heads = p.args.num_value_heads, streams = static_cast<int32_t>(gridDim.x);
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  int32_t begin = lane * heads, blocks = 0, tiles = 0, count = 0;
  uint32_t load = 0;
  if (lane < p.args.num_sequences) {
    blocks = min(max(streams - begin, 0), heads);
    load = tile_cost(sequences[lane]);
  }
#pragma unroll 1
  for (int32_t tile = streams; tile < p.tiles;) {
    const int32_t rank = tile / heads, end = min((rank + 1) * heads, p.tiles);
    const uint32_t cost = tile_cost(sequences[rank]);
#pragma unroll 1
    while (tile < end) {
      const uint32_t place = blocks > 0 && tiles < kMostDealt ? load << 5 | static_cast<uint32_t>(lane) : ~0u;
      const int least = static_cast<int>(__reduce_min_sync(0xffffffffu, place) & 31);
      const int32_t first = __shfl_sync(0xffffffffu, begin, least), have = __shfl_sync(0xffffffffu, blocks, least);
      const int32_t taken = min(have, end - tile);
      if (block >= first && block < first + taken) {
        if (lane == 0) dealt.tiles[count] = static_cast<uint16_t>(tile + block - first);
        ++count;
      }
      if (taken < have) {
        const int rest = __ffs(__ballot_sync(0xffffffffu, blocks == 0)) - 1;
        const uint32_t their_load = __shfl_sync(0xffffffffu, load, least);
        const int32_t their_tiles = __shfl_sync(0xffffffffu, tiles, least);
        if (lane == rest) begin = first + taken, blocks = have - taken, load = their_load, tiles = their_tiles;
        if (lane == least) blocks = taken;
      }
      if (lane == least) load += cost, ++tiles;
      tile += taken;
    }
  }
  if (lane == 0) dealt.count = count;
}

// The plan of a split, not the end of the kernel that makes it, which comes a microsecond later: by one warp. The
// kernels behind this one start after that. Who has to wait takes a ticket meanwhile, which lane 0 gets; else -1.
__device__ __forceinline__ int32_t wait_for_plan(const ChunkForwardKernelParams& p, int lane) {
  int32_t early = -1;
  if (lane == 0) {
    if (load_acquire(&p.counters->made) != 1) {
      early = static_cast<int32_t>(atomicAdd(&p.tickets->ticket, 1u));
      while (load_acquire(&p.counters->made) != 1) {
      }
    }
    fence_proxy_async_all();  // the copy engine's reads come behind it as well
  }
  __syncwarp();
  return early;
}

// ... by one warp.
template <typename Traits>
__device__ __forceinline__ void list_first_chunks(const ChunkForwardKernelParams& p, int lane) {
  const ChunkForwardArgs& args = p.args;
  int32_t early = -1;
  if (p.list != nullptr) {
    early = wait_for_plan(p, lane);
    asm volatile("griddepcontrol.launch_dependents;");
  }
  const bool sorted = p.order == BlockOrder::kSorted, finds = p.order != BlockOrder::kGiven;
  const int32_t rank = static_cast<int32_t>(blockIdx.x) / Traits::kBlocks / args.num_value_heads;  // of the first tile
  const int32_t mine = sorted ? min(lane, args.num_sequences - 1) : rank;
  PlannedSequence s{};
  if (finds) s = sequence_at(args, mine);
  // Where blocks find their sequences, the list is made while the kernels before this one may still run, of offsets
  // that they might write, and once more if they have.
  bool waits = p.list == nullptr;
#pragma unroll 1
  while (true) {
    // A ticket is taken once, and is zero when the kernel before this one has ended: the first records must need none.
    bool guesses = finds && waits;
    if (finds) {
      const int32_t place = sorted ? sorted_rank(s, args.num_sequences, lane) : 0;
      if (lane < (sorted ? args.num_sequences : 1)) found_sequences<Traits>()[place] = s;
      __syncwarp();
      if (sorted && p.ticket == nullptr) deal_tiles<Traits>(p, lane);
      if (p.ticket != nullptr) {
        guesses &= found_sequences<Traits>()[rank].length > static_cast<int32_t>(kFirstRecords<Traits> - 1) * kChunk;
      }
      // Slots are looked at again where they are at hand. They may skip a block's first tile, which takes a ticket
      // then.
      if constexpr (Traits::kEndsWhereKept) guesses &= (sorted && p.ticket == nullptr) || !has_slots(args);
    }
    if (guesses || !waits) {
      if constexpr (Traits::kEndsWhereKept) fetch_listed_and_slots<Traits>(p, lane);
      if (lane == 0) {
        ChunkWalker walker;  // in registers for as long as it goes on at once
        open_list<Traits>(p, walker);
        if (p.list != nullptr) walker.tile = early;
#pragma unroll 1
        for (uint32_t m = 0; m < kFirstRecords<Traits>; ++m) {
          produce_chunk<Traits>(p, walker, reinterpret_cast<ChunkRecord*>(shared_memory() + Traits::kSmemChunks)[m]);
        }
        *reinterpret_cast<ChunkWalker*>(shared_memory() + Traits::kSmemWalker) = walker;
      }
      if (!waits) return;
      __syncwarp();
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (p.followed != 0) asm volatile("griddepcontrol.launch_dependents;");
    waits = false;
    if (finds) {
      const PlannedSequence now = sequence_at(args, mine);
      if constexpr (Traits::kEndsWhereKept) guesses = guesses && listed_and_slots_stay<Traits>(p, lane);
      if (guesses && __all_sync(0xffffffffu, now.start == s.start && now.length == s.length)) return;
      s = now;
    }
  }
}

// base + count * bytes, in one instruction.
__device__ __forceinline__ const void* advance(const void* base, int count, int bytes) {
  uint64_t sum;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(sum) : "r"(count), "r"(bytes), "l"(reinterpret_cast<uint64_t>(base)));
  return reinterpret_cast<const void*>(sum);
}

// Every beta of a call without any.
static __device__ const float kOne = 1.0f;

// g and beta of a chunk into their stage, zeros past the end, by 128 threads, all of which `barrier` counts: half of
// them fetch g, the others beta.
template <typename Traits>
__device__ __forceinline__ void load_gates(const ChunkForwardArgs& args, const ChunkRecord& chunk, uint32_t raw,
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
  copy_async_4(raw + (is_beta ? Traits::kRawBeta : Traits::kRawG) + 4 * token,
               advance(head, moves ? place.x + token : 0, token_bytes), have);
  copy_async_arrive(barrier);
}

}  // namespace flash_qla::cuda::sm90
