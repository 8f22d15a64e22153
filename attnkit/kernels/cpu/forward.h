// The forward sweep: for a block of queries, tiles of scores become weights while they are in the cache and are
// multiplied by v at once. Memory is O(S d) per thread.
//
// With parts q, k and v are bfloat16, and weights are rounded to so many for the product with v (A7: one, unless the
// output is to be exact); sums are floats.
#pragma once

#include <optional>

#include "forgetting.h"

namespace attnkit {

// Whether the operands of both products are pairs of bfloat16.
inline bool is_paired(const Call &call) {
  const auto pairs = [&](int array) { return call.view(array).dtype == ATTNKIT_BFLOAT16; };
  return call.plan.queries > kFew && pairs(ATTNKIT_Q) && pairs(ATTNKIT_K) &&
         (!call.has(ATTNKIT_V) || pairs(ATTNKIT_V)) && (!call.has(ATTNKIT_DO) || pairs(ATTNKIT_DO));
}

template <class T, class Family, int kParts = 0>
class Forward {
  static constexpr bool kPairs = kParts > 0;

 public:
  Forward(const Call &call, bool statistics)
      : call_(call),
        plan_(call.plan),
        grouping_(plan_, [this](int axis) { return shares_keys(plan_, axis) ? 2 : 0; }),
        width_(padded<T>(plan_.values)),
        statistics_(statistics),
        fading_(call) {}

  // Tasks are groups of items, and chunks of their blocks where there are more threads than groups.
  void run() const {
    const int threads = threads_for(call_, is_few() ? kFewCost : 1);
    const int64_t all = grouping_.members * blocks(plan_.queries, kQueries);
    if (grouping_.groups == 0 || all == 0) return;
    const bool whole = threads == 1 || is_few();
    const int64_t tasks = whole ? 1 : std::min<int64_t>(all, blocks(4 * threads, grouping_.groups));
    const int64_t chunk = blocks(all, tasks), chunks = blocks(all, chunk);
    parallel(grouping_.groups * chunks, threads, [&](int64_t task) {
      const int64_t last = chunks - 1 - task / grouping_.groups;  // later queries have more keys under causality
      serve(task % grouping_.groups, last * chunk, std::min(all, (last + 1) * chunk));
    });
  }

 private:
  using Own = Tokens<T, Family::kDistances>;
  using Packed = std::conditional_t<kPairs, PairedTokens, Own>;
  using E = std::conditional_t<kPairs, Pair, T>;
  static constexpr int kEach = kPairs ? 2 : 1;  // keys that an element of weights or of v stands for
  static constexpr int kStep = kPairs ? 2 * kPairDepth : 1;  // and keys by which products with v go

  struct Workspace {
    Buffer<E> panels, values, rows, queries, parts;
    Buffer<T> tile, sums, extra;
    Buffer<uint8_t> seen;
  };
  struct Operand {  // v, row by row
    const E *data;
    int64_t row;
  };

  bool is_few() const { return grouping_.members * plan_.queries <= kFew; }

  void serve(int64_t group, int64_t first, int64_t last) const {
    static thread_local Workspace w;
    const Index index = grouping_.index(plan_, group, 0, 0);
    const Matrix k(call_, ATTNKIT_K, index), v(call_, ATTNKIT_V, index);
    const uint8_t *seen = w.seen.reserve(plan_.keys);
    if (!seen_keys<T>(call_, grouping_, group, 0, w.seen.data())) seen = nullptr;
    if constexpr (!kPairs) {
      if (is_few()) return few(group, k, v, seen, w);
    }
    Packed tokens(plan_);
    tokens.see(Item<T>(call_, index), k);
    E *panels = w.panels.reserve(blocks(plan_.keys, kPanel<T>) * kPanel<T> * tokens.depth);
    tokens.pack_keys(k, 0, plan_.keys, seen, w.rows, panels);
    const Operand values = v ? operand(v, group, seen, w) : Operand{nullptr, 0};
    const int64_t count = blocks(plan_.queries, kQueries);
    for (int64_t n = first; n < last; ++n) {
      call_.look();
      const Item<T> item(call_, grouping_.index(plan_, group, 0, n / count));
      const int64_t row = n % count * kQueries;
      block(item, tokens, values, row, std::min<int64_t>(kQueries, plan_.queries - row), w);
    }
  }

  Operand operand(const Matrix &v, int64_t group, const uint8_t *seen, Workspace &w) const {
    if constexpr (kPairs) {
      Pair *values = w.values.reserve(pairs(plan_.keys) * width_);
      pack_pairs(v, reach<T>(call_, grouping_, group, 0), 0, plan_.keys, plan_.values, width_, seen, values);
      return {values, width_};
    } else {
      if (seen == nullptr && v.is_operand<T>(plan_.values, width_)) return {v.at<const T>(0, 0), width_};
      T *values = w.values.reserve(plan_.keys * width_);
      pack_rows<T>(v, 0, plan_.keys, plan_.values, width_, seen, values, Nothing<T>());
      return {values, width_};
    }
  }

