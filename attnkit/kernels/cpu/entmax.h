// Entmax and sparsemax attention: rows of scores are made whole, since a threshold needs all of them; then weights meet
// v by the list of a sparse row, or as a block of them by a product where rows are dense. Memory is O((L + S) d) and a
// few rows of scores per thread.
#pragma once

#include "gradients.h"
#include "threshold.h"

namespace attnkit {

template <class T, int kPower>
class Entmax {
 public:
  explicit Entmax(const Call &call)
      : call_(call),
        plan_(call.plan),
        statistics_(wants_statistics(call) || has_statistics_cotangents(call)),
        grouping_(plan_, [this](int axis) { return joins_keys(plan_, axis) ? 2 : sums_bias(axis) ? 1 : 0; }),
        stride_(blocks(plan_.keys, kPanel<T>) * kPanel<T>),
        wide_(padded<T>(plan_.features)),
        width_(padded<T>(plan_.values)),
        rows_(rows_of_block(stride_)) {}

  void forward() const {
    const int threads = threads_for(call_, is_few() ? kFewCost : 1);
    const int64_t count = blocks(plan_.queries, rows_), all = grouping_.members * count;
    const int64_t groups = grouping_.groups * grouping_.runs;
    if (groups == 0 || all == 0) return;
    const int64_t tasks = threads == 1 ? 1 : std::min<int64_t>(all, blocks(4 * threads, groups));
    const int64_t chunk = blocks(all, tasks), chunks = blocks(all, chunk);
    parallel(groups * chunks, threads, [&](int64_t task) {
      Workspace &w = workspace();
      const int64_t group = task % groups, last = chunks - 1 - task / groups;
      const Keys keys = pack(group / grouping_.runs, group % grouping_.runs, w);
      for (int64_t n = last * chunk; n < std::min(all, (last + 1) * chunk); ++n) {
        call_.look();
        const Index index = grouping_.index(plan_, group / grouping_.runs, group % grouping_.runs, n / count);
        const int64_t row = n % count * rows_;
        attend(Item<T>(call_, index), keys, row, std::min(rows_, plan_.queries - row), w);
      }
    });
  }

  // A task owns a split of the queries of a group and gives dk and dv of its queries as a part.
  void backward() const {
    const int splits = split();
    const Parts<T> dq(call_, ATTNKIT_DQ, plan_.queries, plan_.features, 1, [](int) { return false; });
    const auto joined = [this](int axis) { return joins_keys(plan_, axis); };
    const Parts<T> dk(call_, ATTNKIT_DK, plan_.keys, plan_.features, splits, joined);
    const Parts<T> dv(call_, ATTNKIT_DV, plan_.keys, plan_.values, splits, joined);
    const BiasGradient<T> dbias(call_);
    const RowGradient<T> dalpha(call_, ATTNKIT_DALPHA);
    const int64_t per_split = blocks(blocks(plan_.queries, rows_), splits) * rows_;
    parallel(grouping_.groups * splits, threads_for(call_, 2.5), [&](int64_t task) {
      Workspace &w = workspace();
      const int split = static_cast<int>(task / grouping_.groups);
      const int64_t group = task % grouping_.groups, first = split * per_split;
      for (int64_t run = 0; run < grouping_.runs; ++run) {
        const Keys keys = pack(group, run, w);
        Grads g{dq, dbias, dalpha, w.dk.reserve(plan_.keys * wide_), w.dv.reserve(plan_.keys * width_), nullptr};
        std::fill(g.dk, g.dk + plan_.keys * wide_, T{});
        std::fill(g.dv, g.dv + plan_.keys * width_, T{});
        for (int64_t member = 0; member < grouping_.members; ++member) {
          const Item<T> item(call_, grouping_.index(plan_, group, run, member));
          for (int64_t row = first; row < std::min(plan_.queries, first + per_split); row += rows_) {
            call_.look();
            pull(item, keys, row, std::min(rows_, plan_.queries - row), g, w);
          }
        }
        const Index index = grouping_.index(plan_, group, run, 0);
        for (int64_t j = 0; j < plan_.keys; ++j) {
          dk.write(index, split, j, g.dk + j * wide_);
          dv.write(index, split, j, g.dv + j * width_);
        }
      }
    });
    dq.join();
    dk.join();
    dv.join();
    dbias.finish();
    dalpha.finish();
  }

