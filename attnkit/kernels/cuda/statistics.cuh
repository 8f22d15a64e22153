// Statistics of the rows of weights w_ij, before dropout, in one sweep: gain·f_i h(x_ij) of point-wise and Gaussian
// attention, beside its output, and p_ij of softmax, sparsemax and entmax, from the numbers of rows of rows.cuh. With
// Z = Σ w, p = w/Z and m the largest weight of a row so far,
//
//     H = -Σ p log p = log(Z/m) + Σ w log(m/w) / Z        a larger m' adds Z log(m'/m) to Σ w log(m/w)
//
// which is made of two sums without a negative term. Weights are divided by larger ones, so that no quotient overflows.
// Rows whose weights are all 0 have 0 in everything but `visible`.
#pragma once

#include "rows.cuh"

namespace attnkit {

// The arguments of the kernels; `backends/cupy/statistics.py` has the same structure. `output` asks for o.
struct Statistics : Rows {
  View total, entropy, sum_squares, maximum, nonzero, visible;  // (items, heads, L), 0 where they are not wanted
  double weight_gain;                                           // gain without that of dropout
  int exact;                                                    // whether weights of 0 are meant, and counted
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
  const Statistics& a;
  OfRows<Tiles> alive, total, squares, spread, visible, largest;

  __device__ RowSums(const Statistics& a)
      : a(a), alive(0), total(0), squares(0), spread(0), visible(0), largest(minus_infinity<C>()) {}

  // Adds the weights gain(n, r) part(n, x) of a tile of products or distances, which become parts, 0 where invisible.
  template <class Block, class Part, class Gain>
  __device__ void add_tile(typename Tiles::Scores& s, const Block& block, int j0, Part part, Gain gain) {
    const Query<C>* queries = block.shared.queries();
    const int i0 = block.i0;
    OfRows<Tiles> higher = largest;
    const bool whole = block.whole(j0);
    Tiles::each_score([&](int n, int r, int c) {
      const Query<C>& query = queries[r];
      const bool seen = whole || block.pairs.visible(query, i0 + r, j0 + c);
      s[n] = seen ? part(n, s[n] * C(a.scale) + block.pairs.addend(query, i0 + r, j0 + c)) : C(0);
      if (seen) {
        visible.of_score(n) += 1;
        higher.of_score(n) = greater(higher.of_score(n), s[n] * gain(n, r));
      }
    });
    raise(higher);
    Tiles::each_score([&](int n, int r, int) { add(n, s[n] * gain(n, r)); });
  }

  __device__ void add(int n, C w) {
    alive.of_score(n) += w != 0 ? C(1) : C(0);
    total.of_score(n) += w;
    squares.of_score(n) += w * w;
    if (a.entropy.at && w != 0) spread.of_score(n) -= w * logarithm_or_zero(w / largest.of_score(n));
  }

  // Raises `largest` to `higher` and `spread` with it, before the weights that it is the maximum of are added.
  __device__ void raise(OfRows<Tiles>& higher) {
    higher.reduce([](C x, C y) { return greater(x, y); });
    each_row<Tiles>([&](int r, int) {
      if (a.entropy.at && largest[r] > 0) spread[r] -= total[r] * logarithm_or_zero(largest[r] / higher[r]);
      largest[r] = higher[r];
    });
  }

  // Writes the statistics of the rows from i0 on.
  __device__ void store(const Place& at, int i0) {
    sum();
    each_row_once<Tiles>([&](int r, int row) {
      const int i = i0 + row;
      if (i >= a.queries) return;
      const auto put = [&](const View& to, C x) {
        if (to.at) *(C*)matrix_of(to, at.item, at.head).element(i, 0) = x;
      };
      const bool some = alive[r] > 0;
      const C Z = divisor(total[r]);
      put(a.total, total[r]);
      put(a.entropy, some ? logarithm_or_zero(Z / largest[r]) + spread[r] / Z : C(0));
      put(a.sum_squares, squares[r]);
      put(a.maximum, some ? largest[r] : C(0));
      put(a.nonzero, a.exact ? alive[r] : some ? visible[r] : C(0));
      put(a.visible, visible[r]);
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

// Of h(x) with the gain of its row, and o if it is wanted.
template <class Tiles, class H, bool PAIRS>
__global__ void __launch_bounds__(Tiles::THREADS, 2) statistics_forward(const __grid_constant__ Statistics a) {
  using C = typename Tiles::C;
  const QueryBlock<Tiles, PAIRS, 1> block(a, Place(blocks_of(a.queries, Tiles::ROWS), a.heads));
  const Query<C>* queries = block.shared.queries();
  const Place at = block.at;
  const int i0 = block.i0;
  const auto value = [](int, C x) { return H::value(x); };
  const auto gain = [&](int, int r) { return C(a.weight_gain) * queries[r].factor; };
  typename Tiles::Sums sums;
  RowSums<Tiles> rows(a);
  block.walk(true, a.output, [&](int j0, int stage) {
    if (a.output) block.clear(j0, stage, 1);
    typename Tiles::Scores s;
    Tiles::compare(s, block.shared.own(0), block.shared.passing(stage, 0));
    rows.add_tile(s, block, j0, value, gain);
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
  rows.store(at, i0);
}

// Of weights that sum to 1, from the numbers of their rows.
template <class Tiles, class N, bool PAIRS>
__global__ void __launch_bounds__(Tiles::THREADS, 2) statistics_of_rows(const __grid_constant__ Statistics a) {
  using C = typename Tiles::C;
  const RowBlock<Tiles, PAIRS, 1> block(a, Place(blocks_of(a.queries, Tiles::ROWS), a.heads));
  const Place at = block.at;
  const C above = a.above, power = a.power;
  RowNumbers<C> numbers[OwnRows<Tiles>::COUNT];
  each_row<Tiles>([&](int r, int row) { numbers[r] = numbers_of<C>(a, at.item, at.head, block.i0 + row, false); });
  const auto part = [&](int n, C s) { return numbers[OwnRows<Tiles>::of_score(n)].template part<N>(s, above, power); };
  const auto gain = [&](int n, int) { return C(a.weight_gain) * numbers[OwnRows<Tiles>::of_score(n)].inverse; };
  RowSums<Tiles> rows(a);
  block.walk(true, false, [&](int j0, int stage) {
    typename Tiles::Scores s;
    Tiles::multiply(s, block.shared.own(0), block.shared.passing(stage, 0));
    rows.add_tile(s, block, j0, part, gain);
  });
  rows.store(at, block.i0);
}

}  // namespace attnkit
