// Links between ranks' parts, before and after the kernel that makes the matrices of segments (link_states.cuh): the
// list of its items, and the scan along the segments. Neither needs Hopper's instructions.
#include "cuda/common/cp_async.cuh"
#include "cuda/common/dynamic_shared.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/sm90/common/sizes.h"
#include "cuda/sm90/links/links.h"

namespace flash_qla::cuda::sm90::links {
namespace {

constexpr int kWarp = 32;
constexpr int kScanThreads = 256;
// One block lists up to some thousand chunks of each of the heads, going backward.
constexpr int kListThreads = 1024, kListWarps = kListThreads / kWarp;
static_assert(kListThreads >= kMostLinkSegments);

struct ListParams {
  const LinkPass* passes;  // [P, Hv]
  SequenceTable sequences;
  LinkWorkspace workspace;
  int32_t chains, Hv;
};
static_assert(std::is_trivially_copyable_v<ListParams>);

// The tokens of a pass that somebody reads.
__device__ LinkTokens tokens_of(const ListParams& p, const LinkPass& pass) {
  const DeviceSequence sequence = sequence_at(p.sequences, pass.row);
  return {static_cast<int32_t>(sequence.b * p.sequences.T + sequence.begin), static_cast<int32_t>(sequence.first_chunk),
          pass.from, pass.to, pass.row};
}
__device__ int32_t chunks_of(const LinkPass& pass) {
  return pass.row < 0 ? 0 : static_cast<int32_t>(ceil_div(pass.to - pass.from, kChunk));
}
// Whether all of it counts: a head whose gates forget starts from zero, and wants no M.
__device__ bool is_cut(const LinkPass& pass) { return pass.row >= 0 && (pass.starts != 0 || pass.is_affine != 0); }

// Going backward M is the forward's: of the first segment there is no transition to make.
__device__ LinkChain chain_of(const LinkPass& pass, const LinkSpacing& spacing, bool backward) {
  LinkChain chain{0, 0, 0, 0, backward ? 0 : pass.is_affine};
  if (pass.row >= 0) chain.segments = is_cut(pass) ? spacing.segments(chunks_of(pass)) : 1;
  return chain;
}

struct Sums {
  int32_t states, transitions, tiles;
};
__device__ Sums operator+(const Sums& a, const Sums& b) {
  return {a.states + b.states, a.transitions + b.transitions, a.tiles + b.tiles};
}
// Sums over the block's threads before each; `all`: over all of them.
__device__ Sums sum_before(const Sums& x, Sums* s_warps, Sums* all) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  Sums sum = x;
  for (int step = 1; step < kWarp; step *= 2) {
    const Sums below = {__shfl_up_sync(0xffffffffu, sum.states, step),
                        __shfl_up_sync(0xffffffffu, sum.transitions, step),
                        __shfl_up_sync(0xffffffffu, sum.tiles, step)};
    if (lane >= step) sum = sum + below;
  }
  if (lane == kWarp - 1) s_warps[warp] = sum;
  __syncthreads();
  Sums before{}, total{};
  for (int w = 0; w < kListWarps; ++w) {
    if (w < warp) before = before + s_warps[w];
    total = total + s_warps[w];
  }
  __syncthreads();  // the sums have been read
  *all = total;
  return {before.states + sum.states - x.states, before.transitions + sum.transitions - x.transitions,
          before.tiles + sum.tiles - x.tiles};
}

// How the chains are cut, by the whole block.
__device__ LinkSpacing choose_spacing(const ListParams& p, bool backward) {
  __shared__ int32_t s_longest;
  __shared__ float s_times[kMostLinkSegments];
  const LinkWorkspace& ws = p.workspace;
  if (ws.by_length != 0) return invariant_link_spacing();
  const int thread = threadIdx.x;
  if (thread == 0) s_longest = 0;
  __syncthreads();
  int32_t longest = 0;
  for (int32_t i = thread; i < p.chains; i += kListThreads) {
    if (is_cut(p.passes[i])) longest = max(longest, chunks_of(p.passes[i]));
  }
  atomicMax(&s_longest, longest);
  __syncthreads();
  longest = s_longest;
  // Every number of segments by a thread: the fastest of those that fit. One segment always does.
  if (thread < kMostLinkSegments) {
    const LinkSpacing tried = even_link_spacing(longest, thread + 1);
    int32_t states = 0, transitions = 0, windows = 0;
    for (int32_t i = 0; i < p.chains; ++i) {
      const LinkPass pass = p.passes[i];
      const LinkChain chain = chain_of(pass, tried, backward);
      if (is_cut(pass)) {
        states += chain.segments;
        transitions += chain.transitions();
      } else {
        windows += chain.segments;
      }
    }
    const bool fits = states + transitions + windows <= ws.capacity;
    s_times[thread] = fits ? link_time(states, transitions, longest, thread + 1, ws.sms, backward) : INFINITY;
  }
  __syncthreads();
  int best = 0;
  for (int i = 1; i < kMostLinkSegments; ++i) {
    if (s_times[i] < s_times[best]) best = i;
  }
  return even_link_spacing(longest, best + 1);
}

// One block. Chains that are cut come first: their items are the long ones.
template <bool kBackward>
__global__ void __launch_bounds__(kListThreads) list_link_items_kernel(const __grid_constant__ ListParams p) {
  __shared__ Sums s_warps[kListWarps];
  const int thread = threadIdx.x;
  const LinkWorkspace& ws = p.workspace;
  const LinkSpacing spacing = choose_spacing(p, kBackward);
  Sums so_far{};
  for (int turn = 0; turn < 2; ++turn) {  // those that are cut, the others
    for (int32_t base = 0; base < p.chains; base += kListThreads) {
      const int32_t i = base + thread;
      LinkChain chain{};
      bool mine = false;
      Sums own{};
      if (i < p.chains) {
        mine = is_cut(p.passes[i]) == (turn == 0);
        if (mine) {
          chain = chain_of(p.passes[i], spacing, kBackward);
          own = {chain.segments, chain.transitions(), chunks_of(p.passes[i])};
        }
      }
      Sums all;
      const Sums before = so_far + sum_before(own, s_warps, &all);
      chain.first_cell = before.states + before.transitions;
      chain.first_state = before.states;
      chain.first_tile = before.tiles;
      if (mine) ws.chains[i] = chain;
      so_far = so_far + all;
    }
  }
  __syncthreads();  // the chains are in memory
  for (int32_t i = thread / kWarp; i < p.chains; i += kListWarps) {
    const LinkChain chain = ws.chains[i];
    if (chain.segments == 0) continue;
    const LinkPass pass = p.passes[i];
    const LinkTokens tokens = tokens_of(p, pass);
    for (int32_t k = thread % kWarp; k < chain.matrices(); k += kWarp) {
      WorkItem item = link_item(chain, k, tokens, pass.starts != 0, i % p.Hv, kBackward);
      if (!kBackward) {
        ws.items[chain.first_cell + k] = item;
      } else if (k >= chain.segments) {
        ws.items[chain.first_cell - chain.first_state + k - chain.segments] = item;
      } else {
        const bool given = k == 0 && pass.starts != 0 && ws.has_given != 0;
        item.position = given ? static_cast<int32_t>(ws.capacity) + i : -1;
        ws.reverse_items[chain.first_state + k] = item;
      }
    }
    if constexpr (kBackward) {
      for (int32_t c = thread % kWarp; c < tokens.chunks(); c += kWarp) {
        // Rows that several parts name, which no cut makes, may be more than there is room for.
        if (static_cast<uint32_t>(chain.first_tile + c) >= ws.most_tiles) break;
        const int32_t left = tokens.to - c * kChunk;
        ws.tiles[chain.first_tile + c] = {tokens.first + c * kChunk, left < kChunk ? left : kChunk,
                                          (tokens.first_chunk + c) * p.Hv + i % p.Hv};
      }
    }
  }
  if (thread == 0) {
    ws.counters->plan = PlanCounters{};
    ws.counters->plan.states.items = so_far.transitions + (kBackward ? 0 : so_far.states);
    ws.counters->tickets = ItemTickets{};
    ws.counters->reverse_items = so_far.states;
    ws.counters->tiles =
        static_cast<int32_t>(min(static_cast<int64_t>(static_cast<uint32_t>(so_far.tiles)), ws.most_tiles));
  }
}

// A given gradient of a chain into its cell. A block each.
__global__ void __launch_bounds__(kScanThreads)
    put_given_kernel(const __grid_constant__ LinkParams p, const __grid_constant__ LinkWorkspace ws) {
  const int64_t chain = blockIdx.x;
  const LinkPass pass = p.passes[chain];
  if (pass.row < 0 || pass.starts == 0) return;
  float* cell = ws.cells + (ws.capacity + chain) * kHeadDim * kHeadDim;
  const int64_t from = pass.row * p.given.row + chain % p.in.Hv * p.given.head;
  for (int i = threadIdx.x; i < kHeadDim * kHeadDim; i += kScanThreads) {
    cell[i] = load<float>(p.given, from + i % kHeadDim * p.given.key + i / kHeadDim * p.given.value);
  }
}

// --- the scan ---

// A block takes 16 columns of one link's S (R), or M: rows of the cells. fp32 products: 16 columns are 262,144 of them
// a step, 1.2 us of a multiprocessor, and as many blocks as a quarter of 32 heads has are one wave on an H100.
constexpr int kScanColumns = 16;
constexpr int kSlices = kHeadDim / kScanColumns;
constexpr int kColumnsPerThread = kScanColumns * kHeadDim / kScanThreads;
constexpr int kMatrix = kHeadDim * kHeadDim;
// Transitions come through shared memory in tiles of 32 rows. Three of them are on their way while one is used: 48 KB
// of a multiprocessor, which the L2 cache's latency wants. Three blocks fit, so that those without segments delay
// nobody.
constexpr int kTileRows = 32, kTiles = kHeadDim / kTileRows;
constexpr int kStages = 4;

struct ScanParams {
  DeviceStates S, M;        // [P, Hv, K, V], [P, Hv, K, K]
  const LinkChain* chains;  // [P, Hv]
  const float* cells;
  int32_t Hv;
  int32_t slices;  // of S, and behind them of M, forward
};
static_assert(std::is_trivially_copyable_v<ScanParams>);

struct alignas(16) ScanMemory {
  float tiles[kStages][kTileRows][kHeadDim];
  float state[kScanColumns][kHeadDim];  // [column][row]
};

__global__ void __launch_bounds__(kScanThreads) scan_links_kernel(const __grid_constant__ ScanParams p) {
  ScanMemory& s = *dynamic_shared<ScanMemory>();
  const int32_t slice = static_cast<int32_t>(blockIdx.x) % p.slices;
  const int32_t index = static_cast<int32_t>(blockIdx.x) / p.slices;
  const bool transition = slice >= kSlices;
  const int row = threadIdx.x % kHeadDim, first = threadIdx.x / kHeadDim * kColumnsPerThread;
  const int column0 = slice % kSlices * kScanColumns + first;
  const LinkChain chain = p.chains[index];
  const bool wanted = chain.segments > 0 && (!transition || chain.is_affine != 0);
  const auto cell = [&](int32_t number) { return p.cells + static_cast<int64_t>(number) * kMatrix; };
  const auto load = [&](int32_t number, float (&columns)[kColumnsPerThread]) {
#pragma unroll
    for (int i = 0; i < kColumnsPerThread; ++i) columns[i] = cell(number)[(column0 + i) * kHeadDim + row];
  };

  const int32_t steps = wanted ? chain.segments - 1 : 0, tiles = steps * kTiles;
  // Rows of M^T; going backward of M. Cells hold that, so that lanes read side by side.
  const auto fetch = [&](int32_t tile) {
    if (tile < tiles) {
      const float* from = cell(chain.transition_cell(1 + tile / kTiles)) + tile % kTiles * kTileRows * kHeadDim;
      const uint32_t to = smem_address(s.tiles[tile % kStages]);
#pragma unroll
      for (int i = 0; i < kTileRows * kHeadDim / (4 * kScanThreads); ++i) {
        const int place = 4 * (i * kScanThreads + static_cast<int>(threadIdx.x));
        cp_async_16(to + sizeof(float) * place, from + place);
      }
    }
    cp_async_commit();
  };
  for (int32_t tile = 0; tile < kStages - 1; ++tile) fetch(tile);

  float state[kColumnsPerThread] = {}, added[kColumnsPerThread] = {};
  if (wanted) load(transition ? chain.transition_cell(0) : chain.state_cell(0), state);
  if (!transition && steps > 0) load(chain.state_cell(1), added);
  for (int32_t tile = 0; tile < tiles; ++tile) {
    if (tile % kTiles == 0) {  // the next segment
      __syncthreads();         // the state before has been read
#pragma unroll
      for (int i = 0; i < kColumnsPerThread; ++i) {
        s.state[first + i][row] = state[i];
        state[i] = added[i];
      }
      if (!transition && tile + kTiles < tiles) load(chain.state_cell(2 + tile / kTiles), added);
    }
    cp_async_wait<kStages - 2>();
    __syncthreads();  // all threads' copies of the tile are there, the state too; the tile before has been read
    fetch(tile + kStages - 1);
    const int base = tile % kTiles * kTileRows;
#pragma unroll 4
    for (int j = 0; j < kTileRows; j += 4) {
      float m[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) m[n] = s.tiles[tile % kStages][j + n][row];
#pragma unroll
      for (int i = 0; i < kColumnsPerThread; ++i) {
        const float4 x = *reinterpret_cast<const float4*>(&s.state[first + i][base + j]);
        state[i] = fmaf(m[3], x.w, fmaf(m[2], x.z, fmaf(m[1], x.y, fmaf(m[0], x.x, state[i]))));
      }
    }
  }
  const DeviceStates& out = transition ? p.M : p.S;
  const int64_t place = index / p.Hv * out.row + index % p.Hv * out.head + row * out.key;
#pragma unroll
  for (int i = 0; i < kColumnsPerThread; ++i) store<float>(out, place + (column0 + i) * out.value, state[i]);
}

}  // namespace

