// Decode on path cuda_decode: drawn pools, options and layouts, on a GPU or emulated.
#pragma once

#include "checker.h"

namespace flash_qla::testing {

// One token of so many rows that a block takes several slices of columns (kFewestBlocks in generic/decode.cu).
inline void draw_many_rows(Shape* s, Random& random) {
  constexpr int64_t kColumns = 32;  // of a slice of 128 keys; with 64 keys it has twice as many
  s->T = 1;
  s->V = 16 * random.integer(4, 10);
  const int64_t slices = std::max<int64_t>(1, s->V * s->K / 128 / kColumns);
  s->B = ceil_div(int64_t{2 * 396}, s->Hv * slices);
}

inline ForwardCall draw_decode(Random& random) {
  Shape s;
  s.dtype = draw_dtype(random);
  s.B = random.integer(1, 6);
  s.T = random.chance(0.5) ? 1 : random.integer(2, FLASH_QLA_MAX_DRAFT_TOKENS);
  s.Hq = random.integer(1, 3);
  s.Hv = s.Hq * random.integer(1, 3);
  s.K = random.chance(0.5) ? 64 : 128;
  s.V = 16 * random.integer(1, 16);
  Features f = draw_features(s.dtype, random);
  // There is a kernel for each of them, K, layout, and one or several tokens: all alike often, so that few cases reach
  // all.
  f.state_dtype = random.pick(std::vector<DType>{DType::kFloat32, DType::kBFloat16, DType::kFloat16});
  if (f.strided && random.chance(0.5)) f.strided = false;
  if (random.chance(0.15)) draw_many_rows(&s, random);
  PoolFeatures pool = draw_pool_features(true, false, random);
  if (!pool.pool) {
    // Without a pool the kernel wants contiguous float32 states.
    f.strided = false;
    f.state_dtype = DType::kFloat32;
  }
  ForwardCall call;
  call.draw(s, f, pool, true, random);
  return call;
}

inline int64_t test_decode(const Settings& settings, Arena& arena, const char* reference,
                           flash_qla_device_type device) {
  Checker decode("recurrent, cuda_decode", settings, arena, "cuda_decode");
  for_each_case(settings, settings.cases, draw_decode, [&](const std::string& what, const ForwardCall& call) {
    decode.check(what, call, "cuda_decode", reference, device);
  });
  return decode.finish();
}

}  // namespace flash_qla::testing
