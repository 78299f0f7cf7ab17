#include "cpu/threads.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace flash_qla::cpu {
namespace {

// Flushes denormal results to zero: one costs over a hundred cycles on common CPUs, and strong decay makes whole
// matrices of them. Denormal inputs are still read, as float16 conversion needs.
class FlushDenormals {
 public:
#if defined(__SSE2__)
  FlushDenormals() : saved_(_mm_getcsr()) {
    constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
    _mm_setcsr((saved_ | kFlushToZero) & ~kDenormalsAreZero);
  }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
  FlushDenormals() {}
#endif
};

// One parallel_for. Threads join by taking a worker number, and take tasks until none is left.
struct Job {
  Job(int64_t tasks, int64_t threads, const std::function<void(int64_t, int64_t)>& fn)
      : tasks(tasks), threads(threads), fn(fn) {}

  const int64_t tasks, threads;
  const std::function<void(int64_t, int64_t)>& fn;
  std::atomic<int64_t> next_task{0};
  int64_t joined = 0;   // guarded by the pool's mutex, as are the next two
  int64_t working = 0;  // threads inside work()
  std::exception_ptr error;

  void work(int64_t worker) {
    const FlushDenormals flush;
    for (int64_t task; (task = next_task.fetch_add(1, std::memory_order_relaxed)) < tasks;) fn(task, worker);
  }
};

class Pool {
 public:
  // The pool of this process. A child made by fork() has none of its parent's threads and gets a pool of its own.
  // Pools are never destroyed: their threads may outlive main's static objects.
  static Pool& instance() {
    // No lock: fork() may have caught another thread holding it.
    static std::atomic<Pool*> current{nullptr};
    Pool* pool = current.load(std::memory_order_acquire);
    if (pool == nullptr || pool->process_ != getpid()) {
      Pool* fresh = new Pool();
      if (current.compare_exchange_strong(pool, fresh)) {
        pool = fresh;
      } else {
        delete fresh;  // another thread was first; no thread has seen this one
      }
    }
    return *pool;
  }

  void run(Job* job) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      grow(job->threads - 1);
      job->joined = job->working = 1;
      jobs_.push_back(job);
    }
    wake_.notify_all();
    work(job, 0);
    std::unique_lock<std::mutex> lock(mutex_);
    jobs_.erase(std::find(jobs_.begin(), jobs_.end(), job));
    finished_.wait(lock, [job] { return job->working == 0; });
  }

 private:
  void grow(int64_t threads) {
    try {
      for (; threads_ < threads; ++threads_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
      // The system gives no more threads: those there are do the work.
    }
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      Job* job = nullptr;
      wake_.wait(lock, [&] {
        const auto found = std::find_if(jobs_.begin(), jobs_.end(), [](const Job* j) {
          return j->joined < j->threads && j->next_task.load(std::memory_order_relaxed) < j->tasks;
        });
        job = found == jobs_.end() ? nullptr : *found;
        return job != nullptr;
      });
      const int64_t worker = job->joined++;
      ++job->working;
      lock.unlock();
      work(job, worker);
      lock.lock();
    }
  }

  void work(Job* job, int64_t worker) {
    std::exception_ptr error;
    try {
      job->work(worker);
    } catch (...) {
      error = std::current_exception();
      job->next_task.store(job->tasks, std::memory_order_relaxed);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error && !job->error) job->error = error;
    if (--job->working == 0) finished_.notify_all();
  }

  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::condition_variable wake_, finished_;
  std::deque<Job*> jobs_;
  int64_t threads_ = 0;
};

}  // namespace

int available_threads() {
  static const int threads = [] {
    cpu_set_t set;
    // The process's first thread stands for the process: the caller's own mask may be narrower for a while.
    if (sched_getaffinity(getpid(), sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  }();
  return threads;
}

int64_t thread_count(int num_threads_option, int64_t tasks) {
  const int64_t wanted = num_threads_option > 0 ? num_threads_option : available_threads();
  return std::max<int64_t>(1, std::min(wanted, tasks));
}

int64_t worthwhile_threads(int64_t threads, double operations) {
  // About 40 us of one thread at the 50 GFLOP/s that small products reach.
  constexpr double kOperationsPerThread = 2e6;
  return std::max<int64_t>(1,
                           std::min(threads, static_cast<int64_t>(std::min(operations / kOperationsPerThread, 1e9))));
}

void parallel_for(int64_t tasks, int64_t threads, const std::function<void(int64_t, int64_t)>& fn) {
  if (tasks <= 0) return;
  Job job(tasks, std::min(threads, tasks), fn);
  if (job.threads <= 1) {
    job.work(0);
    return;
  }
  Pool::instance().run(&job);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace flash_qla::cpu
