// A call as kernels see it: items, what a query may see, and rows of arrays in the compute dtype.
//
// An item is one index of the leading axes. Items that have one k and v (heads of a group, broadcast axes) are members
// of a group, which one task serves, so that keys are packed once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attnkit.h"
#include "half.h"
#include "interrupt.h"
#include "philox.h"

namespace attnkit {

struct Index {
  int64_t at[ATTNKIT_AXES];
};

struct Call {
  const attnkit_plan &plan;
  void *const *arrays;
  int threads;
  Interrupt *interrupt = nullptr;

  // Called by every task after some milliseconds of work.
  void look() const {
    if (interrupt != nullptr) interrupt->look();
  }

  bool has(int array) const { return arrays[array] != nullptr; }
  const attnkit_view &view(int array) const { return plan.arrays[array]; }
  int64_t items() const {
    int64_t n = 1;
    for (int64_t size : plan.axes) n *= size;
    return n;
  }
};

// The leading axes in an order of their own: `groups`, within each of them `runs`, and within these `members`.
// level(axis) is 0, 1 or 2 for the three.
struct Grouping {
  int axes[ATTNKIT_AXES], levels[ATTNKIT_AXES];
  int64_t groups = 1, runs = 1, members = 1;

  template <class Level>
  Grouping(const attnkit_plan &plan, const Level &level) {
    int64_t *const counts[] = {&groups, &runs, &members};
    int n = 0;
    for (int wanted = 0; wanted < 3; ++wanted) {
      for (int axis = 0; axis < ATTNKIT_AXES; ++axis) {
        if (level(axis) != wanted) continue;
        axes[n] = axis;
        levels[n++] = wanted;
        *counts[wanted] *= plan.axes[axis];
      }
    }
  }

  Index index(const attnkit_plan &plan, int64_t group, int64_t run, int64_t member) const {
    int64_t rest[] = {group, run, member};
    Index index;
    for (int n = ATTNKIT_AXES - 1; n >= 0; --n) {
      const int64_t size = std::max<int64_t>(1, plan.axes[axes[n]]);  // of an empty axis, the index 0
      index.at[axes[n]] = rest[levels[n]] % size;
      rest[levels[n]] /= size;
    }
    return index;
  }
};

inline bool shares_keys(const attnkit_plan &plan, int axis) {
  return plan.arrays[ATTNKIT_K].axes[axis] == 0 && plan.arrays[ATTNKIT_V].axes[axis] == 0;
}

// Bounds of j - i, near enough to 0 that sums of them and of positions are numbers.
inline int64_t lowest(const attnkit_plan &plan) { return std::max<int64_t>(plan.lowest, -(int64_t{1} << 40)); }
inline int64_t highest(const attnkit_plan &plan) { return std::min<int64_t>(plan.highest, int64_t{1} << 40); }

inline int64_t along(const int64_t *strides, const Index &index) {
  int64_t offset = 0;
  for (int axis = 0; axis < ATTNKIT_AXES; ++axis) offset += strides[axis] * index.at[axis];
  return offset;
}

inline int64_t size_of(int dtype) {
  switch (dtype) {
    case ATTNKIT_FLOAT64:
    case ATTNKIT_INT64:
    case ATTNKIT_UINT64:
      return 8;
    case ATTNKIT_FLOAT32:
    case ATTNKIT_INT32:
    case ATTNKIT_UINT32:
      return 4;
    case ATTNKIT_BFLOAT16:
    case ATTNKIT_FLOAT16:
    case ATTNKIT_INT16:
    case ATTNKIT_UINT16:
      return 2;
    default:
      return 1;
  }
}

// Calls f with a value of the C++ type of a float dtype.
template <class F>
ATTNKIT_INLINE void with_float_type(int dtype, const F &f) {
  switch (dtype) {
    case ATTNKIT_FLOAT64:
      return f(double{});
    case ATTNKIT_FLOAT32:
      return f(float{});
    case ATTNKIT_BFLOAT16:
      return f(BFloat16{});
    default:
      return f(Float16{});
  }
}

// One item's part of an array: its first element, and strides of elements.
struct Matrix {
  char *data = nullptr;
  int dtype = ATTNKIT_ABSENT;
  int64_t row = 0, column = 0;

