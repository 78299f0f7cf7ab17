// Host side of the fused Hopper forward: tensor maps, the planner of varying lengths, the choice of variant.
#include <algorithm>
#include <vector>

#include "cuda/common/launch.h"
#include "cuda/sm90/chunk_fwd/launch.h"
#include "cuda/sm90/chunk_fwd/save_a.h"
#include "cuda/sm90/chunk_fwd/sequence_order.h"
#include "cuda/sm90/chunk_fwd/sequences.cuh"
#include "cuda/sm90/chunk_fwd/traits.h"
#include "cuda/sm90/common/tensor_map.h"
#include "cuda/sm90/context_parallel/plan.h"
#include "cuda/sm90/context_parallel/plan_args.h"

namespace flash_qla::cuda::sm90::fwd {
namespace {

using cp::choose_cut_spacing, cp::divide_up, cp::equal_lengths, cp::least_longest, cp::estimate_plan, cp::shares_pay,
    cp::plan_capacity, cp::uncut_time, cp::choice_table;
using cp::kForcedSpacing, cp::kInvariantSpacing, cp::kLeastOfEqual, cp::kMinSpacing, cp::kMostByLengths, cp::kMostLoss,
    cp::kChunk, cp::kItemsPerSmUncut;
using cp::lay_out_plan, cp::launch_carried, cp::launch_plan;
using cp::LengthSummary, cp::Capacity, cp::Costs, cp::CutSpacing, cp::PlanArgs, cp::PlanEstimate, cp::ChoiceTable,
    cp::Carry;

// Blocks, or clusters of two, for `items` items: no more than the card has room for.
int count_queues(const Kernel& kernel, int items, int sms) { return std::max(1, std::min(items, sms / kernel.blocks)); }

bool one_item_to_a_queue(const Kernel& kernel, int items, int sms) { return items <= count_queues(kernel, items, sms); }

// Whether what no sequence writes is cleared before the kernel, as it cannot do it: rows of h, and of skipped sequences
// by most.
bool needs_planner(const Args& args, const Kernel& kernel) {
  return (has_slots(args) && !kernel.takes_slots) || args.h != nullptr;
}

// The kernel may start while the one before it still runs, whichever that is: it waits for it before it touches any
// memory but its own.
cudaError_t launch_items(const Kernel& kernel, const KernelArgs& params, int items, int sms, cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.smem_bytes);
  if (error != cudaSuccess) return error;
  const LaunchConfig shape(kernel.blocks * count_queues(kernel, items, sms), kernel.threads,
                           static_cast<size_t>(kernel.smem_bytes), stream, true, static_cast<unsigned>(kernel.blocks));
  return launch_function(kernel.function, shape, params);
}

// [T, H, 128] as (64, T, 2, H): a box of 64 tokens lands as `halves` tiles of 64 rows of 128 bytes, swizzled.
bool encode_map(CUtensorMap* map, DType type, const void* data, int64_t tokens, int64_t heads, int64_t token_stride,
                int64_t head_stride, int halves) {
  const cuuint64_t sizes[4] = {64, static_cast<cuuint64_t>(tokens), 2, static_cast<cuuint64_t>(heads)};
  const cuuint64_t strides[3] = {static_cast<cuuint64_t>(token_stride) * 2, 128,
                                 static_cast<cuuint64_t>(head_stride) * 2};
  const cuuint32_t box[4] = {64, kChunk, static_cast<cuuint32_t>(halves), 1};
  return encode_tensor_map(map, type, const_cast<void*>(data), sizes, strides, box) == cudaSuccess;
}

// A: boxes of a chunk and head.
bool encode_a(CUtensorMap* map, const Args& args) {
  const int64_t heads = args.num_value_heads;
  return encode_map(map, args.type, args.a, args.num_tokens, heads, heads * kChunk, kChunk, 1);
}

// Which states a call wants on the way: checkpoints and those of listed tokens, or h as well.
enum class SavedStates { kNone, kSome, kAll };

// variant: not kAuto. saves_a: saves_a_itself().
Kernel choose_kernel(DType type, Variant variant, SavedStates saved, bool saves_a = false) {
  if (variant == Variant::kTwoCta) return saved == SavedStates::kNone ? two_cta(type) : two_cta_save(type);
  if (saves_a) return one_cta_save_a(type);
  if (saved == SavedStates::kAll) return one_cta_save_h(type);
  return saved == SavedStates::kSome ? one_cta_save(type) : one_cta(type);
}

// A step of a cluster of two takes about this share of a whole item's (measured: docs/notebook/sm90_forward.md).
constexpr double kTwoCtaStep = 0.68;

bool two_ctas_pay(int64_t items, int sms) {
  const int64_t whole = (items + sms - 1) / sms, split = (2 * items + sms - 1) / sms;
  return static_cast<double>(split) * kTwoCtaStep < static_cast<double>(whole);
}

// The variant for so many whole items that are not cut.
Variant choose_variant(int64_t items, int sms) {
  return two_ctas_pay(items, sms) ? Variant::kTwoCta : Variant::kOneCta;
}

// Whether two sets of states share memory.
bool overlap(const StateSet& a, const StateSet& b, int32_t sequences, int32_t heads) {
  const auto begin = [](const StateSet& set) { return reinterpret_cast<uintptr_t>(set.data); };
  const auto end = [&](const StateSet& set) {
    const int64_t slots = set.indices != nullptr ? set.slots : sequences;
    const int64_t elements = (slots - 1) * set.slot_stride + (heads - 1) * set.head_stride + kHeadDim * kHeadDim;
    return begin(set) + static_cast<uintptr_t>(elements) * (set.type == DType::kFloat32 ? 4 : 2);
  };
  return a.data != nullptr && b.data != nullptr && begin(a) < end(b) && begin(b) < end(a);
}

// With V and O in boxes of the kernel's own height.
bool encode_values(const Kernel& kernel, KernelArgs* params) {
  const Args& args = params->args;
  return encode_map(&params->v, args.type, args.v, std::max<int64_t>(args.num_tokens, 1), args.num_value_heads,
                    args.v_token_stride, args.v_head_stride, kernel.state_groups) &&
         encode_map(&params->o, args.type, args.o, std::max<int64_t>(args.num_tokens, 1), args.num_value_heads,
                    args.o_token_stride, args.o_head_stride, kernel.state_groups);
}

cudaError_t launch_items_of(const Kernel& kernel, KernelArgs params, int items, int sms, cudaStream_t stream) {
  if (!encode_values(kernel, &params)) return cudaErrorInvalidValue;
  return launch_items(kernel, params, items, sms, stream);
}

}  // namespace

