// Tasks over threads: `parallel(tasks, threads, body)` calls body(0), body(1), ... body(tasks - 1), each once.
//
// The caller takes tasks itself and asks helpers to join; a helper that wakes late finds nothing left, and nobody waits
// for it. So calls may be nested or come from several threads at once, and no number of busy helpers is a deadlock.
// Which thread does a task must not change its result: then any number of threads gives the same bits.
//
// Helpers sleep between calls and never spin (waking one takes about 80 us). They end when calls have allowed fewer for a
// while. A forked child has none of its parent's threads and starts a pool of its own.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#ifndef _WIN32
#include <pthread.h>
#endif

#include "interrupt.h"
#include "subnormals.h"

namespace attnkit {

// The tasks of one call. Helpers share it, and may outlive the call; `body` is the caller's and is not touched once
// every task is done. A task that throws (std::bad_alloc) is done too: `wait` throws what the first one threw.
class Job {
 public:
  using Call = void (*)(const void *body, int64_t task);

  Job(Call call, const void *body, int64_t tasks) : call_(call), body_(body), tasks_(tasks) {}

  // Do tasks until there are none left to take.
  void work() {
    const ReadsSubnormals here;
    int64_t done = 0;
    std::exception_ptr error;
    for (int64_t task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_; ++done) {
      try {
        call_(body_, task);
      } catch (...) {
        error = std::current_exception();
      }
    }
    if (done == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    if (error && !error_) error_ = error;
    if (done_.fetch_add(done) + done == tasks_) finished_.notify_one();
  }

  bool is_done() const { return done_ == tasks_; }

  // Until the tasks that helpers took are done as well.
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!finished_.wait_for(lock, Interrupt::kEvery, [this] { return is_done(); })) {
      lock.unlock();
      if (Interrupt::own() != nullptr) Interrupt::own()->ask();
      lock.lock();
    }
  }

  // What the first task that threw has thrown, once all are done.
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const Call call_;
  const void *const body_;
  const int64_t tasks_;
  std::atomic<int64_t> next_{0};
  std::mutex mutex_;
  std::condition_variable finished_;
  std::atomic<int64_t> done_{0};
  std::exception_ptr error_;
};

class Pool {
 public:
  static constexpr std::chrono::milliseconds kPause{200};

  // The most helpers that a call has from now on. Where that is fewer than there are, the others end, but only after a
  // pause in which no call allowed more: calls from several threads may differ in it.
  void allow(int helpers) {
    const auto now = Clock::now();
    std::lock_guard<std::mutex> lock(mutex_);
    if (helpers < allowed_ && now - since_ < kPause) return;
    if (helpers < threads_) wake_.notify_all();
    allowed_ = helpers;
    since_ = now;
  }

  // Wake helpers for a job; fewer come where the system gives no more threads.
  void enlist(int helpers, std::shared_ptr<Job> job) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      allowed_ = std::max(allowed_, helpers);
      for (; threads_ < helpers; ++threads_) {
        try {
          std::thread([this] { serve(); }).detach();
        } catch (const std::system_error &) {
          break;
        }
      }
      job_ = std::move(job);
      wanted_ = helpers < threads_ ? helpers : threads_;
    }
    for (int i = 0; i < helpers; ++i) wake_.notify_one();
  }

  // The pool of this process. It is never destroyed: its threads are asleep in it when the process ends.
  static Pool &own() {
    static const bool once = [] {
      pool_ = new Pool;
#ifndef _WIN32
      pthread_atfork(nullptr, nullptr, [] { pool_ = new Pool; });
#endif
      return true;
    }();
    (void)once;
    return *pool_;
  }

 private:
  using Clock = std::chrono::steady_clock;

  void serve() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [this] { return wanted_ > 0 || threads_ > allowed_; });
      if (wanted_ == 0) {
        --threads_;
        return;
      }
      --wanted_;
      const std::shared_ptr<Job> job = job_;
      lock.unlock();
      job->work();
    }
  }

  inline static Pool *pool_ = nullptr;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::shared_ptr<Job> job_;
  int wanted_ = 0;
  int threads_ = 0, allowed_ = 0;
  Clock::time_point since_;
};

// Helpers of the program that called us, where it lends its own threads: XLA does (jax.cpp), and torch (team.h). `enlist`
// returns before they come or after all tasks are done.
struct Host {
  void (*enlist)(void *host, int helpers, const std::shared_ptr<Job> &job);
  void *host;
};
inline thread_local const Host *lent_host = nullptr;

template <class Body>
void parallel(int64_t tasks, int threads, const Body &body) {
  if (threads <= 1 || tasks <= 1) {
    for (int64_t task = 0; task < tasks; ++task) body(task);
    return;
  }
  const auto call = [](const void *b, int64_t task) { (*static_cast<const Body *>(b))(task); };
  const auto job = std::make_shared<Job>(call, &body, tasks);
  const int helpers = static_cast<int>(threads < tasks ? threads : tasks) - 1;
  if (lent_host != nullptr) {
    lent_host->enlist(lent_host->host, helpers, job);
  } else {
    Pool::own().enlist(helpers, job);
  }
  job->work();
  job->wait();
  job->rethrow();
}

}  // namespace attnkit
