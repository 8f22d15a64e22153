// Linear, cosine and Performer attention, and their gradients.
#include "linear.h"
#include "kernels.h"

namespace attnkit {

void linear(const Call &call) {
  with_compute_type(call, [&](auto like) {
    const Linear<decltype(like)> kernel(call);
    if (call.plan.pass == ATTNKIT_FORWARD) return kernel.forward();
    kernel.backward();
  });
}

}  // namespace attnkit
