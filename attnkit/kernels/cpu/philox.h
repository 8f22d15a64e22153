// Dropout by counter (A9): the first word of Philox4x32-10 (Salmon et al. 2011, §3.3) for (j, i, head, item).
#pragma once

#include "vector.h"

namespace attnkit {

constexpr int kCounters = kBytes / 8;  // of a vector: one in the lower half of each lane, whose upper half is ignored
constexpr int kStreams = kBytes == 64 ? 4 : 2;  // vectors whose rounds take turns: each waits for the one before

// The 64 bits of a * b.
ATTNKIT_INLINE Bits64Vector multiply_words(Bits64Vector a, uint32_t b) {
#if defined(__AVX512F__)
  return (Bits64Vector)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__)
  return (Bits64Vector)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#else
  return (a & 0xffffffff) * static_cast<uint64_t>(b);
#endif
}

// Words, in the lower halves of lanes, in place of the keys j of one query.
ATTNKIT_INLINE void philox(Bits64Vector (&j)[kStreams], uint32_t i, uint32_t head, uint32_t item, uint64_t seed) {
  constexpr uint64_t kFirst = 0xD2511F53u, kSecond = 0xCD9E8D57u;
  constexpr uint32_t kSteps[] = {0x9E3779B9u, 0xBB67AE85u};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  const auto step = [&] { k0 += kSteps[0], k1 += kSteps[1]; };
  // Two rounds in which half of the words are those of all keys: (j, i, head, item) becomes (a, b, vector, vector).
  const uint64_t of_head = head * kSecond;
  const uint64_t a = ((of_head >> 32) ^ i ^ k0) & 0xffffffff, b = of_head, of_a = a * kFirst;
  Bits64Vector c0[kStreams], c1[kStreams], c2[kStreams], c3[kStreams];
  for (int n = 0; n < kStreams; ++n) {
    const Bits64Vector of_keys = multiply_words(j[n], kFirst);
    const Bits64Vector c = (of_keys >> 32) ^ static_cast<uint64_t>(item ^ k1);
    c1[n] = multiply_words(c, kSecond);
    c0[n] = (c1[n] >> 32) ^ (b ^ (k0 + kSteps[0]));
    c2[n] = of_keys ^ ((of_a >> 32) ^ (k1 + kSteps[1]));
    c3[n] = Bits64Vector{} + of_a;
  }
  step();
  step();
  for (int round = 2; round < 10; ++round, step()) {
    for (int n = 0; n < kStreams; ++n) {
      const Bits64Vector first = multiply_words(c0[n], kFirst), second = multiply_words(c2[n], kSecond);
      c0[n] = (second >> 32) ^ c1[n] ^ static_cast<uint64_t>(k0);
      c1[n] = second;
      c2[n] = (first >> 32) ^ c3[n] ^ static_cast<uint64_t>(k1);
      c3[n] = first;
    }
  }
  for (int n = 0; n < kStreams; ++n) j[n] = c0[n] & 0xffffffff;
}

// x where the mask is set, else 0.
template <class T>
ATTNKIT_INLINE void choose(Int64Vector mask, T x, T *out) {
  typedef T Numbers __attribute__((vector_size(kCounters * sizeof(T))));
  typedef typename Lanes<T>::Integer Integers __attribute__((vector_size(kCounters * sizeof(T))));
  const Numbers chosen = __builtin_convertvector(mask, Integers) != 0 ? Numbers{} + x : Numbers{};
  std::memcpy(out, &chosen, sizeof chosen);
}

}  // namespace attnkit
