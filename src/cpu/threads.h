// Worker threads of the CPU backend: one pool a process, shared by all callers.
#pragma once

#include <cstdint>
#include <functional>

namespace flash_qla::cpu {

// CPUs that the process may use, as its affinity said at the first call. Read once, so that a workspace sized now is
// large enough for every later call.
int available_threads();

// Threads for a call: options.num_threads (0: all available), never more than tasks.
int64_t thread_count(int num_threads_option, int64_t tasks);

// Threads for a call of about `operations` floating-point operations. Waking a thread costs some 20 us, so each must
// have work for longer than that.
int64_t worthwhile_threads(int64_t threads, double operations);

// Calls fn(task, worker) for every task in [0, tasks), in `threads` threads at most, the caller's among them; `worker`
// is below `threads` and no two calls with the same worker overlap. Denormal results are flushed to zero meanwhile, in
// every thread alike. Rethrows the first exception.
void parallel_for(int64_t tasks, int64_t threads, const std::function<void(int64_t task, int64_t worker)>& fn);

}  // namespace flash_qla::cpu
