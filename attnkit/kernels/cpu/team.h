// Threads of an OpenMP runtime, for calls from a program whose own operations use them, as those of torch do.
//
// They spin for some milliseconds after each of its parallel regions. Helpers of our own would find the cores taken for
// that long, and the caller would wait for them; as a member of the team a spinning thread begins at once. Once they
// sleep, helpers of our own are better: nobody waits for the one that wakes late, and at the end of a region a runtime
// spins even before a thread that it keeps from its core.
#pragma once

#include "pool.h"

#if defined(__linux__)
#include <pthread.h>
#include <time.h>
#endif

namespace attnkit {

class Team {
 public:
  // GOMP_parallel of libgomp, which other runtimes have as well: `body(data)` on each of `threads` threads, of which the
  // caller is one; returns once all of them have.
  using Entry = void (*)(void (*body)(void *), void *data, unsigned threads, unsigned flags);

  Team(Entry entry, int threads) : entry_(entry), threads_(threads) {}

  static void enlist(void *host, int helpers, const std::shared_ptr<Job> &job) {
    const auto *team = static_cast<const Team *>(host);
    team->is_awake() ? team->do_all(*job) : Pool::own().enlist(helpers, job);
  }

 private:
#if defined(__linux__)
  using Clock = std::chrono::steady_clock;

  // Of the calling thread, for each that calls has a team of its own: the clock of a member's time on a core.
  enum Known { kNothing, kMember, kAlone };
  inline static thread_local Known known_ = kNothing;
  inline static thread_local clockid_t clock_{};

  // Whether its threads spin: a member was on a core within these two microseconds. The first region tells who that is.
  bool is_awake() const {
    timespec before, after;
    if (known_ == kMember && clock_gettime(clock_, &before) != 0) known_ = kNothing;  // it has ended
    if (known_ != kMember) return known_ == kNothing;
    for (const auto end = Clock::now() + std::chrono::microseconds(2); Clock::now() < end;) {
    }
    return clock_gettime(clock_, &after) == 0 && (after.tv_nsec != before.tv_nsec || after.tv_sec != before.tv_sec);
  }

  struct Region {
    Job &job;
    const pthread_t caller;
    std::atomic<bool> has_clock{false};
    std::atomic<clockid_t> clock{};
  };

  // A call always takes the whole team: a runtime ends the threads that a smaller one leaves over, and the next larger
  // one would start them anew.
  void do_all(Job &job) const {
    Region region{job, pthread_self()};
    entry_(enter, &region, static_cast<unsigned>(threads_), 0);
    if (known_ == kMember) return;
    known_ = region.has_clock ? kMember : kAlone;
    clock_ = region.clock;
  }

  static void enter(void *data) {
    auto *region = static_cast<Region *>(data);
    const bool is_caller = pthread_equal(pthread_self(), region->caller);
    clockid_t clock;
    if (!is_caller && !region->has_clock && pthread_getcpuclockid(pthread_self(), &clock) == 0) {
      region->clock = clock;
      region->has_clock = true;
    }
    region->job.work();
    if (is_caller) wait(region->job);
  }

  // Not left to the runtime, which has no look at Ctrl-C; but for a moment as it does, for who sleeps is woken late.
  static void wait(Job &job) {
    for (const auto end = Clock::now() + std::chrono::milliseconds(1); !job.is_done() && Clock::now() < end;)
      std::this_thread::yield();
    job.wait();
  }
#else
  bool is_awake() const { return false; }
  void do_all(Job &) const {}
#endif

  const Entry entry_;
  const int threads_;
};

// While one of these lives, calls of `parallel` from this thread take the helpers of a host.
class Lent {
 public:
  explicit Lent(const Host &host) { lent_host = &host; }
  Lent(const Lent &) = delete;
  Lent &operator=(const Lent &) = delete;
  ~Lent() { lent_host = nullptr; }
};

}  // namespace attnkit
