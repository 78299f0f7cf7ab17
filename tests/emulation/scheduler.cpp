#include "scheduler.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "device.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace cuda_emulation {
namespace {

constexpr int kLanes = 32, kMostThreads = 1024, kMostWarps = kMostThreads / kLanes, kBarriers = 16;
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kStackBytes = 1 << 20;
#else
constexpr size_t kStackBytes = 1 << 18;
#endif
constexpr uint32_t kSharedStart = 0x400;

// ---- switching from one stack to another

#if defined(__x86_64__)
struct Context {
  void* stack_pointer = nullptr;
};
// Keeps this stack in *from and goes on with that of `to`. The registers that a call must keep are all there is to
// keep.
extern "C" void emulation_switch(void** from, void* to);
asm(R"(
.text
.globl emulation_switch
.type emulation_switch, @function
emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulation_switch, .-emulation_switch
)");
void switch_context(Context& from, Context& to) { emulation_switch(&from.stack_pointer, to.stack_pointer); }
void start_context(Context& context, char* stack, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + kStackBytes);
  *--top = nullptr;  // where a return address would be: the stack is aligned as at a function's first instruction
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context.stack_pointer = top;
}
#else
struct Context {
  ucontext_t context;
};
void switch_context(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
void start_context(Context& context, char* stack, void (*entry)()) {
  getcontext(&context.context);
  context.context.uc_stack.ss_sp = stack;
  context.context.uc_stack.ss_size = kStackBytes;
  context.context.uc_link = nullptr;
  makecontext(&context.context, entry, 0);
}
#endif

// ---- threads of a block

struct Copy {
  void* to;
  const void* from;
  size_t bytes, bytes_read;
};

struct Fiber {
  Context context;
  char* stack;
  void* fake_stack = nullptr;  // AddressSanitizer's
  uint3 index;
  bool done;
  const char* waits_for;  // null: it may run
  Where where;
  uint32_t barrier, parity;  // of the mbarrier that it waits for
  alignas(16) char result[kMostBytes];
  // cp.async: copies that are not done yet, in order; as many before them are (first_copy).
  std::vector<Copy> copies;
  size_t first_copy = 0;
  std::vector<size_t> groups;  // copies at the end of each committed group
};

// Lanes on their way into one instruction.
struct Meeting {
  const char* name;
  Where where;
  uint32_t mask, arrived;
  alignas(16) char in[kLanes * kMostBytes];
};

struct Warp {
  uint32_t ready, lanes;
  std::vector<Meeting> meetings;
};

struct Barrier {
  uint32_t threads = 0, arrived = 0;
  Where where;
  uint32_t waiting[kMostWarps] = {};
};

// An arrival on an mbarrier once a thread's copies are done.
struct Deferred {
  Fiber* fiber;
  size_t copies;
  uint32_t barrier;
};

struct Block {
  int threads = 0, left = 0, warps = 0;
  Fiber fibers[kMostThreads];
  Warp warp[kMostWarps];
  int order[kMostWarps];
  Barrier barriers[kBarriers];
  std::vector<Deferred> deferred;
  Fiber* current = nullptr;
  Context main;
  void* main_fake_stack = nullptr;
  const void* main_stack = nullptr;
  size_t main_stack_bytes = 0;
  const std::function<void()>* body = nullptr;
  uint64_t random = 1;
  char* arena = nullptr;  // as much shared memory as there may be; the last page behind it may not be touched
  char* shared = nullptr;
  size_t shared_bytes = 0;
};
Block& block = *new Block;

size_t page() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

int number_of(const Fiber& fiber) { return static_cast<int>(&fiber - block.fibers); }
uint32_t bit_of(const Fiber& fiber) { return 1u << number_of(fiber) % kLanes; }
Warp& warp_of(const Fiber& fiber) { return block.warp[number_of(fiber) / kLanes]; }

void wake(Fiber& fiber) {
  fiber.waits_for = nullptr;
  warp_of(fiber).ready |= bit_of(fiber);
}

void perform(Fiber& fiber, size_t copies) {
  const size_t count = copies > fiber.first_copy ? copies - fiber.first_copy : 0;
  for (size_t i = 0; i < count; ++i) {
    const Copy& copy = fiber.copies[i];
    std::memset(copy.to, 0, copy.bytes);
    if (copy.bytes_read > 0) std::memcpy(copy.to, copy.from, copy.bytes_read);
  }
  fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + static_cast<std::ptrdiff_t>(count));
  fiber.first_copy += count;
}

