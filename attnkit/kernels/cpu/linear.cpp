// Linear, cosine and Performer attention, and their gradients.
#include "decay.h"
#include "linear.h"
#include "kernels.h"

namespace attnkit {

template <class Kernel>
void run(const Call &call) {
  const Kernel kernel(call);
  if (call.plan.pass == ATTNKIT_FORWARD) return kernel.forward();
  kernel.backward();
}

void linear(const Call &call) {
  with_compute_type(call, [&](auto like) {
    using T = decltype(like);
    if (Decayed<T>::serves(call)) return run<Decayed<T>>(call);
    run<Linear<T>>(call);
  });
}

}  // namespace attnkit
