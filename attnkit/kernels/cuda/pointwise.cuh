// Point-wise attention: o_i = gain·f_i Σ_j m_ij r_ij h(x_ij) v_j, f_i = n_i^-alpha, m the visibility and r the dropout
// of a pair, x_ij = scale·q_i·k_j + bias_ij + shift - log n_i (the logarithm if it is asked for). Gaussian attention has
// -‖q_i - k_j‖²/2 in the place of q_i·k_j, and h = exp.
//
// A kernel is a template over the arithmetic of its tiles (TensorTiles, PlainTiles or DistanceTiles), the non-linearity, and PAIRS:
// whether the call has a mask, a query_mask, a bias or dropout. Without, tiles that are seen entirely are not masked.
// PACKED sequences have none of these.
#pragma once

#include "distance_tiles.cuh"
#include "packed.cuh"
#include "plain_tiles.cuh"
#include "tensor_tiles.cuh"

namespace attnkit {

// What a block keeps in shared memory: OWN tiles of ROWS rows, in each stage two of COLUMNS rows that pass, room for
// add_product, and what distinguishes queries. `Tiles.shared_bytes` of launch.py counts it.
template <class Tiles, int OWN>
struct Shared {
  using T = typename Tiles::T;
  using C = typename Tiles::C;
  static constexpr int TILE = Tiles::COLUMNS * Tiles::TILE_PITCH, OWN_TILE = Tiles::ROWS * Tiles::TILE_PITCH;
  static constexpr int SCRATCH = (OWN * OWN_TILE + 2 * Tiles::STAGES * TILE) * (int)sizeof(T);
  static constexpr int OF_QUERIES = (SCRATCH + Tiles::SCRATCH * (int)sizeof(C) + 15) / 16 * 16;

  unsigned char* memory;

  __device__ T* own(int n) const { return (T*)memory + n * OWN_TILE; }
  __device__ T* passing(int stage, int n) const { return (T*)memory + OWN * OWN_TILE + (2 * stage + n) * TILE; }
  __device__ C* scratch() const { return (C*)(memory + SCRATCH); }
  __device__ Query<C>* queries() const { return (Query<C>*)(memory + OF_QUERIES); }
};

// use(x0, stage) for x0 = first, first + step, ... below stop, load(x0, stage) being ahead of it by STAGES - 1 steps.
template <int STAGES, class Load, class Use>
__device__ inline void sweep(Range range, int step, Load load, Use use) {
#pragma unroll
  for (int n = 0; n < STAGES - 1; n++) {
    if (range.first + n * step < range.stop) load(range.first + n * step, n);
    commit_copies();
  }
  int stage = 0;
  for (int x0 = range.first; x0 < range.stop; x0 += step) {
    const int ahead = x0 + (STAGES - 1) * step;
    if (ahead < range.stop) load(ahead, (stage + STAGES - 1) % STAGES);
    commit_copies();
    wait_for_copies<STAGES - 1>();
    __syncthreads();
    use(x0, stage);
    __syncthreads();
    stage = (stage + 1) % STAGES;
  }
}

// Zeros in the rows of two tiles that nobody sees: their products with weights of 0 would be NaN if they hold NaN.
template <class Tiles, class Seen>
__device__ inline void clear_unseen(typename Tiles::T* x, typename Tiles::T* y, Seen seen) {
  for (int row = threadIdx.x; row < Tiles::COLUMNS; row += Tiles::THREADS) {
    if (seen(row)) continue;
    Tiles::clear(x, row);
    if (y != x) Tiles::clear(y, row);
  }
  __syncthreads();
}

// Whether some of `rows` queries from i0 on sees key j.
template <class C, bool PAIRS>
__device__ inline bool key_is_seen(const Pairs<C, PAIRS>& pairs, const Query<C>* queries, int i0, int rows, int j) {
  for (int r = 0; r < rows; r++) {
    if (pairs.visible(queries[r], i0 + r, j)) return true;
  }
  return false;
}

// Whether query i sees some of `rows` keys from j0 on.
template <class C, bool PAIRS>
__device__ inline bool sees_some_key(const Pairs<C, PAIRS>& pairs, const Query<C>& query, int i, int j0, int rows) {
  for (int r = 0; r < rows; r++) {
    if (pairs.visible(query, i, j0 + r)) return true;
  }
  return false;
}

// ROWS queries of one head as own tile 0, with OWN = 2 their rows of `o` as own tile 1, and the tiles of keys that pass.
template <class Tiles, bool PAIRS, int OWN, class Memory = Shared<Tiles, OWN>>
struct QueryBlock {
  using C = typename Tiles::C;
  static constexpr int ROWS = Tiles::ROWS, COLUMNS = Tiles::COLUMNS;

