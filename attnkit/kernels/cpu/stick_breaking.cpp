// Stick-breaking attention and its gradient.
#include "stick_breaking.h"

#include "backward.h"
#include "kernels.h"

namespace attnkit {

void stick_breaking(const Call &call) {
  with_compute_type(call, [&](auto like) {
    using T = decltype(like);
    attend<T, StickBreaking<T>>(call);
  });
}

}  // namespace attnkit
