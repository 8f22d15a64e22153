// Feature maps of linear attention: φ of the tokens of a segment, and gradients back to the tokens.
//
// Tokens are rows of `wide` numbers, features rows of `width`, both of whole vectors with zeros at their end.
#pragma once

#include "call.h"
#include "memory.h"
#include "tile.h"

namespace attnkit {

// φ(x) = x + 1 above 0, exp(x) below (Katharopoulos et al. 2020 eq 7). Its slope is the smaller of φ and 1.
template <class T>
struct EluPlusOne {
  static Vec<T> value(Vec<T> x) { return x > 0 ? x + 1 : exp_below<T>(smaller(Vec<T>{}, x)); }
  static Vec<T> pull(Vec<T> phi, Vec<T> d) { return d * smaller(splat(T{1}), phi); }
};

template <class T>
struct ReluFeatures {
  static Vec<T> value(Vec<T> x) { return x <= 0 ? Vec<T>{} : x; }
  static Vec<T> pull(Vec<T> phi, Vec<T> d) { return phi <= 0 ? Vec<T>{} : d; }
};

template <class T>
struct IdentityFeatures {
  static Vec<T> value(Vec<T> x) { return x; }
  static Vec<T> pull(Vec<T>, Vec<T> d) { return d; }
};

// Σ a b and the largest of rows of whole vectors.
template <class T>
ATTNKIT_INLINE T dot(const T *a, const T *b, int64_t width) {
  Vec<T> total{};
  for (int64_t x = 0; x < width; x += kLanes<T>) total += load(a + x) * load(b + x);
  return sum<T>(total);
}

// What x is divided by for x/‖x‖: its largest entry first, so that squares do not underflow.
template <class T>
struct Direction {
  T size, norm;  // the largest entry, and ‖x‖ over it
  bool points;   // ‖x‖ > eps

  Direction(const T *x, int64_t wide, T eps) {
    Vec<T> largest{};
    for (int64_t at = 0; at < wide; at += kLanes<T>) largest = larger(largest, absolute<T>(load(x + at)));
    size = maximum<T>(largest);
    if (size == 0) size = 1;
    Vec<T> squares{};
    for (int64_t at = 0; at < wide; at += kLanes<T>) {
      const Vec<T> unit = load(x + at) / size;
      squares += unit * unit;
    }
    norm = std::sqrt(sum<T>(squares));
    points = !(norm * size <= eps);
  }
};

// den of raw, its slope there, and whether o is not 0 by definition.
template <class T>
struct Denominator {
  T value = 1, slope = 0;
  bool gives = true;

  Denominator() = default;
  Denominator(const attnkit_plan &plan, T raw) {
    if (plan.op == ATTNKIT_COSINE) {
      constexpr T floor = static_cast<T>(1e-6);
      value = (raw <= 0 ? T{} : raw) + floor;
      slope = raw <= 0 ? T{} : T{1};
    } else if (plan.op == ATTNKIT_PERFORMER) {
      value = raw;
      slope = 1;
      gives = !(raw <= 0);
    } else if (plan.normalize) {
      value = raw + static_cast<T>(plan.eps);
      slope = 1;
      gives = value != 0;
    }
  }
};

// The map of one item.
template <class T>
class FeatureMap {
 public:
  explicit FeatureMap(const attnkit_plan &plan)
      : count(plan.op == ATTNKIT_COSINE      ? plan.features + 1
              : plan.op == ATTNKIT_PERFORMER ? plan.projected
                                             : plan.features),
        wide(padded<T>(plan.features)),
        width(padded<T>(count)),
        is_exponential(plan.op == ATTNKIT_PERFORMER && plan.feature_map == ATTNKIT_SOFTMAX_KERNEL),
        plan_(plan) {}

