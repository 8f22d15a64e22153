// Stick-breaking as a family: what is left of the stick beyond a tile multiplies all earlier keys, so that tiles from the
// first key to the last rescale the sums of a row as a new maximum of softmax does.
#pragma once

#include "families.h"

namespace attnkit {

// w_j = β_j Π_{k > j} (1 - β_k) = exp(s_j - Σ_{k >= j} softplus(s_k)); the remainder Π (1 - β_k) is where softmax has lse
template <class T>
struct StickBreaking {
  static constexpr bool kHidesScores = true, kHasLogSumExp = true, kDistances = false, kNormalises = false;
  static constexpr bool kBreaksStick = true;
  static constexpr T kHidden = -kInfinity<T>;
  struct Row {
    double taken;  // forward: Σ softplus of the keys so far
    T later;       // backward: of the keys behind the tile
    T before;      // backward: Σ w dw of the keys so far, and remainder times its cotangent
  };

  static Row begin(const Item<T> &, int64_t, const Range &) { return {0, 0, 0}; }
  static T weigh(Row &row, T *s, int64_t, int64_t width) {
    const Vec<T> taken = from_the_last(s, width, Vec<T>{}, [&](int64_t j, const Logistic<T> &, Vec<T> log_w) {
      store<T>(s + j, exp_below<T>(log_w));
    });
    row.taken += taken[0];
    return std::exp(-taken[0]);
  }
  static T factor(const Row &) { return 1; }
  static T log_sum_exp(const Row &row) { return static_cast<T>(std::exp(-row.taken)); }
  static void save(const Row &, T *) {}

  static Row restore(const Item<T> &, int64_t, const Range &, const T *) { return {0, 0, 0}; }
  // Σ softplus of a tile.
  static T take(const T *s, int64_t width) {
    Vec<T> total{};
    for (int64_t j = 0; j < width; j += kLanes<T>) total += Softplus<T>::value(load(s + j));
    return sum<T>(total);
  }
  // ds_k = (1 - β_k) w_k dw_k - β_k (r dr + Σ_{j < k} w_j dw_j)
  static void pull(Row &row, T, T *s, T *dw, int64_t, int64_t width) {
    constexpr auto lanes = std::make_integer_sequence<int, kLanes<T>>();
    T taken[kWidest], left[kWidest];  // β and 1 - β
    from_the_last(s, width, splat(row.later), [&](int64_t j, const Logistic<T> &beta, Vec<T> log_w) {
      const Vec<T> w = exp_below<T>(log_w);
      store<T>(s + j, w);
      store<T>(dw + j, w * load(dw + j));
      store<T>(taken + j, beta.value());
      store<T>(left + j, beta.complement());
    });
    Vec<T> before = splat(row.before);
    for (int64_t j = 0; j < width; j += kLanes<T>) {
      const Vec<T> g = load(dw + j), sums = running_sums<T, -1>(g);
      store<T>(dw + j, load(left + j) * g - load(taken + j) * (before + moved<-1>(sums, lanes)));
      before += sums[kLanes<T> - 1];
    }
    row.before = before[0];
  }

 private:
  static constexpr int kWidest = 1024 / sizeof(T);  // keys of a tile

  // Calls f(j, logistic, log w) for the vectors of a tile from the last to the first, with `later` behind them; returns
  // Σ softplus of all.
  template <class F>
  static ATTNKIT_INLINE Vec<T> from_the_last(const T *s, int64_t width, Vec<T> later, const F &f) {
    for (int64_t j = width - kLanes<T>; j >= 0; j -= kLanes<T>) {
      const Vec<T> x = load(s + j);
      const Logistic<T> beta(x);
      const Vec<T> sums = running_sums<T, 1>(Relu<T>::value(x) + log_1_plus<T>(beta.e));
      f(j, beta, x - (sums + later));
      later += sums[0];
    }
    return later;
  }
};

}  // namespace attnkit
