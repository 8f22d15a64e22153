// Which level of the instruction set this machine has, numbered as by attnkit_level(). This is compiled for the lowest
// level, into a library of its own that is loaded first.
#include "attnkit.h"

extern "C" ATTNKIT_API int attnkit_machine_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                  __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512cd");
  if (v4) return __builtin_cpu_supports("avx512bf16") ? 5 : 4;
  return v3 ? 3 : 1;
#else
  return 1;
#endif
}
