#include "cuda/sm90/chunk_bwd/launch.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <utility>

#include "cuda/common/launch.h"
#include "cuda/sm90/chunk_bwd/links.h"
#include "cuda/sm90/chunk_bwd/plan.cuh"
#include "cuda/sm90/chunk_bwd/scan.cuh"
#include "cuda/sm90/chunk_bwd/traits.h"
#include "cuda/sm90/common/tensor_map.h"

namespace flash_qla::cuda::sm90::bwd {
namespace {

// dq and dk of a pair of 128 tokens and key head have the bytes of two states.
bool keeps_grads_in_outputs(const Args& p) { return p.has_dq_and_dk && p.group <= 2; }

// The longest sequence's share of all tokens. Packed sequences' lengths are not known here. Taken: a seventh more than
// the longest of N pieces has when a whole is cut at places drawn at random, (1 + 1/2 + .. + 1/N) / N of it.
double longest_share(const Args& p) {
  if (p.cu_seqlens == nullptr) return 1.0 / p.N;
  double share = 0.0;
  for (int32_t i = 1; i <= p.N; ++i) share += 1.0 / (static_cast<double>(i) * p.N);
  return std::min(1.0, p.N == 1 ? 1.0 : 1.15 * share);
}

// The share of all tokens that the longest sequence may have, for each value head, where blocks of the passes take both
// halves of V: by a chunk's 9 us times multiprocessors and value head, and 2.3 of these, 0.030 on 132 multiprocessors.
// So much more that one sequence of 29 to 33 heads is among them, which else would want room for G o A and P: measured
// as fast as the form that it had (16/32 heads, 8,192 and 32,768 tokens; docs/notebook/deleted_variants.md).
constexpr double kShareOfHead = 0.035;

// Whether a block of the passes takes both halves of V, and makes G o A and P: what two blocks would load, and another
// kernel make, it loads and makes once, and keeps no tiles in memory. But each chunk takes 2.1 us for 1.5. So it pays
// where the longest sequence's chain is not what is waited for.
bool gains_by_whole_values(const Args& p) { return longest_share(p) <= kShareOfHead * p.Hv; }

// Segments want the kernel that makes tiles before the passes: how fast states decay comes from there too. Passes that
// leave states in fp32 are of the form that does not make them.
bool takes_whole_values(const Args& p) {
  return (p.whole_values || gains_by_whole_values(p)) && p.segment_chunks == 0 && !p.exact_by_sequence;
}

int32_t pair_bound(const Args& p) {
  // A sequence of m chunks has (m + 1) / 2 pairs.
  return p.cu_seqlens == nullptr ? p.N * pairs_of(p.per_sequence) : (p.chunk_bound + p.N) / 2;
}

// Pairs times value heads up to which calls keep states in fp32: 1,000 tokens of 8 heads, and 8 MB, which is all that
// larger ones take more. Where heads are many it would cost half of a call's time.
constexpr int64_t kMostExact = 64;

bool keeps_exact(const Args& p) {
  return p.exact_by_sequence || (p.may_be_exact && !p.whole_values && int64_t{pair_bound(p)} * p.Hv <= kMostExact);
}

// Pairs of sequences that want it, at most: these have more than 128 tokens, and so a pair to every 64 of them at most.
int64_t exact_pairs(const Args& p) { return std::min(int64_t{kExactPairs} * p.N, int64_t{p.B} * p.T / kChunk); }

// Whether G o A and P can be made beside the passes: they leave half of the device idle, which makes chunks faster than
// the passes take them.
bool leaves_half_idle(const Args& p, int multiprocessors) {
  return !p.whole_values && p.segment_chunks == 0 && 2 * states_blocks(p) <= multiprocessors;
}

// Whether there is no room for G o A and P, which passes that make them themselves do not want. A workspace must not
// shrink where a sequence is added: so only where fewer sequences, and one alone, do without as well.
bool has_no_room_for_tiles(const Args& p) { return p.whole_values && kShareOfHead * p.Hv >= 1.0; }

size_t take_all(Args* p, void* base) {
  Workspace workspace(base);
  const int64_t tiles = static_cast<int64_t>(p->chunk_bound) * p->Hv;
  p->bounds = workspace.take<int32_t>(p->N + 1);
  p->chunk_map = workspace.take<ChunkInfo>(p->chunk_bound);
  p->first_slot = workspace.take<int32_t>(p->N);
  p->total_chunks = workspace.take<int32_t>(1);
  p->pair_bound = pair_bound(*p);
  const int64_t pair_tiles = static_cast<int64_t>(p->pair_bound) * p->Hv;
  p->pair_map = workspace.take<PairInfo>(p->pair_bound);
  p->first_pair = workspace.take<int32_t>(p->N);
  p->total_pairs = workspace.take<int32_t>(1);
  p->progress = workspace.take<uint32_t>(static_cast<int64_t>(p->pair_bound) * p->Hq);
  p->prepared = workspace.take<uint32_t>(static_cast<int64_t>(p->chunk_bound) * p->Hq);
  p->ready = workspace.take<uint32_t>(static_cast<int64_t>(p->pair_bound) * p->Hq);
  p->ready_count = workspace.take<uint32_t>(1);
  p->next_item = workspace.take<uint32_t>(1);
  p->log_decay_sums = workspace.take<float>(tiles);
  if (p->segment_chunks > 0) {
    p->segment_bound = p->cu_seqlens == nullptr
                           ? p->N * static_cast<int32_t>(ceil_div(p->per_sequence, p->segment_chunks))
                           : p->chunk_bound / p->segment_chunks + p->N;
    p->segment_map = workspace.take<SegmentInfo>(p->segment_bound);
    p->first_segment = workspace.take<int32_t>(p->N);
    const int64_t pieces = static_cast<int64_t>(p->segment_bound) * p->Hv;
    p->warmups = workspace.take<int32_t>(2 * pieces);
    p->round_lists = workspace.take<int32_t>(2 * 3 * pieces);
    p->round_counts = workspace.take<int32_t>(2);
    const int64_t chains = int64_t{2} * p->N * p->Hv;
    p->chain_listed = workspace.take<int32_t>(chains);
    p->chain_count = workspace.take<int32_t>(1);
    p->chains = workspace.take<int32_t>(chains);
    p->edges = workspace.take<float>(pieces * kEdgesOfSegment * kHeadDim * kHeadDim);
  }
  p->small_count = workspace.take<int32_t>(1);
  p->last_count = workspace.take<int32_t>(1);
  p->last_items = workspace.take<int32_t>(static_cast<int64_t>(p->N) * p->Hv);
  p->small_tiles = workspace.take<int32_t>(tiles);
  const bool has_room = !has_no_room_for_tiles(*p);
  if (has_room) {
    p->GA = workspace.take<uint8_t>(tiles * kTileBytes);
    p->P = workspace.take<uint8_t>(tiles * kTileBytes);
  }
  p->gate_stride = static_cast<int32_t>((p->whole_values ? kGateBytes : kAllGateBytes) / sizeof(float));
  p->gates = workspace.take<float>(tiles * (has_room ? kAllGateBytes : kGateBytes) / sizeof(float));
  p->states = workspace.take<uint8_t>(pair_tiles * kStateBytes);
  p->grads_in_outputs = keeps_grads_in_outputs(*p);
  p->state_grads =
      workspace.take<uint8_t>((p->grads_in_outputs ? static_cast<int64_t>(p->N) * p->Hv : pair_tiles) * kStateBytes);
  p->v_new = workspace.take<uint8_t>(tiles * kTokensBytes);
  p->keeps_exact = keeps_exact(*p);
  // Larger calls have the room as well: scratch must not shrink where a token is added.
  if (p->exact_by_sequence) {
    p->first_exact = workspace.take<int32_t>(p->N);
    p->exact_states = workspace.take<float>(exact_pairs(*p) * p->Hv * 2 * kHeadDim * kHeadDim);
  } else if (p->may_be_exact) {
    p->exact_states = workspace.take<float>(std::min(pair_tiles, kMostExact) * 2 * kHeadDim * kHeadDim);
  }
  if (p->makes_A) {
    const int64_t token = static_cast<int64_t>(p->Hv) * kChunk;
    p->A = {workspace.take<uint16_t>(p->B * p->T * token), {p->T * token, token, kChunk, 1}, p->v.type};
  }
  return workspace.bytes();
}

// `halves`: 64 columns each that a row has.
cudaError_t make_map(const StridedTensor& t, int64_t B, int64_t T, int64_t halves, int64_t heads, CUtensorMap* map) {
  const cuuint64_t dims[5] = {64, static_cast<cuuint64_t>(T), static_cast<cuuint64_t>(halves),
                              static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(B)};
  // The stride of a dimension of one element means nothing and may be anything: the encoder wants a legal one.
  auto bytes = [](int64_t size, int64_t stride) { return static_cast<cuuint64_t>(size == 1 ? 128 : stride * 2); };
  const cuuint64_t strides[4] = {bytes(T, t.stride[1]), 128, bytes(heads, t.stride[2]), bytes(B, t.stride[0])};
  const cuuint32_t box[5] = {64, kChunk, 1, 1, 1};
  return encode_tensor_map(map, t.type, t.data, dims, strides, box);
}

// A whole edge of segments at a time.
cudaError_t make_edges_map(float* edges, int64_t count, CUtensorMap* map) {
  const cuuint64_t dims[5] = {32, kHeadDim, kHeadDim / 32, static_cast<cuuint64_t>(count), 1};
  const cuuint64_t strides[4] = {kHeadDim * 4, 128, kHeadDim * kHeadDim * 4, kHeadDim * kHeadDim * 4};
  const cuuint32_t box[5] = {32, kHeadDim, kHeadDim / 32, 1, 1};
  return encode_tensor_map(map, DType::kFloat32, edges, dims, strides, box);
}

int32_t fastest_segment_chunks(const Args& p, int multiprocessors) {
  // In steps of a pass (about 1.2 us). Its numbers are fitted to the times of 30 calls of 4 to 16 value heads, 8,192
  // and 32,768 tokens in one to eight sequences, each with four to sixteen lengths of segments and none.
  const int64_t chunks = p.cu_seqlens == nullptr ? p.chunk_bound : p.chunk_bound - p.N;
  const double longest = p.cu_seqlens == nullptr ? p.per_sequence : static_cast<double>(chunks) * longest_share(p);
  // The gradients after the passes, less what multiprocessors that these leave idle have done of them by then: not more
  // than three quarters, the last pairs come last, or nine tenths where pairs of shorter sequences are complete early.
  const double gradients = 5.5 * static_cast<double>(chunks) * p.Hv / multiprocessors;
  auto after = [&](double beside, double most = 0.75) { return gradients - std::min(most * gradients, beside); };

  // Whole: a step takes a third more where there are several waves of blocks, or blocks have both halves of V.
  // Gradients run beside from when the passes meet; with less of the device at it an item takes less: 8 us for 13.5.
  // Shorter sequences' blocks end sooner. Before all of it comes prepare.cuh, where it does not run beside the passes.
  const double fill = 4.0 * p.N * p.Hv / multiprocessors, work = fill * static_cast<double>(chunks) / p.N;
  const bool makes_tiles = gains_by_whole_values(p);
  double passes = 1.1 * longest, idle = 1.0 - work / longest, most = 0.75;
  if (fill > 1.0 || makes_tiles) {
    const double steps = std::max(longest, work + 0.3 * longest);
    passes = 1.3 * steps;
    idle = 1.0 - work / steps;
  } else if (fill > 0.5) {
    most = 0.9;
  }
  if (fill > 0.5 && !makes_tiles) passes += 1.2 * static_cast<double>(chunks) * p.Hv / multiprocessors;
  double best = passes + after(idle * 0.8 * longest, most) + 14;
  int32_t best_length = 0;
  for (int32_t length = kLeastSegmentChunks; length < longest; ++length) {
    // Taken: a quarter of the heads does not decay (ten blocks a segment in the two rounds together, the others four),
    // and a sequence adds a fifth of a segment to those that all its tokens have. Two rounds at least, and blocks that
    // follow one another without a pause; one takes 20 steps to start, to warm up and to end, combining one a segment,
    // and what is launched besides 12. Of what the rounds leave idle a third goes to gradients: of the second round's
    // heads most are not done before it is.
    const double segments = static_cast<double>(chunks) / length + 0.2 * p.N;
    const double waves = 5.5 * segments * p.Hv / multiprocessors, rounds = std::max(2.0, waves);
    const double steps =
        rounds * (length + 20) + longest / length + 12 + after((rounds - waves) * 0.33 * (length + 20));
    if (steps < best) {
      best = steps;
      best_length = length;
    }
  }
  return best_length;
}

}  // namespace

// The answers for this thread's latest shapes are kept, the oldest of which goes first: layers of a model ask the same
// again and again, a call several times, and the search takes a microsecond, or ten for 32,768 tokens.
int32_t choose_segment_chunks(const Args& p, int multiprocessors) {
  struct Key {
    int32_t sequences, heads, chunks, per_sequence, multiprocessors;
    bool dense;
    bool operator==(const Key&) const = default;
  };
  struct Kept {
    Key key{-1, -1, -1, -1, -1, false};
    int32_t segment_chunks = 0;
  };
  constexpr size_t kKept = 16;  // two of a call, that of its longest sequence as well
  thread_local Kept kept[kKept];
  thread_local size_t next = 0;
  const Key key{p.N, p.Hv, p.chunk_bound, p.per_sequence, multiprocessors, p.cu_seqlens == nullptr};
  for (const Kept& one : kept) {
    if (one.key == key) return one.segment_chunks;
  }
  Kept& oldest = kept[next];
  next = (next + 1) % kKept;
  oldest = {key, fastest_segment_chunks(p, multiprocessors)};
  return oldest.segment_chunks;
}

size_t chunk_backward_workspace_size(const Args& params) {
  Args copy = params;
  copy.makes_A = params.A.data == nullptr;
  copy.whole_values = takes_whole_values(params);
  return take_all(&copy, nullptr);
}

void bind_chunk_backward_workspace(Args* params, void* workspace) {
  params->makes_A = params->A.data == nullptr;
  params->whole_values = takes_whole_values(*params);
  params->small_beta = small_beta(params->v.type);
  take_all(params, workspace);
}

cudaError_t make_chunk_backward_maps(const Args& p, const StridedTensor& q, const StridedTensor& d_o, Maps* maps) {
  cudaError_t error = make_map(q, p.B, p.T, 2, p.Hq, &maps->q);
  if (error == cudaSuccess) error = make_map(p.k, p.B, p.T, 2, p.Hq, &maps->k);
  if (error == cudaSuccess) error = make_map(p.v, p.B, p.T, 2, p.Hv, &maps->v);
  // Without dO its map only has to exist: all its loads lie outside.
  if (error == cudaSuccess) error = make_map(p.has_d_o ? d_o : p.v, p.B, p.T, 2, p.Hv, &maps->d_o);
  if (error == cudaSuccess) error = make_map(p.dv, p.B, p.T, 2, p.Hv, &maps->dv);
  if (error == cudaSuccess) error = make_map(p.A, p.B, p.T, 1, p.Hv, &maps->A);
  const StridedTensor state_grads = {p.state_grads, {kHeadDim * kHeadDim, kHeadDim, kHeadDim * kChunk, 1}, p.v.type};
  const int64_t grads = int64_t{p.grads_in_outputs ? p.N : p.pair_bound} * p.Hv;
  if (error == cudaSuccess) error = make_map(state_grads, grads, kChunk, 2, 2, &maps->state_grads);
  if (error == cudaSuccess && p.segment_chunks > 0) {
    error = make_edges_map(p.edges, int64_t{p.segment_bound} * p.Hv * kEdgesOfSegment, &maps->edges);
  }
  if (error == cudaSuccess && p.grads_in_outputs) error = make_map(p.dq, p.B, p.T, 2, p.Hq, &maps->dq);
  if (error == cudaSuccess && p.grads_in_outputs) error = make_map(p.dk, p.B, p.T, 2, p.Hq, &maps->dk);
  return error;
}

// A, G o A, P and gates of the tiles.
int64_t link_gradients_scratch(int64_t tokens, int64_t Hv, int64_t most_tiles, bool makes_A) {
  const int64_t of_A = makes_A ? tokens * Hv * kChunk * int64_t{sizeof(uint16_t)} : 0;
  return of_A + most_tiles * (2 * kTileBytes + kAllGateBytes);
}

cudaError_t launch_link_gradients(const LinkGradients& links, cudaStream_t stream) {
  Args p{};
  p.B = p.N = 1;
  p.T = static_cast<int32_t>(links.tokens);
  p.Hq = static_cast<int32_t>(links.Hq);
  p.Hv = static_cast<int32_t>(links.Hv);
  p.group = p.Hv / p.Hq;
  p.scale = links.scale;
  p.has_d_o = true;
  p.makes_A = true;
  p.state_v_first = true;  // of cells
  p.small_beta = 0.0f;     // dv is not wanted
  p.q = links.q;
  p.k = links.k;
  p.v = p.d_o = links.d_o;  // values have no part in it
  p.g = links.g;
  p.beta = links.beta;
  p.link_tiles = links.tiles;
  p.link_tile_count = links.tile_count;
  p.edges = links.cells;
  p.dh0 = {links.cells, {kHeadDim * kHeadDim, 0, kHeadDim, 1}, DType::kFloat32};
  uint8_t* scratch = links.scratch;
  const auto take = [&scratch](int64_t bytes) { return std::exchange(scratch, scratch + bytes); };
  p.GA = take(links.most_tiles * kTileBytes);
  p.P = take(links.most_tiles * kTileBytes);
  p.gates = reinterpret_cast<float*>(take(links.most_tiles * kAllGateBytes));
  p.gate_stride = static_cast<int32_t>(kAllGateBytes / sizeof(float));
  const int64_t token = links.Hv * kChunk;
  p.A = links.A.data != nullptr ? links.A
                                : StridedTensor{take(0), {links.tokens * token, token, kChunk, 1}, links.q.type};
  Maps maps{};
  FLASH_QLA_RETURN_IF_CUDA_ERROR(make_map(p.q, 1, p.T, 2, p.Hq, &maps.q));
  FLASH_QLA_RETURN_IF_CUDA_ERROR(make_map(p.k, 1, p.T, 2, p.Hq, &maps.k));
  FLASH_QLA_RETURN_IF_CUDA_ERROR(make_map(p.d_o, 1, p.T, 2, p.Hv, &maps.d_o));
  return links.q.type == DType::kBFloat16 ? launch_link_gradients_bf16(p, maps, links, stream)
                                          : launch_link_gradients_fp16(p, maps, links, stream);
}

cudaError_t launch_rounds(const Args& p, int multiprocessors, cudaStream_t stream) {
  return launch_chained(sm90_chunk_bwd_rounds_kernel, 1, kRoundsThreads, 0, stream, p, multiprocessors);
}

cudaError_t launch_scan(const Args& p, const Maps& maps, int multiprocessors, cudaStream_t stream) {
  using Traits = ScanTraits;
  const int64_t most = int64_t{2} * p.N * p.Hv * Traits::kColumnBlocks;
  return launch_chained(sm90_chunk_bwd_scan_kernel, static_cast<unsigned>(std::min<int64_t>(most, multiprocessors)),
                        Traits::kThreads, Traits::kBytes, stream, p, maps);
}

cudaError_t launch_chunk_backward(const Args& params, const Maps& maps, const Parts& stage, cudaStream_t stream) {
  int multiprocessors = 0;
  FLASH_QLA_RETURN_IF_CUDA_ERROR(count_multiprocessors(&multiprocessors));
  Args p = params;
  p.beside = leaves_half_idle(p, multiprocessors);
  const bool may_be_short = p.exact_short && (p.cu_seqlens != nullptr || p.T <= 2 * kChunk);
  p.corrects_last = (p.dht.data != nullptr || may_be_short) && (p.dg.data != nullptr || p.dbeta.data != nullptr);
  if (stage.plan) {
    // Chained to what the stream has before it: it waits for that, and only then lets the next kernel begin. A start of
    // its own in the order of the stream takes 9 us longer (docs/notebook/sm90_backward.md).
    FLASH_QLA_RETURN_IF_CUDA_ERROR(launch_chained(sm90_chunk_bwd_plan_kernel, 1, kPlanThreads, 0, stream, p));
  }
  return p.v.type == DType::kBFloat16 ? launch_chunk_backward_bf16(p, maps, stage, multiprocessors, stream)
                                      : launch_chunk_backward_fp16(p, maps, stage, multiprocessors, stream);
}

}  // namespace flash_qla::cuda::sm90::bwd
