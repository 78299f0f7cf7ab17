// What the backward kernels are given. Names are those of docs/math.md; "chunk slot": chunks counted sequence by
// sequence. "Pair": two chunks of a sequence that follow one another, the first of an even number within the sequence;
// the last chunk may be alone.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "core/problem.h"
#include "cuda/sm90/chunk_bwd/link_tile.h"

namespace flash_qla::cuda::sm90::bwd {

// A tensor read or written element by element. data NULL: absent.
struct StridedTensor {
  void* data;
  int64_t stride[4];  // elements
  DType type;
};

// One token block of a (chunk, head): where its rows are.
struct ChunkInfo {
  int32_t token;     // first token, within its batch entry
  int32_t valid;     // tokens, 1 .. 64
  int32_t sequence;  // 0 .. N - 1
  int32_t batch;     // batch entry (0 with cu_seqlens)
};

// The two chunks of a pair.
struct alignas(16) PairInfo {
  int32_t token;  // first token, within its batch entry
  int32_t valid;  // tokens, 1 .. 128
  int32_t slot;   // of the first chunk; the second one's follows
  int32_t sequence;
};

// A piece of a sequence (segments.cuh). 32 bytes: two loads bring it.
struct alignas(16) SegmentInfo {
  int32_t n;                                             // sequence; -1: the slot is empty
  int32_t index, count;                                  // which of its sequence's segments
  int32_t token, length, first_slot, batch, first_pair;  // of the sequence
};
static_assert(sizeof(SegmentInfo) == 32);

struct Args {
  int32_t B, T, N;        // N sequences: B of T tokens, or packed in B = 1 with cu_seqlens
  int32_t Hq, Hv, group;  // group = Hv / Hq
  int32_t chunk_bound;    // chunk slots that the workspace has
  int32_t per_sequence;   // dense: chunks of one sequence; 0 with cu_seqlens
  int32_t pair_bound;     // pairs that the workspace has
  // Sequences in pieces of so many chunks (segments.cuh), 0: whole; and how many pieces the workspace has room for.
  int32_t segment_chunks, segment_bound;
  float scale;
  float decay_threshold = kDecayThreshold;  // logarithm of the share of a state that a warm-up may leave out, or less
  float small_beta;                         // traits.h; set when the workspace is bound
  bool g_is_cumsum;
  bool state_v_first;
  bool cu_seqlens_64;  // int64 offsets, else int32
  bool has_d_o;
  bool has_dq_and_dk;
  // More of <dS, S> than what tiles of 16 bits have (exact_products.cuh): if the call is small, or in sequences of two
  // to kExactPairs pairs whatever the call is.
  bool may_be_exact, exact_by_sequence;
  bool corrects_last;  // last_tokens.cuh is wanted; set by the launcher
  bool exact_short;    // dbeta and dg of sequences of one pair in fp32 (last_tokens.cuh)
  bool makes_A;        // the caller has no A
  bool beside;         // prepare.cuh runs beside the passes, which wait for each chunk; set by the launcher
  bool keeps_exact;    // it is: the passes keep states in fp32 too; set when the workspace is bound
  // A block of the passes has both halves of V, and makes G o A and P (passes/kernel.cuh). Set when the workspace is
  // bound; where the caller has set it before, it stays where that can be.
  bool whole_values;
  // dS at the end of a pair of 128 tokens waits in the rows of dq and dk of that pair and key head, which the gradients
  // kernel stores when it is done with it: the first value head's in dq, the second one's in dk. For groups of at most
  // two heads, where dq and dk are there.
  bool grads_in_outputs;

  const void* cu_seqlens;       // [N + 1] token offsets; NULL: dense
  int64_t cu_seqlens_stride;    // elements
  StridedTensor g, beta;        // [B, T, Hv]; absent: 0 and 1
  StridedTensor A;              // [B, T, Hv, 64], 16-byte aligned rows; scratch when makes_A
  StridedTensor k;              // [B, T, Hq, 128]
  StridedTensor q, d_o;         // [B, T, Hq, 128], [B, T, Hv, 128]; for exact_products.cuh and last_tokens.cuh
  StridedTensor v;              // [B, T, Hv, 128]
  StridedTensor initial_state;  // [N, Hv, 128, 128] by state_v_first, or absent
  StridedTensor dht;            // as initial_state, or absent

  // What the rows of q and k were multiplied by before they came here, [B * T, Hq]: dq and dk are those of the rows
  // before. NULL: of q and k as they are.
  const float *q_inverse_norms, *k_inverse_norms;

  StridedTensor dq, dk;  // [B, T, Hq, 128], or absent
  StridedTensor dv;      // [B, T, Hv, 128]; always there (the caller of the kernels has scratch where it is not wanted)
  StridedTensor dg, dbeta;  // [B, T, Hv], or absent
  StridedTensor dh0;        // as initial_state, or absent

