// What makes a variant: scores to unnormalised weights u and a factor of the row, and the gradient back to the scores.
//
// `weigh` turns a row of a tile, whose first key is k0, into u in place and returns by what earlier sums of the row must
// be multiplied. `pull` turns scores and dw = do vᵀ ⊙ dropout into u and ds; there do was multiplied by the factor of
// the row beforehand. Widths are multiples of a vector. A family that breaks a stick sums scores up from key to key: its
// backward sweep first finds `take` of every tile, and `pull` sees tiles in order.
#pragma once

#include <algorithm>

#include "activations.h"
#include "call.h"
#include "statistics.h"

namespace attnkit {

// A score function and its gradient on rows: s -> h(s + shift), dw -> h'(s + shift) dw.
template <class T>
struct ScoreFunction {
  void (*value)(T shift, T *s, int64_t width);
  void (*pull)(T shift, T *s, T *dw, int64_t width);
};

template <class T, class H>
constexpr ScoreFunction<T> score_function() {
  return {[](T shift, T *s, int64_t width) {
            for (int64_t j = 0; j < width; j += kLanes<T>) store<T>(s + j, H::value(load(s + j) + shift));
          },
          [](T shift, T *s, T *dw, int64_t width) {
            for (int64_t j = 0; j < width; j += kLanes<T>) {
              const Vec<T> x = load(s + j) + shift, g = load(dw + j);
              store<T>(s + j, H::value(x));
              store<T>(dw + j, H::slope(x) * g);
            }
          }};
}

template <class T>
struct ScoreFunctions {  // by the numbers of attnkit_activation
  ScoreFunction<T> of[ATTNKIT_ACTIVATIONS] = {};

  constexpr ScoreFunctions() {
    of[ATTNKIT_RELU] = score_function<T, Relu<T>>();
    of[ATTNKIT_RELU_SQUARED] = score_function<T, ReluSquared<T>>();
    of[ATTNKIT_GELU] = score_function<T, Gelu<T>>();
    of[ATTNKIT_GELU_TANH] = score_function<T, GeluTanh<T>>();
    of[ATTNKIT_SOFTPLUS] = score_function<T, Softplus<T>>();
    of[ATTNKIT_IDENTITY] = score_function<T, Identity<T>>();
    of[ATTNKIT_RELU6] = score_function<T, Relu6<T>>();
    of[ATTNKIT_SIGMOID] = score_function<T, Sigmoid<T>>();
    of[ATTNKIT_SILU] = score_function<T, Silu<T>>();
  }
};

template <class T>
constexpr ScoreFunctions<T> kScoreFunctions;

// w = gain n^-alpha h(s + shift)
template <class T>
struct Pointwise {
  static constexpr bool kBreaksStick = false;
  static constexpr bool kHidesScores = false;  // invisible scores are kHidden for `weigh`, else their weights 0 after it
  static constexpr bool kHasLogSumExp = false;
  static constexpr T kHidden = 0;
  static constexpr bool kDistances = false;    // scores are -(scale/2)‖q - k‖²
  static constexpr bool kNormalises = false;   // ds needs Σ w dw of the row
  struct Row {
    T shift, factor;
    const ScoreFunction<T> *h;
  };

  static Row begin(const Item<T> &item, int64_t i, const Range &r) {
    const attnkit_plan &plan = item.plan;
    const T n = plan.alpha != 0 || plan.log_length ? item.length(i, r.visible) : T{1};
    const T power = plan.alpha == 0 ? T{1} : plan.alpha == 1 ? 1 / n : std::pow(n, static_cast<T>(-plan.alpha));
    const T shift = static_cast<T>(plan.shift);
    return {plan.log_length ? shift - std::log(n) : shift, static_cast<T>(plan.gain) * power,
            &kScoreFunctions<T>.of[plan.activation]};
  }
  static T weigh(Row &row, T *s, int64_t, int64_t width) {
    row.h->value(row.shift, s, width);
    return 1;
  }
  static T factor(const Row &row) { return row.factor; }
  static void save(const Row &, T *) {}

  // Backward: the row from its saved numbers; `inner` is Σ w dw - dlse, which only a normaliser needs.
  static Row restore(const Item<T> &item, int64_t i, const Range &r, const T *) { return begin(item, i, r); }
  static void pull(const Row &row, T, T *s, T *dw, int64_t, int64_t width) { row.h->pull(row.shift, s, dw, width); }
};

// w = exp(s - m)/(Σ exp(s - m) + exp(c - m)), m the maximum so far of the scores; the sink c joins at the end of a row
template <class T>
struct Softmax {
  static constexpr bool kBreaksStick = false;
  static constexpr bool kHidesScores = true, kHasLogSumExp = true, kDistances = false, kNormalises = true;
  static constexpr T kHidden = -kInfinity<T>;
  struct Row {
    T top, total, sink;
  };