 private:
  struct Workspace {
    Buffer<T> panels, value_panels, keys, values, rows, queries, scores, grads, cotangents, sums, extra, dk, dv, dq;
    Buffer<Pair> pair_panels, pair_rows, pair_queries;
    Buffer<uint8_t> seen;
    Candidates<T> lists[kQueries];
  };
  struct Keys {
    const T *panels;  // NULL for a few queries and for pairs
    const Pair *pair_panels;  // for scores of bfloat16, where products of pairs are faster
    const T *keys, *values;  // values: NULL without v, and for a few queries, which may need a few of them
    const uint8_t *seen;
    Matrix k, v;
  };
  struct Grads {
    const Parts<T> &dq;
    const BiasGradient<T> &dbias;
    const RowGradient<T> &dalpha;
    T *dk, *dv;
    const T *value_panels;  // packed when a block is dense
  };
  struct Rows {
    Range ranges[kQueries];
    Threshold<T> thresholds[kQueries];
    int64_t begin, end, width;  // keys that some query sees; `end` up to a multiple of a vector
    int64_t support;
  };

  static Workspace &workspace() {
    static thread_local Workspace w;
    return w;
  }

  bool sums_bias(int axis) const { return call_.has(ATTNKIT_DBIAS) && is_sum(plan_, ATTNKIT_DBIAS, axis); }

  // A block of scores and one of their gradients stay in the cache of a core.
  static int64_t rows_of_block(int64_t stride) {
    constexpr int64_t kBlock = (int64_t{1} << 19) / sizeof(T);
    return std::clamp<int64_t>(kBlock / std::max<int64_t>(1, stride) / kRows * kRows, 2 * kRows, kQueries);
  }

  int split() const {
    if (call_.has(ATTNKIT_DBIAS) && plan_.arrays[ATTNKIT_DBIAS].row == 0) return 1;
    const int64_t wanted = blocks(16, std::max<int64_t>(1, grouping_.groups));
    return static_cast<int>(std::clamp<int64_t>(std::min<int64_t>(wanted, plan_.queries / 512), 1, 16));
  }

  // With less than a fifth of the pairs in the support, lists are faster than a product.
  bool is_dense(int64_t support, int64_t pairs) const {
    return statistics_ || call_.has(ATTNKIT_DALPHA) || support * 5 > pairs;
  }

  // Where no gradients follow: they take scores from panels, and a key near the threshold must fare alike in both.
  bool is_few() const {
    return grouping_.members * plan_.queries <= kFew && plan_.pass == ATTNKIT_FORWARD && !call_.has(ATTNKIT_ROWS);
  }

  bool adds_pairs() const {
    const auto pairs = [&](int array) { return call_.view(array).dtype == ATTNKIT_BFLOAT16; };
    return kAddsPairs && pairs(ATTNKIT_Q) && pairs(ATTNKIT_K) && !is_few();
  }

  T alpha(const Item<T> &item, int64_t i) const {
    const Matrix of_rows(call_, ATTNKIT_ALPHA, item.index);
    return of_rows ? of_rows.read<T>(i) : static_cast<T>(plan_.alpha);
  }

  Keys pack(int64_t group, int64_t run, Workspace &w) const {
    const Index index = grouping_.index(plan_, group, run, 0);
    const Matrix k(call_, ATTNKIT_K, index), v(call_, ATTNKIT_V, index);
    const uint8_t *seen = w.seen.reserve(plan_.keys);
    if (!seen_keys<T>(call_, grouping_, group, run, w.seen.data())) seen = nullptr;
    T *panels = nullptr;
    Pair *pair_panels = nullptr;
    if (adds_pairs()) {
      const PairedTokens tokens(plan_);
      pair_panels = w.pair_panels.reserve(stride_ * tokens.depth);
      tokens.pack_keys(k, 0, plan_.keys, seen, w.pair_rows, pair_panels);
    } else if (!is_few()) {
      panels = w.panels.reserve(stride_ * plan_.features);
      pack_panels<T>(k, 0, plan_.keys, plan_.features, plan_.features, seen, w.rows, panels, Nothing<T>());
    }
    const T *keys = plan_.pass == ATTNKIT_BACKWARD ? operand(k, plan_.features, wide_, seen, w.keys) : nullptr;
    const bool later = is_few() && !v.is_operand<T>(plan_.values, width_);
    const T *values = v && !later ? operand(v, plan_.values, width_, seen, w.values) : nullptr;
    return {panels, pair_panels, keys, values, seen, k, v};
  }

