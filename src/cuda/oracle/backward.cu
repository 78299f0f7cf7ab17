#include "cuda/oracle/recurrence.cuh"
#include "cuda/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

// Blocks, each with its own scratch for the states of one chunk: about as many as a large GPU runs at once.
constexpr int64_t kMostBlocks = 132;

struct OracleScratch {
  double* boundaries;  // [slots, Hv, K, V] states at chunk boundaries inside sequences
  double*
      states;  // [blocks, tokens of a chunk + 1, K, V] states of the chunk at hand, before each token and at its end
  double* gradients;  // [blocks, K, V] gradient of the state after the token at hand
  int64_t chunk_tokens;
};

// One block takes one (sequence, value head) after another.
class Reverse {
 public:
  struct Shared {
    double q[FLASH_QLA_MAX_HEAD_DIM], k[FLASH_QLA_MAX_HEAD_DIM];
    double d_o[FLASH_QLA_MAX_HEAD_DIM], error[FLASH_QLA_MAX_HEAD_DIM], du[FLASH_QLA_MAX_HEAD_DIM];
    double sums[kThreads];
  };

  __device__ Reverse(const BackwardParams<double>& p, const OracleScratch& scratch, Shared& shared, int64_t n, int head)
      : p_(p), s_(shared), n_(n), head_(head), sequence_(sequence_at(p.sequences, n)), K_(p.in.K), V_(p.in.V) {
    const int64_t size = static_cast<int64_t>(K_) * V_;
    states_ = scratch.states + blockIdx.x * (scratch.chunk_tokens + 1) * size;
    gradient_ = scratch.gradients + blockIdx.x * size;
    boundaries_ = scratch.boundaries;
    columns_ = (V_ + 31) / 32 * 32;
    segments_ = kThreads / columns_;
    column_ = threadIdx.x % columns_;
    segment_ = threadIdx.x / columns_;
  }

  __device__ void run() {
    fill(gradient_, p_.dht);
    for (int64_t chunk = ceil_div(sequence_.length, kChunkSize) - 1; chunk >= 0; --chunk) {
      const int64_t t0 = chunk * kChunkSize;
      const int64_t count = sequence_.length - t0 < kChunkSize ? sequence_.length - t0 : kChunkSize;
      if (chunk == 0) {
        fill(states_, p_.initial_state);
      } else {
        const int64_t slot = (sequence_.b * p_.sequences.T + sequence_.begin + t0) / kChunkSize;
        const double* from = boundaries_ + (slot * p_.in.Hv + head_) * K_ * V_;
        for (int64_t i = threadIdx.x; i < static_cast<int64_t>(K_) * V_; i += kThreads) states_[i] = from[i];
      }
      __syncthreads();
      for (int64_t i = 0; i < count; ++i) forward_step(sequence_.begin + t0 + i, state(i), state(i + 1));
      for (int64_t i = count - 1; i >= 0; --i) reverse_step(sequence_.begin + t0 + i, state(i), state(i + 1));
    }
    const DeviceStates& out = p_.dh0;
    for (int i = threadIdx.x; out.data != nullptr && i < K_ * V_; i += kThreads) {
      store<double>(out, n_ * out.row + head_ * out.head + i / V_ * out.key + i % V_ * out.value, gradient_[i]);
    }
    __syncthreads();  // the next sequence overwrites the gradient
  }

 private:
  __device__ double* state(int64_t i) const { return states_ + i * K_ * V_; }

  __device__ void fill(double* to, const DeviceStates& from) {
    for (int i = threadIdx.x; i < K_ * V_; i += kThreads) {
      to[i] = from.data == nullptr
                  ? 0.0
                  : load<double>(from, n_ * from.row + head_ * from.head + i / V_ * from.key + i % V_ * from.value);
    }
    __syncthreads();
  }

