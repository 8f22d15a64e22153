// The gradients of point-wise attention. With the names of pointwise.cuh,
//
//     dv_j = gain Σ_i m r f_i h(x) do_i       ds_ij = m r f_i h'(x) do_i·v_j
//     dq_i = gain·scale Σ_j ds_ij k_j         dk_j = gain·scale Σ_i ds_ij q_i         dbias_ij = gain·ds_ij
//
// With distances, k_j - q_i takes the place of k_j in dq, and of q_i in dk with the other sign.
//
// No maximum, no sum and nothing saved. Every block owns its results, so that sums have one order: dq by queries, dk and
// dv by keys, dbias by tiles.
#pragma once

#include "pointwise.cuh"

namespace attnkit {

// Packed, two blocks beside one another are asked for: the sizes of a sequence need registers beyond those that the
// compiler would keep to.
template <class Tiles, class H, bool PAIRS, bool PACKED = false>
__global__ void __launch_bounds__(Tiles::THREADS, PACKED ? 2 : 0)
pointwise_gradient_of_queries(const __grid_constant__ Pointwise whole) {
  using C = typename Tiles::C;
  const Part<PACKED, Pointwise> part(whole, whole.edges_q, whole.queries, Tiles::ROWS, whole.heads);
  const Pointwise& a = part.a;
  const QueryBlock<Tiles, PAIRS, 2> block(a, part.at);
  const Query<C>* queries = block.shared.queries();
  const int i0 = block.i0;
  typename Tiles::Sums sums;
  block.walk(true, true, [&](int j0, int stage) {
    block.clear(j0, stage, 0);
    typename Tiles::Scores s, du;
    Tiles::compare(s, block.shared.own(0), block.shared.passing(stage, 0));
    Tiles::multiply(du, block.shared.own(1), block.shared.passing(stage, 1));
    if (block.whole(j0)) {
      Tiles::each_score([&](int n, int r, int c) {
        s[n] = slope<H, false>(a, block.pairs, queries[r], i0 + r, j0 + c, s[n], du[n]);
      });
    } else {
      Tiles::each_score([&](int n, int r, int c) {
        s[n] = slope<H, true>(a, block.pairs, queries[r], i0 + r, j0 + c, s[n], du[n]);
      });
    }
    Tiles::add_gradient(sums, s, block.shared.own(0), block.shared.passing(stage, 0), block.shared.scratch());
  });
  __syncthreads();  // `queries`, where the sweep was empty
  store<Tiles>(sums, matrix_of(a.dq, block.at.item, block.at.head), i0, a.queries, a.d,
               [&](int r) { return C(a.gain * a.scale) * queries[r].factor; });
}

// dk if KEYS, dv if VALUES; both at once where registers allow it. Rows of tiles are keys, columns are queries.
template <class Tiles, class H, bool PAIRS, bool KEYS, bool VALUES, bool PACKED = false>
__global__ void __launch_bounds__(Tiles::THREADS, PACKED ? 2 : 0) pointwise_gradient_of_keys(const __grid_constant__ Pointwise whole) {
  using C = typename Tiles::C;
  constexpr int ROWS = Tiles::ROWS, COLUMNS = Tiles::COLUMNS;
  const Shared<Tiles, 2> shared = {shared_memory()};
  const Part<PACKED, Pointwise> part(whole, whole.edges_k, whole.keys, ROWS, whole.heads / whole.groups);
  const Pointwise& a = part.a;
  const Place& at = part.at;
  const int j0 = at.block * ROWS;
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
      Query<C>* queries = shared.queries() + stage * COLUMNS;
      for (int c = threadIdx.x; c < COLUMNS; c += Tiles::THREADS) {
        queries[c] = query_of<C>(a, at.item, head, i0 + c, keys);
      }
    };
    sweep<Tiles::STAGES>(queries_of(a, keys, j0, ROWS, COLUMNS), COLUMNS, load, [&](int i0, int stage) {
      const Query<C>* queries = shared.queries() + stage * COLUMNS;
      if (PAIRS && a.mask.at) {
        clear_unseen<Tiles>(shared.passing(stage, 0), shared.passing(stage, 1),
                            [&](int c) { return sees_some_key(pairs, queries[c], i0 + c, j0, ROWS); });
      }
      typename Tiles::Scores s, u, du;
      Tiles::compare(s, shared.own(0), shared.passing(stage, 0));
      if constexpr (KEYS) Tiles::multiply(du, shared.own(1), shared.passing(stage, 1));
      if (!PAIRS && all_visible(a, keys, i0, COLUMNS, j0, ROWS)) {
        Tiles::each_score([&](int n, int r, int c) {
          const Query<C>& query = queries[c];
          if constexpr (VALUES) u[n] = weight<H, false>(a, pairs, query, i0 + c, j0 + r, s[n]) * query.factor;
          if constexpr (KEYS) s[n] = slope<H, false>(a, pairs, query, i0 + c, j0 + r, s[n], du[n] * query.factor);
        });
      } else {
        Tiles::each_score([&](int n, int r, int c) {
          const Query<C>& query = queries[c];
          if constexpr (VALUES) u[n] = weight<H, true>(a, pairs, query, i0 + c, j0 + r, s[n]) * query.factor;
          if constexpr (KEYS) s[n] = slope<H, true>(a, pairs, query, i0 + c, j0 + r, s[n], du[n] * query.factor);
        });
      }
      if constexpr (VALUES) Tiles::add_product(dv, u, shared.passing(stage, 1), shared.scratch());
      if constexpr (KEYS) Tiles::add_gradient(dk, s, shared.own(0), shared.passing(stage, 0), shared.scratch());
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
template <class Tiles, class H>
__global__ void __launch_bounds__(Tiles::THREADS) pointwise_gradient_of_bias(const __grid_constant__ Pointwise a) {
  using C = typename Tiles::C;
  constexpr int ROWS = Tiles::ROWS, COLUMNS = Tiles::COLUMNS;
  const Shared<Tiles, 2> shared = {shared_memory()};
  const int across = blocks_of(a.keys, COLUMNS);
  const Place at(blocks_of(a.queries, ROWS) * across, a.bias_heads);
  const int i0 = at.block / across * ROWS, j0 = at.block % across * COLUMNS;
  Query<C>* queries = shared.queries();
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
      for (int r = threadIdx.x; r < ROWS; r += Tiles::THREADS) queries[r] = query_of<C>(a, item, head, i0 + r, keys);
      commit_copies();
      wait_for_copies<0>();
      __syncthreads();
      const Pairs<C, true> pairs(a, item, head);
      typename Tiles::Scores s, du;
      Tiles::compare(s, shared.own(0), shared.passing(0, 0));
      Tiles::multiply(du, shared.own(1), shared.passing(0, 1));
      Tiles::each_score([&](int n, int r, int c) {
        total[n] += slope<H, true>(a, pairs, queries[r], i0 + r, j0 + c, s[n], du[n] * queries[r].factor);
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
