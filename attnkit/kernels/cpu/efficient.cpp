// Efficient attention and its gradient.
#include "efficient.h"
#include "kernels.h"

namespace attnkit {

void efficient(const Call &call) {
  with_compute_type(call, [&](auto like) {
    const Efficient<decltype(like)> kernel(call);
    if (call.plan.pass == ATTNKIT_FORWARD) return kernel.forward();
    kernel.backward();
  });
}

}  // namespace attnkit
