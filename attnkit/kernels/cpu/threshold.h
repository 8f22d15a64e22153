// The threshold of a row of entmax: with x = (α-1)(s - max s), weights are [x - τ]₊^p, p = 1/(α-1), and sum to 1 (B).
//
// F(τ) = ‖[x - τ]₊‖_p - 1 is convex and falls, so Newton's steps from τ = -1, where F >= 0, never pass its root; near a
// row's maximum F is almost straight, for any p. A last step δ is not added to τ, which has too few digits where
// thousands of small weights hang on it: t = (x - τ) - δ.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "memory.h"
#include "vector.h"

namespace attnkit {

// Powers of t > 0; `kPower` is p, or 0 for that of the row. α = 1, in an array of them, is softmax: exp(x) without τ.
template <class T, int kPower>
struct Exponent {
  T above, power;  // α - 1 and p
  bool softmax;

  explicit Exponent(T alpha) : above(alpha == 1 ? T{1} : alpha - 1), power(1 / above), softmax(alpha == 1) {}

  // t^(p-1) and t^p, 0 where t <= 0
  ATTNKIT_INLINE void raise(Vec<T> t, Vec<T> &lower, Vec<T> &full) const {
    const Mask<T> inside = t > Vec<T>{};
    if constexpr (kPower == 1) {
      lower = inside ? splat(T{1}) : Vec<T>{};
      full = inside ? t : Vec<T>{};
    } else if constexpr (kPower == 2) {
      lower = inside ? t : Vec<T>{};
      full = lower * lower;
    } else if (softmax) {
      lower = full = exp_below<T>(t);
    } else {
      const Vec<T> logarithm = log<T>(larger(splat(std::numeric_limits<T>::min()), t));
      lower = inside ? exp_below<T>(logarithm * (power - 1)) : Vec<T>{};
      full = lower * t;
      full = inside ? full : Vec<T>{};
    }
  }

  // Newton's step (n - 1) n^(p-1)/Σ t^(p-1) with n = ‖t‖_p
  T step(T low, T full) const {
    if (kPower == 1) return (full - 1) / low;
    const T norm = kPower == 2 ? std::sqrt(full) : std::pow(full, above);
    return kPower == 2 ? (full - norm) / low : (norm - 1) * (full / norm) / low;
  }
  // Scores up to this have weight 0 for every τ where `top` is the maximum: they are further below it than the gap, and
  // than its rounding, for from 2^24 on `top` - 1 is `top` in float32.
  T least(T top) const {
    const T gap = softmax ? T{1000} : kPower == 1 ? T{1} : kPower == 2 ? T{2} : power;
    return (top - gap) - 2 * std::numeric_limits<T>::epsilon() * std::abs(top);
  }
};

template <class T>
struct Threshold {
  T top, tau, delta, inverse;  // 1/Σ t^p, which is 1 up to rounding

  ATTNKIT_INLINE Vec<T> above(Vec<T> x) const { return (x - tau) - delta; }

  // What is above the threshold by no more than its rounding error is on it: with scores of a few digits a key may be
  // there exactly.
  T least() const { return 4 * std::numeric_limits<T>::epsilon() * std::abs(tau + delta); }
};

// Σ t^(p-1) and Σ t^p of x[0 .. width)
template <class T, int kPower>
ATTNKIT_INLINE void power_sums(const Exponent<T, kPower> &e, const T *x, int64_t width, const Threshold<T> &at, T &low,
                               T &full) {
  Vec<T> lows[2] = {}, fulls[2] = {};
  int64_t j = 0;
  for (; j + 2 * kLanes<T> <= width; j += 2 * kLanes<T>) {
    for (int n = 0; n < 2; ++n) {
      Vec<T> a, b;
      e.raise(at.above(load(x + j + n * kLanes<T>)), a, b);
      lows[n] += a;
      fulls[n] += b;
    }
  }
  if (j < width) {
    Vec<T> a, b;
    e.raise(at.above(load(x + j)), a, b);
    lows[0] += a;
    fulls[0] += b;
  }
  low = sum<T>(lows[0] + lows[1]);
  full = sum<T>(fulls[0] + fulls[1]);
}

// τ, δ and 1/Σ for x[0 .. width), padded with numbers below -1. The maximum of x is 0.
template <class T, int kPower>
void find_threshold(const Exponent<T, kPower> &e, const T *x, int64_t width, Threshold<T> &at) {
  constexpr int kSteps = 64;
  constexpr T kClose = 8 * std::numeric_limits<T>::epsilon();
  at.delta = 0;
  at.tau = e.softmax ? T{} : T{-1};
  T low, full;
  for (int step = 0; step < kSteps && !e.softmax; ++step) {
    power_sums(e, x, width, at, low, full);
    const T by = e.step(low, full), next = at.tau + by;
    if (!(by > kClose) || !(next > at.tau)) {
      at.delta = by;
      break;
    }
    at.tau = next;
  }
  power_sums(e, x, width, at, low, full);
  at.inverse = 1 / full;
}

// The entries of a row that may have a weight, in the order of their keys.
template <class T>
struct Candidates {
  Buffer<T> values;
  Buffer<int32_t> keys;
  int64_t count = 0;

  // Those of row[0 .. width) above `least`; `width` is a multiple of a vector.
  void collect(const T *row, int64_t width, T least) {
    T *value = values.reserve(width + kLanes<T>);
    int32_t *key = keys.reserve(width + kLanes<T>);
    count = 0;
    for (int64_t j = 0; j < width; j += kLanes<T>) {
#if defined(__AVX512F__)
      if constexpr (sizeof(T) == 4) {
        const __m512 x = load(row + j);
        const __mmask16 in = _mm512_cmp_ps_mask(x, _mm512_set1_ps(least), _CMP_GT_OQ);
        if (in == 0) continue;
        const __m512i ids = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(j)),
                                             _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
        store<T>(value + count, _mm512_maskz_compress_ps(in, x));
        _mm512_storeu_si512(key + count, _mm512_maskz_compress_epi32(in, ids));
        count += __builtin_popcount(in);
        continue;
      }
#endif
      for (int lane = 0; lane < kLanes<T>; ++lane) {
        value[count] = row[j + lane];
        key[count] = static_cast<int32_t>(j + lane);
        count += row[j + lane] > least;
      }
    }
  }

  // Fills up to a multiple of a vector.
  int64_t pad(T filler) {
    const int64_t width = (count + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
    std::fill(values.data() + count, values.data() + width, filler);
    return width;
  }
};

}  // namespace attnkit
