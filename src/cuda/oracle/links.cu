// The passes of links in double, a thread a column with its state in local memory: slow and
// obvious. They serve path "cuda_reference", and heads with few keys (computes_in_double()).
#include "cuda/generic/links.cuh"
#include "cuda/oracle/recurrence.cuh"

namespace flash_qla::cuda {
namespace {

constexpr int kThreads = 128;

// Keys a thread keeps: all of them.
constexpr int kMostKeys = FLASH_QLA_MAX_HEAD_DIM;

struct ColumnPlace {
  int64_t part;
  int head, column;
  bool valid;
};

__device__ ColumnPlace column_place(const LinkParams& p, int columns) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t rest = index / columns;
  return {rest / p.in.Hv, static_cast<int>(rest % p.in.Hv), static_cast<int>(index % columns), rest < p.P * p.in.Hv};
}

__device__ double key(const TokenInputs& in, const DeviceTensor& t, int64_t b, int64_t token, int head, int i) {
  return load<double>(t, offset_of(t, b, token, head / in.group, i));
}

__device__ double value(const TokenInputs& in, int64_t b, int64_t token, int head, int column) {
  return in.x.data == nullptr ? 0.0 : load<double>(in.x, offset_of(in.x, b, token, head, column));
}

__device__ void load_given(const LinkParams& p, const LinkPass& pass, const ColumnPlace& at, double* state) {
  if (!pass.starts || p.given.data == nullptr) return;
  for (int i = 0; i < p.in.K; ++i) {
    state[i] = load<double>(
        p.given, pass.row * p.given.row + at.head * p.given.head + i * p.given.key + at.column * p.given.value);
  }
}

__device__ void store_column(const DeviceStates& t, const ColumnPlace& at, int K, const double* state) {
  for (int i = 0; i < K; ++i) {
    store<double>(t, at.part * t.row + at.head * t.head + i * t.key + at.column * t.value, state[i]);
  }
}

__global__ void __launch_bounds__(kThreads)
    oracle_link_states_kernel(const __grid_constant__ LinkParams p, bool transition) {
  const ColumnPlace at = column_place(p, p.in.V);
  if (!at.valid) return;
  const LinkPass pass = p.passes[at.part * p.in.Hv + at.head];
  double state[kMostKeys] = {};
  if (pass.row >= 0 && (pass.is_affine || !transition)) {
    if (transition) {
      state[at.column] = 1.0;
    } else {
      load_given(p, pass, at, state);
    }
    const DeviceSequence sequence = sequence_at(p.sequences, pass.row);
    for (int64_t t = pass.from; t < pass.to; ++t) {
      const int64_t token = sequence.begin + t;
      const double decay = oracle_decay(p.in, sequence.b, token, at.head);
      double along_k = 0.0;
      for (int i = 0; i < p.in.K; ++i) {
        state[i] *= decay;
        along_k += state[i] * key(p.in, p.in.k, sequence.b, token, at.head, i);
      }
      const double u = oracle_beta(p.in, sequence.b, token, at.head) *
                       (value(p.in, sequence.b, token, at.head, at.column) - along_k);
      for (int i = 0; i < p.in.K; ++i) state[i] += key(p.in, p.in.k, sequence.b, token, at.head, i) * u;
    }
  }
  store_column(transition ? p.M : p.S, at, p.in.K, state);
}

__global__ void __launch_bounds__(kThreads) oracle_link_gradients_kernel(const __grid_constant__ LinkParams p) {
  const ColumnPlace at = column_place(p, p.in.V);
  if (!at.valid) return;
  const LinkPass pass = p.passes[at.part * p.in.Hv + at.head];
  double gradient[kMostKeys] = {};
  if (pass.row >= 0) {
    load_given(p, pass, at, gradient);
    const DeviceSequence sequence = sequence_at(p.sequences, pass.row);
    for (int64_t t = pass.to - 1; t >= pass.from; --t) {
      const int64_t token = sequence.begin + t;
      const double d_o = p.scale * value(p.in, sequence.b, token, at.head, at.column);
      double along_k = 0.0;
      for (int i = 0; i < p.in.K; ++i) {
        gradient[i] += key(p.in, p.in.q, sequence.b, token, at.head, i) * d_o;
        along_k += gradient[i] * key(p.in, p.in.k, sequence.b, token, at.head, i);
      }
      const double dv = oracle_beta(p.in, sequence.b, token, at.head) * along_k;
      const double decay = oracle_decay(p.in, sequence.b, token, at.head);
      for (int i = 0; i < p.in.K; ++i) {
        gradient[i] = decay * (gradient[i] - key(p.in, p.in.k, sequence.b, token, at.head, i) * dv);
      }
    }
  }
  store_column(p.S, at, p.in.K, gradient);
}

int64_t blocks(const Problem& p, const LinkParams& params, int64_t columns) {
  return ceil_div(params.P * p.Hv * columns, kThreads);
}

}  // namespace

Status launch_oracle_link_states(const Problem& p, const LinkParams& params, cudaStream_t stream) {
  FLASH_QLA_RETURN_IF_ERROR(launch("oracle_link_states", oracle_link_states_kernel, blocks(p, params, p.V), kThreads, 0,
                                   stream, params, false));
  LinkParams of_keys = params;
  of_keys.in.x = DeviceTensor{};
  of_keys.in.V = of_keys.in.K;
  return launch("oracle_link_transitions", oracle_link_states_kernel, blocks(p, params, p.K), kThreads, 0, stream,
                of_keys, true);
}

Status launch_oracle_link_gradients(const Problem& p, const LinkParams& params, cudaStream_t stream) {
  return launch("oracle_link_gradients", oracle_link_gradients_kernel, blocks(p, params, p.V), kThreads, 0, stream,
                params);
}

}  // namespace flash_qla::cuda
