// Attention by rows of weights that sum to 1: softmax, sparsemax, entmax. With the numbers of a row, top = max s, τ and
// c (0 for softmax) and 1/Σ, and the functions of normalisers.cuh,
//
//     s_ij = scale·q_i·k_j + bias_ij        p_ij = weigh(relative(s_ij))/Σ_i        o_i = gain Σ_j r_ij p_ij v_j
//
// with r the dropout of a pair. τ is found by Newton's method from -1: the mass Σ weigh is convex and falls with τ, so
// that τ only rises, until no digit of it changes. Each step makes mass beyond 1 times slope at least four times smaller,
// which bounds the steps. c is the last step, too small for the digits of τ.
#pragma once

#include "normalisers.cuh"
#include "pointwise.cuh"
#include "rows_of_tiles.cuh"

namespace attnkit {

// The arguments of the kernels; `backends/cupy/rows.py` has the same structure. `o` is read by gradients: its cotangent.
struct Rows : Pointwise {
  View top, tau, step, inverse;  // the numbers of rows; no tau and step for softmax
  View delta, lse, dlse;         // Σ u dp / Σ u - dlse/gain; log Σ exp(s) and its cotangent
  double above, power;           // α - 1 and 1/(α - 1)
  int steps, output;             // Newton steps that always are enough; whether the forward kernels make o

  __device__ void keep(int sequence) {
    View* const of_queries[] = {&top, &tau, &step, &inverse, &delta, &lse, &dlse};
    for (View* x : of_queries) move(*x, edges_q[sequence]);
    Pointwise::keep(sequence);
  }
};

template <class C>
struct RowNumbers {
  C top, tau, step, inverse, delta;

  // A weight before it is divided by their sum, and after it.
  template <class N>
  __device__ C part(C s, C above, C power) const {
    return N::weigh(N::relative(s, top, tau, step, above), power);
  }
  template <class N>
  __device__ C weight(C s, C above, C power) const {
    return part<N>(s, above, power) * inverse;
  }
};

// The numbers of query i; those of queries behind the last are 0.
template <class C>
__device__ inline RowNumbers<C> numbers_of(const Rows& a, int item, int head, int i, bool with_delta) {
  const auto number = [&](const View& x) {
    return x.at && i < a.queries ? *(const C*)matrix_of(x, item, head).element(i, 0) : C(0);
  };
  return {number(a.top), number(a.tau), number(a.step), number(a.inverse), with_delta ? number(a.delta) : C(0)};
}

// Behind what point-wise attention shares: a word and resident scores, or the numbers of queries. `Call.launch` of
// rows.py counts it.
template <class Tiles, int OWN, int QUERIES>
struct RowsShared : Shared<Tiles, OWN> {
  using C = typename Tiles::C;
  static constexpr int BEHIND = Shared<Tiles, OWN>::OF_QUERIES + QUERIES * (int)sizeof(Query<C>);
  static constexpr int SCORES = Tiles::ROWS * Tiles::COLUMNS / Tiles::THREADS;  // of one thread

  __device__ RowNumbers<C>* numbers() const { return (RowNumbers<C>*)(this->memory + BEHIND); }
  __device__ int* word() const { return (int*)(this->memory + BEHIND); }
  // The score n of tile t of this thread, which alone reads it.
  __device__ C& resident(int t, int n) const {
    return ((C*)(this->memory + BEHIND + 16))[(t * SCORES + n) * Tiles::THREADS + threadIdx.x];
  }
};

// s of a pair from the product q·k; with EDGE it may be invisible, and is -∞ then.
template <bool EDGE, class C, bool PAIRS>
__device__ inline C score(const Rows& a, const Pairs<C, PAIRS>& pairs, const Query<C>& query, int i, int j, C product) {
  if (EDGE && !pairs.visible(query, i, j)) return minus_infinity<C>();
  return product * C(a.scale) + pairs.addend(query, i, j);
}

// r x of a pair with the score s, 0 if it is invisible.
template <class C, bool PAIRS>
__device__ inline C dropped(const Pairs<C, PAIRS>& pairs, int i, int j, C s, C x) {
  return s == minus_infinity<C>() ? C(0) : pairs.after_dropout(x, i, j);
}

// A sum to divide by, 1 where it is 0.
template <class C>
__device__ inline C divisor(C total) {
  return total == 0 ? C(1) : total;
}

// A block of queries with the scores of tiles of keys, and what is kept of its rows.
template <class Tiles, bool PAIRS, int OWN>
struct RowBlock : QueryBlock<Tiles, PAIRS, OWN, RowsShared<Tiles, OWN, Tiles::ROWS>> {
  using Base = QueryBlock<Tiles, PAIRS, OWN, RowsShared<Tiles, OWN, Tiles::ROWS>>;
  using C = typename Tiles::C;
  using Base::at, Base::clear, Base::i0, Base::pairs, Base::shared;