cudaError_t launch_link_states(const Args& args, const LinkMatrices& links, cudaStream_t stream) {
  const Kernel kernel = link_states(args.type);
  KernelArgs params{};
  params.args = args;
  params.args.q = args.k;  // where there are no gates any mapped address is read (load_gates())
  params.list = links.items;
  params.sizes = &links.counters->states;
  params.tickets = links.tickets;
  params.counters = links.counters;
  params.cut_states = reinterpret_cast<float4*>(links.matrices);
  params.keys_first = links.keys_first;
  if (!encode_map(&params.k, args.type, args.k, args.num_tokens, args.num_key_heads, args.k_token_stride,
                  args.k_head_stride, 2) ||
      !encode_map(&params.v, args.type, args.v, args.num_tokens, args.num_value_heads, args.v_token_stride,
                  args.v_head_stride, kernel.state_groups)) {
    return cudaErrorInvalidValue;
  }
  return launch_items(kernel, params, links.sms, links.sms, stream);
}

namespace {

// What decide() answers, and for whom.
struct DecidedCall {
  Decision decision{false, ""};
  int32_t least_longest = 0;  // the lengths may be such that nothing is cut: see least_longest()
  CutSpacing cut_spacing{};   // of equal lengths, and choices
  ChoiceTable choices{};
};

Capacity capacity_of(const Args& args, int32_t sms, const Carry& carry) {
  Capacity capacity =
      plan_capacity(args.split, args.force_split != 0, args.num_tokens, args.num_sequences, args.num_value_heads, sms);
  capacity.carried = carry.slots;
  return capacity;
}

// Of a call that may be cut: four kernels, each allowed to start while the one before it runs.
//   [states at cuts of carried heads ->] classify -> list -> segment states and scan -> outputs
// The last one begins with items that depend on none of the others, as soon as an SM is free.
// Where the lengths are asked first, two come before them: one that reads the lengths, and the kernel of a call that
// is not cut, which finds its items if nothing is to be cut.
cudaError_t launch_cut(const KernelArgs& params, const DecidedCall& decided, const Kernel& kernel,
                       const Kernel& uncut_kernel, int sms, const Carry& carry, cudaStream_t stream) {
  const Args& args = params.args;
  PlanArgs split{};
  split.args = args;
  split.capacity = capacity_of(args, sms, carry);
  split.carry = carry;
  const bool lengths_first = decided.least_longest != 0;
  split.least_longest = decided.least_longest;
  split.zero_fill_blocks = args.cu_seqlens != nullptr && !lengths_first ? kZeroFillBlocks : 0;
  split.costs = Costs(args.num_key_heads, args.num_value_heads);
  split.expected_cut_spacing = decided.cut_spacing;
  split.choice_table = decided.choices;
  split.in_place = overlap(args.initial, args.final_state, args.num_sequences, args.num_value_heads);
  split.sms = sms;
  lay_out_plan(args, split.capacity, args.workspace, &split.workspace);
  cudaError_t error = cudaSuccess;
  if (lengths_first) {
    PlanArgs ask = split;
    ask.args.workspace = split.workspace.uncut;
    KernelArgs whole = params;
    // A cluster with an item at most reads its sequence while the lengths are looked at. Blocks that find more than one
    // by themselves begin before that is known.
    const bool sorts = uncut_kernel.blocks == 1 || !one_item_to_a_queue(uncut_kernel, whole.items, sms) ||
                       needs_planner(args, uncut_kernel);
    error = launch_read_lengths(ask, sorts, stream);
    if (error != cudaSuccess) return error;
    if (sorts) place_sorted_sequences(split.workspace.uncut, &whole);
    whole.cut = split.workspace.cut;
    // What comes after the call's last kernel does not come after this one, and the kernels of a cut call would start
    // beside it, on SMs that it leaves idle: that took 2 % of its time.
    whole.followed = 0;
    error = launch_items_of(uncut_kernel, whole, whole.items, sms, stream);
    if (error != cudaSuccess) return error;
  }
  if (carry.chains != nullptr) error = launch_carried(split, stream);
  if (error == cudaSuccess) error = launch_plan(split, stream);
  if (error != cudaSuccess) return error;

  PlanCounters* counters = split.workspace.counters;
  KernelArgs items = params;
  items.cut_states = split.workspace.cut_states;
  items.transitions = split.workspace.transitions;
  items.scans = split.workspace.scans;
  items.counters = counters;
  PlanStart* start = split.workspace.start;
  items.readers = split.in_place != 0 ? split.workspace.readers : nullptr;
  items.cut = lengths_first ? split.workspace.cut : nullptr;
  items.list = split.workspace.state_items;
  items.sizes = &counters->states;
  items.tickets = &start->states;
  items.carried = carry.chains != nullptr;
  items.followed = kernel.blocks == 1;  // by a kernel that waits for the plan itself (queue_first_chunks())
  // The planner holds an SM: with a block for that one too, the kernel after this one could not start before it ends.
  error = launch_items_of(segment_states(args.type), items, std::max(sms - 1, 1), sms, stream);

  items.followed = params.followed;
  items.list = split.workspace.output_items;
  items.sizes = &counters->outputs;
  items.tickets = &start->outputs;
  if (error == cudaSuccess) error = launch_items_of(kernel, items, sms, sms, stream);
  return error;
}

// carries: links of the same tokens have left what a part's heads go on from.
DecidedCall work_out(const Args& args, int32_t sms, bool carries) {
  const bool forced = args.force_split != 0;
  if (args.split == Mode::kOff || sms == 0) return {{false, "auto_cp is off"}};
  if (args.num_tokens == 0 || args.num_sequences == 0 || args.num_value_heads == 0)
    return {{false, "there are no tokens"}};
  const int64_t items = static_cast<int64_t>(args.num_sequences) * args.num_value_heads;
  const int64_t longest = args.cu_seqlens != nullptr ? args.num_tokens : args.dense_length;
  const int64_t spacing = forced ? kForcedSpacing : args.split == Mode::kInvariant ? kInvariantSpacing : kMinSpacing;
  if (longest < 2 * spacing * kChunk) return {{false, "no sequence can be long enough to cut"}};
  const bool dense = args.cu_seqlens == nullptr;
  const int32_t heads = args.num_value_heads;
  const Costs costs(args.num_key_heads, heads);
  // Lengths on the device are not known here. Equal ones are the least that a cut can gain.
  const LengthSummary equal = equal_lengths(longest, args.num_sequences, dense);
  if (forced || args.split == Mode::kInvariant) {
    return {{true, forced ? "cut wherever it is possible, as forced"
                          : "each sequence cut by its own length; its gates decide on the device"},
            0,
            choose_cut_spacing(args.split, forced, equal, heads, sms, costs)};
  }
  if (items >= kItemsPerSmUncut * sms) return {{false, "sequences times value heads fill the card many times over"}};
  const PlanEstimate estimate = estimate_plan(equal, heads, sms, costs, true);
  // One sequence of seven eighths beside short ones.
  const int64_t chunks = std::max<int64_t>(divide_up(longest, kChunk), args.num_sequences);
  const LengthSummary one_long{chunks, args.num_sequences, static_cast<int32_t>(chunks - chunks / 8)};
  const bool vary = !dense && args.num_sequences > 1;
  const PlanEstimate unequal = vary ? estimate_plan(one_long, heads, sms, costs, false) : PlanEstimate{};
  // Where unequal lengths would gain, equal ones need not.
  if (estimate.pays() || (unequal.pays() && estimate.pays(kLeastOfEqual))) {
    return {{true, dense ? "the items leave SMs idle; the gates decide on the device"
                         : "as many sequences of equal length leave SMs idle; lengths and gates decide on the device"},
            0,
            estimate.cut_spacing,
            choice_table(equal, estimate.cut_spacing, heads, sms, costs)};
  }
  // The sequence that goes on on another card may be the long one, and its heads' states at cuts cost next to nothing.
  if (carries && unequal.pays()) {
    return {{true, "a part goes on from its links' segments; lengths and gates decide on the device"}};
  }
  // The uncut kernel is not launched once more for gates that ask for no cut: all calls that are not cut would pay.
  const float reading = shares_pay(items, sms) ? costs.late : costs.plan;
  if (unequal.pays() && args.num_sequences <= kMostByLengths &&
      reading <= kMostLoss * uncut_time(equal, heads, sms, costs)) {
    if (const int32_t least = least_longest(chunks, args.num_sequences, heads, sms, costs); least > 0) {
      return {{true, "sequences of unequal length may leave SMs idle; lengths and gates decide on the device"}, least};
    }
  }
  return {{false, "the items fill the card's waves, or a split would gain too little"}};
}

// The answers for this thread's latest kinds of calls are kept, the oldest of which goes first: layers of a model ask
// the same again and again, and the estimates take 20 us, and up to 0.2 ms.
const DecidedCall& decided_call(const Args& args, int32_t sms, bool carries) {
  struct Key {
    int64_t tokens, dense_length;
    int32_t sequences, key_heads, heads, sms, force;
    Mode mode;
    bool dense, carries;
    bool operator==(const Key&) const = default;
  };
  struct Kept {
    Key key{-1, -1, -1, -1, -1, -1, -1, Mode::kOff, false, false};
    DecidedCall decided;
  };
  constexpr size_t kKept = 8;  // lengths, and options, that take turns
  thread_local Kept kept[kKept];
  thread_local size_t next = 0;
  const Key key{args.num_tokens,
                args.dense_length,
                args.num_sequences,
                args.num_key_heads,
                args.num_value_heads,
                sms,
                args.force_split,
                args.split,
                args.cu_seqlens == nullptr,
                carries};
  for (const Kept& one : kept) {
    if (one.key == key) return one.decided;
  }
  Kept& oldest = kept[next];
  next = (next + 1) % kKept;
  oldest = {key, work_out(args, sms, carries)};
  return oldest.decided;
}

}  // namespace

