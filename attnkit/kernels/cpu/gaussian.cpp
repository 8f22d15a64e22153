// Gaussian attention and its gradient.
#include "backward.h"
#include "kernels.h"

namespace attnkit {

void gaussian(const Call &call) {
  with_compute_type(call, [&](auto like) {
    using T = decltype(like);
    attend<T, Gaussian<T>>(call);
  });
}

}  // namespace attnkit