void perform_one_deferred() {
  const size_t i = draw(static_cast<uint32_t>(block.deferred.size()));
  const Deferred deferred = block.deferred[i];
  block.deferred[i] = block.deferred.back();
  block.deferred.pop_back();
  perform(*deferred.fiber, deferred.copies);
  mbarrier_arrive(deferred.barrier);
}

void reorder_warps() {
  for (int i = block.warps - 1; i > 0; --i) std::swap(block.order[i], block.order[draw(static_cast<uint32_t>(i) + 1)]);
}

// The thread that runs next, or null.
Fiber* pick() {
  if (!block.deferred.empty() && draw(64) == 0) perform_one_deferred();
  if (draw(512) == 0) reorder_warps();
  for (;;) {
    for (int i = 0; i < block.warps; ++i) {
      const int w = block.order[i];
      uint32_t ready = block.warp[w].ready;
      if (ready == 0) continue;
      const int turn = static_cast<int>(draw(kLanes));
      ready = ready >> turn | (turn > 0 ? ready << (kLanes - turn) : 0);
      return &block.fibers[w * kLanes + (__builtin_ctz(ready) + turn) % kLanes];
    }
    if (block.deferred.empty()) return nullptr;
    perform_one_deferred();
  }
}

void enter(Fiber* to) {
  block.current = to;
  if (to != nullptr) threadIdx = to->index;
}

// AddressSanitizer wants to know which stack it is on.
void before_switch([[maybe_unused]] void** keep, [[maybe_unused]] Fiber* to) {
#if defined(__SANITIZE_ADDRESS__)
  if (to != nullptr) {
    __sanitizer_start_switch_fiber(keep, to->stack, kStackBytes);
  } else {
    __sanitizer_start_switch_fiber(keep, block.main_stack, block.main_stack_bytes);
  }
#endif
}
void after_switch([[maybe_unused]] void* kept, [[maybe_unused]] bool from_main) {
#if defined(__SANITIZE_ADDRESS__)
  const void* stack = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(kept, &stack, &bytes);
  if (from_main) block.main_stack = stack, block.main_stack_bytes = bytes;
#endif
}

// From thread `from` to the one that runs next; to run_grid() where there is none.
void switch_away(Fiber& from) {
  Fiber* to = pick();
  if (to == &from) return;
  enter(to);
  before_switch(from.done ? nullptr : &from.fake_stack, to);
  switch_context(from.context, to != nullptr ? to->context : block.main);
  after_switch(from.fake_stack, false);
}

void wait(const char* what, Where where) {
  Fiber& self = *block.current;
  self.waits_for = what;
  self.where = where;
  warp_of(self).ready &= ~bit_of(self);
  switch_away(self);
}

void fiber_main() {
  after_switch(nullptr, block.main_stack == nullptr);  // the first thread of all comes from run_grid()
  (*block.body)();
  Fiber& self = *block.current;
  perform(self, self.first_copy + self.copies.size());
  self.done = true;
  warp_of(self).ready &= ~bit_of(self);
  --block.left;
  switch_away(self);
  std::abort();  // a thread that is done never runs again
}

