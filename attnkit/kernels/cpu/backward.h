// The backward sweep. Scores are recomputed tile by tile; with dw = do vᵀ ⊙ dropout and ds from the family's `pull`:
// dq = scale ds k, dk = scale dsᵀ q, dv = (w ⊙ dropout)ᵀ do, dbias = ds; dsink = -Σ_i exp(c - lse_i) (Σ w dw - dlse)_i;
// gates: forgetting.h.
//
// A task owns a split of the keys of a group: it adds up their dk and dv in its own memory and gives dq of its split as
// a part. Splits follow from shapes, and parts are joined in order, so that bits do not depend on threads.
#pragma once

#include "forward.h"
#include "gradients.h"
#include "operands.h"

namespace attnkit {

// Numbers of rows and outputs that the caller does not have: a forward pass into working memory.
template <class T, class Family, bool kPairs>
class Recomputed {
 public:
  Recomputed(const Call &call, bool rows, bool output)
      : plan_(call.plan), needs_(rows || output), call_{plan_, pointers_, call.threads, call.interrupt} {
    if (!needs_) return;
    std::copy(call.arrays, call.arrays + ATTNKIT_ARRAYS, pointers_);
    std::fill(pointers_ + ATTNKIT_O, pointers_ + ATTNKIT_ARRAYS, nullptr);
    lay_out(ATTNKIT_ROWS, ATTNKIT_ROW_NUMBERS, rows_);
    if (output) lay_out(ATTNKIT_O, plan_.values, output_);
    constexpr int kExact = 3;
    Forward<T, Family, kPairs ? kExact : 0>(call_, has_statistics_cotangents(call)).run();
  }

  // An array of this pass where there is one, else the caller's.
  Matrix matrix(const Call &call, int array, const Index &index) const {
    return Matrix(needs_ && call_.has(array) ? call_ : call, array, index);
  }

 private:
  void lay_out(int array, int64_t columns, Buffer<T> &buffer) {
    attnkit_view &view = plan_.arrays[array];
    view = {sizeof(T) == 8 ? ATTNKIT_FLOAT64 : ATTNKIT_FLOAT32, 0, {}, columns, 1};
    int64_t size = columns * plan_.queries;
    for (int axis = ATTNKIT_AXES - 1; axis >= 0; size *= plan_.axes[axis--]) view.axes[axis] = size;
    pointers_[array] = buffer.reserve(size);
  }

  attnkit_plan plan_;
  const bool needs_;
  void *pointers_[ATTNKIT_ARRAYS];
  Call call_;
  Buffer<T> rows_, output_;
};

template <class T, class Family, bool kPairs = false>
class Backward {
 public:
  explicit Backward(const Call &call)
      : call_(call),
        plan_(call.plan),
        statistics_(has_statistics_cotangents(call)),
        products_(call.has(ATTNKIT_DO) && call.has(ATTNKIT_V)),
        recomputed_(call, (Family::kNormalises || statistics_) && !call.has(ATTNKIT_ROWS),
                    Family::kNormalises && products_ && !has_exact_output()),
        grouping_(plan_, [this](int axis) { return joins_keys(plan_, axis) ? 2 : sums_bias(axis) ? 1 : 0; }),
        splits_(split()),
        per_split_(blocks(blocks(plan_.keys, splits_), kPanel<T>) * kPanel<T>),
        dq_(call, ATTNKIT_DQ, plan_.queries, plan_.features, splits_, [](int) { return false; }),
        dk_(call, ATTNKIT_DK, plan_.keys, plan_.features, 1, [this](int axis) { return joins_keys(plan_, axis); }),
        dv_(call, ATTNKIT_DV, plan_.keys, plan_.values, 1, [this](int axis) { return joins_keys(plan_, axis); }),
        dbias_(call),
        dsink_(call, ATTNKIT_DSINK),
        fading_(call),
        dgates_(call) {}

  void run() const {
    parallel(grouping_.groups * splits_, threads_for(call_, 2.5), [this](int64_t task) {
      const int split = static_cast<int>(task / grouping_.groups);
      for (int64_t run = 0; run < grouping_.runs; ++run) serve(task % grouping_.groups, run, split);
    });
    dq_.join();
    dk_.join();
    dv_.join();
    dbias_.finish();
    dsink_.finish();
    dgates_.finish();
  }

