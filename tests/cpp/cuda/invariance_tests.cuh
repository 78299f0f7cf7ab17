// A group of the device tests that any path of the chunked forward may have.
#pragma once

#include <string>
#include <vector>

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

// Sequences that are not cut, on path sm90: every mode of auto_cp gives the same bits, of o, states, h and checkpoints,
// and so do the kernel of one CTA (a batch that fills the card) and that of two (one of its sequences alone). States at
// listed tokens with auto_cp=True end chunks, which changes what follows: they are compared without it.
inline int64_t test_sm90_modes(const Settings& settings, Arena& arena) {
  Checker checker("bits are those of every mode and of one CTA and two, sm90", settings, arena, "sm90");
  Random random(settings.seed + 61);
  enum class Keeps { kNothing, kH, kCheckpoints, kListed };
  for (const DType type : {DType::kBFloat16, DType::kFloat16}) {
    for (const bool strong : {false, true}) {
      for (const Keeps keeps : {Keeps::kNothing, Keeps::kH, Keeps::kCheckpoints, Keeps::kListed}) {
        for (const int64_t sequences : {40, 2}) {  // 160 items, more than a card's SMs, and 8
          Shape s;
          s.dtype = type;
          s.Hq = 2;
          s.Hv = 4;
          s.K = s.V = 128;
          s.cu_seqlens = {0};
          for (int64_t n = 0; n < sequences; ++n) {
            s.cu_seqlens.push_back(s.cu_seqlens.back() + (n == 0 ? 230 : random.integer(0, 300)));
          }
          s.T = s.cu_seqlens.back();
          Features f;
          f.initial_state = f.final_state = true;
          f.strong_decay = strong;
          f.v_first = random.chance(0.5);
          f.cp_mode = FLASH_QLA_CP_OFF;
          PoolFeatures kept;
          kept.h = keeps == Keeps::kH;
          kept.pool = keeps == Keeps::kCheckpoints || keeps == Keeps::kListed;
          kept.packed_checkpoints = kept.pool;
          kept.listed_checkpoints = keeps == Keeps::kListed;
          ForwardCall off;
          off.draw(s, f, kept, false, random);
          const ForwardCall drawn = off;  // a pool is written in place
          const std::string what = std::to_string(sequences) + " sequences, " + (strong ? "strong" : "usual") +
                                   " decay, keeps " + std::to_string(static_cast<int>(keeps));
          checker.run(what, off, "sm90");
          const auto compare = [&](const std::string& name, ForwardCall& call, ForwardCall& expected) {
            const NamedBuffers found = call.outputs(), wanted = expected.outputs();
            for (size_t i = 0; i < found.size(); ++i) {
              if (found[i].second->present() && !same(*found[i].second, *wanted[i].second)) {
                checker.fail(name, "sm90", found[i].first + " differs");
              }
            }
            if (call.pool.present() && !same(call.pool, expected.pool)) checker.fail(name, "sm90", "pool differs");
          };
          for (const flash_qla_cp_mode mode : {FLASH_QLA_CP_AUTO, FLASH_QLA_CP_INVARIANT}) {
            if (keeps == Keeps::kListed && mode == FLASH_QLA_CP_AUTO) continue;
            ForwardCall call = drawn;
            call.in.features.cp_mode = mode;
            const std::string name = what + (mode == FLASH_QLA_CP_AUTO ? ", auto" : ", invariant");
            checker.run(name, call, "sm90");
            compare(name, call, off);
          }
          if (kept.pool || sequences == 2) continue;
          for (const flash_qla_cp_mode mode : {FLASH_QLA_CP_OFF, FLASH_QLA_CP_AUTO, FLASH_QLA_CP_INVARIANT}) {
            const int64_t tokens = s.cu_seqlens[1];
            ForwardCall alone = drawn, expected = off;
            for (Buffer* x :
                 {&alone.in.q, &alone.in.k, &alone.in.v, &alone.in.g, &alone.in.beta, &alone.o, &expected.o}) {
              *x = x->slice(1, 0, tokens);
            }
            for (Buffer* x : {&alone.in.initial_state, &alone.final_state, &expected.final_state}) {
              *x = x->slice(0, 0, 1);
            }
            if (kept.h) {
              for (Buffer* x : {&alone.h, &expected.h}) *x = x->slice(0, 0, ceil_div(tokens, kChunkSize));
            }
            alone.in.shape.T = tokens;
            alone.in.shape.cu_seqlens.clear();
            alone.in.cu_seqlens = Buffer();
            alone.in.features.cp_mode = mode;
            const std::string name = what + ", the first alone, mode " + std::to_string(static_cast<int>(mode));
            checker.run(name, alone, "sm90");
            compare(name, alone, expected);
          }
        }
      }
    }
  }
  return checker.finish();
}

}  // namespace flash_qla::testing