  const Pointwise& a;
  const Memory shared;
  const Place at;
  const int i0, keys;
  const Matrix k, v;
  const Pairs<C, PAIRS> pairs;
  const Range range;

  __device__ QueryBlock(const Pointwise& a, const Place& at)
      : a(a), shared{shared_memory()}, at(at), i0(at.block * ROWS),
        keys(valid_keys(a, at.item, at.head)), k(matrix_of(a.k, at.item, at.head / a.groups)),
        v(matrix_of(a.v, at.item, at.head / a.groups)), pairs(a, at.item, at.head),
        range(keys_of(a, keys, i0, ROWS, COLUMNS)) {
    Query<C>* queries = shared.queries();
    for (int r = threadIdx.x; r < ROWS; r += Tiles::THREADS) queries[r] = query_of<C>(a, at.item, at.head, i0 + r, keys);
    const auto exists = [&](int r) { return i0 + r < this->a.queries; };
    Tiles::template load<ROWS>(shared.own(0), matrix_of(a.q, at.item, at.head), i0, a.d, exists);
    if (OWN == 2) Tiles::template load<ROWS>(shared.own(1), matrix_of(a.o, at.item, at.head), i0, a.e, exists);
  }

  // use(j0, stage) for each tile of keys.
  template <class Use>
  __device__ void walk(bool with_keys, bool with_values, Use use) const {
    const auto load = [&](int j0, int stage) {
      const auto keep = [&](int c) { return j0 + c >= i0 - a.left && j0 + c < range.stop; };
      if (with_keys) Tiles::template load<COLUMNS>(shared.passing(stage, 0), k, j0, a.d, keep);
      if (with_values) Tiles::template load<COLUMNS>(shared.passing(stage, 1), v, j0, a.e, keep);
    };
    sweep<Tiles::STAGES>(range, COLUMNS, load, use);
  }

  // Zeros in the rows of passing tile n that no query sees.
  __device__ void clear(int j0, int stage, int n) const {
    if (!PAIRS || !(a.mask.at || a.query_mask.at)) return;
    const Query<C>* queries = shared.queries();
    clear_unseen<Tiles>(shared.passing(stage, n), shared.passing(stage, n),
                        [&](int c) { return key_is_seen(pairs, queries, i0, ROWS, j0 + c); });
  }