 private:
  using Product = std::conditional_t<kPairs, PairedOperands, Operands<T, Family::kDistances>>;

  struct Workspace {
    typename Product::Workspace operands;
    Buffer<T> scores, grads, extra, taken, gates;
    Buffer<double> crossing;
    Buffer<uint8_t> seen;
  };

  // Σ w dw = o·do, but not of an o that was rounded to a half type: dw minus it cancels where a few keys have all the
  // weight, and would leave the rounding.
  bool has_exact_output() const {
    return call_.has(ATTNKIT_O) && size_of(call_.view(ATTNKIT_O).dtype) == static_cast<int64_t>(sizeof(T));
  }

  bool sums_bias(int axis) const { return call_.has(ATTNKIT_DBIAS) && is_sum(plan_, ATTNKIT_DBIAS, axis); }

  // About 16 tasks of at least 512 keys, whose gradients stay in the cache of a core; parts of dq bound their number.
  int split() const {
    if (Family::kBreaksStick || call_.has(ATTNKIT_DLOG_FORGET)) return 1;  // sums run over all keys
    if (call_.has(ATTNKIT_DBIAS) && plan_.arrays[ATTNKIT_DBIAS].column == 0) return 1;
    const int64_t wanted = std::max(blocks(16, std::max<int64_t>(1, grouping_.groups)), blocks(plan_.keys, 1024));
    return static_cast<int>(std::clamp<int64_t>(std::min<int64_t>(wanted, plan_.keys / 512), 1, 16));
  }

  // One run: items with the same k and v, and the keys of one split.
  void serve(int64_t group, int64_t run, int split) const {
    static thread_local Workspace w;
    const Index index = grouping_.index(plan_, group, run, 0);
    const Matrix k(call_, ATTNKIT_K, index), v(call_, ATTNKIT_V, index);
    const uint8_t *seen = w.seen.reserve(plan_.keys);
    if (!seen_keys<T>(call_, grouping_, group, run, w.seen.data())) seen = nullptr;
    const int64_t first = split * per_split_, count = std::clamp<int64_t>(plan_.keys - first, 0, per_split_);
    Product product(plan_, products_, w.operands);
    product.pack(Item<T>(call_, index), k, v, kPairs ? reach<T>(call_, grouping_, group, run) : Range{}, seen, first,
                 count);
    for (int64_t member = 0; member < grouping_.members; ++member) {
      const Item<T> item(call_, grouping_.index(plan_, group, run, member));
      double *crossing = dgates_.begin(w.crossing);
      for (int64_t row = 0; row < plan_.queries; row += kQueries) {
        call_.look();
        block(item, product, {first, first + count, 0}, split, row, std::min<int64_t>(kQueries, plan_.queries - row),
              crossing, w);
      }
      dgates_.write(item, crossing, w.gates);
    }
    for (int64_t j = 0; j < count; ++j) {
      dk_.write(index, 0, first + j, product.key_grad(j));
      dv_.write(index, 0, first + j, product.value_grad(j));
    }
  }

  struct Block {
    Range ranges[kQueries];
    typename Family::Row rows[kQueries];
    T of_query[kQueries], inner[kQueries], before[kQueries], numbers[kQueries][ATTNKIT_ROW_NUMBERS];
    int64_t begin, end;
  };

