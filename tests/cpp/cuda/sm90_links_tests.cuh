// The groups of cuda_generic_test about links between ranks' parts and what a forward goes on from them
// (docs/kernels/links.md), by the Hopper kernels.
#pragma once

#include "links_cases.h"
#include "sm90_stale_tests.cuh"

namespace flash_qla::testing {

// A forward goes on from what its rank's links have left: with NaN there, heads that keep their state have NaN behind
// their first segment, and heads that forget have the bits that they had.
inline int64_t test_sm90_carry_is_read(const Settings& settings, Arena& arena) {
  Checker checker("what a carry is read for, sm90", settings, arena, "sm90");
  const RankedCase few = {.name = "few tokens", .Hq = 1, .Hv = 2, .lengths = {600}, .cuts = {321}, .forced = true};
  RankedCase many = few;
  many.name = "many tokens";
  many.Hq = 2;
  many.Hv = 4;
  many.lengths = {16384};
  many.cuts = {8192};
  many.forced = false;
  for (const RankedCase& c : {few, many}) {
    if (settings.small && !c.is_small()) continue;
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      const std::string what = std::string(c.name) + ", " + name_of(dtype);
      Random random(settings.seed + 5);
      RankedForward right = draw_ranked_forward(c, dtype, kHopperRanks, settings, random), spoiled = right;
      spoiled.ranked.spoil = 0xff;
      if (!checker.run(what, right, "sm90") || !checker.run(what + ", NaN in the carry", spoiled, "sm90")) continue;
      for (int64_t head = 0; head < c.Hv; ++head) {
        Buffer with = spoiled.o.slice(2, head, head + 1), without = right.o.slice(2, head, head + 1);
        if (forgets(c.gates, head)) {
          if (!same(with, without)) {
            checker.fail(what, "sm90", "head " + std::to_string(head) + " forgets and depends on the carry");
          }
          continue;
        }
        const Tensor o = with.host();
        int64_t spoiled_tokens = 0;
        // The first rank's: its sequence goes on after it, and the last rank's links nobody reads.
        for (int64_t t = 0; t < c.cuts[0]; ++t) spoiled_tokens += std::isnan(load(o, offset_of(o, 0, t, 0, 0))) ? 1 : 0;
        if (spoiled_tokens == 0 || std::isnan(load(o, offset_of(o, 0, 0, 0, 0)))) {
          checker.fail(what, "sm90",
                       "head " + std::to_string(head) + " has NaN in " + std::to_string(spoiled_tokens) + " tokens");
        }
      }
      expect_intact(what, *right.ranked.pieces, checker);
    }
  }
  return checker.finish();
}

// A call's bits over what another one, with other gates, has left in all of its memory.
template <class Call>
void check_over_another(const std::string& what, const Call& call, const Call& other, Checker& checker) {
  Call first = call, before = other, second = call;
  for (Call* one : {&first, &before, &second}) {
    if (!checker.run(what, *one, "sm90")) return;
  }
  const NamedBuffers wanted = first.outputs(), found = second.outputs();
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i].second->bytes() != found[i].second->bytes()) {
      checker.fail(what, "sm90", wanted[i].first + " is another one after another call");
    }
  }
}

// Fails for each of the program's kernels of links that no call of the group has launched.
inline void expect_links_launched(Checker& checker) {
  const std::set<std::string> launched = launched_kernels();
  for (const std::string& name : kernels_of_the_program()) {
    if (name.compare(0, 6, "sm90::") == 0 && is_of_links(name) && launched.count(name) == 0) {
      checker.fail(name, "sm90", "no case launches it");
    }
  }
}

// Links, and forwards and backwards over ranks: all that the calls leave each other, carries too, and their scratch
// hold one thing after another before each run (pieces.h).
inline int64_t test_sm90_links_stale(const Settings& settings, Arena& arena) {
  Checker checker("links and ranks over stale memory, sm90", settings, arena, "sm90");
  forget_launches();
  const auto is_left_out = [&](int64_t number, bool is_small) {
    if (!settings.only_cases.empty()) return settings.only_cases.count(number) == 0;
    return settings.small && !is_small;
  };
  const auto on_device = [](auto& call) { call.in.features.drawn_on_device = true; };
  for (size_t i = 0; i < link_cases().size(); ++i) {
    const LinkCase& c = link_cases()[i];
    if (is_left_out(static_cast<int64_t>(i), c.tokens <= 1000)) continue;
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      Random random(settings.seed * 1000003 + i);
      LinksCall call = draw_links_call(c, dtype, kHopperRanks, settings, random);
      on_device(call);
      const std::string what = "case " + std::to_string(i) + ", links, " + c.name + ", " + name_of(dtype);
      repeat_over_stale(what, call, settings, checker, arena);
      expect_intact(what, *call.pieces, checker);
    }
  }
  constexpr int64_t kFirstRanked = 100;
  for (size_t i = 0; i < ranked_cases().size(); ++i) {
    const RankedCase& c = ranked_cases()[i];
    const int64_t number = kFirstRanked + 2 * static_cast<int64_t>(i);
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      if (!has_dtype(settings, i, dtype)) continue;
      if (!is_left_out(number, c.is_small())) {
        Random random(settings.seed * 1000003 + i);
        RankedForward call = draw_ranked_forward(c, dtype, kHopperRanks, settings, random), other = call;
        const std::string what = "case " + std::to_string(number) + ", forward, " + c.name + ", " + name_of(dtype);
        on_device(call);
        repeat_over_stale(what, call, settings, checker, arena);
        if (!settings.small && c.gates != LinkGates::kRaw) {
          set_link_gates(other.in.g, c.gates == LinkGates::kKeep ? LinkGates::kForget : LinkGates::kKeep, random);
          RankedForward again = other;
          set_link_gates(again.in.g, c.gates, random);
          again.ranked.pieces = other.ranked.pieces =
              std::make_shared<Pieces>(Arena::Pieces::kGuarded, false);  // what is there stays there
          check_over_another(what + ", after another call", again, other, checker);
        }
        expect_intact(what, *call.ranked.pieces, checker);
      }
      if (!is_left_out(number + 1, c.is_small())) {
        Random random(settings.seed * 1000003 + i);
        RankedBackward call = draw_ranked_backward(c, dtype, kHopperRanks, settings, random);
        call.ranked.gives_A = (i % 2 == 0) == (dtype == DType::kBFloat16);
        const std::string what = "case " + std::to_string(number + 1) + ", backward, " + c.name + ", " +
                                 name_of(dtype) + (call.ranked.gives_A ? ", given A" : "");
        on_device(call);
        repeat_over_stale(what, call, settings, checker, arena);
        expect_intact(what, *call.ranked.pieces, checker);
      }
    }
  }
  if (settings.only_cases.empty()) expect_links_launched(checker);
  return checker.finish();
}

}  // namespace flash_qla::testing
