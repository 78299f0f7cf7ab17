// Links between ranks' parts, before and after the kernel that makes the matrices of segments (link_states.cuh): the list
// of its items, and the scan along the segments. Neither needs Hopper's instructions.
#include "cuda/sm90/common/sizes.h"
#include "cuda/sm90/context_parallel/links.h"

namespace flash_qla::cuda::sm90::cp {
namespace {

constexpr int kWarp = 32;
constexpr int kListThreads = 256, kListWarps = kListThreads / kWarp;
static_assert(kListThreads >= kMostLinkSegments);

struct ListParams {
  const LinkPass* passes;  // [P, Hv]
  SequenceTable sequences;
  LinkWorkspace workspace;
  int32_t chains, Hv;
};
static_assert(std::is_trivially_copyable_v<ListParams>);

__device__ int32_t chunks_of(const LinkPass& pass) {
  return pass.row < 0 ? 0 : static_cast<int32_t>(ceil_div(pass.to - pass.from, kChunk));
}
// Whether all of it counts: a head whose gates forget starts from zero, and wants no M.
__device__ bool is_cut(const LinkPass& pass) { return pass.row >= 0 && (pass.starts != 0 || pass.is_affine != 0); }

__device__ LinkChain chain_of(const LinkPass& pass, const LinkSpacing& spacing) {
  LinkChain chain{0, 0, 0, pass.is_affine};
  if (pass.row >= 0) chain.segments = is_cut(pass) ? spacing.segments(chunks_of(pass)) : 1;
  return chain;
}

// Sums over the block's threads before each; `all`: over all of them.
__device__ int32_t sum_before(int32_t x, int32_t* s_warps, int32_t* all) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int32_t sum = x;
  for (int step = 1; step < kWarp; step *= 2) {
    const int32_t below = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += below;
  }
  if (lane == kWarp - 1) s_warps[warp] = sum;
  __syncthreads();
  int32_t before = 0, total = 0;
  for (int w = 0; w < kListWarps; ++w) {
    if (w < warp) before += s_warps[w];
    total += s_warps[w];
  }
  __syncthreads();  // the sums have been read
  *all = total;
  return before + sum - x;
}

// One block. Chains that are cut come first: their items are the long ones.
__global__ void __launch_bounds__(kListThreads) list_link_items_kernel(const __grid_constant__ ListParams p) {
  __shared__ int32_t s_warps[kListWarps];
  __shared__ int32_t s_longest;
  __shared__ float s_times[kMostLinkSegments];
  const int thread = threadIdx.x;
  const LinkWorkspace& ws = p.workspace;
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
  LinkSpacing spacing = invariant_link_spacing();
  if (ws.by_length == 0) {
    if (thread < kMostLinkSegments) {
      const LinkSpacing tried = even_link_spacing(longest, thread + 1);
      int32_t items = 0, windows = 0;
      for (int32_t i = 0; i < p.chains; ++i) {
        const LinkPass pass = p.passes[i];
        (is_cut(pass) ? items : windows) += chain_of(pass, tried).matrices();
      }
      const bool fits = items + windows <= ws.capacity;
      s_times[thread] = fits ? link_time(items, longest, thread + 1, ws.sms) : INFINITY;
    }
    __syncthreads();
    int best = 0;
    for (int i = 1; i < kMostLinkSegments; ++i) {
      if (s_times[i] < s_times[best]) best = i;
    }
    spacing = even_link_spacing(longest, best + 1);
  }

  int32_t cells = 0, items = 0;  // of the chains so far
  for (int turn = 0; turn < 2; ++turn) {  // those that are cut, the others
    for (int32_t base = 0; base < p.chains; base += kListThreads) {
      const int32_t i = base + thread;
      LinkChain chain{0, 0, 0, 0};
      bool mine = false;
      if (i < p.chains) {
        mine = is_cut(p.passes[i]) == (turn == 0);
        if (mine) chain = chain_of(p.passes[i], spacing);
      }
      int32_t all;
      const int32_t before = sum_before(chain.matrices(), s_warps, &all);
      chain.first_cell = cells + before;
      chain.first_item = items + before;
      if (mine) ws.chains[i] = chain;
      cells += all;
      items += all;
    }
  }
  __syncthreads();  // the chains are in memory
  for (int32_t i = thread / kWarp; i < p.chains; i += kListWarps) {
    const LinkChain chain = ws.chains[i];
    if (chain.segments == 0) continue;
    const LinkPass pass = p.passes[i];
    const DeviceSequence sequence = sequence_at(p.sequences, pass.row);
    const auto first = static_cast<int32_t>(sequence.b * p.sequences.T + sequence.begin);
    for (int32_t k = thread % kWarp; k < chain.matrices(); k += kWarp) {
      ws.items[chain.first_item + k] =
          link_item(chain, k, first, pass.from, pass.to, pass.starts != 0, pass.row, i % p.Hv);
    }
  }
  if (thread == 0) {
    ws.counters->plan = PlanCounters{};
    ws.counters->plan.states.items = items;
    ws.counters->tickets = ItemTickets{};
  }
}

// --- the scan ---

// A block takes 16 columns of one link's S, or M: rows of the cells. fp32 products: 16 columns are 262,144 of them a
// step, 1.2 us of a multiprocessor, and as many blocks as a quarter of 32 heads has are one wave on an H100.
constexpr int kScanThreads = 256, kScanColumns = 16;
constexpr int kSlices = kHeadDim / kScanColumns;
constexpr int kColumnsPerThread = kScanColumns * kHeadDim / kScanThreads;
// Rows of a transition that a thread has on their way, beside as many that it works on.
constexpr int kBatch = 16;
constexpr int kMatrix = kHeadDim * kHeadDim;

struct ScanParams {
  DeviceStates S, M;        // [P, Hv, K, V], [P, Hv, K, K]
  const LinkChain* chains;  // [P, Hv]
  const float* cells;
  int32_t Hv;
};
static_assert(std::is_trivially_copyable_v<ScanParams>);

__global__ void __launch_bounds__(kScanThreads) scan_links_kernel(const __grid_constant__ ScanParams p) {
  __shared__ __align__(16) float s_state[kScanColumns][kHeadDim];  // [column][row]
  const int32_t slice = static_cast<int32_t>(blockIdx.x % (2 * kSlices));
  const int32_t index = static_cast<int32_t>(blockIdx.x / (2 * kSlices));
  const bool transition = slice >= kSlices;
  const int row = threadIdx.x % kHeadDim, first = threadIdx.x / kHeadDim * kColumnsPerThread;
  const int column0 = slice % kSlices * kScanColumns + first;
  const LinkChain chain = p.chains[index];
  const bool wanted = chain.segments > 0 && (!transition || chain.is_affine != 0);
  const auto cell = [&](int32_t number) { return p.cells + static_cast<int64_t>(number) * kMatrix + row; };

  float state[kColumnsPerThread] = {};
  if (wanted) {
    const float* from = cell(transition ? chain.transition_cell(0) : chain.state_cell(0));
#pragma unroll
    for (int i = 0; i < kColumnsPerThread; ++i) state[i] = from[(column0 + i) * kHeadDim];
  }
  const int32_t steps = wanted ? chain.segments - 1 : 0;
  // Row `row` of a transition, columns of the batch: cells hold it transposed, so that lanes read side by side.
  constexpr int kBatches = kHeadDim / kBatch;
  float next[kBatch];
  const auto load = [&](int32_t segment, int batch) {
    const float* from = cell(chain.transition_cell(segment)) + batch * kBatch * kHeadDim;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) next[j] = from[j * kHeadDim];
  };
  if (steps > 0) load(1, 0);
  for (int32_t segment = 1; segment <= steps; ++segment) {
    __syncthreads();  // the state before has been read
#pragma unroll
    for (int i = 0; i < kColumnsPerThread; ++i) {
      s_state[first + i][row] = state[i];
      state[i] = transition ? 0.f : cell(chain.state_cell(segment))[(column0 + i) * kHeadDim];
    }
    __syncthreads();
#pragma unroll 2
    for (int batch = 0; batch < kBatches; ++batch) {
      float now[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) now[j] = next[j];
      const bool last = batch + 1 == kBatches;
      if (!last || segment < steps) load(last ? segment + 1 : segment, last ? 0 : batch + 1);
#pragma unroll
      for (int j = 0; j < kBatch; j += 4) {
#pragma unroll
        for (int i = 0; i < kColumnsPerThread; ++i) {
          const float4 x = *reinterpret_cast<const float4*>(&s_state[first + i][batch * kBatch + j]);
          state[i] = fmaf(now[j + 3], x.w, fmaf(now[j + 2], x.z, fmaf(now[j + 1], x.y, fmaf(now[j], x.x, state[i]))));
        }
      }
    }
  }
  const DeviceStates& out = transition ? p.M : p.S;
  const int64_t place = index / p.Hv * out.row + index % p.Hv * out.head + row * out.key;
#pragma unroll
  for (int i = 0; i < kColumnsPerThread; ++i) store<float>(out, place + (column0 + i) * out.value, state[i]);
}

}  // namespace

