// The groups of cuda_generic_test that are about the Hopper forward alone (path sm90).
#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include "checker.h"
#include "repeated_call.cuh"

namespace flash_qla::testing {

// Checkpoints of whole heads: more tiles than half of a card's multiprocessors, with every kernel that keeps them.
inline int64_t test_sm90_checkpoints(const Settings& settings, Arena& arena) {
  Checker checker("checkpoints of whole heads, sm90", settings, arena, "sm90");
  for (const DType type : {DType::kBFloat16, DType::kFloat16}) {
    for (const flash_qla_cp_mode mode : {FLASH_QLA_CP_AUTO, FLASH_QLA_CP_OFF}) {
      Random random(29);
      Shape s;
      s.dtype = type;
      s.Hq = 2;
      s.Hv = 8;
      s.K = s.V = 128;
      s.cu_seqlens = {0};
      for (int n = 0; n < 20; ++n) {
        s.cu_seqlens.push_back(s.cu_seqlens.back() + 64 * random.integer(0, 3) + random.integer(0, 1) * n);
      }
      s.T = s.cu_seqlens.back() + 9;
      Features f;
      f.initial_state = f.final_state = true;
      f.cp_mode = mode;
      f.v_first = type == DType::kFloat16;
      const std::string bits = mode == FLASH_QLA_CP_OFF ? "no split" : "split";
      PoolFeatures kept;
      kept.pool = kept.packed_checkpoints = true;  // they are drawn with a pool
      ForwardCall call;
      call.draw(s, f, kept, false, random);
      checker.check(bits, call, "sm90", "cuda_reference", FLASH_QLA_CUDA);

      // Listed tokens at every kind of place: a sequence's end and first token, whole chunks, several in a chunk, one
      // twice, none of any sequence.
      std::vector<int64_t> starts;  // of sequences of more than two chunks
      for (size_t n = 0; n + 1 < s.cu_seqlens.size(); ++n) {
        if (s.cu_seqlens[n + 1] - s.cu_seqlens[n] > 128) starts.push_back(s.cu_seqlens[n]);
      }
      const int64_t a = starts.at(0), b = starts.at(1), end = s.cu_seqlens.back();
      const std::vector<int64_t> places[] = {{a + 20, a + 21, a + 40, a + 128, b + 63},
                                             {a, a + 1, b + 64, b + 65, end},
                                             {b + 100, a + 100, b + 100, end + 1, 0}};
      for (const std::vector<int64_t>& listed : places) {
        // Without a split they are made as for all other shapes (the drawn calls).
        if (mode == FLASH_QLA_CP_OFF && &listed != &places[0]) continue;
        for (const bool packed : {false, true}) {
          kept.packed_checkpoints = kept.h = kept.has_initial = packed;
          kept.skip_rows = !packed;
          kept.listed_checkpoints = true;
          ForwardCall with_list;
          with_list.draw(s, f, kept, false, random);
          with_list.checkpoint_offsets.fill([&](int64_t i, int64_t, int64_t, int64_t) {
            return static_cast<double>(listed.at(static_cast<size_t>(i)));
          });
          const std::string what =
              bits + ", listed from " + std::to_string(listed[0]) + (packed ? ", packed and h too" : "");
          checker.check(what, with_list, "sm90", "cuda_reference", FLASH_QLA_CUDA);
        }
      }
    }
  }
  return checker.finish();
}

// States that whole heads keep have the same bits every time, and those at listed tokens do not see what follows: not a
// NaN in the very chunk, nor one in the next sequence.
inline int64_t test_sm90_listed(const Settings& settings, Arena& arena) {
  Checker checker("states at listed tokens, sm90", settings, arena, "sm90");
  Random random(37);
  for (const DType type : {DType::kBFloat16, DType::kFloat16}) {
    Shape s;
    s.dtype = type;
    s.Hq = 2;
    s.Hv = 8;
    s.K = s.V = 128;
    for (int64_t n = 0; n <= 20; ++n) s.cu_seqlens.push_back(150 * n);
    s.T = s.cu_seqlens.back();
    Features f;
    f.initial_state = f.final_state = true;
    f.cp_mode = FLASH_QLA_CP_AUTO;
    f.v_first = type == DType::kFloat16;
    PoolFeatures kept;
    kept.pool = kept.packed_checkpoints = kept.listed_checkpoints = kept.h = true;
    ForwardCall clean;
    clean.draw(s, f, kept, false, random);
    constexpr int64_t kListed[] = {20, 21, 280, 364, 750};
    clean.checkpoint_offsets.fill(
        [&](int64_t i, int64_t, int64_t, int64_t) { return static_cast<double>(kListed[i]); });
    ForwardCall again = clean, dirty = clean;
    const auto spoil = [&](Buffer& x) {
      const Tensor t = x.host();
      x.fill([&](int64_t i, int64_t j, int64_t k, int64_t l) {
        return j == 25 || j == 285 || j == 364 || j == 750 ? static_cast<double>(NAN)
                                                           : load(t, offset_of(t, i, j, k, l));
      });
    };
    for (Buffer* x : {&dirty.in.k, &dirty.in.v, &dirty.in.beta}) spoil(*x);
    for (ForwardCall* call : {&clean, &again, &dirty}) {
      checker.run("forward", *call, "sm90");
    }
    const Tensor slots = clean.checkpoint_indices.host();
    for (const int64_t i : {0, 1, 2, 3, 4}) {
      const int64_t slot = static_cast<int64_t>(load(slots, offset_of(slots, i)));
      if (clean.pool.slice(0, slot, slot + 1).bytes() != dirty.pool.slice(0, slot, slot + 1).bytes()) {
        checker.fail("listed token " + std::to_string(kListed[i]), "sm90", "the state depends on what follows");
      }
    }
    if (!same(clean.o, again.o) || !same(clean.pool, again.pool) || !same(clean.h, again.h) ||
        !same(clean.checkpoints, again.checkpoints)) {
      checker.fail("again", "sm90", "the bits differ");
    }
  }
  return checker.finish();
}

// A sequence in a batch that fills the card has the bits that it has alone, and those of a few of its heads alone.
inline int64_t test_sm90_batch(const Settings& settings, Arena& arena) {
  Checker checker("bits depend on neither batch nor heads, sm90", settings, arena, "sm90");
  Random random(23);
  for (const DType type : {DType::kBFloat16, DType::kFloat16}) {
    Shape s;
    s.dtype = type;
    s.Hq = 4;
    s.Hv = 8;
    s.K = s.V = 128;
    s.cu_seqlens = {0};
    for (int n = 0; n < 40; ++n) s.cu_seqlens.push_back(s.cu_seqlens.back() + random.integer(1, 200));
    s.T = s.cu_seqlens.back();
    Features f;
    f.initial_state = f.final_state = true;
    f.cp_mode = FLASH_QLA_CP_OFF;
    ForwardCall batch;
    batch.draw(s, f, PoolFeatures{}, false, random);
    checker.run("batch", batch, "sm90");
    for (const int64_t n : {0, 7, 39}) {
      const int64_t begin = s.cu_seqlens[static_cast<size_t>(n)], end = s.cu_seqlens[static_cast<size_t>(n) + 1];
      for (const int64_t heads : {8, 2}) {  // value heads from 4 on; a whole group of one key head, or all
        const int64_t first = heads == 8 ? 0 : 4;
        ForwardCall alone = batch;
        const auto cut = [&](Buffer& x, int64_t head0, int64_t head1) {
          x = x.slice(1, begin, end);
          x = x.slice(2, head0, head1);
        };
        cut(alone.in.q, first / 2, (first + heads) / 2);
        cut(alone.in.k, first / 2, (first + heads) / 2);
        for (Buffer* x : {&alone.in.v, &alone.in.g, &alone.in.beta, &alone.o}) cut(*x, first, first + heads);
        for (Buffer* x : {&alone.in.initial_state, &alone.final_state}) {
          *x = x->slice(0, n, n + 1);
          *x = x->slice(1, first, first + heads);
        }
        Buffer o = alone.o, state = alone.final_state;
        alone.in.shape.T = end - begin;
        alone.in.shape.Hq = heads / 2;
        alone.in.shape.Hv = heads;
        alone.in.shape.cu_seqlens.clear();
        alone.in.cu_seqlens = Buffer();
        const std::string what = "sequence " + std::to_string(n) + ", " + std::to_string(heads) + " heads";
        checker.run(what, alone, "sm90");
        if (!same(alone.o, o)) checker.fail(what, "sm90", "o differs");
        if (!same(alone.final_state, state)) checker.fail(what, "sm90", "state differs");
      }
    }
  }
  return checker.finish();
}

// l2norm in the call: rows of many lengths, zeros among them, in shapes whose rows are walked differently (key heads
// below, at and above the rows that are read at once; batch rows of a few tokens), whole heads and shared ones. A
// sequence with NaN in q and k leaves the others alone.
inline int64_t test_sm90_norms(const Settings& settings, Arena& arena) {
  Checker checker("l2norm in the call, sm90", settings, arena, "sm90");
  Random random(settings.seed + 37);
  struct Rows {
    int64_t Hq, Hv, B, T;  // B 0: sequences of several lengths, B * T tokens otherwise
  };
  int64_t number = 0;
  for (const Rows& rows : {Rows{2, 8, 0, 0}, Rows{16, 16, 2, 100}, Rows{24, 24, 4, 70}, Rows{1, 2, 40, 3},
                           Rows{3, 6, 0, 0}, Rows{5, 5, 7, 13}}) {
    Shape s;
    s.dtype = number % 2 == 0 ? DType::kBFloat16 : DType::kFloat16;
    s.Hq = rows.Hq;
    s.Hv = rows.Hv;
    s.B = std::max<int64_t>(rows.B, 1);
    s.T = rows.T;
    s.K = s.V = 128;
    if (rows.B == 0) {
      s.cu_seqlens = {0};
      for (const int64_t length : {64, 65, 63, 1, 0, 200, 128}) s.cu_seqlens.push_back(s.cu_seqlens.back() + length);
      while (s.cu_seqlens.size() < 16) s.cu_seqlens.push_back(s.cu_seqlens.back() + random.integer(1, 200));
      s.T = s.cu_seqlens.back() + 9;
    }
    Features f;
    f.l2norm = f.final_state = f.initial_state = true;
    f.strided = number == 4;
    ForwardCall call;
    call.draw(s, f, PoolFeatures{}, false, random);
    for (Buffer* x : {&call.in.q, &call.in.k}) {
      const Tensor drawn = x->host();
      double length = 1.0;
      x->fill([&](int64_t b, int64_t t, int64_t head, int64_t l) {
        if (l == 0) length = random.chance(0.05) ? 0.0 : std::exp2(random.uniform(-12.0, 7.0));
        return length * load(drawn, offset_of(drawn, b, t, head, l));
      });
    }
    const std::string what = "case " + std::to_string(number);
    checker.check(what + describe(s, f), call, "sm90", "cuda_reference", FLASH_QLA_CUDA);
    if (number++ > 0) continue;
    ForwardCall clean = call, dirty = call;
    for (Buffer* x : {&dirty.in.q, &dirty.in.k}) {
      const Tensor drawn = x->host();
      x->fill([&](int64_t b, int64_t t, int64_t head, int64_t l) {
        return t == s.cu_seqlens[6] || t == s.cu_seqlens[7] - 1 ? static_cast<double>(NAN)
                                                                : load(drawn, offset_of(drawn, b, t, head, l));
      });
    }
    for (ForwardCall* one : {&clean, &dirty}) checker.run(what, *one, "sm90");
    for (int64_t n = 0; n + 1 < static_cast<int64_t>(s.cu_seqlens.size()); ++n) {
      const auto part = [&](Buffer& x, int dim, int64_t begin, int64_t end) {
        return x.slice(dim, begin, end).bytes();
      };
      const int64_t begin = s.cu_seqlens[static_cast<size_t>(n)], end = s.cu_seqlens[static_cast<size_t>(n) + 1];
      const bool same_bits = part(clean.o, 1, begin, end) == part(dirty.o, 1, begin, end) &&
                             part(clean.final_state, 0, n, n + 1) == part(dirty.final_state, 0, n, n + 1);
      if (same_bits == (n == 6)) checker.fail(what, "sm90", "NaN in q and k: sequence " + std::to_string(n));
    }
  }
  return checker.finish();
}

// A call as the library sees it before it runs: shapes, and this device.
inline ForwardArguments arguments_for_sm90(const ForwardCall& call) {
  ForwardCall copy = call;
  ForwardArguments args = copy.arguments([](Buffer& b) { return b.present() ? b.host() : Tensor{}; });
  args.options.path = "sm90";
  args.options.device_type = FLASH_QLA_CUDA;
  check_cuda(cudaGetDevice(&args.options.device_index), "cudaGetDevice");
  return args;
}

// The Hopper forward against the oracle: every option, on the drawn calls that it takes. What it leaves to cuda_generic
// are outputs in odd places: fewer than half of all calls, or the group fails.
inline int64_t test_sm90_forward(const Settings& settings, Arena& arena) {
  Checker checker("forward, sm90", settings, arena, "sm90");
  const auto draw = [&](Random& r) {
    const DType type = r.chance(0.5) ? DType::kBFloat16 : DType::kFloat16;
    Shape s = draw_shape(type, settings.small ? 140 : 400, settings.largest_state(), r);
    s.K = s.V = 128;
    ForwardCall call;
    call.draw(s, draw_features(type, r), draw_pool_features(false, !s.cu_seqlens.empty(), r), false, r);
    return call;
  };
  int64_t drawn = 0, taken = 0;
  for_each_case(settings, settings.cases, draw, [&](const std::string& what, const ForwardCall& call) {
    ++drawn;
    if (!ChunkForward::can_implement(arguments_for_sm90(call)).ok()) return;
    ++taken;
    checker.check(what, call, "sm90", "cuda_reference", FLASH_QLA_CUDA);
  });
  if (2 * taken < drawn) checker.fail("can_implement", "sm90", "takes too few calls");
  return checker.finish();
}

// Sequences of one token without a state before it: o = P V' with V' = beta v, of which beta's rounding is undone in P.
// Against these very roundings, not against the oracle: what is left is an ulp here and there, where the sum of q k
// went the other way.
inline int64_t test_sm90_single_tokens(const Settings& settings, Arena& arena) {
  Checker checker("single tokens, sm90", settings, arena, "sm90");
  Random random(19);
  Shape s;
  s.dtype = DType::kBFloat16;
  s.B = 40;
  s.T = 1;
  s.Hq = 2;
  s.Hv = 4;
  s.K = s.V = 128;
  ForwardCall call;
  call.draw(s, Features{}, PoolFeatures{}, false, random);
  checker.run("forward", call, "sm90");
  Buffer expected(s.dtype, {s.B, s.T, s.Hv, s.V}), word(s.dtype, {1});
  const auto rounded = [&](double x) {
    word.fill([&](int64_t, int64_t, int64_t, int64_t) { return x; });
    return load(word.host(), 0);
  };
  const Tensor q = call.in.q.host(), k = call.in.k.host(), v = call.in.v.host(), beta = call.in.beta.host();
  double score = 0.0, strength = 0.0;
  expected.fill([&](int64_t b, int64_t t, int64_t head, int64_t column) {
    if (column == 0) {
      double dot = 0.0;
      for (int64_t i = 0; i < s.K; ++i) {
        dot += load(q, offset_of(q, b, t, head / 2, i)) * load(k, offset_of(k, b, t, head / 2, i));
      }
      const double given = load(beta, offset_of(beta, b, t, head));
      strength = rounded(given);
      score = rounded(dot / std::sqrt(static_cast<double>(s.K)) * (strength != 0.0 ? given / strength : 1.0));
    }
    return score * rounded(strength * load(v, offset_of(v, b, t, head, column)));
  });
  const double difference = relative_error(call.o, expected, 2);
  if (!(difference <= 5e-4)) checker.fail("forward", "sm90", "o differs by " + std::to_string(difference));
  return checker.finish();
}

// Heads of a few tokens in all, most of them without a state before: little averages out (docs/numerics.md). With the
// rounding of beta left in three in a hundred heads of two tokens are past the bound. One token: above.
inline int64_t test_sm90_few_tokens(const Settings& settings, Arena& arena) {
  Checker checker("few tokens, sm90", settings, arena, "sm90");
  const auto draw = [&](Random& r) {
    static const std::vector<int64_t> kLengths = {2, 2, 2, 3, 5, 17, 32};
    Shape s;
    s.dtype = DType::kBFloat16;
    s.T = r.pick(kLengths);
    s.Hq = 8;
    s.Hv = 16;
    s.K = s.V = 128;
    Features f;
    f.initial_state = r.chance(0.2);
    f.final_state = true;
    f.strong_decay = r.chance(0.3);
    f.cp_mode = r.chance(0.5) ? FLASH_QLA_CP_OFF : FLASH_QLA_CP_AUTO;
    PoolFeatures pf;
    pf.h = r.chance(0.2);
    pf.A = r.chance(0.2);
    ForwardCall call;
    call.draw(s, f, pf, false, r);
    return call;
  };
  for_each_case(settings, settings.cases / 3, draw, [&](const std::string& what, const ForwardCall& call) {
    checker.check(what, call, "sm90", "cuda_reference", FLASH_QLA_CUDA);
  });
  return checker.finish();
}

// Where everything decays strongly a token's own share is most of o, and of the state. What three roundings leave of it
// in o is 2.9e-3 (P, V' and o), four 3.2e-3, over some 1,300 tokens a head within 2 %. The oracle's o is rounded as
// well: 3.3e-3 and 3.6e-3 from it. The state has one.
inline int64_t test_sm90_strong_decay(const Settings& settings, Arena& arena) {
  Checker checker("strong decay, sm90", settings, arena, "sm90");
  Random random(23);
  for (const flash_qla_cp_mode cp_mode : {FLASH_QLA_CP_AUTO, FLASH_QLA_CP_OFF}) {
    for (const bool whole : {false, true}) {  // a multiprocessor to a head, more heads than these; else two
      for (const bool saved : {false, true}) {
        Shape s;
        s.dtype = DType::kBFloat16;
        s.B = whole ? 5 : 1;
        s.T = whole ? 256 : 1280;
        s.Hq = whole ? 16 : 1;
        s.Hv = 2 * s.Hq;
        s.K = s.V = 128;
        Features f;
        f.final_state = true;
        f.cp_mode = cp_mode;
        PoolFeatures pf;
        pf.h = pf.A = saved;
        ForwardCall call;
        call.draw(s, f, pf, false, random);
        call.in.g.fill([&](int64_t, int64_t, int64_t, int64_t) { return -8.0 * random.uniform(); });
        const std::string what = std::string(cp_mode == FLASH_QLA_CP_AUTO ? "auto_cp" : "auto_cp=False") +
                                 (whole ? ", whole heads" : ", two heads") + (saved ? ", saved" : "");
        checker.check(what, call, "sm90", "cuda_reference", FLASH_QLA_CUDA, {.exact_bound = 3.47e-3});
      }
    }
  }
  return checker.finish();
}

// Keys that make the triangular inverse grow. The bound is twice the error of an emulation where the case is
// ill-conditioned for any kernel of the dtype.
inline int64_t test_sm90_keys(const Settings& settings, Arena& arena) {
  Checker checker("correlated keys, sm90", settings, arena, "sm90");
  struct Keys {
    const char* name;
    double common, own, length;  // of a shared direction, of one's own, of the whole key
  };
  for (const DType type : {DType::kBFloat16, DType::kFloat16}) {
    for (const Keys& keys :
         {Keys{"random", 0, 1, 1}, Keys{"correlated", 1, 0.3, 1}, Keys{"identical", 1, 0, 1}, Keys{"long", 0, 1, 8}}) {
      for (const double beta : {0.5, 0.98, 1.0, 2.0}) {
        if (settings.small && beta != 0.98) continue;  // the others take the same way through the kernel
        for (const bool decays : {false, true}) {
          Random random(29);
          Shape s;
          s.dtype = type;
          s.T = 200;
          s.Hq = 1;
          s.Hv = 2;
          s.K = s.V = 128;
          Features f;
          f.initial_state = f.final_state = true;
          ForwardCall call;
          call.draw(s, f, PoolFeatures{}, false, random);
          std::vector<double> direction;
          for (int64_t i = 0; i < s.K; ++i) direction.push_back(random.normal());
          call.in.k.fill([&](int64_t, int64_t, int64_t, int64_t i) {
            return keys.common * direction[static_cast<size_t>(i)] + keys.own * random.normal();
          });
          Inputs::scale_rows(call.in.k);
          const Tensor k = call.in.k.host();
          call.in.k.fill([&](int64_t i, int64_t j, int64_t h, int64_t l) {
            return keys.length * load(k, offset_of(k, i, j, h, l));
          });
          call.in.beta.fill([&](int64_t, int64_t, int64_t, int64_t) { return beta / (keys.length * keys.length); });
          if (!decays) call.in.g.fill([](int64_t, int64_t, int64_t, int64_t) { return 0.0; });
          char what[96];
          std::snprintf(what, sizeof(what), "%s keys, %s, beta %g%s", keys.name,
                        type == DType::kBFloat16 ? "bf16" : "fp16", beta, decays ? ", decay" : "");
          ForwardCall expected = call;
          EmulatedErrors emulated = emulate(call);
          const std::string refused = run_call(expected, "cuda_reference", FLASH_QLA_CUDA, arena);
          if (!refused.empty()) checker.fail(what, "cuda_reference", refused);
          checker.run(what, call, "sm90");
          for (const bool state : {false, true}) {
            const auto error = [&](ForwardCall& c) {
              return state ? relative_error(c.final_state, expected.final_state, 1)
                           : relative_error(c.o, expected.o, 2);
            };
            const double got = error(call), yardstick = emulated[state ? "state" : "o"],
                         most = std::max(5e-3, 2.0 * yardstick);
            std::printf("  %-40s %-5s %.2e, emulation %.2e\n", what, state ? "state" : "o", got, yardstick);
            if (!(got <= most)) {
              checker.fail(what, "sm90",
                           (state ? "the state" : "o") + std::string(" differs by ") + std::to_string(got) +
                               " (at most " + std::to_string(most) + ")");
            }
          }
        }
      }
    }
  }
  return checker.finish();
}

// NaN and infinity in q, k, v, g and beta of one sequence, side by side with finite ones whose last chunk is not full.
inline int64_t test_sm90_nan(const Settings& settings, Arena& arena) {
  Checker checker("NaN stays in its sequence, sm90", settings, arena, "sm90");
  Random random(7);
  for (const double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    Shape s;
    s.dtype = DType::kBFloat16;
    s.T = 333;
    s.Hv = 2;
    s.K = s.V = 128;
    s.cu_seqlens = {0, 70, 133, 260, 261, 333};
    Features f;
    f.final_state = true;
    f.initial_state = true;
    ForwardCall clean;
    clean.draw(s, f, PoolFeatures{}, false, random);
    ForwardCall dirty = clean;
    // Sequences 1 and 3 alone: the first and the last token of one, the only token of the other.
    const auto spoil = [&](Buffer& x) {
      const Tensor t = x.host();
      x.fill([&](int64_t i, int64_t j, int64_t k, int64_t l) {
        return j == 70 || j == 132 || j == 260 ? bad : load(t, offset_of(t, i, j, k, l));
      });
    };
    for (Buffer* x : {&dirty.in.q, &dirty.in.k, &dirty.in.v, &dirty.in.g, &dirty.in.beta}) spoil(*x);
    for (ForwardCall* call : {&clean, &dirty}) {
      checker.run("forward", *call, "sm90");
    }
    const auto same_part = [&](Buffer& a, Buffer& b, int dim, int64_t begin, int64_t end) {
      return a.slice(dim, begin, end).bytes() == b.slice(dim, begin, end).bytes();
    };
    for (const int64_t n : {0, 2, 4}) {
      const size_t i = static_cast<size_t>(n);
      if (!same_part(clean.o, dirty.o, 1, s.cu_seqlens[i], s.cu_seqlens[i + 1])) {
        checker.fail("sequence " + std::to_string(n), "sm90", "o depends on a neighbour");
      }
      if (!same_part(clean.final_state, dirty.final_state, 0, n, n + 1)) {
        checker.fail("sequence " + std::to_string(n), "sm90", "the final state depends on a neighbour");
      }
    }
  }
  return checker.finish();
}

// bf16 numbers of about unit norm in a row of 128, made on the device.
__global__ void fill_rows_kernel(uint16_t* data, int64_t n, uint32_t seed) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    uint64_t x = (static_cast<uint64_t>(i) + 1) * 0x9e3779b97f4a7c15ull + seed;
    x ^= x >> 31;
    x *= 0xbf58476d1ce4e5b9ull;
    const float value = (static_cast<float>(x >> 40) * 0x1p-24f - 0.5f) * 0.3f;
    data[i] = static_cast<uint16_t>(__float_as_uint(value) >> 16);
  }
}

