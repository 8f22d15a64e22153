// Entmax attention with any α, or one for each row, and its gradient.
#include "entmax.h"
#include "kernels.h"

namespace attnkit {

void entmax(const Call &call) {
  with_compute_type(call, [&](auto like) { entmax_of<decltype(like), 0>(call); });
}

}  // namespace attnkit