  __device__ void load_token(int64_t token) {
    const int64_t key_head = head_ / p_.in.group;
    for (int i = threadIdx.x; i < K_; i += kThreads) {
      s_.q[i] = load<double>(p_.in.q, offset_of(p_.in.q, sequence_.b, token, key_head, i));
      s_.k[i] = load<double>(p_.in.k, offset_of(p_.in.k, sequence_.b, token, key_head, i));
    }
    for (int i = threadIdx.x; i < V_; i += kThreads) {
      s_.d_o[i] = p_.d_o.data == nullptr ? 0.0 : load<double>(p_.d_o, offset_of(p_.d_o, sequence_.b, token, head_, i));
    }
    decay_ = oracle_decay(p_.in, sequence_.b, token, head_);
    beta_ = oracle_beta(p_.in, sequence_.b, token, head_);
    __syncthreads();
  }

  // Adds up what the threads of each column hold: the sum for column v in thread v, v < V.
  __device__ double column_sum(double x) {
    if (segment_ < segments_) s_.sums[segment_ * columns_ + column_] = x;
    __syncthreads();
    double sum = 0.0;
    for (int m = 0; threadIdx.x < V_ && m < segments_; ++m) sum += s_.sums[m * columns_ + threadIdx.x];
    __syncthreads();
    return sum;
  }

  // Sum over the block, in thread 0.
  __device__ double block_sum(double x) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) s_.sums[threadIdx.x / 32] = x;
    __syncthreads();
    double sum = 0.0;
    for (int w = 0; threadIdx.x == 0 && w < kWarps; ++w) sum += s_.sums[w];
    __syncthreads();
    return sum;
  }

  // error = v - S~^T k of the token, in shared memory.
  __device__ void compute_error(int64_t token, const double* before) {
    double along_k = 0.0;
    for (int i = segment_; segment_ < segments_ && column_ < V_ && i < K_; i += segments_) {
      along_k += decay_ * before[i * V_ + column_] * s_.k[i];
    }
    along_k = column_sum(along_k);
    if (threadIdx.x < V_) {
      s_.error[threadIdx.x] =
          load<double>(p_.in.x, offset_of(p_.in.x, sequence_.b, token, head_, threadIdx.x)) - along_k;
    }
    __syncthreads();
  }

  // S = S~ + k u^T
  __device__ void forward_step(int64_t token, const double* before, double* after) {
    load_token(token);
    compute_error(token, before);
    for (int i = threadIdx.x; i < K_ * V_; i += kThreads) {
      after[i] = decay_ * before[i] + s_.k[i / V_] * beta_ * s_.error[i % V_];
    }
    __syncthreads();
  }

  // Takes the gradient of the state after the token to that of the state before it.
  __device__ void reverse_step(int64_t token, const double* before, const double* after) {
    load_token(token);
    compute_error(token, before);
    // o = scale S^T q
    double du = 0.0;
    for (int i = segment_; segment_ < segments_ && column_ < V_ && i < K_; i += segments_) {
      double& gradient = gradient_[i * V_ + column_];
      gradient += p_.scale * s_.q[i] * s_.d_o[column_];
      du += gradient * s_.k[i];  // S = S~ + k u^T
    }
    du = column_sum(du);
    if (threadIdx.x < V_) {
      s_.du[threadIdx.x] = du;
      if (p_.dv.data != nullptr) {
        store<double>(p_.dv, offset_of(p_.dv, sequence_.b, token, head_, threadIdx.x), beta_ * du);
      }
    }
    __syncthreads();
    const int64_t row = (sequence_.b * p_.sequences.T + token) * p_.in.Hv + head_;
    // u = beta (v - S~^T k)
    const double d_beta = block_sum(threadIdx.x < V_ ? s_.du[threadIdx.x] * s_.error[threadIdx.x] : 0.0);
    double d_log_decay = 0.0;
    for (int i = threadIdx.x / 32; i < K_; i += kWarps) {
      double dq = 0.0, dk = 0.0;
      for (int j = threadIdx.x % 32; j < V_; j += 32) {
        const int64_t at = static_cast<int64_t>(i) * V_ + j;
        const double decayed = decay_ * before[at], d_error = beta_ * s_.du[j];
        dq += p_.scale * after[at] * s_.d_o[j];
        dk += gradient_[at] * beta_ * s_.error[j] - decayed * d_error;
        const double d_decayed = gradient_[at] - s_.k[i] * d_error;
        d_log_decay += d_decayed * decayed;  // S~ = e^g S
        gradient_[at] = decay_ * d_decayed;
      }
      dq = warp_sum(dq);
      dk = warp_sum(dk);
      if (p_.dq != nullptr && threadIdx.x % 32 == 0) {
        p_.dq[row * K_ + i] = dq;
        p_.dk[row * K_ + i] = dk;
      }
    }
    d_log_decay = block_sum(d_log_decay);
    if (p_.dq != nullptr && threadIdx.x == 0) {
      p_.d_log_decay[row] = d_log_decay;
      p_.d_beta[row] = d_beta;
    }
    __syncthreads();
  }

  const BackwardParams<double>& p_;
  Shared& s_;
  int64_t n_;
  int head_;
  DeviceSequence sequence_;
  int K_, V_;
  int columns_, segments_, column_, segment_;  // threads as columns x segments of the keys
  double *states_, *gradient_, *boundaries_;
  double decay_, beta_;
};

