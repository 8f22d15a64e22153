// A CUDA block on one CPU thread: a fiber for each of its threads, which run one after the other and change places
// where they wait for one another.
//
// A warp runs as far as it can before another one does, threads in ascending or in descending order. Whoever reads what
// nobody has written yet finds NaN: shared memory is filled with 0xFF before each block, and so is the target of an
// asynchronous copy from its issue until the thread that issued it waits for it. Waiting that cannot end, threads of a
// warp in different instructions, different barriers and accesses to pages that are not there end the launch with a
// message that names block and threads; so does an index outside of an array of known size.
#pragma once

#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

namespace fibers {

constexpr int MOST_THREADS = 1024, LANES = 32, MOST_COPIES = 4096;
constexpr size_t STACK = 1 << 17, MOST_SHARED = 1 << 18;

struct Index {
  unsigned x, y, z;
};

struct Copy {
  void* to;
  const void* from;
  int bytes;
  int group;
  bool present;
};

enum State { READY, IN_WARP, AT_BARRIER, FINISHED };

struct Fiber {
  Index thread;
  State state;
  bool started;
  jmp_buf context;
  ucontext_t start;
  unsigned char* stack;
  const char* waits_for;  // the instruction of the warp, or the barrier
  int line;               // of either
  void* operands;
  int copies, groups;     // copies on their way; groups that were closed
  Copy copy[MOST_COPIES];
};

struct Launch {
  void (*kernel)(const void*);
  const void* arguments;
  int grid, block, shared_bytes;
  bool descending;
};

struct Answer {  // read by Python
  int failed;
  void* address;  // of the access that ended the launch, or null
  char message[2048];
};

inline Fiber* all[MOST_THREADS];
inline Fiber* running;
inline Launch launch;
inline Answer* answer;
inline Index block;
inline unsigned char* shared_pages;
inline jmp_buf scheduler;
inline int finished;

[[noreturn]] inline void fail(const char* format, ...) {
  int at = snprintf(answer->message, sizeof answer->message, "block %u", block.x);
  if (running) at += snprintf(answer->message + at, sizeof answer->message - at, ", thread %u", running->thread.x);
  at += snprintf(answer->message + at, sizeof answer->message - at, ": ");
  va_list list;
  va_start(list, format);
  vsnprintf(answer->message + at, sizeof answer->message - at, format, list);
  va_end(list);
  answer->failed = 1;
  _longjmp(scheduler, 1);
}

struct OutOfBounds {  // as the compiler lays it out under -fsanitize=bounds
  const char* file;
  unsigned line, column;
  const void *array, *index;
};

inline const char* told(const Fiber* fiber, char (&room)[96]) {
  if (fiber->state == IN_WARP) {
    snprintf(room, sizeof room, "wait in %s of line %d for their warp", fiber->waits_for, fiber->line);
  } else if (fiber->state == AT_BARRIER) {
    snprintf(room, sizeof room, "wait at the barrier of line %d", fiber->line);
  } else {
    snprintf(room, sizeof room, "%s", fiber->state == FINISHED ? "have ended" : "run");
  }
  return room;
}

[[noreturn]] inline void fail_with_everybody(const char* what) {
  char text[1024], room[96], other[96];
  int at = 0;
  for (int first = 0, n = 1; n <= launch.block && at < (int)sizeof text; n++) {
    const bool ends = n == launch.block || strcmp(told(all[first], room), told(all[n], other)) != 0;
    if (!ends) continue;
    at += snprintf(text + at, sizeof text - at, "%s threads %d to %d %s", at ? ";" : "", first, n - 1,
                   told(all[first], room));
    first = n;
  }
  running = nullptr;
  fail("%s:%s", what, text);
}

[[noreturn]] inline void resume(Fiber* fiber) {
  running = fiber;
  if (fiber->started) _longjmp(fiber->context, 1);
  fiber->started = true;
  setcontext(&fiber->start);
  __builtin_unreachable();
}

// The next fiber that can run: of the same warp, or of the first warp that has one.
inline Fiber* next() {
  const int count = launch.block, warp = running ? running->thread.x / LANES : 0;
  for (int n = 0; n < LANES; n++) {
    Fiber* fiber = all[warp * LANES + (launch.descending ? LANES - 1 - n : n)];
    if (running && fiber->state == READY) return fiber;
  }
  for (int n = 0; n < count; n++) {
    Fiber* fiber = all[launch.descending ? count - 1 - n : n];
    if (fiber->state == READY) return fiber;
  }
  return nullptr;
}

// Let others run until this fiber is READY again.
inline void wait() {
  Fiber* fiber = next();
  if (!fiber) fail_with_everybody("no thread can go on");
  if (fiber == running) return;
  if (_setjmp(running->context) == 0) resume(fiber);
}

// An instruction of a whole warp: the last of its lanes performs it on the operands of all.
inline void together(const char* name, int line, void* operands, void (*perform)(void* const*)) {
  Fiber** lanes = all + running->thread.x / LANES * LANES;
  running->waits_for = name;
  running->line = line;
  running->operands = operands;
  running->state = IN_WARP;
  void* given[LANES];
  for (int n = 0; n < LANES; n++) {
    if (lanes[n]->state == IN_WARP && (lanes[n]->line != line || strcmp(lanes[n]->waits_for, name))) {
      fail("%s of line %d, while thread %u of its warp is in %s of line %d", name, line, lanes[n]->thread.x,
           lanes[n]->waits_for, lanes[n]->line);
    }
    given[n] = lanes[n]->operands;
  }
  for (int n = 0; n < LANES; n++) {
    if (lanes[n]->state != IN_WARP) return wait();
  }
  perform(given);
  for (int n = 0; n < LANES; n++) lanes[n]->state = READY;
}

inline void barrier(int line) {
  running->line = line;
  running->state = AT_BARRIER;
  for (int n = 0; n < launch.block; n++) {
    if (all[n]->state == AT_BARRIER && all[n]->line != line) {
      fail("barrier of line %d, while thread %d is at the barrier of line %d", line, n, all[n]->line);
    }
    if (all[n]->state == FINISHED) fail("barrier of line %d, which thread %d will not reach: it has ended", line, n);
  }
  for (int n = 0; n < launch.block; n++) {
    if (all[n]->state != AT_BARRIER) return wait();
  }
  for (int n = 0; n < launch.block; n++) all[n]->state = READY;
  wait();
}

// ------------------------------------------------------------------------------------------------ copies

inline void copy_later(void* to, const void* from, int bytes, bool present) {
  if ((size_t)to % bytes || (present && (size_t)from % bytes)) fail("asynchronous copy of %d bytes, not aligned", bytes);
  if (running->copies == MOST_COPIES) fail("more than %d asynchronous copies on their way", MOST_COPIES);
  memset(to, 0xFF, bytes);
  running->copy[running->copies++] = {to, from, bytes, running->groups, present};
}

inline void wait_for_copies(int pending) {
  int left = 0;
  for (int n = 0; n < running->copies; n++) {
    const Copy& copy = running->copy[n];
    if (copy.group >= running->groups - pending) {
      running->copy[left++] = copy;
    } else if (copy.present) {
      memcpy(copy.to, copy.from, copy.bytes);
    } else {
      memset(copy.to, 0, copy.bytes);
    }
  }
  running->copies = left;
}

// ------------------------------------------------------------------------------------------------ launching

inline unsigned char* pages(size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? nullptr : (unsigned char*)at;
}

inline void each_block() {
  for (;;) {
    launch.kernel(launch.arguments);
    running->state = FINISHED;
    finished++;
    if (finished < launch.block) {
      wait();
    } else if (_setjmp(running->context) == 0) {
      _longjmp(scheduler, 2);
    }
  }
}

inline void on_fault(int, siginfo_t* info, void*) {
  answer->address = info->si_addr;
  fail("access to %p, which belongs to no array", info->si_addr);
}

inline bool prepare_stacks() {
  const size_t page = sysconf(_SC_PAGESIZE);
  for (int n = 0; n < launch.block; n++) {
    if (!all[n]) {
      all[n] = (Fiber*)pages(sizeof(Fiber));
      if (!all[n] || !(all[n]->stack = pages(STACK))) return false;
      mprotect(all[n]->stack, page, PROT_NONE);
    }
    Fiber* fiber = all[n];
    fiber->thread = {(unsigned)n, 0, 0};
    fiber->started = false;
    getcontext(&fiber->start);
    fiber->start.uc_stack.ss_sp = fiber->stack;
    fiber->start.uc_stack.ss_size = STACK;
    fiber->start.uc_link = nullptr;
    makecontext(&fiber->start, each_block, 0);
  }
  if (!shared_pages) {
    shared_pages = pages(MOST_SHARED + 2 * page);
    if (!shared_pages) return false;
    mprotect(shared_pages, page, PROT_NONE);
    mprotect(shared_pages + page + MOST_SHARED, page, PROT_NONE);
  }
  return true;
}

// The last byte of shared memory is followed by a page that nobody may touch.
inline unsigned char* shared() { return shared_pages + sysconf(_SC_PAGESIZE) + MOST_SHARED - launch.shared_bytes; }

inline void run_blocks() {
  for (volatile int n = 0; n < launch.grid; n = n + 1) {
    block = {(unsigned)n, 0, 0};
    running = nullptr;
    finished = 0;
    memset(shared(), 0xFF, launch.shared_bytes);
    for (int t = 0; t < launch.block; t++) {
      all[t]->state = READY;
      all[t]->copies = all[t]->groups = 0;
    }
    const int ended = _setjmp(scheduler);
    if (ended == 0) resume(next());
    if (ended == 1) return;
  }
}

inline void run(const Launch& given, Answer* to) {
  launch = given;
  answer = to;
  *answer = {};
  running = nullptr;
  if (_setjmp(scheduler)) return;
  if (launch.block % LANES || launch.block > MOST_THREADS) fail("%d threads: no number of warps", launch.block);
  if (launch.shared_bytes % 16 || launch.shared_bytes > (int)MOST_SHARED) {
    fail("%d bytes of shared memory: not a multiple of 16, or too many", launch.shared_bytes);
  }
  if (!prepare_stacks()) fail("no memory for the stacks of %d threads", launch.block);
  static unsigned char* signal_stack = pages(1 << 16);
  stack_t stack = {}, stack_before;
  stack.ss_sp = signal_stack;
  stack.ss_size = 1 << 16;
  sigaltstack(&stack, &stack_before);
  struct sigaction action = {}, segv_before, bus_before;
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, &segv_before);
  sigaction(SIGBUS, &action, &bus_before);
  run_blocks();
  sigaction(SIGSEGV, &segv_before, nullptr);
  sigaction(SIGBUS, &bus_before, nullptr);
  sigaltstack(&stack_before, nullptr);
}

}  // namespace fibers

// Called in the place of the sanitizer's library, whose message would name neither block nor thread.
extern "C" [[gnu::visibility("hidden"), gnu::used]] inline void __ubsan_handle_out_of_bounds_abort(
    fibers::OutOfBounds* access, unsigned long index) {
  fibers::fail("%s, line %u: index %ld of an array that ends before it", access->file, access->line, (long)index);
}

#define threadIdx (fibers::running->thread)
#define blockIdx (fibers::block)
inline void __syncthreads(int line = __builtin_LINE()) { fibers::barrier(line); }
