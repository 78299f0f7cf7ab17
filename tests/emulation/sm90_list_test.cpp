// The kernel that lists the items of a context parallelism, against the model on the host
// (tests/cpp/split_plan_model.h): each item at its place, and each chunk computed once from the right state.
#include "cuda/common/launch.h"
#include "cuda/sm90/context_parallel/plan_device.cuh"
#include "split_plan_model.h"

namespace flash_qla::cuda::sm90::cp {
namespace {

// Memory that the kernel reads and writes.
struct Memory {
  PlanCounters counters{};
  PlanStart start{};
  std::vector<uint8_t> warmups;
  std::vector<PlannedSequence> sequences;
  std::vector<int32_t> kinds;
  std::vector<uint32_t> readers;
  std::vector<WorkItem> state_items, output_items;
  std::vector<Scan> scans;
  std::vector<int64_t> offsets;
  std::vector<uint16_t> h;
};

PlanArgs plan_args(const Batch& batch, const Plan& plan, Memory* memory) {
  const size_t n = batch.sequences.size();
  const Capacity& capacity = plan.capacity;
  PlanArgs p{};
  for (const SequenceSpan& s : batch.sequences) memory->offsets.push_back(s.start);
  memory->offsets.push_back(n > 0 ? batch.sequences.back().start + batch.sequences.back().length : 0);
  p.args.cu_seqlens = memory->offsets.data();
  p.args.cu_seqlens_are_64_bit = 1;
  p.args.num_tokens = batch.tokens;
  p.args.num_sequences = static_cast<int32_t>(n);
  p.args.num_key_heads = 1;
  p.args.num_value_heads = batch.heads;
  p.args.split = batch.mode;
  p.args.force_split = batch.forced;
  p.args.h = memory->h.data();  // chunks are numbered
  memory->warmups = plan.warmups;
  memory->warmups.resize((plan.warmups.size() + 31) / 16 * 16);
  memory->sequences.resize(n);
  memory->kinds.resize(n * static_cast<size_t>(batch.heads));
  memory->readers.resize(2 * memory->kinds.size());
  WorkItem none{};
  none.row = -1;
  memory->state_items.assign(static_cast<size_t>(capacity.state_items), none);
  memory->output_items.assign(static_cast<size_t>(capacity.output_items), none);
  memory->scans.assign(static_cast<size_t>(capacity.scans), {-1, -1});
  p.workspace.counters = &memory->counters;
  p.workspace.start = &memory->start;
  p.workspace.warmups = memory->warmups.data();
  p.workspace.sequences = memory->sequences.data();
  p.workspace.kinds = memory->kinds.data();
  p.workspace.readers = memory->readers.data();
  p.workspace.state_items = memory->state_items.data();
  p.workspace.output_items = memory->output_items.data();
  p.workspace.scans = memory->scans.data();
  p.capacity = capacity;
  p.by_heads = Divisor(batch.heads);
  p.in_place = batch.in_place;
  p.sms = batch.sms;
  return p;
}

void launch_list(const PlanArgs& p) {
  const LaunchConfig shape(1, kListThreads, 0, nullptr, true);
  const auto kernel = reinterpret_cast<void (*)(PlanArgs)>(const_cast<void*>(list_kernel()));
  ASSERT_EQ(cudaLaunchKernelEx(&shape.config, kernel, p), cudaSuccess);
}

// The lists as the kernel has left them.
Plan listed(const Batch& batch, const Plan& model, const Memory& memory) {
  const PlanCounters& counters = memory.counters;
  EXPECT_EQ(counters.made, 1u);
  Plan plan = model;
  const auto first = [](const auto& list, int64_t count) {
    EXPECT_LE(count, static_cast<int64_t>(list.size()));
    return std::vector(list.begin(), list.begin() + count);
  };
  const ItemList& outputs = counters.outputs;
  plan.state_items = first(memory.state_items, counters.states.items);
  plan.scans = first(memory.scans, counters.progress.pieces / kScanSlices);
  plan.output_items = in_drawn_order(first(memory.output_items, outputs.items + outputs.dependent_items), outputs.items,
                                     static_cast<int32_t>(counters.progress.first_items), batch.order);
  EXPECT_EQ(counters.progress.states_left, static_cast<uint32_t>(counters.states.items * kStateWarps));
  // Nothing is written behind the lists' ends.
  for (size_t t = plan.state_items.size(); t < memory.state_items.size(); ++t) {
    EXPECT_EQ(memory.state_items[t].row, -1);
  }
  for (size_t t = plan.output_items.size(); t < memory.output_items.size(); ++t) {
    EXPECT_EQ(memory.output_items[t].row, -1);
  }
  if (batch.in_place) {
    std::vector<uint32_t> readers(memory.readers.size());
    for (const std::vector<WorkItem>* list : {&plan.state_items, &plan.output_items}) {
      for (const WorkItem& t : *list) {
        if (!(t.flags & kItemFromStart)) continue;
        for (size_t half = 0; half < 2; ++half) {
          readers[2 * static_cast<size_t>(t.sequence * batch.heads + t.head) + half] += kWarpsOfHalf;
        }
      }
    }
    EXPECT_EQ(readers, memory.readers);
  }
  return plan;
}

auto fields(const WorkItem& t) {
  return std::array<int32_t, 9>{t.row, t.tokens, t.sequence, t.chunk, t.position, t.slot, t.head, t.warmup, t.flags};
}

// Runs the kernel on a batch whose lengths the host does not expect; what it lists.
Plan expect_model(const Batch& batch) {
  const Plan model = make_plan(batch);
  Memory memory;
  memory.h.resize(1);
  PlanArgs p = plan_args(batch, model, &memory);
  p.expected_lengths = {-1, -1, -1};
  launch_list(p);
  const Plan plan = listed(batch, model, memory);
  check(batch, plan);
  EXPECT_EQ(memory.counters.spacing, model.cut_spacing.spacing);
  const auto compare = [](const std::vector<WorkItem>& items, const std::vector<WorkItem>& expected) {
    ASSERT_EQ(items.size(), expected.size());
    for (size_t t = 0; t < items.size(); ++t) ASSERT_EQ(fields(items[t]), fields(expected[t])) << "item " << t;
  };
  compare(plan.state_items, model.state_items);
  compare(plan.output_items, model.output_items);
  return plan;
}

TEST(Sm90List, ItemsAreWhereTheModelHasThem) {
  std::mt19937 random(21);
  int64_t cut = 0, scanned = 0, in_place = 0;
  for (int i = 0; i < 1000; ++i) {
    Batch batch = draw(random);
    batch.finer = false;  // the kernel chooses the spacing
    if (batch.sequences.empty()) continue;
    const Plan plan = expect_model(batch);
    if (testing::Test::HasFatalFailure() || testing::Test::HasNonfatalFailure()) FAIL() << "case " << i;
    cut += plan.output_items.size() > batch.maps.size();
    scanned += !plan.scans.empty();
    in_place += batch.in_place && !plan.scans.empty();
  }
  EXPECT_GT(cut, 100);
  EXPECT_GT(scanned, 60);
  EXPECT_GT(in_place, 20);
}

// More sequences, and heads, than shared memory has room for.
TEST(Sm90List, LargeBatchesAreInTheWorkspace) {
  std::mt19937 random(23);
  int64_t scanned = 0;
  for (const int32_t n : {129, 500, 600}) {
    for (const Mode mode : {Mode::kAuto, Mode::kInvariant}) {
      Batch batch;
      batch.mode = mode;
      batch.forced = true;
      batch.in_place = mode == Mode::kInvariant;
      batch.heads = 5;
      int32_t chunk = 0;
      for (int32_t i = 0; i < n; ++i) {
        const int32_t length = static_cast<int32_t>(random() % (i % 50 == 0 ? 4000 : 300));
        batch.sequences.push_back({static_cast<int32_t>(batch.tokens), length, i, chunk});
        batch.tokens += length;
        chunk += chunks_in(length);
      }
      draw_chunks(random, &batch);
      scanned += !expect_model(batch).scans.empty();
      if (HasFatalFailure() || HasNonfatalFailure()) FAIL() << n << " sequences";
    }
  }
  EXPECT_GT(scanned, 2);
}

// Lengths that the host has expected: choices are looked up.
TEST(Sm90List, ExpectedLengthsTakeTheTable) {
  std::mt19937 random(22);
  int64_t looked_up = 0;
  for (int i = 0; i < 60; ++i) {
    Batch batch;
    batch.sms = 132;
    batch.heads = 8 << random() % 3;
    batch.order = static_cast<uint32_t>(random());
    batch.finer = random() % 2 == 0;
    const int32_t sequences = 1 + static_cast<int32_t>(random() % 2), chunks = 64 << random() % 3;
    for (int32_t s = 0; s < sequences; ++s) {
      batch.sequences.push_back({s * chunks * kChunk, chunks * kChunk, s, s * chunks});
    }
    batch.tokens = int64_t{sequences} * chunks * kChunk;
    draw_chunks(random, &batch);
    const int32_t share = static_cast<int32_t>(random() % 9);  // of eighths of the heads that do not decay
    for (size_t pair = 0; pair < batch.maps.size(); ++pair) {
      const bool decays = static_cast<int32_t>(pair) % batch.heads >= share * batch.heads / 8;
      for (Map& m : batch.maps[pair]) m.a = decays ? 0 : 1 + random() % (kPrime - 1);
      batch.decay[pair].assign(batch.decay[pair].size(), decays ? -3.3f : 0.0f);  // a warm-up of five chunks
      if (!decays) continue;
      for (size_t c = 0; c < batch.maps[pair].size(); ++c) batch.maps[pair][c].a = c % 4 == 0 ? 0 : 1;
    }
    const Plan model = make_plan(batch);
    if (model.cut_spacing.spacing == 0) continue;
    Memory memory;
    memory.h.resize(1);
    PlanArgs p = plan_args(batch, model, &memory);
    p.expected_lengths = batch.summary();
    p.expected_cut_spacing = model.cut_spacing;
    p.choice_table = choice_table(batch.summary(), model.cut_spacing, batch.heads, batch.sms, Costs());
    launch_list(p);
    const Plan plan = listed(batch, model, memory);
    check(batch, plan);
    if (HasFatalFailure() || HasNonfatalFailure()) FAIL() << "case " << i;
    ASSERT_EQ(memory.counters.exact_heads, share * batch.heads / 8 * sequences);
    const Join join = join_choice(p.choice_table.choice(memory.counters.exact_heads, sequences * batch.heads));
    EXPECT_EQ(memory.counters.decaying_join, join.decaying);
    EXPECT_EQ(memory.counters.exact_join, join.exact);
    ++looked_up;
  }
  EXPECT_GT(looked_up, 20);
}

}  // namespace
}  // namespace flash_qla::cuda::sm90::cp
