// The serving calls of the CPU backend, prefill and decode over a pool of states, against the fp64 reference.
#include "cpu_call.h"

namespace flash_qla {
namespace {

using namespace cpu_call;

struct PoolCase {
  bool v_first;
  DType dtype;
};

void run_pool(const PoolCase& pool_case, const char* path, Owned* o, Owned* pool, Owned* checkpoints) {
  Case c;
  c.lengths = {130, 0, 40, 200, 64, 10, 20};
  c.padding = 9;
  c.Hv = 4, c.V = 24, c.has_h0 = false, c.v_first = pool_case.v_first;
  const Inputs in = make_inputs(c);
  const int64_t slots = 12;
  std::vector<int64_t> shape = state_shape(c, slots);
  *pool = Owned(pool_case.dtype, shape);
  std::mt19937 random(3);
  std::normal_distribution<double> normal;
  fill(pool->t, [&] { return normal(random); });
  // Sequence 0 reads and writes slot 3; 1 is empty and moves 1 to 2; 2 starts from zero and writes 5; 3 reads 0, writes
  // nowhere; 4 is skipped; 5 is past the pool, hence skipped; 6 starts from zero with a null index to read.
  const Owned initial = indices({3, 1, 4, 0, -1, 99, -1}, DType::kInt32), final = indices({3, 2, 5, -1, 6, 7, 8}),
              has = indices({1, 1, 0, 1, 1, 1, 0}, DType::kBool);
  const Owned offsets = indices({0, 17, 64, 130, 130 + 41, 170 + 128, 464, 470, 1000}),
              slot_list = indices({9, 9, 10, 11, -1, 4, 40, 6, 7});
  *checkpoints = Owned(DType::kFloat32, state_shape(c, 6));
  const Owned starts = indices({0, 1, 1, 1, 2, 2, 2, 2});
  ForwardArguments args = forward_arguments(c, in, path);
  *o = poisoned(c.dtype, {1, in.T, c.Hv, c.V});
  args.o = o->t;
  args.state_pool = pool->t;
  args.initial_state_indices = initial.t;
  args.final_state_indices = final.t;
  args.has_initial_state = has.t;
  args.checkpoint_every = 128;
  args.checkpoints = checkpoints->t;
  args.checkpoint_cu_starts = starts.t;
  args.checkpoint_offsets = offsets.t;
  args.checkpoint_indices = slot_list.t;
  run<ChunkForward>(args);
}

TEST(CpuBackendPool, PrefillMatchesReference) {
  for (const PoolCase& c : {PoolCase{true, DType::kFloat32}, PoolCase{false, DType::kFloat32},
                            PoolCase{true, DType::kBFloat16}, PoolCase{false, DType::kFloat16}}) {
    Owned o, pool, checkpoints, expected_o, expected_pool, expected_checkpoints;
    run_pool(c, "cpu", &o, &pool, &checkpoints);
    run_pool(c, "reference", &expected_o, &expected_pool, &expected_checkpoints);
    const double bound = c.dtype == DType::kFloat32 ? 1e-5 : 5e-3;
    expect_near("o", o, expected_o, 2, 1e-5);
    for (int64_t slot = 0; slot < pool.t.shape[0]; ++slot) {
      Tensor a = pool.t, b = expected_pool.t;
      for (Tensor* t : {&a, &b}) {
        t->data = static_cast<char*>(t->data) + slot * t->stride[0] * size_of(dtype(*t));
        t->shape[0] = 1;
      }
      EXPECT_LE(distance_per_head(a, b, 1), bound) << "slot " << slot;
    }
    expect_near("checkpoints", checkpoints, expected_checkpoints, 1, 1e-5);
  }
}

TEST(CpuBackendPool, DecodeWithDraftTokensMatchesReference) {
  for (const bool own_slots : {true, false}) {
    Case c;
    c.B = 4, c.T = 3, c.Hv = 4, c.has_h0 = false, c.v_first = true, c.l2norm = c.gate = c.sigmoid = true;
    const Inputs in = make_inputs(c);
    const auto decode = [&](const char* path, Owned* o, Owned* pool) {
      *pool = Owned(DType::kFloat32, state_shape(c, 16));
      std::mt19937 random(3);
      std::normal_distribution<double> normal;
      fill(pool->t, [&] { return normal(random); });
      const Owned initial = indices({0, 1, 2, 3, 4, 5, 6, 7, 8, -1, -1, -1}, DType::kInt32, {4, 3}),
                  final = indices({9, 10, 11, 3, -1, 5, 12, 13, 14, 15, 15, 15}, DType::kInt32, {4, 3}),
                  accepted = indices({1, 3, 2, 1}, DType::kInt32);
      ForwardArguments args = forward_arguments(c, in, path);
      *o = poisoned(c.dtype, {c.B, c.T, c.Hv, c.V});
      args.o = o->t;
      args.state_pool = pool->t;
      args.initial_state_indices = initial.t;
      if (own_slots) args.final_state_indices = final.t;
      args.num_accepted_tokens = accepted.t;
      run<Recurrent>(args);
    };
    Owned o, pool, expected_o, expected_pool;
    decode("cpu", &o, &pool);
    decode("reference", &expected_o, &expected_pool);
    expect_near("o", o, expected_o, 2, 1e-5);
    expect_near("pool", pool, expected_pool, 1, 1e-5);
  }
}

}  // namespace
}  // namespace flash_qla
