// The sizes that a program's calls have had, path by path: which tails of chunks, tiles and rows a run has looked at.
#pragma once

#include <cstdio>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/problem.h"

namespace flash_qla::testing {

struct Tails {
  std::set<int64_t> last_chunks;   // tokens in the last chunk of a sequence, 1 to 64; 0: an empty sequence
  std::set<int64_t> chunks;        // chunks of a sequence
  std::set<int64_t> K, V, groups;  // groups: value heads to a key head
  std::set<std::string> dtypes;
  int64_t calls = 0, strided = 0, padded = 0;  // padded: tokens after the last sequence

  static std::map<std::string, Tails>& of_paths() {
    static std::map<std::string, Tails> all;
    return all;
  }

  template <class Inputs>
  void add(const Inputs& in) {
    const auto& s = in.shape;
    ++calls;
    strided += in.features.strided;
    K.insert(s.K);
    V.insert(s.V);
    groups.insert(s.Hv / s.Hq);
    dtypes.insert(s.dtype == DType::kBFloat16  ? "bf16"
                  : s.dtype == DType::kFloat16 ? "fp16"
                  : s.dtype == DType::kFloat32 ? "fp32"
                                               : "fp64");
    const std::vector<int64_t> bounds = s.cu_seqlens.empty() ? std::vector<int64_t>{0, s.T} : s.cu_seqlens;
    padded += bounds.back() < s.T;
    for (size_t n = 0; n + 1 < bounds.size(); ++n) {
      const int64_t length = bounds[n + 1] - bounds[n];
      last_chunks.insert(length == 0 ? 0 : (length - 1) % kChunkSize + 1);
      chunks.insert(ceil_div(length, kChunkSize));
    }
  }

  static void print() {
    for (const auto& [path, t] : of_paths()) {
      std::printf("tails of %s: %lld calls, %lld strided, %lld with tokens after the last sequence; ", path.c_str(),
                  static_cast<long long>(t.calls), static_cast<long long>(t.strided), static_cast<long long>(t.padded));
      const auto list = [](const char* what, const std::set<int64_t>& values) {
        std::printf("%s", what);
        for (const int64_t value : values) std::printf(" %lld", static_cast<long long>(value));
      };
      list("tokens of the last chunk", t.last_chunks);
      list("; chunks", t.chunks);
      list("; K", t.K);
      list("; V", t.V);
      list("; value heads to a key head", t.groups);
      std::printf(";");
      for (const std::string& name : t.dtypes) std::printf(" %s", name.c_str());
      std::printf("\n");
    }
  }
};

}  // namespace flash_qla::testing
