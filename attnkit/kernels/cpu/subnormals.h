// Numbers below the smallest normal one count as operands: the smallest of float16 are among them on their way to float,
// and XLA on CPUs and torch.set_flush_denormal let a thread take them for 0. Results below it become 0 where a processor
// can do the one without the other: Intel's take a hundred times as long to round a product to fewer digits, and where
// weights fall along a row, every tile has some.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace attnkit {

// While one of these lives, its thread reads subnormal numbers.
class ReadsSubnormals {
 public:
  ReadsSubnormals() : before_(read()) { write((before_ & ~kOperands) | kResults); }
  ReadsSubnormals(const ReadsSubnormals &) = delete;
  ReadsSubnormals &operator=(const ReadsSubnormals &) = delete;
  ~ReadsSubnormals() { write(before_); }

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kOperands = 0x40, kResults = 0x8000;  // taken for 0
  static uint64_t read() { return _mm_getcsr(); }
  static void write(uint64_t x) { _mm_setcsr(static_cast<unsigned>(x)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kOperands = uint64_t{1} << 24 | uint64_t{1} << 19, kResults = 0;  // both of float, and of half
  static uint64_t read() {
    uint64_t x;
    asm volatile("mrs %0, fpcr" : "=r"(x));
    return x;
  }
  static void write(uint64_t x) { asm volatile("msr fpcr, %0" : : "r"(x)); }
#else
  static constexpr uint64_t kOperands = 0, kResults = 0;
  static uint64_t read() { return 0; }
  static void write(uint64_t) {}
#endif

  const uint64_t before_;
};

}  // namespace attnkit
