// The lists of items.

#include "cuda/common/block_scan.cuh"
#include "cuda/common/overlap.cuh"
#include "cuda/sm90/context_parallel/choose_joins.cuh"
#include "cuda/sm90/context_parallel/plan_device.cuh"

namespace flash_qla::cuda::sm90::cp {
namespace {

using fwd::initial_slot, fwd::kSkipSequence;

constexpr int kListWarps = kListThreads / 32;

// What is kept in shared memory; a larger batch's is in the workspace. Heads: kItemsPerSmUncut to an SM of a card of up
// to 144. Warm-ups: of a call that is not forced there are at most kMostItemsPerSm boundaries to an SM and one more for
// each head.
constexpr int32_t kKeptHeads = 2304;
constexpr int32_t kKeptSequences = 128;
constexpr int32_t kKeptWarmups = 2048;

// Puts items to their places, and counts those that read an initial state that will be overwritten.
struct ItemSink {
  PlanWorkspace workspace;
  int32_t heads;
  bool in_place;
  __device__ void state(int32_t at, const WorkItem& t) const { put(workspace.state_items + at, t); }
  __device__ void output(int32_t at, const WorkItem& t) const { put(workspace.output_items + at, t); }
  __device__ void scan(int32_t at, const Scan& c) const { workspace.scans[at] = c; }

