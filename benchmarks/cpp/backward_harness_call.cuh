// What backward_harness runs: a call of the Hopper backward with its tensors, its errors and its times.
#pragma once

#include <algorithm>
#include <random>
#include <string>

#include "backward_harness_oracle.cuh"
#include "cuda/sm90/chunk_bwd/launch.h"
#include "flash_qla/flash_qla.hpp"

namespace flash_qla::cuda::sm90::bwd::bench {

struct Case {
  std::string name;
  int Hq, Hv;
  std::vector<int> lengths;  // of the sequences
  bool varlen = true;        // else dense: equal lengths
  bool h0 = true, dht = true, d_o = true, A = true, cumsum = false, v_first = false, fp16 = false, half_gates = false;
  bool strong = false;      // decay down to -1000, some growth
  bool small_beta = false;  // a third of the betas 0 or tiny
  int padding = 0;          // tokens after the last sequence
  bool int64_offsets = false;
  int segment_chunks = 0;     // -1: what choose_chunk_backward_plan says
  bool whole_values = false;  // form of the passes
  bool exact = false;         // states in fp32 too, where the call is small
};

// ---- one case ----
struct Outputs {
  std::vector<uint16_t> dq, dk, dv;
  std::vector<float> dg, dbeta, dh0;
  bool operator==(const Outputs& o) const {
    auto same = [](const auto& a, const auto& b) {
      return std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
    };
    return same(dq, o.dq) && same(dk, o.dk) && same(dv, o.dv) && same(dg, o.dg) && same(dbeta, o.dbeta) &&
           same(dh0, o.dh0);
  }
};

class Runner {
 public:
  explicit Runner(const Case& c) : c_(c) {
    N_ = static_cast<int>(c.lengths.size());
    start_.push_back(0);
    for (int length : c.lengths) start_.push_back(start_.back() + length);
    tokens_ = start_.back() + c.padding;
    for (int n = 0; n < N_; ++n) {
      first_slot_.push_back(static_cast<int>(chunks_.size()));
      for (int t = 0; t < c.lengths[n]; t += 64)
        chunks_.push_back(make_int4(start_[n] + t, std::min(64, c.lengths[n] - t), n, 0));
    }
    make_inputs();
    make_params();
  }

  const Outputs& checked() const { return checked_; }

