// What the exported kernels call when CUDA reports an error; the DSL's own is in its compiler.
#include <cstdio>

extern "C" int CuteDSLRT_TVMFFISetRaisedCudaError(int error) {
  std::fprintf(stderr, "CUDA error %d in a FlashInfer kernel\n", error);
  return -1;
}
