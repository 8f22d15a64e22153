// The kernels behind attnkit_run, each for plans that were checked.
#pragma once

#include "call.h"

namespace attnkit {

void softmax(const Call &call);         // and forgetting attention
void softpick(const Call &call);
void stick_breaking(const Call &call);
void gaussian(const Call &call);
void pointwise(const Call &call);
void sparsemax(const Call &call);       // entmax with α = 2
void entmax_of_halves(const Call &call);  // α = 1.5
void entmax(const Call &call);          // any α, also one for each row
void linear(const Call &call);          // and cosine, and Performer
void efficient(const Call &call);
void delta(const Call &call);           // and gated linear attention

// A recurrence of states beside linear attention.
inline bool is_recurrent(const attnkit_plan &plan) {
  return plan.op == ATTNKIT_GATED_LINEAR || plan.op == ATTNKIT_DELTA;
}

inline bool is_linear(const attnkit_plan &plan) { return plan.op >= ATTNKIT_LINEAR && plan.op <= ATTNKIT_EFFICIENT; }

// Calls f with a value of the compute dtype (A7).
template <class F>
void with_compute_type(const Call &call, const F &f) {
  if (call.view(ATTNKIT_Q).dtype == ATTNKIT_FLOAT64) return f(double{});
  return f(float{});
}

}  // namespace attnkit
