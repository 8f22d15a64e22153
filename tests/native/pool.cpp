// Says on its output what is wrong with the pool: nothing, if it is right.
#include "pool.h"
#include "team.h"

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <new>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

using attnkit::parallel;

static void expect(bool right, const char *what) {
  if (right) return;
  std::puts(what);
  std::fflush(stdout);
}

static bool each_task_once(int64_t tasks, int threads) {
  std::vector<int> times(tasks, 0);
  parallel(tasks, threads, [&](int64_t task) {
    volatile double x = 0;
    for (int i = 0; i < 500; ++i) x = x + i;
    ++times[task];
  });
  for (int n : times) {
    if (n != 1) return false;
  }
  return true;
}

static void count_tasks() {
  for (int round = 0; round < 20; ++round) {
    for (int threads : {1, 2, 3, 7}) {
      for (int64_t tasks : {0, 1, 2, 100}) expect(each_task_once(tasks, threads), "a task was not done once");
    }
  }
}

static void from_several_threads() {
  std::atomic<bool> right{true};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (int round = 0; round < 20; ++round) {
        if (!each_task_once(100, 3)) right = false;
      }
    });
  }
  for (auto &caller : callers) caller.join();
  expect(right, "a task of one of several callers was not done once");
}

static void nested() {
  std::atomic<int> done{0};
  parallel(10, 3, [&](int64_t) { parallel(10, 3, [&](int64_t) { ++done; }); });
  expect(done == 100, "a task of a nested call was not done once");
}

static void throwing() {
  std::atomic<int> done{0};
  bool thrown = false;
  try {
    parallel(100, 3, [&](int64_t task) {
      ++done;
      if (task == 50) throw std::bad_alloc();
    });
  } catch (const std::bad_alloc &) {
    thrown = true;
  }
  expect(thrown, "what a task threw was lost");
  expect(done == 100, "tasks beside one that threw were not done");
}

// Two tasks that each wait, for five seconds at most, until the other has begun.
static bool two_meet() {
  std::atomic<int> begun{0};
  std::atomic<bool> met{true};
  parallel(2, 2, [&](int64_t) {
    ++begun;
    for (int i = 0; i < 5000 && begun < 2; ++i) usleep(1000);
    if (begun < 2) met = false;
  });
  return met;
}

static void forked() {
  const pid_t child = fork();
  if (child == 0) {
    const char *seconds = std::getenv("PATIENCE");
    alarm(seconds ? std::atoi(seconds) : 20);
    _exit(each_task_once(100, 3) && two_meet() ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  expect(status == 0, "a forked child hangs, fails or is alone");
}

// Helpers of a host that come only when the call is over: the caller must not wait for them.
static std::vector<std::shared_ptr<attnkit::Job>> late;

static void with_a_host_whose_threads_are_busy() {
  const attnkit::Host host{
      [](void *, int helpers, const std::shared_ptr<attnkit::Job> &job) { late.assign(helpers, job); }, nullptr};
  attnkit::lent_host = &host;
  expect(each_task_once(100, 3), "without the helpers of a host a task was not done once");
  attnkit::lent_host = nullptr;
  expect(late.size() == 2, "a host was asked for another number of helpers");
  for (auto &job : late) job->work();
}

// A team of OpenMP: a thread beside the caller, asleep or spinning between its regions.
class Runtime {
 public:
  inline static std::atomic<int> regions{0};
  inline static std::atomic<bool> spins{true};

  static void enter(void (*body)(void *), void *data, unsigned, unsigned) {
    static std::thread *const member = new std::thread(serve);
    (void)member;
    data_ = data;
    body_ = body;
    body(data);
    while (body_ != nullptr) std::this_thread::yield();
    ++regions;
  }

 private:
  static void serve() {
    for (;;) {
      if (!spins) usleep(100);
      if (auto *body = body_.load()) {
        body(data_);
        body_ = nullptr;
      }
    }
  }

  inline static std::atomic<void (*)(void *)> body_{nullptr};
  inline static std::atomic<void *> data_{nullptr};
};

static void only_the_caller(void (*body)(void *), void *data, unsigned, unsigned) {
  ++Runtime::regions;
  body(data);
}

static int regions_of(attnkit::Team::Entry entry, int calls, int pause) {
  attnkit::Team team(entry, 3);
  const attnkit::Host host{attnkit::Team::enlist, &team};
  const attnkit::Lent lent(host);
  const int before = Runtime::regions;
  for (int call = 0; call < calls; ++call) {
    expect(each_task_once(100, 3), "with a team a task was not done once");
    usleep(pause);
  }
  return Runtime::regions - before;
}

static void with_a_team() {
  std::thread([] {  // what is known of a team is known of each caller's
    expect(regions_of(only_the_caller, 5, 0) == 1, "a team of one was asked again");
  }).join();
  int regions = 0;  // other programs may keep its core for a while
  for (int turn = 0; turn < 200 && regions < 2; ++turn) regions += regions_of(Runtime::enter, 500, 0);
  expect(regions > 1, "a spinning team was not asked");
  Runtime::spins = false;
  usleep(10000);
  expect(regions_of(Runtime::enter, 200, 1000) < 100, "a sleeping team was asked");
  bool thrown = false;
  try {
    attnkit::Team team(Runtime::enter, 3);
    const attnkit::Host host{attnkit::Team::enlist, &team};
    const attnkit::Lent lent(host);
    parallel(100, 3, [&](int64_t task) {
      if (task == 50) throw std::bad_alloc();
    });
  } catch (const std::bad_alloc &) {
    thrown = true;
  }
  expect(thrown, "what a task of a team threw was lost");
}

static int64_t threads_of_this_process() {
  int64_t threads = 0;
  for (const auto &entry : std::filesystem::directory_iterator("/proc/self/task")) threads += entry.exists();
  return threads;
}

static void ends_helpers() {
  using attnkit::Pool;
  const auto pause = [] { std::this_thread::sleep_for(2 * Pool::kPause); };
  Pool::own().allow(20);
  each_task_once(100, 21);
  const int64_t most = threads_of_this_process();
  Pool::own().allow(2);
  pause();
  expect(threads_of_this_process() == most, "helpers ended at once when a call allowed fewer");
  Pool::own().allow(2);
  for (int round = 0; round < 8 && threads_of_this_process() > most - 18; ++round) pause();
  expect(threads_of_this_process() == most - 18, "helpers did not end when calls allowed fewer");
  expect(each_task_once(100, 3), "with fewer helpers a task was not done once");
}

int main(int count, char **) {
  count_tasks();
  from_several_threads();
  nested();
  throwing();
  with_a_host_whose_threads_are_busy();
  ends_helpers();
  with_a_team();
  if (count == 1) forked();  // not under ThreadSanitizer, which does not follow a fork of a program with threads
  return 0;
}
