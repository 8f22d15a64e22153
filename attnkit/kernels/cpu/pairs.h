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

// Rounds n numbers, a multiple of a vector, to pairs in their place: to the nearest, ties to even.
inline void round_to_pairs(float *x, int64_t n) {
  constexpr int W = kLanes<float>;
  for (int64_t j = 0; j < n; j += 2 * W) {
    const __m512bh pairs = _mm512_cvtne2ps_pbh(j + W < n ? load(x + j + W) : FloatVector{}, load(x + j));
    std::memcpy(x + j / 2, &pairs, sizeof pairs);
  }
}
#else
constexpr bool kAddsPairs = false;

inline void round_to_pairs(float *, int64_t) {}
#endif

}  // namespace attnkit
