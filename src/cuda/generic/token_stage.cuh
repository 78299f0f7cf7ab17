// The tokens of a decode or verify call's row on their way into shared memory, with the options applied, while the
// row's state is on its own way. Params is the kernel's: q, k, v, gates, group, T, V and l2norm are read.
#pragma once

#include "cuda/common/divisor.cuh"
#include "cuda/common/gates.cuh"
#include "cuda/common/overlap.cuh"
#include "cuda/generic/state_vectors.cuh"

namespace flash_qla::cuda {

// Where a thread finds what it reads first, apart from the row's slot that the states' addresses still lack. A kernel
// works this out while it waits for those before it.
struct FirstAddresses {
  uint64_t index, source, destination;
  uint64_t q, k, v, g, beta, A_log, dt_bias;
};

__device__ inline uint64_t address_of(const DeviceTensor& t, int64_t offset) {
  return reinterpret_cast<uint64_t>(t.data) + static_cast<uint64_t>(offset) * (is_wide(t) ? 4 : 2);
}

__device__ inline uint32_t load_raw_at(const DeviceTensor& t, uint64_t address) {
  return is_wide(t) ? *reinterpret_cast<const uint32_t*>(address) : *reinterpret_cast<const uint16_t*>(address);
}

// g and beta of a token and what their activations take, as they were read; and what comes of them.
struct RawGates {
  uint32_t g = 0, beta = 0, A_log = 0, dt_bias = 0;
};
struct Rates {
  float decay, beta;
};

__device__ inline RawGates load_gates(const Gates& gates, const FirstAddresses& at) {
  RawGates raw;
  if (gates.g.data != nullptr) raw.g = load_raw_at(gates.g, at.g);
  if (gates.beta.data != nullptr) raw.beta = load_raw_at(gates.beta, at.beta);
  if (gates.use_gate) {
    raw.A_log = load_raw_at(gates.A_log, at.A_log);
    if (gates.dt_bias.data != nullptr) raw.dt_bias = load_raw_at(gates.dt_bias, at.dt_bias);
  }
  return raw;
}

__device__ inline Rates rates_of(const Gates& gates, const RawGates& raw) {
  float g = gates.g.data == nullptr ? 0.f : unpack(gates.g, raw.g);
  if (gates.use_gate) {
    if (gates.dt_bias.data != nullptr) g += unpack(gates.dt_bias, raw.dt_bias);
    g = -expf(unpack(gates.A_log, raw.A_log)) * softplus(g);
  }
  float beta = gates.beta.data == nullptr ? 1.f : unpack(gates.beta, raw.beta);
  if (gates.use_sigmoid) beta = gates.beta_range * sigmoid(beta);
  return {expf(clamp_log_decay(g)), beta};
}

// Which row, value head and slice of its columns a block has.
struct Place {
  int64_t n;
  int head, slice;
};

template <class Params>
__device__ Place place_of(const Params& p) {
  const uint32_t rest = p.slices.quotient(blockIdx.x), n = p.heads.quotient(rest);
  return {n, static_cast<int>(rest - n * p.heads.divisor), static_cast<int>(blockIdx.x - rest * p.slices.divisor)};
}

// Of an element of row 0 and the block's head.
template <class State>
__device__ uint64_t state_address(const DeviceStates& states, int head, int64_t place) {
  return reinterpret_cast<uint64_t>(static_cast<State*>(states.data) + head * states.head + place);
}

// begin_after_predecessors() with the addresses worked out in front of the wait.
__device__ inline void begin_after_predecessors([[maybe_unused]] const FirstAddresses& at) {
#if __CUDA_ARCH__ >= 900
  // No address has all its bits set. Asking makes the compiler work them out before the wait and not behind it.
  if ((at.index & at.source & at.destination & at.q & at.k & at.v & at.g & at.beta & at.A_log & at.dt_bias) ==
      ~uint64_t{0}) {
    __trap();
  }
#endif
  begin_after_predecessors();
}

// A token in shared memory, with the options applied.
template <int kKeys>
struct SharedToken {
  alignas(16) float q[kKeys], k[kKeys];
  float decay, beta;
  float kq;  // <k, q>
};

// Fills shared memory with a row's tokens and their values in two steps, so that the loads of the first ones run beside
// those of the state. A warp takes q and k of one token at a time, a thread of the last warp its gates. A block with
// one token may have more columns than kColumns, up to a thread each.
template <class Params, int kKeys, bool kOneToken, int kThreads, int kColumns>
class TokenStage {
 public:
  static_assert(kKeys / 4 <= 32 && kColumns <= kThreads);

  __device__ TokenStage(const Params& p, int64_t n, int head, int column0, int columns = kColumns)
      : p_(p), n_(n), head_(head), column0_(column0), columns_(columns) {}

  // Of the tokens that load_first() reads.
  __device__ void find_first(FirstAddresses& at) const {
    const int t = kOneToken ? 0 : min(warp(), tokens() - 1), key_head = this->key_head();
    at.q = address_of(p_.q, offset_of(p_.q, n_, t, key_head, key()));
    at.k = address_of(p_.k, offset_of(p_.k, n_, t, key_head, key()));
    at.v = address_of(p_.v, value_offset(threadIdx.x));
    const Gates& gates = p_.gates;
    at.g = address_of(gates.g, offset_of(gates.g, n_, gate_token(), head_));
    at.beta = address_of(gates.beta, offset_of(gates.beta, n_, gate_token(), head_));
    at.A_log = address_of(gates.A_log, offset_of(gates.A_log, head_));
    at.dt_bias = address_of(gates.dt_bias, offset_of(gates.dt_bias, head_));
  }

