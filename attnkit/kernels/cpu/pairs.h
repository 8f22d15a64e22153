// Pairs of bfloat16 as operands of products: on some processors one instruction adds both products of a pair to a float.
#pragma once

#include <type_traits>

#include "vector.h"

namespace attnkit {

enum class Pair : int32_t {};

template <>
struct Lanes<Pair> {
  using Vector = Int32Vector;
};

// What products of E are added up in.
template <class E>
using SumOf = std::conditional_t<std::is_same_v<E, Pair>, float, E>;

// sum += a b, lane by lane
template <class V>
ATTNKIT_INLINE void add_product(V &sum, V a, V b) {
  sum += a * b;
}

#if defined(__AVX512BF16__)
constexpr bool kAddsPairs = true;

ATTNKIT_INLINE Int32Vector splat(Pair x) { return static_cast<int32_t>(x) - Int32Vector{}; }

ATTNKIT_INLINE void add_product(FloatVector &sum, Int32Vector a, Int32Vector b) {
  sum = _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// n numbers, a multiple of a vector, as pairs: rounded to the nearest, ties to even. What is left of each is rounded to
// the next part, `stride` further on: three parts have all digits. One part may take the place of its numbers.
template <int kParts>
void split_to_pairs(const float *x, int64_t n, Pair *out, int64_t stride) {
  constexpr int W = kLanes<float>;
  const auto widen = [](__m256i half) { return (FloatVector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16); };
  for (int64_t j = 0; j < n; j += 2 * W) {
    FloatVector low = load(x + j), high = j + W < n ? load(x + j + W) : FloatVector{};
    for (int part = 0; part < kParts; ++part) {
      const __m512i pairs = (__m512i)_mm512_cvtne2ps_pbh(high, low);
      std::memcpy(out + part * stride + j / 2, &pairs, sizeof pairs);
      if (part + 1 == kParts) break;
      low -= widen(_mm512_castsi512_si256(pairs));
      high -= widen(_mm512_extracti64x4_epi64(pairs, 1));
    }
  }
}

// Pairs of the numbers of two rows, rounded likewise; a row that is not there is 0.
inline void join_rows(const float *first, const float *second, int64_t n, Pair *out) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (int64_t j = 0; j < n; j += kLanes<float>) {
    const FloatVector low = first == nullptr ? FloatVector{} : load(first + j);
    const FloatVector high = second == nullptr ? FloatVector{} : load(second + j);
    const __m512i pairs = _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    std::memcpy(out + j, &pairs, sizeof pairs);
  }
}
#else
constexpr bool kAddsPairs = false;

template <int kParts>
void split_to_pairs(const float *, int64_t, Pair *, int64_t) {}
inline void join_rows(const float *, const float *, int64_t, Pair *) {}
#endif

}  // namespace attnkit
