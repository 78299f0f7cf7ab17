// A group of the device tests that any path of the chunked forward may have.
#pragma once

#include "checker.h"

namespace flash_qla::testing {

// A sequence's bits depend on nothing but the sequence: not on what else is in the batch, nor on where it is cut.
inline int64_t test_invariance(const Settings& settings, Arena& arena, const char* path, int64_t K, int64_t V,
                               const std::vector<int64_t>& cuts) {
  Checker checker(std::string("bits depend on the sequence alone, ") + path, settings, arena, path);
  Random random(13);
  Shape s;
  s.dtype = DType::kBFloat16;
  s.T = 300;
  s.Hq = 2;
  s.Hv = 4;
  s.K = K;
  s.V = V;
  s.cu_seqlens = {0, 17, 17, 209, 300};
  Features f;
  f.initial_state = f.final_state = true;
  f.cp_mode = FLASH_QLA_CP_OFF;
  ForwardCall batch;
  batch.draw(s, f, PoolFeatures{}, false, random);
  ForwardCall whole = batch;
  checker.run("batch", whole, path);
  // Tokens [begin, end) of the batch as a call of their own, from `state`.
  const auto part = [&](int64_t begin, int64_t end, Buffer state) {
    ForwardCall call = batch;
    for (Buffer* buffer : {&call.in.q, &call.in.k, &call.in.v, &call.in.g, &call.in.beta, &call.o}) {
      *buffer = buffer->slice(1, begin, end);
    }
    call.in.shape.T = end - begin;
    call.in.shape.cu_seqlens.clear();
    call.in.cu_seqlens = Buffer();
    call.in.initial_state = state;
    call.final_state = batch.final_state.slice(0, 0, 1);
    checker.run("forward", call, path);
    return call;
  };
  // The third sequence alone, and cut.
  ForwardCall alone = part(17, 209, batch.in.initial_state.slice(0, 2, 3));
  if (!same(alone.o, whole.o.slice(1, 17, 209))) checker.fail("alone", path, "o differs");
  if (!same(alone.final_state, whole.final_state.slice(0, 2, 3))) checker.fail("alone", path, "state differs");
  for (const int64_t cut : cuts) {
    ForwardCall first = part(17, 17 + cut, batch.in.initial_state.slice(0, 2, 3));
    ForwardCall second = part(17 + cut, 209, first.final_state);
    if (!same(first.o, alone.o.slice(1, 0, cut))) checker.fail("cut", path, "o before the cut differs");
    if (!same(second.o, alone.o.slice(1, cut, 192))) checker.fail("cut", path, "o after the cut differs");
    if (!same(second.final_state, alone.final_state)) checker.fail("cut", path, "state differs");
  }
  return checker.finish();
}

}  // namespace flash_qla::testing
