// Links between ranks' parts, before and after the kernel that makes the matrices of segments (link_states.cuh): the
// passes and the list of its items, and the scan along the segments. Neither needs Hopper's instructions.
#include "cuda/common/block_scan.cuh"
#include "cuda/common/dynamic_shared.cuh"
#include "cuda/common/overlap.cuh"
#include "cuda/generic/link_pass.cuh"
#include "cuda/sm90/context_parallel/chain_scan.cuh"
#include "cuda/sm90/links/links.h"

namespace flash_qla::cuda::sm90::links {

using cp::ChainMemory, cp::ChainPlace, cp::ChainShare, cp::scan_chain;
using cp::kChainColumns, cp::kChainSlices, cp::kChainThreads, cp::kMatrix;

namespace {

constexpr int kWarp = 32;
// One block lists up to some thousand chunks of each of the heads, going backward.
constexpr int kListThreads = 1024, kListWarps = kListThreads / kWarp;
// Every number of segments is tried by so many neighbouring threads, which share the chains.
constexpr int kTryLanes = kListThreads / kMostLinkSegments;
static_assert(kTryLanes >= 1 && kTryLanes <= kWarp && kListThreads % kMostLinkSegments == 0);

struct ListParams {
  LinkParams links;
  LinkWorkspace workspace;
  const int32_t* windows;  // [ends][P, Hv]; NULL: nothing is forgotten
  int32_t chains;
};
static_assert(std::is_trivially_copyable_v<ListParams>);

// The tokens of a pass that somebody reads.
__device__ LinkTokens tokens_of(const SequenceTable& sequences, const LinkPass& pass) {
  const DeviceSequence sequence = sequence_at(sequences, pass.row);
  return {static_cast<int32_t>(sequence.b * sequences.T + sequence.begin), static_cast<int32_t>(sequence.first_chunk),
          pass.from, pass.to, pass.row};
}
__device__ int32_t chunks_of(const LinkPass& pass) {
  return pass.row < 0 ? 0 : static_cast<int32_t>(ceil_div(pass.to - pass.from, kChunk));
}
// Whether all of it counts: a head whose gates forget starts from zero, and wants no M.
__device__ bool is_cut(const LinkPass& pass) { return pass.row >= 0 && (pass.starts != 0 || pass.is_affine != 0); }

// Going backward M is the forward's: of the first segment there is no transition to make.
__device__ LinkChain chain_of(const LinkPass& pass, const LinkSpacing& spacing, bool backward) {
  LinkChain chain{};
  chain.is_affine = backward ? 0 : pass.is_affine;
  if (pass.row < 0) return chain;
  chain.segments = 1;
  if (!is_cut(pass)) return chain;
  chain.segments = spacing.segments(chunks_of(pass));
  chain.row = pass.row;
  chain.tokens = pass.to - pass.from;
  return chain;
}

// Numbers that are summed over the chains before each.
enum Sum : int { kStates, kTransitions, kTiles, kChains, kCuts, kSums };

// How the chains are cut, by the whole block. longest: in chunks, of those that are.
__device__ LinkSpacing choose_spacing(const ListParams& p, bool backward, int32_t longest) {
  __shared__ float s_times[kMostLinkSegments];
  const LinkWorkspace& ws = p.workspace;
  if (ws.by_length != 0) return invariant_link_spacing();
  // The fastest of those that fit. One segment always does.
  const int tried = threadIdx.x / kTryLanes + 1, lane = threadIdx.x % kTryLanes;
  const LinkSpacing spacing = even_link_spacing(longest, tried);
  int32_t states = 0, transitions = 0, windows = 0;
  for (int32_t i = lane; i < p.chains; i += kTryLanes) {
    const LinkPass pass = p.links.passes[i];
    const LinkChain chain = chain_of(pass, spacing, backward);
    if (is_cut(pass)) {
      states += chain.segments;
      transitions += chain.transitions();
    } else {
      windows += chain.segments;
    }
  }
#pragma unroll
  for (int step = kTryLanes / 2; step > 0; step /= 2) {
    states += __shfl_xor_sync(0xffffffffu, states, step);
    transitions += __shfl_xor_sync(0xffffffffu, transitions, step);
    windows += __shfl_xor_sync(0xffffffffu, windows, step);
  }
  if (lane == 0) {
    float time = link_time(states, transitions, longest, tried, ws.sms, backward);
    if (ws.carries != 0) time += carried_time(states, p.chains, longest, tried, ws.sms);
    s_times[tried - 1] = states + transitions + windows <= ws.capacity ? time : INFINITY;
  }
  __syncthreads();
  int best = 0;
  float least = s_times[0];
#pragma unroll
  for (int i = 1; i < kMostLinkSegments; ++i) {
    if (s_times[i] < least) least = s_times[best = i];
  }
  return even_link_spacing(longest, best + 1);
}

// One block. Chains that are cut come first: their items are the long ones.
template <bool kBackward>
__global__ void __launch_bounds__(kListThreads) list_link_items_kernel(const __grid_constant__ ListParams p) {
  __shared__ int32_t s_sums[kSums][kListWarps];
  __shared__ int32_t s_longest;
  const int thread = threadIdx.x;
  const LinkWorkspace& ws = p.workspace;
  const LinkPass* passes = p.links.passes;
  const int32_t Hv = p.links.in.Hv;
  launch_dependents();
  if (thread == 0) s_longest = 0;
  __syncthreads();
  wait_for_predecessors();
  for (int32_t i = thread; i < p.chains; i += kListThreads) {
    const int32_t part = i / Hv, head = i % Hv;
    const auto window = [&](const DeviceSequence&, bool from_end) -> int64_t {
      return p.windows[(from_end || kBackward ? 0 : p.chains) + i];
    };
    float kind;
    const LinkPass pass = link_pass(p.links, part, head, kBackward, p.windows != nullptr, window, &kind);
    p.links.passes[i] = pass;
    store<float>(p.links.kind, offset_of(p.links.kind, part, head), kind);
    if (is_cut(pass)) atomicMax(&s_longest, chunks_of(pass));
  }
  __syncthreads();  // the passes are in memory
  const LinkSpacing spacing = choose_spacing(p, kBackward, s_longest);
  int32_t so_far[kSums] = {};
  for (int turn = 0; turn < 2; ++turn) {  // those that are cut, the others
    for (int32_t base = 0; base < p.chains; base += kListThreads) {
      const int32_t i = base + thread;
      LinkChain chain{};
      bool mine = false;
      int32_t before[kSums] = {}, all[kSums];
      if (i < p.chains) {
        mine = is_cut(passes[i]) == (turn == 0);
        if (mine) {
          chain = chain_of(passes[i], spacing, kBackward);
          before[kStates] = chain.segments;
          before[kTransitions] = chain.transitions();
          before[kTiles] = chunks_of(passes[i]);
          before[kChains] = 1;
          before[kCuts] = chain.cuts();
        }
      }
      sum_before(before, all, s_sums);
#pragma unroll
      for (int n = 0; n < kSums; ++n) before[n] += so_far[n];
      chain.first_cell = before[kStates] + before[kTransitions];
      chain.first_state = before[kStates];
      chain.first_tile = before[kTiles];
      chain.first_cut = before[kCuts];
      if (mine) {
        ws.chains[i] = chain;
        ws.order[before[kChains]] = i;
      }
#pragma unroll
      for (int n = 0; n < kSums; ++n) so_far[n] += all[n];
    }
  }
  __syncthreads();  // the chains are in memory
  for (int32_t i = thread / kWarp; i < p.chains; i += kListWarps) {
    const LinkChain chain = ws.chains[i];
    if (chain.segments == 0) continue;
    const LinkPass pass = passes[i];
    const LinkTokens tokens = tokens_of(p.links.sequences, pass);
    for (int32_t k = thread % kWarp; k < chain.matrices(); k += kWarp) {
      WorkItem item = link_item(chain, k, tokens, pass.starts != 0, i % Hv, kBackward);
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
                                          (tokens.first_chunk + c) * Hv + i % Hv};
      }
    }
  }
  if (thread == 0) {
    ws.counters->plan = PlanCounters{};
    ws.counters->plan.states.items = so_far[kTransitions] + (kBackward ? 0 : so_far[kStates]);
    ws.counters->tickets = ItemTickets{};
    ws.counters->reverse_items = so_far[kStates];
    ws.counters->tiles =
        static_cast<int32_t>(min(static_cast<int64_t>(static_cast<uint32_t>(so_far[kTiles])), ws.most_tiles));
  }
}

