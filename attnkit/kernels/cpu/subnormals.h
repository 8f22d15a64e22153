// Numbers below the smallest normal one count here. XLA on CPUs and torch.set_flush_denormal let a thread take them for
// 0; the smallest of float16 would be among them on their way to float.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace attnkit {

// While one of these lives, its thread computes with subnormal numbers.
class KeepsSubnormals {
 public:
  KeepsSubnormals() : before_(read()) { write(before_ & ~kFlushes); }
  KeepsSubnormals(const KeepsSubnormals &) = delete;
  KeepsSubnormals &operator=(const KeepsSubnormals &) = delete;
  ~KeepsSubnormals() { write(before_); }

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kFlushes = 0x8040;  // results, and operands
  static uint64_t read() { return _mm_getcsr(); }
  static void write(uint64_t x) { _mm_setcsr(static_cast<unsigned>(x)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kFlushes = uint64_t{1} << 24 | uint64_t{1} << 19;  // float and double, and half
  static uint64_t read() {
    uint64_t x;
    asm volatile("mrs %0, fpcr" : "=r"(x));
    return x;
  }
  static void write(uint64_t x) { asm volatile("msr fpcr, %0" : : "r"(x)); }
#else
  static constexpr uint64_t kFlushes = 0;
  static uint64_t read() { return 0; }
  static void write(uint64_t) {}
#endif

  const uint64_t before_;
};

}  // namespace attnkit
