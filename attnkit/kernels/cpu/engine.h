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
constexpr int64_t kFew = 8;
// What a pair costs there: keys and values come from memory.
constexpr double kFewCost = 8;
// Vectors of sums that a loop over them keeps in registers, and keys whose scores it finds together.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kSums = 16;
#else
constexpr int kSums = 8;
#endif

// Scores of R queries and the first of n keys, kSums / R of them at most, rows of `width` numbers of type S.
template <bool kDistances, int R, class T, class S>
void score_rows(const S *keys, int64_t stride, int64_t n, const T *queries, int64_t width, T factor, T *scores,
                int64_t to) {
  constexpr int N = kSums / R, W = kLanes<T>;
  const S *rows[N];
  for (int j = 0; j < N; ++j) rows[j] = keys + std::min<int64_t>(j, n - 1) * stride;
  Vec<T> sums[kSums] = {};
  for (int64_t x = 0; x < width; x += W) {
    Vec<T> query[R];
    for (int i = 0; i < R; ++i) query[i] = load(queries + i * width + x);
    for (int j = 0; j < N; ++j) {
      const Vec<T> key = load_as<T>(rows[j] + x);
      for (int i = 0; i < R; ++i) {
        const Vec<T> difference = query[i] - key;
        kDistances ? add_product(sums[i * N + j], difference, difference) : add_product(sums[i * N + j], query[i], key);
      }
    }
  }
  T found[kSums];
  for (int at = 0; at < kSums; at += W) store<T>(found + at, sums_of_each<T>(sums + at) * factor);
  for (int i = 0; i < R; ++i) std::copy(found + i * N, found + i * N + std::min<int64_t>(N, n), scores + i * to);
}

// The same for any number of queries and kSums keys at most.
template <bool kDistances, class T, class S>
void score_keys(const S *keys, int64_t stride, int64_t n, const T *queries, int64_t rows, int64_t width, T factor,
                T *scores, int64_t to) {
  const auto score = [&](auto number, int64_t i) {
    constexpr int R = decltype(number)::value;
    for (int64_t j = 0; j < n; j += kSums / R)
      score_rows<kDistances, R>(keys + j * stride, stride, n - j, queries + i * width, width, factor,
                                scores + i * to + j, to);
  };
  int64_t i = 0;
  for (; i + 4 <= rows; i += 4) score(std::integral_constant<int, 4>(), i);
  for (; i + 2 <= rows; i += 2) score(std::integral_constant<int, 2>(), i);
  for (; i < rows; ++i) score(std::integral_constant<int, 1>(), i);
}

// Calls f with a number of the type of x, where its rows can be read as T vector by vector; whether it has.
template <class T, class F>
bool with_type_in_place(const Matrix &x, int64_t columns, const F &f) {
  if (x.column != 1 || columns % kLanes<T> != 0) return false;
  if (x.holds<T>()) return f(T{}), true;
  if constexpr (sizeof(T) == sizeof(float)) {
    if (x.dtype == ATTNKIT_BFLOAT16) return f(BFloat16{}), true;
    if (x.dtype == ATTNKIT_FLOAT16) return f(Float16{}), true;
  }
  return false;
}

// How many rows of `columns` numbers before their turn memory is asked for them: about what is on its way to a core.
template <class S>
int64_t rows_ahead(int64_t columns) {
  constexpr int64_t kAhead = 8192;
  return std::max<int64_t>(kSums, kAhead / (columns * static_cast<int64_t>(sizeof(S))));
}

// Scores of a few queries and the keys first .. first + n, which are read once, where they are if they can be.
template <class T, bool kDistances>
void score_few(const Tokens<T, kDistances> &tokens, const Matrix &k, int64_t first, int64_t n, const T *queries,
               int64_t rows, Buffer<T> &buffer, T *scores, int64_t stride) {
  const int64_t features = tokens.features, wide = padded<T>(features);
  const T factor = kDistances ? T(-0.5) * static_cast<T>(tokens.plan.scale) : T{1};
  T *keys = buffer.reserve(kSums * wide);
  for (int64_t j = 0; j < n; j += kSums) {
    const int64_t count = std::min<int64_t>(kSums, n - j);
    const bool in_place = with_type_in_place<T>(k, features, [&](auto like) {
      const auto *at = k.at<const decltype(like)>(first + j, 0);
      const int64_t ahead = rows_ahead<decltype(like)>(features), left = tokens.plan.keys - first - j;
      for (int64_t key = ahead; key < std::min(ahead + count, left); ++key) prefetch(at + key * k.row, features);
      score_keys<kDistances>(at, k.row, count, queries, rows, wide, factor, scores + j, stride);
    });
    if (in_place) continue;
    for (int64_t at = 0; at < count; ++at) k.read<T>(first + j + at, 0, features, T{1}, keys + at * wide, wide);
    score_keys<kDistances>(keys, wide, count, queries, rows, wide, factor, scores + j, stride);
  }
}

// sums_i += Σ_j weights_ij values_j for R rows, in N vectors from x on, as often as they fit; returns the x behind them.
template <int R, int N, class T, class S>
int64_t add_columns(int64_t x, int64_t width, int64_t keys, const T *weights, int64_t stride, const S *values,
                    int64_t row, T *sums) {
  constexpr int W = kLanes<T>;
  for (; x + N * W <= width; x += N * W) {
    Vec<T> own[R][N];
    for (int i = 0; i < R; ++i)
      for (int n = 0; n < N; ++n) own[i][n] = load(sums + i * width + x + n * W);
    for (int64_t j = 0; j < keys; ++j)
      for (int n = 0; n < N; ++n) {
        const Vec<T> value = load_as<T>(values + j * row + x + n * W);
        for (int i = 0; i < R; ++i) add_product(own[i][n], splat(weights[i * stride + j]), value);
      }
    for (int i = 0; i < R; ++i)
      for (int n = 0; n < N; ++n) store<T>(sums + i * width + x + n * W, own[i][n]);
  }
  return x;
}

// The same for whole rows: values are read key by key, not in panels of a few columns, and many sums hide latencies.
template <class T, class S>
void add_values(int64_t rows, int64_t width, int64_t keys, const T *weights, int64_t stride, const S *values,
                int64_t row, T *sums) {
  const auto add = [&](auto number, int64_t i) {
    constexpr int R = decltype(number)::value, N = std::min(8, kSums / R);
    const T *w = weights + i * stride;
    int64_t x = add_columns<R, N>(0, width, keys, w, stride, values, row, sums + i * width);
    x = add_columns<R, (N + 1) / 2>(x, width, keys, w, stride, values, row, sums + i * width);
    add_columns<R, 1>(x, width, keys, w, stride, values, row, sums + i * width);
  };
  int64_t i = 0;
  for (; i + 4 <= rows; i += 4) add(std::integral_constant<int, 4>(), i);
  for (; i + 2 <= rows; i += 2) add(std::integral_constant<int, 2>(), i);
  for (; i < rows; ++i) add(std::integral_constant<int, 1>(), i);
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
