// Which level of the instruction set this machine has, numbered as by attnkit_level(). This is compiled for the lowest
// level, into a library of its own that is loaded first. The processor is asked itself: not every compiler's runtime
// fills in what __builtin_cpu_supports reads.
#include "amx.h"
#include "attnkit.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <initializer_list>

namespace {

struct Answer {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Answer ask(unsigned leaf, unsigned part = 0) {
  Answer x;
  __get_cpuid_count(leaf, part, &x.a, &x.b, &x.c, &x.d);
  return x;
}

constexpr unsigned bits(std::initializer_list<int> numbers) {
  unsigned all = 0;
  for (int n : numbers) all |= 1u << n;
  return all;
}

bool has(unsigned word, unsigned all) { return (word & all) == all; }

// The registers that the system saves.
unsigned saved() {
  unsigned low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

}  // namespace
#endif

extern "C" ATTNKIT_API int attnkit_machine_level() {
#if defined(__x86_64__)
  constexpr unsigned kFma = bits({12, 27, 28});  // with AVX and XGETBV
  constexpr unsigned kAvx2 = bits({3, 5, 8}), kAvx512 = bits({16, 17, 28, 30, 31});  // with BMI; F, DQ, CD, BW, VL
  constexpr unsigned kPairs = bits({5}), kTiles = bits({22, 24}), kIntel = 0x756e6547;  // "Genu"
  const Answer features = ask(7);
  if (!has(ask(1).c, kFma) || !has(features.b, kAvx2) || !has(saved(), bits({1, 2}))) return 1;
  if (!has(features.b, kAvx512) || !has(saved(), bits({5, 6, 7}))) return 3;
  if (!has(ask(7, 1).a, kPairs)) return 4;
  if (has(features.d, kTiles) && attnkit::tiles_are_lent()) return 6;
  return ask(0).b == kIntel ? 4 : 5;  // products of pairs in vectors take Intel's cores twice the time of float32
#else
  return 1;
#endif
}