  // Scratch. Tiles are images of swizzled shared memory (traits.h), so that plain bulk copies move them.
  int32_t* bounds;        // [N + 1] the offsets, each at least the one before; of several sequences with cu_seqlens
  ChunkInfo* chunk_map;   // [chunk_bound]; with cu_seqlens alone
  int32_t* first_slot;    // [N] first chunk slot of each sequence; with cu_seqlens alone
  int32_t* total_chunks;  // [1]; with cu_seqlens alone
  PairInfo* pair_map;     // [pair_bound]; with cu_seqlens alone
  int32_t* first_pair;    // [N] first pair of each sequence; with cu_seqlens alone
  int32_t* total_pairs;   // [1]; with cu_seqlens alone
  // What the passes have left of each pair for the gradients, which run beside them: chunks, counted once for each
  // pass, half of V and value head of the group, a chunk without a second one twice (kPairCount of a value head).
  uint32_t* progress;  // [pair_bound, Hq]
  uint32_t* prepared;  // [chunk_bound, Hq] 1 when prepare.cuh has left it to who is beside it
  // The gradients' work, (pair * Hq + key head) + 1, in the order in which the passes leave it; 0: not yet there. And
  // how many places are filled, and how many are taken.
  uint32_t* ready;                    // [pair_bound, Hq]
  uint32_t *ready_count, *next_item;  // [1]
  int32_t* small_count;               // [1] how many entries small_tiles has
  int32_t *last_count, *last_items;   // [1], [N * Hv] (n * Hv + head) of what last_tokens.cuh corrects, in any order
  int32_t* small_tiles;  // [chunk_bound * Hv] (slot * Hv + head) of those with a beta below small_beta, in any order
  SegmentInfo* segment_map;  // [segment_bound]; with segments alone
  int32_t* first_segment;    // [N]; with segments alone
  float* log_decay_sums;     // [chunk_bound, Hv]: sum of g and log max(1, |1 - beta |k|^2|) over a chunk; for warm-ups
  int32_t* warmups;          // [segment_bound, Hv, 2]: chunks of warm-up of the forward and the reverse pass
  int32_t* round_lists;      // [2, segment_bound * Hv * 3]: the passes of each round (segments.cuh)
  int32_t* round_counts;     // [2]: how many
  int32_t *chain_listed, *chain_count, *chains;  // [N, Hv, 2] flags, [1], [N * Hv * 2]: what is combined (scan.cuh)
  float* edges;                                  // [segment_bound, Hv, 3, 128, 128]: F, R, M (segments.cuh)
  uint8_t* GA;                                   // [chunk_bound, Hv] tiles [64 i][64 j]: G o A; unless whole_values
  uint8_t* P;           // [chunk_bound, Hv] tiles [64 i][64 j]: scale G o (Q K^T); unless whole_values
  float* gates;         // [chunk_bound, Hv, 4, 64]: cumsum of g in units of log 2, gamma, gC / gamma, beta;
  int32_t gate_stride;  // unless whole_values [.., 10, 64], behind them what the passes take (traits.h); so many floats
  uint8_t* states;      // [pair_bound, Hv] tiles [2 halves of K][128 of V][64 of K]: S at the pair's start
  // [pair_bound, Hv] tiles [2 halves of K][64 of V][2 halves of V][64 of K] of dS at the pair's end, as rows, not as
  // images; with grads_in_outputs [N, Hv]: of sequences' last pairs that are short.
  uint8_t* state_grads;
  // keeps_exact: [pairs, Hv, 2, 2 halves of V, 16 x 128 x 4] S at the pair's start and dS at its end, as the passes'
  // threads hold them. Of all pairs, or of the sequences that want it (exact_by_sequence), of which first_exact [N] is
  // the first pair's place, -1: none; with cu_seqlens and several sequences alone.
  float* exact_states;
  int32_t* first_exact;
  uint8_t* v_new;  // [chunk_bound, Hv] tiles [2 halves of V][64 tokens][64 of V]: V'

  // Of links alone (links.cuh), whose B is 1 and N is 1: what make_a.cuh and prepare.cuh make, and how many.
  const LinkTile* link_tiles;
  const int32_t* link_tile_count;
};
static_assert(std::is_trivially_copyable_v<Args>);

// Tiles of 64 tokens by 64 columns of one head: dims (64, T, 2 (A: 1), heads, B), 128-byte swizzle. dq and dk: with
// grads_in_outputs alone.
struct Maps {
  CUtensorMap q, k, v, d_o, dv, A, dq, dk;
  CUtensorMap state_grads;  // dims (64, 64 of V, 2 halves of V, 2 halves of K, states)
  CUtensorMap edges;        // with segments alone: fp32, dims (32, 128 rows, 4 quarters of the columns, edges, 1)
};

}  // namespace flash_qla::cuda::sm90::bwd