[[noreturn]] void report_deadlock() {
  std::string text;
  for (int w = 0; w < block.warps; ++w) {
    for (int i = 0; i < kLanes && w * kLanes + i < block.threads; ++i) {
      const Fiber& fiber = block.fibers[w * kLanes + i];
      const Fiber* before = i > 0 ? &fiber - 1 : nullptr;
      if (before != nullptr && before->done == fiber.done && before->waits_for == fiber.waits_for &&
          before->where.line() == fiber.where.line()) {
        continue;
      }
      text += "\n  thread " + std::to_string(w * kLanes + i) + " and on: ";
      text += fiber.done ? "has returned"
                         : std::string("waits for ") + fiber.waits_for + " at " + fiber.where.file_name() + ":" +
                               std::to_string(fiber.where.line());
    }
  }
  fail("all threads wait: %s", text.c_str());
}

void start_block() {
  std::memset(block.shared, 0xff, block.shared_bytes);  // NaN in every format
  block.warps = (block.threads + kLanes - 1) / kLanes;
  block.left = block.threads;
  block.deferred.clear();
  for (Barrier& barrier : block.barriers) barrier = Barrier();
  for (int w = 0; w < block.warps; ++w) {
    const int lanes = std::min(kLanes, block.threads - w * kLanes);
    block.warp[w].ready = block.warp[w].lanes = lanes == kLanes ? ~0u : (1u << lanes) - 1;
    block.warp[w].meetings.clear();
    block.order[w] = w;
  }
  reorder_warps();
  for (int i = 0; i < block.threads; ++i) {
    Fiber& fiber = block.fibers[i];
    const unsigned n = static_cast<unsigned>(i);
    fiber.index = {n % blockDim.x, n / blockDim.x % blockDim.y, n / blockDim.x / blockDim.y};
    fiber.done = false;
    fiber.waits_for = nullptr;
    fiber.copies.clear();
    fiber.groups.clear();
    fiber.first_copy = 0;
    start_context(fiber.context, fiber.stack, fiber_main);
  }
}

void reserve_memory() {
  if (block.arena != nullptr) return;
  const auto map = [](size_t bytes) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) fail("no memory for the threads' stacks");
    return static_cast<char*>(p);
  };
  const size_t arena_bytes = (kMostSharedBytes + page() - 1) / page() * page();
  block.arena = map(arena_bytes + page()) + arena_bytes;
  mprotect(block.arena, page(), PROT_NONE);
  // A page that may not be touched below each stack.
  char* stacks = map(kMostThreads * (kStackBytes + page()));
  for (int i = 0; i < kMostThreads; ++i, stacks += kStackBytes + page()) {
    mprotect(stacks, page(), PROT_NONE);
    block.fibers[i].stack = stacks + page();
  }
}

// ---- barriers in shared memory

struct MBarrier {
  uint16_t magic, phase, expected, pending;
};
constexpr uint16_t kMagic = 0xba44;
static_assert(sizeof(MBarrier) == 8);

MBarrier& mbarrier_at(uint32_t address) {
  MBarrier& barrier = shared<MBarrier>(address, "an mbarrier");
  if (barrier.magic != kMagic) fail("the mbarrier at shared address %#x was not initialised", address);
  return barrier;
}

}  // namespace

Settings& settings() {
  static Settings value;
  return value;
}
Counters& counters() {
  static Counters value;
  return value;
}

void fail(const char* format, ...) {
  std::va_list list;
  va_start(list, format);
  std::fprintf(stderr, "emulated kernel: ");
  std::vfprintf(stderr, format, list);
  va_end(list);
  std::fprintf(stderr, " (block %u, %u, %u of %u, %u, %u", blockIdx.x, blockIdx.y, blockIdx.z, gridDim.x, gridDim.y,
               gridDim.z);
  if (block.current != nullptr) std::fprintf(stderr, ", thread %d of %d", number_of(*block.current), block.threads);
  std::fprintf(stderr, ", seed %llu)\n", static_cast<unsigned long long>(settings().seed));
  std::fflush(stderr);
  std::abort();
}

uint32_t draw(uint32_t below) {
  block.random ^= block.random << 13;
  block.random ^= block.random >> 7;
  block.random ^= block.random << 17;
  return static_cast<uint32_t>((block.random >> 32) * below >> 32);
}

int lane_id() { return number_of(*block.current) % kLanes; }

