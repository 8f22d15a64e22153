// Softmax attention and its gradient, with gates (forgetting attention) or without.
#include "backward.h"
#include "kernels.h"

namespace attnkit {

void softmax(const Call &call) {
  with_compute_type(call, [&](auto like) {
    using T = decltype(like);
    attend<T, Softmax<T>>(call);
  });
}

}  // namespace attnkit
