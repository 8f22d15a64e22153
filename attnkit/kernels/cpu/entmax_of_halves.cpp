// Entmax attention with α = 1.5, and its gradient.
#include "entmax.h"
#include "kernels.h"

namespace attnkit {

void entmax_of_halves(const Call &call) {
  with_compute_type(call, [&](auto like) { entmax_of<decltype(like), 2>(call); });
}

}  // namespace attnkit