void run_grid(dim3 grid, dim3 threads, size_t shared_bytes, const std::function<void()>& thread) {
  reserve_memory();
  if (block.current != nullptr) fail("a kernel was launched from a kernel");
  ++counters().launches;
  block.threads = static_cast<int>(threads.x * threads.y * threads.z);
  block.body = &thread;
  block.random = (settings().seed + static_cast<uint64_t>(counters().launches)) * 0x9e3779b97f4a7c15u | 1;
  block.shared_bytes = (shared_bytes + 127) / 128 * 128;
  block.shared = block.arena - block.shared_bytes;
  gridDim = grid;
  blockDim = threads;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        start_block();
        Fiber* first = pick();
        enter(first);
        before_switch(&block.main_fake_stack, first);
        switch_context(block.main, first->context);
        after_switch(block.main_fake_stack, false);
        if (block.left > 0) report_deadlock();
      }
    }
  }
  block.current = nullptr;
}

void collective(const char* name, Where where, uint32_t mask, const void* in, size_t in_bytes, void* out,
                size_t out_bytes, Combine combine, const void* function) {
  Fiber& self = *block.current;
  Warp& warp = warp_of(self);
  mask &= warp.lanes;
  if ((mask & bit_of(self)) == 0) fail("%s at line %u: the lane is not in its own mask", name, where.line());
  auto meeting =
      std::find_if(warp.meetings.begin(), warp.meetings.end(), [&](const Meeting& m) { return m.mask == mask; });
  if (meeting == warp.meetings.end()) {
    meeting = std::find_if(warp.meetings.begin(), warp.meetings.end(), [&](const Meeting& m) { return m.mask == 0; });
    if (meeting == warp.meetings.end()) meeting = warp.meetings.insert(meeting, Meeting());
    meeting->name = name;
    meeting->where = where;
    meeting->mask = mask;
    meeting->arrived = 0;
  }
  if (std::strcmp(meeting->name, name) != 0 || meeting->where.line() != where.line()) {
    fail("lanes of a warp diverge: %s at %s:%u beside %s at %s:%u", name, where.file_name(), where.line(),
         meeting->name, meeting->where.file_name(), meeting->where.line());
  }
  std::memcpy(meeting->in + static_cast<size_t>(lane_id()) * in_bytes, in, in_bytes);
  meeting->arrived |= bit_of(self);
  if (meeting->arrived != mask) {
    wait(name, where);
    std::memcpy(out, self.result, out_bytes);
    return;
  }
  alignas(16) char results[kLanes * kMostBytes];
  combine(function, meeting->in, results);
  meeting->mask = 0;
  Fiber* first = &self - lane_id();
  for (size_t lane = 0; lane < kLanes; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    std::memcpy(first[lane].result, results + lane * out_bytes, out_bytes);
    if (first + lane != &self) wake(first[lane]);
  }
  std::memcpy(out, self.result, out_bytes);
}

namespace {
// Counts an arrival; whether it was the last one.
bool arrive(uint32_t id, uint32_t threads, Where where) {
  if (id >= kBarriers) fail("barrier %u at line %u: there are %d", id, where.line(), kBarriers);
  Barrier& barrier = block.barriers[id];
  if (threads == 0) threads = static_cast<uint32_t>(block.threads);
  if (barrier.arrived == 0) barrier.threads = threads, barrier.where = where;
  if (barrier.threads != threads) {
    fail("barrier %u is for %u threads at line %u and for %u at line %u", id, barrier.threads, barrier.where.line(),
         threads, where.line());
  }
  if (++barrier.arrived < threads) return false;
  for (int w = 0; w < block.warps; ++w) {
    for (uint32_t waiting = barrier.waiting[w]; waiting != 0; waiting &= waiting - 1) {
      wake(block.fibers[w * kLanes + __builtin_ctz(waiting)]);
    }
  }
  barrier = Barrier();
  return true;
}
}  // namespace

