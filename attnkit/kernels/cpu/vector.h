// Vectors as wide as the machine's registers, by the vector extensions of GCC and Clang; exp and log of them.
//
// T is float or double throughout. A comparison gives a mask of integers, which `? :` takes lane by lane.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <utility>

#if defined(__AVX512F__) || defined(__AVX2__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns of its own header
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#endif

#define ATTNKIT_INLINE inline __attribute__((always_inline))

namespace attnkit {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif

typedef float FloatVector __attribute__((vector_size(kBytes)));
typedef double DoubleVector __attribute__((vector_size(kBytes)));
typedef int32_t Int32Vector __attribute__((vector_size(kBytes)));
typedef int64_t Int64Vector __attribute__((vector_size(kBytes)));
typedef uint32_t Bits32Vector __attribute__((vector_size(kBytes)));
typedef uint64_t Bits64Vector __attribute__((vector_size(kBytes)));
typedef int8_t ByteVector4 __attribute__((vector_size(kBytes / 4)));
typedef int8_t ByteVector8 __attribute__((vector_size(kBytes / 8)));

template <class T>
struct Lanes;
template <>
struct Lanes<float> {
  using Vector = FloatVector;
  using Mask = Int32Vector;
  using Bits = Bits32Vector;
  using Bytes = ByteVector4;
  using Integer = int32_t;
};
template <>
struct Lanes<double> {
  using Vector = DoubleVector;
  using Mask = Int64Vector;
  using Bits = Bits64Vector;
  using Bytes = ByteVector8;
  using Integer = int64_t;
};

template <class T>
using Vec = typename Lanes<T>::Vector;
template <class T>
using Mask = typename Lanes<T>::Mask;
template <class T>
constexpr int kLanes = kBytes / static_cast<int>(sizeof(T));
template <class T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

template <class T>
ATTNKIT_INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};
}

template <class T>
ATTNKIT_INLINE Vec<T> load(const T *p) {
  Vec<T> x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

template <class T>
ATTNKIT_INLINE void store(T *p, Vec<T> x) {
  std::memcpy(p, &x, sizeof x);
}

// The mask of lanes whose byte is not 0.
template <class T>
ATTNKIT_INLINE Mask<T> load_mask(const uint8_t *p) {
  typename Lanes<T>::Bytes x;
  std::memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, Mask<T>) != 0;
}

// Asks for n numbers from p on.
template <class T>
ATTNKIT_INLINE void prefetch(const T *p, int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t x = 0; x < n; x += kLine) __builtin_prefetch(p + x);
}

// a > b ? a : b and a < b ? a : b: b where one of them is NaN.
#if defined(__AVX512F__)
ATTNKIT_INLINE FloatVector larger(FloatVector a, FloatVector b) { return _mm512_max_ps(a, b); }
ATTNKIT_INLINE FloatVector smaller(FloatVector a, FloatVector b) { return _mm512_min_ps(a, b); }
ATTNKIT_INLINE DoubleVector larger(DoubleVector a, DoubleVector b) { return _mm512_max_pd(a, b); }
ATTNKIT_INLINE DoubleVector smaller(DoubleVector a, DoubleVector b) { return _mm512_min_pd(a, b); }
#elif defined(__AVX2__)
ATTNKIT_INLINE FloatVector larger(FloatVector a, FloatVector b) { return _mm256_max_ps(a, b); }
ATTNKIT_INLINE FloatVector smaller(FloatVector a, FloatVector b) { return _mm256_min_ps(a, b); }
ATTNKIT_INLINE DoubleVector larger(DoubleVector a, DoubleVector b) { return _mm256_max_pd(a, b); }
ATTNKIT_INLINE DoubleVector smaller(DoubleVector a, DoubleVector b) { return _mm256_min_pd(a, b); }
#else
template <class V>
ATTNKIT_INLINE V larger(V a, V b) {
  return a > b ? a : b;
}
template <class V>
ATTNKIT_INLINE V smaller(V a, V b) {
  return a < b ? a : b;
}
#endif

