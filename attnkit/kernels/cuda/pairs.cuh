// Pairs of a query and a key: who sees whom, bias, dropout. Query i sees the keys lo ≤ j < hi that the mask allows.
#pragma once

#include "activations.cuh"
#include "views.cuh"

namespace attnkit {

constexpr int OPEN = 1 << 30;  // a bound that is none

__device__ inline int smaller(int a, int b) { return a < b ? a : b; }
__device__ inline int larger(int a, int b) { return a > b ? a : b; }

// Leaves out the first rows.
__device__ inline void move(View& x, long long rows) {
  if (x.at) x.at += rows * x.row;
}

// The arguments of every kernel of point-wise attention; `backends/cupy/launch.py` has the same structure.
struct Pointwise {
  View q, k, v, o;                     // o: the output, or its cotangent
  View dq, dk, dv, dbias;              // gradients
  View bias, mask, dropout_mask;       // arrays of pairs
  View key_lengths;                    // one number for each item and head
  View query_mask, lengths;            // of queries
  View factors, logs;                  // n^-alpha and log n of each query, where they are not constant
  const unsigned long long* seed;      // of the dropout by counter, 0 without
  double scale, shift, gain, alpha;
  int heads, groups, queries, keys;    // query heads, and how many of them share a head of k and v
  int valid, left, right;              // query i sees the keys i - left ≤ j ≤ i + right below `valid` at most
  int d, e;
  unsigned last_kept;                  // the largest word of the counter that keeps a pair
  int items, bias_items, bias_heads;   // of the gradient of the bias: what is summed over, and what it has
  const long long *edges_q, *edges_k;  // where packed sequences begin and end; `left` counts from their last tokens,
  int sequences, after;                // and so does `after`, another bound to the right

  // Leaves one of packed sequences.
  __device__ void keep(int sequence) {
    const long long first_query = edges_q[sequence], first_key = edges_k[sequence];
    queries = (int)(edges_q[sequence + 1] - first_query);
    keys = (int)(edges_k[sequence + 1] - first_key);
    const int shift = keys - queries;
    left = left < OPEN ? smaller(left - shift, OPEN) : OPEN;
    right = after < OPEN ? smaller(right, shift + after) : right;
    valid = left >= -right ? keys : 0;
    View* const of_queries[] = {&q, &o, &dq, &lengths, &factors, &logs};
    View* const of_keys[] = {&k, &v, &dk, &dv};
    for (View* x : of_queries) move(*x, first_query);
    for (View* x : of_keys) move(*x, first_key);
  }
};

// What distinguishes one query: its range of keys, the factor of its weights and the shift of its scores.
template <class C>
struct Query {
  int lo, hi;
  C factor, shift;
};

__device__ inline int valid_keys(const Pointwise& a, int item, int head) {
  const Matrix given = matrix_of(a.key_lengths, item, head);
  if (!given.at) return a.valid;
  const long long n = *(const long long*)given.at;
  return n < a.valid ? (int)n : a.valid;
}

// The query i, of which rows behind the last and masked ones see nothing.
template <class C>
__device__ inline Query<C> query_of(const Pointwise& a, int item, int head, int i, int keys) {
  Query<C> x = {0, 0, C(1), C(a.shift)};
  if (i >= a.queries) return x;
  const Matrix live = matrix_of(a.query_mask, item, head);
  if (!live.at || *live.element(i, 0)) {
    x.lo = larger(i - a.left, 0);
    x.hi = smaller(keys, i + a.right + 1);
  }
  if (a.factors.at) x.factor = load_number<C>(matrix_of(a.factors, item, head), i, 0);
  if (a.logs.at) x.shift -= load_number<C>(matrix_of(a.logs, item, head), i, 0);
  return x;
}

// The first word of Philox4x32-10 (Salmon et al. 2011, §3.3) for the counter (j, i, head, item) and a 64-bit key.
__device__ inline unsigned philox_word(unsigned j, unsigned i, unsigned head, unsigned item, unsigned long long key) {
  unsigned c0 = j, c1 = i, c2 = head, c3 = item;
  unsigned k0 = (unsigned)key, k1 = (unsigned)(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const unsigned high0 = multiply_high(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const unsigned high1 = multiply_high(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return c0;
}

// The arrays of pairs of one head. Without PRESENT a call has none of them, and a pair is its query's range alone.
template <class C, bool PRESENT>
struct Pairs {
  Matrix bias, mask, dropout_mask;
  const unsigned long long* seed;
  unsigned last_kept, item, head;

  __device__ Pairs(const Pointwise& a, int item, int head)
      : bias(matrix_of(a.bias, item, head)), mask(matrix_of(a.mask, item, head)),
        dropout_mask(matrix_of(a.dropout_mask, item, head)), seed(a.seed), last_kept(a.last_kept),
        item(item), head(head) {}

  __device__ bool visible(const Query<C>& query, int i, int j) const {
    bool seen = j >= query.lo && j < query.hi;
    if constexpr (PRESENT) {
      if (mask.at && seen) seen = *mask.element(i, j) != 0;
    }
    return seen;
  }

  // What is added to scale·q·k of a visible pair.
  __device__ C addend(const Query<C>& query, int i, int j) const {
    if constexpr (PRESENT) {
      if (bias.at) return query.shift + load_number<C>(bias, i, j);
    }
    return query.shift;
  }

  // x of a visible pair times its dropout; 1/(1 - p) of the dropout by counter is left to the caller.
  __device__ C after_dropout(C x, int i, int j) const {
    if constexpr (PRESENT) {
      if (dropout_mask.at) x *= load_number<C>(dropout_mask, i, j);
      if (seed && philox_word(j, i, head, item, *seed) > last_kept) x = 0;
    }
    return x;
  }
};

// Blocks of one dimension: neighbours share a head.
struct Place {
  int block, head, item;

  __device__ Place(int blocks, int heads)
      : block(blockIdx.x % blocks), head(blockIdx.x / blocks % heads), item(blockIdx.x / blocks / heads) {}
};

__device__ inline int blocks_of(int tokens, int size) { return (tokens + size - 1) / size; }

// A range of tokens, in whole tiles from `first`.
struct Range {
  int first, stop;
};

// The keys that some of the queries i0 .. i0 + rows - 1 may see.
__device__ inline Range keys_of(const Pointwise& a, int keys, int i0, int rows, int columns) {
  if (i0 >= a.queries) return {0, 0};
  const int last = smaller(i0 + rows, a.queries) - 1;
  return {larger(i0 - a.left, 0) / columns * columns, smaller(keys, last + a.right + 1)};
}

// The queries that may see some of the keys j0 .. j0 + rows - 1.
__device__ inline Range queries_of(const Pointwise& a, int keys, int j0, int rows, int columns) {
  if (j0 >= keys) return {0, 0};
  return {larger(j0 - a.right, 0) / columns * columns, smaller(a.queries, smaller(j0 + rows, keys) + a.left)};
}

// Whether all queries i0 .. i0 + rows - 1 see all keys j0 .. j0 + columns - 1, masks left out.
__device__ inline bool all_visible(const Pointwise& a, int keys, int i0, int rows, int j0, int columns) {
  return i0 + rows <= a.queries && j0 >= i0 + rows - 1 - a.left && j0 + columns <= smaller(keys, i0 + a.right + 1);
}

}  // namespace attnkit
