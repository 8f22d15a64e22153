// What the forward and the backward sweep share: sizes of tiles, and queries and keys as operands of products.
#pragma once

#include "families.h"
#include "pack.h"
#include "pool.h"

namespace attnkit {

// Queries and keys of a tile of scores: a multiple of kRows and of kPanel. Two tiles and the keys they are with stay in
// the cache of a core.
constexpr int kQueries = 96;
template <class T>
constexpr int kKeys = 1024 / sizeof(T);

// As many threads as there is work for: waking one costs about as much as `kWork` multiplications take.
inline int threads_for(const Call &call, double products) {
  constexpr double kWork = 4e6;
  const attnkit_plan &plan = call.plan;
  const double work = static_cast<double>(call.items()) * static_cast<double>(plan.queries) *
                      static_cast<double>(plan.keys) * static_cast<double>(plan.features + plan.values) * products;
  return static_cast<int>(std::clamp(work / kWork, 1.0, static_cast<double>(std::max(1, call.threads))));
}

inline int64_t blocks(int64_t n, int64_t size) { return (n + size - 1) / size; }

// The vector from which distances are measured (A11: no later token may change a bit of it): the mean of the keys that
// the first query with a key sees. A common offset of queries and keys then costs no digits.
template <class T>
void find_centre(const Item<T> &item, const Matrix &k, T *centre, T *row) {
  const attnkit_plan &plan = item.plan;
  std::fill(centre, centre + plan.features, T{});
  for (int64_t i = 0; i < plan.queries; ++i) {
    const Range r = item.range(i);
    if (r.visible == 0) continue;
    for (int64_t j = r.begin; j < r.end; ++j) {
      if (item.mask && !*item.mask.template at<uint8_t>(i, j)) continue;
      k.read<T>(j, 0, plan.features, T{1}, row, plan.features);
      for (int64_t x = 0; x < plan.features; ++x) centre[x] += row[x];
    }
    for (int64_t x = 0; x < plan.features; ++x) centre[x] /= static_cast<T>(r.visible);
    return;
  }
}

// How a family wants queries and keys: as they are, or centred, and in panels with -(scale/2)‖k‖² as one more feature.
template <class T, bool kDistances>
class Tokens {
 public:
  explicit Tokens(const attnkit_plan &plan)
      : plan(plan),
        features(plan.features),
        depth(plan.features + (kDistances ? 1 : 0)),
        scale_(static_cast<T>(plan.scale)) {}

  const attnkit_plan &plan;
  const int64_t features, depth;  // the depth of the product of scores

  void see(const Item<T> &first, const Matrix &k) {
    if constexpr (kDistances) {
      find_centre(first, k, centre_.reserve(features), row_.reserve(features));
    }
  }

  void pack_keys(const Matrix &k, int64_t first, int64_t n, const uint8_t *seen, Buffer<T> &rows, T *panels) const {
    if constexpr (kDistances) {
      const auto edit = [this](T *row) { row[features] = centred(row) * (T(-0.5) * scale_); };
      pack_panels<T>(k, first, n, features, depth, seen, rows, panels, edit);
    } else {
      pack_panels<T>(k, first, n, features, depth, seen, rows, panels, Nothing<T>());
    }
  }

  // Keys row by row, `width` features each; where scores are distances, feature d is 1, so that it sums gradients.
  void pack_key_rows(const Matrix &k, int64_t first, int64_t n, int64_t width, const uint8_t *seen, T *out) const {
    pack_rows<T>(k, first, n, features, width, seen, out, [this](T *row) {
      if constexpr (kDistances) {
        centred(row);
        row[features] = 1;
      }
    });
  }

  // A query as a row of the product of scores, times scale; -(scale/2)‖q‖² is returned. Without a centre, for `score`,
  // it is the query itself.
  T read_query(const Matrix &q, int64_t i, T *out, int64_t width) const {
    if (!kDistances || centre_.data() == nullptr) {
      q.read<T>(i, 0, features, kDistances ? T{1} : scale_, out, width);
      return 0;
    } else {
      q.read<T>(i, 0, features, T{1}, out, width);
      const T squares = centred(out), scale = scale_;
      for (int64_t x = 0; x < features; ++x) out[x] *= scale;
      out[features] = 1;
      return squares * (T(-0.5) * scale);
    }
  }

  // The score of one pair, from rows of `width` features.
  ATTNKIT_INLINE T score(const T *query, const T *key, int64_t width) const {
    Vec<T> total{};
    for (int64_t x = 0; x < width; x += kLanes<T>) {
      const Vec<T> a = load(query + x), b = load(key + x), difference = a - b;
      total += kDistances ? difference * difference : a * b;
    }
    return kDistances ? sum<T>(total) * (T(-0.5) * scale_) : sum<T>(total);
  }

