// What the host code that TileLang makes of a kernel calls, without TileLang: tensor maps and the launch, by the driver
// alone. Host code finds these functions by name; arguments are tvm-ffi's.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  int32_t type_index;
  uint32_t padding;
  union {
    int64_t integer;
    double number;
    void* pointer;
  };
} Any;

enum { kFloat = 3, kPointer = 4 };  // of Any::type_index
enum { kMostRank = 5, kMostMaps = 24, kMostArguments = 64, kDynamicSharedBytes = 8 };
// A launch's own numbers: grid, block and dynamic shared memory.
enum { kGrid = 0, kBlock = 3, kSharedBytes = 6, kLaunchArguments = 7 };

typedef struct {
  void* module;
  void* function;
  int launch_count;
  unsigned char launch[kLaunchArguments];  // which of a launch's numbers its last arguments are
} Kernel;

static int (*encode_tiled)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                           const uint32_t*, int, int, int, int);
static int (*load_module)(void**, const void*);
static int (*get_function)(void**, void*, const char*);
static int (*set_attribute)(void*, int, int);
static int (*launch_kernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                            void**);

static char message[600];
static void* stream;
static void* maps[kMostMaps];  // that the call has made: a kernel takes these by value
static int map_count;
static char set_device_function, create_map_function;  // their addresses stand for functions

const char* complaint(void) { return message; }
void set_stream(void* given) { stream = given; }

Kernel* load_kernel(const void* code, const unsigned char* launch, int launch_count) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (driver == NULL) {
    snprintf(message, sizeof(message), "no CUDA driver");
    return NULL;
  }
  encode_tiled = dlsym(driver, "cuTensorMapEncodeTiled");
  load_module = dlsym(driver, "cuModuleLoadData");
  get_function = dlsym(driver, "cuModuleGetFunction");
  set_attribute = dlsym(driver, "cuFuncSetAttribute");
  launch_kernel = dlsym(driver, "cuLaunchKernel");
  Kernel* kernel = calloc(1, sizeof(Kernel));
  kernel->launch_count = launch_count;
  memcpy(kernel->launch, launch, launch_count);
  const int result = load_module(&kernel->module, code);
  if (result != 0) snprintf(message, sizeof(message), "cannot be loaded (%d)", result);
  return result == 0 ? kernel : NULL;
}

// `context` is the library's: its kernel. Every library has one alone.
int TVMBackendGetFuncFromEnv(void* context, const char* name, void** function) {
  Kernel* kernel = context;
  if (strcmp(name, "__tvm_set_device") == 0) {
    *function = &set_device_function;
  } else if (strcmp(name, "__tvm_tensormap_create_tiled") == 0) {
    *function = &create_map_function;
  } else {
    const int result = get_function(&kernel->function, kernel->module, name);
    if (result != 0) {
      snprintf(message, sizeof(message), "%s is not there (%d)", name, result);
      return -1;
    }
    *function = kernel;
  }
  return 0;
}

void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* text) {
  snprintf(message, sizeof(message), "%s: %s", kind, text);
}

static int create_map(const Any* given) {
  const int rank = (int)given[2].integer;
  uint64_t extents[kMostRank], strides[kMostRank];
  uint32_t box[kMostRank], steps[kMostRank];
  const Any* at = given + 4;
  for (int i = 0; i < rank; ++i) {
    extents[i] = at[i].integer;
    strides[i] = at[rank + i].integer;
    box[i] = (uint32_t)at[2 * rank + i].integer;
    steps[i] = (uint32_t)at[3 * rank + i].integer;
  }
  at += 4 * rank;
  const int result =
      encode_tiled(given[0].pointer, (int)given[1].integer, rank, given[3].pointer, extents, strides + 1, box, steps,
                   (int)at[0].integer, (int)at[1].integer, (int)at[2].integer, (int)at[3].integer);
  if (result != 0 || map_count == kMostMaps) {
    snprintf(message, sizeof(message), "no tensor map (%d)", result);
    return -1;
  }
  maps[map_count++] = given[0].pointer;
  return 0;
}

static int launch(const Kernel* kernel, Any* given, int count) {
  void* parameters[kMostArguments];
  float floats[kMostArguments];
  const int last = count - kernel->launch_count;
  if (last > kMostArguments) {
    snprintf(message, sizeof(message), "%d arguments", last);
    return -1;
  }
  for (int i = 0; i < last; ++i) {
    parameters[i] = &given[i].pointer;
    if (given[i].type_index == kFloat) {
      floats[i] = (float)given[i].number;
      parameters[i] = &floats[i];
    }
    for (int m = 0; m < map_count && given[i].type_index == kPointer; ++m) {
      if (maps[m] == given[i].pointer) parameters[i] = given[i].pointer;
    }
  }
  map_count = 0;
  unsigned sizes[kLaunchArguments] = {1, 1, 1, 1, 1, 1, 0};
  for (int i = 0; i < kernel->launch_count; ++i) sizes[kernel->launch[i]] = (unsigned)given[last + i].integer;
  const unsigned *grid = sizes + kGrid, *block = sizes + kBlock;
  int result = set_attribute(kernel->function, kDynamicSharedBytes, (int)sizes[kSharedBytes]);
  if (result == 0) {
    result = launch_kernel(kernel->function, grid[0], grid[1], grid[2], block[0], block[1], block[2],
                           sizes[kSharedBytes], stream, parameters, NULL);
  }
  if (result != 0) snprintf(message, sizeof(message), "cannot be launched (%d)", result);
  return result == 0 ? 0 : -1;
}

int TVMFFIFunctionCall(void* function, Any* given, int count, Any* result) {
  (void)result;
  if (function == &set_device_function) return 0;
  return function == &create_map_function ? create_map(given) : launch(function, given, count);
}
