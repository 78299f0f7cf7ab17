// One stream of packed sequences that is cut over ranks, as the caller of each rank computes it
// (docs/several_cards.md): cut, links, links side by side, combine, call. All ranks are on one device, each with
// tensors of its own; results come together in the tensors of a call over the whole stream, so that the tests of such a
// call take these as well.
#pragma once

#include <memory>

#include "calls.h"
#include "core/status.h"
#include "cuda/sm90/context_parallel/carry.h"
#include "pieces.h"

namespace flash_qla::testing {

struct RankedOptions {
  int64_t ranks = 2;
  bool zigzag = false;              // a rank has parts r and 2 ranks - 1 - r, else part r
  std::vector<int64_t> bounds;      // of the parts in the stream's tokens, from 0 to all of them
  bool carries = true;              // a rank's forward goes on from what its links have left
  bool plans = false;               // ... and has to be planned for that: a run fails where it is not
  bool in_place = false;            // final states are written over initial ones (float32)
  bool gives_A = false;             // a rank's backward gets the forward's A
  const char* link_path = nullptr;  // null: the call's
  uint8_t spoil = 0;                // not 0: what the bytes of the carry's matrices are overwritten by
  std::shared_ptr<Pieces> pieces;
  std::shared_ptr<int64_t> carried_heads;  // of the run before, all parts together

  int64_t parts() const { return zigzag ? 2 : 1; }
  int64_t part(int64_t rank, int64_t p) const { return p == 0 ? rank : 2 * ranks - 1 - rank; }
  // The oracle has the stream as one.
  bool is_one_call(const flash_qla_options& options) const {
    return options.device_type == FLASH_QLA_CPU ||
           (options.path != nullptr && std::string(options.path) == "cuda_reference");
  }
};

// The ranks of one run.
class Ranks {
 public:
  Ranks(const RankedOptions& options, const Inputs& in, const flash_qla_options& call, cudaStream_t stream)
      : o_(options), s_(in.shape), call_(call), stream_(stream), ranks_(static_cast<size_t>(o_.ranks)) {
    L_ = o_.ranks * o_.parts();
    row_ = s_.K * (s_.V + s_.K) + 4;
    forward_links_ = take("links", DType::kFloat32, {L_, s_.Hv, row_});
  }

  // Cuts, and each rank's copy of its tokens and states.
  template <class Arguments>
  Status cut(const Arguments& whole) {
    cu_seqlens_ = whole.cu_seqlens;
    for (int64_t r = 0; r < o_.ranks; ++r) {
      Rank& rank = ranks_[static_cast<size_t>(r)];
      FLASH_QLA_RETURN_IF_ERROR(cut_rank(r, &rank));
      rank.q = tokens(r, "q", whole.q);
      rank.k = tokens(r, "k", whole.k);
      rank.v = tokens(r, "v", whole.v);
      rank.g = tokens(r, "g", whole.g);
      rank.beta = tokens(r, "beta", whole.beta);
      rank.h0 = states(r, "h0", whole.initial_state, false);
    }
    return Status();
  }