  FeatureMap(const Call &call, const Index &index) : FeatureMap(call.plan) {
    const Matrix projection(call, ATTNKIT_PROJECTION, index);
    if (!projection) return;
    T *rows = projection_.reserve(count * wide), *columns = transposed_.reserve(wide * width);
    std::fill(columns, columns + wide * width, T{});
    for (int64_t r = 0; r < count; ++r) {
      projection.read<T>(r, 0, plan_.features, T{1}, rows + r * wide, wide);
      for (int64_t c = 0; c < plan_.features; ++c) columns[c * width + r] = rows[r * wide + c];
    }
  }

  const int64_t count, wide, width;  // the features; rows of tokens and of features
  const bool is_exponential;         // φ = m^-½ exp(κ - level): tokens have exponents κ

  // φ of n tokens.
  void map(int64_t n, const T *tokens, T *phi) const {
    if (plan_.op == ATTNKIT_COSINE) return directions(n, tokens, phi);
    if (plan_.op == ATTNKIT_PERFORMER) return rectified(n, tokens, phi);
    if (plan_.feature_map == ATTNKIT_ELU_PLUS_ONE) return each<EluPlusOne<T>>(n, tokens, phi);
    if (plan_.feature_map == ATTNKIT_RELU_FEATURES) return each<ReluFeatures<T>>(n, tokens, phi);
    each<IdentityFeatures<T>>(n, tokens, phi);
  }

  // dx of n tokens for dφ; for exponentials φ is any multiple of it, and dφ is that of the multiple.
  void pull(int64_t n, const T *tokens, const T *phi, const T *dphi, T *dx) const {
    if (plan_.op == ATTNKIT_COSINE) return pull_directions(n, tokens, phi, dphi, dx);
    if (is_exponential) return pull_exponents(n, tokens, phi, dphi, dx);
    if (plan_.op == ATTNKIT_PERFORMER) return pull_rectified(n, tokens, dphi, dx);
    if (plan_.feature_map == ATTNKIT_ELU_PLUS_ONE) return pull_each<EluPlusOne<T>>(n, phi, dphi, dx);
    if (plan_.feature_map == ATTNKIT_RELU_FEATURES) return pull_each<ReluFeatures<T>>(n, phi, dphi, dx);
    pull_each<IdentityFeatures<T>>(n, phi, dphi, dx);
  }

  // κ_r = ω_r·x̃ - ‖x̃‖²/2 with x̃ = x d^-¼ (Choromanski et al. 2021 lemma 1), -infinity at the end of a row.
  void exponents(int64_t n, const T *tokens, T *kappa) const {
    const T quarter = static_cast<T>(std::pow(static_cast<double>(plan_.features), -0.25));
    products(n, tokens, kappa);
    for (int64_t i = 0; i < n; ++i) {
      const T half = T(0.5) * dot(tokens + i * wide, tokens + i * wide, wide) * (quarter * quarter);
      T *row = kappa + i * width;
      for (int64_t r = 0; r < width; r += kLanes<T>) store<T>(row + r, load(row + r) * quarter - half);
      std::fill(row + count, row + width, -kInfinity<T>);
    }
  }

  // φ of exponents whose level is `level`: m^-½ exp(κ - level).
  void exponential(T level, T *kappa) const {
    const T factor = static_cast<T>(1 / std::sqrt(static_cast<double>(count)));
    const Vec<T> shift = splat(level == -kInfinity<T> ? T{} : level);
    for (int64_t r = 0; r < width; r += kLanes<T>)
      store<T>(kappa + r, exp_below<T>(load(kappa + r) - shift) * factor);
  }

 private:
  template <class Map>
  void each(int64_t n, const T *tokens, T *phi) const {
    for (int64_t at = 0; at < n * wide; at += kLanes<T>) store<T>(phi + at, Map::value(load(tokens + at)));
    for (int64_t i = 0; i < n && count < width; ++i) std::fill(phi + i * width + count, phi + (i + 1) * width, T{});
  }

  template <class Map>
  void pull_each(int64_t n, const T *phi, const T *dphi, T *dx) const {
    for (int64_t at = 0; at < n * wide; at += kLanes<T>)
      store<T>(dx + at, Map::pull(load(phi + at), load(dphi + at)));
  }

