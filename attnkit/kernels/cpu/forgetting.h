// Forgetting attention: what the gates of tokens between key and query take from a score, and the gradients of the gates.
#pragma once

#include "gradients.h"

namespace attnkit {

// Whether a token is hidden from all queries, so that its gate is read as 0.
template <class T>
bool hides_token(const Item<T> &item, int64_t j) {
  return j >= item.keys || (item.plan.hides_tokens && item.mask && !*item.mask.template at<uint8_t>(0, j));
}

// c_i - c_j for key j and the token of query i, c the running sum of gates to twice the digits of T: small gates count
// behind thousands of large ones.
template <class T>
class Fading {
 public:
  explicit Fading(const Call &call) : plan_(call.plan) {
    if (!call.has(ATTNKIT_LOG_FORGET) || call.items() == 0) return;
    int64_t sums = 1;
    for (int axis = ATTNKIT_AXES - 1; axis >= 0; --axis) {
      strides_[axis] = is_alike(axis) ? 0 : sums * kParts * plan_.keys;
      if (strides_[axis] != 0) sums *= plan_.axes[axis];
    }
    sums_.reserve(sums * kParts * plan_.keys);
    const Grouping grouping(plan_, [this](int axis) { return strides_[axis] == 0 ? 2 : 0; });
    parallel(grouping.groups, threads_for(call, 0.1), [&](int64_t group) {
      add_up(call, Item<T>(call, grouping.index(plan_, group, 0, 0)));
    });
  }

  explicit operator bool() const { return sums_.data() != nullptr; }

  // s += c_i - c_j for keys j = k0 .. k0 + n up to the query's own.
  void add(const Index &index, int64_t i, int64_t k0, int64_t n, T *s) const {
    const int64_t at = i + plan_.keys - plan_.queries, count = std::min(n, at + 1 - k0);
    const double *c = sums_.data() + along(strides_, index), *lost = c + plan_.keys;
    for (int64_t j = 0; j < count; ++j) {
      double difference = c[at] - c[k0 + j];
      if constexpr (kParts == 2) difference += lost[at] - lost[k0 + j];
      s[j] += static_cast<T>(difference);
    }
  }

 private:
  static constexpr int kParts = sizeof(T) == 8 ? 2 : 1;

  bool is_alike(int axis) const {
    if (plan_.axes[axis] == 1) return true;
    for (int array : {ATTNKIT_LOG_FORGET, ATTNKIT_KEY_LENGTHS, ATTNKIT_MASK})
      if (plan_.arrays[array].axes[axis] != 0) return false;
    return true;
  }

  void add_up(const Call &call, const Item<T> &item) {
    double *c = sums_.data() + along(strides_, item.index), total = 0, lost = 0;
    Matrix(call, ATTNKIT_LOG_FORGET, item.index).read<double>(0, 0, plan_.keys, 1.0, c, plan_.keys);
    for (int64_t j = 0; j < plan_.keys; ++j) {
      const double gate = hides_token(item, j) ? 0 : c[j], sum = total + gate, part = sum - total;
      lost += (total - (sum - part)) + (gate - part);  // what rounding took, exactly
      c[j] = total = sum;
      if (kParts == 2) c[plan_.keys + j] = lost;
    }
  }

  const attnkit_plan &plan_;
  int64_t strides_[ATTNKIT_AXES] = {};
  Buffer<double> sums_;
};

// dlog_forget_l = Σ_{i >= l > j} ds_ij: in every row the sum over the keys before l, whose summands are those of l, where
// sums of whole rows and columns would cancel.
template <class T>
class GateGradient {
 public:
  explicit GateGradient(const Call &call)
      : call_(call), parts_(call, ATTNKIT_DLOG_FORGET, 1, call.plan.keys, 1, [](int) { return false; }) {}

  explicit operator bool() const { return call_.has(ATTNKIT_DLOG_FORGET); }

  // Sums of an item, which one task has.
  double *begin(Buffer<double> &buffer) const {
    if (!*this) return nullptr;
    double *sums = buffer.reserve(call_.plan.keys);
    std::fill(sums, sums + call_.plan.keys, 0.0);
    return sums;
  }

  // Adds what a row has to the gates k0 .. k0 + width; `before` is the sum over the keys before k0, and becomes that
  // over the keys before k0 + width.
  static void add(const Range &r, int64_t k0, int64_t width, const T *ds, T &before, double *sums) {
    constexpr auto lanes = std::make_integer_sequence<int, kLanes<T>>();
    const int64_t end = std::min(width, r.end - k0);  // behind the query's own token none crosses it
    for (int64_t j = 0; j < end; j += kLanes<T>) {
      const Vec<T> until = running_sums<T, -1>(load(ds + j));
      T crossing[kLanes<T>];
      store<T>(crossing, moved<-1>(until, lanes) + before);
      const int64_t count = std::min<int64_t>(kLanes<T>, end - j);
      for (int64_t l = 0; l < count; ++l) sums[k0 + j + l] += crossing[l];
      before += until[kLanes<T> - 1];
    }
  }

  void write(const Item<T> &item, const double *sums, Buffer<T> &buffer) const {
    if (!*this) return;
    T *row = buffer.reserve(call_.plan.keys);
    for (int64_t j = 0; j < call_.plan.keys; ++j) row[j] = hides_token(item, j) ? T{} : static_cast<T>(sums[j]);
    parts_.write(item.index, 0, 0, row);
  }

  void finish() const { parts_.join(); }

 private:
  const Call &call_;
  const Parts<T> parts_;
};

}  // namespace attnkit