  const T *operand(const Matrix &x, int64_t columns, int64_t width, const uint8_t *seen, Buffer<T> &buffer) const {
    if (seen == nullptr && x.is_operand<T>(columns, width)) return x.at<const T>(0, 0);
    T *rows = buffer.reserve(plan_.keys * width);
    pack_rows<T>(x, 0, plan_.keys, columns, width, seen, rows, Nothing<T>());
    return rows;
  }

  // A block of scores, with the rows that products of pairs take.
  T *reserve_scores(Workspace &w) const { return w.scores.reserve(blocks(rows_, kPairRows) * kPairRows * stride_); }

  // Scores of a block, -inf where invisible.
  void score(const Item<T> &item, const Keys &keys, int64_t first, int64_t rows, T *queries, T *scores, Rows &b,
             Workspace &w) const {
    b.begin = plan_.keys;
    b.end = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const Range r = b.ranges[i] = item.range(first + i);
      T *query = queries + i * wide_;
      if (r.visible == 0) {
        std::fill(query, query + wide_, T{});
      } else {
        item.q.template read<T>(first + i, 0, plan_.features, static_cast<T>(plan_.scale), query, wide_);
      }
      if (r.visible == 0) continue;
      b.begin = std::min(b.begin, r.begin);
      b.end = std::max(b.end, r.end);
    }
    b.width = padded<T>(b.end);
    b.support = 0;
    if (keys.pair_panels != nullptr) {
      score_pairs(item, keys, first, rows, scores, b, w);
    } else if (keys.panels == nullptr && b.begin < b.end) {
      score_few(Tokens<T, false>(plan_), keys.k, b.begin, b.end - b.begin, queries, rows, w.rows, scores + b.begin,
                stride_);
    }
    for (int64_t k0 = 0; k0 < b.width && keys.panels != nullptr; k0 += kKeys<T>)
      multiply_panels<T>(rows, plan_.features, std::min<int64_t>(kKeys<T>, b.width - k0), queries, wide_,
                         keys.panels + k0 * plan_.features, scores + k0, stride_);
    for (int64_t i = 0; i < rows; ++i) {
      T *row = scores + i * stride_;
      if (item.bias && b.ranges[i].visible > 0) item.add_bias(first + i, 0, std::min(b.width, plan_.keys), row);
      item.hide(first + i, b.ranges[i], 0, b.width, -kInfinity<T>, row);
    }
  }

  void score_pairs(const Item<T> &item, const Keys &keys, int64_t first, int64_t rows, T *scores, const Rows &b,
                   Workspace &w) const {
    if constexpr (kAddsPairs && std::is_same_v<T, float>) {
      const PairedTokens tokens(plan_);
      Pair *queries = w.pair_queries.reserve(kQueries * tokens.depth);
      std::fill(queries, queries + rows * tokens.depth, Pair{});
      for (int64_t i = 0; i < rows; ++i)
        if (b.ranges[i].visible > 0) tokens.read_query(item.q, first + i, queries + i * tokens.depth, tokens.depth);
      for (int64_t k0 = 0; k0 < b.width; k0 += kKeys<T>)
        multiply_panels<Pair>(rows, tokens.depth, std::min<int64_t>(kKeys<T>, b.width - k0), queries, tokens.depth,
                              keys.pair_panels + k0 * tokens.depth, scores + k0, stride_);
      for (int64_t i = 0; i < rows; ++i) tokens.finish_scores(0, scores + i * stride_, b.width);
    }
  }

  // The maximum of a row; NaN if there is one in it, or where it is infinite.
  static T find_top(const T *row, int64_t width) {
    Vec<T> tops = splat(-kInfinity<T>);
    Mask<T> unordered{};
    for (int64_t j = 0; j < width; j += kLanes<T>) {
      const Vec<T> x = load(row + j);
      tops = larger(x, tops);
      unordered |= x != x;
    }
    T top = maximum<T>(tops);
    if (fold<kLanes<T>>(unordered, [](auto a, auto b) { return a | b; })) top = std::numeric_limits<T>::quiet_NaN();
    return top == kInfinity<T> ? std::numeric_limits<T>::quiet_NaN() : top;
  }

