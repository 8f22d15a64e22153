// Ctrl-C: a call from the main thread of Python asks ten times a second whether it was pressed, and ends early if so.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

namespace attnkit {

// Functions of CPython: take and leave its lock, tell and forget a signal, and raise it again.
struct Interpreter {
  int (*ensure)();
  void (*release)(int);
  int (*occurred)();
  void (*set)();
};
inline Interpreter interpreter{};

struct Interrupted {};

// Of one call. All of its threads look now and then; the one that made the call asks for them.
class Interrupt {
 public:
  static constexpr std::chrono::milliseconds kEvery{100};

  // That of the call which this thread made, if any.
  static Interrupt *&own() {
    static thread_local Interrupt *call = nullptr;
    return call;
  }

  Interrupt() { own() = this; }
  Interrupt(const Interrupt &) = delete;
  Interrupt &operator=(const Interrupt &) = delete;
  ~Interrupt() { own() = nullptr; }

  // Throws where the call is to end.
  void look() {
    if (own() == this) ask();
    if (raised_.load(std::memory_order_relaxed)) throw Interrupted();
  }

  // The signal stays, for Python to handle: it is raised again.
  void ask() {
    const auto now = Clock::now();
    if (now < next_ || interpreter.ensure == nullptr) return;
    next_ = now + kEvery;
    const int state = interpreter.ensure();
    const bool occurred = interpreter.occurred() != 0;
    interpreter.release(state);
    if (!occurred) return;
    interpreter.set();
    raised_.store(true, std::memory_order_relaxed);
  }

 private:
  using Clock = std::chrono::steady_clock;

  std::atomic<bool> raised_{false};
  Clock::time_point next_ = Clock::now() + kEvery;
};

}  // namespace attnkit
