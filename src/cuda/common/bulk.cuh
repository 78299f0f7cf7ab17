// Bulk copies of contiguous bytes, tiles of tensors with a batch dimension, the plain 8x8 matrix load, register
// budgets.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/common/mbarrier.cuh"
#include "cuda/common/overlap.cuh"

namespace flash_qla::cuda {

// `bytes` (a multiple of 16) from global to shared memory, both 16-byte aligned; completes on `barrier`.
__device__ __forceinline__ void bulk_load(uint32_t smem, const void* global, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem),
               "l"(reinterpret_cast<uint64_t>(global)), "r"(bytes), "r"(barrier)
               : "memory");
}

// Orders ordinary accesses of global memory that this thread has observed before later ones of the copy engine.
__device__ __forceinline__ void fence_proxy_async_all() { asm volatile("fence.proxy.async;" ::: "memory"); }

// A counter of another block, and with it what that block wrote before it counted.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* counter) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// A counter alone: what was written before it can be seen after acquire_loads().
__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* counter) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// A number for load_relaxed(); it says nothing of what else this thread has written.
__device__ __forceinline__ void store_relaxed(uint32_t* counter, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}

__device__ __forceinline__ void acquire_loads() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Adds to a counter that load_acquire() reads; what this thread has written or observed comes before it. It waits until
// all that can be seen, which takes about a microsecond.
__device__ __forceinline__ void add_release(uint32_t* counter, uint32_t by) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(by) : "memory");
}

// The same; returns what the counter was.
__device__ __forceinline__ uint32_t fetch_add_release(uint32_t* counter, uint32_t by) {
  uint32_t was;
  asm volatile("atom.release.gpu.global.add.u32 %0, [%1], %2;" : "=r"(was) : "l"(counter), "r"(by) : "memory");
  return was;
}

// The other way; joins the issuing thread's current bulk group.
__device__ __forceinline__ void bulk_store(void* global, uint32_t smem, uint32_t bytes) {
  // compute-sanitizer's initcheck takes the first 32 bytes alone for written (docs/kernels/memory.md): in the build
  // for its racecheck (kWarpArrivals) a thread writes them all before the engine does.
  if constexpr (kWarpArrivals == 32) {
    for (uint32_t i = 0; i < bytes; i += 16) {
      *reinterpret_cast<uint4*>(static_cast<char*>(global) + i) = make_uint4(0, 0, 0, 0);
    }
    fence_proxy_async_all();
  }
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(reinterpret_cast<uint64_t>(global)),
               "r"(smem), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void tma_load_5d(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int32_t c0,
                                            int32_t c1, int32_t c2, int32_t c3, int32_t c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(smem),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

__device__ __forceinline__ void tma_store_5d(const CUtensorMap* map, uint32_t smem, int32_t c0, int32_t c1, int32_t c2,
                                             int32_t c3, int32_t c4) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(
                   reinterpret_cast<uint64_t>(map)),
               "r"(smem), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}

__device__ __forceinline__ void load_matrix_x4(uint32_t smem, uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(smem)
               : "memory");
}

__device__ __forceinline__ uint32_t load_shared_u1(uint32_t smem) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(smem) : "memory");
  return v;
}

// True in one lane of the warp, all of whose lanes are here. To the compiler that is one thread: after `lane == 0` it
// wraps each instruction of the copy engine in a loop over the lanes that might have come.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

// Counts in a named barrier without waiting for it. racecheck takes only a barrier at which all wait for an order: in a
// build for it (kWarpArrivals) this side waits too.
__device__ __forceinline__ void named_barrier_arrive(uint32_t id, uint32_t threads) {
  if constexpr (kWarpArrivals == 32) {
    named_barrier_sync(id, threads);
  } else {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
  }
}

// Registers a thread of this warpgroup may use from here on; executed by all its warps. The groups' sum must not grow
// past what the block was launched with.
template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void claim_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace flash_qla::cuda
