// Tokens of linear attention: which take part (A6), from the ends of the masks alone, and the segments in which they are
// read. No pair is looked at.
//
// Key j stands at position j and query i at position i + shift, where it sees all keys up to its own position. Without
// causality queries stand behind the last key.
#pragma once

#include <vector>

#include "gradients.h"
#include "level.h"
#include "recurrence.h"

namespace attnkit {

constexpr int64_t kSegment = 64;  // tokens whose rows stay in the cache of a core

// Positions begin .. begin + count: of keys, of queries or of both.
struct Segment {
  int64_t begin, count;
  bool keys, queries;
};

inline int64_t shift_of(const attnkit_plan &plan) { return std::min(highest(plan), plan.keys); }

inline std::vector<Segment> segments(const attnkit_plan &plan, int64_t longest = kSegment) {
  const int64_t shift = shift_of(plan), end = std::max(plan.keys, shift + plan.queries);
  const int64_t borders[] = {0, plan.keys, shift, shift + plan.queries};
  std::vector<Segment> found;
  for (int64_t at = std::min<int64_t>(0, shift); at < end;) {
    int64_t next = std::min(end, at + longest);
    for (int64_t border : borders)
      if (border > at) next = std::min(next, border);
    const bool keys = at >= 0 && at < plan.keys, queries = at >= shift && at < shift + plan.queries;
    if (keys || queries) found.push_back({at, next - at, keys, queries});
    at = next;
  }
  return found;
}

template <class T>
class Shown {
 public:
  // `keeps`: keys that no query sees count as well, for a state.
  Shown(const Item<T> &item, bool stateful, bool keeps)
      : item_(item), shift_(shift_of(item.plan)), stateful_(stateful), keeps_(keeps) {
    while (first_ < item.keys && !valid(first_)) ++first_;
    if (first_ == item.keys) first_ = item.plan.keys + shift_ + item.plan.queries;  // beyond what anybody sees
    last_ = item.plan.queries - 1;
    while (last_ >= 0 && !unmasked(last_)) --last_;
  }

  // Query i sees a key or a state.
  bool query(int64_t i) const { return unmasked(i) && (stateful_ || first_ <= i + shift_); }

  // Some query sees key j, or a state keeps it.
  bool key(int64_t j) const { return valid(j) && (keeps_ || (last_ >= 0 && j - shift_ <= last_)); }

  // Key j is not hidden, whatever order and queries say: it decays.
  bool valid(int64_t j) const { return j < item_.keys && (!item_.mask || *item_.mask.template at<uint8_t>(0, j)); }

 private:
  bool unmasked(int64_t i) const { return !item_.query_mask || *item_.query_mask.template at<uint8_t>(i, 0); }

  const Item<T> &item_;
  const int64_t shift_;
  const bool stateful_, keeps_;
  int64_t first_ = 0, last_ = 0;  // the first valid key and the last query
};

// The part of a state, returned or a cotangent, whose strides say which axes the state has: not S where another is
// there, for without values S is empty and has no strides.
inline int part_of_state(const Call &call, int state, int normaliser, int level) {
  return call.has(normaliser) ? normaliser : call.has(level) ? level : state;
}

// The first of the items that have one part of an array, which writes it or counts it.
inline bool is_first(const attnkit_plan &plan, int array, const Index &index) {
  for (int axis = 0; axis < ATTNKIT_AXES; ++axis)
    if (plan.arrays[array].axes[axis] == 0 && index.at[axis] != 0) return false;
  return plan.arrays[array].dtype != ATTNKIT_ABSENT;
}

// An item of linear attention, its arrays and which of its tokens take part. For a state that is returned, keys are kept
// that no query sees.
template <class T>
struct Sequence {
  Item<T> item;
  Matrix k, v, state, normaliser, level;
  bool keeps;
  Shown<T> shown;

  Sequence(const Call &call, const Index &index)
      : item(call, index),
        k(call, ATTNKIT_K, index),
        v(call, ATTNKIT_V, index),
        state(call, ATTNKIT_STATE, index),
        normaliser(call, ATTNKIT_NORMALISER, index),
        level(call, ATTNKIT_LEVEL, index),
        keeps(is_first(call.plan,
                       call.plan.pass == ATTNKIT_FORWARD
                           ? part_of_state(call, ATTNKIT_FINAL_STATE, ATTNKIT_FINAL_NORMALISER, ATTNKIT_FINAL_LEVEL)
                           : part_of_state(call, ATTNKIT_DFINAL_STATE, ATTNKIT_DFINAL_NORMALISER, ATTNKIT_DFINAL_LEVEL),
                       index)),
        shown(item, static_cast<bool>(state), keeps) {}
};

inline Index item_index(const attnkit_plan &plan, int64_t item) {
  return Grouping(plan, [](int) { return 0; }).index(plan, item, 0, 0);
}

// Gradients of linear attention. Tokens have `features` numbers, S has `count` rows and a state `levels` levels.
template <class T>
struct TokenGradients {
  const Parts<T> q, k, v, state, normaliser, level, decay;

