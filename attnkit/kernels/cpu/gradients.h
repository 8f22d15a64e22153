// Where gradients are added up: their arrays themselves, or parts in working memory that are joined in a fixed order.
#pragma once

#include "engine.h"

namespace attnkit {

// A view has stride 0 along axes and rows along which its gradient is a sum.
inline bool is_sum(const attnkit_plan &plan, int array, int axis) {
  return plan.axes[axis] != 1 && plan.arrays[array].axes[axis] == 0;
}

// Items along an axis have one k and one v, and one part of each gradient of these that is asked for. Where k and v are
// broadcast and their gradients are not, every item has a part of its own.
inline bool joins_keys(const attnkit_plan &plan, int axis) {
  const auto has_one = [&](int array) {
    return plan.arrays[array].dtype == ATTNKIT_ABSENT || plan.arrays[array].axes[axis] == 0;
  };
  return shares_keys(plan, axis) && has_one(ATTNKIT_DK) && has_one(ATTNKIT_DV);
}

// Sets an array to 0. `rows` and `columns` are its extents where it has strides along them.
inline void clear(const Call &call, int array, int64_t rows, int64_t columns) {
  if (!call.has(array)) return;
  const attnkit_plan &plan = call.plan;
  const attnkit_view &view = call.view(array);
  const Grouping grouping(plan, [&](int axis) { return view.axes[axis] == 0 ? 2 : 0; });
  const double zero = 0;
  for (int64_t group = 0; group < grouping.groups; ++group) {
    const Matrix x(call, array, grouping.index(plan, group, 0, 0));
    for (int64_t i = 0; i < (view.row == 0 ? 1 : rows); ++i)
      for (int64_t j = 0; j < (view.column == 0 ? 1 : columns); ++j) x.write(i, j, 1, &zero);
  }
}

// A call without pairs has gradients of 0; whether it was one.
inline bool clear_without_pairs(const Call &call) {
  const attnkit_plan &plan = call.plan;
  if (call.items() > 0 && plan.queries > 0 && plan.keys > 0) return false;
  clear(call, ATTNKIT_DQ, plan.queries, plan.features);
  clear(call, ATTNKIT_DK, plan.keys, plan.features);
  clear(call, ATTNKIT_DV, plan.keys, plan.values);
  clear(call, ATTNKIT_DBIAS, plan.queries, plan.keys);
  clear(call, ATTNKIT_DALPHA, plan.queries, 1);
  clear(call, ATTNKIT_DSINK, 1, 1);
  clear(call, ATTNKIT_DLOG_FORGET, 1, plan.keys);
  return true;
}

// The gradient of q, k or v: one part (rows x columns) for each index of the axes that are not `joined` within a task,
// and for each split of the keys. Where there is one part, it is written to the array at once.
template <class T>
class Parts {
 public:
  template <class Joined>
  Parts(const Call &call, int array, int64_t rows, int64_t columns, int splits, const Joined &joined)
      : call_(call), array_(array), rows_(rows), columns_(columns), splits_(splits), direct_(splits == 1) {
    int64_t parts = 1;
    for (int axis = ATTNKIT_AXES - 1; axis >= 0; --axis) {
      joined_[axis] = joined(axis);
      strides_[axis] = joined_[axis] ? 0 : parts;
      if (joined_[axis]) continue;
      parts *= call.plan.axes[axis];
      if (is_sum(call.plan, array, axis)) direct_ = false;
    }
    if (call.has(array) && !direct_) parts_.reserve(parts * splits * rows * columns);
  }

  // Row i of one part.
  void write(const Index &index, int split, int64_t i, const T *row) const {
    if (!call_.has(array_)) return;
    if (direct_) return Matrix(call_, array_, index).write(i, 0, columns_, row);
    std::copy(row, row + columns_, part(index, split) + i * columns_);
  }

  // Adds the parts up, in the order of their indices.
  void join() const {
    if (!call_.has(array_) || direct_) return;
    const attnkit_plan &plan = call_.plan;
    const Grouping grouping(plan, [&](int axis) { return plan.arrays[array_].axes[axis] == 0 ? 2 : 0; });
    constexpr int64_t kChunk = 256;
    const int64_t chunks = blocks(rows_, kChunk);
    parallel(grouping.groups * chunks, call_.threads, [&](int64_t task) {
      static thread_local Buffer<T> sum;
      sum.reserve(columns_);
      const int64_t group = task / chunks, first = task % chunks * kChunk;
      const Matrix target(call_, array_, grouping.index(plan, group, 0, 0));
      for (int64_t i = first; i < std::min(rows_, first + kChunk); ++i) {
        std::fill(sum.data(), sum.data() + columns_, T{});
        for (int64_t member = 0; member < grouping.members; ++member)
          add(grouping.index(plan, group, 0, member), i, sum.data());
        target.write(i, 0, columns_, sum.data());
      }
    });
  }

 private:
  T *part(const Index &index, int split) const {
    return parts_.data() + (along(strides_, index) * splits_ + split) * rows_ * columns_;
  }

