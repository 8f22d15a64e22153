// What the backward sweep multiplies and adds up: the keys of a split, a block of queries with the cotangents of their
// outputs, and dq, dk and dv. Scores, weights and their gradients are tiles of kQueries x kKeys of the compute dtype.
#pragma once

#include "engine.h"

namespace attnkit {

// Everything in the compute dtype. Queries are times scale, cotangents times the factor of their row.
template <class T, bool kDistances>
class Operands {
 public:
  static constexpr bool kScalesCotangents = true;

  struct Workspace {
    Buffer<T> key_panels, value_panels, keys, rows, queries, cotangents, dq, dk, dv;
  };

  Operands(const attnkit_plan &plan, bool products, Workspace &w)
      : plan_(plan),
        products_(products),
        tokens_(plan),
        wide_(padded<T>(plan.features + (kDistances ? 1 : 0))),
        width_(padded<T>(plan.values)),
        w_(w) {
    w.queries.reserve(kQueries * wide_);
    w.cotangents.reserve(kQueries * width_);
    w.dq.reserve(kQueries * wide_);
  }

  // The keys first .. first + count; dk and dv are 0.
  void pack(const Item<T> &item, const Matrix &k, const Matrix &v, Range, const uint8_t *seen, int64_t first,
            int64_t count) {
    tokens_.see(item, k);
    const int64_t whole = blocks(count, kPanel<T>) * kPanel<T>;
    tokens_.pack_keys(k, first, count, seen, w_.rows, w_.key_panels.reserve(whole * tokens_.depth));
    if (products_)
      pack_panels<T>(v, first, count, plan_.values, plan_.values, seen, w_.rows,
                     w_.value_panels.reserve(whole * plan_.values), Nothing<T>());
    keys_ = k.at<const T>(first, 0);
    if (kDistances || seen != nullptr || !k.is_operand<T>(plan_.features, wide_)) {
      T *packed = w_.keys.reserve(count * wide_);
      tokens_.pack_key_rows(k, first, count, wide_, seen, packed);
      keys_ = packed;
    }
    std::fill_n(w_.dk.reserve(count * wide_), count * wide_, T{});
    std::fill_n(w_.dv.reserve(count * width_), count * width_, T{});
  }

  void clear_row(int64_t i) {
    std::fill_n(w_.queries.data() + i * wide_, wide_, T{});
    std::fill_n(w_.cotangents.data() + i * width_, width_, T{});
  }

  // Row i of a block from a query; the number that joins its scores is returned.
  T read_query(const Matrix &q, int64_t query, int64_t i) {
    return tokens_.read_query(q, query, w_.queries.data() + i * wide_, wide_);
  }

  // The cotangent of its output, which is returned as numbers.
  const T *read_cotangent(const Matrix &d_o, int64_t query, int64_t i, T factor) {
    T *row = w_.cotangents.data() + i * width_;
    d_o.read<T>(query, 0, plan_.values, factor, row, width_);
    return row;
  }

  void begin(int64_t rows) { std::fill_n(w_.dq.data(), rows * wide_, T{}); }

  // q kᵀ for `width` keys from `at` on, counted from the first of the split.
  void multiply_scores(int64_t rows, int64_t at, int64_t width, T *scores) const {
    const T *panels = w_.key_panels.data() + at * tokens_.depth;
    multiply_panels<T>(rows, tokens_.depth, width, w_.queries.data(), wide_, panels, scores, kKeys<T>);
  }

  // The same and do vᵀ; without products that is 0.
  void multiply_keys(int64_t rows, int64_t at, int64_t width, T *scores, T *grads) const {
    constexpr int K = kKeys<T>;
    multiply_scores(rows, at, width, scores);
    if (!products_) return std::fill(grads, grads + rows * K, T{});
    const T *values = w_.value_panels.data() + at * plan_.values;
    multiply_panels<T>(rows, plan_.values, width, w_.cotangents.data(), width_, values, grads, K);
  }

  void finish_scores(T of_query, T *s, int64_t width) const { tokens_.finish_scores(of_query, s, width); }