  __device__ void load_first(const FirstAddresses& at) {
    if (warp() < tokens()) {
      if (p_.q.quads && p_.k.quads) {
        if (key() < kKeys) {
          q_ = load_quad_at(p_.q, at.q);
          k_ = load_quad_at(p_.k, at.k);
        }
      } else {
        load_keys(kOneToken ? 0 : warp());
      }
    }
    if (has_value(threadIdx.x)) value_ = load_raw_at(p_.v, at.v);
    if (has_gates()) gates_ = load_gates(p_.gates, at);
  }

  __device__ void store_all(SharedToken<kKeys>* s_tokens, float* s_values) {
    if (warp() < tokens()) store_keys(s_tokens[kOneToken ? 0 : warp()]);
    store_value(s_values, threadIdx.x, value_);
    if constexpr (!kOneToken) {
      for (int t = warp() + kThreads / 32; t < tokens(); t += kThreads / 32) {
        load_keys(t);
        store_keys(s_tokens[t]);
      }
      for (int i = threadIdx.x + kThreads; i < tokens() * kColumns; i += kThreads) {
        store_value(s_values, i, has_value(i) ? load_raw(p_.v, value_offset(i)) : 0);
      }
    }
    if (has_gates()) {
      const Rates rates = rates_of(p_.gates, gates_);
      s_tokens[gate_token()].decay = rates.decay;
      s_tokens[gate_token()].beta = rates.beta;
    }
  }

 private:
  __device__ int tokens() const { return kOneToken ? 1 : p_.T; }
  static __device__ int warp() { return static_cast<int>(threadIdx.x) / 32; }
  static __device__ int key() { return 4 * static_cast<int>(threadIdx.x % 32); }
  // The last warp's threads: with few tokens it has no keys to take.
  __device__ int gate_token() const { return kOneToken ? 0 : static_cast<int>(threadIdx.x) - (kThreads - 32); }
  __device__ bool has_gates() const {
    return threadIdx.x >= kThreads - 32 && static_cast<int>(threadIdx.x) - (kThreads - 32) < tokens();
  }

  __device__ int key_head() const { return static_cast<int>(p_.group.quotient(static_cast<uint32_t>(head_))); }
  static __device__ RawQuad load_quad_at(const DeviceTensor& t, uint64_t address) {
    RawQuad raw{};
    if (is_wide(t)) {
      const uint4 bits = *reinterpret_cast<const uint4*>(address);
      raw = {bits.x, bits.y, bits.z, bits.w};
    } else {
      const uint2 bits = *reinterpret_cast<const uint2*>(address);
      raw.x[0] = bits.x;
      raw.x[1] = bits.y;
    }
    return raw;
  }
  __device__ void load_keys(int t) {
    q_ = load_raw_quad(p_.q, offset_of(p_.q, n_, t, key_head()), key(), kKeys);
    k_ = load_raw_quad(p_.k, offset_of(p_.k, n_, t, key_head()), key(), kKeys);
  }
  __device__ void store_keys(SharedToken<kKeys>& token) const {
    float4 q = unpack(p_.q, q_), k = unpack(p_.k, k_);
    if (p_.l2norm) {
      q = normalized(p_.q.dtype, q);
      k = normalized(p_.k.dtype, k);
    }
    const float kq = lane_sum<32>(k.x * q.x + k.y * q.y + k.z * q.z + k.w * q.w);
    if (key() < kKeys) {
      *reinterpret_cast<float4*>(token.q + key()) = q;
      *reinterpret_cast<float4*>(token.k + key()) = k;
    }
    if (key() == 0) token.kq = kq;
  }

  __device__ int values() const { return kOneToken ? columns_ : tokens() * kColumns; }
  // The i-th of the block's values.
  __device__ bool has_value(int i) const { return i < values() && column0_ + (kOneToken ? i : i % kColumns) < p_.V; }
  __device__ int64_t value_offset(int i) const {
    return offset_of(p_.v, n_, kOneToken ? 0 : i / kColumns, head_, column0_ + (kOneToken ? i : i % kColumns));
  }
  __device__ void store_value(float* s_values, int i, uint32_t raw) const {
    if (i < values()) s_values[i] = unpack(p_.v, raw);
  }

  static __device__ float4 normalized(int32_t dtype, float4 x) {
    const float sum = lane_sum<32>(x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w);
    const float r = 1.f / sqrtf(sum + static_cast<float>(kL2NormEps));
    const float2 low = round_pair(dtype, make_float2(x.x * r, x.y * r));
    const float2 high = round_pair(dtype, make_float2(x.z * r, x.w * r));
    return make_float4(low.x, low.y, high.x, high.y);
  }

  const Params& p_;
  int64_t n_;
  int head_, column0_, columns_;
  RawQuad q_{}, k_{};
  uint32_t value_ = 0;
  RawGates gates_;
};

}  // namespace flash_qla::cuda