  void add(const Index &index, int64_t i, T *sum) const {
    for (int axis = 0; axis < ATTNKIT_AXES; ++axis)
      if (joined_[axis] && index.at[axis] != 0) return;
    for (int split = 0; split < splits_; ++split) {
      const T *row = part(index, split) + i * columns_;
      for (int64_t x = 0; x < columns_; ++x) sum[x] += row[x];
    }
  }

  const Call &call_;
  const int array_;
  const int64_t rows_, columns_;
  const int splits_;
  bool direct_, joined_[ATTNKIT_AXES];
  int64_t strides_[ATTNKIT_AXES];
  Buffer<T> parts_;
};

// The gradient of the bias, added up in the compute dtype. One task at a time adds to an entry.
template <class T>
class BiasGradient {
 public:
  explicit BiasGradient(const Call &call) : call_(call), view_(call.view(ATTNKIT_DBIAS)), plan_(call.plan) {
    if (!call.has(ATTNKIT_DBIAS)) return;
    data_ = static_cast<T *>(call.arrays[ATTNKIT_DBIAS]);
    if (view_.dtype == (sizeof(T) == 8 ? ATTNKIT_FLOAT64 : ATTNKIT_FLOAT32)) {
      clear(call, ATTNKIT_DBIAS, plan_.queries, plan_.keys);
      return;
    }
    int64_t size = 1;
    const auto dense = [&size](int64_t &stride, int64_t n) {
      if (stride == 0) return;
      stride = size;
      size *= n;
    };
    dense(view_.column, plan_.keys);
    dense(view_.row, plan_.queries);
    for (int axis = ATTNKIT_AXES - 1; axis >= 0; --axis) dense(view_.axes[axis], plan_.axes[axis]);
    data_ = sums_.reserve(size);
    std::fill(data_, data_ + size, T{});
  }

  explicit operator bool() const { return data_ != nullptr; }

  void add(const Index &index, int64_t i, int64_t j, int64_t n, const T *ds) const {
    T *to = data_ + along(view_.axes, index) + i * view_.row + j * view_.column;
    if (view_.column == 1) {
      for (int64_t x = 0; x < n; ++x) to[x] += ds[x];
    } else {
      for (int64_t x = 0; x < n; ++x) to[x * view_.column] += ds[x];
    }
  }

  // Rounds the sums to the dtype of the bias.
  void finish() const {
    if (data_ == nullptr || sums_.data() == nullptr) return;
    const attnkit_view &target = call_.view(ATTNKIT_DBIAS);
    const Grouping grouping(plan_, [&](int axis) { return target.axes[axis] == 0 ? 2 : 0; });
    for (int64_t group = 0; group < grouping.groups; ++group) {
      const Index index = grouping.index(plan_, group, 0, 0);
      const Matrix to(call_, ATTNKIT_DBIAS, index);
      const T *from = data_ + along(view_.axes, index);
      for (int64_t i = 0; i < (view_.row == 0 ? 1 : plan_.queries); ++i)
        for (int64_t j = 0; j < (view_.column == 0 ? 1 : plan_.keys); ++j)
          to.write(i, j, 1, from + i * view_.row + j * view_.column);
    }
  }

 private:
  const Call &call_;
  attnkit_view view_;
  const attnkit_plan &plan_;
  T *data_ = nullptr;
  Buffer<T> sums_;
};

// The gradient of an array with one number per query or per item, added up at the end along the axes where that is one number.
template <class T>
class RowGradient {
 public:
  RowGradient(const Call &call, int array) : call_(call), array_(array) {
    if (!call.has(array)) return;
    int64_t size = call.plan.queries;
    for (int axis = ATTNKIT_AXES - 1; axis >= 0; size *= call.plan.axes[axis--]) strides_[axis] = size;
    numbers_.reserve(size);
  }

  explicit operator bool() const { return numbers_.data() != nullptr; }

  void write(const Index &index, int64_t i, T x) const { numbers_.data()[along(strides_, index) + i] = x; }

  void finish() const {
    if (numbers_.data() == nullptr) return;
    const attnkit_plan &plan = call_.plan;
    const attnkit_view &view = call_.view(array_);
    const Grouping grouping(plan, [&](int axis) { return view.axes[axis] == 0 ? 2 : 0; });
    const bool all = view.row == 0;
    for (int64_t group = 0; group < grouping.groups; ++group) {
      const Matrix target(call_, array_, grouping.index(plan, group, 0, 0));
      for (int64_t first = 0; first < (all ? 1 : plan.queries); ++first) {
        double sum = 0;  // of more numbers than a float adds up well
        for (int64_t member = 0; member < grouping.members; ++member) {
          const T *row = numbers_.data() + along(strides_, grouping.index(plan, group, 0, member));
          for (int64_t i = first; i < (all ? plan.queries : first + 1); ++i) sum += row[i];
        }
        target.write<T>(first, static_cast<T>(sum));
      }
    }
  }

 private:
  const Call &call_;
  const int array_;
  int64_t strides_[ATTNKIT_AXES];
  Buffer<T> numbers_;
};

}  // namespace attnkit