  // φ(x) = [1, x/‖x‖], or [1, 0] where ‖x‖ <= eps.
  void directions(int64_t n, const T *tokens, T *phi) const {
    for (int64_t i = 0; i < n; ++i) {
      const T *x = tokens + i * wide;
      T *out = phi + i * width;
      const Direction<T> way(x, wide, static_cast<T>(plan_.eps));
      out[0] = 1;
      for (int64_t c = 0; c < plan_.features; ++c) out[1 + c] = way.points ? x[c] / way.size / way.norm : T{};
      std::fill(out + count, out + width, T{});
    }
  }

  // dx = (dx̂ - x̂ (x̂·dx̂))/‖x‖
  void pull_directions(int64_t n, const T *tokens, const T *phi, const T *dphi, T *dx) const {
    for (int64_t i = 0; i < n; ++i) {
      const T *hat = phi + i * width, *d = dphi + i * width;
      const Direction<T> way(tokens + i * wide, wide, static_cast<T>(plan_.eps));
      const T along = dot(hat, d, width) - hat[0] * d[0], inverse = 1 / (way.norm * way.size);
      for (int64_t c = 0; c < plan_.features; ++c)
        dx[i * wide + c] = way.points ? inverse * (d[1 + c] - hat[1 + c] * along) : T{};
    }
  }

  // ω_r·x
  void products(int64_t n, const T *tokens, T *out) const {
    std::fill(out, out + n * width, T{});
    multiply<T>(n, wide, width, tokens, wide, transposed_.data(), width, out, width);
  }

  // Σ_r d_r ω_r
  void pull_products(int64_t n, const T *d, T *dx) const {
    std::fill(dx, dx + n * wide, T{});
    multiply<T>(n, count, wide, d, width, projection_.data(), wide, dx, wide);
  }

  // φ_r = m^-½ relu(ω_r·x) + eps
  void rectified(int64_t n, const T *tokens, T *phi) const {
    const T factor = static_cast<T>(1 / std::sqrt(static_cast<double>(count))), eps = static_cast<T>(plan_.eps);
    products(n, tokens, phi);
    for (int64_t at = 0; at < n * width; at += kLanes<T>)
      store<T>(phi + at, ReluFeatures<T>::value(load(phi + at)) * factor + eps);
    for (int64_t i = 0; i < n; ++i) std::fill(phi + i * width + count, phi + (i + 1) * width, T{});
  }

  void pull_rectified(int64_t n, const T *tokens, const T *dphi, T *dx) const {
    const T factor = static_cast<T>(1 / std::sqrt(static_cast<double>(count)));
    T *d = work_.reserve(n * width);
    products(n, tokens, d);
    for (int64_t at = 0; at < n * width; at += kLanes<T>)
      store<T>(d + at, ReluFeatures<T>::pull(load(d + at), load(dphi + at)) * factor);
    pull_products(n, d, dx);
  }

  // dx̃ = Σ_r dκ_r (ω_r - x̃) with dκ = φ ⊙ dφ
  void pull_exponents(int64_t n, const T *tokens, const T *phi, const T *dphi, T *dx) const {
    const T quarter = static_cast<T>(std::pow(static_cast<double>(plan_.features), -0.25));
    T *d = work_.reserve(n * width);
    for (int64_t at = 0; at < n * width; at += kLanes<T>) store<T>(d + at, load(phi + at) * load(dphi + at));
    pull_products(n, d, dx);
    for (int64_t i = 0; i < n; ++i) {
      const T total = dot(phi + i * width, dphi + i * width, width) * quarter;
      T *row = dx + i * wide;
      for (int64_t c = 0; c < wide; c += kLanes<T>)
        store<T>(row + c, (load(row + c) - load(tokens + i * wide + c) * total) * quarter);
    }
  }

  const attnkit_plan &plan_;
  Buffer<T> projection_, transposed_;
  mutable Buffer<T> work_;
};

}  // namespace attnkit