__global__ void __launch_bounds__(kThreads)
    oracle_backward_kernel(const __grid_constant__ BackwardParams<double> p, OracleScratch scratch) {
  __shared__ Reverse::Shared s_shared;
  for (int64_t item = blockIdx.x; item < p.sequences.N * p.in.Hv; item += gridDim.x) {
    Reverse(p, scratch, s_shared, item / p.in.Hv, static_cast<int>(item % p.in.Hv)).run();
  }
}

class OracleBackward {
 public:
  using Real = double;

  OracleBackward(const Problem& p, Workspace* workspace) {
    const int64_t size = p.K * p.V, items = p.N * p.Hv;
    blocks_ = items < kMostBlocks ? items : kMostBlocks;
    scratch_.chunk_tokens = p.T < kChunkSize ? p.T : kChunkSize;
    scratch_.boundaries = workspace->take<double>(boundary_slots(p) * p.Hv * size);
    scratch_.states = workspace->take<double>(blocks_ * (scratch_.chunk_tokens + 1) * size);
    scratch_.gradients = workspace->take<double>(blocks_ * size);
  }

  Status run(const Problem& p, const BackwardParams<double>& params, cudaStream_t stream) const {
    ForwardParams forward{};
    forward.sequences = params.sequences;
    forward.in = params.in;
    forward.initial_state = params.initial_state;
    forward.scale = params.scale;
    FLASH_QLA_RETURN_IF_ERROR(launch_oracle_forward(p, forward, scratch_.boundaries, false, stream));
    return launch("oracle_backward", oracle_backward_kernel, blocks_, kThreads, 0, stream, params, scratch_);
  }

 private:
  int64_t blocks_;
  OracleScratch scratch_;
};

std::string accept(const flash_qla_backward_arguments&, const Problem&) { return {}; }

}  // namespace

size_t oracle_backward_workspace(const flash_qla_backward_arguments& args, const Problem& p) {
  return workspace_bytes<BackwardCall<OracleBackward>>(args, p);
}

Status run_oracle_backward(const flash_qla_backward_arguments& args, const Problem& p, void* memory, void* stream) {
  const DeviceGuard guard(args.options.device_index);
  FLASH_QLA_RETURN_IF_ERROR(guard.status());
  Workspace workspace(memory);
  return BackwardCall<OracleBackward>(args, p, &workspace).run(static_cast<cudaStream_t>(stream));
}

}  // namespace cuda

const BackwardPath kCudaOracleChunkBackward = {
    "cuda_reference", FLASH_QLA_CUDA, true, cuda::accept, cuda::oracle_backward_workspace, cuda::run_oracle_backward};

}  // namespace flash_qla
