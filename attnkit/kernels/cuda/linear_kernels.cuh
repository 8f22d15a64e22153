// The kernels of linear attention, in the order in which they run: the sums of segments, their running sums, then every
// tile of results on its own. Nothing is saved between forward and backward, and every block owns its results.
#pragma once

#include "linear.cuh"

namespace attnkit {

// sums_rw += Σ_s a_s,f0+r c_sw over the positions begin ≤ s < end. The answer is Σ_s a_s,f0+r γ_s for the row of this
// thread. All threads have to call it.
template <class Tiles, class A, class T>
__device__ inline typename Tiles::C add_products(typename Tiles::Sums& sums, const LinearShared<Tiles>& shared,
                                                 const A& a, const T& c, int f0, int begin, int end) {
  using C = typename Tiles::C;
  C vector = 0;
  for (int s0 = begin; s0 < end; s0 += Tiles::COLUMNS) {
    __syncthreads();
    load_tokens<Tiles, Tiles::COLUMNS>(shared.passing(0), shared.of_columns(), c, s0);
    typename Tiles::Scores x;
    Tiles::each_score([&](int n, int row, int column) {
      const bool present = f0 + row < a.width && a.present(s0 + column);
      x[n] = present ? a.at(s0 + column, f0 + row) : C(0);
    });
    Tiles::add_product(sums, x, shared.passing(0), shared.scratch());
    vector += row_sum<Tiles>(shared.scratch(), [&](int n) { return shared.of_columns()[n]; });
  }
  return vector;
}

// ROWS features of the state of a segment: S and z of keys, or R and r of queries.
template <class Tiles, class Phi, bool QUERIES, bool PACKED = false>
__global__ void __launch_bounds__(Tiles::THREADS, 2) linear_sums(const __grid_constant__ Linear whole) {
  using C = typename Tiles::C;
  constexpr int ROWS = Tiles::ROWS;
  const LinearShared<Tiles> shared = {(C*)shared_memory()};
  const int across = blocks_of(whole.d, ROWS), members = QUERIES ? 1 : whole.members;
  const Part<PACKED, Linear> part(whole, whole.edges(QUERIES), whole.positions(QUERIES), whole.segment,
                                  whole.heads / members * across);
  const Linear& l = part.a;
  const Place& at = part.at;
  const int f0 = at.head % across * ROWS, held = at.head / across, head = held * members;
  const int begin = l.start + at.block * l.segment;
  const int end = smaller(begin + l.segment, l.start + l.positions(QUERIES));
  if (at.block * l.segment >= l.positions(QUERIES)) return;

  typename Tiles::Sums sums;
  C vector;
  if constexpr (QUERIES) {
    vector = add_products<Tiles>(sums, shared, QueryFeatures<C, Phi>(l, at.item, head),
                                 Cotangents<C>(l, at.item, head), f0, begin, end);
  } else {
    vector = add_products<Tiles>(sums, shared, KeyFeatures<C, Phi>(l, at.item, head), Values<C>(l, at.item, head), f0,
                                 begin, end);
  }
  C* state = (C*)matrix_of(QUERIES ? l.queried : l.keyed, at.item, held).element(at.block, 0);
  each_sum<Tiles>(sums, [&](C& sum, int row, int w) {
    if (f0 + row < l.d && w < l.e) state[(f0 + row) * l.e + w] = sum;
  });
  if (threadIdx.x < ROWS && f0 + threadIdx.x < l.d) state[l.d * l.e + f0 + threadIdx.x] = vector;
}

// The states of segments become the sums of those before them, or behind them for queries; without causality the first
// becomes the total. Sums start from `initial`, and the total goes to `final` as well.
template <class C, int THREADS, bool QUERIES, bool PACKED = false>
__global__ void __launch_bounds__(THREADS) linear_running(const __grid_constant__ Linear whole) {
  const int size = whole.d * whole.e + whole.d, members = QUERIES ? 1 : whole.members;
  const int across = blocks_of(size, THREADS);
  const Part<PACKED, Linear> part(whole, whole.edges(QUERIES), whole.positions(QUERIES), OPEN,
                                  whole.heads / members * across);
  const Linear& l = part.a;
  const Place& at = part.at;
  const int n = at.head % across * THREADS + threadIdx.x, held = at.head / across;
  const int segments = blocks_of(l.positions(QUERIES), l.segment);
  if (at.block || n >= size) return;
  const bool in_S = n < l.d * l.e;
  const int row = in_S ? n / l.e : n - l.d * l.e, column = in_S ? n % l.e : 0;
  const int shared = held * members / l.groups;  // the gradient of a state goes to the first head of its group
  const bool first = !QUERIES || held % l.groups == 0;
  C total = 0;
  if (whole.initial_S.at && first) {
    total = load_number<C>(matrix_of(in_S ? whole.initial_S : whole.initial_z, at.item, shared), row, column);
  }
  const Matrix states = matrix_of(QUERIES ? l.queried : l.keyed, at.item, held);
  for (int step = 0; step < segments; step++) {
    C* state = (C*)states.element(QUERIES ? segments - 1 - step : step, 0);
    const C own = state[n];
    if (l.causal) state[n] = total;
    total += own;
  }
  if (!l.causal) ((C*)states.element(0, 0))[n] = total;
  const Matrix final = matrix_of(in_S ? whole.final_S : whole.final_z, at.item, held);
  if (final.at) *(C*)final.element(row, column) = total;
}

// num of a tile into `sums`, and 1/den of its queries into `of_rows`; 0 for those that see nothing.
template <class Tiles, class Phi>
__device__ inline void numerators(typename Tiles::Sums& sums, const Linear& l, const LinearShared<Tiles>& shared,
                                  int item, int head, int p0) {
  using C = typename Tiles::C;
  const QueryFeatures<C, Phi> x(l, item, head);
  const C raw = add_tokens<Tiles, false, true>(
      sums, l, shared, x, KeyFeatures<C, Phi>(l, item, head), Values<C>(l, item, head),
      state_of<C>(l, l.keyed, item, head / l.members, p0), p0, l.query_positions);
  if (threadIdx.x < Tiles::ROWS) {
    const C den = raw + C(l.eps);
    const C inverse = l.normalize ? (den != 0 ? 1 / den : C(0)) : C(1);
    shared.of_rows()[threadIdx.x] = x.present(p0 + threadIdx.x) ? inverse : C(0);
  }
  __syncthreads();
}

// o = num/den.
template <class Tiles, class Phi, bool PACKED = false>
__global__ void __launch_bounds__(Tiles::THREADS, 2) linear_forward(const __grid_constant__ Linear whole) {
  using C = typename Tiles::C;
  const LinearShared<Tiles> shared = {(C*)shared_memory()};
  const Part<PACKED, Linear> part(whole, whole.edges(true), whole.query_positions, Tiles::ROWS, whole.heads);
  const Linear& l = part.a;
  const Place& at = part.at;
  if (at.block * Tiles::ROWS >= l.query_positions) return;
  const int p0 = l.start + at.block * Tiles::ROWS;
  typename Tiles::Sums sums;
  numerators<Tiles, Phi>(sums, l, shared, at.item, at.head, p0);
  const Matrix o = matrix_of(l.o, at.item, at.head);
  each_sum<Tiles>(sums, [&](C& sum, int row, int w) {
    const int i = p0 + row - l.shift;
    const C inverse = shared.of_rows()[row];
    if (i >= 0 && i < l.queries && w < l.e) store_number(o, i, w, inverse == 0 ? C(0) : sum * inverse);
  });
}

// 1/den and γ = -(do·num)/den² of each query.
template <class Tiles, class Phi, bool PACKED = false>
__global__ void __launch_bounds__(Tiles::THREADS, 2) linear_rows(const __grid_constant__ Linear whole) {
  using C = typename Tiles::C;
  constexpr int PITCH = Tiles::COLUMNS + 1;
  const LinearShared<Tiles> shared = {(C*)shared_memory()};
  const Part<PACKED, Linear> part(whole, whole.edges(true), whole.query_positions, Tiles::ROWS, whole.heads);
  const Linear& l = part.a;
  const Place& at = part.at;
  if (at.block * Tiles::ROWS >= l.query_positions) return;
  const int p0 = l.start + at.block * Tiles::ROWS;
  typename Tiles::Sums sums;
  numerators<Tiles, Phi>(sums, l, shared, at.item, at.head, p0);
  const Taking taking(l, at.item, at.head);
  const Matrix pulled = matrix_of(l.o, at.item, at.head);
  each_sum<Tiles>(sums, [&](C& sum, int row, int w) {
    const int i = p0 + row - l.shift;
    sum = taking.query(i) && w < l.e ? load_number<C>(pulled, i, w) * sum : C(0);
  });
#pragma unroll
  for (int r = 0; r < Tiles::ROWS / Tiles::HIGH; r++) {
    C own = 0;
#pragma unroll
    for (int w = 0; w < Tiles::WIDTH / Tiles::WIDE; w++) own += sums.at[r][w];
    shared.scratch()[(threadIdx.x / Tiles::WIDE + r * Tiles::HIGH) * PITCH + threadIdx.x % Tiles::WIDE] = own;
  }
  __syncthreads();
  const int row = threadIdx.x, i = p0 + row - l.shift;
  if (row >= Tiles::ROWS || i < 0 || i >= l.queries) return;
  C dot = 0;
  for (int n = 0; n < Tiles::WIDE; n++) dot += shared.scratch()[row * PITCH + n];
  const C inverse = shared.of_rows()[row];
  *(C*)matrix_of(l.inverses, at.item, at.head).element(i, 0) = inverse;
  *(C*)matrix_of(l.slopes, at.item, at.head).element(i, 0) = inverse == 0 ? C(0) : -dot * inverse * inverse;
}

// dq = scale·φ'(q)·dx.
template <class Tiles, class Phi, bool PACKED = false>
__global__ void __launch_bounds__(Tiles::THREADS, 2) linear_gradient_of_queries(const __grid_constant__ Linear whole) {
  using C = typename Tiles::C;
  const LinearShared<Tiles> shared = {(C*)shared_memory()};
  const Part<PACKED, Linear> part(whole, whole.edges(true), whole.query_positions, Tiles::ROWS, whole.heads);
  const Linear& l = part.a;
  const Place& at = part.at;
  if (at.block * Tiles::ROWS >= l.query_positions) return;
  const int p0 = l.start + at.block * Tiles::ROWS;
  typename Tiles::Sums sums;
  add_tokens<Tiles, false, false>(sums, l, shared, Cotangents<C>(l, at.item, at.head), Values<C>(l, at.item, at.head),
                                  KeyFeatures<C, Phi>(l, at.item, at.head),
                                  state_of<C>(l, l.keyed, at.item, at.head / l.members, p0).turned(), p0,
                                  l.query_positions);
  const Taking taking(l, at.item, at.head);
  const Matrix q = matrix_of(l.q, at.item, at.head), dq = matrix_of(l.dq, at.item, at.head);
  each_sum<Tiles>(sums, [&](C& sum, int row, int w) {
    const int i = p0 + row - l.shift;
    if (i < 0 || i >= l.queries || w >= l.d) return;
    store_number(dq, i, w, taking.query(i) ? sum * C(l.scale) * Phi::slope(load_number<C>(q, i, w)) : C(0));
  });
}

// Whether some query head of a group sees key j.
__device__ inline bool key_takes_part(const Linear& l, int item, int shared, int j) {
  for (int head = shared * l.groups; head < (shared + 1) * l.groups; head++) {
    if (Taking(l, item, head).key(j)) return true;
  }
  return false;
}

// dk = φ'(k)·Σ dy over the query heads of a group.
template <class Tiles, class Phi, bool PACKED = false>
__global__ void __launch_bounds__(Tiles::THREADS, 2) linear_gradient_of_keys(const __grid_constant__ Linear whole) {
  using C = typename Tiles::C;
  const LinearShared<Tiles> shared = {(C*)shared_memory()};
  const Part<PACKED, Linear> part(whole, whole.edges(false), whole.key_positions, Tiles::ROWS, whole.heads / whole.groups);
  const Linear& l = part.a;
  const Place& at = part.at;
  if (at.block * Tiles::ROWS >= l.key_positions) return;
  const int p0 = l.start + at.block * Tiles::ROWS;
  typename Tiles::Sums sums;
  for (int head = at.head * l.groups; head < (at.head + 1) * l.groups; head++) {
    add_tokens<Tiles, true, false>(sums, l, shared, Values<C>(l, at.item, head), Cotangents<C>(l, at.item, head),
                                   QueryFeatures<C, Phi>(l, at.item, head),
                                   state_of<C>(l, l.queried, at.item, head, p0).turned(), p0, l.key_positions);
  }
  const Matrix k = matrix_of(l.k, at.item, at.head), dk = matrix_of(l.dk, at.item, at.head);
  each_sum<Tiles>(sums, [&](C& sum, int row, int w) {
    const int j = p0 + row;
    if (j < 0 || j >= l.keys || w >= l.d) return;
    const bool seen = key_takes_part(l, at.item, at.head, j);
    store_number(dk, j, w, seen ? sum * Phi::slope(load_number<C>(k, j, w)) : C(0));
  });
}

// dv over the query heads of a group.
template <class Tiles, class Phi, bool PACKED = false>
__global__ void __launch_bounds__(Tiles::THREADS, 2) linear_gradient_of_values(const __grid_constant__ Linear whole) {
  using C = typename Tiles::C;
  const LinearShared<Tiles> shared = {(C*)shared_memory()};
  const Part<PACKED, Linear> part(whole, whole.edges(false), whole.key_positions, Tiles::ROWS, whole.heads / whole.groups);
  const Linear& l = part.a;
  const Place& at = part.at;
  if (at.block * Tiles::ROWS >= l.key_positions) return;
  const int p0 = l.start + at.block * Tiles::ROWS;
  typename Tiles::Sums sums;
  for (int head = at.head * l.groups; head < (at.head + 1) * l.groups; head++) {
    add_tokens<Tiles, true, false>(sums, l, shared, KeyFeatures<C, Phi>(l, at.item, head),
                                   QueryFeatures<C, Phi>(l, at.item, head), Cotangents<C>(l, at.item, head),
                                   state_of<C>(l, l.queried, at.item, head, p0), p0, l.key_positions);
  }
  const Matrix dv = matrix_of(l.dv, at.item, at.head);
  each_sum<Tiles>(sums, [&](C& sum, int row, int w) {
    const int j = p0 + row;
    if (j < 0 || j >= l.keys || w >= l.e) return;
    store_number(dv, j, w, key_takes_part(l, at.item, at.head, j) ? sum : C(0));
  });
}

}  // namespace attnkit
