// Statistics of the weights of a row (C), gathered tile by tile and differentiated.
#pragma once

#include "call.h"

namespace attnkit {

// Numbers of a row in ATTNKIT_ROWS: two of the family's own, what the gradients of statistics need, and what a sink has.
// kThird is Σw² where the family does not use it, kLargest the key of the first maximum or -1 of dead rows
enum RowNumber { kFirst, kSecond, kThird, kTotal, kEntropy, kLargest, kShare };

// Sums over unnormalised weights u of a row; the weights are w = factor * u.
template <class T>
struct RowSums {
  T total = 0, squares = 0, logs = 0;  // Σu, Σu², Σ u log u
  T largest = -kInfinity<T>;           // the maximum of sign * u over visible keys, and where it is reached first
  int64_t key = -1, nonzero = 0;

  // Weights of the keys k0 .. k0 + width, 0 where hidden; `shown` are the same with -inf there, times the sign.
  void add(const T *u, const T *shown, int64_t k0, int64_t width, bool entropy) {
    Vec<T> sums{}, squared{}, logged{}, top = splat(-kInfinity<T>);
    Mask<T> zeros{};
    for (int64_t j = 0; j < width; j += kLanes<T>) {
      const Vec<T> x = load(u + j);
      sums += x;
      squared += x * x;
      zeros += x == Vec<T>{};
      top = larger(load(shown + j), top);
    }
    if (entropy) {
      constexpr T smallest = std::numeric_limits<T>::min();
      for (int64_t j = 0; j < width; j += kLanes<T>) {
        const Vec<T> x = load(u + j);
        logged += x * log<T>(x < smallest ? splat(T{1}) : x);
      }
    }
    total += sum<T>(sums);
    squares += sum<T>(squared);
    logs += sum<T>(logged);
    nonzero += width;
    for (int lane = 0; lane < kLanes<T>; ++lane) nonzero += zeros[lane];
    const T best = maximum<T>(top);
    if (best > largest) {
      largest = best;
      key = k0 + (std::find(shown, shown + width, best) - shown);
    }
  }

  // All weights so far times f.
  void rescale(T f) {
    if (f == 0) {
      *this = RowSums();
      return;
    }
    logs = f * (logs + std::log(f) * total);
    total *= f;
    squares *= f * f;
    largest *= f;
  }
};

// Statistics of an item's rows, as arrays.
template <class T>
struct StatisticArrays {
  Matrix total, entropy, squares, maximum, nonzero, visible;
  bool exact_zeros;

  StatisticArrays(const Call &call, const Index &at)
      : total(call, ATTNKIT_TOTAL, at),
        entropy(call, ATTNKIT_ENTROPY, at),
        squares(call, ATTNKIT_SUM_SQUARES, at),
        maximum(call, ATTNKIT_MAXIMUM, at),
        nonzero(call, ATTNKIT_NONZERO, at),
        visible(call, ATTNKIT_VISIBLE, at),
        exact_zeros(call.plan.exact_zeros != 0) {}

  // H = log Σu - Σ u log u/Σu. A dead row has 0 in all but `visible`.
  void write(int64_t i, const RowSums<T> &u, T factor, int64_t n, T *row) const {
    const bool alive = u.nonzero > 0;
    const T z = alive ? u.total : T{1};
    const T h = alive ? std::log(z) - u.logs / z : T{};
    if (total) total.write<T>(i, alive ? factor * u.total : T{});
    if (entropy) entropy.write<T>(i, h);
    if (squares) squares.write<T>(i, alive ? factor * factor * u.squares : T{});
    if (maximum) maximum.write<T>(i, alive ? std::abs(factor) * u.largest : T{});
    if (nonzero) nonzero.write<T>(i, !alive ? T{} : static_cast<T>(exact_zeros ? u.nonzero : n));
    if (visible) visible.write<T>(i, static_cast<T>(n));
    row[kThird] = factor * factor * u.squares;
    row[kTotal] = alive ? factor * u.total : T{1};
    row[kEntropy] = h;
    row[kLargest] = alive ? static_cast<T>(u.key) : T{-1};
  }
};

// Cotangents of an item's statistics, and what they add to the gradient of its weights.
template <class T>
struct StatisticCotangents {
  Matrix total, entropy, squares, maximum;

  StatisticCotangents(const Call &call, const Index &at)
      : total(call, ATTNKIT_DTOTAL, at),
        entropy(call, ATTNKIT_DENTROPY, at),
        squares(call, ATTNKIT_DSUM_SQUARES, at),
        maximum(call, ATTNKIT_DMAXIMUM, at) {}

  // dw_j += times (dZ - dH (log p_j + H)/Z + 2 w_j dΣw² + dmax at the first maximum) with w = factor u, p = w/Z.
  void add(int64_t i, const T *row, T factor, const T *u, int64_t k0, int64_t width, T times, T *dw) const {
    if (row[kLargest] < 0) return;
    const T z = row[kTotal], of_total = total ? total.read<T>(i) : T{}, of_squares = squares ? squares.read<T>(i) : T{};
    for (int64_t j = 0; j < width; j += kLanes<T>)
      store<T>(dw + j, load(dw + j) + times * (of_total + (2 * of_squares * factor) * load(u + j)));
    // In fainter rows weights lose their digits, and what H adds is beyond the largest number.
    if (entropy && z >= 128 * std::numeric_limits<T>::min()) {
      const T slope = -times * entropy.read<T>(i) / z, h = row[kEntropy];
      for (int64_t j = 0; j < width; j += kLanes<T>) {
        const Vec<T> p = load(u + j) * (factor / z);
        const Vec<T> log_p = log<T>(larger(splat(std::numeric_limits<T>::min()), p));
        store<T>(dw + j, load(dw + j) + (p > Vec<T>{} ? (log_p + h) * slope : Vec<T>{}));
      }
    }
    const int64_t first = static_cast<int64_t>(row[kLargest]) - k0;
    if (maximum && first >= 0 && first < width) dw[first] += times * maximum.read<T>(i);
  }
};

inline bool wants_statistics(const Call &call) {
  for (int array = ATTNKIT_TOTAL; array <= ATTNKIT_VISIBLE; ++array)
    if (call.has(array)) return true;
  return false;
}

inline bool has_statistics_cotangents(const Call &call) {
  for (int array = ATTNKIT_DTOTAL; array <= ATTNKIT_DMAXIMUM; ++array)
    if (call.has(array)) return true;
  return false;
}

}  // namespace attnkit
