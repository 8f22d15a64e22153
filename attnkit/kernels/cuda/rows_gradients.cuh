// The gradients of attention by rows of weights that sum to 1. With the names of rows.cuh,
//
//     u_ij = tilt(p_ij)        dp_ij = r_ij do_i·v_j        δ_i = Σ_j u_ij dp_ij / Σ_j u_ij - dlse_i/gain
//     ds_ij = u_ij (dp_ij - δ_i)                            dv_j = gain Σ_i r_ij p_ij do_i
//     dq_i = gain·scale Σ_j ds_ij k_j                       dk_j = gain·scale Σ_i ds_ij q_i
//     dbias_ij = gain·ds_ij
//
// The numbers of rows are made by a forward kernel, δ by the kernel of dq; dk, dv and dbias read both.
#pragma once

#include "rows.cuh"

namespace attnkit {

template <class Tiles, class N, bool PAIRS, bool PACKED = false>
__global__ void __launch_bounds__(Tiles::THREADS, 2) rows_gradient_of_queries(const __grid_constant__ Rows whole) {
  using C = typename Tiles::C;
  const Part<PACKED, Rows> part(whole, whole.edges_q, whole.queries, Tiles::ROWS, whole.heads);
  const Rows& a = part.a;
  const RowBlock<Tiles, PAIRS, 2> block(a, part.at);
  const Place at = block.at;
  const int i0 = block.i0;
  const C above = a.above, power = a.power;
  RowNumbers<C> numbers[OwnRows<Tiles>::COUNT];
  each_row<Tiles>([&](int r, int row) { numbers[r] = numbers_of<C>(a, at.item, at.head, i0 + row, false); });
  const auto slopes = [&](typename Tiles::Scores& u, typename Tiles::Scores& dp, int j0, int stage) {
    block.scores(u, j0, stage);
    Tiles::multiply(dp, block.shared.own(1), block.shared.passing(stage, 1));
    Tiles::each_score([&](int n, int r, int c) {
      dp[n] = dropped(block.pairs, i0 + r, j0 + c, u[n], dp[n]);
      u[n] = N::tilt(numbers[OwnRows<Tiles>::of_score(n)].template weight<N>(u[n], above, power), above);
    });
  };

  OfRows<Tiles> delta(0), total(0);
  block.walk(true, true, [&](int j0, int stage) {
    typename Tiles::Scores u, dp;
    slopes(u, dp, j0, stage);
    Tiles::each_score([&](int n, int, int) {
      delta.of_score(n) += u[n] * dp[n];
      total.of_score(n) += u[n];
    });
  });
  delta.sum();
  total.sum();
  each_row<Tiles>([&](int r, int row) {
    delta[r] /= divisor(total[r]);
    if (a.dlse.at && i0 + row < a.queries) {
      delta[r] -= load_number<C>(matrix_of(a.dlse, at.item, at.head), i0 + row, 0) / C(a.gain);
    }
    if (total[r] == 0) delta[r] = 0;
  });
  each_row_once<Tiles>([&](int r, int row) {
    if (i0 + row < a.queries) block.put(a.delta, i0 + row, delta[r]);
  });

  typename Tiles::Sums sums;
  block.walk(true, true, [&](int j0, int stage) {
    typename Tiles::Scores u, dp;
    block.clear(j0, stage, 0);
    slopes(u, dp, j0, stage);
    Tiles::each_score([&](int n, int, int) { u[n] *= dp[n] - delta.of_score(n); });
    Tiles::add_product(sums, u, block.shared.passing(stage, 0), block.shared.scratch());
  });
  store<Tiles>(sums, matrix_of(a.dq, at.item, at.head), i0, a.queries, a.d, [&](int) { return C(a.gain * a.scale); });
}

// dk if KEYS, dv if VALUES; both at once where registers allow it. Rows of tiles are keys, columns are queries.
template <class Tiles, class N, bool PAIRS, bool KEYS, bool VALUES, bool PACKED = false>
__global__ void __launch_bounds__(Tiles::THREADS, 2) rows_gradient_of_keys(const __grid_constant__ Rows whole) {
  using C = typename Tiles::C;
  constexpr int ROWS = Tiles::ROWS, COLUMNS = Tiles::COLUMNS;
  const RowsShared<Tiles, 2, Tiles::STAGES * COLUMNS> shared{{shared_memory()}};
  const Part<PACKED, Rows> part(whole, whole.edges_k, whole.keys, ROWS, whole.heads / whole.groups);
  const Rows& a = part.a;
  const Place& at = part.at;
  const int j0 = at.block * ROWS;
  const C above = a.above, power = a.power;
  const auto exists = [&](int r) { return j0 + r < a.valid; };
  Tiles::template load<ROWS>(shared.own(0), matrix_of(a.k, at.item, at.head), j0, a.d, exists);
  Tiles::template load<ROWS>(shared.own(1), matrix_of(a.v, at.item, at.head), j0, a.e, exists);

  typename Tiles::Sums dk, dv;
  for (int head = at.head * a.groups; head < (at.head + 1) * a.groups; head++) {
    const int keys = valid_keys(a, at.item, head);
    const Matrix q = matrix_of(a.q, at.item, head), pulled = matrix_of(a.o, at.item, head);
    const Pairs<C, PAIRS> pairs(a, at.item, head);
    const auto load = [&](int i0, int stage) {
      const auto keep = [&](int c) {
        const Query<C> query = query_of<C>(a, at.item, head, i0 + c, keys);
        return larger(query.lo, j0) < smaller(query.hi, j0 + ROWS);
      };
      Tiles::template load<COLUMNS>(shared.passing(stage, 0), q, i0, a.d, keep);
      Tiles::template load<COLUMNS>(shared.passing(stage, 1), pulled, i0, a.e, keep);
      for (int c = threadIdx.x; c < COLUMNS; c += Tiles::THREADS) {
        shared.queries()[stage * COLUMNS + c] = query_of<C>(a, at.item, head, i0 + c, keys);
        shared.numbers()[stage * COLUMNS + c] = numbers_of<C>(a, at.item, head, i0 + c, true);
      }
    };
    sweep<Tiles::STAGES>(queries_of(a, keys, j0, ROWS, COLUMNS), COLUMNS, load, [&](int i0, int stage) {
      const Query<C>* queries = shared.queries() + stage * COLUMNS;
      const RowNumbers<C>* numbers = shared.numbers() + stage * COLUMNS;
      if (PAIRS && a.mask.at) {
        clear_unseen<Tiles>(shared.passing(stage, 0), shared.passing(stage, 1),
                            [&](int c) { return sees_some_key(pairs, queries[c], i0 + c, j0, ROWS); });
      }
      typename Tiles::Scores s, u, dp;
      Tiles::multiply(s, shared.own(0), shared.passing(stage, 0));
      if constexpr (KEYS) Tiles::multiply(dp, shared.own(1), shared.passing(stage, 1));
      const bool whole = !PAIRS && all_visible(a, keys, i0, COLUMNS, j0, ROWS);
      Tiles::each_score([&](int n, int r, int c) {
        const int i = i0 + c, j = j0 + r;
        const C x = whole ? score<false>(a, pairs, queries[c], i, j, s[n]) : score<true>(a, pairs, queries[c], i, j, s[n]);
        const C p = numbers[c].template weight<N>(x, above, power);
        if constexpr (KEYS) s[n] = N::tilt(p, above) * (dropped(pairs, i, j, x, dp[n]) - numbers[c].delta);
        if constexpr (VALUES) u[n] = dropped(pairs, i, j, x, p);
      });
      if constexpr (VALUES) Tiles::add_product(dv, u, shared.passing(stage, 1), shared.scratch());
      if constexpr (KEYS) Tiles::add_product(dk, s, shared.passing(stage, 0), shared.scratch());
    });
  }
  if constexpr (KEYS) {
    store<Tiles>(dk, matrix_of(a.dk, at.item, at.head), j0, a.keys, a.d, [&](int) { return C(a.gain * a.scale); });
  }
  if constexpr (VALUES) {
    store<Tiles>(dv, matrix_of(a.dv, at.item, at.head), j0, a.keys, a.e, [&](int) { return C(a.gain); });
  }
}

// dbias (bias_items, bias_heads, L, S) for one tile, summed over the items and heads that share it.
template <class Tiles, class N>
__global__ void __launch_bounds__(Tiles::THREADS) rows_gradient_of_bias(const __grid_constant__ Rows a) {
  using C = typename Tiles::C;
  constexpr int ROWS = Tiles::ROWS, COLUMNS = Tiles::COLUMNS;
  const RowsShared<Tiles, 2, ROWS> shared{{shared_memory()}};
  const int across = blocks_of(a.keys, COLUMNS);
  const Place at(blocks_of(a.queries, ROWS) * across, a.bias_heads);
  const int i0 = at.block / across * ROWS, j0 = at.block % across * COLUMNS;
  const C above = a.above, power = a.power;
  typename Tiles::Scores total;
  Tiles::each_score([&](int n, int, int) { total[n] = 0; });
  for (int item = at.item; item < a.items; item += a.bias_items) {
    for (int head = at.head; head < a.heads; head += a.bias_heads) {
      const int keys = valid_keys(a, item, head);
      const Range range = keys_of(a, keys, i0, ROWS, COLUMNS);
      if (j0 >= range.stop || j0 < range.first) continue;
      const auto asks = [&](int r) { return i0 + r < a.queries; };
      const auto exists = [&](int c) { return j0 + c < keys; };
      Tiles::template load<ROWS>(shared.own(0), matrix_of(a.q, item, head), i0, a.d, asks);
      Tiles::template load<ROWS>(shared.own(1), matrix_of(a.o, item, head), i0, a.e, asks);
      Tiles::template load<COLUMNS>(shared.passing(0, 0), matrix_of(a.k, item, head / a.groups), j0, a.d, exists);
      Tiles::template load<COLUMNS>(shared.passing(0, 1), matrix_of(a.v, item, head / a.groups), j0, a.e, exists);
      for (int r = threadIdx.x; r < ROWS; r += Tiles::THREADS) {
        shared.queries()[r] = query_of<C>(a, item, head, i0 + r, keys);
        shared.numbers()[r] = numbers_of<C>(a, item, head, i0 + r, true);
      }
      commit_copies();
      wait_for_copies<0>();
      __syncthreads();
      const Pairs<C, true> pairs(a, item, head);
      typename Tiles::Scores s, dp;
      Tiles::multiply(s, shared.own(0), shared.passing(0, 0));
      Tiles::multiply(dp, shared.own(1), shared.passing(0, 1));
      Tiles::each_score([&](int n, int r, int c) {
        const RowNumbers<C>& row = shared.numbers()[r];
        const C x = score<true>(a, pairs, shared.queries()[r], i0 + r, j0 + c, s[n]);
        const C u = N::tilt(row.template weight<N>(x, above, power), above);
        total[n] += u * (dropped(pairs, i0 + r, j0 + c, x, dp[n]) - row.delta);
      });
      __syncthreads();
    }
  }
  const Matrix to = matrix_of(a.dbias, at.item, at.head);
  Tiles::each_score([&](int n, int r, int c) {
    if (i0 + r < a.queries && j0 + c < a.keys) *(C*)to.element(i0 + r, j0 + c) = total[n] * C(a.gain);
  });
}

}  // namespace attnkit