  // Returns whether everything is within bounds.
  bool check() {
    OracleBuffers ref(*this);
    run_oracle(&ref);
    const int kind = c_.fp16 ? 1 : 0, slots = static_cast<int>(chunks_.size());
    bool good = true;
    std::printf("%-28s", c_.name.c_str());
    auto report = [&](const char* name, const Error& e, double bound) {
      const bool ok = e.worst <= bound;
      good &= ok;
      std::printf(" %s %.1e/%.1e%s", name, e.mean, e.worst, ok ? "" : "(!)");
    };
    Buffer<int4> chunks(chunks_.size());
    if (slots > 0) chunks.upload(chunks_);
    // S is kept at the start of a pair of chunks, dS at its end.
    std::vector<int> first, last, grad_tokens, grad_places;
    for (int n = 0; n < N_; ++n) {
      const int chunk_count = (c_.lengths[n] + 63) / 64;
      for (int c = 0; c < chunk_count; c += 2) {
        first.push_back(first_slot_[n] + c);
        last.push_back(first_slot_[n] + std::min(c + 1, chunk_count - 1));
        const bool in_outputs = p_.grads_in_outputs && c_.lengths[n] - 64 * c >= 128;
        grad_tokens.push_back(in_outputs ? start_[n] + 64 * c : -1);
        grad_places.push_back(p_.grads_in_outputs ? n : static_cast<int>(grad_places.size()));
      }
    }
    const int64_t pairs = static_cast<int64_t>(first.size());
    Buffer<int> first_slots(first.size()), last_slots(last.size()), tokens(first.size()), places(first.size());
    if (pairs > 0) {
      first_slots.upload(first);
      last_slots.upload(last);
      tokens.upload(grad_tokens);
      places.upload(grad_places);
    }
    // What the passes leave; the gradients may take the places of dS.
    run({true, true, true, false});
    report("h", compare(c_.Hv, pairs * 16384, StateAgainst{p_.states, ref.S.data, first_slots.data, c_.Hv, c_.fp16}),
           8e-3);
    report("V'", compare(c_.Hv, slots * 8192ll, NewValuesAgainst{p_.v_new, ref.u.data, chunks.data, c_.Hv, c_.fp16}),
           8e-3);
    const int group = c_.Hv / c_.Hq;
    report("dS",
           compare(c_.Hv, pairs * 16384,
                   StateGradsAgainst{dq_.data, dk_.data, reinterpret_cast<const uint16_t*>(p_.state_grads), ref.dS.data,
                                     last_slots.data, tokens.data, places.data, c_.Hv, group, c_.fp16}),
           8e-3);
    run();
    const int64_t T = tokens_;
    report("dq", compare(c_.Hq, T * 128, RowsAgainst{dq_.data, ref.dq.data, c_.Hq, group, 128, kind}), 8e-3);
    report("dk", compare(c_.Hq, T * 128, RowsAgainst{dk_.data, ref.dk.data, c_.Hq, group, 128, kind}), 8e-3);
    report("dv", compare(c_.Hv, T * 128, RowsAgainst{dv_.data, ref.dv.data, c_.Hv, 1, 128, kind}), 8e-3);
    report("db", compare(c_.Hv, T, RowsAgainst{dbeta_.data, ref.dbeta.data, c_.Hv, 1, 1, 2}), 1.5e-2);
    report("dg", compare(c_.Hv, T, RowsAgainst{dg_.data, ref.dg.data, c_.Hv, 1, 1, 2}), 1.5e-2);
    Error dh0{};
    for (int n = 0; n < N_; ++n) {
      const int64_t at = static_cast<int64_t>(n) * c_.Hv * 16384;
      const float* out = dh0_.data + at;
      const double* want = ref.dh0.data + at;
      const bool v_first = c_.v_first;
      auto load = [out, want, v_first] __device__(int head, int64_t i, double* o, double* r) {
        const int64_t k = i / 128, v = i % 128;
        *o = out[head * 16384ll + (v_first ? v * 128 + k : i)];
        *r = want[head * 16384ll + i];
      };
      const Error e = compare(c_.Hv, 16384, load);
      dh0.mean += e.mean / N_;
      if (!(e.worst <= dh0.worst) && !std::isnan(dh0.worst)) dh0.worst = e.worst;
    }
    report("dh0", dh0, 8e-3);

    const Outputs& outputs_once = checked_ = outputs();
    bool repeats = true;
    for (int i = 0; i < 3; ++i) {
      run();
      repeats &= outputs() == outputs_once;
    }
    good &= repeats;
    std::printf(" repeat %s", repeats ? "same" : "DIFFERS(!)");
    if (c_.varlen && N_ > 2) {
      const bool kept = neighbours_unharmed(outputs_once);
      good &= kept;
      std::printf(" nan-neighbour %s", kept ? "ok" : "LEAKS(!)");
    }
    std::printf(" %s\n", good ? "ok" : "FAILED");
    std::fflush(stdout);
    return good;
  }

  void time() {
    run();
    // Of runs of `calls` in a row: a call by itself has the caches and the power that the pause before it left.
    auto median = [&](Parts stage, int calls = 1) {
      cudaEvent_t begin, end;
      CHECK(cudaEventCreate(&begin));
      CHECK(cudaEventCreate(&end));
      std::vector<float> ms;
      for (int i = 0; i < 12; ++i) {
        if (!stage.plan) CHECK(cudaMemset(p_.next_item, 0, sizeof(*p_.next_item)));  // what that kernel would do
        CHECK(cudaEventRecord(begin));
        for (int call = 0; call < calls; ++call) CHECK(launch_chunk_backward(p_, maps_, stage, nullptr));
        CHECK(cudaEventRecord(end));
        CHECK(cudaEventSynchronize(end));
        float x = 0;
        CHECK(cudaEventElapsedTime(&x, begin, end));
        if (i > 1) ms.push_back(x / static_cast<float>(calls));
      }
      std::sort(ms.begin(), ms.end());
      return ms[ms.size() / 2];
    };
    const float all = median({true, true, true, true}), plan = median({true, false, false, false});
    const float prepare = median({false, true, false, false}), states = median({false, false, true, false});
    const float gradients = median({false, false, false, true});
    const float in_a_row = median({true, true, true, true}, 5);
    std::printf(
        "%-14s %s segments of %2d: total %.4f ms (five in a row %.4f): plan %.4f prepare %.4f states %.4f gradients "
        "%.4f\n",
        c_.name.c_str(), p_.whole_values ? "both" : "    ", p_.segment_chunks, all, in_a_row, plan, prepare, states,
        gradients);
    std::fflush(stdout);
  }

