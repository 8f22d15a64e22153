// Dropout by counter (A9): the first word of Philox4x32-10 (Salmon et al. 2011, §3.3) for (j, i, head, item).
#pragma once

#include "vector.h"

namespace attnkit {

typedef uint64_t LongWords __attribute__((vector_size(kBytes)));
constexpr int kCounters = kBytes / 8;  // of a vector: one in the lower half of each lane, whose upper half is ignored

// The 64 bits of a * b.
ATTNKIT_INLINE LongWords multiply_words(LongWords a, uint32_t b) {
#if defined(__AVX512F__)
  return (LongWords)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__)
  return (LongWords)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#else
  return (a & 0xffffffff) * static_cast<uint64_t>(b);
#endif
}

// Words, in the lower halves of lanes, for the keys j, j + 1, ... of one query.
ATTNKIT_INLINE LongWords philox(uint32_t j, uint32_t i, uint32_t head, uint32_t item, uint64_t seed) {
  constexpr uint64_t kFirst = 0xD2511F53u, kSecond = 0xCD9E8D57u;
  constexpr uint32_t kSteps[] = {0x9E3779B9u, 0xBB67AE85u};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  const auto step = [&] { k0 += kSteps[0], k1 += kSteps[1]; };
  LongWords c0;
  for (int lane = 0; lane < kCounters; ++lane) c0[lane] = j + static_cast<uint32_t>(lane);
  // Two rounds in which half of the words are those of all keys: (j, i, head, item) becomes (a, b, vector, vector).
  const uint64_t of_head = head * kSecond;
  const uint64_t a = ((of_head >> 32) ^ i ^ k0) & 0xffffffff, b = of_head;
  const LongWords of_keys = multiply_words(c0, kFirst);
  const LongWords c = (of_keys >> 32) ^ static_cast<uint64_t>(item ^ k1);
  step();
  const uint64_t of_a = a * kFirst;
  const LongWords of_c = multiply_words(c, kSecond);
  c0 = (of_c >> 32) ^ (b ^ k0);
  LongWords c1 = of_c, c2 = of_keys ^ ((of_a >> 32) ^ k1), c3 = LongWords{} + of_a;
  step();
  for (int round = 2; round < 10; ++round) {
    const LongWords first = multiply_words(c0, kFirst), second = multiply_words(c2, kSecond);
    c0 = (second >> 32) ^ c1 ^ static_cast<uint64_t>(k0);
    c1 = second;
    c2 = (first >> 32) ^ c3 ^ static_cast<uint64_t>(k1);
    c3 = first;
    step();
  }
  return c0 & 0xffffffff;
}

}  // namespace attnkit
