// The delta rule and gated linear attention, and their gradients.
#include "delta.h"
#include "kernels.h"

namespace attnkit {

void delta(const Call &call) {
  with_compute_type(call, [&](auto like) {
    const Delta<decltype(like)> kernel(call);
    if (call.plan.pass == ATTNKIT_FORWARD) return kernel.forward();
    kernel.backward();
  });
}

}  // namespace attnkit