 private:
  struct OracleBuffers {
    Buffer<double> dq, dk, dv, u, dg, dbeta, dh0, S, dS, scratch;
    explicit OracleBuffers(const Runner& r)
        : dq(r.tokens_ * r.c_.Hv * 128ll),
          dk(dq.count),
          dv(dq.count),
          u(dq.count),
          dg(r.tokens_ * static_cast<int64_t>(r.c_.Hv)),
          dbeta(dg.count),
          dh0(r.N_ * r.c_.Hv * 16384ll),
          S(r.chunks_.size() * r.c_.Hv * 16384ll),
          dS(S.count),
          scratch(r.N_ * r.c_.Hv * 65ll * 16384) {
      for (Buffer<double>* b : {&dq, &dk, &dv, &u, &dg, &dbeta}) b->fill(0);
    }
  };

  void make_inputs() {
    std::mt19937_64 rng(1234 + tokens_ + c_.Hv);
    // The sum of four uniform numbers, scaled to variance 1: a row of 32768 tokens and 32 heads has 400 million
    // numbers.
    auto normal = [](std::mt19937_64& r) {
      const uint64_t bits = r();
      const int sum = static_cast<int>(bits & 0xffff) + static_cast<int>(bits >> 16 & 0xffff) +
                      static_cast<int>(bits >> 32 & 0xffff) + static_cast<int>(bits >> 48) - 131070;
      return static_cast<float>(sum) * (1.7320508f / 65536.0f);
    };
    std::uniform_real_distribution<float> uniform;
    std::normal_distribution<float> with_tails;  // of betas: one in 60,000 is below 2^-6
    const int64_t T = tokens_;
    auto rows = [&](int heads, bool unit) {
      std::vector<uint16_t> x(T * heads * 128);
      for (int64_t r = 0; r < T * heads; ++r) {
        float row[128], sum = 0;
        for (float& e : row) {
          e = normal(rng);
          sum += e * e;
        }
        const float factor = unit ? 1.0f / std::sqrt(sum) : 1.0f;
        for (int d = 0; d < 128; ++d) x[r * 128 + d] = to_bits(row[d] * factor, c_.fp16);
      }
      return x;
    };
    hq_ = rows(c_.Hq, true);
    hk_ = rows(c_.Hq, true);
    hv_ = rows(c_.Hv, false);
    hdo_ = rows(c_.Hv, false);
    hg_.resize(T * c_.Hv);
    hbeta_.resize(T * c_.Hv);
    for (int64_t i = 0; i < T * c_.Hv; ++i) {
      const int head = i % c_.Hv;
      const float x = normal(rng), logsigmoid = -std::log1p(std::exp(-x));
      float g = head % 4 == 3 ? 0.0f : logsigmoid / 16;
      if (c_.strong)
        g = head % 2 == 0 ? 8 * logsigmoid : (uniform(rng) < 0.02f ? -1000.0f : (uniform(rng) < 0.05f ? 0.2f : g));
      float beta = 1.0f / (1.0f + std::exp(-with_tails(rng)));
      if (c_.small_beta && uniform(rng) < 0.3f) beta = uniform(rng) < 0.5f ? 0.0f : 0.01f * uniform(rng);
      hg_[i] = c_.half_gates ? static_cast<float>(from_bits(to_bits(g, false), false)) : g;
      hbeta_[i] = c_.half_gates ? static_cast<float>(from_bits(to_bits(beta, false), false)) : beta;
    }
    hh0_.resize(N_ * c_.Hv * 16384ll);
    hdht_.resize(hh0_.size());
    for (float& x : hh0_) x = normal(rng);
    for (float& x : hdht_) x = normal(rng) / 8;
  }