  // Scores of a row from products: -(scale/2)‖q - k‖², where rounding may not change its sign.
  void finish_scores(T of_query, T *s, int64_t width) const {
    if constexpr (kDistances) {
      for (int64_t j = 0; j < width; j += kLanes<T>) {
        const Vec<T> x = load(s + j) + of_query;
        store<T>(s + j, scale_ > 0 ? smaller(Vec<T>{}, x) : larger(Vec<T>{}, x));
      }
    }
  }

 private:
  // Subtracts the centre and returns the sum of squares.
  T centred(T *row) const {
    const T *centre = centre_.data();
    Vec<T> total{};
    int64_t x = 0;
    for (; x + kLanes<T> <= features; x += kLanes<T>) {
      const Vec<T> y = load(row + x) - load(centre + x);
      store<T>(row + x, y);
      total += y * y;
    }
    T squares = sum<T>(total);
    for (; x < features; ++x) {
      row[x] -= centre[x];
      squares += row[x] * row[x];
    }
    return squares;
  }

  T scale_;
  Buffer<T> centre_, row_;
};

// Queries of a group for which packing keys does not pay: decoding.
constexpr int64_t kFew = 4;

// Scores of a few queries and the keys first .. first + n, which are read once, where they are if they can be; `key` is
// memory for one of them.
template <class T, bool kDistances>
void score_few(const Tokens<T, kDistances> &tokens, const Matrix &k, int64_t first, int64_t n, const T *queries,
               int64_t rows, T *key, T *scores, int64_t stride) {
  constexpr int kAhead = 16;  // keys that are asked for before their turn
  const int64_t keys = tokens.plan.keys, wide = padded<T>(tokens.features);
  const bool in_place = k.holds<T>() && k.column == 1 && wide == tokens.features;
  for (int64_t j = 0; j < n; ++j) {
    if (!in_place) k.read<T>(first + j, 0, tokens.features, T{1}, key, wide);
    const T *row = in_place ? k.at<const T>(first + j, 0) : key;
    if (in_place && first + j + kAhead < keys) prefetch(row + kAhead * k.row, wide);
    for (int64_t i = 0; i < rows; ++i) scores[i * stride + j] = tokens.score(queries + i * wide, row, wide);
  }
}

// sum += Σ_j weights[j] values_j in N vectors from x on, as often as they fit; returns the x behind them.
template <class T, int N>
int64_t add_columns(int64_t x, int64_t width, int64_t keys, const T *weights, const T *values, int64_t row, T *sum) {
  constexpr int W = kLanes<T>;
  for (; x + N * W <= width; x += N * W) {
    Vec<T> sums[N];
    for (int n = 0; n < N; ++n) sums[n] = load(sum + x + n * W);
    for (int64_t j = 0; j < keys; ++j)
      for (int n = 0; n < N; ++n) add_product(sums[n], splat(weights[j]), load(values + j * row + x + n * W));
    for (int n = 0; n < N; ++n) store<T>(sum + x + n * W, sums[n]);
  }
  return x;
}

// The same for a whole row: values are read key by key, not in panels of a few columns, and many sums hide latencies.
template <class T>
void add_values(int64_t width, int64_t keys, const T *weights, const T *values, int64_t row, T *sum) {
  int64_t x = add_columns<T, 8>(0, width, keys, weights, values, row, sum);
  x = add_columns<T, 4>(x, width, keys, weights, values, row, sum);
  add_columns<T, 1>(x, width, keys, weights, values, row, sum);
}

// Tokens of bfloat16 as they are, two features at a time; scale multiplies scores instead.
class PairedTokens {
 public:
  explicit PairedTokens(const attnkit_plan &plan)
      : features(plan.features), depth(pairs(plan.features)), scale_(static_cast<float>(plan.scale)) {}

  const int64_t features, depth;

  void see(const Item<float> &, const Matrix &) const {}

  void pack_keys(const Matrix &k, int64_t first, int64_t n, const uint8_t *seen, Buffer<Pair> &rows,
                 Pair *panels) const {
    pack_pair_panels(k, first, n, features, depth, seen, rows, panels);
  }

  float read_query(const Matrix &q, int64_t i, Pair *out, int64_t) const {
    read_pairs(q, i, features, out, depth);
    return 0;
  }

  void finish_scores(float, float *s, int64_t width) const {
    for (int64_t j = 0; j < width; j += kLanes<float>) store<float>(s + j, load(s + j) * scale_);
  }

 private:
  float scale_;
};

}  // namespace attnkit
