// What comes into the library: how many elements each array of a call has, and which pointers may be NULL.
#pragma once

#include <cstdint>

#include "call.h"

namespace attnkit {

// The sizes of an array beside the leading axes.
struct Extent {
  int64_t rows, columns;
};

inline int64_t features_of_state(const attnkit_plan &plan) {
  return plan.op == ATTNKIT_PERFORMER ? plan.projected : plan.features + (plan.op == ATTNKIT_COSINE ? 1 : 0);
}

inline Extent extent(const attnkit_plan &plan, int array) {
  switch (array) {
    case ATTNKIT_Q:
    case ATTNKIT_DQ:
      return {plan.queries, plan.features};
    case ATTNKIT_K:
    case ATTNKIT_DK:
    case ATTNKIT_LOG_GATE:
    case ATTNKIT_DLOG_GATE:
      return {plan.keys, plan.features};
    case ATTNKIT_V:
    case ATTNKIT_DV:
      return {plan.keys, plan.values};
    case ATTNKIT_BIAS:
    case ATTNKIT_MASK:
    case ATTNKIT_DROPOUT_MASK:
    case ATTNKIT_DBIAS:
      return {plan.queries, plan.keys};
    case ATTNKIT_KEY_LENGTHS:
    case ATTNKIT_SEED:
    case ATTNKIT_SINK:
    case ATTNKIT_DSINK:
      return {1, 1};
    case ATTNKIT_PROJECTION:
      return {plan.projected, plan.features};
    case ATTNKIT_STATE:
    case ATTNKIT_FINAL_STATE:
    case ATTNKIT_DFINAL_STATE:
    case ATTNKIT_DSTATE:
      return {features_of_state(plan), plan.values};
    case ATTNKIT_NORMALISER:
    case ATTNKIT_FINAL_NORMALISER:
    case ATTNKIT_DFINAL_NORMALISER:
    case ATTNKIT_DNORMALISER:
      return {1, features_of_state(plan)};
    case ATTNKIT_LEVEL:
    case ATTNKIT_FINAL_LEVEL:
    case ATTNKIT_DFINAL_LEVEL:
    case ATTNKIT_DLEVEL:
      return {1, plan.op == ATTNKIT_PERFORMER ? 1 : features_of_state(plan)};
    case ATTNKIT_LOG_DECAY:
    case ATTNKIT_DLOG_DECAY:
    case ATTNKIT_LOG_FORGET:
    case ATTNKIT_DLOG_FORGET:
    case ATTNKIT_BETA:
    case ATTNKIT_DBETA:
      return {1, plan.keys};
    case ATTNKIT_EDGES_Q:
    case ATTNKIT_EDGES_K:
      return {plan.sequences + 1, 1};
    case ATTNKIT_O:
    case ATTNKIT_DO:
      return {plan.queries, plan.values};
    case ATTNKIT_ROWS:
      return {plan.queries, ATTNKIT_ROW_NUMBERS};
    default:
      return {plan.queries, 1};
  }
}

// The numbers that an array has in memory; along an axis with stride 0 it has one, also where the call has none.
inline int64_t elements(const attnkit_plan &plan, int array) {
  const attnkit_view &view = plan.arrays[array];
  const Extent own = extent(plan, array);
  int64_t count = 1;
  const auto times = [&count](int64_t size, int64_t stride) {
    count *= stride == 0 ? 1 : size;
  };
  times(own.rows, view.row);
  times(own.columns, view.column);
  for (int axis = 0; axis < ATTNKIT_AXES; ++axis) times(plan.axes[axis], view.axes[axis]);
  return count;
}

inline bool is_output(const attnkit_plan &plan, int array) {
  return plan.pass == ATTNKIT_FORWARD ? array >= ATTNKIT_O && array < ATTNKIT_DO : array >= ATTNKIT_DQ;
}

// Every item and query has numbers of its own in an output of the forward pass, but for a state. Gradients are sums along
// axes with stride 0.
inline bool overlaps_itself(const attnkit_plan &plan, int array) {
  const bool is_forward = plan.pass == ATTNKIT_FORWARD && array >= ATTNKIT_O && array < ATTNKIT_FINAL_STATE;
  if (!is_forward || elements(plan, array) == 0) return false;
  const attnkit_view &view = plan.arrays[array];
  const Extent own = extent(plan, array);
  bool overlaps = (own.rows > 1 && view.row == 0) || (own.columns > 1 && view.column == 0);
  for (int axis = 0; axis < ATTNKIT_AXES; ++axis) overlaps |= plan.axes[axis] > 1 && view.axes[axis] == 0;
  return overlaps;
}

// The pointers of a call by array, for those that the plan describes. One of an array without elements is never followed,
// and stands for NULL as well as for any other.
class Door {
 public:
  Door(const attnkit_plan &plan, const int64_t *places, int64_t count, void *const *pointers) : plan_(plan) {
    for (int64_t n = 0; n < count; ++n) {
      if (places[n] < 0 || places[n] >= ATTNKIT_ARRAYS) {
        code_ = ATTNKIT_BAD_ARRAY;
      } else {
        arrays_[places[n]] = pointers[n];
      }
    }
    for (int array = 0; array < ATTNKIT_ARRAYS; ++array) {
      void *&pointer = arrays_[array];
      const int dtype = plan.arrays[array].dtype;
      if (dtype == ATTNKIT_ABSENT) {
        if (pointer != nullptr) code_ = ATTNKIT_BAD_ARRAY;
      } else if (elements(plan, array) == 0) {
        pointer = const_cast<attnkit_plan *>(&plan);
      } else if (pointer == nullptr) {
        code_ = ATTNKIT_BAD_ARRAY;
      } else if (reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(size_of(dtype)) != 0) {
        code_ = ATTNKIT_BAD_ALIGNMENT;
      }
    }
  }

  int code() const { return code_; }
  void *const *arrays() const { return arrays_; }

  // Whether there is anything to write.
  bool has_outputs() const {
    for (int array = 0; array < ATTNKIT_ARRAYS; ++array) {
      const bool there = plan_.arrays[array].dtype != ATTNKIT_ABSENT && is_output(plan_, array);
      if (there && elements(plan_, array) > 0) return true;
    }
    return false;
  }

 private:

  const attnkit_plan &plan_;
  void *arrays_[ATTNKIT_ARRAYS] = {};
  int code_ = ATTNKIT_OK;
};

}  // namespace attnkit