template <class T>
ATTNKIT_INLINE Vec<T> absolute(Vec<T> x) {
  constexpr typename Lanes<T>::Integer sign = std::numeric_limits<typename Lanes<T>::Integer>::max();
  return (Vec<T>)((Mask<T>)x & sign);
}

template <class T>
ATTNKIT_INLINE Vec<T> square_root(Vec<T> x) {
  for (int i = 0; i < kLanes<T>; ++i) x[i] = std::sqrt(x[i]);
  return x;
}

// Lanes kFrom, kFrom + 1, ... of x.
template <int kFrom, class V, int... I>
ATTNKIT_INLINE auto lanes_of(V x, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(x, x, (kFrom + I)...);
}

// Sums and maxima over lanes, in a fixed order: the upper half is joined with the lower one until one lane is left.
template <int kWidth, class V, class Join>
ATTNKIT_INLINE auto fold(V x, const Join &join) {
  if constexpr (kWidth == 2) {
    return join(x[0], x[1]);
  } else {
    constexpr auto half = std::make_integer_sequence<int, kWidth / 2>();
    return fold<kWidth / 2>(join(lanes_of<0>(x, half), lanes_of<kWidth / 2>(x, half)), join);
  }
}

template <class T>
ATTNKIT_INLINE T sum(Vec<T> x) {
  return fold<kLanes<T>>(x, [](auto a, auto b) { return a + b; });
}

// The sums of kLanes vectors, each in its lane: in every block of so many lanes those of a come to stand before those of b.
template <int kBlock, class V, int... I>
ATTNKIT_INLINE V join_sums(V a, V b, std::integer_sequence<int, I...>) {
  constexpr int n = sizeof...(I), half = kBlock / 2;
  return __builtin_shufflevector(a, b, (I % kBlock < half ? I : n + I - half)...) +
         __builtin_shufflevector(a, b, (I % kBlock < half ? I + half : n + I)...);
}

template <class T, int kBlock = kLanes<T>>
ATTNKIT_INLINE Vec<T> sums_of_each(Vec<T> *x) {
  if constexpr (kBlock == 1) {
    return x[0];
  } else {
    constexpr auto lanes = std::make_integer_sequence<int, kLanes<T>>();
    for (int i = 0; i < kBlock / 2; ++i) x[i] = join_sums<kBlock>(x[i], x[i + kBlock / 2], lanes);
    return sums_of_each<T, kBlock / 2>(x);
  }
}

template <class T>
ATTNKIT_INLINE T maximum(Vec<T> x) {
  return fold<kLanes<T>>(x, [](auto a, auto b) { return b > a ? b : a; });
}

// The lanes of a and b in turn: those of their lower halves, or of their upper ones.
template <class V, int... I>
ATTNKIT_INLINE V interleave(V a, V b, std::integer_sequence<int, I...>) {
  constexpr int n = sizeof...(I);
  return __builtin_shufflevector(a, b, (I % 2 * n + I / 2)...);
}
template <class V, int... I>
ATTNKIT_INLINE V interleave_upper(V a, V b, std::integer_sequence<int, I...>) {
  constexpr int n = sizeof...(I);
  return __builtin_shufflevector(a, b, (I % 2 * n + n / 2 + I / 2)...);
}

// kLanes rows of kLanes, transposed: as many perfect shuffles as an index has bits.
template <class T>
ATTNKIT_INLINE void transpose(Vec<T> (&rows)[kLanes<T>]) {
  constexpr int W = kLanes<T>;
  constexpr auto lanes = std::make_integer_sequence<int, W>();
  for (int stage = 1; stage < W; stage *= 2) {
    Vec<T> next[W];
    for (int i = 0; i < W / 2; ++i) {
      next[2 * i] = interleave(rows[i], rows[i + W / 2], lanes);
      next[2 * i + 1] = interleave_upper(rows[i], rows[i + W / 2], lanes);
    }
    for (int i = 0; i < W; ++i) rows[i] = next[i];
  }
}