  Matrix() = default;
  Matrix(const Call &call, int array, const Index &index) {
    const attnkit_view &view = call.view(array);
    if (!call.has(array)) return;
    dtype = view.dtype;
    row = view.row;
    column = view.column;
    data = static_cast<char *>(call.arrays[array]) + along(view.axes, index) * size_of(dtype);
  }

  explicit operator bool() const { return data != nullptr; }

  template <class E>
  E *at(int64_t i, int64_t j) const {
    return reinterpret_cast<E *>(data) + i * row + j * column;
  }

  // Row i, columns j .. j + n, times `factor`, as T; zeros from n to `width`.
  template <class T>
  void read(int64_t i, int64_t j, int64_t n, T factor, T *out, int64_t width) const {
    with_float_type(dtype, [&](auto like) {
      using E = decltype(like);
      const E *from = at<const E>(i, j);
      if (column == 1) {
        for (int64_t x = 0; x < n; ++x) out[x] = static_cast<T>(widen(from[x])) * factor;
      } else {
        for (int64_t x = 0; x < n; ++x) out[x] = static_cast<T>(widen(from[x * column])) * factor;
      }
    });
    std::fill(out + n, out + width, T{});
  }

  template <class T>
  T read(int64_t i) const {
    T x;
    read<T>(i, 0, 1, T{1}, &x, 1);
    return x;
  }

  // Row i, columns j .. j + n, from T.
  template <class T>
  void write(int64_t i, int64_t j, int64_t n, const T *x) const {
    with_float_type(dtype, [&](auto like) {
      using E = decltype(like);
      E *to = at<E>(i, j);
      for (int64_t y = 0; y < n; ++y) to[y * column] = rounded<E>(x[y]);
    });
  }

  template <class T>
  void write(int64_t i, T x) const {
    write<T>(i, 0, 1, &x);
  }

  template <class T>
  bool holds() const {
    return dtype == (sizeof(T) == 8 ? ATTNKIT_FLOAT64 : ATTNKIT_FLOAT32);
  }

  // Rows of `columns` numbers as they lie in memory are an operand of a product that takes `width`: T, contiguous, and a
  // multiple of a vector wide. What lies between shorter rows is not theirs.
  template <class T>
  bool is_operand(int64_t columns, int64_t width) const {
    return holds<T>() && column == 1 && row == width && columns == width && width % kLanes<T> == 0;
  }
};

inline int64_t read_integer(int dtype, const void *p) {
  switch (dtype) {
    case ATTNKIT_INT64:
    case ATTNKIT_UINT64:
      return *static_cast<const int64_t *>(p);
    case ATTNKIT_INT32:
      return *static_cast<const int32_t *>(p);
    case ATTNKIT_UINT32:
      return *static_cast<const uint32_t *>(p);
    case ATTNKIT_INT16:
      return *static_cast<const int16_t *>(p);
    case ATTNKIT_UINT16:
      return *static_cast<const uint16_t *>(p);
    case ATTNKIT_INT8:
      return *static_cast<const int8_t *>(p);
    default:
      return *static_cast<const uint8_t *>(p);
  }
}

// The keys begin <= j < end that a query may see, `visible` of which the mask shows.
struct Range {
  int64_t begin, end, visible;
};

// One item: which keys its queries see, what their bias and dropout are.
template <class T>
struct Item {
  const attnkit_plan &plan;
  Index index;
  Matrix q, bias, mask, query_mask, dropout_mask, lengths;
  int64_t keys;  // those below key_lengths
  uint64_t seed = 0;
  T sink;
  bool drops_by_counter;
  uint32_t head, number;

