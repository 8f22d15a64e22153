// What makes a variant: scores to unnormalised weights u and a factor of the row, and the gradient back to the scores.
//
// `weigh` turns a row of a tile into u in place and returns by what earlier sums of the row must be multiplied. `pull`
// turns scores and dw = do vᵀ ⊙ dropout into u and ds; there do was multiplied by the factor of the row beforehand.
// Widths are multiples of a vector.
#pragma once

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
  static constexpr bool kHidesScores = false;  // invisible scores are -inf for `weigh`
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
  static T weigh(Row &row, T *s, int64_t width) {
    row.h->value(row.shift, s, width);
    return 1;
  }
  static T factor(const Row &row) { return row.factor; }
  static void save(const Row &, T *) {}

  // Backward: the row from its saved numbers; `inner` is Σ w dw - dlse, which only a normaliser needs.
  static Row restore(const Item<T> &item, int64_t i, const Range &r, const T *) { return begin(item, i, r); }
  static void pull(const Row &row, T, T *s, T *dw, int64_t width) { row.h->pull(row.shift, s, dw, width); }
};

// w = exp(s - m)/Σ exp(s - m), m the maximum so far
template <class T>
struct Softmax {
  static constexpr bool kHidesScores = true, kDistances = false, kNormalises = true;
  struct Row {
    T top, total;
  };

  static Row begin(const Item<T> &, int64_t, const Range &) { return {-kInfinity<T>, 0}; }
  static T weigh(Row &row, T *s, int64_t width) {
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
  static T factor(const Row &row) { return row.total == 0 ? T{} : 1 / row.total; }
  static T log_sum_exp(const Row &row) { return row.total == 0 ? -kInfinity<T> : row.top + std::log(row.total); }
  static void save(const Row &row, T *numbers) {
    numbers[kFirst] = row.top == -kInfinity<T> ? T{} : row.top;
    numbers[kSecond] = factor(row);
  }

  static Row restore(const Item<T> &, int64_t, const Range &, const T *numbers) {
    return {numbers[kFirst], numbers[kSecond]};
  }
  // Σ w dw of what statistics add to dw: with Z = 1 entropy adds nothing, and the maximum is exp(0)/Σ.
  static T inner(const StatisticCotangents<T> &d, int64_t i, const T *numbers) {
    if (numbers[kLargest] < 0) return 0;
    return (d.total ? d.total.template read<T>(i) : T{}) +
           (d.squares ? 2 * numbers[kThird] * d.squares.template read<T>(i) : T{}) +
           (d.maximum ? numbers[kSecond] * d.maximum.template read<T>(i) : T{});
  }
  static void pull(const Row &row, T inner, T *s, T *dw, int64_t width) {
    const Vec<T> top = splat(row.top), factor = splat(row.total), mean = splat(inner);
    for (int64_t j = 0; j < width; j += kLanes<T>) {
      const Vec<T> w = exp_below<T>(load(s + j) - top) * factor;
      store<T>(s + j, w);
      store<T>(dw + j, w * (load(dw + j) - mean));
    }
  }
};

// w = exp(-(scale/2)‖q - k‖² + bias), without a normaliser
template <class T>
struct Gaussian {
  static constexpr bool kHidesScores = false, kDistances = true, kNormalises = false;
  struct Row {};

  static Row begin(const Item<T> &, int64_t, const Range &) { return {}; }
  static T weigh(Row &, T *s, int64_t width) {
    for (int64_t j = 0; j < width; j += kLanes<T>) store<T>(s + j, exp<T>(load(s + j)));
    return 1;
  }
  static T factor(const Row &) { return 1; }
  static void save(const Row &, T *) {}

  static Row restore(const Item<T> &, int64_t, const Range &, const T *) { return {}; }
  static void pull(const Row &, T, T *s, T *dw, int64_t width) {
    for (int64_t j = 0; j < width; j += kLanes<T>) {
      const Vec<T> w = exp<T>(load(s + j));
      store<T>(s + j, w);
      store<T>(dw + j, w * load(dw + j));
    }
  }
};

}  // namespace attnkit
