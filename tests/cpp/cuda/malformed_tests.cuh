// The groups of cuda_generic_test about memory safety: whatever lies in a call's device memory, it returns, nothing but
// its outputs is written, and a well-formed call behind it is right. compute-sanitizer's memcheck sees what is read.
#pragma once

#include <chrono>
#include <memory>
#include <thread>

#include "cuda/sm90/chunk_fwd/args.h"
#include "cuda/sm90/context_parallel/plan.h"
#include "malformed_calls.cuh"
#include "repeated_call.cuh"
#include "sm90_forward_tests.cuh"

namespace flash_qla::testing {

// Adds up words, each with its place.
__global__ void sum_words_kernel(const uint32_t* data, int64_t words, unsigned long long* sum) {
  unsigned long long own = 0;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < words;
       i += gridDim.x * blockDim.x) {
    own += (data[i] + 1ull) * (static_cast<unsigned long long>(i) * 0x9e3779b97f4a7c15ull | 1ull);
  }
  atomicAdd(sum, own);
}

// Waits for the device. A call that does not return, or that has lost the device, ends the program: nothing runs there
// any more.
inline void wait_for(const std::string& what, int seconds) {
  cudaEvent_t done;
  check_cuda(cudaEventCreateWithFlags(&done, cudaEventDisableTiming), "cudaEventCreate");
  cudaError_t error = cudaEventRecord(done);
  if (error == cudaSuccess) error = cudaErrorNotReady;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  while (error == cudaErrorNotReady && std::chrono::steady_clock::now() < end) {
    error = cudaEventQuery(done);
    if (error == cudaErrorNotReady) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  if (error != cudaSuccess) {
    std::printf("FAILED malformed: %s: %s\n", what.c_str(),
                error == cudaErrorNotReady ? "does not return" : cudaGetErrorString(error));
    std::fflush(stdout);
    std::_Exit(2);  // an orderly end would wait for the device
  }
  check_cuda(cudaEventDestroy(done), "cudaEventDestroy");
}

// A well-formed call that must give the same results after every malformed one.
class Probe {
 public:
  virtual ~Probe() = default;
  // What is wrong with it; empty: nothing.
  virtual std::string ask(int seconds) = 0;
};
template <class Call>
class CallProbe : public Probe {
 public:
  CallProbe(const std::string& name, const Call& call, const char* path, Checker& checker, int seconds)
      : call_(call), memory_(Arena::Pieces::kGuarded), name_(name) {
    // Right against the oracle where it runs first, and the same here.
    checker.check(name, call_, path, "cuda_reference", FLASH_QLA_CUDA);
    Call checked = call_;
    checker.run(name, checked, path);
    repeated_ = std::make_unique<RepeatedCall<Call>>(call_, memory_, path);
    right_ = repeated_->take_results(memory_);
    repeated_->poison(nullptr);
    repeated_->run(nullptr);
    repeated_->keep(right_, nullptr);
    wait_for(name, seconds);
    const NamedBuffers outputs = call_.outputs(), wanted = checked.outputs();
    for (size_t i = 0; i < outputs.size(); ++i) {
      outputs[i].second->download();
      if (outputs[i].second->bytes() != wanted[i].second->bytes()) {
        checker.fail(name, path, outputs[i].first + " is not the same in other memory");
      }
    }
  }
  std::string ask(int seconds) override {
    repeated_->poison(nullptr);
    repeated_->run(nullptr);
    repeated_->compare(right_, nullptr);
    wait_for(name_ + ", well-formed, behind it", seconds);
    if (!repeated_->status().ok()) return repeated_->status().message();
    const unsigned long long words = repeated_->different() - before_;
    before_ += words;
    if (words > 0) return std::to_string(words) + " words of " + name_ + " behind it are wrong";
    return memory_.intact() ? std::string() : "memory around " + name_ + " was written";
  }

 private:
  Call call_;
  Arena memory_;
  std::string name_;
  std::unique_ptr<RepeatedCall<Call>> repeated_;
  std::vector<char*> right_;
  unsigned long long before_ = 0;
};

inline std::unique_ptr<Probe> forward_probe(const char* path, int64_t K, flash_qla_cp_mode mode, bool forced,
                                            Checker& checker, int seconds) {
  Random random(97);
  Shape s;
  s.dtype = DType::kBFloat16;
  s.Hv = 2;
  s.K = s.V = K;
  s.cu_seqlens = {0, 333, 333, 700};
  s.T = 710;
  Features f;
  f.cp_mode = mode;
  f.force_intra_cp = forced;
  PoolFeatures pool;
  pool.pool = pool.packed_checkpoints = pool.skip_rows = true;
  ForwardCall call;
  call.draw(s, f, pool, false, random);
  return std::make_unique<CallProbe<ForwardCall>>(forced ? "a forward in segments" : "a forward", call, path, checker,
                                                  seconds);
}
inline std::unique_ptr<Probe> backward_probe(const char* path, int64_t K, Checker& checker, int seconds) {
  Random random(101);
  Shape s;
  s.dtype = DType::kBFloat16;
  s.Hv = 2;
  s.K = s.V = K;
  s.cu_seqlens = {0, 300, 300, 500};
  s.T = 510;
  Features f;
  f.initial_state = true;
  f.force_intra_cp = true;
  BackwardCall call;
  call.draw(s, f, false, true, true, random);
  return std::make_unique<CallProbe<BackwardCall>>("a backward", call, path, checker, seconds);
}
inline std::unique_ptr<Probe> decode_probe(const char* path, Checker& checker, int seconds) {
  Random random(103);
  Shape s;
  s.dtype = DType::kBFloat16;
  s.B = 20;
  s.T = 2;
  s.Hv = 2;
  s.K = s.V = 128;
  PoolFeatures pool;
  pool.pool = pool.skip_rows = true;
  ForwardCall call;
  call.draw(s, Features{}, pool, true, random);
  return std::make_unique<CallProbe<ForwardCall>>("decode", call, path, checker, seconds);
}

// A group of malformed calls.
class MalformedGroup {
 public:
  MalformedGroup(const Settings& settings, Checker& checker)
      : settings_(settings),
        checker_(checker),
        memory_(settings.small ? Arena::Pieces::kExact : Arena::Pieces::kGuarded),
        seconds_(settings.small ? 240 : 30) {
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    check_cuda(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  }
  int seconds() const { return seconds_; }
  // Calls that were planned for a sequence split, by their mode and whether it was forced.
  const std::map<std::pair<int, bool>, int64_t>& planned() const { return planned_; }

  // Runs one malformed call and then `probe`. path: null as the library chooses.
  template <class Call>
  void run(const std::string& what, Call& call, const char* path, Probe& probe, Random& random) {
    // A small run is one under a tool: should it not end, its log says where it was.
    if (settings_.small) {
      std::printf("%s\n", what.c_str());
      std::fflush(stdout);
    }
    memory_.reset();
    NamedBuffers only_read = call.inputs();
    for (auto& [name, buffer] : only_read) buffer->upload(memory_);
    for (auto [name, buffer] : call.in_place()) buffer->upload(memory_);
    for (auto [name, buffer] : call.outputs()) {
      buffer->poison();
      buffer->upload(memory_);
    }
    draw_malformed_numbers(call, random);
    auto args = call.arguments([](Buffer& b) { return b.present() ? b.device() : Tensor{}; });
    args.options.path = path;
    args.options.device_type = FLASH_QLA_CUDA;
    check_cuda(cudaGetDevice(&args.options.device_index), "cudaGetDevice");
    const std::string computed_by = path_of(call, args);
    checker_.count(computed_by);
    size_t bytes = 0;
    Status status = call.workspace_size(args, &bytes);
    void* const workspace = memory_.take(bytes);
    check_cuda(cudaMemset(workspace, 0xff, bytes), "cudaMemset");
    const std::vector<unsigned long long> before = sums_of(only_read);
    const Reading pool = copy_of_pool(call);
    wait_for(what + ", before the call", seconds_);
    if (status.ok()) status = call.run(args, workspace, bytes);
    if (!status.ok()) checker_.fail(what, path, status.message());
    wait_for(what, seconds_);

    const std::vector<unsigned long long> after = sums_of(only_read);
    for (size_t i = 0; i < before.size(); ++i) {
      if (before[i] != after[i]) checker_.fail(what, path, "input " + only_read[i].first + " was changed");
    }
    if (!memory_.intact()) checker_.fail(what, path, "memory beside a tensor was written");
    check_pool(what, call, pool);
    if constexpr (std::is_same_v<Call, ForwardCall>) {
      if (computed_by == "sm90" && explained(call, args).find("split: planned") != std::string::npos) {
        ++planned_[{call.in.features.cp_mode, call.in.features.force_intra_cp}];
        check_plan(what, call, workspace);
      }
    }
    if (const std::string wrong = probe.ask(seconds_); !wrong.empty()) checker_.fail(what, path, wrong);
  }

 private:
  std::vector<unsigned long long> sums_of(const NamedBuffers& buffers) {
    std::vector<unsigned long long> sums(buffers.size(), 0);
    Arena own(Arena::Pieces::kExact);
    auto* const on_device = static_cast<unsigned long long*>(own.take(sums.size() * sizeof(sums[0])));
    check_cuda(cudaMemset(on_device, 0, sums.size() * sizeof(sums[0])), "cudaMemset");
    for (size_t i = 0; i < buffers.size(); ++i) {
      const Buffer& buffer = *buffers[i].second;
      const auto words = static_cast<int64_t>(buffer.bytes().size() / 4);
      if (!buffer.present() || words == 0) continue;
      sum_words_kernel<<<256, 256>>>(static_cast<const uint32_t*>(buffer.storage()), words, on_device + i);
    }
    check_cuda(cudaMemcpy(sums.data(), on_device, sums.size() * sizeof(sums[0]), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return sums;
  }

  // The pool as it is given to the call.
  template <class Call>
  Reading copy_of_pool(Call& call) {
    for (auto [name, buffer] : call.in_place()) {
      if (!buffer->present() || buffer->bytes().empty()) continue;
      const size_t bytes = buffer->bytes().size();
      char* const copy = static_cast<char*>(memory_.take(bytes));
      check_cuda(cudaMemcpy(copy, buffer->storage(), bytes, cudaMemcpyDeviceToDevice), "cudaMemcpy");
      return {static_cast<char*>(buffer->storage()), bytes, copy};
    }
    return {};
  }

  // Slots that no index names are as they were.
  void check_pool(const std::string& what, ForwardCall& call, const Reading& given) {
    if (given.bytes == 0) return;
    const Tensor& pool = call.pool.shape_view();
    std::set<int64_t> named;
    for (Buffer* indices :
         {call.final_indices.present() ? &call.final_indices : &call.initial_indices, &call.checkpoint_indices}) {
      if (!indices->present()) continue;
      const Tensor t = indices->host();
      for (int64_t i = 0; i < t.shape[0]; ++i) {
        for (int64_t j = 0; j < (t.ndim > 1 ? t.shape[1] : 1); ++j) named.insert(load_index(t, i, j));
      }
    }
    Arena own(Arena::Pieces::kExact);
    auto* const count = static_cast<unsigned long long*>(own.take(sizeof(unsigned long long)));
    check_cuda(cudaMemset(count, 0, sizeof(*count)), "cudaMemset");
    const int64_t size = size_of(dtype(pool)), words = pool.shape[1] * pool.shape[2] * pool.shape[3] * size / 4;
    for (int64_t slot = 0; slot < pool.shape[0]; ++slot) {
      if (named.count(slot) > 0) continue;
      const int64_t at = slot * pool.stride[0] * size;
      count_different_kernel<<<64, 256>>>(reinterpret_cast<const uint32_t*>(given.data + at),
                                          reinterpret_cast<const uint32_t*>(given.copy + at), words, count);
    }
    unsigned long long different = 0;
    check_cuda(cudaMemcpy(&different, count, sizeof(different), cudaMemcpyDeviceToHost), "cudaMemcpy");
    if (different > 0) {
      checker_.fail(what, "pool", std::to_string(different) + " words of slots that no index names were written");
    }
  }
  template <class Call>
  void check_pool(const std::string&, Call&, const Reading&) {}  // no other has one

  // The lists of a plan are within the room that shapes give them.
  void check_plan(const std::string& what, const ForwardCall& call, const void* workspace) {
    using namespace cuda::sm90::cp;
    const Shape& s = call.in.shape;
    PlanCounters plan{};  // at the start of a planned call's scratch
    check_cuda(cudaMemcpy(&plan, workspace, sizeof(plan), cudaMemcpyDeviceToHost), "cudaMemcpy");
    const Capacity room = plan_capacity(static_cast<Mode>(call.in.features.cp_mode), call.in.features.force_intra_cp,
                                        s.B * s.T, static_cast<int32_t>(s.N()), static_cast<int32_t>(s.Hv), sms_);
    const int64_t outputs = int64_t{plan.outputs.items} + plan.outputs.dependent_items;
    const int64_t chains = plan.progress.pieces / kScanSlices;
    if (plan.made != 1 || plan.states.items < 0 || plan.states.items > room.state_items || outputs < 0 ||
        outputs > room.output_items || chains > room.scans) {
      checker_.fail(what, "sm90",
                    "the plan has " + std::to_string(plan.states.items) + " state tiles, " + std::to_string(outputs) +
                        " output tiles and " + std::to_string(chains) + " chains in room for " +
                        std::to_string(room.state_items) + ", " + std::to_string(room.output_items) + " and " +
                        std::to_string(room.scans));
    }
  }

  const Settings& settings_;
  Checker& checker_;
  Arena memory_;
  const int seconds_;
  int sms_ = 0;
  std::map<std::pair<int, bool>, int64_t> planned_;
};

// What a drawn case is told by: its modes, its shape and the numbers that repeat it.
template <class Call>
std::string describe_malformed(const char* kind, int64_t i, const Call& call) {
  const Shape& s = call.in.shape;
  char text[256];
  std::snprintf(text, sizeof(text), "case %lld, %s (B %lld T %lld N %lld Hq %lld Hv %lld K %lld V %lld, cp %d,",
                static_cast<long long>(i), kind, static_cast<long long>(s.B), static_cast<long long>(s.T),
                static_cast<long long>(s.N()), static_cast<long long>(s.Hq), static_cast<long long>(s.Hv),
                static_cast<long long>(s.K), static_cast<long long>(s.V), static_cast<int>(call.in.features.cp_mode));
  std::string offsets = call.in.cu_seqlens.present() ? ", offsets" : "";
  if (Buffer given = call.in.cu_seqlens; given.present()) {
    const Tensor t = given.host();
    for (int64_t n = 0; n < std::min<int64_t>(t.shape[0], 8); ++n) offsets += " " + std::to_string(load_index(t, n));
  }
  return text + describe(s, call.in.features) + describe(call) + offsets + ")";
}

// At K = V = 128 in bf16 and fp16 every mode of the Hopper kernels, and decode.
inline int64_t test_malformed(const Settings& settings, Arena& arena) {
  Checker checker("malformed device data", settings, arena);
  MalformedGroup group(settings, checker);
  const int seconds = group.seconds();
  const std::unique_ptr<Probe> whole = forward_probe("sm90", 128, FLASH_QLA_CP_OFF, false, checker, seconds),
                               cut = forward_probe("sm90", 128, FLASH_QLA_CP_AUTO, true, checker, seconds),
                               backward = backward_probe("sm90", 128, checker, seconds),
                               decode = decode_probe("cuda_decode", checker, seconds);
  MalformedSize size;
  if (settings.small) size.most = 40000;
  const int64_t cases = 4 * settings.cases;
  int64_t forwards = 0;
  for (int64_t i = 0; i < cases; ++i) {
    if (!settings.only_cases.empty() && settings.only_cases.count(i) == 0) continue;
    Random random(settings.seed * 1000003 + static_cast<uint64_t>(i));
    const double kind = random.uniform();
    const char* const path = random.chance(0.2) ? "sm90" : nullptr;
    if (kind < 0.55) {
      ForwardCall call = draw_malformed_forward(size, random);
      const bool takes = ChunkForward::can_implement(arguments_for_sm90(call)).ok();
      ++forwards;
      group.run(describe_malformed("forward", i, call), call, takes ? path : nullptr,
                call.in.features.force_intra_cp ? *cut : *whole, random);
    } else if (kind < 0.85) {
      BackwardCall call = draw_malformed_backward(size, random);
      group.run(describe_malformed("backward", i, call), call, path, *backward, random);
    } else {
      ForwardCall call = draw_malformed_decode(size, random);
      group.run(describe_malformed("decode", i, call), call, nullptr, *decode, random);
    }
  }
  int64_t planned = 0;
  for (const auto& [mode, calls] : group.planned()) planned += calls;
  std::printf("  %lld of %lld forward calls were planned for a split\n", static_cast<long long>(planned),
              static_cast<long long>(forwards));
  // Both modes that cut, by themselves and forced to; of a few calls that is chance.
  if (forwards >= 100 && (group.planned().size() < 4 || 5 * planned < forwards)) {
    checker.fail("draws", "sm90", "too few calls are planned");
  }
  return checker.finish();
}

// Other head dimensions and dtypes.
inline int64_t test_malformed_generic(const Settings& settings, Arena& arena) {
  Checker checker("malformed device data, cuda_generic", settings, arena, "cuda_generic");
  MalformedGroup group(settings, checker);
  const std::unique_ptr<Probe> forward = forward_probe("cuda_generic", 64, FLASH_QLA_CP_AUTO, false, checker,
                                                       group.seconds()),
                               backward = backward_probe("cuda_generic", 64, checker, group.seconds());
  MalformedSize size;
  size.generic = true;
  size.most = 2000;
  for (int64_t i = 0; i < settings.cases / 2; ++i) {
    if (!settings.only_cases.empty() && settings.only_cases.count(i) == 0) continue;
    Random random(settings.seed * 1000003 + static_cast<uint64_t>(i));
    const double kind = random.uniform();
    if (kind < 0.6) {
      ForwardCall call = kind < 0.4 ? draw_malformed_forward(size, random) : draw_malformed_decode(size, random);
      group.run(describe_malformed(call.recurrent ? "token by token" : "forward", i, call), call, "cuda_generic",
                *forward, random);
    } else {
      BackwardCall call = draw_malformed_backward(size, random);
      group.run(describe_malformed("backward", i, call), call, "cuda_generic", *backward, random);
    }
  }
  return checker.finish();
}

}  // namespace flash_qla::testing