// More sequences than a grid dimension other than the first holds, and elements past the 2^31st.
inline int64_t test_sm90_large(const Settings& settings, Arena& arena) {
  Checker checker("large, sm90", settings, arena, "sm90");
  Random random(31);
  Shape many;
  many.T = 65536;
  many.Hv = 2;
  many.K = many.V = 128;
  many.dtype = DType::kBFloat16;
  many.cu_seqlens.resize(65537);
  std::iota(many.cu_seqlens.begin(), many.cu_seqlens.end(), 0);
  ForwardCall call;
  call.draw(many, Features{}, PoolFeatures{}, false, random);
  checker.check("65,536 sequences of one token", call, "sm90", "cuda_reference", FLASH_QLA_CUDA);

  // The last of two sequences begins past element 2^31 of v and o. Alone it must give the same bits.
  arena.reset();
  constexpr int64_t kHq = 8, kHv = 128, kDim = 128, kFirst = (int64_t{1} << 17) + 5, kLast = 300,
                    kTokens = kFirst + kLast;
  const auto take = [&](int64_t heads, uint32_t seed) {
    const Tensor t = tensor(arena.take(static_cast<size_t>(kTokens * heads * kDim * 2)), DType::kBFloat16,
                            {1, kTokens, heads, kDim});
    fill_rows_kernel<<<1024, 256>>>(static_cast<uint16_t*>(t.data), kTokens * heads * kDim, seed);
    return t;
  };
  ForwardArguments whole;
  whole.q = take(kHq, 1);
  whole.k = take(kHq, 2);
  whole.v = take(kHv, 3);
  whole.o = take(kHv, 4);
  const auto take_states = [&](int64_t rows) {
    return tensor(arena.take(static_cast<size_t>(rows * kHv * kDim * kDim * 4)), DType::kFloat32,
                  {rows, kHv, kDim, kDim});
  };
  whole.final_state = take_states(2);
  const int32_t offsets[] = {0, kFirst, kTokens};
  whole.cu_seqlens = tensor(arena.take(sizeof(offsets)), DType::kInt32, {3});
  check_cuda(cudaMemcpy(whole.cu_seqlens.data, offsets, sizeof(offsets), cudaMemcpyHostToDevice), "cudaMemcpy");
  whole.options.path = "sm90";
  whole.options.device_type = FLASH_QLA_CUDA;
  whole.options.cp_mode = FLASH_QLA_CP_OFF;
  check_cuda(cudaGetDevice(&whole.options.device_index), "cudaGetDevice");
  checker.count(path_of(ForwardCall(), whole));
  ForwardArguments alone = whole;
  for (Tensor* t : {&alone.q, &alone.k, &alone.v, &alone.o}) {
    t->shape[1] = kLast;
    t->data = static_cast<uint16_t*>(t->data) + kFirst * t->stride[1];
  }
  alone.o.data = arena.take(static_cast<size_t>(kLast * kHv * kDim * 2));
  alone.final_state = take_states(1);
  alone.cu_seqlens = Tensor{};
  for (const ForwardArguments* args : {&whole, &alone}) {
    size_t bytes = 0;
    Status status = ChunkForward::workspace_size(*args, &bytes);
    if (status.ok()) status = ChunkForward::run(*args, arena.take(bytes), bytes);
    if (!status.ok()) checker.fail("elements past 2^31", "sm90", status.message());
  }
  auto* count = static_cast<unsigned long long*>(arena.take(sizeof(unsigned long long)));
  check_cuda(cudaMemset(count, 0, sizeof(*count)), "cudaMemset");
  const int64_t values = kLast * kHv * kDim, states = kHv * kDim * kDim;
  count_different_kernel<<<64, 256>>>(
      reinterpret_cast<const uint32_t*>(static_cast<uint16_t*>(whole.o.data) + kFirst * kHv * kDim),
      static_cast<const uint32_t*>(alone.o.data), values / 2, count);
  count_different_kernel<<<64, 256>>>(static_cast<const uint32_t*>(whole.final_state.data) + states,
                                      static_cast<const uint32_t*>(alone.final_state.data), states, count);
  unsigned long long different = 0;
  check_cuda(cudaMemcpy(&different, count, sizeof(different), cudaMemcpyDeviceToHost), "sm90, elements past 2^31");
  if (different > 0) {
    checker.fail("elements past 2^31", "sm90", std::to_string(different) + " words differ from the slice alone");
  }
  return checker.finish();
}

}  // namespace flash_qla::testing