  struct Block {
    Range ranges[kQueries];
    typename Family::Row rows[kQueries];
    RowSums<T> sums[kQueries];
    T of_query[kQueries];
    int64_t begin, end;  // keys that some query sees
  };

  void block(const Item<T> &item, const Packed &tokens, Operand values, int64_t first, int64_t rows,
             Workspace &w) const {
    constexpr int K = kKeys<T>;
    Block b;
    E *queries = w.queries.reserve(kQueries * tokens.depth);
    T *tile = w.tile.reserve(kQueries * K);
    E *parts = kParts > 1 ? w.parts.reserve(kParts * kQueries * K) : reinterpret_cast<E *>(tile);
    T *sums = w.sums.reserve(kQueries * width_), *extra = w.extra.reserve(2 * K);
    b.begin = plan_.keys;
    b.end = 0;
    prepare(item, tokens, first, rows, queries, b, 0, tokens.depth);
    std::fill(sums, sums + rows * width_, T{});
    for (int64_t k0 = b.begin / kPanel<T> * kPanel<T>; k0 < b.end; k0 += K) {
      const int64_t keys = std::min<int64_t>(K, b.end - k0), width = padded<T>(keys);
      const E *panels = w.panels.data() + k0 * tokens.depth;
      multiply_panels<E>(rows, tokens.depth, width, queries, tokens.depth, panels, tile, K);
      for (int64_t i = 0; i < rows; ++i) {
        T *row = tile + i * K;
        tokens.finish_scores(b.of_query[i], row, width);
        const T rescale = weigh(item, first + i, b, i, k0, keys, row, extra);
        for (int64_t x = 0; rescale != 1 && x < width_; x += kLanes<T>)
          store<T>(sums + i * width_ + x, load(sums + i * width_ + x) * rescale);
        if constexpr (kPairs) split_to_pairs<kParts>(row, width, parts + i * K, kQueries * K);
      }
      const int64_t skip = std::max<int64_t>(0, b.begin - k0) / kStep * (kStep / kEach);
      const int64_t depth = kPairs ? pairs(keys) : keys;
      for (int part = 0; part < std::max(1, kParts) && values.data != nullptr; ++part)
        multiply<E>(rows, depth - skip, width_, parts + part * kQueries * K + skip, K,
                    values.data + (k0 / kEach + skip) * values.row, values.row, sums, width_);
    }
    finish(item, first, rows, b, 0, sums);
  }

  // A few queries, those of all members: keys and values are read once, where they are if they can be.
  void few(int64_t group, const Matrix &k, const Matrix &v, const uint8_t *seen, Workspace &w) const {
    constexpr int K = kKeys<T>;
    Block b;
    const int64_t each = plan_.queries, rows = grouping_.members * each, wide = padded<T>(plan_.features);
    T *queries = w.queries.reserve(kFew * wide), *tile = w.tile.reserve(kFew * K), *sums = w.sums.reserve(kFew * width_);
    T *extra = w.extra.reserve(2 * K);
    const Own tokens(plan_);
    std::optional<Item<T>> items[kFew];
    b.begin = plan_.keys;
    b.end = 0;
    for (int64_t at = 0; at < rows; at += each) {
      const Item<T> &item = items[at / each].emplace(call_, grouping_.index(plan_, group, 0, at / each));
      prepare(item, tokens, 0, each, queries + at * wide, b, at, wide);
    }
    std::fill(sums, sums + rows * width_, T{});
    for (int64_t k0 = b.begin; k0 < b.end; k0 += K) {
      const int64_t keys = std::min<int64_t>(K, b.end - k0), width = padded<T>(keys);
      score_few(tokens, k, k0, keys, queries, rows, w.rows, tile, K);
      for (int64_t i = 0; i < rows; ++i) {
        std::fill(tile + i * K + keys, tile + i * K + width, T{});
        const T rescale = weigh(*items[i / each], i % each, b, i, k0, keys, tile + i * K, extra);
        for (int64_t x = 0; rescale != 1 && x < width_; x += kLanes<T>)
          store<T>(sums + i * width_ + x, load(sums + i * width_ + x) * rescale);
      }
      if (v) add_few(v, k0, keys, rows, seen, tile, w);
    }
    for (int64_t at = 0; at < rows; at += each) finish(*items[at / each], 0, each, b, at, sums + at * width_);
  }