  // dq += ds k, dk += dsᵀ q and dv += wᵀ do for n keys from `at` on, of which the first `skip` are seen by no row.
  void add(int64_t rows, int64_t at, int64_t skip, int64_t n, T *weights, T *ds) {
    constexpr int K = kKeys<T>;
    const int64_t from = at + skip, count = n - skip;
    multiply<T>(rows, count, wide_, ds + skip, K, keys_ + from * wide_, wide_, w_.dq.data(), wide_);
    multiply_transposed<T>(count, rows, wide_, ds + skip, K, w_.queries.data(), wide_, w_.dk.data() + from * wide_,
                           wide_);
    if (products_)
      multiply_transposed<T>(count, rows, width_, weights + skip, K, w_.cotangents.data(), width_,
                             w_.dv.data() + from * width_, width_);
  }

  // dq of row i: scale Σ ds k, and for distances scale Σ ds (k - q), with Σ ds one feature more.
  const T *query_grad(int64_t i) {
    const T scale = static_cast<T>(plan_.scale);
    T *row = w_.dq.data() + i * wide_;
    const T *query = w_.queries.data() + i * wide_, by = kDistances ? row[plan_.features] : T{};
    for (int64_t x = 0; x < plan_.features; ++x) row[x] = scale * row[x] - by * query[x];
    return row;
  }

  // dk and dv of key j of the split.
  const T *key_grad(int64_t j) {
    T *row = w_.dk.data() + j * wide_;
    if constexpr (kDistances) {
      const T *key = keys_ + j * wide_, by = static_cast<T>(plan_.scale) * row[plan_.features];
      for (int64_t x = 0; x < plan_.features && by != 0; ++x) row[x] -= by * key[x];
    }
    return row;
  }
  const T *value_grad(int64_t j) { return w_.dv.data() + j * width_; }

 private:
  const attnkit_plan &plan_;
  const bool products_;
  Tokens<T, kDistances> tokens_;
  const int64_t wide_, width_;
  Workspace &w_;
  const T *keys_ = nullptr;
};

// Pairs of bfloat16, queries and cotangents as they are; weights and ds are rounded to it for their products. dk and dv
// are summed transposed, features by keys: a tile of weights is then the right operand of a product over queries, and two
// rows of it are its pairs.
class PairedOperands {
 public:
  static constexpr bool kScalesCotangents = false;

  struct Workspace {
    Buffer<Pair> key_panels, value_panels, keys, rows, queries, cotangents, across, joined;
    Buffer<float> dq, dk, dv, row;
  };

  PairedOperands(const attnkit_plan &plan, bool products, Workspace &w)
      : plan_(plan),
        products_(products),
        tokens_(plan),
        value_depth_(pairs(plan.values)),
        wide_(padded<float>(plan.features)),
        width_(padded<float>(plan.values)),
        w_(w) {
    w.queries.reserve(kQueries * tokens_.depth);
    w.cotangents.reserve(kQueries * value_depth_);
    w.across.reserve(kPairsOfQueries * 2 * padded<Pair>(std::max(tokens_.depth, value_depth_)));
    w.joined.reserve(kPairsOfQueries * kKeys<float>);
    w.dq.reserve(kQueries * wide_);
    w.row.reserve(std::max(wide_, width_));
  }

  void pack(const Item<float> &, const Matrix &k, const Matrix &v, Range reach, const uint8_t *seen, int64_t first,
            int64_t count) {
    const int64_t whole = blocks(count, kPanel<Pair>) * kPanel<Pair>;
    tokens_.pack_keys(k, first, count, seen, w_.rows, w_.key_panels.reserve(whole * tokens_.depth));
    if (products_)
      pack_pair_panels(v, first, count, plan_.values, value_depth_, seen, w_.rows,
                       w_.value_panels.reserve(whole * value_depth_));
    pack_pairs(k, reach, first, count, plan_.features, wide_, seen, w_.keys.reserve(pairs(count) * wide_));
    stride_ = whole + kLanes<float>;  // rows of tiles a page apart would share a set of the cache
    std::fill_n(w_.dk.reserve(wide_ * stride_), wide_ * stride_, 0.0f);
    std::fill_n(w_.dv.reserve(width_ * stride_), width_ * stride_, 0.0f);
  }

  void clear_row(int64_t i) {
    std::fill_n(w_.queries.data() + i * tokens_.depth, tokens_.depth, Pair{});
    std::fill_n(w_.cotangents.data() + i * value_depth_, value_depth_, Pair{});
  }

