// Host side of the fused Hopper forward: tensor maps, the planner of varying lengths, the choice of variant.
#include <algorithm>
#include <vector>

#include "cuda/sm90/chunk_fwd/args.h"
#include "cuda/sm90/chunk_fwd/save_a.h"
#include "cuda/sm90/chunk_fwd/sequence_order.h"
#include "cuda/sm90/chunk_fwd/traits.h"
#include "cuda/sm90/chunk_fwd/zero_fill.cuh"
#include "cuda/sm90/common/launch_kernel.h"
#include "cuda/sm90/context_parallel/plan.h"
#include "cuda/sm90/context_parallel/plan_args.h"

namespace flash_qla::cuda::sm90::fwd {
namespace {

using cp::choose_grid, cp::divide_up, cp::equal_lengths, cp::least_longest, cp::pairs_pay, cp::promise_of_plan,
    cp::shares_pay, cp::split_capacity, cp::unsplit_time, cp::usual_choices;
using cp::kForcedSpacing, cp::kInvariantSpacing, cp::kLeastOfEqual, cp::kMinSpacing, cp::kMostAsked, cp::kMostLoss,
    cp::kSplitChunk, cp::kTilesPerSmUnsplit;
using cp::lay_out_split, cp::launch_split_plan;
using cp::LengthSummary, cp::SplitCapacity, cp::SplitCosts, cp::SplitGrid, cp::SplitKernelParams, cp::SplitPromise,
    cp::UndecayedSplit, cp::UsualChoices;

// Blocks, or pairs of blocks, for `tiles` tiles: no more than the card has room for.
int count_streams(const ChunkForwardKernel& kernel, int tiles, int sms) {
  return std::max(1, std::min(tiles, sms / kernel.blocks));
}

bool one_tile_to_a_stream(const ChunkForwardKernel& kernel, int tiles, int sms) {
  return tiles <= count_streams(kernel, tiles, sms);
}

// Whether what no sequence writes is cleared before the kernel, as it cannot do it: rows of h, and of skipped sequences
// by most.
bool needs_planner(const ChunkForwardArgs& args, const ChunkForwardKernel& kernel) {
  return (has_slots(args) && !kernel.takes_slots) || args.h != nullptr;
}

// Whether blocks deal the tiles of few sequences among themselves, without tickets: each goes through about so many
// rounds for every sequence, some 0.1 us each, mostly before the kernel before has ended.
bool blocks_deal(int tiles, int sequences, int streams) {
  constexpr int kMostRounds = 48;
  return (tiles + streams - 1) / streams * sequences <= kMostRounds && tiles <= UINT16_MAX;
}

// The kernel may start while the one before it still runs, whichever that is: it waits for it before it touches any
// memory but its own.
cudaError_t launch_tiles(const ChunkForwardKernel& kernel, const ChunkForwardKernelParams& params, int tiles, int sms,
                         cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.smem_bytes);
  if (error != cudaSuccess) return error;
  return launch_kernel(kernel.function, kernel.blocks * count_streams(kernel, tiles, sms), kernel.threads,
                       static_cast<size_t>(kernel.smem_bytes), params, true, stream,
                       static_cast<unsigned>(kernel.blocks));
}

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000, cudaEnableDefault, &found) !=
            cudaSuccess ||
        found != cudaDriverEntryPointSuccess) {
      pointer = nullptr;
    }
    return reinterpret_cast<EncodeTiled>(pointer);
  }();
  return function;
}

