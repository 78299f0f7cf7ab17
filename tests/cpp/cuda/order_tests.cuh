// Whether a call waits for what is before it in its stream, and what is behind it waits for the call: kernels of a call
// may start before the ones in front of them have ended (programmatic dependent launch).
#pragma once

#include "checker.h"
#include "repeated_call.cuh"

namespace flash_qla::testing {

struct Readings {
  static constexpr int kMost = 20;  // more than any call has
  Reading list[kMost];
  int count = 0;
};

// Calls work(byte) or work(word) of everything, by all threads of a grid.
template <typename Work>
__device__ void for_each_word(const Readings& readings, Work work) {
  const size_t thread = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
  const size_t threads = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (int i = 0; i < readings.count; ++i) {
    const Reading& r = readings.list[i];
    const size_t words = r.bytes / 4;
    for (size_t w = thread; w < words; w += threads) {
      work(reinterpret_cast<uint32_t*>(r.data)[w], reinterpret_cast<const uint32_t*>(r.copy)[w]);
    }
    for (size_t b = 4 * words + thread; b < r.bytes; b += threads) work(r.data[b], r.copy[b]);
  }
}

// Writes what a call reads, after some 20 us: longer than a kernel's start, so that who does not wait reads what was
// there before. lets_next_start: as a kernel of the user's may that is launched to overlap.
__global__ void write_late_kernel(const __grid_constant__ Readings readings, bool lets_next_start) {
#if __CUDA_ARCH__ >= 900
  if (lets_next_start) asm volatile("griddepcontrol.launch_dependents;");
#endif
  const int64_t begin = clock64();
  while (clock64() - begin < 40000) {
  }
  for_each_word(readings, [](auto& to, auto from) { to = from; });
}

// Spoils what the call before it reads, as soon as that has ended; starts before, if it may.
__global__ void spoil_kernel(const __grid_constant__ Readings readings) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  for_each_word(readings, [](auto& to, auto) { to = static_cast<std::decay_t<decltype(to)>>(~0u); });
}

inline void launch_spoil_kernel(const Readings& readings, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(64);
  config.blockDim = dim3(256);
  config.stream = stream;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, spoil_kernel, readings), "cudaLaunchKernelEx");
}

// Who writes what a call reads, just before the call.
enum class Writer { kKernel, kKernelThatLetsNextStart, kCopies };