 private:
  __device__ void put(WorkItem* to, const WorkItem& t) const {
    int4 words[2];
    memcpy(words, &t, sizeof(words));
    static_assert(sizeof(words) == sizeof(t));
    reinterpret_cast<int4*>(to)[0] = words[0];
    reinterpret_cast<int4*>(to)[1] = words[1];
    if (!in_place || !(t.flags & kItemFromStart)) return;
    uint32_t* readers = workspace.readers + 2 * (static_cast<int64_t>(t.sequence) * heads + t.head);
    for (int half = 0; half < 2; ++half) atomicAdd(readers + half, kWarpsOfHalf);
  }
};

// Where sequences may be cut.
__device__ void cut_sequences(const PlanArgs& p, const CutSpacing& cut_spacing, PlannedSequence* sequences,
                              int32_t (*sums)[kListWarps]) {
  const Args& args = p.args;
  const bool numbers_chunks = args.h != nullptr && args.cu_seqlens != nullptr;
  int32_t chunks_before = 0;
#pragma unroll 1
  for (int32_t first = 0; first < args.num_sequences; first += kListThreads) {
    const int32_t i = first + static_cast<int32_t>(threadIdx.x);
    SequenceSpan s{0, 0, i, 0};
    if (i < args.num_sequences) s = sequence_at(args, i);
    if (numbers_chunks) {
      int32_t before[1] = {chunks_in(s.length)}, all[1];
      sum_before(before, all, sums);
      s.first_chunk = chunks_before + before[0];
      chunks_before += all[0];
    }
    if (i >= args.num_sequences) continue;
    // A skipped sequence has no state items: the scans wait for all that are listed.
    if (initial_slot(args, i) == kSkipSequence) s.length = 0;
    CutSequence cuts(s, cut_spacing);
    if (!cuts.fits(p.capacity.boundaries, cut_spacing)) cuts = CutSequence(s, CutSpacing{});
    sequences[i].cuts = cuts;
  }
}

// The numbers of sequences in the order of length_of_items(), of up to kMostOrdered.
__device__ void order_sequences(const PlannedSequence* sequences, int32_t n, const CutChoice& choice, int32_t* order) {
  static_assert(kMostOrdered == kListThreads);
  __shared__ int32_t lengths[kMostOrdered];
  const int32_t i = static_cast<int32_t>(threadIdx.x), own = i < n ? length_of_items(sequences[i].cuts, choice) : -1;
  lengths[i] = own;
  __syncthreads();
  int32_t place = 0;
#pragma unroll 1
  for (int32_t j = 0; j < n; ++j) place += lengths[j] > own || (lengths[j] == own && j < i);
  if (i < n) order[place] = i;
}

// What the links of a rank have left of a sequence and head; null: nothing.
__device__ const LinkChain* carried_chain(const PlanArgs& p, const SequenceSpan& sequence, int32_t head) {
  for (int32_t part = 0; part < p.carry.parts; ++part) {
    const LinkChain& chain = p.carry.chains[part * p.args.num_value_heads + head];
    if (chain.row == sequence.index && chain.tokens == sequence.length && chain.segments > 0) return &chain;
  }
  return nullptr;
}

// What writes O of segment k of such a head; its states at cuts are behind those of the call's own.
__device__ WorkItem carried_item(const PlanArgs& p, const SequenceSpan& sequence, int32_t head, const LinkChain& chain,
                                 int32_t k) {
  const int32_t chunks = chunks_in(sequence.length);
  const int32_t slot = k == 0 ? -1 : static_cast<int32_t>(p.capacity.slots) + chain.state_cell(k - 1);
  const int32_t flags = (k == 0 ? kItemFromStart : kItemFromCutState) | (k + 1 == chain.segments ? kItemToEnd : 0);
  return work_item(sequence, head, segment_start(chunks, k, chain.segments),
                   segment_start(chunks, k + 1, chain.segments), 0, slot, flags);
}

// Carried heads, and their segments but the first ones, of so many chunks at most.
struct CarriedCounts {
  int32_t heads, later, longest;
  __device__ void add(const LinkChain& chain, int32_t chunks) {
    atomicAdd(&heads, 1);
    atomicAdd(&later, chain.segments - 1);
    atomicMax(&longest, (chunks + chain.segments - 1) / chain.segments);
  }
};

// One block. Every item has a place that depends on lengths and kinds alone; but carried heads' ones come in any order
// among their like.
__global__ void __launch_bounds__(kListThreads, 1) list_items_kernel(const __grid_constant__ PlanArgs p) {
  launch_dependents();
  const Args& args = p.args;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int32_t heads = args.num_value_heads, n = args.num_sequences, pairs = n * heads;
  const PlanWorkspace& ws = p.workspace;
  if (p.least_longest != 0 && load_now(ws.cut) == 0) {
    wait_for_predecessors();
    return;
  }
  SequenceSpan own{0, 0, 0, 0};
  const LengthSummary lengths = summarise_lengths<kListThreads>(args, &own);
  const CutSpacing cut_spacing = choose_cut_spacing(p, lengths);
  const int32_t most_pieces = pieces_of(lengths.longest, cut_spacing);

  __shared__ PlannedSequence kept_sequences[kKeptSequences];
  __shared__ int32_t kept_kinds[kKeptHeads];
  __shared__ int32_t kept_order[kMostOrdered];
  __shared__ uint8_t kept_warmups[kKeptWarmups];
  __shared__ int32_t sums[ItemCounts::kNumbers][kListWarps];
  __shared__ int32_t exact_found, unusual_found;  // heads; unusual: whose warm-ups are not the usual ones
  __shared__ CarriedCounts carried_found, carried_placed;
  PlannedSequence* const sequences = n <= kKeptSequences ? kept_sequences : ws.sequences;
  // First the kind of each sequence and head (choose_joins.cuh), then its number among the sequence's of its kind: of a
  // decaying one all bits of it turned, of a carried one kCarried.
  constexpr int32_t kCarried = INT32_MIN;
  int32_t* const kinds = pairs <= kKeptHeads ? kept_kinds : ws.kinds;
  if (thread == 0) {
    exact_found = unusual_found = 0;
    carried_found = carried_placed = {0, 0, 0};
  }

  const bool may_cut = cut_spacing.spacing > 0;
  const bool chosen = args.split == Mode::kAuto && args.force_split == 0 && may_cut;
  // Heads beyond the room do not take part in the choice; there is always room for as many as a call may have that is
  // planned without being forced to.
  const int32_t chosen_for = min(pairs, kKeptHeads);
  const bool carries = p.carry.chains != nullptr && lengths.sequences > 0;  // not of offsets out of order
  const bool expected = p.least_longest == 0 && lengths == p.expected_lengths && !carries;
  cut_sequences(p, cut_spacing, sequences, sums);
  __syncthreads();
  // Of other lengths than the expected ones the choice is made for a quarter of the heads without decay while the
  // boundaries are classified; with carried heads, which are known, as if all others decayed. If it is not that, its
  // instructions are in the caches.
  int32_t best = -1;
  int32_t guessed_exact = 0;
  if (chosen && !expected) {
#pragma unroll 1
    for (int32_t pair = thread; pair < chosen_for; pair += kListThreads) {
      const int32_t i = p.by_heads.divide(pair), head = pair - i * heads;
      const CutSequence& cuts = sequences[i].cuts;
      const int32_t boundaries = cuts.pieces - 1;
      int32_t kind = kUsualWarmup * boundaries;
      if (carries) {
        const LinkChain* chain = carried_chain(p, cuts.sequence, head);
        if (chain != nullptr) kind = carried_head(chain->segments);
      } else if (boundaries > 0 && head % 4 == 3) {
        kind = kExactHead;
        atomicAdd(&exact_found, 1);
      }
      kinds[pair] = kind;
    }
    __syncthreads();
    guessed_exact = exact_found;
    best = choose_joins(p, sequences, kinds, chosen_for, lengths, cut_spacing);
    __syncthreads();
    if (thread == 0) exact_found = 0;
  }

  wait_for_predecessors();  // for the boundaries' kernel
  const uint8_t* warmups = ws.warmups;
  if (p.capacity.slots <= kKeptWarmups) {
    warmups = kept_warmups;
#pragma unroll
    for (int i = thread; i < kKeptWarmups; i += kListThreads) {
      if (may_cut && i < p.capacity.slots) kept_warmups[i] = ws.warmups[i];
    }
  }
  __syncthreads();
  // The kinds of heads (kBoundariesInRow). By as many lanes as there are boundaries, up to a warp.
  int width = 1;
  while (width < 32 && width < most_pieces) width *= 2;
  const int group_lane = lane % width, first_pair = thread / width, pairs_at_once = kListThreads / width;
  const uint32_t group = (width == 32 ? ~0u : (1u << width) - 1) << (lane - group_lane);
  const uint32_t row = group & ((1u << kBoundariesInRow) - 1) << (lane / kBoundariesInRow * kBoundariesInRow);
#pragma unroll 1
  for (int32_t pair = first_pair; pair < pairs; pair += pairs_at_once) {
    const int32_t i = p.by_heads.divide(pair), head = pair - i * heads;
    const CutSequence& cuts = sequences[i].cuts;
    int32_t exact = 0, total = 0;
#pragma unroll 1
    for (int32_t first = 1; first < cuts.pieces; first += width) {
      const int32_t boundary = first + group_lane;
      int32_t warmup = kUsualWarmup;
      if (boundary < cuts.pieces) {
        warmup = warmups[static_cast<int64_t>(cuts.number(boundary, cut_spacing)) * heads + head];
        total += warmup;
      }
      exact |= __popc(__ballot_sync(group, warmup == 0) & row) >= boundaries_of_exact_head(cuts.pieces);
    }
    exact = __reduce_or_sync(group, exact);
    total = __reduce_add_sync(group, total);
    if (group_lane != 0) continue;
    if (const LinkChain* chain = carries ? carried_chain(p, cuts.sequence, head) : nullptr; chain != nullptr) {
      kinds[pair] = carried_head(chain->segments);
      carried_found.add(*chain, cuts.chunks);
      continue;
    }
    kinds[pair] = exact != 0 ? kExactHead : total;
    const int32_t boundaries = cuts.pieces - 1;
    if (exact != 0) {
      atomicAdd(&exact_found, 1);
    } else if (total < ChoiceTable::kLeastWarmup * boundaries || total > ChoiceTable::kMostWarmup * boundaries) {
      unusual_found = 1;
    }
  }
  __syncthreads();
  const int32_t exact_heads = exact_found;
  CutChoice choice;
  choice.in_order = p.in_place != 0;
  if (chosen) {
    const bool usual = unusual_found == 0;
    if (usual && expected) best = p.choice_table.choice(exact_heads, pairs);
    if (!usual || (!expected && exact_heads != guessed_exact) || best < 0) {
      best = choose_joins(p, sequences, kinds, chosen_for, lengths, cut_spacing);
    }
    choice.join = join_choice(best);
    __syncthreads();  // the kinds have been read
  }

  // Each head's number among those of its kind, a warp a sequence.
#pragma unroll 1
  for (int32_t i = warp; i < n; i += kListWarps) {
    int32_t decaying = 0, exact = 0;
#pragma unroll 1
    for (int32_t first = 0; first < heads; first += 32) {
      const int32_t head = first + lane, pair = i * heads + head;
      const int32_t kind = head < heads ? kinds[pair] : carried_head(1);
      const uint32_t found_decaying = __ballot_sync(0xffffffffu, kind >= 0),
                     found_exact = __ballot_sync(0xffffffffu, kind == kExactHead), below = (1u << lane) - 1;
      if (head < heads) {
        kinds[pair] = kind >= 0            ? ~(decaying + __popc(found_decaying & below))
                      : kind == kExactHead ? exact + __popc(found_exact & below)
                                           : kCarried;
      }
      decaying += __popc(found_decaying);
      exact += __popc(found_exact);
    }
    if (lane == 0) {
      sequences[i].decaying = decaying;
      sequences[i].exact = exact;
    }
  }
  if (n <= kMostOrdered) order_sequences(sequences, n, choice, kept_order);
  __syncthreads();
  const auto in_order = [&](int32_t place) { return n <= kMostOrdered ? kept_order[place] : place; };
  ItemCounts all{};
#pragma unroll 1
  for (int32_t first = 0; first < n; first += kListThreads) {
    const bool is_one = first + thread < n;
    PlannedSequence& sequence = sequences[is_one ? in_order(first + thread) : 0];
    ItemCounts counts{};
    if (is_one) counts = ItemCounts(sequence.cuts, choice, sequence.decaying, sequence.exact);
    int32_t numbers[ItemCounts::kNumbers], totals[ItemCounts::kNumbers];
    counts.store(numbers);
    sum_before(numbers, totals, sums);
    if (is_one) (sequence.before = all) += ItemCounts(numbers);
    all += ItemCounts(totals);
  }
  __syncthreads();

  const OutputOrder order(all, sequences[in_order(0)].cuts, sequences[in_order(min(all.may_cut, n - 1))].cuts, choice,
                          p.in_place != 0, {carried_found.heads, carried_found.later, carried_found.longest});
  const ItemSink sink{ws, heads, p.in_place != 0};
#pragma unroll 1
  for (int32_t pair = first_pair; pair < pairs; pair += pairs_at_once) {
    const int32_t i = p.by_heads.divide(pair), head = pair - i * heads, rank = kinds[pair];
    if (rank == kCarried) {
      const SequenceSpan& sequence = sequences[i].cuts.sequence;
      const LinkChain& chain = *carried_chain(p, sequence, head);
      CarriedCounts before{};
      if (group_lane == 0) {
        before = {atomicAdd(&carried_placed.heads, 1), atomicAdd(&carried_placed.later, chain.segments - 1), 0};
      }
      const int32_t first = __shfl_sync(group, before.heads, 0, width);
      const int32_t later = order.carried + __shfl_sync(group, before.later, 0, width);
#pragma unroll 1
      for (int32_t k = group_lane; k < chain.segments; k += width) {
        sink.output(k == 0 ? first : later + k - 1, carried_item(p, sequence, head, chain, k));
      }
      continue;
    }
    const bool is_exact = rank >= 0;
    const HeadItems items(sequences[i], order, choice, head, is_exact, is_exact ? rank : ~rank, p.capacity.boundaries,
                          cut_spacing);
    const auto warmups_of = [warmups, heads, head](int32_t number) {
      return static_cast<int32_t>(warmups[static_cast<int64_t>(number) * heads + head]);
    };
#pragma unroll 1
    for (int32_t k = group_lane; k < items.segments.count; k += width) {
      items.emit(k, cut_spacing, warmups_of, sink);
    }
  }
  // By a thread that seldom has items to place.
  if (thread == kListThreads - 1) {
    PlanCounters counters{};
    counters.states.items = all.states;
    counters.outputs.items = order.dependent;
    counters.outputs.dependent_items = all.dependent;
    counters.progress.states_left = static_cast<uint32_t>(all.states * kStateWarps);
    counters.progress.slices_left = counters.progress.pieces = static_cast<uint32_t>(all.scans * kScanSlices);
    counters.progress.first_items = p.in_place != 0 ? static_cast<uint32_t>(pairs) : 0;
    counters.planner_tpc = tpc();
    counters.spacing = cut_spacing.spacing;
    counters.decaying_join = choice.join.decaying;
    counters.exact_join = choice.join.exact;
    counters.exact_heads = exact_heads;
    *ws.counters = counters;
  }
  __syncthreads();  // the lists are there
  // The kernels that go by the plan do not wait for this one's end.
  if (thread == 0) {
    __threadfence();
    *static_cast<volatile uint32_t*>(&ws.counters->made) = 1;
  }
}

}  // namespace

const void* list_kernel() { return reinterpret_cast<const void*>(&list_items_kernel); }

}  // namespace flash_qla::cuda::sm90::cp