  static Row begin(const Item<T> &item, int64_t, const Range &) { return {-kInfinity<T>, 0, item.sink}; }
  static T weigh(Row &row, T *s, int64_t, int64_t width) {
    Vec<T> tops = splat(row.top);
    for (int64_t j = 0; j < width; j += kLanes<T>) tops = larger(tops, load(s + j));
    T top = maximum<T>(tops);
    const T finite = top == -kInfinity<T> ? T{} : top;
    const Vec<T> shift = splat(finite);
    Vec<T> sums{};
    for (int64_t j = 0; j < width; j += kLanes<T>) {
      const Vec<T> u = exp_below<T>(load(s + j) - shift);
      sums += u;
      store<T>(s + j, u);
    }
    const T factor = top == row.top || row.top == -kInfinity<T> ? T{1} : std::exp(row.top - finite);
    row.total = row.total * factor + sum<T>(sums);
    row.top = top;
    return factor;
  }
  // Rows without a finite score have no sink. exp(c - m) may be infinite: weights are then below the smallest number.
  static T of_sink(const Row &row) { return row.sink == -kInfinity<T> ? T{} : std::exp(row.sink - row.top); }
  static T factor(const Row &row) { return row.total == 0 ? T{} : 1 / (row.total + of_sink(row)); }
  static T log_sum_exp(const Row &row) {
    if (row.total == 0) return -kInfinity<T>;
    if (row.sink > row.top) return row.sink + std::log1p(row.total * std::exp(row.top - row.sink));
    return row.top + std::log(row.total + of_sink(row));
  }
  // exp(c - lse)
  static T share(const Row &row) {
    if (row.total == 0 || row.sink == -kInfinity<T>) return 0;
    return row.sink > row.top ? 1 / (1 + row.total * std::exp(row.top - row.sink)) : of_sink(row) * factor(row);
  }
  static void save(const Row &row, T *numbers) {
    numbers[kFirst] = row.top == -kInfinity<T> ? T{} : row.top;
    numbers[kSecond] = factor(row);
    numbers[kShare] = share(row);
  }

  static Row restore(const Item<T> &, int64_t, const Range &, const T *numbers) {
    return {numbers[kFirst], numbers[kSecond], 0};
  }
  // Σ w dw of what statistics add to dw: entropy adds nothing, and the maximum is exp(0)/Σ.
  static T inner(const StatisticCotangents<T> &d, int64_t i, const T *numbers) {
    if (numbers[kLargest] < 0) return 0;
    return (d.total ? numbers[kTotal] * d.total.template read<T>(i) : T{}) +
           (d.squares ? 2 * numbers[kThird] * d.squares.template read<T>(i) : T{}) +
           (d.maximum ? numbers[kSecond] * d.maximum.template read<T>(i) : T{});
  }
  static void pull(const Row &row, T inner, T *s, T *dw, int64_t, int64_t width) {
    const Vec<T> top = splat(row.top), factor = splat(row.total), mean = splat(inner);
    for (int64_t j = 0; j < width; j += kLanes<T>) {
      const Vec<T> w = exp_below<T>(load(s + j) - top) * factor;
      store<T>(s + j, w);
      store<T>(dw + j, w * (load(dw + j) - mean));
    }
  }
};

// exp(s - m) and its excess exp(s - m) - exp(-m), which near s = 0 is exp(-m) (exp(s) - 1) and no difference: both from
// one 2^f, unless exp(s) could overflow, where m leaves no more of the excess than of rounding errors of 1.
template <class T>
struct Excess {
  T top;
  Vec<T> base;  // exp(-m) as lanes compute it: a score of 0, as hidden keys have, leaves exactly 0
  bool from_zero;

  explicit Excess(T m) : top(m), base(exp_below<T>(splat(-m))), from_zero(m <= (sizeof(T) == 8 ? 600 : 64)) {}