  TokenGradients(const Call &call, int64_t features, int64_t count, int64_t levels)
      : q(call, ATTNKIT_DQ, call.plan.queries, features, 1, apart),
        k(call, ATTNKIT_DK, call.plan.keys, features, 1, apart),
        v(call, ATTNKIT_DV, call.plan.keys, call.plan.values, 1, apart),
        state(call, ATTNKIT_DSTATE, count, call.plan.values, 1, apart),
        normaliser(call, ATTNKIT_DNORMALISER, 1, count, 1, apart),
        level(call, ATTNKIT_DLEVEL, 1, levels, 1, apart),
        decay(call, ATTNKIT_DLOG_DECAY, 1, has_one_decay(call) ? 1 : call.plan.keys, 1, apart) {}

  // One number for all tokens.
  static bool has_one_decay(const Call &call) { return call.view(ATTNKIT_DLOG_DECAY).column == 0; }

  void join() const {
    for (const Parts<T> *parts : {&q, &k, &v, &state, &normaliser, &level, &decay}) parts->join();
  }

 private:
  static bool apart(int) { return false; }
};

// Writes the state after all keys: rows of S lie `wide` numbers apart.
template <class T>
void write_final_state(const Call &call, const Index &index, const T *sums, int64_t wide, const T *z, int64_t count,
                       const T *level, int64_t levels) {
  const Matrix state(call, ATTNKIT_FINAL_STATE, index), normaliser(call, ATTNKIT_FINAL_NORMALISER, index);
  const Matrix of_level(call, ATTNKIT_FINAL_LEVEL, index);
  for (int64_t f = 0; f < count && state; ++f) state.write<T>(f, 0, call.plan.values, sums + f * wide);
  if (normaliser) normaliser.write<T>(0, 0, count, z);
  if (of_level) of_level.write<T>(0, 0, levels, level);
}

// Threads that there is work for: two products of an f x e state a token, and a third of rounding errors.
inline int threads_for_states(const Call &call, int64_t features, double sweeps) {
  const attnkit_plan &plan = call.plan;
  const double tokens = static_cast<double>(call.items()) * static_cast<double>(plan.queries + plan.keys);
  const double work = 1.5 * sweeps * tokens * static_cast<double>(features) * static_cast<double>(plan.values);
  return static_cast<int>(std::clamp(work / 4e6, 1.0, static_cast<double>(std::max(1, call.threads))));
}

// Rows of the tokens of a segment in working memory: those that `take` part, zeros for the others.
template <class T, class Takes>
void read_rows(const Matrix &x, int64_t first, int64_t n, int64_t count, int64_t width, T *out, const Takes &takes) {
  for (int64_t i = 0; i < n; ++i) {
    T *row = out + i * width;
    if (takes(first + i)) {
      x.read<T>(first + i, 0, count, T{1}, row, width);
    } else {
      std::fill(row, row + width, T{});
    }
  }
}

// An f x e matrix of a state, or its transpose, as rows of `width` numbers.
template <class T>
void read_state(const Matrix &x, bool transposed, int64_t features, int64_t values, T *out, int64_t width) {
  Buffer<T> row(values);
  for (int64_t f = 0; f < features; ++f) {
    x.read<T>(f, 0, values, T{1}, row.data(), values);
    for (int64_t e = 0; e < values; ++e) out[transposed ? e * width + f : f * width + e] = row.data()[e];
  }
}

// Σ a b in double, for sums that others cancel; several sums side by side, for one waits for each of its additions.
template <class T>
double product(const T *a, const T *b, int64_t n) {
  constexpr int kSums = 16;
  double sums[kSums] = {}, sum = 0;
  int64_t x = 0;
  for (; x + kSums <= n; x += kSums)
    for (int at = 0; at < kSums; ++at) sums[at] += static_cast<double>(a[x + at]) * static_cast<double>(b[x + at]);
  for (; x < n; ++x) sum += static_cast<double>(a[x]) * static_cast<double>(b[x]);
  for (int at = 0; at < kSums; ++at) sum += sums[at];
  return sum;
}

// Rows of the one number x.
template <class T>
Rows<T> constant(const T &x) {
  return {&x, 0};
}

// One segment of a recurrence, whichever of its tokens add to the sums and draw from them.
template <class T>
void move(RunningSums<T> &sums, bool adds, bool draws, int64_t n, Rows<T> x, Rows<T> y, Rows<T> c,
          const Fades<T> &fades, T *out, int64_t stride) {
  if (adds && draws) return sums.recur(n, x, y, c, fades, out, stride);
  if (adds || fades.kind != Fading::kNone) sums.add(adds ? n : 0, y, c, fades);
  if (draws) sums.draw(n, x, out, stride);
}

}  // namespace attnkit
