// Packed sequences: each is a call of its own, on the rows between its boundaries.
#pragma once

#include <vector>

#include "kernels.h"
#include "pool.h"

namespace attnkit {

// Arrays of a packed call whose rows are those of the queries, and of the keys.
constexpr int kOfQueries[] = {ATTNKIT_Q,    ATTNKIT_LENGTHS, ATTNKIT_O,    ATTNKIT_LSE,
                              ATTNKIT_ROWS, ATTNKIT_DO,      ATTNKIT_DLSE, ATTNKIT_DQ};
constexpr int kOfKeys[] = {ATTNKIT_K, ATTNKIT_V, ATTNKIT_DK, ATTNKIT_DV};

inline bool is_packed(const attnkit_plan &plan) {
  return plan.arrays[ATTNKIT_EDGES_Q].dtype != ATTNKIT_ABSENT || plan.arrays[ATTNKIT_EDGES_K].dtype != ATTNKIT_ABSENT;
}

// It has both boundaries, and no array whose parts are not known here.
inline bool can_be_packed(const attnkit_plan &plan) {
  int known = 0, there = 0;
  for (const attnkit_view &view : plan.arrays) there += view.dtype != ATTNKIT_ABSENT;
  for (int array : kOfQueries) known += plan.arrays[array].dtype != ATTNKIT_ABSENT;
  for (int array : kOfKeys) known += plan.arrays[array].dtype != ATTNKIT_ABSENT;
  return there == known + 2 && plan.arrays[ATTNKIT_EDGES_Q].dtype != ATTNKIT_ABSENT &&
         plan.arrays[ATTNKIT_EDGES_K].dtype != ATTNKIT_ABSENT && plan.sequences >= 0;
}

inline int64_t edge(const Call &call, int array, int64_t b) {
  const attnkit_view &view = call.view(array);
  return read_integer(view.dtype, static_cast<char *>(call.arrays[array]) + b * view.row * size_of(view.dtype));
}

inline bool edges_rise(const Call &call) {
  for (int array : {ATTNKIT_EDGES_Q, ATTNKIT_EDGES_K}) {
    if (!call.has(array) || edge(call, array, 0) != 0) return false;
    for (int64_t b = 0; b < call.plan.sequences; ++b)
      if (edge(call, array, b + 1) < edge(call, array, b)) return false;
    if (edge(call, array, call.plan.sequences) != (array == ATTNKIT_EDGES_Q ? call.plan.queries : call.plan.keys))
      return false;
  }
  return true;
}

// One of them, on up to `threads` threads.
class Part {
 public:
  Part(const Call &whole, int64_t b, int threads) : plan_(whole.plan), call{plan_, arrays_, threads, whole.interrupt} {
    const int64_t query = edge(whole, ATTNKIT_EDGES_Q, b), key = edge(whole, ATTNKIT_EDGES_K, b);
    plan_.queries = edge(whole, ATTNKIT_EDGES_Q, b + 1) - query;
    plan_.keys = plan_.key_length = edge(whole, ATTNKIT_EDGES_K, b + 1) - key;
    const int64_t shift = plan_.keys - plan_.queries, far = int64_t{1} << 40;
    plan_.lowest = std::max(plan_.lowest, std::max(plan_.before, -far) + shift);
    plan_.highest = std::min(plan_.highest, std::min(plan_.after, far) + shift);
    for (int array : kOfQueries) arrays_[array] = from(whole, array, query);
    for (int array : kOfKeys) arrays_[array] = from(whole, array, key);
  }

  double work() const {
    const double queries = static_cast<double>(plan_.queries), keys = static_cast<double>(plan_.keys);
    const double d = static_cast<double>(plan_.features), e = static_cast<double>(plan_.values);
    const double products = is_linear(plan_) ? (queries + keys) * d * e : queries * keys * (d + e);
    return static_cast<double>(call.items()) * products * (plan_.pass == ATTNKIT_FORWARD ? 1 : 2.5);
  }

 private:
  static void *from(const Call &whole, int array, int64_t row) {
    const attnkit_view &view = whole.view(array);
    return whole.has(array) ? static_cast<char *>(whole.arrays[array]) + row * view.row * size_of(view.dtype) : nullptr;
  }

  attnkit_plan plan_;
  void *arrays_[ATTNKIT_ARRAYS] = {};

 public:
  const Call call;
};

// A sequence that is more than the share of a thread is served by all of them, the others by one each.
template <class Serve>
void serve_each(const Call &call, const Serve &serve) {
  constexpr double kWork = 4e6;  // of a thread, at least
  double all = 0;
  for (int64_t b = 0; b < call.plan.sequences; ++b) all += Part(call, b, 1).work();
  const int threads = static_cast<int>(std::clamp(all / kWork, 1.0, static_cast<double>(std::max(1, call.threads))));
  std::vector<int64_t> small;
  for (int64_t b = 0; b < call.plan.sequences; ++b) {
    const Part part(call, b, threads);
    if (part.work() > all / threads) {
      serve(part.call);
    } else {
      small.push_back(b);
    }
  }
  parallel(static_cast<int64_t>(small.size()), threads, [&](int64_t n) { serve(Part(call, small[n], 1).call); });
}

}  // namespace attnkit
