// The lists of items.

#include "cuda/common/bulk.cuh"
#include "cuda/sm90/context_parallel/choose_joins.cuh"
#include "cuda/sm90/context_parallel/item_sinks.cuh"
#include "cuda/sm90/context_parallel/plan_device.cuh"

namespace flash_qla::cuda::sm90::cp {
namespace {

using fwd::Args, fwd::initial_slot, fwd::kSkipSequence, fwd::load_index, fwd::sequence_at;

constexpr int kListWarps = kListThreads / 32;

// kItemsPerSmUncut to an SM of a card of up to 144.
constexpr int32_t kMostSummaries = 2304;
// What is kept in shared memory; a larger batch's is read again where it is needed. Of a call that is not forced there
// are at most kMostItemsPerSm boundaries to an SM and one more for each head.
constexpr int32_t kKeptSequences = 128;
constexpr int32_t kKeptWarmups = 2048;

// The kernels that go by the plan do not wait for this one's end.
__device__ void publish_plan(const PlanWorkspace& ws) {
  __threadfence();
  *static_cast<volatile uint32_t*>(&ws.counters->made) = 1;
}

// The lists where no head decays and heads are not cut by whole pieces. Not inlined: it would lie between what other
// gates ask for.
__device__ __noinline__ void list_all_exact_items(const PlanArgs& p, const CutSequence* cuts, CutSpacing cut_spacing) {
  const int32_t heads = p.args.num_value_heads, thread = static_cast<int32_t>(threadIdx.x);
  const AllExactPlan plan{p.choice_table.all_exact, p.args.num_sequences * heads};
  const PlanWorkspace& ws = p.workspace;
  if (thread == 0) {
    *static_cast<volatile uint32_t*>(&ws.start->published_items) =
        (tpc() << 16 | static_cast<uint32_t>(plan.state_items())) + 1;
  }
  const auto none = [](int32_t) { return 0; };
  const int32_t all = plan.heads * plan.split.segments;
#pragma unroll 1
  for (int32_t i = thread; i < 3 * all; i += kListThreads) {
    const int32_t item = i / all, k = (i - item * all) / plan.heads, pair = i - item * all - k * plan.heads;
    const int32_t sequence = p.by_heads.divide(pair);
    const HeadPlan head(cuts[sequence], pair - sequence * heads, cut_spacing, Join{}, p.capacity.boundaries, none);
    plan.emit(head, pair, k, item, RegularSink{ws});
  }
  if (thread == kListThreads - 1) {
    PlanCounters counters{};
    counters.states.items = plan.state_items();
    counters.outputs.items = plan.independent_items();
    counters.halves.items = plan.independent_items();
    counters.halves.dependent_items = plan.dependent_items();
    // The independent ones are the other kernel's. Clusters take tickets after the plan.
    ws.start->halves.ticket = static_cast<uint32_t>(plan.independent_items());
    counters.progress.states_left = static_cast<uint32_t>(plan.states_left());
    counters.progress.slices_left = counters.progress.pieces = static_cast<uint32_t>(plan.scans() * kScanSlices);
    counters.planner_tpc = tpc();
    counters.spacing = cut_spacing.spacing;
    counters.even = 1;
    *ws.counters = counters;
  }
  __syncthreads();  // the lists are there
  if (thread == 0) publish_plan(ws);
}

// What the links of a rank have left of a sequence and head; null: nothing.
__device__ const LinkChain* carried_chain(const PlanArgs& p, const SequenceSpan& sequence, int32_t head) {
  for (int32_t part = 0; part < p.carry.parts; ++part) {
    const LinkChain& chain = p.carry.chains[part * p.args.num_value_heads + head];
    if (chain.row == sequence.index && chain.tokens == sequence.length && chain.segments > 0) return &chain;
  }
  return nullptr;
}

// One block. The order of items within a bucket varies from run to run; what is computed does not depend on it.
__global__ void __launch_bounds__(kListThreads, 1) list_items_kernel(const __grid_constant__ PlanArgs p) {
  launch_dependents();
  const Args& args = p.args;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int32_t heads = args.num_value_heads, n = args.num_sequences;
  const PlanWorkspace& ws = p.workspace;
  if (p.least_longest != 0 && load_now(ws.cut) == 0) {
    wait_for_predecessors();
    return;
  }
  SequenceSpan own{0, 0, 0, 0};
  const LengthSummary lengths = summarise_lengths<kListThreads>(args, &own);
  const CutSpacing cut_spacing = choose_cut_spacing(p, lengths);
  const int32_t most_pieces = pieces_of(lengths.longest, cut_spacing);
  // Lanes that a sequence and head get.
  int width = 1;
  while (width < 32 && width < most_pieces) width *= 2;

  __shared__ int32_t buckets[kItemBuckets];
  __shared__ int32_t state_items, first_items, independent_items, scans_used, items_used, chunks_before;
  __shared__ int32_t
      kinds;  // heads with an exact boundary, and kUnusual for each whose warm-ups are not the usual ones
  __shared__ int32_t carried_slices;  // of states at cuts of carried heads (carry.cu)
  __shared__ int32_t guessed_exact;   // of those that the choice was made for beforehand
  constexpr int32_t kUnusual = 1 << 16;
  __shared__ RegularSegment segments[2][kMostRegularPieces];
  __shared__ int32_t boundary_sums[kMostRegularHeads];  // of a head: kExactBoundary for each exact one, and warm-ups
  constexpr int32_t kExactBoundary = 1 << 16;
  constexpr int32_t kOutOfPlace = 1 << 25;  // ... and this by each warp: the head is not one of an regular plan
  static_assert(kMostRegularPieces * kMaxWarmup < kExactBoundary && kMostRegularPieces * kExactBoundary < kOutOfPlace &&
                kListWarps * int64_t{kOutOfPlace} < INT32_MAX);
  __shared__ int32_t warp_sums[kListWarps];
  __shared__ CutSequence kept_sequences[kKeptSequences];
  __shared__ uint4 kept_warmups[kKeptWarmups / 16];
  // The summaries have been used when the first item is kept.
  __shared__ union Kept {
    HeadSummary summaries[kMostSummaries];
    KeptItems items;
    __device__ Kept() {}
  } kept;
  // TPCs on which boundaries are classified, by bits: the state kernel's blocks come late there.
  constexpr uint32_t kLateWords = PlanStart::kTpcs / 32;
  __shared__ uint32_t late_tpcs[kLateWords];
  static_assert(kMostUnitBlocks <= kListThreads);
  const uint32_t classifier = thread < p.unit_blocks ? load_now(ws.classifiers + thread) : ~0u;
  if (thread < static_cast<int>(kLateWords)) late_tpcs[thread] = 0;
  buckets[thread] = 0;
  if (thread == 0) scans_used = items_used = chunks_before = kinds = guessed_exact = carried_slices = 0;
  __syncthreads();
  for (int32_t i = thread; i < p.carry.parts * heads; i += kListThreads) {
    if (p.carry.chains[i].has_cuts()) atomicAdd(&carried_slices, kCarrySlices);
  }

  if (classifier < PlanStart::kTpcs) atomicOr(&late_tpcs[classifier / 32], 1u << classifier % 32);
  const int32_t pairs = n * heads;
  bool cut = cut_spacing.spacing > 0;
  const bool chosen = args.split == Mode::kAuto && args.force_split == 0 && cut;
  // Heads beyond the room for their summaries do not take part in the choice; there is always room for as many as a
  // call may have that is planned without being forced to.
  const int32_t summarised = min(pairs, kMostSummaries);
  const bool expected = p.least_longest == 0 && lengths == p.expected_lengths;
  const bool kept_here = p.capacity.slots <= kKeptWarmups;
  const auto tell = [&](uint32_t* to, const ChosenJoins& best) {
    if (thread != 0 || summarised != pairs || best.state_items > UINT16_MAX) return;
    *static_cast<volatile uint32_t*>(to) = (tpc() << 16 | static_cast<uint32_t>(best.state_items)) + 1;
  };
  // Until there is a plan nothing can begin. Of the expected lengths it is made in few steps, if it is regular: what
  // depends on no gate is there before, for the choice that a quarter of the heads exact would ask for.
  // Not of offsets out of order.
  const bool carries = p.carry.chains != nullptr && lengths.sequences > 0;
  const bool may_be_regular = chosen && !carries && expected && kept_here && p.in_place == 0 &&
                              pairs <= kMostRegularHeads && most_pieces > 1 && most_pieces <= kMostRegularPieces;
  if (p.unit_blocks != 0) __syncthreads();
  // The order in which TPCs get state items: from the planner's on, those first on which no boundaries are
  // classified.
  if (thread < PlanStart::kTpcs) {
    const uint32_t all = static_cast<uint32_t>(p.sms + 1) / 2, own = tpc(), pair = static_cast<uint32_t>(thread);
    const uint32_t after = pair > own ? pair - own : all + pair - own;  // of its place without those
    uint32_t place = pair == own || pair >= all ? all : after;
    if (p.unit_blocks != 0 && place != all) {
      uint32_t late = 0, all_late = 0;  // of the TPCs up to there, and of all
#pragma unroll
      for (uint32_t i = 0; i < kLateWords; ++i) {
        const auto below = [&](uint32_t n) {
          return n <= 32 * i ? 0u : n >= 32 * i + 32 ? ~0u : (1u << (n - 32 * i)) - 1;
        };
        const uint32_t before = below(own), up_to_own = below(own + 1), up_to = below(pair + 1);
        const uint32_t others = late_tpcs[i] & ~(up_to_own & ~before);
        late += __popc(others & (pair > own ? up_to & ~up_to_own : up_to | ~up_to_own));
        all_late += __popc(others);
      }
      const bool is_late = (late_tpcs[pair / 32] >> pair % 32 & 1) != 0;
      place = is_late ? all - 1 - all_late + late : after - late;
    }
    *static_cast<volatile uint32_t*>(&ws.start->place[pair]) = place;
  }
  // Before blocks come that have waited for an SM where boundaries are classified.
  ChosenJoins likely_items{0, 0};
  if (may_be_regular) {
    likely_items.choice = max(p.choice_table.choice(pairs / 4, pairs, &likely_items.state_items), 0);
    tell(&ws.start->likely_items, likely_items);
  }
  if (carries) tell(&ws.start->likely_items, likely_items);  // few states, or none, are still to be made
  // Where sequences are cut; a larger batch's are kept in memory.
  CutSequence* const cuts = n <= kKeptSequences ? kept_sequences : ws.cuts;
  const bool number_chunks = args.h != nullptr && args.cu_seqlens != nullptr;
#pragma unroll 1
  for (int32_t first = 0; first < n; first += kListThreads) {
    const int32_t i = first + thread;
    SequenceSpan s{0, 0, i, 0};
    if (i < n) s = sequence_at(args, i);
    if (number_chunks) {
      const int32_t chunks = chunks_in(s.length);
      int32_t inclusive = chunks;
#pragma unroll 1
      for (int step = 1; step < 32; step *= 2) {
        const int32_t below = __shfl_up_sync(0xffffffffu, inclusive, step);
        if (lane >= step) inclusive += below;
      }
      if (lane == 31) warp_sums[warp] = inclusive;
      __syncthreads();
      int32_t before = chunks_before;
#pragma unroll 1
      for (int w = 0; w < warp; ++w) before += warp_sums[w];
      s.first_chunk = before + inclusive - chunks;
      __syncthreads();
      if (thread == kListThreads - 1) chunks_before = before + inclusive;
      __syncthreads();
    }
    if (i >= n) continue;
    // A skipped sequence has no state items: the scans wait for all that are listed.
    if (initial_slot(args, i) == kSkipSequence) s.length = 0;
    cuts[i] = CutSequence(s, cut_spacing);
  }
  // Of other lengths than the expected ones the choice is made for a quarter of the heads without decay while the
  // boundaries are classified. If it is not that, its instructions are in the caches.
  ChosenJoins guess{-1, 0};
  if (chosen && !expected && !carries) {
    __syncthreads();
#pragma unroll 1
    for (int32_t pair = thread; pair < summarised; pair += kListThreads) {
      const int32_t i = p.by_heads.divide(pair), boundaries = cuts[i].pieces - 1;
      const bool exact = (pair - i * heads) % 4 == 3;
      kept.summaries[pair] = {cuts[i].chunks, boundaries + 1, exact ? boundaries : 0,
                              exact ? 0 : kUsualWarmup * boundaries};
      if (exact && boundaries > 0) atomicAdd(&guessed_exact, 1);
    }
    __syncthreads();
    guess = choose_joins(p, kept.summaries, summarised, lengths, cut_spacing);
  }
  const uint8_t* warmups = ws.warmups;
  if (kept_here) warmups = reinterpret_cast<const uint8_t*>(kept_warmups);
  auto warmups_of = [warmups, heads](int32_t head) {
    return [warmups, heads, head](int32_t number) {
      return static_cast<int32_t>(warmups[static_cast<int64_t>(number) * heads + head]);
    };
  };
  auto head_plan = [&](int32_t pair, const Join& join) {
    const int32_t i = min(p.by_heads.divide(pair), n - 1), head = pair - i * heads;
    return HeadPlan(cuts[i], head, cut_spacing, join, p.capacity.boundaries, warmups_of(head));
  };
  const auto carried_of = [&](int32_t pair, const CutSequence& sequence, int32_t head) {
    return carries && pair < pairs ? carried_chain(p, sequence.sequence, head) : nullptr;
  };
  // By one thread.
  const auto write_counters = [&](int32_t states, int32_t first, int32_t free, int32_t dependent, int32_t scans,
                                  const Join& join, bool even) {
    const bool halves = !cut && p.uncut_shared != 0;
    PlanCounters counters{};
    counters.states.items = states;
    counters.outputs.items = halves ? 0 : free;
    counters.outputs.dependent_items = dependent;  // none where nothing is cut
    counters.halves.items = halves ? free : 0;
    counters.progress.states_left = static_cast<uint32_t>(states * kStateWarps);
    counters.progress.slices_left = counters.progress.pieces = static_cast<uint32_t>(scans * kScanSlices);
    counters.progress.slices_left += static_cast<uint32_t>(carried_slices);
    counters.progress.first_items = static_cast<uint32_t>(first);
    counters.planner_tpc = tpc();
    counters.spacing = cut_spacing.spacing;
    counters.decaying_join = join.decaying;
    counters.exact_join = join.exact;
    counters.even = even;
    *ws.counters = counters;
  };

  const auto wait_for_warmups = [&] {
    // The boundaries' kernel is waited for here.
    wait_for_predecessors();
    // Whole vectors: the workspace has room for them.
    if (kept_here && 16 * thread < p.capacity.slots) {
      kept_warmups[thread] = reinterpret_cast<const uint4*>(ws.warmups)[thread];
    }
  };
  if (may_be_regular) {
    ChosenJoins best = likely_items;
    RegularPlan even(most_pieces, join_choice(best.choice));
    const auto make_segments = [&] {
      for (int32_t i = thread; i < 2 * kMostRegularPieces; i += kListThreads) {
        const bool is_exact = i >= kMostRegularPieces;
        const int32_t k = i % kMostRegularPieces;
        if (k < (is_exact ? even.exact : even.decaying).joined)
          segments[is_exact][k] = even.segment(cuts[0], is_exact, k);
      }
    };
    __syncthreads();  // segments read where the first sequence is cut, which one thread has written
    make_segments();
    if (thread < kMostRegularHeads) boundary_sums[thread] = 0;
    wait_for_warmups();
    __syncthreads();
    // A lane to each head, and the boundaries to the warps.
#pragma unroll
    for (int32_t word = 0; word < kRegularWords; ++word) {
      const int32_t pair = 32 * word + lane;
      if (pair >= pairs) continue;
      const int32_t i = p.by_heads.divide(pair), head = pair - i * heads;
      const CutSequence& sequence = cuts[i];
      int32_t sum = sequence.pieces == most_pieces ? 0 : kOutOfPlace;
#pragma unroll 1
      for (int32_t boundary = 1 + warp; boundary < most_pieces; boundary += kListWarps) {
        const int32_t number = sequence.number(boundary, cut_spacing);
        if (number >= p.capacity.boundaries) {
          sum = kOutOfPlace;
          break;
        }
        const int32_t warmup = warmups[number * heads + head];
        sum += warmup == 0 ? kExactBoundary : warmup;
      }
      if (warp < most_pieces) atomicAdd(&boundary_sums[pair], sum);
    }
    __syncthreads();
    uint32_t exact_heads[kRegularWords];  // by bits; the same in all warps
    bool usual = true, is_regular = true;
    int32_t exact = 0;
#pragma unroll
    for (int32_t word = 0; word < kRegularWords; ++word) {
      const int32_t pair = 32 * word + lane, sum = pair < pairs ? boundary_sums[pair] : 0;
      const int32_t boundaries = most_pieces - 1, exacts = sum / kExactBoundary, total = sum % kExactBoundary;
      exact_heads[word] = __ballot_sync(0xffffffffu, exacts > 0);
      exact += __popc(exact_heads[word]);
      is_regular = is_regular && !__any_sync(0xffffffffu, exacts != 0 && exacts != boundaries);
      usual = usual && !__any_sync(0xffffffffu, pair < pairs && exacts == 0 &&
                                                    (total < ChoiceTable::kLeastWarmup * boundaries ||
                                                     total > ChoiceTable::kMostWarmup * boundaries));
      if (warp == 0 && pair < pairs) {
        kept.summaries[pair] = {cuts[p.by_heads.divide(pair)].chunks, most_pieces, exacts, total};
      }
    }
    if (is_regular) {
      if (exact == pairs && p.choice_table.all_exact.segments != 0) {
        list_all_exact_items(p, cuts, cut_spacing);
        return;
      }
      const int32_t before = best.choice;
      if (usual) best.choice = p.choice_table.choice(exact, pairs, &best.state_items);
      if (!usual || best.choice < 0) {
        __syncthreads();  // the summaries are there
        best = choose_joins(p, kept.summaries, summarised, lengths, cut_spacing);
      }
      tell(&ws.start->published_items, best);
      const Join join = join_choice(best.choice);
      if (best.choice != before) {
        even = RegularPlan(most_pieces, join);
        __syncthreads();
        make_segments();
        __syncthreads();
      }
      cut = best.choice != kJoinChoices - 1;
      const RegularCounts counts{pairs - exact, exact};
      const RegularSink sink{ws};
      const int32_t most = even.most_segments(), all = pairs * most;
      const Divisor by_segments(most);
#pragma unroll 1
      for (int32_t i = thread; i < 3 * all; i += kListThreads) {
        const int32_t item = i < all ? 0 : i < 2 * all ? 1 : 2;
        const int32_t pair = by_segments.divide(i - item * all), k = i - item * all - pair * most;
        int32_t rank = 0;
        bool is_exact = false;
#pragma unroll
        for (int32_t word = 0; word < kRegularWords; ++word) {
          const int32_t place = pair - 32 * word;
          if (place >= 32) rank += __popc(exact_heads[word]);
          if (place < 0 || place >= 32) continue;
          rank += __popc(exact_heads[word] & ((1u << place) - 1));
          is_exact = (exact_heads[word] >> place & 1) != 0;
        }
        if (k >= (is_exact ? even.exact : even.decaying).joined) continue;
        even.emit(segments[is_exact][k], head_plan(pair, join), counts, is_exact, is_exact ? rank : pair - rank, k,
                  item, sink);
      }
      if (thread == kListThreads - 1) {
        write_counters(even.state_items(counts), 0, even.independent_items(counts), even.dependent_items(counts),
                       even.scans(counts), join, true);
      }
      __syncthreads();  // the lists are there
      if (thread == 0) publish_plan(ws);
      return;
    }
  }

  if (!may_be_regular) wait_for_warmups();
  __syncthreads();
  const int32_t first_pair = thread / width, pairs_at_once = kListThreads / width;
  Join join;
  if (chosen) {
    int32_t own_kinds = 0;
#pragma unroll 1
    for (int32_t pair = first_pair; pair - lane / width < summarised; pair += pairs_at_once) {
      const auto plan = head_plan(pair, join);
      const int first_lane = lane / width * width;
      const uint32_t group = (width == 32 ? ~0u : (1u << width) - 1) << first_lane;
      int32_t exact = 0, total = 0;
      for (int32_t i = 1 + lane - first_lane; i < plan.cuts.pieces; i += width) {
        const int32_t warmup = plan.warmup_at(i);
        exact += warmup == 0;
        total += warmup;
      }
      exact = __reduce_add_sync(group, exact);
      total = __reduce_add_sync(group, total);
      if (lane == first_lane && pair < summarised) {
        if (const LinkChain* chain = carried_of(pair, plan.cuts, plan.head); chain != nullptr) exact = -chain->segments;
        kept.summaries[pair] = {plan.cuts.chunks, plan.cuts.pieces, exact, total};
        const int32_t boundaries = plan.cuts.pieces - 1;
        own_kinds += exact > 0 ? 1
                     : total < ChoiceTable::kLeastWarmup * boundaries || total > ChoiceTable::kMostWarmup * boundaries
                         ? kUnusual
                         : 0;
      }
    }
    own_kinds = __reduce_add_sync(0xffffffffu, own_kinds);
    if (lane == 0 && own_kinds != 0) atomicAdd(&kinds, own_kinds);
    __syncthreads();
    ChosenJoins best = guess;
    const bool usual = kinds < kUnusual;
    if (usual && expected && !carries) best.choice = p.choice_table.choice(kinds, pairs, &best.state_items);
    if (!usual || carries || (!expected && kinds != guessed_exact) || best.choice < 0) {
      best = choose_joins(p, kept.summaries, summarised, lengths, cut_spacing);
    }
    tell(&ws.start->published_items, best);
    join = join_choice(best.choice);
    cut = best.choice != kJoinChoices - 1;
  }

  ItemSink sink{false, p.in_place != 0, heads, buckets, &scans_used, &items_used, &kept.items, ws};
#pragma unroll 1
  for (;; sink.placing = true) {
    if (sink.placing && items_used <= kKeptItems) {
      for (int i = thread; i < items_used; i += kListThreads) {
        const WorkItem t = kept.items.item[i];
        sink.put(t, buckets[item_bucket(t, sink.in_place)] + kept.items.rank[i]);
      }
      break;
    }
#pragma unroll 1
    for (int32_t pair = first_pair; pair - lane / width < pairs; pair += pairs_at_once) {
      const auto plan = head_plan(pair, join);
      const LinkChain* chain = carried_of(pair, plan.cuts, plan.head);
      emit_head(plan, pair < pairs && chain == nullptr, sink, lane, width, most_pieces);
      if (chain == nullptr) continue;
      for (int32_t k = lane % width; k < chain->segments; k += width) {
        sink.item(carried_item(plan, *chain, k, static_cast<int32_t>(p.capacity.slots)));
      }
    }
    if (sink.placing) break;
    __syncthreads();
    // Exclusive sums of the buckets, one to a thread: the state items' are those of the first warps, and a list of
    // their own.
    static_assert(kItemBuckets == kListThreads && kLengthBuckets % 32 == 0 && kListWarps <= 32);
    constexpr int kStateListWarps = kLengthBuckets / 32;
    const int32_t count = buckets[thread];
    int32_t inclusive = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t below = __shfl_up_sync(0xffffffffu, inclusive, step);
      if (lane >= step) inclusive += below;
    }
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    const bool counts = lane < warp && (lane >= kStateListWarps) == (warp >= kStateListWarps);
    inclusive += __reduce_add_sync(0xffffffffu, counts ? warp_sums[lane] : 0);
    buckets[thread] = inclusive - count;
    if (thread == kLengthBuckets - 1) state_items = inclusive;
    if (thread == 2 * kLengthBuckets) first_items = inclusive - count;
    if (thread == 3 * kLengthBuckets) independent_items = inclusive - count;
    __syncthreads();
    // By a thread that seldom has items to place.
    if (thread == kItemBuckets - 1) {
      write_counters(state_items, first_items, independent_items, inclusive - independent_items, scans_used, join,
                     false);
    }
  }
  __syncthreads();  // the lists are there
  if (thread == 0) publish_plan(ws);
}

}  // namespace

const void* list_kernel() { return reinterpret_cast<const void*>(&list_items_kernel); }

}  // namespace flash_qla::cuda::sm90::cp
