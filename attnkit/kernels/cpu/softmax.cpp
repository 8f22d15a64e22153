// Softmax attention and its gradient.
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
