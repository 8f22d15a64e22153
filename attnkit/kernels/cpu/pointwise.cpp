// Pointwise attention, with reluformer, sigmoid and the product of rela among it, and its gradient.
#include "backward.h"
#include "kernels.h"

namespace attnkit {

void pointwise(const Call &call) {
  with_compute_type(call, [&](auto like) {
    using T = decltype(like);
    attend<T, Pointwise<T>>(call);
  });
}

}  // namespace attnkit
