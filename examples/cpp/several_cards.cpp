// One stream of tokens over two ranks, both of them in this process: cut, links, what enters, forward. On GPUs each
// rank is a process with a card of its own, and the copy below is one collective in its stream:
//     ncclAllGather(link_of_this_rank, links_of_all, floats_of_a_link, ncclFloat, communicator, stream);
// The library itself never communicates. The result is compared with one call over the whole stream.
//
// Exit code 0 when both agree.
#include <flash_qla/flash_qla.hpp>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

namespace {

using flash_qla::DType, flash_qla::Status, flash_qla::tensor;
using Tensor = flash_qla::Tensor;

constexpr int64_t T = 300;                         // tokens of the stream
constexpr int64_t Hq = 2, Hv = 4, K = 32, V = 48;  // heads and dimensions
constexpr int64_t N = 3;                           // sequences: the second is on both ranks
constexpr int64_t kOffsets[N + 1] = {0, 60, 260, 300};
constexpr int64_t kRanks = 2;
constexpr int64_t kCuts[kRanks + 1] = {0, 170, T};  // first token of each rank, and the end

// A value head's link as it is sent: S [K, V], M [K, K], its kind, and three numbers that keep rows on 16-byte borders.
constexpr int64_t kRow = K * (V + K) + 4;

std::vector<float> waves(int64_t n, double pitch, double scale) {
  std::vector<float> x(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    x[static_cast<size_t>(i)] = static_cast<float>(scale * std::sin(pitch * static_cast<double>(i + 1)));
  }
  return x;
}

struct Inputs {
  std::vector<float> q = waves(T * Hq * K, 0.7, 0.2), k = waves(T * Hq * K, 1.3, 0.2), v = waves(T * Hv * V, 0.4, 1.0);
  std::vector<float> g = waves(T * Hv, 2.1, 0.05), beta = waves(T * Hv, 0.9, 0.4);
  Inputs() {
    for (float& x : g) x = -std::fabs(x);
    for (float& x : beta) x += 0.5f;
  }
};

// Tokens [begin, end) of x [1, T, heads, size].
Tensor tokens(std::vector<float>& x, int64_t heads, int64_t size, int64_t begin, int64_t end) {
  return tensor(x.data() + begin * heads * size, DType::kFloat32, {1, end - begin, heads, size});
}
Tensor tokens(std::vector<float>& x, int64_t begin, int64_t end) {
  return tensor(x.data() + begin * Hv, DType::kFloat32, {1, end - begin, Hv});
}

// Asks for scratch and runs. Prints what is wrong, if anything is.
template <class Operation, class Arguments>
bool run(const char* what, const Arguments& args) {
  size_t bytes = 0;
  Status status = Operation::workspace_size(args, &bytes);
  std::vector<unsigned char> workspace(bytes);
  if (status.ok()) status = Operation::run(args, workspace.data(), bytes);
  if (!status.ok()) std::fprintf(stderr, "%s: %s\n", what, status.message());
  return status.ok();
}

// What a rank knows of its part once sequence_cut has run: every rank has a row for each sequence.
struct Part {
  int64_t cu_seqlens[N + 1], rows[2], entering_row;
  uint8_t enters, leaves, through;  // bool tensors have a byte an element
};

bool cut(int64_t rank, Part* part) {
  int64_t bounds[2] = {kCuts[rank], kCuts[rank + 1]};
  flash_qla::SequenceCutArguments args;
  args.cu_seqlens = tensor(kOffsets, DType::kInt64, {N + 1});
  args.bounds = tensor(bounds, DType::kInt64, {1, 2});
  args.last_part = rank + 1 == kRanks ? 0 : -1;
  args.all_rows = 1;
  args.local_cu_seqlens = tensor(part->cu_seqlens, DType::kInt64, {N + 1});
  args.rows = tensor(part->rows, DType::kInt64, {1, 2});
  args.entering_rows = tensor(&part->entering_row, DType::kInt64, {1});
  args.enters = tensor(&part->enters, DType::kBool, {1});
  args.leaves = tensor(&part->leaves, DType::kBool, {1});
  args.through = tensor(&part->through, DType::kBool, {1});
  return run<flash_qla::SequenceCut>("sequence_cut", args);
}

// `link`: [1, Hv, kRow].
bool summarise(int64_t rank, Inputs* in, const Part& part, float* link) {
  flash_qla::ChunkSummaryArguments args;
  const int64_t begin = kCuts[rank], end = kCuts[rank + 1];
  args.k = tokens(in->k, Hq, K, begin, end);
  args.v = tokens(in->v, Hv, V, begin, end);
  args.g = tokens(in->g, begin, end);
  args.beta = tokens(in->beta, begin, end);
  args.cu_seqlens = tensor(part.cu_seqlens, DType::kInt64, {N + 1});
  args.rows = tensor(part.rows, DType::kInt64, {1, 2});
  args.leaves = tensor(&part.leaves, DType::kBool, {1});
  args.through = tensor(&part.through, DType::kBool, {1});
  args.S = tensor(link, DType::kFloat32, {1, Hv, K, V}, {Hv * kRow, kRow, V, 1});
  args.M = tensor(link + K * V, DType::kFloat32, {1, Hv, K, K}, {Hv * kRow, kRow, K, 1});
  args.kind = tensor(link + K * (V + K), DType::kFloat32, {1, Hv}, {Hv * kRow, kRow});
  return run<flash_qla::ChunkSummary>("chunk_summary", args);
}

// `links`: [kRanks, 1, Hv, kRow]; `state`: [1, Hv, K, V].
bool combine(int64_t rank, const Part& part, const float* links, float* state) {
  flash_qla::SummaryCombineArguments args;
  args.S = tensor(links, DType::kFloat32, {kRanks, 1, Hv, K, V}, {Hv * kRow, Hv * kRow, kRow, V, 1});
  args.M = tensor(links + K * V, DType::kFloat32, {kRanks, 1, Hv, K, K}, {Hv * kRow, Hv * kRow, kRow, K, 1});
  args.kind = tensor(links + K * (V + K), DType::kFloat32, {kRanks, 1, Hv}, {Hv * kRow, Hv * kRow, kRow});
  args.place = tensor(&rank, DType::kInt64, {1});
  args.wanted = tensor(&part.enters, DType::kBool, {1});
  args.state = tensor(state, DType::kFloat32, {1, 1, Hv, K, V});
  return run<flash_qla::SummaryCombine>("summary_combine", args);
}

// Tokens [begin, end); with a part, from the state that entered it.
bool forward(Inputs* in, int64_t begin, int64_t end, const int64_t* offsets, const Part* part, const float* state,
             std::vector<float>* o) {
  flash_qla::ForwardArguments args;
  args.q = tokens(in->q, Hq, K, begin, end);
  args.k = tokens(in->k, Hq, K, begin, end);
  args.v = tokens(in->v, Hv, V, begin, end);
  args.g = tokens(in->g, begin, end);
  args.beta = tokens(in->beta, begin, end);
  args.cu_seqlens = tensor(offsets, DType::kInt64, {N + 1});
  args.o = tokens(*o, Hv, V, begin, end);
  if (part != nullptr) {
    args.entering_rows = tensor(&part->entering_row, DType::kInt64, {1});
    args.entering_state = tensor(state, DType::kFloat32, {1, Hv, K, V});
  }
  return run<flash_qla::ChunkForward>("chunk_forward", args);
}

}  // namespace