  Item(const Call &call, const Index &at)
      : plan(call.plan),
        index(at),
        q(call, ATTNKIT_Q, at),
        bias(call, ATTNKIT_BIAS, at),
        mask(call, ATTNKIT_MASK, at),
        query_mask(call, ATTNKIT_QUERY_MASK, at),
        dropout_mask(call, ATTNKIT_DROPOUT_MASK, at),
        lengths(call, ATTNKIT_LENGTHS, at),
        keys(std::min(call.plan.keys, call.plan.key_length)),
        sink(static_cast<T>(call.plan.sink)),
        drops_by_counter(call.has(ATTNKIT_SEED) && call.plan.dropout > 0),
        head(static_cast<uint32_t>(along(call.plan.heads, at))),
        number(static_cast<uint32_t>(along(call.plan.items, at))) {
    if (call.has(ATTNKIT_SINK)) sink = Matrix(call, ATTNKIT_SINK, at).template read<T>(0);
    const Matrix limit(call, ATTNKIT_KEY_LENGTHS, at);
    const int64_t length = limit ? read_integer(limit.dtype, limit.data) : keys;
    const bool beyond = limit.dtype == ATTNKIT_UINT64 && length < 0;  // 2^63 or more
    if (!beyond) keys = std::clamp<int64_t>(length, 0, keys);
    if (drops_by_counter) {
      const int dtype = call.view(ATTNKIT_SEED).dtype;
      const int64_t word = read_integer(dtype, call.arrays[ATTNKIT_SEED]);
      seed = size_of(dtype) == 8 ? static_cast<uint64_t>(word) : static_cast<uint32_t>(word);
    }
  }

  bool drops() const { return drops_by_counter || dropout_mask; }

  Range range(int64_t i) const {
    Range r{std::max<int64_t>(0, i + lowest(plan)), std::min(keys, i + highest(plan) + 1), 0};
    if (query_mask && !*query_mask.at<uint8_t>(i, 0)) r.end = 0;
    if (r.end <= r.begin) return {0, 0, 0};
    r.visible = r.end - r.begin;
    if (mask) r.visible = count(i, r.begin, r.end);
    return r.visible > 0 ? r : Range{0, 0, 0};
  }

  int64_t count(int64_t i, int64_t begin, int64_t end) const {
    const uint8_t *row = mask.at<uint8_t>(i, 0);
    if (mask.column == 0) return row[0] ? end - begin : 0;
    int64_t n = 0;
    if (mask.column == 1) {
      for (int64_t j = begin; j < end; ++j) n += row[j] != 0;
    } else {
      for (int64_t j = begin; j < end; ++j) n += row[j * mask.column] != 0;
    }
    return n;
  }

  // n of A4; 1 where nothing is visible.
  T length(int64_t i, int64_t visible) const {
    if (visible == 0) return 1;
    if (plan.length_kind == ATTNKIT_LENGTH_VISIBLE) return static_cast<T>(visible);
    if (plan.length_kind == ATTNKIT_LENGTH_ALL) return static_cast<T>(plan.keys);
    return plan.length_kind == ATTNKIT_LENGTH_ARRAY ? lengths.read<T>(i) : static_cast<T>(plan.length);
  }

  // Puts `hidden` in place of x[0 .. width) for the keys k0 + j that query i does not see.
  void hide(int64_t i, const Range &r, int64_t k0, int64_t width, T hidden, T *x) const {
    const int64_t begin = std::clamp<int64_t>(r.begin - k0, 0, width), end = std::clamp<int64_t>(r.end - k0, 0, width);
    std::fill(x, x + begin, hidden);
    std::fill(x + std::max(begin, end), x + width, hidden);
    if (!mask || begin >= end) return;
    const uint8_t *row = mask.at<uint8_t>(i, k0);
    if (mask.column == 0) return;  // then it shows the whole row, or `end` is 0
    if (mask.column != 1) {
      for (int64_t j = begin; j < end; ++j)
        if (!row[j * mask.column]) x[j] = hidden;
      return;
    }
    int64_t j = begin;
    for (; j + kLanes<T> <= end; j += kLanes<T>) {
      const Vec<T> y = load(x + j);
      store<T>(x + j, load_mask<T>(row + j) ? y : splat(hidden));
    }
    for (; j < end; ++j) x[j] = row[j] ? x[j] : hidden;
  }

  // x += bias.
  void add_bias(int64_t i, int64_t k0, int64_t n, T *x) const {
    if (bias.column == 1 && bias.template holds<T>()) {
      const T *row = bias.at<const T>(i, k0);
      for (int64_t j = 0; j < n; ++j) x[j] += row[j];
      return;
    }
    with_float_type(bias.dtype, [&](auto like) {
      using E = decltype(like);
      const E *row = bias.at<const E>(i, k0);
      for (int64_t j = 0; j < n; ++j) x[j] += static_cast<T>(widen(row[j * bias.column]));
    });
  }

