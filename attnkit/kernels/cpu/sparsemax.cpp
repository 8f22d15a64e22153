// Sparsemax attention (α = 2), and its gradient.
#include "entmax.h"
#include "kernels.h"

namespace attnkit {

void sparsemax(const Call &call) {
  with_compute_type(call, [&](auto like) { entmax_of<decltype(like), 1>(call); });
}

}  // namespace attnkit
