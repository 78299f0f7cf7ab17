// Path "sm90" of the two summaries without Hopper's instructions: the kernels that make the matrices of segments are
// ones that step through their tokens in double, and what surrounds them (passes, items, scan) is the library's own. Of
// the fused forward's call there is what calls with plain inputs need.
#include <cmath>
#include <set>
#include <tuple>
#include <vector>

#include "core/half.h"
#include "cuda/paths.h"
#include "cuda/sm90/chunk_bwd/links.h"
#include "cuda/sm90/chunk_fwd/call.h"

namespace flash_qla {
namespace cuda::sm90::fwd {

size_t chunk_forward_workspace_size(const Args&, int32_t, bool, const cp::Carry&) { return 256; }
bool writes_listed_states(const Args&, int64_t, int32_t, bool) { return false; }
void take_listed(const flash_qla_forward_arguments&, const Args&, Workspace*, ListedStates*) {}
bool prepares(const GateCopy&, const RowCopy (&)[kMostRowCopies]) { return false; }
Status launch_prepare(const GateCopy& gates, const RowCopy (&copies)[kMostRowCopies], cudaStream_t) {
  bool any = gates.log_decay != nullptr || gates.beta != nullptr;
  for (const RowCopy& copy : copies) any |= copy.d0 * copy.d1 * copy.heads > 0;
  return any ? make_status(FLASH_QLA_NOT_IMPLEMENTED, "the emulated path sm90 copies nothing") : Status();
}

namespace {
double element(const Args& args, const void* rows, int64_t offset) {
  return args.type == DType::kBFloat16 ? to_float(static_cast<const BFloat16*>(rows)[offset])
                                       : to_float(static_cast<const Float16*>(rows)[offset]);
}
}  // namespace

cudaError_t launch_link_states(const Args& args, const LinkMatrices& links, cudaStream_t) {
  const int32_t items = links.counters->states.items;
  const int32_t group = args.num_value_heads / args.num_key_heads;
  for (int32_t i = 0; i < items; ++i) {
    const WorkItem& item = links.items[i];
    const bool transition = (item.flags & cp::kItemTransition) != 0;
    if (item.row < 0 || item.tokens < 1 || item.row + item.tokens > args.num_tokens || item.slot < 0) {
      return cudaErrorInvalidValue;
    }
    std::vector<double> S(kMatrix, 0.0);  // [V][K]
    for (int64_t j = 0; j < kHeadDim && transition; ++j) S[j * kHeadDim + j] = 1.0;
    if ((item.flags & cp::kItemFromStart) != 0 && args.initial.data != nullptr) {
      const float* given = static_cast<const float*>(args.initial.data) + item.sequence * args.initial.slot_stride +
                           item.head * args.initial.head_stride;
      for (int64_t v = 0; v < kHeadDim; ++v) {
        for (int64_t k = 0; k < kHeadDim; ++k) {
          S[v * kHeadDim + k] = given[args.state_v_first != 0 ? v * kHeadDim + k : k * kHeadDim + v];
        }
      }
    }
    for (int64_t t = item.row; t < item.row + item.tokens; ++t) {
      const double decay = std::exp(args.g[t * args.g_token_stride + item.head * args.g_head_stride]);
      const double beta = args.beta[t * args.beta_token_stride + item.head * args.beta_head_stride];
      const int64_t key = t * args.k_token_stride + item.head / group * args.k_head_stride;
      const int64_t value = t * args.v_token_stride + item.head * args.v_head_stride;
      double keys[kHeadDim];
      for (int64_t k = 0; k < kHeadDim; ++k) keys[k] = element(args, args.k, key + k);
      for (int64_t v = 0; v < kHeadDim; ++v) {
        double* row = S.data() + v * kHeadDim;
        double along = 0.0;
        for (int64_t k = 0; k < kHeadDim; ++k) along += row[k] * keys[k];
        const double x = transition ? 0.0 : element(args, args.v, value + v);
        const double u = beta * (x - decay * along);
        for (int64_t k = 0; k < kHeadDim; ++k) row[k] = decay * row[k] + u * keys[k];
      }
    }
    for (int64_t v = 0; v < kHeadDim; ++v) {
      for (int64_t k = 0; k < kHeadDim; ++k) {
        const int64_t to = links.keys_first ? k * kHeadDim + v : v * kHeadDim + k;
        links.matrices[item.slot * kMatrix + to] = static_cast<float>(S[v * kHeadDim + k]);
      }
    }
  }
  return cudaSuccess;
}

}  // namespace cuda::sm90::fwd

namespace cuda::sm90::bwd {

int64_t link_gradients_scratch(int64_t, int64_t, int64_t, bool) { return 256; }

namespace {
double element(const StridedTensor& t, int64_t token, int64_t head, int64_t i) {
  const int64_t offset = token * t.stride[1] + head * t.stride[2] + i;
  return t.type == DType::kBFloat16 ? to_float(static_cast<const BFloat16*>(t.data)[offset])
                                    : to_float(static_cast<const Float16*>(t.data)[offset]);
}
double gate(const StridedTensor& t, int64_t token, int64_t head) {
  return static_cast<const float*>(t.data)[token * t.stride[1] + head * t.stride[2]];
}
}  // namespace

cudaError_t launch_link_gradients(const LinkGradients& links, cudaStream_t) {
  // What the passes of the device find of their chunks.
  std::set<std::tuple<int32_t, int32_t, int32_t>> tiles;
  if (*links.tile_count > links.most_tiles || *links.item_count > links.most_items) return cudaErrorInvalidValue;
  for (int32_t i = 0; i < *links.tile_count; ++i) {
    const LinkTile& tile = links.tiles[i];
    if (tile.tile < 0 || tile.tile >= links.most_tiles) return cudaErrorInvalidValue;
    tiles.emplace(tile.token, tile.valid, tile.tile);
  }
  for (int32_t i = 0; i < *links.item_count; ++i) {
    const cp::WorkItem& item = links.items[i];
    for (int32_t c = 0; c * kChunk < item.tokens; ++c) {
      const std::tuple tile(item.row + c * kChunk, std::min<int32_t>(kChunk, item.tokens - c * kChunk),
                            static_cast<int32_t>((item.chunk + c) * links.Hv + item.head));
      if (tiles.count(tile) == 0) return cudaErrorInvalidValue;
    }
    std::vector<double> D(kHeadDim * kHeadDim, 0.0);  // [V][K]
    for (size_t j = 0; j < D.size() && item.position >= 0; ++j) {
      D[j] = links.cells[static_cast<size_t>(item.position) * D.size() + j];
    }
    const int64_t key_head = item.head / (links.Hv / links.Hq);
    for (int64_t t = item.row + item.tokens - 1; t >= item.row; --t) {
      double q[kHeadDim], keys[kHeadDim];
      for (int64_t k = 0; k < kHeadDim; ++k) {
        q[k] = links.scale * element(links.q, t, key_head, k);
        keys[k] = element(links.k, t, key_head, k);
      }
      const double decay = std::exp(gate(links.g, t, item.head)), beta = gate(links.beta, t, item.head);
      for (int64_t v = 0; v < kHeadDim; ++v) {
        double* row = D.data() + v * kHeadDim;
        const double d_o = element(links.d_o, t, item.head, v);
        double along = 0.0;
        for (int64_t k = 0; k < kHeadDim; ++k) {
          row[k] += q[k] * d_o;
          along += row[k] * keys[k];
        }
        for (int64_t k = 0; k < kHeadDim; ++k) row[k] = decay * (row[k] - beta * along * keys[k]);
      }
    }
    for (size_t j = 0; j < D.size(); ++j) {
      links.cells[static_cast<size_t>(item.slot) * D.size() + j] = static_cast<float>(D[j]);
    }
  }
  return cudaSuccess;
}

}  // namespace cuda::sm90::bwd
}  // namespace flash_qla