  void upload_inputs() {
    q_.upload(hq_);
    k_.upload(hk_);
    v_.upload(hv_);
    do_.upload(hdo_);
    std::vector<float> g = hg_;
    if (c_.cumsum) {
      for (const int4& chunk : chunks_) {
        for (int h = 0; h < c_.Hv; ++h) {
          float sum = 0;
          for (int t = 0; t < chunk.y; ++t) {
            float& x = g[(chunk.x + t) * static_cast<int64_t>(c_.Hv) + h];
            sum += std::max(x, -80.0f);
            x = sum;
          }
        }
      }
    }
    if (c_.half_gates) {
      std::vector<uint16_t> bits(g.size());
      for (size_t i = 0; i < g.size(); ++i) bits[i] = to_bits(g[i], false);
      CHECK(cudaMemcpy(g_.data, bits.data(), bits.size() * 2, cudaMemcpyHostToDevice));
      for (size_t i = 0; i < g.size(); ++i) bits[i] = to_bits(hbeta_[i], false);
      CHECK(cudaMemcpy(beta_.data, bits.data(), bits.size() * 2, cudaMemcpyHostToDevice));
    } else {
      g_.upload(g);
      beta_.upload(hbeta_);
    }
    h0_.upload(hh0_);
    dht_.upload(hdht_);
  }

  void make_params() {
    upload_inputs();
    const int64_t T = tokens_;
    const DType type = c_.fp16 ? DType::kFloat16 : DType::kBFloat16;
    const DType gate_type = c_.half_gates ? DType::kBFloat16 : DType::kFloat32;
    p_ = {};
    p_.B = c_.varlen ? 1 : N_;
    p_.T = static_cast<int>(c_.varlen ? T : T / N_);
    p_.N = N_;
    p_.Hq = c_.Hq;
    p_.Hv = c_.Hv;
    p_.group = c_.Hv / c_.Hq;
    p_.per_sequence = c_.varlen ? 0 : (p_.T + 63) / 64;
    p_.chunk_bound = c_.varlen ? p_.T / 64 + N_ : N_ * p_.per_sequence;
    p_.scale = 1.0f / std::sqrt(128.0f);
    p_.g_is_cumsum = c_.cumsum;
    p_.state_v_first = c_.v_first;
    p_.has_d_o = c_.d_o;
    p_.has_dq_and_dk = true;
    if (c_.varlen) {
      if (c_.int64_offsets) {
        offsets64_.upload(std::vector<int64_t>(start_.begin(), start_.end()));
        p_.cu_seqlens = offsets64_.data;
        p_.cu_seqlens_64 = true;
      } else {
        offsets_.upload(start_);
        p_.cu_seqlens = offsets_.data;
      }
      p_.cu_seqlens_stride = 1;
    }
    auto tokens = [&](void* data, int heads, int64_t columns, DType t) {
      return StridedTensor{data, {p_.T * heads * columns, heads * columns, columns, 1}, t};
    };
    p_.g = tokens(g_.data, c_.Hv, 1, gate_type);
    p_.beta = tokens(beta_.data, c_.Hv, 1, gate_type);
    p_.k = tokens(k_.data, c_.Hq, 128, type);
    p_.q = tokens(q_.data, c_.Hq, 128, type);
    if (c_.d_o) p_.d_o = tokens(do_.data, c_.Hv, 128, type);
    p_.may_be_exact = c_.exact && c_.dht;
    p_.v = tokens(v_.data, c_.Hv, 128, type);
    if (c_.A) p_.A = tokens(A_.data, c_.Hv, 64, type);
    const StridedTensor states{nullptr, {c_.Hv * 16384ll, 16384, 128, 1}, DType::kFloat32};
    if (c_.h0) (p_.initial_state = states).data = h0_.data;
    if (c_.dht) (p_.dht = states).data = dht_.data;
    (p_.dh0 = states).data = dh0_.data;
    p_.dq = tokens(dq_.data, c_.Hq, 128, type);
    p_.dk = tokens(dk_.data, c_.Hq, 128, type);
    p_.dv = tokens(dv_.data, c_.Hv, 128, type);
    p_.dg = tokens(dg_.data, c_.Hv, 1, DType::kFloat32);
    p_.dbeta = tokens(dbeta_.data, c_.Hv, 1, DType::kFloat32);
    p_.segment_chunks = c_.segment_chunks >= 0 ? c_.segment_chunks : choose_segment_chunks(p_, 132);
    p_.whole_values = c_.whole_values;
    workspace_bytes_ = chunk_backward_workspace_size(p_);
    CHECK(cudaMalloc(&workspace_, workspace_bytes_));
    bind_chunk_backward_workspace(&p_, workspace_);
    CHECK(make_chunk_backward_maps(p_, p_.q, tokens(do_.data, c_.Hv, 128, type), &maps_));
    if (c_.A && !chunks_.empty()) {
      Buffer<int4> chunks(chunks_.size());
      chunks.upload(chunks_);
      Buffer<double> beta(hbeta_.size());
      beta.upload(std::vector<double>(hbeta_.begin(), hbeta_.end()));
      A_.fill(0xff);
      solve_kernel<<<static_cast<int>(chunks_.size()) * c_.Hv, 64>>>(k_.data, beta.data, chunks.data, c_.Hq, c_.Hv,
                                                                     c_.fp16, A_.data);
      CHECK(cudaDeviceSynchronize());
    }
  }