void barrier_sync(uint32_t id, uint32_t threads, Where where) {
  Fiber& self = *block.current;
  Barrier& barrier = block.barriers[id % kBarriers];
  // Within a warp all lanes must come to the same barrier instruction.
  const uint32_t beside = barrier.waiting[number_of(self) / kLanes];
  if (beside != 0) {
    const Where& other = block.fibers[number_of(self) / kLanes * kLanes + __builtin_ctz(beside)].where;
    if (other.line() != where.line()) {
      fail("lanes of a warp diverge: barrier %u at %s:%u and at %s:%u", id, where.file_name(), where.line(),
           other.file_name(), other.line());
    }
  }
  if (arrive(id, threads, where)) return;
  barrier.waiting[number_of(self) / kLanes] |= bit_of(self);
  wait("a barrier of the block", where);
}

void barrier_arrive(uint32_t id, uint32_t threads, Where where) { arrive(id, threads, where); }

void* dynamic_shared_memory() { return block.shared; }

uint32_t shared_address(const void* pointer) {
  const char* p = static_cast<const char*>(pointer);
  if (p < block.shared || p > block.shared + block.shared_bytes) fail("not a pointer into dynamic shared memory");
  return kSharedStart + static_cast<uint32_t>(p - block.shared);
}

void* shared_pointer(uint32_t address, size_t bytes, size_t alignment, const char* what) {
  const size_t offset = address - size_t{kSharedStart};
  if (address < kSharedStart || offset + bytes > block.shared_bytes) {
    fail("%s of %zu bytes at shared address %#x is outside of the block's %zu bytes", what, bytes, address,
         block.shared_bytes);
  }
  if (offset % alignment != 0) fail("%s at shared address %#x is not aligned to %zu bytes", what, address, alignment);
  return block.shared + offset;
}

void mbarrier_init(uint32_t address, uint32_t arrivals) {
  const uint16_t count = static_cast<uint16_t>(arrivals);
  shared<MBarrier>(address, "an mbarrier") = {kMagic, 0, count, count};
}

void mbarrier_invalidate(uint32_t address) { mbarrier_at(address).magic = 0; }

void mbarrier_arrive(uint32_t address) {
  MBarrier& barrier = mbarrier_at(address);
  if (--barrier.pending > 0) return;
  barrier.pending = barrier.expected;
  ++barrier.phase;
  for (int i = 0; i < block.threads; ++i) {
    Fiber& fiber = block.fibers[i];
    if (fiber.waits_for != nullptr && fiber.barrier == address && (barrier.phase + 1u) % 2 == fiber.parity) {
      fiber.barrier = 0;
      wake(fiber);
    }
  }
}

bool mbarrier_test(uint32_t address, uint32_t parity) {
  // The phase that has ended is the one before the current one.
  return (mbarrier_at(address).phase + 1u) % 2 == parity;
}

void mbarrier_wait(uint32_t address, uint32_t parity, Where where) {
  if (mbarrier_test(address, parity)) return;
  block.current->barrier = address;
  block.current->parity = parity;
  wait("an mbarrier", where);
}

void async_copy(uint32_t to, const void* from, size_t bytes, size_t bytes_read) {
  if (bytes_read > bytes) fail("cp.async reads %zu of %zu bytes", bytes_read, bytes);
  if (reinterpret_cast<uintptr_t>(from) % bytes != 0) fail("cp.async from %p: not aligned to %zu bytes", from, bytes);
  void* destination = shared_pointer(to, bytes, bytes, "cp.async");
  std::memset(destination, 0xff, bytes);
  block.current->copies.push_back({destination, from, bytes, bytes_read});
}

void async_commit() { block.current->groups.push_back(block.current->first_copy + block.current->copies.size()); }

void async_wait_group(size_t groups_left) {
  Fiber& self = *block.current;
  if (self.groups.size() > groups_left) perform(self, self.groups[self.groups.size() - 1 - groups_left]);
}

void async_arrive(uint32_t barrier) {
  Fiber& self = *block.current;
  block.deferred.push_back({&self, self.first_copy + self.copies.size(), barrier});
}

}  // namespace cuda_emulation
