// Packed sequences: tokens of several sequences one after the other, each attending within itself.
//
// A block belongs to one of them, and sees a call that has no other tokens.
#pragma once

#include "pairs.cuh"

namespace attnkit {

// The first block of a sequence; there are as many as it needs, sometimes one more.
__device__ inline int first_block(const long long* edges, int sequence, int size) {
  return (int)(edges[sequence] / size) + sequence;
}

__device__ inline int sequence_of(const long long* edges, int sequences, int block, int size) {
  int low = 0, high = sequences;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (first_block(edges, middle, size) <= block ? low : high) = middle;
  }
  return low;
}

// The call of a block that has `size` of the tokens, queries or keys with these `edges`, and its place in the call.
template <bool PACKED, class Call>
struct Part {
  const Call& a;
  const Place at;

  __device__ Part(const Call& a, const long long* edges, int tokens, int size, int heads)
      : a(a), at(blocks_of(tokens, size), heads) {}
};

template <class Call>
struct Part<true, Call> {
  Call a;
  Place at;

  __device__ Part(const Call& whole, const long long* edges, int tokens, int size, int heads)
      : a(whole), at(blocks_of(tokens, size) + whole.sequences, heads) {
    const int sequence = sequence_of(edges, whole.sequences, at.block, size);
    at.block -= first_block(edges, sequence, size);
    a.keep(sequence);
  }
};

}  // namespace attnkit