int main() {
  Inputs in;
  Part parts[kRanks];
  std::vector<float> links(static_cast<size_t>(kRanks * Hv * kRow)), o(static_cast<size_t>(T * Hv * V)), alone = o;
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    std::vector<float> link(static_cast<size_t>(Hv * kRow));
    if (!cut(rank, &parts[rank]) || !summarise(rank, &in, parts[rank], link.data())) return 1;
    // Where ranks are processes: ncclAllGather.
    std::memcpy(links.data() + rank * Hv * kRow, link.data(), link.size() * sizeof(float));
  }
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    std::vector<float> state(static_cast<size_t>(Hv * K * V));
    if (!combine(rank, parts[rank], links.data(), state.data())) return 1;
    if (!forward(&in, kCuts[rank], kCuts[rank + 1], parts[rank].cu_seqlens, &parts[rank], state.data(), &o)) return 1;
  }
  if (!forward(&in, 0, T, kOffsets, nullptr, nullptr, &alone)) return 1;

  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < o.size(); ++i) {
    difference += (o[i] - alone[i]) * (o[i] - alone[i]);
    norm += static_cast<double>(alone[i]) * alone[i];
  }
  const double error = std::sqrt(difference / norm);
  std::printf("%lld tokens over %lld ranks: relative difference from one call %.1e\n", static_cast<long long>(T),
              static_cast<long long>(kRanks), error);
  return error < 1e-5 ? 0 : 1;
}
