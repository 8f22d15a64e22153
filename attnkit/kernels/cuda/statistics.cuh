// Point-wise and Gaussian attention and statistics of the rows of its weights w_ij = gain·f_i h(x_ij), before dropout, in one sweep.
// With the names of pointwise.cuh, Z = Σ w, p = w/Z and m the largest weight of a row so far,
//
//     H = -Σ p log p = log(Z/m) + Σ w log(m/w) / Z        a larger m' adds Z log(m'/m) to Σ w log(m/w)
//
// which is made of two sums without a negative term. Rows whose weights are all 0 have 0 in everything but `visible`.
#pragma once

#include "pointwise.cuh"
#include "rows_of_tiles.cuh"

namespace attnkit {

// The arguments of the kernel; `backends/cupy/statistics.py` has the same structure.
struct Statistics : Pointwise {
  View total, entropy, sum_squares, maximum, nonzero, visible;  // (items, heads, L), 0 where they are not wanted
  double weight_gain;                                           // gain without that of dropout
  int exact, output;  // whether weights of 0 are meant, and counted; whether o is wanted
};

// log x, 0 where x is not positive.
template <class C>
__device__ inline C logarithm_or_zero(C x) {
  return x > 0 ? logarithm(x) : C(0);
}

// Sums over the weights of this thread's rows: each thread has those of its own keys, and all the same `largest`.
template <class Tiles>
struct RowSums {
  using C = typename Tiles::C;
  OfRows<Tiles> alive, total, squares, spread, visible, largest;

  __device__ RowSums() : alive(0), total(0), squares(0), spread(0), visible(0), largest(minus_infinity<C>()) {}

  __device__ void add(int n, C w) {
    alive.of_score(n) += w != 0 ? C(1) : C(0);
    total.of_score(n) += w;
    squares.of_score(n) += w * w;
  }

  // Raises `largest` to `higher` and `spread` with it, before the weights that it is the maximum of are added.
  __device__ void raise(OfRows<Tiles>& higher, bool with_entropy) {
    higher.reduce([](C x, C y) { return greater(x, y); });
    each_row<Tiles>([&](int r, int) {
      if (with_entropy && largest[r] > 0) spread[r] += total[r] * logarithm_or_zero(higher[r] / largest[r]);
      largest[r] = higher[r];
    });
  }

  __device__ void sum() {
    alive.sum();
    total.sum();
    squares.sum();
    spread.sum();
    visible.sum();
  }
};

template <class Tiles, class H, bool PAIRS>
__global__ void __launch_bounds__(Tiles::THREADS, 2) statistics_forward(const __grid_constant__ Statistics a) {
  using C = typename Tiles::C;
  const QueryBlock<Tiles, PAIRS, 1> block(a, Place(blocks_of(a.queries, Tiles::ROWS), a.heads));
  const Query<C>* queries = block.shared.queries();
  const Place at = block.at;
  const int i0 = block.i0;
  typename Tiles::Sums sums;
  RowSums<Tiles> rows;
  block.walk(true, a.output, [&](int j0, int stage) {
    if (a.output) block.clear(j0, stage, 1);
    typename Tiles::Scores s;
    Tiles::compare(s, block.shared.own(0), block.shared.passing(stage, 0));
    OfRows<Tiles> higher = rows.largest;
    const bool whole = block.whole(j0);
    Tiles::each_score([&](int n, int r, int c) {
      const Query<C>& query = queries[r];
      const bool seen = whole || block.pairs.visible(query, i0 + r, j0 + c);
      s[n] = seen ? H::value(s[n] * C(a.scale) + block.pairs.addend(query, i0 + r, j0 + c)) : C(0);
      if (seen) {
        rows.visible.of_score(n) += 1;
        higher.of_score(n) = greater(higher.of_score(n), s[n] * (C(a.weight_gain) * query.factor));
      }
    });
    rows.raise(higher, a.entropy.at != nullptr);
    Tiles::each_score([&](int n, int r, int c) {
      const C w = s[n] * (C(a.weight_gain) * queries[r].factor);
      rows.add(n, w);
      if (a.entropy.at && w != 0) rows.spread.of_score(n) += w * logarithm_or_zero(rows.largest.of_score(n) / w);
    });
    if (!a.output) return;
    if (PAIRS && (a.dropout_mask.at || a.seed)) {
      Tiles::each_score([&](int n, int r, int c) {
        if (block.pairs.visible(queries[r], i0 + r, j0 + c)) s[n] = block.pairs.after_dropout(s[n], i0 + r, j0 + c);
      });
    }
    Tiles::add_product(sums, s, block.shared.passing(stage, 1), block.shared.scratch());
  });
  __syncthreads();  // `queries`, where the sweep was empty
  if (a.output) {
    store<Tiles>(sums, matrix_of(a.o, at.item, at.head), i0, a.queries, a.e,
                 [&](int r) { return C(a.gain) * queries[r].factor; });
  }
  rows.sum();
  each_row_once<Tiles>([&](int r, int row) {
    const int i = i0 + row;
    if (i >= a.queries) return;
    const auto put = [&](const View& to, C x) {
      if (to.at) *(C*)matrix_of(to, at.item, at.head).element(i, 0) = x;
    };
    const bool alive = rows.alive[r] > 0;
    const C Z = rows.total[r] == 0 ? C(1) : rows.total[r];
    put(a.total, rows.total[r]);
    put(a.entropy, alive ? logarithm_or_zero(Z / rows.largest[r]) + rows.spread[r] / Z : C(0));
    put(a.sum_squares, rows.squares[r]);
    put(a.maximum, alive ? rows.largest[r] : C(0));
    put(a.nonzero, a.exact ? rows.alive[r] : alive ? rows.visible[r] : C(0));
    put(a.visible, rows.visible[r]);
  });
}

}  // namespace attnkit