  const Rows& a;

  __device__ RowBlock(const Rows& a, const Place& at) : Base(a, at), a(a) {}

  __device__ void scores(typename Tiles::Scores& s, int j0, int stage) const {
    const Query<C>* queries = shared.queries();
    Tiles::multiply(s, shared.own(0), shared.passing(stage, 0));
    if (Base::whole(j0)) {
      Tiles::each_score([&](int n, int r, int c) { s[n] = score<false>(a, pairs, queries[r], i0 + r, j0 + c, s[n]); });
    } else {
      Tiles::each_score([&](int n, int r, int c) { s[n] = score<true>(a, pairs, queries[r], i0 + r, j0 + c, s[n]); });
    }
  }

  // sums += Σ r u v with the values of a tile.
  __device__ void add_values(typename Tiles::Sums& sums, typename Tiles::Scores& u, int j0, int stage) const {
    clear(j0, stage, 1);
    if (PAIRS && (a.dropout_mask.at || a.seed)) {
      const Query<C>* queries = shared.queries();
      Tiles::each_score([&](int n, int r, int c) {
        const bool seen = pairs.visible(queries[r], i0 + r, j0 + c);
        u[n] = seen ? pairs.after_dropout(u[n], i0 + r, j0 + c) : C(0);
      });
    }
    Tiles::add_product(sums, u, shared.passing(stage, 1), shared.scratch());
  }

  // o from Σ r u v and Σ u, if it is wanted, and the numbers of rows.
  __device__ void store_rows(typename Tiles::Sums& sums, OfRows<Tiles>& top, OfRows<Tiles>& tau, OfRows<Tiles>& step,
                             OfRows<Tiles>& total) const {
    if (a.output) {
      each_row<Tiles>([&](int r, int) { OwnRows<Tiles>::scale(sums, r, C(a.gain) / divisor(total[r])); });
      store<Tiles>(sums, matrix_of(a.o, at.item, at.head), i0, a.queries, a.e, [](int) { return C(1); });
    }
    each_row_once<Tiles>([&](int r, int row) {
      const int i = i0 + row;
      if (i >= a.queries) return;
      const C known = total[r] == 0 ? minus_infinity<C>() : top[r] + logarithm(total[r]);
      put(a.top, i, top[r]);
      put(a.tau, i, tau[r]);
      put(a.step, i, step[r]);
      put(a.inverse, i, 1 / divisor(total[r]));
      put(a.lse, i, known);
    });
  }

