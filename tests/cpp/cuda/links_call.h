// The links of a rank's parts, forward and backward, as one call: what chunk_summary and chunk_summary_backward make of
// the same tokens, compared with what another path makes of them.
#pragma once

#include <memory>

#include "calls.h"
#include "core/status.h"
#include "pieces.h"

namespace flash_qla::testing {

struct LinkArguments {
  flash_qla_options options{};
  ForwardArguments inputs;
  Tensor d_o{}, dht{}, rows{}, leaves{}, enters{}, through{}, forward_kind{};
  Tensor S{}, M{}, kind{}, R{}, back_kind{};
};

struct LinksCall : BackwardCall {
  using Arguments = LinkArguments;
  Buffer rows, leaves, enters, through;
  Buffer forward_kind;  // absent: what the forward links say
  Buffer S, M, kind, R, back_kind;
  bool carries = false;  // the forward leaves a carry, where the library's choice of a path makes one
  bool gives_A = false;  // the backward gets the forward's A
  std::shared_ptr<Pieces> pieces;

  // rows_of_parts: first and last of each part.
  void draw_links(const Shape& s, const Features& f, const std::vector<int64_t>& rows_of_parts, Random& random) {
    BackwardCall::draw(s, f, false, true, true, random);
    const auto P = static_cast<int64_t>(rows_of_parts.size()) / 2;
    rows = Buffer(random.chance(0.5) ? DType::kInt32 : DType::kInt64, {P, 2});
    rows.fill([&](int64_t p, int64_t i, int64_t, int64_t) {
      return static_cast<double>(rows_of_parts[static_cast<size_t>(2 * p + i)]);
    });
    for (Buffer* flags : {&leaves, &enters, &through}) {
      *flags = Buffer(DType::kBool, {P});
      flags->fill([](int64_t, int64_t, int64_t, int64_t) { return 1.0; });
    }
    S = Buffer(DType::kFloat32, {P, s.Hv, s.K, s.V});
    R = Buffer(DType::kFloat32, {P, s.Hv, s.K, s.V});
    M = Buffer(DType::kFloat32, {P, s.Hv, s.K, s.K});
    kind = Buffer(DType::kFloat32, {P, s.Hv});
    back_kind = Buffer(DType::kFloat32, {P, s.Hv});
  }

  NamedBuffers inputs() {
    NamedBuffers all = BackwardCall::inputs();
    for (auto [name, buffer] : NamedBuffers{{"rows", &rows},
                                            {"leaves", &leaves},
                                            {"enters", &enters},
                                            {"through", &through},
                                            {"forward_kind", &forward_kind}}) {
      all.push_back({name, buffer});
    }
    return all;
  }
  NamedBuffers outputs() { return {{"S", &S}, {"M", &M}, {"kind", &kind}, {"R", &R}, {"back_kind", &back_kind}}; }
  NamedBuffers in_place() { return {}; }
  // A transition that is forgotten is zero, and at most e^-16 of the identity by the oracle, which forgets nothing:
  // kinds are held to what the test expects of them instead.
  double least_norm(const std::string& name) const {
    return name == "kind" || name == "back_kind" ? 1e12 : name == "M" ? 1e-3 : 0.0;
  }

  template <class View>
  LinkArguments arguments(View view) {
    LinkArguments args;
    in.set(args.inputs, view);
    args.options = args.inputs.options;
    args.d_o = view(d_o);
    args.dht = view(dht);
    args.rows = view(rows);
    args.leaves = view(leaves);
    args.enters = view(enters);
    args.through = view(through);
    args.forward_kind = view(forward_kind);
    args.S = view(S);
    args.M = view(M);
    args.kind = view(kind);
    args.R = view(R);
    args.back_kind = view(back_kind);
    return args;
  }
  // Scratch is in pieces.
  Status workspace_size(const LinkArguments&, size_t* bytes) const {
    *bytes = Pieces::kPatternBytes;
    return Status();
  }
  Status run(const LinkArguments& args, void* workspace, size_t, void* stream = nullptr) const {
    const auto own = static_cast<cudaStream_t>(stream);
    ChunkSummaryArguments forward = forward_links(args);
    ChunkSummaryBackwardArguments backward = backward_links(args);
    if (args.options.device_type == FLASH_QLA_CPU) {
      FLASH_QLA_RETURN_IF_ERROR(ChunkSummary::run(forward, nullptr, 0));
      return ChunkSummaryBackward::run(backward, nullptr, 0);
    }
    const bool is_oracle = args.options.path != nullptr && std::string(args.options.path) == "cuda_reference";
    pieces->begin(workspace, own);
    if (carries && !is_oracle) {
      int64_t floats = 0;
      FLASH_QLA_RETURN_IF_ERROR(ChunkSummary::carry_size(forward, &floats));
      if (floats == 0 && args.options.path != nullptr) {
        return make_status(FLASH_QLA_NOT_IMPLEMENTED, "the path of the links makes no carry");
      }
      if (floats > 0) forward.carry = pieces->tensor("carry", DType::kFloat32, {args.rows.shape[0], floats}, own);
    }
    const std::string kind_of = is_oracle ? "oracle " : "";
    FLASH_QLA_RETURN_IF_ERROR(run_with_pieces<ChunkSummary>(forward, kind_of + "forward", *pieces, own));
    if (gives_A && !is_oracle) {
      const Shape& s = in.shape;
      ForwardArguments call = args.inputs;
      call.options = args.options;
      call.o = pieces->tensor("o", s.dtype, {s.B, s.T, s.Hv, s.V}, own);
      call.A = backward.A = pieces->tensor("A", s.dtype, {s.B, s.T, s.Hv, kChunkSize}, own);
      FLASH_QLA_RETURN_IF_ERROR(run_with_pieces<ChunkForward>(call, "call", *pieces, own));
    }
    return run_with_pieces<ChunkSummaryBackward>(backward, kind_of + "backward", *pieces, own);
  }
  // Of the forward links; the backward's are computed by the same path or refused.
  Status explain(const LinkArguments& args, char* text, size_t size) const {
    const ChunkSummaryArguments forward = forward_links(args);
    return flash_qla_chunk_summary_explain(&forward, text, size);
  }

 private:
  ChunkSummaryArguments forward_links(const LinkArguments& args) const {
    ChunkSummaryArguments links;
    fill(args, &links);
    links.v = args.inputs.v;
    links.initial_state = args.inputs.initial_state;
    links.leaves = args.leaves;
    links.S = args.S;
    links.M = args.M;
    links.kind = args.kind;
    return links;
  }
  ChunkSummaryBackwardArguments backward_links(const LinkArguments& args) const {
    ChunkSummaryBackwardArguments links;
    fill(args, &links);
    links.q = args.inputs.q;
    links.d_o = args.d_o;
    links.dht = args.dht;
    links.enters = args.enters;
    links.forward_kind = forward_kind.present() ? args.forward_kind : args.kind;
    links.R = args.R;
    links.kind = args.back_kind;
    return links;
  }
  template <class Links>
  static void fill(const LinkArguments& args, Links* links) {
    links->options = args.options;
    links->k = args.inputs.k;
    links->g = args.inputs.g;
    links->beta = args.inputs.beta;
    links->A_log = args.inputs.A_log;
    links->dt_bias = args.inputs.dt_bias;
    links->cu_seqlens = args.inputs.cu_seqlens;
    links->rows = args.rows;
    links->through = args.through;
  }
};

}  // namespace flash_qla::testing