LinkWorkspace take_link_workspace(int64_t chains, bool by_length, int32_t sms, Workspace* workspace) {
  LinkWorkspace ws{};
  ws.capacity = link_capacity(chains, by_length, sms);
  ws.by_length = by_length;
  ws.sms = sms;
  ws.counters = workspace->take<LinkCounters>(1);
  ws.chains = workspace->take<LinkChain>(chains);
  ws.items = workspace->take<WorkItem>(ws.capacity);
  ws.cells = workspace->take<float>(ws.capacity * kMatrix);
  return ws;
}

Status launch_link_items(const LinkParams& params, const LinkWorkspace& workspace, cudaStream_t stream) {
  const ListParams list{params.passes, params.sequences, workspace, static_cast<int32_t>(params.P * params.in.Hv),
                        params.in.Hv};
  return launch("list_link_items", list_link_items_kernel, 1, kListThreads, 0, stream, list);
}

Status launch_link_scan(const LinkParams& params, const LinkWorkspace& workspace, cudaStream_t stream) {
  const ScanParams scan{params.S, params.M, workspace.chains, workspace.cells, params.in.Hv};
  return launch("scan_links", scan_links_kernel, params.P * params.in.Hv * 2 * kSlices, kScanThreads, 0, stream, scan);
}

}  // namespace flash_qla::cuda::sm90::cp