  template <class Arguments>
  Status links(const Arguments& whole) {
    for (int64_t r = 0; r < o_.ranks; ++r) {
      Rank& rank = ranks_[static_cast<size_t>(r)];
      ChunkSummaryArguments args;
      common(whole, rank, &args);
      args.v = rank.v;
      args.initial_state = rank.h0;
      args.leaves = rank.leaves;
      args.S = view(forward_links_, r, 0, s_.V);
      args.M = view(forward_links_, r, s_.K * s_.V, s_.K);
      args.kind = kinds(forward_links_, r);
      if (o_.carries) {
        int64_t floats = 0;
        FLASH_QLA_RETURN_IF_ERROR(ChunkSummary::carry_size(args, &floats));
        if (floats == 0) return make_status(FLASH_QLA_NOT_IMPLEMENTED, "the path of the links makes no carry");
        rank.carry = take(name(r, "carry"), DType::kFloat32, {o_.parts(), floats});
        args.carry = rank.carry;
      }
      FLASH_QLA_RETURN_IF_ERROR(run_with_pieces<ChunkSummary>(args, name(r, "links"), *o_.pieces, stream_));
      if (o_.carries && o_.spoil != 0) {
        const int64_t header = cuda::sm90::cp::carry_header_bytes(o_.parts() * s_.Hv);
        check_cuda(cudaMemsetAsync(static_cast<char*>(rank.carry.data) + header, o_.spoil,
                                   static_cast<size_t>(o_.parts() * rank.carry.shape[1] * 4 - header), stream_),
                   "cudaMemsetAsync");
      }
    }
    for (int64_t r = 0; r < o_.ranks; ++r) {
      Rank& rank = ranks_[static_cast<size_t>(r)];
      FLASH_QLA_RETURN_IF_ERROR(combine(r, forward_links_, rank.enters, false, &rank.entering));
    }
    return Status();
  }

  // o and final states, into those of `whole` where these are wanted; A: each rank's, for its backward.
  Status forward(const ForwardArguments& whole, bool keeps_A) {
    std::vector<int> found(static_cast<size_t>(s_.N()), 0);
    for (int64_t r = 0; r < o_.ranks; ++r) {
      Rank& rank = ranks_[static_cast<size_t>(r)];
      ForwardArguments args = whole;
      args.options.path = call_.path;
      args.q = rank.q;
      args.k = rank.k;
      args.v = rank.v;
      args.g = rank.g;
      args.beta = rank.beta;
      args.cu_seqlens = rank.offsets;
      args.initial_state = rank.h0;
      args.entering_rows = rank.entering_rows;
      args.entering_state = rank.entering;
      args.carry = rank.carry;
      args.o = take(name(r, "o"), s_.dtype, {1, rank.tokens, s_.Hv, s_.V});
      if (keeps_A) args.A = rank.A = take(name(r, "A"), s_.dtype, {1, rank.tokens, s_.Hv, kChunkSize});
      if (whole.final_state.ndim > 0) {
        args.final_state = o_.in_place ? rank.h0 : take_states(r, "final_state", whole.final_state);
      }
      if (o_.plans) {
        const std::string text = ChunkForward::explain(args);
        if (text.find("split: planned") == std::string::npos) {
          return make_status(FLASH_QLA_NOT_IMPLEMENTED, "rank %d is not planned: %s", static_cast<int>(r),
                             text.c_str());
        }
      }
      FLASH_QLA_RETURN_IF_ERROR(run_with_pieces<ChunkForward>(args, name(r, "forward"), *o_.pieces, stream_));
      put_tokens(r, args.o, whole.o);
      if (whole.final_state.ndim > 0) put_states(rank.ends, args.final_state, whole.final_state, &found);
    }
    return whole.final_state.ndim > 0 ? each_once(found, "ends") : Status();
  }