size_t chunk_forward_workspace_size(const Args& args, int32_t sms, bool smaller_too, const Carry& carry) {
  const size_t uncut = chunk_forward_workspace_size(args.num_sequences);
  if (args.split == Mode::kOff || sms == 0) return uncut;
  const DecidedCall& decided = decided_call(args, sms, carry.chains != nullptr);
  if (!decided.decision.planned && !smaller_too) return uncut;
  return std::max(uncut, lay_out_plan(args, capacity_of(args, sms, carry), nullptr, nullptr));
}

Decision decide(const Args& args, int32_t sms, bool carries) { return decided_call(args, sms, carries).decision; }

bool writes_listed_states(const Args& args, int64_t entries, int32_t sms, bool carries) {
  const int64_t items = static_cast<int64_t>(args.num_sequences) * args.num_value_heads;
  return args.split == Mode::kAuto && entries <= kMostListed && sms > 0 && !two_ctas_pay(items, sms) &&
         !decided_call(args, sms, carries).decision.planned;
}

namespace {

SavedStates saved_states(const Args& args) {
  if (args.h != nullptr) return SavedStates::kAll;
  const bool some = args.checkpoints != nullptr || args.start_lists != nullptr || args.num_listed > 0;
  return some ? SavedStates::kSome : SavedStates::kNone;
}

// Whether whole heads keep all SMs busy until the end: then nothing runs beside them that would not hold them up. Of
// lengths on the device that is expected where there are several items to an SM, as the long and the short are dealt
// out. A kernel beside a forward that leaves SMs idle costs 5 to 9 % of it, A by the forward itself 10 to 13 % of the
// longest sequence; with all SMs busy they cost 17 to 35 % and 4 to 12 % (docs/notebook/sm90_forward.md).
bool fills_card(const Args& args, int64_t items, int sms) {
  if (args.cu_seqlens != nullptr || args.lengths != nullptr) return items >= int64_t{3} * sms;
  const int64_t waves = (items + sms - 1) / sms;
  return 5 * items >= 4 * waves * sms;
}

// Whether the forward can write A and the gates' sums itself: where one SM makes a whole head and no state is kept. It
// then rounds O once less, so that the bits are those of the other modes no longer.
bool saves_a_itself(const Args& args, Variant variant, SavedStates saved, bool planned) {
  return args.a != nullptr && variant == Variant::kOneCta && saved == SavedStates::kNone && args.split == Mode::kAuto &&
         !planned;
}

// All but what launch_save_a() writes. training: A or the gates' sums are wanted; on return, whether they are
// still to come after it.
cudaError_t launch_states_and_outputs(const Args& args, Variant variant, bool* training, const Carry& carry,
                                      cudaStream_t stream) {
  const int64_t items = static_cast<int64_t>(args.num_sequences) * args.num_value_heads;
  const bool idle = items == 0 || (args.num_tokens == 0 && args.final_state.data == nullptr);
  // Dense sequences leave no row out, but for skipped ones.
  if (args.cu_seqlens == nullptr ? args.initial.indices != nullptr : idle) {
    if (const cudaError_t error = launch_zero_fill(args, stream); error != cudaSuccess) return error;
  }
  if (idle) return cudaSuccess;
  if (items > (int64_t{1} << 29) || args.num_tokens > INT32_MAX) return cudaErrorInvalidValue;
  for (const int64_t stride :
       {args.g_token_stride, args.g_head_stride, args.beta_token_stride, args.beta_head_stride}) {
    if (stride < -kLargestGateStride || stride > kLargestGateStride) return cudaErrorInvalidValue;
  }

  int sms = 0;
  cudaError_t error = count_multiprocessors(&sms);
  if (error != cudaSuccess) return error;

  const DecidedCall& decided = decided_call(args, sms, carry.chains != nullptr);
  const SavedStates saved = saved_states(args);
  const Variant uncut = variant == Variant::kAuto ? choose_variant(items, sms) : variant;
  // Who asks for a variant gets all of it.
  const bool busy = variant != Variant::kAuto || fills_card(args, items, sms);
  const bool saves_a = *training && busy && saves_a_itself(args, uncut, saved, decided.decision.planned);
  if (saves_a) *training = false;
  const Kernel kernel = choose_kernel(args.type, uncut, saved, saves_a);

  KernelArgs params{};
  params.args = args;
  params.items = static_cast<int32_t>(items);
  params.followed = *training;
  const int64_t rows = std::max<int64_t>(args.num_tokens, 1);
  if (!encode_map(&params.q, args.type, args.q, rows, args.num_key_heads, args.q_token_stride, args.q_head_stride, 2) ||
      !encode_map(&params.k, args.type, args.k, rows, args.num_key_heads, args.k_token_stride, args.k_head_stride, 2)) {
    return cudaErrorInvalidValue;
  }
  // h's matrices as rows of two halves, sent in boxes of 64 rows.
  if (args.h != nullptr && args.h_rows > 0 &&
      !encode_map(&params.h, args.type, args.h, kHeadDim, args.h_rows * args.num_value_heads, kHeadDim,
                  int64_t{kHeadDim} * kHeadDim, 1)) {
    return cudaErrorInvalidValue;
  }
  if (saves_a && !encode_a(&params.a, args)) return cudaErrorInvalidValue;
  if (decided.decision.planned) {
    const Kernel cut_kernel = choose_kernel(args.type, variant == Variant::kAuto ? Variant::kOneCta : variant, saved);
    if (carry.chains == nullptr) return launch_cut(params, decided, cut_kernel, kernel, sms, carry, stream);
    // What carried heads start from is there: not the question that may find that nothing is to be cut.
    DecidedCall of_carry = decided;
    of_carry.least_longest = 0;
    return launch_cut(params, of_carry, cut_kernel, kernel, sms, carry, stream);
  }
  if (args.cu_seqlens != nullptr) {
    // With an item to a block at most there is nothing to sort. Blocks then clear around the sequences, too, but not
    // rows of h, and most kernels not those of skipped ones.
    params.one_item = one_item_to_a_queue(kernel, params.items, sms) && !needs_planner(args, kernel);
    if (params.one_item == 0) {
      error = launch_sequence_order(args, stream);
      place_sorted_sequences(args.workspace, &params);
    }
    if (error != cudaSuccess) return error;
  }
  return launch_items_of(kernel, params, params.items, sms, stream);
}

}  // namespace

cudaError_t launch_chunk_forward(const Args& args, Variant variant, cudaStream_t stream, const Carry& carry) {
  bool training = (args.a != nullptr || args.g_cumsum != nullptr) && args.num_tokens > 0 && args.num_sequences > 0 &&
                  args.num_value_heads > 0;
  const cudaError_t error = launch_states_and_outputs(args, variant, &training, carry, stream);
  if (error != cudaSuccess || !training) return error;
  SaveAArgs inverse{{}, args};
  if (!encode_map(&inverse.k, args.type, args.k, args.num_tokens, args.num_key_heads, args.k_token_stride,
                  args.k_head_stride, 2)) {
    return cudaErrorInvalidValue;
  }
  return launch_save_a(inverse, stream);
}

}  // namespace flash_qla::cuda::sm90::fwd