  // Threshold of a row, and the list of what is above it: values become x - τ - δ.
  void solve(const Exponent<T, kPower> &e, const T *row, int64_t width, Threshold<T> &at, Candidates<T> &list) const {
    at = {find_top(row, width), 0, 0, 0};
    list.count = 0;
    if (at.top == -kInfinity<T>) at.top = 0;
    else if (at.top != at.top) at.inverse = at.top;
    else {
      list.collect(row, width, e.least(at.top));
      T *x = list.values.data();
      const int64_t n = list.pad(-kInfinity<T>);
      for (int64_t j = 0; j < n; j += kLanes<T>) store<T>(x + j, (load(x + j) - at.top) * e.above);
      find_threshold(e, x, n, at);
      keep(e, at, list);
    }
  }

  // Drops the candidates of weight 0.
  static void keep(const Exponent<T, kPower> &e, const Threshold<T> &at, Candidates<T> &list) {
    const T least = at.least();
    T *x = list.values.data();
    int32_t *keys = list.keys.data();
    int64_t count = 0;
    for (int64_t n = 0; n < list.count; ++n) {
      const T t = (x[n] - at.tau) - at.delta;
      x[count] = t;
      keys[count] = keys[n];
      count += e.softmax || t > least;
    }
    list.count = count;
    list.pad(e.softmax ? -kInfinity<T> : T{});
  }

  // Values of a list to weights, and to u = p^(2-α) where that is wanted.
  static void weigh(const Exponent<T, kPower> &e, const Threshold<T> &at, Candidates<T> &list, T *tilted) {
    T *x = list.values.data();
    const T by = tilt(e, at);
    for (int64_t n = 0; n < list.count; n += kLanes<T>) {
      Vec<T> low, full;
      e.raise(load(x + n), low, full);
      store<T>(x + n, full * at.inverse);
      if (tilted != nullptr) store<T>(tilted + n, low * by);
    }
  }

  // p = t^p/Σ to the power 2 - α is t^(p-1) times this.
  static T tilt(const Exponent<T, kPower> &e, const Threshold<T> &at) {
    if (e.softmax) return at.inverse;
    return kPower == 1 ? T{1} : kPower == 2 ? std::sqrt(at.inverse) : std::pow(at.inverse, 1 - e.above);
  }

  static void spread(const Candidates<T> &list, const Threshold<T> &at, const Range &r, int64_t width, T *row) {
    std::fill(row, row + width, T{});
    if (at.inverse != at.inverse) std::fill(row + r.begin, row + r.end, at.inverse);
    for (int64_t n = 0; n < list.count; ++n) row[list.keys.data()[n]] = list.values.data()[n];
  }

  // ------------------------------------------------------------------------------------------- forward

  void attend(const Item<T> &item, const Keys &keys, int64_t first, int64_t rows, Workspace &w) const {
    Rows b;
    T *queries = w.queries.reserve(rows_ * wide_), *scores = reserve_scores(w);
    T *sums = w.sums.reserve(rows_ * width_), *extra = w.extra.reserve(stride_);
    score(item, keys, first, rows, queries, scores, b, w);
    for (int64_t i = 0; i < rows; ++i) {
      const Exponent<T, kPower> e(alpha(item, first + i));
      solve(e, scores + i * stride_, b.width, b.thresholds[i], w.lists[i]);
      weigh(e, b.thresholds[i], w.lists[i], nullptr);
    }
    int64_t places[kQueries];
    const int64_t dense = sort(b, rows, w.lists, places);
    std::fill(sums, sums + rows * width_, T{});
    const T *values = keys.values;
    if (dense > 0 && values == nullptr && keys.v) values = operand(keys.v, plan_.values, width_, keys.seen, w.values);
    const Matrix saved(call_, ATTNKIT_ROWS, item.index);
    for (int64_t i = 0; i < rows; ++i) {
      T numbers[ATTNKIT_ROW_NUMBERS] = {};
      const bool listed = places[i] >= dense;
      T *row = scores + places[i] * stride_;
      if (!listed) spread(w.lists[i], b.thresholds[i], b.ranges[i], b.width, row);
      if (statistics_) measure(item, first + i, b.ranges[i], b.width, row, extra, numbers);
      if (item.drops() && b.ranges[i].visible > 0) drop(item, first + i, b.ranges[i], !listed, row, w.lists[i], extra);
      if (listed && keys.v)
        add_list(w.lists[i], b.thresholds[i], values != nullptr ? values : gather(keys.v, w.lists[i], w.values),
                 sums + places[i] * width_);
      if (saved) save(b.thresholds[i], numbers, first + i, saved);
    }
    if (dense > 0 && values != nullptr)
      multiply<T>(dense, b.end - b.begin, width_, scores + b.begin, stride_, values + b.begin * width_, width_, sums,
                  width_);
    const Matrix o(call_, ATTNKIT_O, item.index);
    for (int64_t i = 0; o && i < rows; ++i) {
      T *sum = sums + places[i] * width_;
      if (b.ranges[i].visible == 0) std::fill(sum, sum + width_, T{});
      o.write<T>(first + i, 0, plan_.values, sum);
    }
  }