  __device__ void put(const View& to, int i, C x) const {
    if (to.at) *(C*)matrix_of(to, at.item, at.head).element(i, 0) = x;
  }
};

// The maximum of a row, 0 where it has no finite score.
template <class C>
__device__ inline C finite(C top) {
  return top == minus_infinity<C>() ? C(0) : top;
}

// o and the numbers of rows for softmax, in one pass that keeps the maximum so far.
template <class Tiles, bool PAIRS, bool PACKED = false>
__global__ void __launch_bounds__(Tiles::THREADS, 2) rows_softmax(const __grid_constant__ Rows whole) {
  using C = typename Tiles::C;
  const Part<PACKED, Rows> part(whole, whole.edges_q, whole.queries, Tiles::ROWS, whole.heads);
  const Rows& a = part.a;
  const RowBlock<Tiles, PAIRS, 1> block(a, part.at);
  typename Tiles::Sums sums;
  OfRows<Tiles> top(minus_infinity<C>()), total(0), none(0);
  block.walk(true, a.output, [&](int j0, int stage) {
    typename Tiles::Scores s;
    block.scores(s, j0, stage);
    OfRows<Tiles> higher = top;
    Tiles::each_score([&](int n, int, int) { higher.of_score(n) = greater(higher.of_score(n), s[n]); });
    higher.reduce([](C x, C y) { return greater(x, y); });
    each_row<Tiles>([&](int r, int) {
      const C shrink = exponential(top[r] - finite(higher[r]));
      total[r] *= shrink;
      OwnRows<Tiles>::scale(sums, r, shrink);
      top[r] = higher[r];
    });
    Tiles::each_score([&](int n, int, int) {
      s[n] = exponential(s[n] - finite(top.of_score(n)));
      total.of_score(n) += s[n];
    });
    if (a.output) block.add_values(sums, s, j0, stage);
  });
  total.sum();
  each_row<Tiles>([&](int r, int) { top[r] = finite(top[r]); });
  block.store_rows(sums, top, none, none, total);
}

// The same with a threshold: a pass for the maximum, one for each step of Newton's method and one for the product with
// v. Scores are made again in each of them, unless they are RESIDENT in shared memory.
template <class Tiles, class N, bool PAIRS, bool RESIDENT>
__global__ void __launch_bounds__(Tiles::THREADS, RESIDENT ? 1 : 2) rows_threshold(const __grid_constant__ Rows a) {
  using C = typename Tiles::C;
  const RowBlock<Tiles, PAIRS, 1> block(a, Place(blocks_of(a.queries, Tiles::ROWS), a.heads));
  const C above = a.above, power = a.power;
  OfRows<Tiles> top(minus_infinity<C>()), tau(-1), step(0), total(0);
  const auto tile = [&](int j0) { return (j0 - block.range.first) / Tiles::COLUMNS; };
  const auto find = [&](typename Tiles::Scores& s, int j0, int stage) {
    if constexpr (RESIDENT) {
      Tiles::each_score([&](int n, int, int) { s[n] = block.shared.resident(tile(j0), n); });
    } else {
      block.scores(s, j0, stage);
    }
  };
  block.walk(true, false, [&](int j0, int stage) {
    typename Tiles::Scores s;
    block.scores(s, j0, stage);
    Tiles::each_score([&](int n, int, int) {
      top.of_score(n) = greater(top.of_score(n), s[n]);
      if constexpr (RESIDENT) block.shared.resident(tile(j0), n) = s[n];
    });
  });
  top.reduce([](C x, C y) { return greater(x, y); });
  each_row<Tiles>([&](int r, int) { top[r] = finite(top[r]); });

  for (int count = 1;; count++) {
    OfRows<Tiles> mass(0), slope(0);
    const auto weigh = [&](int j0, int stage) {
      typename Tiles::Scores s;
      find(s, j0, stage);
      Tiles::each_score([&](int n, int, int) {
        const C x = N::relative(s[n], top.of_score(n), tau.of_score(n), C(0), above);
        mass.of_score(n) += N::weigh(x, power);
        slope.of_score(n) += N::slope(x, power);
      });
    };
    if constexpr (RESIDENT) {
      for (int j0 = block.range.first; j0 < block.range.stop; j0 += Tiles::COLUMNS) weigh(j0, 0);
    } else {
      block.walk(true, false, weigh);
    }
    mass.sum();
    slope.sum();
    bool rises = false;
    each_row<Tiles>([&](int r, int) {
      step[r] = (mass[r] - 1) / divisor(slope[r]);
      rises = rises || tau[r] + step[r] > tau[r];
    });
    if (count >= a.steps) break;
    if (!(RESIDENT ? any_of_warp(rises) : any_of_block(rises, block.shared.word()))) break;
    each_row<Tiles>([&](int r, int) { tau[r] = greater(tau[r], tau[r] + step[r]); });
  }

  typename Tiles::Sums sums;
  block.walk(!RESIDENT, a.output, [&](int j0, int stage) {
    typename Tiles::Scores s;
    find(s, j0, stage);
    Tiles::each_score([&](int n, int, int) {
      s[n] = N::weigh(N::relative(s[n], top.of_score(n), tau.of_score(n), step.of_score(n), above), power);
      total.of_score(n) += s[n];
    });
    if (a.output) block.add_values(sums, s, j0, stage);
  });
  total.sum();
  block.store_rows(sums, top, tau, step, total);
}

}  // namespace attnkit