  void block(const Item<T> &item, Product &product, Range keys, int split, int64_t first, int64_t rows,
             double *crossing, Workspace &w) const {
    constexpr int K = kKeys<T>;
    Block b;
    T *scores = w.scores.reserve(kQueries * K), *grads = w.grads.reserve(kQueries * K);
    prepare(item, product, first, rows, b);
    product.begin(rows);
    for (int64_t i = 0; dsink_ && split == 0 && i < rows; ++i)
      dsink_.write(item.index, first + i, b.ranges[i].visible == 0 ? T{} : -b.numbers[i][kShare] * b.inner[i]);
    const int64_t end = std::min(b.end, keys.end), begin = std::max(b.begin, keys.begin);
    const int64_t start = (begin - keys.begin) / kPanel<T> * kPanel<T> + keys.begin;
    if constexpr (Family::kBreaksStick) take(item, product, first, rows, start, end, b, w);
    for (int64_t k0 = start; k0 < end; k0 += K) {
      const int64_t n = std::min<int64_t>(K, end - k0), at = k0 - keys.begin;
      product.multiply_keys(rows, at, padded<T>(n), scores, grads);
      for (int64_t i = 0; i < rows; ++i) {
        product.finish_scores(b.of_query[i], scores + i * K, padded<T>(n));
        if constexpr (Family::kBreaksStick) b.rows[i].later = w.taken.data()[(k0 - start) / K * kQueries + i];
        pull(item, first + i, b, i, k0, n, scores + i * K, grads + i * K, w);
        if (dgates_) dgates_.add(b.ranges[i], k0, padded<T>(n), grads + i * K, b.before[i], crossing);
      }
      product.add(rows, at, std::max<int64_t>(0, begin - k0), n, scores, grads);
    }
    for (int64_t i = 0; i < rows; ++i) dq_.write(item.index, split, first + i, product.query_grad(i));
  }

  // What keys behind each tile take of the sticks of a block, and the remainders times their cotangents.
  void take(const Item<T> &item, const Product &product, int64_t first, int64_t rows, int64_t start, int64_t end,
            Block &b, Workspace &w) const {
    constexpr int K = kKeys<T>;
    T *scores = w.scores.data(), *taken = w.taken.reserve(std::max<int64_t>(1, blocks(end - start, K)) * kQueries);
    T sums[kQueries] = {};
    for (int64_t tile = blocks(end - start, K) - 1; tile >= 0; --tile) {
      const int64_t k0 = start + tile * K, n = std::min<int64_t>(K, end - k0), width = padded<T>(n);
      product.multiply_scores(rows, k0, width, scores);
      for (int64_t i = 0; i < rows; ++i) {
        T *s = scores + i * K;
        product.finish_scores(b.of_query[i], s, width);
        if (item.bias) item.add_bias(first + i, k0, n, s);
        item.hide(first + i, b.ranges[i], k0, width, Family::kHidden, s);
        taken[tile * kQueries + i] = sums[i];
        sums[i] += Family::take(s, width);
      }
    }
    const Matrix dr(call_, ATTNKIT_DLSE, item.index);
    for (int64_t i = 0; dr && i < rows; ++i)
      if (b.ranges[i].visible > 0) b.rows[i].before = std::exp(-sums[i]) * dr.read<T>(first + i);
  }

  // Rows of a block: q and do; 0 in null rows (A6).
  void prepare(const Item<T> &item, Product &product, int64_t first, int64_t rows, Block &b) const {
    const Matrix d_o(call_, ATTNKIT_DO, item.index), dlse(call_, ATTNKIT_DLSE, item.index);
    const Matrix saved = recomputed_.matrix(call_, ATTNKIT_ROWS, item.index);
    const Matrix o = recomputed_.matrix(call_, ATTNKIT_O, item.index);
    const StatisticCotangents<T> of_statistics(call_, item.index);
    b.begin = plan_.keys;
    b.end = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const Range r = b.ranges[i] = item.range(first + i);
      T *numbers = b.numbers[i];
      product.clear_row(i);
      b.of_query[i] = b.inner[i] = b.before[i] = 0;
      std::fill(numbers, numbers + ATTNKIT_ROW_NUMBERS, T{});
      if (saved) saved.read<T>(first + i, 0, ATTNKIT_ROW_NUMBERS, T{1}, numbers, ATTNKIT_ROW_NUMBERS);
      b.rows[i] = Family::restore(item, first + i, r, numbers);
      if (r.visible == 0) continue;
      b.of_query[i] = product.read_query(item.q, first + i, i);
      b.begin = std::min(b.begin, r.begin);
      b.end = std::max(b.end, r.end);
      const T factor = Family::kNormalises ? T{1} : Family::factor(b.rows[i]);
      const T *cotangent = products_ ? product.read_cotangent(d_o, first + i, i, factor) : nullptr;
      if constexpr (Family::kNormalises) {
        b.inner[i] = Family::inner(of_statistics, first + i, numbers);
        if (products_) b.inner[i] += dot(o, first + i, cotangent);
        if (dlse) b.inner[i] -= dlse.read<T>(first + i);
      }
    }
  }

