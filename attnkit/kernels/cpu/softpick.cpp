// Softpick attention and its gradient.
#include "backward.h"
#include "kernels.h"

namespace attnkit {

void softpick(const Call &call) {
  with_compute_type(call, [&](auto like) {
    using T = decltype(like);
    attend<T, Softpick<T>>(call);
  });
}

}  // namespace attnkit
