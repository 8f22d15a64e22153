// The half types, read as and rounded from float.
#pragma once

#include <cstdint>
#include <cstring>

#include "vector.h"

namespace attnkit {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

ATTNKIT_INLINE float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
ATTNKIT_INLINE uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

ATTNKIT_INLINE float widen(float x) { return x; }
ATTNKIT_INLINE double widen(double x) { return x; }
ATTNKIT_INLINE float widen(BFloat16 x) { return from_bits(static_cast<uint32_t>(x.bits) << 16); }
// Exponent and mantissa as those of a float that is 2^112 times too small; infinity and NaN have their own exponent.
ATTNKIT_INLINE float widen(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t size = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
  const float finite = from_bits(size) * from_bits(0x77800000);  // 2^112
  return from_bits(sign | (size >= 0x0f800000 ? size | 0x7f800000 : to_bits(finite)));
}

typedef uint16_t HalvesVector __attribute__((vector_size(kBytes / 2)));

// A vector of numbers as T: they are T, or of a half type where T is float.
template <class T>
ATTNKIT_INLINE Vec<T> load_as(const T *p) {
  return load(p);
}
template <class T>
ATTNKIT_INLINE FloatVector load_as(const BFloat16 *p) {
#if defined(__AVX512F__)  // one instruction in place of two: each number to the upper half of a lane
  alignas(64) static constexpr uint16_t kFrom[] = {0, 0, 0, 1, 0, 2,  0, 3,  0, 4,  0, 5,  0, 6,  0, 7,
                                                   0, 8, 0, 9, 0, 10, 0, 11, 0, 12, 0, 13, 0, 14, 0, 15};
  const __m512i x = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
  return (FloatVector)_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, _mm512_load_si512(kFrom), x);
#else
  HalvesVector x;
  std::memcpy(&x, p, sizeof x);
  return (FloatVector)(__builtin_convertvector(x, Bits32Vector) << 16);
#endif
}
template <class T>
ATTNKIT_INLINE FloatVector load_as(const Float16 *p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
#elif defined(__AVX2__) && defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
#else
  FloatVector x;
  for (int i = 0; i < kLanes<float>; ++i) x[i] = widen(p[i]);
  return x;
#endif
}

template <class To>
ATTNKIT_INLINE To rounded(double x) {
  return static_cast<To>(x);
}
// To the nearest, ties to even; a NaN stays one.
template <>
ATTNKIT_INLINE BFloat16 rounded<BFloat16>(double wide) {
  const float x = static_cast<float>(wide);
  const uint32_t bits = to_bits(x);
  const uint32_t up = bits + 0x7fff + ((bits >> 16) & 1);
  return {static_cast<uint16_t>(x == x ? up >> 16 : (bits >> 16) | 0x40)};
}
template <>
ATTNKIT_INLINE Float16 rounded<Float16>(double wide) {
  const float x = static_cast<float>(wide);
  const uint32_t bits = to_bits(x), sign = (bits >> 16) & 0x8000, size = bits & 0x7fffffff;
  if (size >= 0x47800000) return {static_cast<uint16_t>(sign | (size > 0x7f800000 ? 0x7e00 : 0x7c00))};
  if (size < 0x38800000) {  // subnormal: adding 1/2 puts the last bit where that of a float is
    const uint32_t small = to_bits(from_bits(size) + 0.5f) - to_bits(0.5f);
    return {static_cast<uint16_t>(sign | small)};
  }
  const uint32_t up = size + 0xfff + ((size >> 13) & 1) - 0x38000000;
  return {static_cast<uint16_t>(sign | (up >> 13))};
}

}  // namespace attnkit