  // What multiplies the weights of query i just before the product with v: of the keys k0 .. k0 + n.
  void dropout(int64_t i, int64_t k0, int64_t n, T *out) const {
    if (!drops_by_counter) return dropout_mask.read<T>(i, k0, n, T{1}, out, n);
    count(i, n, out, [k0](int64_t m) { return static_cast<uint64_t>(k0 + m); });
  }

  // The same of a list of keys.
  void dropout(int64_t i, const int32_t *keys, int64_t n, T *out) const {
    for (int64_t m = 0; m < n && !drops_by_counter; ++m) dropout_mask.read<T>(i, keys[m], 1, T{1}, out + m, 1);
    if (!drops_by_counter) return;
    count(i, n, out, [keys, n](int64_t m) { return static_cast<uint64_t>(keys[std::min(m, n - 1)]); });
  }

 private:
  // 1/(1 - p) or 0, as the counters of n keys say; key(m) is defined for any m.
  template <class Key>
  void count(int64_t i, int64_t n, T *out, const Key &key) const {
    const T kept = static_cast<T>(1.0 / (1.0 - plan.dropout));
    const uint64_t last = static_cast<uint64_t>(std::ceil((1.0 - plan.dropout) * 4294967296.0) - 1.0);
    constexpr int kAll = kStreams * kCounters;
    for (int64_t m = 0; m < n; m += kAll) {
      uint64_t keys[kAll];
      for (int t = 0; t < kAll; ++t) keys[t] = key(m + t);
      Bits64Vector words[kStreams];
      std::memcpy(words, keys, sizeof words);
      philox(words, static_cast<uint32_t>(i), head, number, seed);
      T factors[kAll];
      for (int s = 0; s < kStreams; ++s) choose(words[s] <= last, kept, factors + s * kCounters);
      std::copy(factors, factors + std::min<int64_t>(kAll, n - m), out + m);
    }
  }
};

// Keys that a query of some member of a group sees (A6), as bytes; false where that is known to be all that is read.
template <class T>
bool seen_keys(const Call &call, const Grouping &grouping, int64_t group, int64_t run, uint8_t *seen) {
  const attnkit_plan &plan = call.plan;
  const bool gaps = call.has(ATTNKIT_QUERY_MASK) && lowest(plan) > -plan.queries;
  if (!call.has(ATTNKIT_MASK) && !gaps) return false;
  std::fill(seen, seen + plan.keys, 0);
  for (int64_t member = 0; member < grouping.members; ++member) {
    const Item<T> item(call, grouping.index(plan, group, run, member));
    for (int64_t i = 0; i < plan.queries; ++i) {
      const Range r = item.range(i);
      if (item.mask && item.mask.column == 1) {
        const uint8_t *row = item.mask.template at<uint8_t>(i, 0);
        for (int64_t j = r.begin; j < r.end; ++j) seen[j] |= row[j];
      } else {
        for (int64_t j = r.begin; j < r.end; ++j)
          seen[j] |= !item.mask || *item.mask.template at<uint8_t>(i, j);
      }
      if (item.mask && item.mask.row == 0 && plan.lowest <= -plan.queries && plan.highest >= plan.keys &&
          !item.query_mask)
        break;  // a key mask: every query sees the same keys
    }
  }
  return true;
}

// The keys begin <= j < end before and after which no query of a group sees one.
template <class T>
Range reach(const Call &call, const Grouping &grouping, int64_t group, int64_t run) {
  Range all{call.plan.keys, 0, 0};
  for (int64_t member = 0; member < grouping.members; ++member) {
    const Item<T> item(call, grouping.index(call.plan, group, run, member));
    for (int64_t i = 0; i < call.plan.queries; ++i) {
      const Range r = item.range(i);
      if (r.visible > 0) all = {std::min(all.begin, r.begin), std::max(all.end, r.end), 0};
    }
  }
  return all;
}

}  // namespace attnkit
