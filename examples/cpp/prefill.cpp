// Prefill of one sequence on the CPU, start to end: fill in the arguments, ask, reserve scratch, run.
// The result is compared with the token recurrence written out below, so the program also shows what is computed.
//
// Exit code 0 when both agree.
#include <flash_qla/flash_qla.hpp>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

namespace {

constexpr int64_t B = 1;    // sequences
constexpr int64_t T = 150;  // tokens: two chunks of 64, and a tail
constexpr int64_t Hq = 2;   // heads of q and k
constexpr int64_t Hv = 4;   // heads of v: two of them share each key head
constexpr int64_t K = 32;   // key dimension
constexpr int64_t V = 48;   // value dimension

// Inputs that are the same on every machine: a fixed mix of sines, in [-1, 1].
float wave(int64_t i, double pitch) { return static_cast<float>(std::sin(pitch * static_cast<double>(i + 1))); }

std::vector<float> waves(int64_t n, double pitch) {
  std::vector<float> x(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) x[static_cast<size_t>(i)] = wave(i, pitch);
  return x;
}

// The definition, one token after the other, in double precision:
//   S <- exp(g) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = K^-1/2 S^T q
std::vector<double> recurrence(const std::vector<float>& q, const std::vector<float>& k, const std::vector<float>& v,
                               const std::vector<float>& g, const std::vector<float>& beta) {
  std::vector<double> o(static_cast<size_t>(B * T * Hv * V));
  for (int64_t h = 0; h < Hv; ++h) {
    const int64_t key_head = h / (Hv / Hq);
    std::vector<double> S(static_cast<size_t>(K * V), 0.0);
    for (int64_t t = 0; t < T; ++t) {
      const float* qt = &q[static_cast<size_t>((t * Hq + key_head) * K)];
      const float* kt = &k[static_cast<size_t>((t * Hq + key_head) * K)];
      const float* vt = &v[static_cast<size_t>((t * Hv + h) * V)];
      const double decay = std::exp(static_cast<double>(g[static_cast<size_t>(t * Hv + h)]));
      for (double& s : S) s *= decay;
      for (int64_t j = 0; j < V; ++j) {
        double seen = 0.0;
        for (int64_t i = 0; i < K; ++i) seen += S[static_cast<size_t>(i * V + j)] * kt[i];
        const double u = beta[static_cast<size_t>(t * Hv + h)] * (vt[j] - seen);
        double sum = 0.0;
        for (int64_t i = 0; i < K; ++i) {
          S[static_cast<size_t>(i * V + j)] += kt[i] * u;
          sum += S[static_cast<size_t>(i * V + j)] * qt[i];
        }
        o[static_cast<size_t>((t * Hv + h) * V + j)] = sum / std::sqrt(static_cast<double>(K));
      }
    }
  }
  return o;
}

int fail(const flash_qla::Status& status) {
  std::fprintf(stderr, "%s\n", status.message());
  return 1;
}

}  // namespace

int main() {
  const std::vector<float> q = waves(B * T * Hq * K, 0.7);
  std::vector<float> k = waves(B * T * Hq * K, 1.3);
  const std::vector<float> v = waves(B * T * Hv * V, 2.1);
  std::vector<float> g = waves(B * T * Hv, 0.3);
  std::vector<float> beta = waves(B * T * Hv, 0.9);
  for (float& x : k) x /= std::sqrt(static_cast<float>(K));  // keys about as long as normalised ones
  for (float& x : g) x = 0.1f * (x - 1.0f);                  // log decay per token, in [-0.2, 0]
  for (float& x : beta) x = 0.5f * (x + 1.0f);               // step size, in [0, 1]

  std::vector<float> o(static_cast<size_t>(B * T * Hv * V));
  std::vector<float> final_state(static_cast<size_t>(B * Hv * K * V));

  using flash_qla::DType;
  flash_qla::ForwardArguments args;
  args.q = flash_qla::tensor(q.data(), DType::kFloat32, {B, T, Hq, K});
  args.k = flash_qla::tensor(k.data(), DType::kFloat32, {B, T, Hq, K});
  args.v = flash_qla::tensor(v.data(), DType::kFloat32, {B, T, Hv, V});
  args.g = flash_qla::tensor(g.data(), DType::kFloat32, {B, T, Hv});
  args.beta = flash_qla::tensor(beta.data(), DType::kFloat32, {B, T, Hv});
  args.o = flash_qla::tensor(o.data(), DType::kFloat32, {B, T, Hv, V});
  args.final_state = flash_qla::tensor(final_state.data(), DType::kFloat32, {B, Hv, K, V});

  if (const flash_qla::Status s = flash_qla::ChunkForward::can_implement(args); !s.ok()) return fail(s);
  size_t bytes = 0;
  if (const flash_qla::Status s = flash_qla::ChunkForward::workspace_size(args, &bytes); !s.ok()) return fail(s);
  std::vector<unsigned char> workspace(bytes);
  if (const flash_qla::Status s = flash_qla::ChunkForward::run(args, workspace.data(), bytes); !s.ok()) return fail(s);

  const std::vector<double> expected = recurrence(q, k, v, g, beta);
  double checksum = 0.0, error = 0.0, norm = 0.0;
  for (size_t i = 0; i < o.size(); ++i) {
    checksum += o[i];
    error += (o[i] - expected[i]) * (o[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  const double relative = std::sqrt(error / norm);
  std::printf("sum of o: %.6f, workspace: %zu bytes, relative error against the recurrence: %.2e\n", checksum, bytes,
              relative);
  return relative < 1e-5 ? 0 : 1;
}