  Status backward(const BackwardArguments& whole) {
    const Tensor links = take("backward links", DType::kFloat32, {L_, s_.Hv, row_});
    for (int64_t r = 0; r < o_.ranks; ++r) {
      Rank& rank = ranks_[static_cast<size_t>(r)];
      rank.d_o = tokens(r, "do", whole.d_o);
      rank.dht = states(r, "dht", whole.dht, true);
      ChunkSummaryBackwardArguments args;
      common(whole, rank, &args);
      args.q = rank.q;
      args.d_o = rank.d_o;
      args.dht = rank.dht;
      args.A = rank.A;
      args.enters = rank.enters;
      args.forward_kind = kinds(forward_links_, r);
      args.R = view(links, r, 0, s_.V);
      args.kind = kinds(links, r);
      FLASH_QLA_RETURN_IF_ERROR(
          run_with_pieces<ChunkSummaryBackward>(args, name(r, "backward links"), *o_.pieces, stream_));
    }
    std::vector<int> found(static_cast<size_t>(s_.N()), 0);
    for (int64_t r = 0; r < o_.ranks; ++r) {
      Rank& rank = ranks_[static_cast<size_t>(r)];
      Tensor leaving{};
      FLASH_QLA_RETURN_IF_ERROR(combine(r, links, rank.leaves, true, &leaving));
      BackwardArguments args = whole;
      args.options.path = call_.path;
      args.q = rank.q;
      args.k = rank.k;
      args.v = rank.v;
      args.g = rank.g;
      args.beta = rank.beta;
      args.A = rank.A;
      args.d_o = rank.d_o;
      args.dht = rank.dht;
      args.cu_seqlens = rank.offsets;
      args.initial_state = rank.h0;
      args.entering_rows = rank.entering_rows;
      args.entering_state = rank.entering;
      args.leaving_rows = rank.leaving_rows;
      args.leaving_dht = leaving;
      const std::pair<const char*, Tensor*> outputs[] = {
          {"dq", &args.dq}, {"dk", &args.dk}, {"dv", &args.dv}, {"dg", &args.dg}, {"dbeta", &args.dbeta}};
      std::vector<std::pair<Tensor, Tensor>> results;
      for (const auto& [what, t] : outputs) {
        if (t->ndim == 0) continue;
        std::vector<int64_t> shape(t->shape, t->shape + t->ndim);
        shape[1] = rank.tokens;
        const Tensor own = take(name(r, what), dtype(*t), shape);
        results.push_back({own, *t});
        *t = own;
      }
      if (whole.dh0.ndim > 0) args.dh0 = take_states(r, "dh0", whole.dh0);
      FLASH_QLA_RETURN_IF_ERROR(run_with_pieces<ChunkBackward>(args, name(r, "backward"), *o_.pieces, stream_));
      for (const auto& [own, all] : results) put_tokens(r, own, all);
      if (whole.dh0.ndim > 0) put_states(rank.starts, args.dh0, whole.dh0, &found);
    }
    return whole.dh0.ndim > 0 ? each_once(found, "starts") : Status();
  }

  // Heads of all parts whose chains of segments the forward can go on from.
  int64_t carried_heads() const {
    int64_t count = 0;
    for (const Rank& rank : ranks_) {
      std::vector<cuda::sm90::cp::LinkChain> chains(static_cast<size_t>(o_.parts() * s_.Hv));
      check_cuda(cudaMemcpy(chains.data(), rank.carry.data, chains.size() * sizeof(chains[0]), cudaMemcpyDeviceToHost),
                 "cudaMemcpy");
      for (const auto& chain : chains) count += chain.has_cuts();
    }
    return count;
  }

 private:
  struct Rank {
    int64_t tokens = 0;
    Tensor offsets{}, starts{}, ends{}, rows{}, enters{}, leaves{}, through{}, entering_rows{}, leaving_rows{};
    Tensor q{}, k{}, v{}, g{}, beta{}, h0{}, d_o{}, dht{}, A{}, carry{}, entering{};
  };