  T dot(const Matrix &o, int64_t i, const T *cotangent) const {
    static thread_local Buffer<T> buffer;
    const int64_t width = padded<T>(plan_.values);
    T *row = buffer.reserve(width);
    o.read<T>(i, 0, plan_.values, T{1}, row, width);
    Vec<T> total{};
    for (int64_t x = 0; x < width; x += kLanes<T>) total += load(row + x) * load(cotangent + x);
    return sum<T>(total);
  }

  static void multiply_row(T *x, T factor, int64_t width) {
    for (int64_t j = 0; j < width; j += kLanes<T>) store<T>(x + j, load(x + j) * factor);
  }

  // Scores and do vᵀ of query i and the keys k0 .. k0 + n to weights as they met v, and ds.
  void pull(const Item<T> &item, int64_t i, Block &b, int64_t at, int64_t k0, int64_t n, T *s, T *dw,
            Workspace &w) const {
    const Range &r = b.ranges[at];
    const int64_t width = padded<T>(n);
    T *extra = w.extra.reserve(3 * kKeys<T>), *u = extra + kKeys<T>;
    const bool drops = item.drops() && r.visible > 0;
    const T factor = Family::kNormalises ? T{1} : Family::factor(b.rows[at]);
    if (item.bias) item.add_bias(i, k0, n, s);
    if (fading_) fading_.add(item.index, i, k0, n, s);
    if (!Product::kScalesCotangents && factor != 1) multiply_row(dw, factor, width);
    if (drops) {
      item.dropout(i, k0, n, extra);
      for (int64_t j = 0; j < n; ++j) dw[j] *= extra[j];
    }
    if constexpr (Family::kBreaksStick) {
      item.hide(i, r, k0, width, Family::kHidden, s);
      item.hide(i, r, k0, width, T{}, dw);
    }
    if (statistics_) {
      std::copy(s, s + width, u);
      Family::pull(b.rows[at], T{}, u, u + kKeys<T>, k0, width);
      StatisticCotangents<T>(call_, item.index).add(i, b.numbers[at], factor, u, k0, width, factor, dw);
    }
    Family::pull(b.rows[at], b.inner[at], s, dw, k0, width);
    item.hide(i, r, k0, width, T{}, s);
    item.hide(i, r, k0, width, T{}, dw);
    if (!Product::kScalesCotangents && factor != 1) multiply_row(s, factor, width);
    if (drops)
      for (int64_t j = 0; j < n; ++j) s[j] = s[j] == 0 ? T{} : s[j] * extra[j];
    if (dbias_ && r.visible > 0) {
      const int64_t begin = std::max(r.begin, k0), end = std::min(r.end, k0 + n);
      if (begin < end) dbias_.add(item.index, i, begin, end - begin, dw + begin - k0);
    }
  }

  const Call &call_;
  const attnkit_plan &plan_;
  const bool statistics_, products_;
  const Recomputed<T, Family, kPairs> recomputed_;
  const Grouping grouping_;
  const int splits_;
  const int64_t per_split_;
  const Parts<T> dq_, dk_, dv_;
  const BiasGradient<T> dbias_;
  const RowGradient<T> dsink_;
  const Fading<T> fading_;
  const GateGradient<T> dgates_;
};

// A call of a family, in either direction.
template <class T, class Family>
void attend(const Call &call) {
  constexpr bool kPairs = kAddsPairs && std::is_same_v<T, float> && !Family::kDistances;
  if (call.plan.pass == ATTNKIT_FORWARD) {
    if constexpr (kPairs)
      if (is_paired(call)) return Forward<T, Family, 1>(call, wants_statistics(call)).run();
    return Forward<T, Family>(call, wants_statistics(call)).run();
  }
  if (clear_without_pairs(call)) return;
  if constexpr (kPairs)
    if (is_paired(call)) return Backward<T, Family, true>(call).run();
  Backward<T, Family>(call).run();
}

}  // namespace attnkit