// The call in every order, its outputs compared with those of a quiet one. stale: other offsets that the call's may be
// before they are written; empty: none.
template <class Call>
void check_orders(const char* name, Call& call, const char* path, const std::vector<int64_t>& stale, Checker& checker,
                  Arena& arena) {
  arena.reset();
  cudaStream_t stream, side;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  check_cuda(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking), "cudaStreamCreate");
  cudaEvent_t fork, join;
  check_cuda(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming), "cudaEventCreate");
  check_cuda(cudaEventCreateWithFlags(&join, cudaEventDisableTiming), "cudaEventCreate");
  RepeatedCall<Call> repeated(call, arena, path);
  checker.count(path_of(call, repeated.arguments()));
  const std::vector<char*> quiet = repeated.take_results(arena);
  Readings readings;
  for (const Reading& r : repeated.take_inputs(arena)) readings.list[readings.count++] = r;
  const Readings only_read = readings;
  for (const Reading& r : repeated.given()) readings.list[readings.count++] = r;
  Buffer& offsets = call.in.cu_seqlens;
  void* const place_of_offsets = offsets.device().data;
  Buffer stale_offsets = offsets;
  if (!stale.empty()) {
    stale_offsets.fill([&](int64_t i, int64_t, int64_t, int64_t) { return static_cast<double>(stale[i]); });
    stale_offsets.upload(arena);
  }
  repeated.poison(stream);
  check_cuda(cudaStreamSynchronize(stream), name);
  repeated.run(stream);
  check_cuda(cudaStreamSynchronize(stream), name);
  repeated.keep(quiet, stream);

  const auto enqueue = [&](Writer writer, bool two_streams) {
    for (const bool old_offsets : {false, true}) {
      repeated.poison(stream);
      launch_spoil_kernel(readings, stream);
      if (old_offsets && !stale.empty()) {
        check_cuda(cudaMemcpyAsync(place_of_offsets, stale_offsets.device().data, offsets.bytes().size(),
                                   cudaMemcpyDeviceToDevice, stream),
                   "cudaMemcpyAsync");
      }
      if (writer == Writer::kCopies) {
        for (int i = 0; i < readings.count; ++i) {
          const Reading& r = readings.list[i];
          check_cuda(cudaMemcpyAsync(r.data, r.copy, r.bytes, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
        }
      } else {
        write_late_kernel<<<64, 256, 0, stream>>>(readings, writer == Writer::kKernelThatLetsNextStart);
      }
      if (two_streams) {
        check_cuda(cudaEventRecord(fork, stream), "cudaEventRecord");
        check_cuda(cudaStreamWaitEvent(side, fork, 0), "cudaStreamWaitEvent");
      }
      repeated.run(two_streams ? side : stream);
      if (two_streams) {
        check_cuda(cudaEventRecord(join, side), "cudaEventRecord");
        check_cuda(cudaStreamWaitEvent(stream, join, 0), "cudaStreamWaitEvent");
      }
      launch_spoil_kernel(only_read, stream);
      repeated.compare(quiet, stream);
    }
  };
  unsigned long long before = 0;
  for (const Writer writer : {Writer::kKernel, Writer::kKernelThatLetsNextStart, Writer::kCopies}) {
    for (const bool two_streams : {false, true}) {
      for (const bool graphed : {false, true}) {
        if (graphed) {
          cudaGraph_t graph;
          cudaGraphExec_t exec;
          check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
          enqueue(writer, two_streams);
          check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
          check_cuda(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
          for (int i = 0; i < 2; ++i) check_cuda(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
          check_cuda(cudaStreamSynchronize(stream), name);
          check_cuda(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
          check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
        } else {
          enqueue(writer, two_streams);
        }
        const unsigned long long now = repeated.different();
        if (!repeated.status().ok() || now != before) {
          const char* const writers[] = {"a late kernel", "a late kernel that lets the next one start", "copies"};
          checker.fail(std::string(name) + ", after " + writers[static_cast<int>(writer)] +
                           (two_streams ? ", on another stream" : "") + (graphed ? ", in a graph" : ""),
                       path,
                       repeated.status().ok() ? std::to_string(now - before) + " words differ from a quiet call's"
                                              : repeated.status().message());
        }
        before = now;
      }
    }
  }
  check_cuda(cudaEventDestroy(fork), "cudaEventDestroy");
  check_cuda(cudaEventDestroy(join), "cudaEventDestroy");
  check_cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
  check_cuda(cudaStreamDestroy(side), "cudaStreamDestroy");
}

// `sequences` drawn lengths of up to `longest`, and the same in the opposite order.
inline std::vector<int64_t> draw_lengths(int64_t sequences, int64_t longest, std::vector<int64_t>* opposite,
                                         Random& random) {
  std::vector<int64_t> offsets = {0};
  for (int64_t n = 0; n < sequences; ++n) offsets.push_back(offsets.back() + random.integer(1, longest));
  for (auto i = offsets.rbegin(); i != offsets.rend(); ++i) opposite->push_back(offsets.back() - *i);
  return offsets;
}

inline int64_t test_orders(const Settings& settings, Arena& arena) {
  Checker checker("order of kernels in a stream", settings, arena);
  Random random(31);
  struct Case {
    const char* name;
    int64_t Hq, Hv, sequences, longest;
    DType type;
    Features features;
    PoolFeatures pool;
  };
  Features states;
  states.initial_state = states.final_state = true;
  Features off = states, options = states, forced = states;
  off.cp_mode = FLASH_QLA_CP_OFF;
  options.l2norm = options.gate = options.dt_bias = options.sigmoid = true;
  forced.force_intra_cp = true;
  PoolFeatures none, kept, kept_h, pool;
  kept.A = kept.g_cumsum = true;
  kept_h = kept;
  kept_h.h = true;
  pool.pool = pool.skip_rows = pool.has_initial = pool.packed_checkpoints = true;
  const int64_t shorter = settings.small ? 2 : 1;
  // 132 multiprocessors: what is a tile to a block, two, and more of them, which are given out by tickets.
  const Case forwards[] = {
      {"a tile to a block", 8, 32, 4, 150, DType::kBFloat16, states, none},
      {"two tiles to a block", 4, 32, 8, 150, DType::kBFloat16, states, none},
      {"two tiles to a block, fp16", 4, 32, 8, 150, DType::kFloat16, states, none},
      {"two tiles to a block, no split", 4, 32, 8, 150, DType::kBFloat16, off, none},
      {"two tiles to a block, saved", 4, 32, 8, 150, DType::kBFloat16, states, kept},
      {"three tiles to a block", 4, 32, 12, 130, DType::kBFloat16, states, none},
      {"four tiles to a block", 4, 32, 17, 100, DType::kBFloat16, states, none},
      {"planned", 2, 8, 40, 130, DType::kBFloat16, states, none},
      {"h", 4, 32, 8, 130, DType::kBFloat16, states, kept_h},
      {"pool in place", 4, 16, 9, 150, DType::kBFloat16, states, pool},
      {"options", 4, 16, 9, 150, DType::kBFloat16, options, none},
      {"pairs", 2, 8, 8, 300, DType::kBFloat16, states, none},
      {"pairs, saved", 2, 8, 8, 200, DType::kBFloat16, states, kept},
      {"cut", 2, 4, 1, 2048, DType::kBFloat16, forced, none},
      {"cut, lengths", 2, 4, 3, 1000, DType::kBFloat16, forced, none},
  };
  for (const Case& c : forwards) {
    Shape s;
    s.dtype = c.type;
    s.Hq = c.Hq;
    s.Hv = c.Hv;
    s.K = s.V = 128;
    std::vector<int64_t> stale;
    s.cu_seqlens = draw_lengths(c.sequences, c.longest / shorter, &stale, random);
    s.T = s.cu_seqlens.back() + 5;
    ForwardCall call;
    call.draw(s, c.features, c.pool, false, random);
    check_orders(c.name, call, "sm90", stale, checker, arena);
  }
  {
    Shape s;
    s.dtype = DType::kBFloat16;
    s.B = 40;
    s.T = 1;
    s.Hq = 2;
    s.Hv = 8;
    s.K = s.V = 128;
    PoolFeatures rows;
    rows.pool = rows.skip_rows = true;
    ForwardCall call;
    call.draw(s, states, rows, true, random);
    check_orders("decode", call, nullptr, {}, checker, arena);
  }
  for (const int64_t sequences : {1, 6}) {
    Shape s;
    s.dtype = DType::kBFloat16;
    s.Hq = 2;
    s.Hv = 4;
    s.K = s.V = 128;
    std::vector<int64_t> stale;
    s.cu_seqlens = draw_lengths(sequences, (sequences == 1 ? 3000 : 300) / shorter, &stale, random);
    s.T = s.cu_seqlens.back() + 5;
    Features f;
    f.initial_state = true;
    BackwardCall call;
    call.draw(s, f, false, true, true, random);
    check_orders(sequences == 1 ? "backward of one sequence" : "backward", call, "sm90", stale, checker, arena);
  }
  return checker.finish();
}

}  // namespace flash_qla::testing