  // Whether every query sees every key of the tile at j0, which is not known of pairs with a mask.
  __device__ bool whole(int j0) const { return !PAIRS && all_visible(a, keys, i0, ROWS, j0, COLUMNS); }
};

// Sums times factors of their rows, in the kind that `to` has: that of the inputs, or that of sums which are still to be
// added up.
template <class Tiles, class Factor>
__device__ inline void store(const typename Tiles::Sums& sums, const Matrix& to, int first, int rows, int columns,
                             Factor factor) {
  if (to.kind == kind_of<typename Tiles::Input>) {
    Tiles::template store<typename Tiles::Input>(sums, to, first, rows, columns, factor);
  } else {
    Tiles::template store<typename Tiles::C>(sums, to, first, rows, columns, factor);
  }
}

// r h(x) of a pair from the product q·k; with EDGE it may be invisible, and is 0 then.
template <class H, bool EDGE, class C, bool PAIRS>
__device__ inline C weight(const Pointwise& a, const Pairs<C, PAIRS>& pairs, const Query<C>& query, int i, int j,
                           C product) {
  if (EDGE && !pairs.visible(query, i, j)) return C(0);
  return pairs.after_dropout(H::value(product * C(a.scale) + pairs.addend(query, i, j)), i, j);
}

// r h'(x) du of a pair from the products q·k and du = do·v.
template <class H, bool EDGE, class C, bool PAIRS>
__device__ inline C slope(const Pointwise& a, const Pairs<C, PAIRS>& pairs, const Query<C>& query, int i, int j,
                          C product, C du) {
  if (EDGE && !pairs.visible(query, i, j)) return C(0);
  return H::slope(product * C(a.scale) + pairs.addend(query, i, j)) * pairs.after_dropout(du, i, j);
}

// At least two blocks beside one another: otherwise the compiler keeps to 128 registers, and spills some.
template <class Tiles, class H, bool PAIRS, bool PACKED = false>
__global__ void __launch_bounds__(Tiles::THREADS, 2) pointwise_forward(const __grid_constant__ Pointwise whole) {
  using C = typename Tiles::C;
  const Part<PACKED, Pointwise> part(whole, whole.edges_q, whole.queries, Tiles::ROWS, whole.heads);
  const Pointwise& a = part.a;
  const QueryBlock<Tiles, PAIRS, 1> block(a, part.at);
  const Query<C>* queries = block.shared.queries();
  const int i0 = block.i0;
  typename Tiles::Sums sums;
  block.walk(true, true, [&](int j0, int stage) {
    block.clear(j0, stage, 1);
    typename Tiles::Scores s;
    Tiles::compare(s, block.shared.own(0), block.shared.passing(stage, 0));
    if (block.whole(j0)) {
      Tiles::each_score([&](int n, int r, int c) {
        s[n] = weight<H, false>(a, block.pairs, queries[r], i0 + r, j0 + c, s[n]);
      });
    } else {
      Tiles::each_score([&](int n, int r, int c) {
        s[n] = weight<H, true>(a, block.pairs, queries[r], i0 + r, j0 + c, s[n]);
      });
    }
    Tiles::add_product(sums, s, block.shared.passing(stage, 1), block.shared.scratch());
  });
  __syncthreads();  // `queries`, where the sweep was empty
  store<Tiles>(sums, matrix_of(a.o, block.at.item, block.at.head), i0, a.queries, a.e,
               [&](int r) { return C(a.gain) * queries[r].factor; });
}

// n^-alpha into `factors` and log n into `logs`, for each query and where they are given. n is given in `lengths`, or
// counted: with a boolean mask pair by pair.
template <class C, int THREADS, bool PACKED = false>
__global__ void __launch_bounds__(THREADS) pointwise_rows(const __grid_constant__ Pointwise whole) {
  const Part<PACKED, Pointwise> part(whole, whole.edges_q, whole.queries, THREADS, whole.heads);
  const Pointwise& a = part.a;
  const Place& at = part.at;
  const int i = at.block * THREADS + threadIdx.x;
  if (i >= a.queries) return;
  const Matrix given = matrix_of(a.lengths, at.item, at.head), mask = matrix_of(a.mask, at.item, at.head);
  Matrix factors = matrix_of(a.factors, at.item, at.head), logs = matrix_of(a.logs, at.item, at.head);
  const Matrix live = matrix_of(a.query_mask, at.item, at.head);
  C n;
  if (given.at) {
    n = load_number<C>(given, i, 0);
  } else {
    int lo = larger(i - a.left, 0), hi = smaller(valid_keys(a, at.item, at.head), i + a.right + 1), count = 0;
    if (live.at && !*live.element(i, 0)) hi = lo;
    if (mask.at) {
      for (int j = lo; j < hi; j++) count += *mask.element(i, j) != 0;
    } else {
      count = larger(hi - lo, 0);
    }
    n = count > 0 ? C(count) : C(1);
  }
  if (factors.at) *(C*)factors.element(i, 0) = raised(n, C(-a.alpha));
  if (logs.at) *(C*)logs.element(i, 0) = logarithm(n);
}

}  // namespace attnkit