  void run_oracle(OracleBuffers* ref) {
    Buffer<int> start(start_.size()), slots(std::max<size_t>(1, first_slot_.size()));
    start.upload(start_);
    slots.upload(first_slot_);
    std::vector<double> g(hg_.size());
    for (size_t i = 0; i < g.size(); ++i) g[i] = std::max(hg_[i], -80.0f);
    Buffer<double> dg(g.size()), beta(g.size()), h0(hh0_.size()), dht(hh0_.size());
    dg.upload(g);
    beta.upload(std::vector<double>(hbeta_.begin(), hbeta_.end()));
    auto states = [&](const std::vector<float>& from) {
      std::vector<double> x(from.size());
      for (size_t i = 0; i < x.size(); ++i) {
        const size_t base = i / 16384 * 16384, k = i % 16384 / 128, v = i % 128;
        x[i] = from[base + (c_.v_first ? v * 128 + k : k * 128 + v)];
      }
      return x;
    };
    h0.upload(states(hh0_));
    dht.upload(states(hdht_));
    OracleArguments a{};
    a.Hq = c_.Hq;
    a.Hv = c_.Hv;
    a.group = c_.Hv / c_.Hq;
    a.fp16 = c_.fp16;
    a.scale = p_.scale;
    a.q = q_.data;
    a.k = k_.data;
    a.v = v_.data;
    a.d_o = c_.d_o ? do_.data : nullptr;
    a.g = dg.data;
    a.beta = beta.data;
    a.h0 = c_.h0 ? h0.data : nullptr;
    a.dht = c_.dht ? dht.data : nullptr;
    a.start = start.data;
    a.first_slot = slots.data;
    a.dq = ref->dq.data;
    a.dk = ref->dk.data;
    a.dv = ref->dv.data;
    a.u = ref->u.data;
    a.dg = ref->dg.data;
    a.dbeta = ref->dbeta.data;
    a.dh0 = ref->dh0.data;
    a.S = ref->S.data;
    a.dS = ref->dS.data;
    a.scratch = ref->scratch.data;
    constexpr int kBytes = (16384 + 10 * 128 + 512) * 8;
    CHECK(cudaFuncSetAttribute(oracle_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    oracle_kernel<<<N_ * c_.Hv, kOracleThreads, kBytes>>>(a);
    CHECK(cudaDeviceSynchronize());
    // A clamped decay has no gradient.
    if (!c_.cumsum) {
      std::vector<double> host = ref->dg.download();
      for (size_t i = 0; i < host.size(); ++i) {
        if (hg_[i] < -80.0f) host[i] = 0.0;
      }
      ref->dg.upload(host);
    }
  }

  void run(Parts stage = {}) {
    for (Buffer<uint16_t>* b : {&dq_, &dk_, &dv_}) b->fill(0xff);
    for (Buffer<float>* b : {&dg_, &dbeta_, &dh0_}) b->fill(0xff);
    CHECK(cudaMemset(workspace_, 0xff, workspace_bytes_));
    const cudaError_t launched = launch_chunk_backward(p_, maps_, stage, nullptr);
    const cudaError_t done = cudaDeviceSynchronize();
    if (launched != cudaSuccess || done != cudaSuccess) {
      std::printf("%s: launch %s, run %s\n", c_.name.c_str(), cudaGetErrorString(launched), cudaGetErrorString(done));
      std::exit(3);
    }
  }

  Outputs outputs() {
    return {dq_.download(), dk_.download(), dv_.download(), dg_.download(), dbeta_.download(), dh0_.download()};
  }

  // NaN in every input of sequence 1 changes no bit elsewhere.
  bool neighbours_unharmed(const Outputs& clean) {
    const auto q = hq_, k = hk_, v = hv_, d_o = hdo_;
    const auto g = hg_, beta = hbeta_;
    auto poison = [&](auto& x, int64_t per_token, auto value) {
      std::fill(x.begin() + start_[1] * per_token, x.begin() + start_[2] * per_token, value);
    };
    const uint16_t nan = c_.fp16 ? 0x7e00 : 0x7fc0;
    poison(hq_, c_.Hq * 128, nan);
    poison(hk_, c_.Hq * 128, nan);
    poison(hv_, c_.Hv * 128, nan);
    poison(hdo_, c_.Hv * 128, nan);
    poison(hg_, c_.Hv, NAN);
    poison(hbeta_, c_.Hv, NAN);
    upload_inputs();
    run();
    Outputs dirty = outputs();
    auto restore = [&](auto& x, const auto& from, int64_t per_token) {
      std::copy(from.begin() + start_[1] * per_token, from.begin() + start_[2] * per_token,
                x.begin() + start_[1] * per_token);
    };
    restore(dirty.dq, clean.dq, c_.Hq * 128);
    restore(dirty.dk, clean.dk, c_.Hq * 128);
    restore(dirty.dv, clean.dv, c_.Hv * 128);
    restore(dirty.dg, clean.dg, c_.Hv);
    restore(dirty.dbeta, clean.dbeta, c_.Hv);
    std::copy(clean.dh0.begin() + c_.Hv * 16384ll, clean.dh0.begin() + 2 * c_.Hv * 16384ll,
              dirty.dh0.begin() + c_.Hv * 16384ll);
    hq_ = q;
    hk_ = k;
    hv_ = v;
    hdo_ = d_o;
    hg_ = g;
    hbeta_ = beta;
    upload_inputs();
    return dirty == clean;
  }

  Case c_;
  int N_ = 0, tokens_ = 0;
  std::vector<int> start_, first_slot_;
  std::vector<int4> chunks_;
  std::vector<uint16_t> hq_, hk_, hv_, hdo_;
  std::vector<float> hg_, hbeta_, hh0_, hdht_;
  int64_t count(int heads, int64_t columns) const {
    int64_t tokens = c_.padding;
    for (int length : c_.lengths) tokens += length;
    return std::max<int64_t>(1, tokens) * heads * columns;
  }
  int64_t state_count() const { return static_cast<int64_t>(c_.lengths.size()) * c_.Hv * 16384; }
  Buffer<uint16_t> q_{static_cast<size_t>(count(c_.Hq, 128))}, k_{q_.count}, v_{static_cast<size_t>(count(c_.Hv, 128))},
      do_{v_.count}, A_{static_cast<size_t>(count(c_.Hv, 64))}, dq_{q_.count}, dk_{q_.count}, dv_{v_.count};
  Buffer<float> g_{static_cast<size_t>(count(c_.Hv, 1))}, beta_{g_.count}, dg_{g_.count}, dbeta_{g_.count},
      h0_{static_cast<size_t>(state_count())}, dht_{h0_.count}, dh0_{h0_.count};
  Buffer<int> offsets_{c_.lengths.size() + 1};
  Buffer<int64_t> offsets64_{c_.lengths.size() + 1};
  Outputs checked_;
  Args p_{};
  Maps maps_{};
  void* workspace_ = nullptr;
  size_t workspace_bytes_ = 0;

 public:
  ~Runner() { cudaFree(workspace_); }
};

}  // namespace flash_qla::cuda::sm90::bwd::bench
