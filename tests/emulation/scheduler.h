// Runs a CUDA kernel on the host, block by block: each CUDA thread is a fiber, with a stack of its own, that runs until
// it has to wait for other threads of its block. What may run next is drawn from a seeded order that lets one warp run
// far ahead of another, so that what is only usually in order is not. All in one host thread.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <source_location>

namespace cuda_emulation {

using Where = std::source_location;

// The device that the runtime describes, and the order in which threads run.
struct Settings {
  uint64_t seed = 1;
  int multiprocessors = 132;
  int capability = 90;  // 80: compute capability 8.0
};
Settings& settings();

// The least shared memory that a block of any GPU from compute capability 8.0 on may ask for.
inline constexpr size_t kMostSharedBytes = 99 * 1024;

// What kernels have done since the program started.
struct Counters {
  int64_t launches = 0, products = 0, matrix_loads = 0;
  int64_t bank_conflicts = 0;  // extra passes that loads of 8x8 matrices took through shared memory
};
Counters& counters();

// Calls `thread` for each thread of each block, with the built-in variables set. Ends the program with a message where
// a GPU would hang, or read or write where it must not.
void run_grid(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& thread);

// ---- inside of a kernel

// Ends the program: the message, block and thread.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

// A number from the drawn order.
uint32_t draw(uint32_t below);

int lane_id();

// One instruction of all lanes in `mask`: each brings `in`, and once all are there `combine` is called with the arrays
// of their arguments and of their results, an element a lane. `name` and `where` must be the same in all of them.
inline constexpr size_t kMostBytes = 64;
using Combine = void (*)(const void* function, const void* in, void* out);
void collective(const char* name, Where where, uint32_t mask, const void* in, size_t in_bytes, void* out,
                size_t out_bytes, Combine combine, const void* function);

template <class Out, class In, class Function>
Out collective(const char* name, Where where, uint32_t mask, const In& in, const Function& function) {
  static_assert(sizeof(In) <= kMostBytes && sizeof(Out) <= kMostBytes);
  Out out{};
  const Combine combine = [](const void* f, const void* all, void* results) {
    (*static_cast<const Function*>(f))(static_cast<const In*>(all), static_cast<Out*>(results));
  };
  collective(name, where, mask, &in, sizeof(In), &out, sizeof(Out), combine, &function);
  return out;
}

// Barriers of the block: bar.sync and bar.arrive; `threads` 0: all of the block.
void barrier_sync(uint32_t id, uint32_t threads, Where where);
void barrier_arrive(uint32_t id, uint32_t threads, Where where);

// Dynamic shared memory. Addresses of 32 bits start at a number that is none of a host pointer's.
void* dynamic_shared_memory();
uint32_t shared_address(const void* pointer);
// The place of `bytes` bytes at a shared address, which must be aligned and inside.
void* shared_pointer(uint32_t address, size_t bytes, size_t alignment, const char* what);
template <class T>
T& shared(uint32_t address, const char* what) {
  return *static_cast<T*>(shared_pointer(address, sizeof(T), sizeof(T), what));
}

// Barriers in shared memory (mbarrier).
void mbarrier_init(uint32_t address, uint32_t arrivals);
void mbarrier_invalidate(uint32_t address);
void mbarrier_arrive(uint32_t address);
bool mbarrier_test(uint32_t address, uint32_t parity);
void mbarrier_wait(uint32_t address, uint32_t parity, Where where);

// cp.async. The destination becomes NaN at once and gets its bytes as late as the program allows: at a wait for them,
// or at some time before the barrier hears of them.
void async_copy(uint32_t to, const void* from, size_t bytes, size_t bytes_read);
void async_commit();
void async_wait_group(size_t groups_left);
void async_arrive(uint32_t barrier);  // cp.async.mbarrier.arrive.noinc

}  // namespace cuda_emulation