  float read_query(const Matrix &q, int64_t query, int64_t i) {
    return tokens_.read_query(q, query, w_.queries.data() + i * tokens_.depth, tokens_.depth);
  }

  const float *read_cotangent(const Matrix &d_o, int64_t query, int64_t i, float) {
    read_pairs(d_o, query, plan_.values, w_.cotangents.data() + i * value_depth_, value_depth_);
    d_o.read<float>(query, 0, plan_.values, 1.0f, w_.row.data(), width_);
    return w_.row.data();
  }

  void begin(int64_t rows) { std::fill_n(w_.dq.data(), rows * wide_, 0.0f); }

  void multiply_scores(int64_t rows, int64_t at, int64_t width, float *scores) const {
    const Pair *panels = w_.key_panels.data() + at * tokens_.depth;
    multiply_panels<Pair>(rows, tokens_.depth, width, w_.queries.data(), tokens_.depth, panels, scores, kKeys<float>);
  }

  void multiply_keys(int64_t rows, int64_t at, int64_t width, float *scores, float *grads) const {
    constexpr int K = kKeys<float>;
    multiply_scores(rows, at, width, scores);
    if (!products_) return std::fill(grads, grads + rows * K, 0.0f);
    const Pair *values = w_.value_panels.data() + at * value_depth_;
    multiply_panels<Pair>(rows, value_depth_, width, w_.cotangents.data(), value_depth_, values, grads, K);
  }

  void finish_scores(float, float *s, int64_t width) const { tokens_.finish_scores(0, s, width); }

  void add(int64_t rows, int64_t at, int64_t skip, int64_t n, float *weights, float *ds) {
    constexpr int K = kKeys<float>;
    const int64_t width = padded<float>(n), before = skip / (2 * kPairDepth) * kPairDepth;
    add_across(rows, tokens_.depth, w_.queries.data(), wide_, ds, width, w_.dk.data() + at);
    if (products_) add_across(rows, value_depth_, w_.cotangents.data(), width_, weights, width, w_.dv.data() + at);
    Pair *rounded = reinterpret_cast<Pair *>(ds);
    for (int64_t i = 0; i < rows; ++i) split_to_pairs<1>(ds + i * K, width, rounded + i * K, 0);
    multiply<Pair>(rows, pairs(n) - before, wide_, rounded + before, K,
                   w_.keys.data() + (at / 2 + before) * wide_, wide_, w_.dq.data(), wide_);
  }

  const float *query_grad(int64_t i) {
    const float scale = static_cast<float>(plan_.scale);
    float *row = w_.dq.data() + i * wide_;
    for (int64_t x = 0; x < plan_.features; ++x) row[x] *= scale;
    return row;
  }

  const float *key_grad(int64_t j) { return column(w_.dk, plan_.features, j, static_cast<float>(plan_.scale)); }
  const float *value_grad(int64_t j) { return column(w_.dv, plan_.values, j, 1.0f); }

 private:
  static constexpr int kPairsOfQueries = kQueries / 2;

  // sums += xᵀ y for the rows x of a block, `depth` pairs each, and a tile y.
  void add_across(int64_t rows, int64_t depth, const Pair *x, int64_t columns, const float *y, int64_t width,
                  float *sums) {
    constexpr int K = kKeys<float>;
    Pair *across = w_.across.data(), *joined = w_.joined.data();
    transpose_pairs(rows, depth, x, across, kPairsOfQueries);
    for (int64_t r = 0; r < pairs(rows); ++r)
      join_rows(2 * r < rows ? y + 2 * r * K : nullptr, 2 * r + 1 < rows ? y + (2 * r + 1) * K : nullptr, width,
                joined + r * K);
    multiply<Pair>(columns, pairs(rows), width, across, kPairsOfQueries, joined, K, sums, stride_);
  }

  const float *column(const Buffer<float> &sums, int64_t n, int64_t j, float factor) {
    float *row = w_.row.data();
    for (int64_t x = 0; x < n; ++x) row[x] = sums.data()[x * stride_ + j] * factor;
    return row;
  }

  const attnkit_plan &plan_;
  const bool products_;
  const PairedTokens tokens_;
  const int64_t value_depth_, wide_, width_;
  Workspace &w_;
  int64_t stride_ = 0;
};

}  // namespace attnkit