// c[0] + x (c[1] + x (c[2] + ...))
template <class T, int N>
ATTNKIT_INLINE Vec<T> polynomial(Vec<T> x, const T (&c)[N]) {
  Vec<T> y = splat(c[N - 1]);
  for (int i = N - 2; i >= 0; --i) y = y * x + c[i];
  return y;
}

// Polynomials and constants of exp and log: interpolation at Chebyshev nodes, relative errors 2e-7 and 4e-9 in float,
// 8e-18 and 1e-18 in double.
template <class T>
struct Elementary;

template <>
struct Elementary<float> {
  static constexpr float exp2[] = {1.0f, 0.693147181f, 0.24022349f, 0.0555038101f, 0.00966636852f, 0.00133813025f};
  static constexpr float atanh[] = {2.00000001f, 0.666663216f, 0.400245952f, 0.279651577f, 0.281577784f};
  static constexpr float round = 12582912.0f;  // 1.5 * 2^23: adding it leaves no bits below 1
  static constexpr float lowest = -126.0f, highest = 128.0f;
  static constexpr int mantissa = 23;
};

template <>
struct Elementary<double> {
  static constexpr double exp2[] = {1.0,
                                    0.693147180559945309,
                                    0.240226506959100982,
                                    0.0555041086648215943,
                                    0.00961812910760688853,
                                    0.00133335581464169353,
                                    0.000154035304417360502,
                                    0.0000152527338298361184,
                                    1.32154425879216897e-6,
                                    1.01780624458457735e-7,
                                    7.0725859492692237e-9,
                                    4.45496059818651839e-10};
  static constexpr double atanh[] = {2.0,
                                     0.6666666666666615,
                                     0.40000000000185747,
                                     0.28571428545454115,
                                     0.22222224080747673,
                                     0.18181740832504805,
                                     0.15386614042304008,
                                     0.13300374032674624,
                                     0.12110168728069218,
                                     0.083245065118608206,
                                     0.17044163562781398};
  static constexpr double round = 6755399441055744.0;
  static constexpr double lowest = -1022.0, highest = 1024.0;
  static constexpr int mantissa = 52;
};

// n << mantissa for integers n that are held as floating-point numbers; 0 for NaN.
ATTNKIT_INLINE Bits32Vector exponent_bits(FloatVector n) {
  return (Bits32Vector)__builtin_convertvector(n, Int32Vector) << Elementary<float>::mantissa;
}
ATTNKIT_INLINE Bits64Vector exponent_bits(DoubleVector n) {
  const Bits64Vector bits = (Bits64Vector)(n + Elementary<double>::round) << Elementary<double>::mantissa;
  return n == n ? bits : Bits64Vector{};
}

// 2^t = 2^n 2^f with n = round(t), which is added to the exponent of 2^f.
template <class T>
ATTNKIT_INLINE Vec<T> exp2_in_range(Vec<T> t) {
  const Vec<T> n = (t + Elementary<T>::round) - Elementary<T>::round;
  const Vec<T> y = polynomial<T>(t - n, Elementary<T>::exp2);
  return (Vec<T>)((typename Lanes<T>::Bits)y + exponent_bits(n));
}

// 2^t, and 0 below the smallest normal number: a product with what has fewer digits takes Intel's processors a hundred
// times as long, and where weights fall along a row, every tile has one. NaN stays.
template <class T>
ATTNKIT_INLINE Vec<T> exp2_or_0(Vec<T> t) {
  return t < splat(Elementary<T>::lowest) ? Vec<T>{} : exp2_in_range<T>(t);
}

