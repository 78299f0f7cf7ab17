// Blocks of a cluster: each other's shared memory and barriers, and loads that reach several of them.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flash_qla::cuda {

// This block's number in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all blocks of the cluster; what they wrote before, they can read after. Whole warps come.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address of block `rank`'s copy of a shared-memory address of this block.
__device__ __forceinline__ uint32_t cluster_address(uint32_t smem, uint32_t rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem), "r"(rank));
  return address;
}

// A number of another block's shared memory (cluster_address()).
__device__ __forceinline__ float load_cluster_f1(uint32_t address) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

// Four bytes into a block of the cluster, counted by a barrier of that block once they can be seen there (both
// cluster_address()). No fence on either side: a release to the whole cluster is one for the whole device, and slow.
__device__ __forceinline__ void store_cluster_u1(uint32_t address, uint32_t v, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address), "r"(v),
               "r"(barrier)
               : "memory");
}

// Sixteen bytes, likewise.
__device__ __forceinline__ void store_cluster_u4(uint32_t address, uint4 v, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
      : "memory");
}

// `bytes` (a multiple of 16) from this block's shared memory to another's (address and barrier there:
// cluster_address()).
__device__ __forceinline__ void bulk_copy_cluster(uint32_t address, uint32_t smem, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address),
      "r"(smem), "r"(bytes), "r"(barrier)
      : "memory");
}

// On a barrier of any block of the cluster (cluster_address()). It says that this thread has read what it had to;
// it is not for what the thread wrote.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// mbarrier_arrive_expect() on a barrier of any block of the cluster (cluster_address()). The bytes may have come
// before: the phase waits for this arrival.
__device__ __forceinline__ void mbarrier_arrive_expect_cluster(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// bulk_load(), tma_load_4d() and tma_load_5d() to the same place of each block in `blocks` (a bit each), completing on
// each one's barrier there.
__device__ __forceinline__ void bulk_load_cluster(uint32_t smem, const void* global, uint32_t bytes, uint32_t barrier,
                                                  uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;" ::"r"(smem),
      "l"(reinterpret_cast<uint64_t>(global)), "r"(bytes), "r"(barrier), "h"(blocks)
      : "memory");
}

__device__ __forceinline__ void tma_load_4d_cluster(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int32_t c0,
                                                    int32_t c1, int32_t c2, int32_t c3, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, "
      "%4, %5, %6}], [%2], %7;" ::"r"(smem),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(blocks)
      : "memory");
}

__device__ __forceinline__ void tma_load_5d_cluster(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int32_t c0,
                                                    int32_t c1, int32_t c2, int32_t c3, int32_t c4, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, "
      "%4, %5, %6, %7}], [%2], %8;" ::"r"(smem),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(blocks)
      : "memory");
}

}  // namespace flash_qla::cuda