  // Values that nobody sees are passed over: they may hold NaN.
  void add_few(const Matrix &v, int64_t k0, int64_t keys, int64_t rows, const uint8_t *seen, const T *tile,
               Workspace &w) const {
    constexpr int K = kKeys<T>;
    const bool in_place = with_type_in_place<T>(v, plan_.values, [&](auto like) {
      for (int64_t j = 0, end; j < keys; j = end) {
        for (; seen != nullptr && j < keys && !seen[k0 + j];) ++j;
        for (end = seen == nullptr ? keys : j; end < keys && seen[k0 + end];) ++end;
        add_values(rows, width_, end - j, tile + j, K, v.at<const decltype(like)>(k0 + j, 0), v.row, w.sums.data());
      }
    });
    if (in_place) return;
    T *packed = w.values.reserve(K * width_);
    pack_rows<T>(v, k0, keys, plan_.values, width_, seen, packed, Nothing<T>());
    add_values<T, T>(rows, width_, keys, tile, K, packed, width_, w.sums.data());
  }

  // The rows of a block from `at` on: what they see, and their queries times scale. Nothing of a null row is read (A6).
  template <class Operands, class Element>
  void prepare(const Item<T> &item, const Operands &tokens, int64_t first, int64_t rows, Element *queries, Block &b,
               int64_t at, int64_t depth) const {
    for (int64_t i = 0; i < rows; ++i) {
      const Range r = b.ranges[at + i] = item.range(first + i);
      b.rows[at + i] = Family::begin(item, first + i, r);
      b.sums[at + i] = RowSums<T>();
      b.of_query[at + i] = 0;
      Element *query = queries + i * depth;
      if (r.visible == 0) {
        std::fill(query, query + depth, Element{});
        continue;
      }
      b.of_query[at + i] = tokens.read_query(item.q, first + i, query, depth);
      b.begin = std::min(b.begin, r.begin);
      b.end = std::max(b.end, r.end);
    }
  }

  // Scores of query i and the keys k0 .. k0 + keys to weights as they meet v.
  T weigh(const Item<T> &item, int64_t i, Block &b, int64_t at, int64_t k0, int64_t keys, T *row, T *extra) const {
    const Range &r = b.ranges[at];
    const int64_t width = padded<T>(keys);
    if (item.bias) item.add_bias(i, k0, keys, row);
    if (fading_) fading_.add(item.index, i, k0, keys, row);
    if (Family::kHidesScores) item.hide(i, r, k0, width, Family::kHidden, row);
    const T rescale = Family::weigh(b.rows[at], row, k0, width);
    if (!Family::kHidesScores) item.hide(i, r, k0, width, T{}, row);
    if (statistics_) gather(item, i, b, at, k0, width, row, extra, rescale);
    if (item.drops() && r.visible > 0) {
      item.dropout(i, k0, keys, extra);
      for (int64_t j = 0; j < keys; ++j) row[j] = row[j] == 0 ? T{} : row[j] * extra[j];
    }
    return rescale;
  }

  void gather(const Item<T> &item, int64_t i, Block &b, int64_t at, int64_t k0, int64_t width, const T *row, T *extra,
              T rescale) const {
    const T sign = Family::factor(b.rows[at]) < 0 ? T{-1} : T{1};
    if (rescale != 1) b.sums[at].rescale(rescale);
    for (int64_t j = 0; j < width; ++j) extra[j] = sign * row[j];
    item.hide(i, b.ranges[at], k0, width, -kInfinity<T>, extra);
    b.sums[at].add(row, extra, k0, width, call_.has(ATTNKIT_ENTROPY) || call_.has(ATTNKIT_ROWS));
  }

  void finish(const Item<T> &item, int64_t first, int64_t rows, const Block &b, int64_t at, T *sums) const {
    const Matrix o(call_, ATTNKIT_O, item.index), lse(call_, ATTNKIT_LSE, item.index);
    const Matrix saved(call_, ATTNKIT_ROWS, item.index);
    const StatisticArrays<T> statistics(call_, item.index);
    for (int64_t i = 0; i < rows; ++i) {
      const bool null = b.ranges[at + i].visible == 0;
      const T factor = Family::factor(b.rows[at + i]);
      T *sum = sums + i * width_, numbers[ATTNKIT_ROW_NUMBERS] = {};
      for (int64_t x = 0; x < width_; x += kLanes<T>) store<T>(sum + x, null ? Vec<T>{} : load(sum + x) * factor);
      if (o) o.write<T>(first + i, 0, plan_.values, sum);
      if constexpr (Family::kHasLogSumExp)
        if (lse) lse.write<T>(first + i, Family::log_sum_exp(b.rows[at + i]));
      if (statistics_) statistics.write(first + i, b.sums[at + i], null ? T{} : factor, b.ranges[at + i].visible, numbers);
      Family::save(b.rows[at + i], numbers);
      if (saved) saved.write<T>(first + i, 0, ATTNKIT_ROW_NUMBERS, numbers);
    }
  }

  const Call &call_;
  const attnkit_plan &plan_;
  const Grouping grouping_;
  const int64_t width_;
  const bool statistics_;
  const Fading<T> fading_;
};

}  // namespace attnkit