  std::string name(int64_t r, const char* what) const { return "rank " + std::to_string(r) + " " + what; }
  Tensor take(const std::string& name, DType type, const std::vector<int64_t>& shape) const {
    return o_.pieces->tensor(name, type, shape, stream_);
  }
  Tensor take_states(int64_t r, const char* what, const Tensor& whole) const {
    return take(name(r, what), dtype(whole), {o_.parts() * s_.N(), whole.shape[1], whole.shape[2], whole.shape[3]});
  }
  void copy(const Tensor& to, int64_t to_offset, const Tensor& from, int64_t from_offset, int64_t elements) const {
    const int64_t size = size_of(dtype(to));
    if (elements == 0) return;
    check_cuda(cudaMemcpyAsync(static_cast<char*>(to.data) + to_offset * size,
                               static_cast<const char*>(from.data) + from_offset * size,
                               static_cast<size_t>(elements * size), cudaMemcpyDeviceToDevice, stream_),
               "cudaMemcpyAsync");
  }
  void copy_to_device(const Tensor& to, const std::vector<int64_t>& values) const {
    check_cuda(
        cudaMemcpyAsync(to.data, values.data(), values.size() * sizeof(int64_t), cudaMemcpyHostToDevice, stream_),
        "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

  std::pair<int64_t, int64_t> bounds(int64_t r, int64_t p) const {
    const size_t part = static_cast<size_t>(o_.part(r, p));
    return {o_.bounds[part], o_.bounds[part + 1]};
  }
  // A rank's copy of its tokens of a contiguous tensor [1, T, ...].
  Tensor tokens(int64_t r, const char* what, const Tensor& whole) const {
    if (whole.ndim == 0) return Tensor{};
    std::vector<int64_t> shape(whole.shape, whole.shape + whole.ndim);
    shape[1] = ranks_[static_cast<size_t>(r)].tokens;
    const Tensor own = take(name(r, what), dtype(whole), shape);
    int64_t place = 0;
    for (int64_t p = 0; p < o_.parts(); ++p) {
      const auto [begin, end] = bounds(r, p);
      copy(own, place * own.stride[1], whole, begin * whole.stride[1], (end - begin) * whole.stride[1]);
      place += end - begin;
    }
    return own;
  }
  void put_tokens(int64_t r, const Tensor& own, const Tensor& whole) const {
    int64_t place = 0;
    for (int64_t p = 0; p < o_.parts(); ++p) {
      const auto [begin, end] = bounds(r, p);
      copy(whole, begin * whole.stride[1], own, place * own.stride[1], (end - begin) * whole.stride[1]);
      place += end - begin;
    }
  }
  // States of all sequences by each of the rank's parts, but for those that come from a neighbour: nobody may read what
  // lies there. from_right: gradients of final states, of sequences that do not go on after the part.
  Tensor states(int64_t r, const char* what, const Tensor& whole, bool from_right) const {
    if (whole.ndim == 0) return Tensor{};
    const Tensor own = take_states(r, what, whole);
    for (int64_t p = 0; p < o_.parts(); ++p) {
      const auto [begin, end] = bounds(r, p);
      for (int64_t n = 0; n < s_.N(); ++n) {
        const int64_t first = s_.cu_seqlens[static_cast<size_t>(n)], behind = s_.cu_seqlens[static_cast<size_t>(n) + 1];
        const bool is_here = std::max(first, begin) < std::min(behind, end);
        if (is_here && (from_right ? behind > end : first < begin)) continue;
        copy(own, (p * s_.N() + n) * own.stride[0], whole, n * whole.stride[0], whole.stride[0]);
      }
    }
    return own;
  }
  void put_states(const Tensor& flags, const Tensor& own, const Tensor& whole, std::vector<int>* found) const {
    std::vector<uint8_t> here(static_cast<size_t>(o_.parts() * s_.N()));
    check_cuda(cudaMemcpyAsync(here.data(), flags.data, here.size(), cudaMemcpyDeviceToHost, stream_),
               "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    for (size_t row = 0; row < here.size(); ++row) {
      if (here[row] == 0) continue;
      const int64_t n = static_cast<int64_t>(row) % s_.N();
      ++(*found)[static_cast<size_t>(n)];
      copy(whole, n * whole.stride[0], own, static_cast<int64_t>(row) * own.stride[0], whole.stride[0]);
    }
  }
  Status each_once(const std::vector<int>& found, const char* what) const {
    for (size_t n = 0; n < found.size(); ++n) {
      if (found[n] != 1) {
        return make_status(FLASH_QLA_INVALID_VALUE, "sequence %d %s in %d parts", static_cast<int>(n), what, found[n]);
      }
    }
    return Status();
  }

  // All sequences are rows of every part, so that a row's number says whose it is.
  Status cut_rank(int64_t r, Rank* rank) {
    const int64_t P = o_.parts(), R = P * s_.N();
    std::vector<int64_t> given;
    int64_t last_part = -1;
    for (int64_t p = 0; p < P; ++p) {
      const auto [begin, end] = bounds(r, p);
      given.insert(given.end(), {begin, end});
      rank->tokens += end - begin;
      if (o_.part(r, p) == L_ - 1) last_part = p;
    }
    SequenceCutArguments args;
    args.options = call_;
    args.options.path = nullptr;
    args.cu_seqlens = cu_seqlens_;
    args.bounds = take(name(r, "bounds"), DType::kInt64, {P, 2});
    copy_to_device(args.bounds, given);
    args.last_part = last_part;
    args.all_rows = 1;
    args.local_cu_seqlens = rank->offsets = take(name(r, "offsets"), DType::kInt32, {R + 1});
    args.starts_here = rank->starts = take(name(r, "starts"), DType::kBool, {R});
    args.ends_here = rank->ends = take(name(r, "ends"), DType::kBool, {R});
    args.rows = rank->rows = take(name(r, "rows"), DType::kInt64, {P, 2});
    args.enters = rank->enters = take(name(r, "enters"), DType::kBool, {P});
    args.leaves = rank->leaves = take(name(r, "leaves"), DType::kBool, {P});
    args.through = rank->through = take(name(r, "through"), DType::kBool, {P});
    args.entering_rows = rank->entering_rows = take(name(r, "entering rows"), DType::kInt64, {P});
    args.leaving_rows = rank->leaving_rows = take(name(r, "leaving rows"), DType::kInt32, {P});
    return run_with_pieces<SequenceCut>(args, name(r, "cut"), *o_.pieces, stream_);
  }

  template <class Whole, class Arguments>
  void common(const Whole& whole, const Rank& rank, Arguments* args) const {
    args->options = call_;
    if (o_.link_path != nullptr) args->options.path = o_.link_path;
    args->k = rank.k;
    args->g = rank.g;
    args->beta = rank.beta;
    args->A_log = whole.A_log;
    args->dt_bias = whole.dt_bias;
    args->cu_seqlens = rank.offsets;
    args->rows = rank.rows;
    args->through = rank.through;
  }

  // Of links packed as one collective would send them, [L, Hv, K (V + K) + 4]: matrices [P, Hv, K, columns] of a rank,
  // and kinds.
  Tensor view(const Tensor& links, int64_t r, int64_t offset, int64_t columns) const {
    const int64_t first = r * o_.parts() * s_.Hv * row_ + offset;
    return flash_qla::tensor(static_cast<float*>(links.data) + first, DType::kFloat32,
                             {o_.parts(), s_.Hv, s_.K, columns}, {s_.Hv * row_, row_, columns, 1});
  }
  Tensor kinds(const Tensor& links, int64_t r) const {
    const int64_t first = r * o_.parts() * s_.Hv * row_ + row_ - 4;
    return flash_qla::tensor(static_cast<float*>(links.data) + first, DType::kFloat32, {o_.parts(), s_.Hv},
                             {s_.Hv * row_, row_});
  }

  Status combine(int64_t r, const Tensor& links, const Tensor& wanted, bool backward, Tensor* state) const {
    const int64_t P = o_.parts(), one = s_.Hv * row_;
    const auto all = [&](const Tensor& of, int64_t offset, int64_t columns) {
      return flash_qla::tensor(static_cast<float*>(of.data) + offset, DType::kFloat32, {L_, 1, s_.Hv, s_.K, columns},
                               {one, one, row_, columns, 1});
    };
    std::vector<int64_t> order(static_cast<size_t>(L_)), place;
    for (int64_t rank = 0; rank < o_.ranks; ++rank) {
      for (int64_t p = 0; p < P; ++p) order[static_cast<size_t>(o_.part(rank, p))] = rank * P + p;
    }
    for (int64_t p = 0; p < P; ++p) place.push_back(o_.part(r, p));
    SummaryCombineArguments args;
    args.options = call_;
    args.options.path = nullptr;
    args.S = all(links, 0, s_.V);
    args.M = all(forward_links_, s_.K * s_.V, s_.K);
    args.kind = flash_qla::tensor(static_cast<float*>(links.data) + row_ - 4, DType::kFloat32, {L_, 1, s_.Hv},
                                  {one, one, row_});
    args.order = take("order", DType::kInt64, {L_});
    copy_to_device(args.order, order);
    args.place = take(name(r, "place"), DType::kInt64, {P});
    copy_to_device(args.place, place);
    args.wanted = wanted;
    args.backward = backward;
    args.state = take(name(r, backward ? "leaving" : "entering"), DType::kFloat32, {P, 1, s_.Hv, s_.K, s_.V});
    *state = flash_qla::tensor(args.state.data, DType::kFloat32, {P, s_.Hv, s_.K, s_.V});
    return run_with_pieces<SummaryCombine>(args, name(r, "combine"), *o_.pieces, stream_);
  }

  const RankedOptions& o_;
  const Shape& s_;
  const flash_qla_options call_;
  const cudaStream_t stream_;
  int64_t L_ = 0, row_ = 0;
  Tensor forward_links_{}, cu_seqlens_{};
  std::vector<Rank> ranks_;
};

// A call over the stream's ranks, in pieces, or the one call that it is compared with.
template <class Call>
struct RankedCall : Call {
  RankedOptions ranked;

  template <class Arguments>
  Status workspace_size(const Arguments& args, size_t* bytes) const {
    if (ranked.is_one_call(args.options)) return Call::workspace_size(args, bytes);
    *bytes = Pieces::kPatternBytes;
    return Status();
  }

 protected:
  // then(ranks, stream), once the stream is cut and the links are made.
  template <class Arguments, class Then>
  Status over_ranks(const Arguments& args, void* workspace, void* stream, Then&& then) const {
    const auto own_stream = static_cast<cudaStream_t>(stream);
    ranked.pieces->begin(workspace, own_stream);
    Ranks ranks(ranked, this->in, args.options, own_stream);
    FLASH_QLA_RETURN_IF_ERROR(ranks.cut(args));
    FLASH_QLA_RETURN_IF_ERROR(ranks.links(args));
    return then(ranks, own_stream);
  }
};

// A forward over the stream's ranks.
struct RankedForward : RankedCall<ForwardCall> {
  Status run(const ForwardArguments& args, void* workspace, size_t bytes, void* stream = nullptr) const {
    if (ranked.is_one_call(args.options)) return ForwardCall::run(args, workspace, bytes, stream);
    return over_ranks(args, workspace, stream, [&](Ranks& ranks, cudaStream_t own_stream) -> Status {
      FLASH_QLA_RETURN_IF_ERROR(ranks.forward(args, ranked.gives_A));
      check_cuda(cudaStreamSynchronize(own_stream), "a forward over ranks");
      if (ranked.carries) *ranked.carried_heads = ranks.carried_heads();
      return Status();
    });
  }
};

// A backward over the stream's ranks, with the forward links that it needs.
struct RankedBackward : RankedCall<BackwardCall> {
  Status run(const BackwardArguments& args, void* workspace, size_t bytes, void* stream = nullptr) const {
    if (ranked.is_one_call(args.options)) return BackwardCall::run(args, workspace, bytes, stream);
    return over_ranks(args, workspace, stream, [&](Ranks& ranks, cudaStream_t own_stream) -> Status {
      if (ranked.gives_A) {
        ForwardArguments forward;
        forward.options = args.options;
        forward.A_log = args.A_log;
        forward.dt_bias = args.dt_bias;
        forward.o = ranked.pieces->tensor("o", in.shape.dtype, {1, in.shape.T, in.shape.Hv, in.shape.V}, own_stream);
        FLASH_QLA_RETURN_IF_ERROR(ranks.forward(forward, true));
      }
      return ranks.backward(args);
    });
  }
};

}  // namespace flash_qla::testing