// [T, H, 128] as (64, T, 2, H): a box of 64 tokens lands as `halves` tiles of 64 rows of 128 bytes, swizzled.
bool encode_map(CUtensorMap* map, ElementType type, const void* data, int64_t tokens, int64_t heads,
                int64_t token_stride, int64_t head_stride, int halves) {
  if (encode_tiled() == nullptr) return false;
  const cuuint64_t sizes[4] = {64, static_cast<cuuint64_t>(tokens), 2, static_cast<cuuint64_t>(heads)};
  const cuuint64_t strides[3] = {static_cast<cuuint64_t>(token_stride) * 2, 128,
                                 static_cast<cuuint64_t>(head_stride) * 2};
  const cuuint32_t box[4] = {64, kChunk, static_cast<cuuint32_t>(halves), 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  return encode_tiled()(
             map, type == ElementType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
             const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// A: boxes of a chunk and head.
bool encode_inverse(CUtensorMap* map, const ChunkForwardArgs& args) {
  const int64_t heads = args.num_value_heads;
  return encode_map(map, args.type, args.a, args.num_tokens, heads, heads * kChunk, kChunk, 1);
}

// The initial states as (32, 128, 4, Hv, slots) floats: boxes of a quarter of K, of all of V, as blocks of 32 floats by
// rows of 128 bytes, swizzled. False: they are of other kinds, or lie as the copy engine cannot read them.
bool encode_states(CUtensorMap* map, const StateSet& set, bool v_first, int64_t sequences, int64_t heads) {
  if (set.data == nullptr || set.type != ElementType::kFloat32 || encode_tiled() == nullptr) return false;
  const cuuint64_t sizes[5] = {32, kHeadDim, kHeadDim / 32, static_cast<cuuint64_t>(heads),
                               static_cast<cuuint64_t>(set.indices != nullptr ? set.slots : sequences)};
  const cuuint64_t strides[4] = {kHeadDim * 4, 32 * 4, static_cast<cuuint64_t>(set.head_stride) * 4,
                                 static_cast<cuuint64_t>(set.slot_stride) * 4};
  const cuuint32_t box[5] = {32, v_first ? 128u : 32u, v_first ? 1u : 4u, 1, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  return encode_tiled()(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 5, set.data, sizes, strides, box, steps,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Which states a call wants on the way: checkpoints and those of listed tokens, or h as well.
enum class SavedStates { kNone, kSome, kAll };

// any_bits: a sequence's bits may depend on the batch. variant: not kAuto. keeps_a: keeps_inverse().
ChunkForwardKernel choose_kernel(ElementType type, ChunkForwardVariant variant, SavedStates saved, bool any_bits,
                                 bool keeps_a = false) {
  const bool half = type == ElementType::kFloat16, save = saved != SavedStates::kNone;
  if (variant == ChunkForwardVariant::kSplitV) {
    return save ? (half ? chunk_forward_fp16_split_save() : chunk_forward_bf16_split_save())
                : (half ? chunk_forward_fp16_split() : chunk_forward_bf16_split());
  }
  if (keeps_a) return half ? chunk_forward_fp16_fast_a() : chunk_forward_bf16_fast_a();
  if (any_bits) {
    if (saved == SavedStates::kAll) return half ? chunk_forward_fp16_fast_h() : chunk_forward_bf16_fast_h();
    return save ? (half ? chunk_forward_fp16_fast_save() : chunk_forward_bf16_fast_save())
                : (half ? chunk_forward_fp16_fast() : chunk_forward_bf16_fast());
  }
  if (save) return half ? chunk_forward_fp16_save() : chunk_forward_bf16_save();
  return half ? chunk_forward_fp16() : chunk_forward_bf16();
}

// A step of a pair of blocks takes about this share of a whole tile's (measured: docs/design/sm90_forward.md).
constexpr double kSplitStep = 0.68;

bool split_pays(int64_t tiles, int sms) {
  const int64_t whole = (tiles + sms - 1) / sms, split = (2 * tiles + sms - 1) / sms;
  return static_cast<double>(split) * kSplitStep < static_cast<double>(whole);
}

// The variant for so many whole tiles that are not cut.
ChunkForwardVariant choose_variant(int64_t tiles, int sms) {
  return split_pays(tiles, sms) ? ChunkForwardVariant::kSplitV : ChunkForwardVariant::kWholeHead;
}

// Whether two sets of states share memory.
bool overlap(const StateSet& a, const StateSet& b, int32_t sequences, int32_t heads) {
  const auto begin = [](const StateSet& set) { return reinterpret_cast<uintptr_t>(set.data); };
  const auto end = [&](const StateSet& set) {
    const int64_t slots = set.indices != nullptr ? set.slots : sequences;
    const int64_t elements = (slots - 1) * set.slot_stride + (heads - 1) * set.head_stride + kHeadDim * kHeadDim;
    return begin(set) + static_cast<uintptr_t>(elements) * (set.type == ElementType::kFloat32 ? 4 : 2);
  };
  return a.data != nullptr && b.data != nullptr && begin(a) < end(b) && begin(b) < end(a);
}

// With V and O in boxes of the kernel's own height.
bool encode_values(const ChunkForwardKernel& kernel, ChunkForwardKernelParams* params) {
  const ChunkForwardArgs& args = params->args;
  return encode_map(&params->v, args.type, args.v, std::max<int64_t>(args.num_tokens, 1), args.num_value_heads,
                    args.v_token_stride, args.v_head_stride, kernel.state_groups) &&
         encode_map(&params->o, args.type, args.o, std::max<int64_t>(args.num_tokens, 1), args.num_value_heads,
                    args.o_token_stride, args.o_head_stride, kernel.state_groups);
}

cudaError_t launch_tiles_of(const ChunkForwardKernel& kernel, ChunkForwardKernelParams params, int tiles, int sms,
                            cudaStream_t stream) {
  if (!encode_values(kernel, &params)) return cudaErrorInvalidValue;
  return launch_tiles(kernel, params, tiles, sms, stream);
}

// What decide_split() answers, and for whom.
struct DecidedSplit {
  SplitDecision decision{false, ""};
  bool uncut_shared = false;  // the gates may be such that nothing is cut, by several SMs to a head
  int32_t least_longest = 0;  // the lengths may be such that nothing is cut: see least_longest()
  SplitGrid grid{};           // of equal lengths, and choices
  UsualChoices choices{};
  bool by_pairs = false;  // the kernel behind is that of pairs of SMs, and may get what waits for boundary states
};

SplitCapacity capacity_of(const ChunkForwardArgs& args, int32_t sms) {
  return split_capacity(args.split, args.force_split != 0, args.num_tokens, args.num_sequences, args.num_value_heads,
                        sms);
}

// Of a call that is planned for a split: four kernels, each allowed to start while the one before it runs.
//   boundaries -> lists -> state tiles and boundary states -> tiles that write O
// The last one begins with tiles that depend on none of the others, as soon as an SM is free.
// Where the lengths are asked first, two come before them: one that reads the lengths, and the kernel of a call without
// a split, which finds its tiles if nothing is to be cut. Where the gates decide and several SMs would share a head, a
// kernel that does so is the last, with a list.
cudaError_t launch_split(const ChunkForwardKernelParams& params, const DecidedSplit& decided,
                         const ChunkForwardKernel& kernel, const ChunkForwardKernel& uncut_kernel, int sms,
                         cudaStream_t stream) {
  const ChunkForwardArgs& args = params.args;
  SplitKernelParams split{};
  split.args = args;
  split.capacity = capacity_of(args, sms);
  split.uncut_shared = decided.uncut_shared;
  const bool lengths_first = decided.least_longest != 0;
  split.least_longest = decided.least_longest;
  split.clear_blocks = args.cu_seqlens != nullptr && !lengths_first ? kClearBlocks : 0;
  split.costs = SplitCosts(args.num_key_heads, args.num_value_heads);
  split.expected_grid = decided.grid;
  split.usual_choices = decided.choices;
  UndecayedSplit& undecayed = split.usual_choices.undecayed;
  if (uncut_kernel.blocks != 2 || kernel.blocks != 1) undecayed = {};
  split.in_place = overlap(args.initial, args.final_state, args.num_sequences, args.num_value_heads);
  split.sms = sms;
  lay_out_split(args, split.capacity, args.workspace, &split.workspace);
  cudaError_t error = cudaSuccess;
  if (lengths_first) {
    SplitKernelParams ask = split;
    ask.args.workspace = split.workspace.unsplit;
    ChunkForwardKernelParams whole = params;
    // A cluster with a tile at most reads its sequence while the lengths are looked at. Blocks that find more than one
    // by themselves begin before that is known.
    const bool sorts = uncut_kernel.blocks == 1 || !one_tile_to_a_stream(uncut_kernel, whole.tiles, sms) ||
                       needs_planner(args, uncut_kernel);
    error = launch_ask_lengths(ask, sorts, stream);
    if (error != cudaSuccess) return error;
    if (sorts) place_plan(split.workspace.unsplit, &whole);
    whole.cut = split.workspace.cut;
    // What comes behind the call's last kernel does not come behind this one, and the split's kernels would start
    // beside it, on SMs that it leaves idle: that took 2 % of its time.
    whole.followed = 0;
    error = launch_tiles_of(uncut_kernel, whole, whole.tiles, sms, stream);
    if (error != cudaSuccess) return error;
  }
  error = launch_split_plan(split, stream);
  if (error != cudaSuccess) return error;

  SplitCounters* counters = split.workspace.counters;
  ChunkForwardKernelParams tiles = params;
  tiles.boundary_states = split.workspace.boundary_states;
  tiles.transitions = split.workspace.transitions;
  tiles.chains = split.workspace.chains;
  tiles.counters = counters;
  SplitStart* start = split.workspace.start;
  tiles.start = start;
  tiles.readers = split.in_place != 0 ? split.workspace.readers : nullptr;
  tiles.cut = lengths_first ? split.workspace.cut : nullptr;
  tiles.list = split.workspace.state_tiles;
  tiles.sizes = &counters->states;
  tiles.tickets = &start->states;
  tiles.followed = kernel.blocks == 1;  // by a kernel that waits for the plan itself (list_first_chunks())
  // The planner holds an SM: with a block for that one too, the kernel behind this one could not start before it ends.
  error =
      launch_tiles_of(args.type == ElementType::kFloat16 ? chunk_forward_fp16_states() : chunk_forward_bf16_states(),
                      tiles, std::max(sms - 1, 1), sms, stream);

  tiles.followed = params.followed;
  tiles.list = split.workspace.output_tiles;
  tiles.sizes = &counters->outputs;
  tiles.tickets = &start->outputs;
  if (error == cudaSuccess) error = launch_tiles_of(kernel, tiles, sms, sms, stream);
  if (error != cudaSuccess || !decided.uncut_shared) return error;
  tiles.sizes = &counters->halves;
  tiles.tickets = &start->halves;
  // A cluster to each tile, or more than find one.
  const int32_t segments = undecayed.segments > 0 ? undecayed.segments : 2;
  ChunkForwardKernel behind = uncut_kernel;
  if (behind.behind_plan != nullptr) behind.function = behind.behind_plan;
  return launch_tiles_of(behind, tiles, tiles.tiles * (segments - 1), sms, stream);
}

DecidedSplit work_out_split(const ChunkForwardArgs& args, int32_t sms) {
  const bool forced = args.force_split != 0;
  if (args.split == SplitMode::kOff || sms == 0) return {{false, "auto_cp is off"}};
  if (args.num_tokens == 0 || args.num_sequences == 0 || args.num_value_heads == 0)
    return {{false, "there are no tokens"}};
  const int64_t tiles = static_cast<int64_t>(args.num_sequences) * args.num_value_heads;
  const int64_t longest = args.cu_seqlens != nullptr ? args.num_tokens : args.dense_length;
  const int64_t spacing = forced                                ? kForcedSpacing
                          : args.split == SplitMode::kInvariant ? kInvariantSpacing
                                                                : kMinSpacing;
  if (longest < 2 * spacing * kSplitChunk) return {{false, "no sequence can be long enough to cut"}};
  const bool dense = args.cu_seqlens == nullptr;
  const int32_t heads = args.num_value_heads;
  const SplitCosts costs(args.num_key_heads, heads);
  // Lengths on the device are not known here. Equal ones are the least that a cut can gain.
  const LengthSummary equal = equal_lengths(longest, args.num_sequences, dense);
  if (forced || args.split == SplitMode::kInvariant) {
    return {{true, forced ? "cut wherever it is possible, as forced"
                          : "each sequence cut by its own length; its gates decide on the device"},
            false,
            0,
            choose_grid(args.split, forced, equal, heads, sms, costs)};
  }
  if (tiles >= kTilesPerSmUnsplit * sms) return {{false, "sequences times value heads fill the card many times over"}};
  const SplitPromise promise = promise_of_plan(equal, heads, sms, costs, true);
  // One sequence of seven eighths beside short ones.
  const int64_t chunks = std::max<int64_t>(divide_up(longest, kSplitChunk), args.num_sequences);
  const LengthSummary one_long{chunks, args.num_sequences, static_cast<int32_t>(chunks - chunks / 8)};
  const bool vary = !dense && args.num_sequences > 1;
  const SplitPromise unequal = vary ? promise_of_plan(one_long, heads, sms, costs, false) : SplitPromise{};
  // Where unequal lengths would gain, equal ones need not.
  if (promise.pays() || (unequal.pays() && promise.pays(kLeastOfEqual))) {
    const bool may_share = shares_pay(tiles, sms), uncut_shared = may_share && !promise.surely();
    const bool by_pairs = may_share && pairs_pay(equal, promise, heads, uncut_shared, sms, costs);
    const bool shared = uncut_shared || by_pairs;
    return {{true, dense ? "the tiles leave SMs idle; the gates decide on the device"
                         : "as many sequences of equal length leave SMs idle; lengths and gates decide on the device"},
            shared,
            0,
            promise.grid,
            usual_choices(equal, promise.grid, heads, shared, sms, costs, by_pairs),
            by_pairs};
  }
  // The unsplit kernel is not launched once more for gates that ask for no cut: all calls asked in vain would pay.
  const float asking = shares_pay(tiles, sms) ? costs.asking : costs.asking_whole;
  if (unequal.pays() && args.num_sequences <= kMostAsked &&
      asking <= kMostLoss * unsplit_time(equal, heads, sms, costs)) {
    if (const int32_t least = least_longest(chunks, args.num_sequences, heads, sms, costs); least > 0) {
      return {{true, "sequences of unequal length may leave SMs idle; lengths and gates decide on the device"},
              false,
              least};
    }
  }
  return {{false, "the tiles fill the card's waves, or a split would gain too little"}};
}

// The answers for this thread's latest kinds of calls are kept, the oldest of which goes first: layers of a model ask
// the same again and again, and the estimates take 20 us, and up to 0.2 ms.
const DecidedSplit& decided_split(const ChunkForwardArgs& args, int32_t sms) {
  struct Key {
    int64_t tokens, dense_length;
    int32_t sequences, key_heads, heads, sms, force;
    SplitMode mode;
    bool dense;
    bool operator==(const Key&) const = default;
  };
  struct Kept {
    Key key{-1, -1, -1, -1, -1, -1, -1, SplitMode::kOff, false};
    DecidedSplit decided;
  };
  constexpr size_t kKept = 8;  // lengths, and options, that take turns
  thread_local Kept kept[kKept];
  thread_local size_t next = 0;
  const Key key{args.num_tokens,    args.dense_length,    args.num_sequences,
                args.num_key_heads, args.num_value_heads, sms,
                args.force_split,   args.split,           args.cu_seqlens == nullptr};
  for (const Kept& one : kept) {
    if (one.key == key) return one.decided;
  }
  Kept& oldest = kept[next];
  next = (next + 1) % kKept;
  oldest = {key, work_out_split(args, sms)};
  return oldest.decided;
}

}  // namespace

size_t chunk_forward_workspace_size(const ChunkForwardArgs& args, int32_t sms, bool smaller_too) {
  const size_t unsplit = chunk_forward_workspace_size(args.num_sequences);
  if (args.split == SplitMode::kOff || sms == 0) return unsplit;
  const DecidedSplit& decided = decided_split(args, sms);
  if (!decided.decision.planned && !smaller_too) return unsplit;
  return std::max(unsplit, lay_out_split(args, capacity_of(args, sms), nullptr, nullptr));
}

SplitDecision decide_split(const ChunkForwardArgs& args, int32_t sms) { return decided_split(args, sms).decision; }

bool keeps_listed_states(const ChunkForwardArgs& args, int64_t entries, int32_t sms) {
  const int64_t tiles = static_cast<int64_t>(args.num_sequences) * args.num_value_heads;
  return args.split == SplitMode::kAuto && entries <= kMostListed && sms > 0 && !split_pays(tiles, sms) &&
         !decided_split(args, sms).decision.planned;
}

namespace {

SavedStates saved_states(const ChunkForwardArgs& args) {
  if (args.h != nullptr) return SavedStates::kAll;
  const bool some = args.checkpoints != nullptr || args.start_lists != nullptr || args.num_listed > 0;
  return some ? SavedStates::kSome : SavedStates::kNone;
}

// Whether whole heads keep all SMs busy until the end: then nothing runs beside them that would not hold them up. Of
// lengths on the device that is expected where there are several tiles to an SM, as the long and the short are dealt
// out. A kernel beside a forward that leaves SMs idle costs 5 to 9 % of it, A by the forward itself 10 to 13 % of the
// longest sequence; with all SMs busy they cost 17 to 35 % and 4 to 12 % (docs/design/sm90_forward.md).
bool fills_card(const ChunkForwardArgs& args, int64_t tiles, int sms) {
  if (args.cu_seqlens != nullptr || args.lengths != nullptr) return tiles >= int64_t{3} * sms;
  const int64_t waves = (tiles + sms - 1) / sms;
  return 5 * tiles >= 4 * waves * sms;
}

// Whether the forward can write A and the gates' sums itself: where one SM makes a whole head, bits may be any, and no
// state is kept.
bool keeps_inverse(const ChunkForwardArgs& args, ChunkForwardVariant variant, SavedStates saved, bool any_bits,
                   bool planned) {
  return args.a != nullptr && variant == ChunkForwardVariant::kWholeHead && saved == SavedStates::kNone && any_bits &&
         !planned;
}

// All but what launch_chunk_inverse() writes. training: A or the gates' sums are wanted; on return, whether they are
// still to come behind it.
cudaError_t launch_states_and_outputs(const ChunkForwardArgs& args, ChunkForwardVariant variant, bool* training,
                                      cudaStream_t stream) {
  const int64_t whole_tiles = static_cast<int64_t>(args.num_sequences) * args.num_value_heads;
  const bool idle = whole_tiles == 0 || (args.num_tokens == 0 && args.final_state.data == nullptr);
  // Dense sequences leave no row out, but for skipped ones.
  if (args.cu_seqlens == nullptr ? args.initial.indices != nullptr : idle) {
    if (const cudaError_t error = launch_zero_fill(args, stream); error != cudaSuccess) return error;
  }
  if (idle) return cudaSuccess;
  if (whole_tiles > (int64_t{1} << 29) || args.num_tokens > INT32_MAX) return cudaErrorInvalidValue;
  for (const int64_t stride :
       {args.g_token_stride, args.g_head_stride, args.beta_token_stride, args.beta_head_stride}) {
    if (stride < -kLargestGateStride || stride > kLargestGateStride) return cudaErrorInvalidValue;
  }

  int device = 0, sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;

  const DecidedSplit& decided = decided_split(args, sms);
  const SavedStates saved = saved_states(args);
  // The forward that goes on from the states at the starts of listed chunks makes A_g as one without a split.
  const bool any_bits = args.split == SplitMode::kAuto && args.start_lists == nullptr;
  const ChunkForwardVariant uncut = variant == ChunkForwardVariant::kAuto ? choose_variant(whole_tiles, sms) : variant;
  // Who asks for a variant gets all of it.
  const bool busy = variant != ChunkForwardVariant::kAuto || fills_card(args, whole_tiles, sms);
  const bool keeps_a = *training && busy && keeps_inverse(args, uncut, saved, any_bits, decided.decision.planned);
  if (keeps_a) *training = false;
  const ChunkForwardKernel kernel = choose_kernel(args.type, uncut, saved, any_bits, keeps_a);

  ChunkForwardKernelParams params{};
  params.args = args;
  params.tiles = static_cast<int32_t>(whole_tiles);
  params.followed = *training;
  const int64_t rows = std::max<int64_t>(args.num_tokens, 1);
  if (!encode_map(&params.q, args.type, args.q, rows, args.num_key_heads, args.q_token_stride, args.q_head_stride, 2) ||
      !encode_map(&params.k, args.type, args.k, rows, args.num_key_heads, args.k_token_stride, args.k_head_stride, 2)) {
    return cudaErrorInvalidValue;
  }
  if (kernel.stages_states) {
    params.staged_initial =
        encode_states(&params.initial, args.initial, args.state_v_first, args.num_sequences, args.num_value_heads);
  }
  // h's matrices as rows of two halves, sent in boxes of 64 rows.
  if (args.h != nullptr && args.h_rows > 0 &&
      !encode_map(&params.h, args.type, args.h, kHeadDim, args.h_rows * args.num_value_heads, kHeadDim,
                  int64_t{kHeadDim} * kHeadDim, 1)) {
    return cudaErrorInvalidValue;
  }
  if (keeps_a && !encode_inverse(&params.a, args)) return cudaErrorInvalidValue;
  if (decided.decision.planned) {
    const ChunkForwardKernel cut_kernel = choose_kernel(
        args.type, variant == ChunkForwardVariant::kAuto ? ChunkForwardVariant::kWholeHead : variant, saved, any_bits);
    const bool by_pairs = variant == ChunkForwardVariant::kAuto && decided.by_pairs;
    const ChunkForwardKernel behind =
        by_pairs ? choose_kernel(args.type, ChunkForwardVariant::kSplitV, saved, any_bits) : kernel;
    return launch_split(params, decided, cut_kernel, behind, sms, stream);
  }
  if (args.cu_seqlens != nullptr) {
    const int streams = count_streams(kernel, params.tiles, sms);
    // With a tile to a block at most there is nothing to sort; few sequences the blocks sort by themselves. They clear
    // around the sequences, too, but not rows of h, and most kernels not those of skipped ones.
    const bool one_tile = one_tile_to_a_stream(kernel, params.tiles, sms);
    if (needs_planner(args, kernel) || !(one_tile || (kernel.blocks == 1 && args.num_sequences <= kMostSorted))) {
      error = launch_sequence_order(args, stream);
      place_plan(args.workspace, &params);
    } else {
      params.order = one_tile ? BlockOrder::kOneTile : BlockOrder::kSorted;
      if (!one_tile && !blocks_deal(params.tiles, args.num_sequences, streams)) {
        params.ticket = static_cast<uint32_t*>(args.workspace);
        error = launch_reset_ticket(params.ticket, stream);
      }
    }
    if (error != cudaSuccess) return error;
  }
  return launch_tiles_of(kernel, params, params.tiles, sms, stream);
}

}  // namespace

cudaError_t launch_chunk_forward(const ChunkForwardArgs& args, ChunkForwardVariant variant, cudaStream_t stream) {
  bool training = (args.a != nullptr || args.g_cumsum != nullptr) && args.num_tokens > 0 && args.num_sequences > 0 &&
                  args.num_value_heads > 0;
  const cudaError_t error = launch_states_and_outputs(args, variant, &training, stream);
  if (error != cudaSuccess || !training) return error;
  ChunkInverseParams inverse{{}, {}, args};
  if (!encode_map(&inverse.k, args.type, args.k, args.num_tokens, args.num_key_heads, args.k_token_stride,
                  args.k_head_stride, 2) ||
      (args.a != nullptr && !encode_inverse(&inverse.a, args))) {
    return cudaErrorInvalidValue;
  }
  return launch_chunk_inverse(inverse, stream);
}

}  // namespace flash_qla::cuda::sm90::fwd
