// Which instruction set runs, and what the core may ask of the CPU.
#include <cstdlib>
#include <cstring>
#include <string>

#include "cpu/kernels.h"
#include "cpu/paths.h"
#include "cpu/threads.h"

namespace flash_qla {
namespace cpu {
namespace {

const KernelTable& choose_table() {
#if defined(__x86_64__)
  // FLASH_QLA_CPU_ISA=plain or avx2 keeps to less than the machine has: to compare, and to test each table on one
  // machine.
  const char* variable = std::getenv("FLASH_QLA_CPU_ISA");
  const std::string limit = variable == nullptr ? "" : variable;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (limit == "plain") return kKernelsPlain;
  if (avx512 && limit != "avx2") return kKernelsAvx512;
  if (avx2) return kKernelsAvx2;
#endif
  return kKernelsPlain;
}

Status copy_to_host(void* host, const void* device, int64_t pitch, int64_t width, int64_t rows, int, void*) {
  for (int64_t i = 0; i < rows; ++i) {
    std::memcpy(static_cast<char*>(host) + i * width, static_cast<const char*>(device) + i * pitch,
                static_cast<size_t>(width));
  }
  return Status();
}

bool is_capturing(void*) { return false; }

std::string describe() {
  return std::string("cpu: instruction set ") + kernel_table().name + ", " + std::to_string(available_threads()) +
         " threads";
}

}  // namespace

const KernelTable& kernel_table() {
  static const KernelTable& table = choose_table();
  return table;
}

}  // namespace cpu

const DeviceAccess kCpuAccess = {FLASH_QLA_CPU, cpu::copy_to_host, cpu::is_capturing, cpu::describe};

}  // namespace flash_qla