constexpr int kGivenThreads = 256;
// A given gradient of a chain into its cell. A block each.
__global__ void __launch_bounds__(kGivenThreads)
    put_given_kernel(const __grid_constant__ LinkParams p, const __grid_constant__ LinkWorkspace ws) {
  const int64_t chain = blockIdx.x;
  const LinkPass pass = p.passes[chain];
  if (pass.row < 0 || pass.starts == 0) return;
  float* cell = ws.cells + (ws.capacity + chain) * kHeadDim * kHeadDim;
  const int64_t from = pass.row * p.given.row + chain % p.in.Hv * p.given.head;
  for (int i = threadIdx.x; i < kMatrix; i += kGivenThreads) {
    cell[i] = load<float>(p.given, from + i % kHeadDim * p.given.key + i / kHeadDim * p.given.value);
  }
}

// --- the scan ---

struct ScanParams {
  DeviceStates S, M;  // [P, Hv, K, V], [P, Hv, K, K]
  cp::Carry carry;    // or chains, order and cells of the workspace's own
  int32_t carries;
  int32_t Hv;
  int32_t slices;  // of S, and behind them of M, forward
};
static_assert(std::is_trivially_copyable_v<ScanParams>);

// A block takes 16 columns of one link's S (R), or M: rows of the cells.
__global__ void __launch_bounds__(kChainThreads, 2) scan_links_kernel(const __grid_constant__ ScanParams p) {
  launch_dependents();
  wait_for_predecessors();
  const int32_t slice = static_cast<int32_t>(blockIdx.x) % p.slices;
  const int32_t index = p.carry.order[static_cast<int32_t>(blockIdx.x) / p.slices];
  const bool transition = slice >= kChainSlices;
  const ChainPlace at;
  const int column0 = slice % kChainSlices * kChainColumns;
  const LinkChain chain = p.carry.chains[index];
  const bool wanted = chain.segments > 0 && (!transition || chain.is_affine != 0);
  const auto cell = [&](int32_t number) { return p.carry.cells + static_cast<int64_t>(number) * kMatrix; };
  const auto load = [&](int32_t number, ChainShare& columns) {
#pragma unroll
    for (int i = 0; i < kChainColumns; ++i) columns[i] = cell(number)[(column0 + i) * kHeadDim + at.row];
  };
  ChainShare state = {};
  if (wanted) load(transition ? chain.transition_cell(0) : chain.state_cell(0), state);
  // Rows of M^T; going backward of M. Cells hold that, so that lanes read side by side.
  scan_chain(
      *dynamic_shared<ChainMemory>(), cell(chain.transition_cell(1)), wanted ? chain.segments - 1 : 0, state,
      [&](int32_t step, ChainShare& added) {
        if (!transition) load(chain.state_cell(1 + step), added);
      },
      [&](int32_t step, const ChainShare& now) {
        // For the forward: S in place of the segment's own, of which other blocks read other columns, and M.
        const int32_t segment = 1 + step;
        if (p.carries == 0 || segment >= chain.cuts()) return;
        float* to = cell(transition ? p.carry.entering_cell(chain, segment) : chain.state_cell(segment));
#pragma unroll
        for (int i = 0; i < kChainColumns; ++i) to[(column0 + i) * kHeadDim + at.row] = now[i];
      });
  const DeviceStates& out = transition ? p.M : p.S;
  const int64_t place = index / p.Hv * out.row + index % p.Hv * out.head + at.row * out.key;
#pragma unroll
  for (int i = 0; i < kChainColumns; ++i) store<float>(out, place + (column0 + i) * out.value, state[i]);
}

}  // namespace