// exp(x) with a relative error of (2 + |x|/2) eps; 0 below the smallest normal number, infinite beyond the largest. NaN
// stays.
template <class T>
ATTNKIT_INLINE Vec<T> exp(Vec<T> x) {
  return exp2_or_0<T>(smaller(splat(Elementary<T>::highest), x * static_cast<T>(1.4426950408889634)));
}

// exp(x) and exp(x) - 1, with every digit also where x is tiny, for x that does not overflow: 2^n (2^f - 1) + (2^n - 1).
template <class T>
ATTNKIT_INLINE void exp_and_less_1(Vec<T> x, Vec<T> &y, Vec<T> &less_1) {
  const Vec<T> t = larger(splat(Elementary<T>::lowest - 1), x * static_cast<T>(1.4426950408889634));
  const Vec<T> n = (t + Elementary<T>::round) - Elementary<T>::round, f = t - n;
  Vec<T> part = splat(Elementary<T>::exp2[std::size(Elementary<T>::exp2) - 1]);
  for (int i = static_cast<int>(std::size(Elementary<T>::exp2)) - 2; i > 0; --i)
    part = part * f + Elementary<T>::exp2[i];
  part *= f;
  const Vec<T> power = (Vec<T>)((typename Lanes<T>::Bits)splat(T{1}) + exponent_bits(n));
  y = t < splat(Elementary<T>::lowest) ? Vec<T>{} : power * part + power;
  less_1 = power * part + (power - static_cast<T>(1));
}

// exp(x) for x <= 0; for x > 0 the result is arbitrary.
template <class T>
ATTNKIT_INLINE Vec<T> exp_below(Vec<T> x) {
  return exp2_or_0<T>(x * static_cast<T>(1.4426950408889634));
}

// 2 artanh(z) for 0 <= z <= 1/3.
template <class T>
ATTNKIT_INLINE Vec<T> twice_artanh(Vec<T> z) {
  return z * polynomial<T>(z * z, Elementary<T>::atanh);
}

// log(1 + x) for 0 <= x <= 1, with every digit also where x is tiny.
template <class T>
ATTNKIT_INLINE Vec<T> log_1_plus(Vec<T> x) {
  return twice_artanh<T>(x / (x + static_cast<T>(2)));
}

// log(x) for normal x > 0: x = 2^n m with m in [1/2^½, 2^½).
template <class T>
ATTNKIT_INLINE Vec<T> log(Vec<T> x) {
  using E = Elementary<T>;
  using Integer = typename Lanes<T>::Integer;
  constexpr T root = static_cast<T>(0.70710678118654752440);
  Integer root_bits;
  std::memcpy(&root_bits, &root, sizeof root);
  const Mask<T> bits = (Mask<T>)x;
  const Mask<T> n = (bits - root_bits) >> E::mantissa;
  const Vec<T> m = (Vec<T>)(bits - (n << E::mantissa));
  const Vec<T> exponent = __builtin_convertvector(n, Vec<T>);
  return exponent * static_cast<T>(0.69314718055994530942) + twice_artanh<T>((m - 1) / (m + 1));
}

// x moved by kBy lanes, to lower lanes if kBy > 0 and to higher ones else; 0 moves in.
template <int kBy, class V, int... I>
ATTNKIT_INLINE V moved(V x, std::integer_sequence<int, I...>) {
  constexpr int n = sizeof...(I);
  return __builtin_shufflevector(x, V{}, (I + kBy >= 0 && I + kBy < n ? I + kBy : n)...);
}

// Sums of each lane and all higher ones (kUp = 1) or all lower ones (kUp = -1).
template <class T, int kUp, int kStep = 1>
ATTNKIT_INLINE Vec<T> running_sums(Vec<T> x) {
  if constexpr (kStep >= kLanes<T>) {
    return x;
  } else {
    constexpr auto lanes = std::make_integer_sequence<int, kLanes<T>>();
    return running_sums<T, kUp, 2 * kStep>(x + moved<kUp * kStep>(x, lanes));
  }
}

}  // namespace attnkit