  ATTNKIT_INLINE void operator()(Vec<T> s, Vec<T> &p, Vec<T> &excess) const {
    if (from_zero) {
      exp_and_less_1<T>(smaller(splat(top), s), p, excess);
      p *= base;
      excess *= base;
    } else {
      p = exp_below<T>(s - top);
      excess = p - base;
    }
  }
};

// w = relu(a)/(Σ |a| + eps), a = exp(s - m) - exp(-m), m the maximum so far of 0 and the scores
template <class T>
struct Softpick {
  static constexpr bool kBreaksStick = false;
  static constexpr bool kHidesScores = true, kHasLogSumExp = false, kDistances = false, kNormalises = true;
  static constexpr T kHidden = 0;
  struct Row {
    T top, total, eps;
    int64_t first;  // the key of the first maximum above 0, or -1
  };

  static Row begin(const Item<T> &item, int64_t, const Range &) { return {0, 0, static_cast<T>(item.plan.eps), -1}; }
  static T weigh(Row &row, T *s, int64_t k0, int64_t width) {
    Vec<T> tops = splat(row.top);
    for (int64_t j = 0; j < width; j += kLanes<T>) tops = larger(tops, load(s + j));
    const T top = maximum<T>(tops);
    if (top > row.top) row.first = k0 + (std::find(s, s + width, top) - s);
    const Excess<T> excess(top);
    Vec<T> sums{};
    for (int64_t j = 0; j < width; j += kLanes<T>) {
      Vec<T> p, a;
      excess(load(s + j), p, a);
      sums += absolute<T>(a);
      store<T>(s + j, larger(a, Vec<T>{}));
    }
    const T factor = top == row.top ? T{1} : std::exp(row.top - top);
    row.total = row.total * factor + sum<T>(sums);
    row.top = top;
    return factor;
  }
  static T factor(const Row &row) { return 1 / (row.total + row.eps); }
  static void save(const Row &row, T *numbers) {
    numbers[kFirst] = row.top;
    numbers[kSecond] = factor(row);
    numbers[kLargest] = static_cast<T>(row.first);
  }

  static Row restore(const Item<T> &item, int64_t, const Range &, const T *numbers) {
    return {numbers[kFirst], numbers[kSecond], static_cast<T>(item.plan.eps), static_cast<int64_t>(numbers[kLargest])};
  }
  // Σ w dw of what statistics add to dw: entropy adds nothing.
  static T inner(const StatisticCotangents<T> &d, int64_t i, const T *numbers) {
    if (numbers[kLargest] < 0) return 0;
    return (d.total ? numbers[kTotal] * d.total.template read<T>(i) : T{}) +
           (d.squares ? 2 * numbers[kThird] * d.squares.template read<T>(i) : T{}) +
           (d.maximum ? -std::expm1(-numbers[kFirst]) * numbers[kSecond] * d.maximum.template read<T>(i) : T{});
  }
  static void pull(const Row &row, T inner, T *s, T *dw, int64_t k0, int64_t width) {
    const Excess<T> excess(row.top);
    const Vec<T> factor = splat(row.total), mean = splat(inner * row.total), none{};
    for (int64_t j = 0; j < width; j += kLanes<T>) {
      const Vec<T> x = load(s + j);
      Vec<T> p, a;
      excess(x, p, a);
      const Vec<T> ds = p * (x > none ? load(dw + j) * factor - mean : x < none ? mean : none);
      store<T>(s + j, larger(a, none) * factor);
      store<T>(dw + j, ds);
    }
    if (k0 <= row.first && row.first < k0 + width) dw[row.first - k0] -= row.eps * inner * row.total;
  }
};

// w = exp(-(scale/2)‖q - k‖² + bias), without a normaliser
template <class T>
struct Gaussian {
  static constexpr bool kBreaksStick = false;
  static constexpr bool kHidesScores = false, kHasLogSumExp = false, kDistances = true, kNormalises = false;
  static constexpr T kHidden = 0;
  struct Row {};

  static Row begin(const Item<T> &, int64_t, const Range &) { return {}; }
  static T weigh(Row &, T *s, int64_t, int64_t width) {
    for (int64_t j = 0; j < width; j += kLanes<T>) store<T>(s + j, exp<T>(load(s + j)));
    return 1;
  }
  static T factor(const Row &) { return 1; }
  static void save(const Row &, T *) {}

  static Row restore(const Item<T> &, int64_t, const Range &, const T *) { return {}; }
  static void pull(const Row &, T, T *s, T *dw, int64_t, int64_t width) {
    for (int64_t j = 0; j < width; j += kLanes<T>) {
      const Vec<T> w = exp<T>(load(s + j));
      store<T>(s + j, w);
      store<T>(dw + j, w * load(dw + j));
    }
  }
};

}  // namespace attnkit
