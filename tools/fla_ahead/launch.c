// What the host code that TileLang makes of a kernel calls, without TileLang: tensor maps and the launch, by the driver
// alone. Host code finds these functions by name; arguments are tvm-ffi's.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
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
enum { kMostRank = 5, kMostMaps = 16, kMostArguments = 40, kLaunchArguments = 7, kDynamicSharedBytes = 8 };

typedef struct {
  void* module;
  void* function;
} Kernel;

static int (*encode_tiled)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                           const uint32_t*, int, int, int, int);
static int (*load_module)(void**, const char*);
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

int load_kernel(Kernel* kernel, const char* cubin, const char* name) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (driver == NULL) return snprintf(message, sizeof(message), "no CUDA driver");
  encode_tiled = dlsym(driver, "cuTensorMapEncodeTiled");
  load_module = dlsym(driver, "cuModuleLoad");
  get_function = dlsym(driver, "cuModuleGetFunction");
  set_attribute = dlsym(driver, "cuFuncSetAttribute");
  launch_kernel = dlsym(driver, "cuLaunchKernel");
  int result = load_module(&kernel->module, cubin);
  if (result == 0) result = get_function(&kernel->function, kernel->module, name);
  return result == 0 ? 0 : snprintf(message, sizeof(message), "cannot be loaded (%d)", result);
}

// `context` is the library's: its kernel.
int TVMBackendGetFuncFromEnv(void* context, const char* name, void** function) {
  *function = context;
  if (strcmp(name, "__tvm_set_device") == 0) *function = &set_device_function;
  if (strcmp(name, "__tvm_tensormap_create_tiled") == 0) *function = &create_map_function;
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

// Of a launch the last arguments are grid, block and dynamic shared memory.
static int launch(const Kernel* kernel, Any* given, int count) {
  void* parameters[kMostArguments];
  float floats[kMostArguments];
  const int last = count - kLaunchArguments;
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
  unsigned sizes[kLaunchArguments];
  for (int i = 0; i < kLaunchArguments; ++i) sizes[i] = (unsigned)given[last + i].integer;
  int result = set_attribute(kernel->function, kDynamicSharedBytes, (int)sizes[6]);
  if (result == 0) {
    result = launch_kernel(kernel->function, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6],
                           stream, parameters, NULL);
  }
  if (result != 0) snprintf(message, sizeof(message), "cannot be launched (%d)", result);
  return result == 0 ? 0 : -1;
}

int TVMFFIFunctionCall(void* function, Any* given, int count, Any* result) {
  (void)result;
  if (function == &set_device_function) return 0;
  return function == &create_map_function ? create_map(given) : launch(function, given, count);
}