  // Places of the rows of a block, dense ones first; the answer is their number. A row is dense or not by what it sees
  // itself: no other row may change a bit of it (A11).
  int64_t sort(const Rows &b, int64_t rows, const Candidates<T> *lists, int64_t *places) const {
    int64_t dense = 0;
    for (int64_t i = 0; i < rows; ++i)
      places[i] = is_dense(lists[i].count, b.ranges[i].end - b.ranges[i].begin) ? dense++ : -1;
    for (int64_t i = 0, next = dense; i < rows; ++i)
      if (places[i] < 0) places[i] = next++;
    return dense;
  }

  void measure(const Item<T> &item, int64_t i, const Range &r, int64_t width, const T *row, T *extra,
               T *numbers) const {
    RowSums<T> sums;
    std::copy(row, row + width, extra);
    item.hide(i, r, 0, width, -kInfinity<T>, extra);
    sums.add(row, extra, 0, width, true);
    StatisticArrays<T>(call_, item.index).write(i, sums, r.visible > 0 ? T{1} : T{}, r.visible, numbers);
  }

  void drop(const Item<T> &item, int64_t i, const Range &r, bool dense, T *row, Candidates<T> &list, T *extra) const {
    if (dense) {
      item.dropout(i, r.begin, r.end - r.begin, extra + r.begin);
      for (int64_t j = r.begin; j < r.end; ++j) row[j] = row[j] == 0 ? T{} : row[j] * extra[j];
    } else {
      item.dropout(i, list.keys.data(), list.count, extra);
      for (int64_t n = 0; n < list.count; ++n) list.values.data()[n] *= extra[n];
    }
  }

  static void save(const Threshold<T> &at, T *numbers, int64_t i, const Matrix &saved) {
    numbers[kFirst] = at.top;
    numbers[kSecond] = at.tau;
    numbers[kThird] = at.delta;
    numbers[kTotal] = at.inverse;  // Σw itself is 1
    saved.write<T>(i, 0, ATTNKIT_ROW_NUMBERS, numbers);
  }

  // The values of a list, one after the other, which become its keys.
  T *gather(const Matrix &v, Candidates<T> &list, Buffer<T> &buffer) const {
    T *values = buffer.reserve(list.count * width_);
    int32_t *keys = list.keys.data();
    for (int64_t n = 0; n < list.count; ++n) {
      v.read<T>(keys[n], 0, plan_.values, T{1}, values + n * width_, width_);
      keys[n] = static_cast<int32_t>(n);
    }
    return values;
  }

  // sum += Σ p_j v_j over a list.
  void add_list(const Candidates<T> &list, const Threshold<T> &at, const T *values, T *out) const {
    constexpr int W = kLanes<T>;
    const T *p = list.values.data();
    const int32_t *keys = list.keys.data();
    if (at.inverse != at.inverse) std::fill(out, out + width_, at.inverse);
    for (int64_t x = 0; x < width_; x += kVectors * W) {
      const int64_t vectors = std::min<int64_t>(kVectors, (width_ - x) / W);
      if (vectors == kVectors) {
        add_list_of<kVectors>(list.count, p, keys, values + x, out + x);
      } else {
        for (int64_t n = 0; n < vectors; ++n) add_list_of<1>(list.count, p, keys, values + x + n * W, out + x + n * W);
      }
    }
  }