LinkWorkspace take_link_workspace(int64_t chains, int64_t chunks, int64_t Hv, bool has_given, bool by_length,
                                  int32_t sms, Workspace* workspace) {
  LinkWorkspace ws{};
  const bool backward = chunks > 0;
  ws.capacity = link_capacity(chains, by_length, sms);
  ws.by_length = by_length;
  ws.sms = sms;
  ws.has_given = has_given;
  ws.counters = workspace->take<LinkCounters>(1);
  ws.chains = workspace->take<LinkChain>(chains);
  ws.items = workspace->take<WorkItem>(ws.capacity);
  ws.cells = workspace->take<float>((ws.capacity + (has_given ? chains : 0)) * kMatrix);
  if (backward) {
    // A row's chunks are of as many chains as it has parts.
    ws.most_tiles = chunks * Hv;
    ws.reverse_items = workspace->take<WorkItem>(ws.capacity);
    ws.tiles = workspace->take<bwd::LinkTile>(ws.most_tiles);
  }
  return ws;
}

Status launch_link_items(const LinkParams& params, const LinkWorkspace& workspace, cudaStream_t stream) {
  const auto chains = static_cast<int32_t>(params.P * params.in.Hv);
  const ListParams list{params.passes, params.sequences, workspace, chains, params.in.Hv};
  const bool backward = workspace.tiles != nullptr;
  if (workspace.has_given != 0) {
    FLASH_QLA_RETURN_IF_ERROR(
        launch("put_given", put_given_kernel, chains, kScanThreads, 0, stream, params, workspace));
  }
  return launch("list_link_items", backward ? list_link_items_kernel<true> : list_link_items_kernel<false>, 1,
                kListThreads, 0, stream, list);
}

Status launch_link_scan(const LinkParams& params, const LinkWorkspace& workspace, cudaStream_t stream) {
  const int32_t slices = workspace.tiles != nullptr ? kSlices : 2 * kSlices;
  const ScanParams scan{params.S, params.M, workspace.chains, workspace.cells, params.in.Hv, slices};
  return launch("scan_links", scan_links_kernel, params.P * params.in.Hv * slices, kScanThreads, sizeof(ScanMemory),
                stream, scan);
}

}  // namespace flash_qla::cuda::sm90::links
