// For functions that run on the host, in tests, and on the device.
#pragma once

#ifdef __CUDACC__
#define FLASH_QLA_HOST_DEVICE __host__ __device__
#else
#define FLASH_QLA_HOST_DEVICE
#endif
// Loops over arrays that are to stay in registers.
#ifdef __CUDA_ARCH__
#define FLASH_QLA_UNROLL _Pragma("unroll")
#else
#define FLASH_QLA_UNROLL
#endif