LinkWorkspace take_link_workspace(int64_t chains, int64_t chunks, int64_t Hv, bool has_given, bool by_length,
                                  int32_t sms, const cp::Carry& carry, Workspace* workspace) {
  LinkWorkspace ws{};
  const bool backward = chunks > 0;
  ws.capacity = link_capacity(chains, by_length, sms);
  ws.by_length = by_length;
  ws.sms = sms;
  ws.has_given = has_given;
  ws.counters = workspace->take<LinkCounters>(1);
  ws.items = workspace->take<WorkItem>(ws.capacity);
  ws.carries = carry.chains != nullptr;
  ws.chains = carry.chains;
  ws.order = carry.order;
  ws.cells = carry.cells;
  if (carry.chains == nullptr) {
    ws.chains = workspace->take<LinkChain>(chains);
    ws.order = workspace->take<int32_t>(chains);
    ws.cells = workspace->take<float>((ws.capacity + (has_given ? chains : 0)) * kMatrix);
  }
  if (backward) {
    // A row's chunks are of as many chains as it has parts.
    ws.most_tiles = chunks * Hv;
    ws.reverse_items = workspace->take<WorkItem>(ws.capacity);
    ws.tiles = workspace->take<bwd::LinkTile>(ws.most_tiles);
  }
  return ws;
}

Status launch_link_items(const LinkParams& params, const LinkWorkspace& workspace, const int32_t* windows,
                         cudaStream_t stream) {
  const auto chains = static_cast<int32_t>(params.P * params.in.Hv);
  const ListParams list{params, workspace, windows, chains};
  const bool backward = workspace.tiles != nullptr;
  FLASH_QLA_RETURN_IF_ERROR(launch_kernel("list_link_items",
                                          backward ? list_link_items_kernel<true> : list_link_items_kernel<false>, 1,
                                          kListThreads, 0, stream, true, list));
  if (workspace.has_given == 0) return Status();
  return launch("put_given", put_given_kernel, chains, kGivenThreads, 0, stream, params, workspace);
}

Status launch_link_scan(const LinkParams& params, const LinkWorkspace& workspace, cudaStream_t stream) {
  const int32_t slices = workspace.tiles != nullptr ? kChainSlices : 2 * kChainSlices;
  const cp::Carry carry{workspace.chains, workspace.order, workspace.cells, static_cast<int32_t>(params.P),
                        static_cast<int32_t>(workspace.capacity)};
  const ScanParams scan{params.S, params.M, carry, workspace.carries, params.in.Hv, slices};
  return launch_kernel("scan_links", scan_links_kernel, params.P * params.in.Hv * slices, kChainThreads,
                       sizeof(ChainMemory), stream, true, scan);
}

}  // namespace flash_qla::cuda::sm90::links
