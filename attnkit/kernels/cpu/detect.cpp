// Which level of the instruction set this machine has, numbered as by attnkit_level(). This is compiled for the lowest
// level, into a library of its own that is loaded first.
#include "amx.h"
#include "attnkit.h"

#if defined(__x86_64__)
#include <cpuid.h>

namespace {

bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kBFloat16 = 1u << 22, kTiles = 1u << 24, kBoth = kBFloat16 | kTiles;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBoth) == kBoth && attnkit::tiles_are_lent();
}

}  // namespace
#endif

extern "C" ATTNKIT_API int attnkit_machine_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                  __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512cd");
  // products of pairs in vectors take Intel's cores twice the time of float32
  const bool pairs = v4 && __builtin_cpu_supports("avx512bf16");
  if (pairs && has_amx()) return 6;
  if (v4) return pairs && !__builtin_cpu_is("intel") ? 5 : 4;
  return v3 ? 3 : 1;
#else
  return 1;
#endif
}