  template <int N>
  void add_list_of(int64_t count, const T *p, const int32_t *keys, const T *values, T *out) const {
    constexpr int W = kLanes<T>;
    Vec<T> even[N] = {}, odd[N] = {};
    int64_t n = 0;
    for (; n + 1 < count; n += 2) {
      const T *a = values + keys[n] * width_, *b = values + keys[n + 1] * width_;
      for (int j = 0; j < N; ++j) even[j] += load(a + j * W) * p[n];
      for (int j = 0; j < N; ++j) odd[j] += load(b + j * W) * p[n + 1];
    }
    for (int j = 0; j < N && n < count; ++j) even[j] += load(values + keys[n] * width_ + j * W) * p[n];
    for (int j = 0; j < N; ++j) store<T>(out + j * W, load(out + j * W) + (even[j] + odd[j]));
  }

  // ------------------------------------------------------------------------------------------- backward

  void pull(const Item<T> &item, const Keys &keys, int64_t first, int64_t rows, Grads &g, Workspace &w) const {
    Rows b;
    T *queries = w.queries.reserve(rows_ * wide_), *scores = reserve_scores(w);
    T *cotangents = w.cotangents.reserve(rows_ * width_), *dq = w.dq.reserve(rows_ * wide_);
    const Matrix d_o(call_, ATTNKIT_DO, item.index), saved(call_, ATTNKIT_ROWS, item.index);
    const bool products = d_o && keys.values != nullptr;
    score(item, keys, first, rows, queries, scores, b, w);
    for (int64_t i = 0; i < rows; ++i) {
      const Exponent<T, kPower> e(alpha(item, first + i));
      restore(e, scores + i * stride_, b.width, saved, first + i, b.thresholds[i], w.lists[i]);
      b.support += w.lists[i].count;
      T *cotangent = cotangents + i * width_;
      std::fill(cotangent, cotangent + width_, T{});
      if (products && b.ranges[i].visible > 0)
        d_o.read<T>(first + i, 0, plan_.values, T{1}, cotangent, width_);
    }
    std::fill(dq, dq + rows * wide_, T{});
    if (is_dense(b.support, rows * b.width)) {
      pull_dense(item, keys, first, rows, b, products, queries, cotangents, scores, dq, g, w);
    } else {
      for (int64_t i = 0; i < rows; ++i)
        pull_list(item, keys, first + i, b.ranges[i], b.thresholds[i], w.lists[i], queries + i * wide_,
                  cotangents + i * width_, dq + i * wide_, g, w);
    }
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t x = 0; x < plan_.features; ++x) dq[i * wide_ + x] *= static_cast<T>(plan_.scale);
      g.dq.write(item.index, 0, first + i, dq + i * wide_);
    }
  }

  // The threshold and the list of a row, from what the forward pass saved if it did.
  void restore(const Exponent<T, kPower> &e, const T *row, int64_t width, const Matrix &saved, int64_t i,
               Threshold<T> &at, Candidates<T> &list) const {
    if (!saved) return solve(e, row, width, at, list);
    T numbers[ATTNKIT_ROW_NUMBERS];
    saved.read<T>(i, 0, ATTNKIT_ROW_NUMBERS, T{1}, numbers, ATTNKIT_ROW_NUMBERS);
    at = {numbers[kFirst], numbers[kSecond], numbers[kThird], numbers[kTotal]};
    list.count = 0;
    if (at.inverse == 0 || at.inverse != at.inverse) return;
    constexpr T kSlack = 16 * std::numeric_limits<T>::epsilon();  // the comparison below rounds as t does not
    const T threshold = at.top + (at.tau + at.delta) / e.above - kSlack * (1 + std::abs(at.top));
    list.collect(row, width, e.softmax ? e.least(at.top) : threshold);
    T *x = list.values.data();
    const int64_t n = list.pad(-kInfinity<T>);
    for (int64_t j = 0; j < n; j += kLanes<T>) store<T>(x + j, (load(x + j) - at.top) * e.above);
    keep(e, at, list);
  }

  T dot(const T *a, const T *b) const {
    Vec<T> total{};
    for (int64_t x = 0; x < width_; x += kLanes<T>) total += load(a + x) * load(b + x);
    return sum<T>(total);
  }
  static ATTNKIT_INLINE void add_row(T by, const T *x, int64_t width, T *y) {
    for (int64_t n = 0; n < width; n += kLanes<T>) store<T>(y + n, load(y + n) + load(x + n) * by);
  }

  void pull_list(const Item<T> &item, const Keys &keys, int64_t i, const Range &r, const Threshold<T> &at,
                 Candidates<T> &list, const T *query, const T *cotangent, T *dq, Grads &g, Workspace &w) const {
    if (at.inverse != at.inverse) return poison(keys, r, at.inverse, dq, g);
    const Exponent<T, kPower> e(alpha(item, i));
    T *tilted = w.extra.reserve(3 * stride_ + 3 * kLanes<T>), *dp = tilted + stride_ + kLanes<T>;
    T *keep = dp + stride_ + kLanes<T>;
    const bool drops = item.drops() && r.visible > 0;
    if (drops) item.dropout(i, list.keys.data(), list.count, keep);
    weigh(e, at, list, tilted);
    const T *p = list.values.data();
    const int32_t *key = list.keys.data();
    T total = 0, inner = 0;
    for (int64_t n = 0; n < list.count; ++n) {
      const T by = drops ? keep[n] : T{1};
      dp[n] = keys.values != nullptr ? by * dot(cotangent, keys.values + key[n] * width_) : T{};
      add_row(p[n] * by, cotangent, width_, g.dv + key[n] * width_);
      total += tilted[n];
      inner += tilted[n] * dp[n];
    }
    const T mean = total > 0 ? inner / total : T{};
    for (int64_t n = 0; n < list.count; ++n) {
      const T ds = tilted[n] * (dp[n] - mean);
      add_row(ds, keys.keys + key[n] * wide_, wide_, dq);
      add_row(ds, query, wide_, g.dk + key[n] * wide_);
      if (g.dbias) g.dbias.add(item.index, i, key[n], 1, &ds);
    }
  }

  // A row with a NaN among its scores gives NaN to all that it sees.
  void poison(const Keys &, const Range &r, T nan, T *dq, Grads &g) const {
    std::fill(dq, dq + wide_, nan);
    std::fill(g.dk + r.begin * wide_, g.dk + r.end * wide_, nan);
    std::fill(g.dv + r.begin * width_, g.dv + r.end * width_, nan);
  }

  void pull_dense(const Item<T> &item, const Keys &keys, int64_t first, int64_t rows, const Rows &b, bool products,
                  const T *queries, const T *cotangents, T *weights, T *dq, Grads &g, Workspace &w) const {
    T *grads = w.grads.reserve(rows_ * stride_);
    if (products && g.value_panels == nullptr) {
      T *panels = w.value_panels.reserve(stride_ * plan_.values);
      pack_panels<T>(keys.v, 0, plan_.keys, plan_.values, plan_.values, keys.seen, w.rows, panels, Nothing<T>());
      g.value_panels = panels;
    }
    if (products) {
      multiply_panels<T>(rows, plan_.values, b.width, cotangents, width_, g.value_panels, grads, stride_);
    } else {
      std::fill(grads, grads + rows * stride_, T{});
    }
    for (int64_t i = 0; i < rows; ++i)
      pull_row(item, first + i, b.ranges[i], b.thresholds[i], b.width, w.lists[i], weights + i * stride_,
               grads + i * stride_, g, w);
    for (int64_t k0 = b.begin; k0 < b.end; k0 += kKeys<T>) {
      const int64_t n = std::min<int64_t>(kKeys<T>, b.end - k0);
      multiply<T>(rows, n, wide_, grads + k0, stride_, keys.keys + k0 * wide_, wide_, dq, wide_);
      multiply_transposed<T>(n, rows, wide_, grads + k0, stride_, queries, wide_, g.dk + k0 * wide_, wide_);
      multiply_transposed<T>(n, rows, width_, weights + k0, stride_, cotangents, width_, g.dv + k0 * width_, width_);
    }
  }

  // A row of a dense block: the scores become weights as they met v, and do vᵀ becomes ds.
  void pull_row(const Item<T> &item, int64_t i, const Range &r, const Threshold<T> &at, int64_t width,
                Candidates<T> &list, T *row, T *dp, Grads &g, Workspace &w) const {
    const Exponent<T, kPower> e(alpha(item, i));
    T *extra = w.extra.reserve(3 * stride_ + 3 * kLanes<T>), *u = extra + stride_;
    const T by = tilt(e, at);
    const Vec<T> least = splat(at.least());
    const bool drops = item.drops() && r.visible > 0;
    if (drops) {
      item.dropout(i, r.begin, r.end - r.begin, extra + r.begin);
      for (int64_t j = r.begin; j < r.end; ++j) dp[j] *= extra[j];
    }
    item.hide(i, r, 0, width, T{}, dp);
    Vec<T> totals{};
    for (int64_t j = 0; j < width; j += kLanes<T>) {
      Vec<T> t = at.above((load(row + j) - at.top) * e.above), low, full;
      if (!e.softmax) t = t > least ? t : Vec<T>{};
      e.raise(t, low, full);
      totals += low * by;
      store<T>(u + j, low * by);
      store<T>(row + j, full * at.inverse);
    }
    if (at.inverse == 0) std::fill(row, row + width, T{}), std::fill(u, u + width, T{}), totals = Vec<T>{};
    if (at.inverse != at.inverse) std::fill(u + r.begin, u + r.end, at.inverse), spread(list, at, r, width, row);
    if (has_statistics_cotangents(call_)) add_statistics(item, i, r, row, width, dp, w);
    const T total = sum<T>(totals);
    if (g.dalpha) g.dalpha.write(item.index, i, alpha_gradient(e, u, row, dp, width, total));
    Vec<T> inners{};
    for (int64_t j = 0; j < width; j += kLanes<T>) inners += load(u + j) * load(dp + j);
    const T mean = total > 0 ? sum<T>(inners) / total : T{};
    for (int64_t j = 0; j < width; j += kLanes<T>) store<T>(dp + j, load(u + j) * (load(dp + j) - mean));
    item.hide(i, r, 0, width, T{}, dp);
    if (drops)
      for (int64_t j = r.begin; j < r.end; ++j) row[j] = row[j] == 0 ? T{} : row[j] * extra[j];
    if (g.dbias && r.visible > 0) g.dbias.add(item.index, i, r.begin, r.end - r.begin, dp + r.begin);
  }

  // The numbers that gradients of statistics need are measured again: they are those of the weights at hand.
  void add_statistics(const Item<T> &item, int64_t i, const Range &r, const T *row, int64_t width, T *dp,
                      Workspace &w) const {
    T numbers[ATTNKIT_ROW_NUMBERS] = {}, *shown = w.extra.data() + 2 * stride_;
    RowSums<T> sums;
    std::copy(row, row + width, shown);
    item.hide(i, r, 0, width, -kInfinity<T>, shown);
    sums.add(row, shown, 0, width, true);
    const bool alive = sums.nonzero > 0;
    numbers[kTotal] = alive ? sums.total : T{1};
    numbers[kEntropy] = alive ? std::log(sums.total) - sums.logs / sums.total : T{};
    numbers[kLargest] = alive ? static_cast<T>(sums.key) : T{-1};
    StatisticCotangents<T>(call_, item.index).add(i, numbers, T{1}, row, 0, width, T{1}, dp);
    item.hide(i, r, 0, width, T{}, dp);
  }

  // dα = Σ dp_j [(p_j - p̃_j)/(α-1)² - (p_j log p_j - p̃_j Σ p log p)/(α-1)], p̃ = u/Σu; at α = 1 its limit
  // -½ Σ dp_j p_j (log² p_j - Σ p log² p).
  static T alpha_gradient(const Exponent<T, kPower> &e, const T *u, const T *p, const T *dp, int64_t width, T total) {
    if (!(total > 0)) return 0;
    T entropy = 0, squares = 0, value = 0;
    const auto logarithm = [p](int64_t j) { return p[j] > 0 ? std::log(p[j]) : T{}; };
    for (int64_t j = 0; j < width; ++j) {
      entropy += p[j] * logarithm(j);
      squares += p[j] * logarithm(j) * logarithm(j);
    }
    for (int64_t j = 0; j < width; ++j) {
      const T tilted = u[j] / total, plogp = p[j] * logarithm(j);
      value += dp[j] * (e.softmax ? T(-0.5) * (plogp * logarithm(j) - p[j] * squares)
                                  : ((p[j] - tilted) / e.above - (plogp - tilted * entropy)) / e.above);
    }
    return value;
  }

  const Call &call_;
  const attnkit_plan &plan_;
  const bool statistics_;
  const Grouping grouping_;
  const int64_t stride_, wide_, width_, rows_;
};

template <class T, int kPower>
void entmax_of(const Call &call) {
  if (call.plan.pass == ATTNKIT_FORWARD) return Entmax<T, kPower>(call).forward();
  if (clear_without_pairs(call)) return;
  Entmax<T, kPower>(call).backward();
}

}  // namespace attnkit
