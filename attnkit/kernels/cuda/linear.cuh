// Linear attention (Katharopoulos et al. 2020, eq 4-15, with the denominator): what its kernels have in common.
//
// With x = scale·φ(q), y = φ(k), den = Σ x·y + eps, g = do/den, γ = -(do·num)/den² and sums over the pairs where query i
// sees key j,
//
//     num_i = Σ_j (x_i·y_j) v_j                    dv_j = Σ_i (y_j·x_i) g_i
//     dx_i = Σ_j (g_i·v_j + γ_i) y_j               dy_j = Σ_i (v_j·g_i + γ_i) x_i
//
// All four are one sum, Σ_s (a_t·b_s + α_t β_s) c_s, of three of the tokens x, y, v, g with the factors α, β that v (1)
// and g (γ) have. Positions are divided into segments. Before its own segment, or behind it for dv and dy, the sum is
// a product with a state: S = Σ y vᵀ and z = Σ y of keys, R = Σ x gᵀ and r = Σ γ x of queries. Within, pairs are
// multiplied out. Products are fused multiplications and additions in float or double whatever the inputs are: features
// of float16 may leave its range.
//
// Query i stands at position i + shift and key j at position j; under causality position t sees positions s ≤ t. Packed
// sequences have positions and segments of their own.
#pragma once

#include "activations.cuh"
#include "packed.cuh"
#include "plain_tiles.cuh"

namespace attnkit {

// The arguments of every kernel of linear attention; `backends/cupy/linear.py` has the same structure.
struct Linear {
  View q, k, v, o;                // o: the output, or its cotangent
  View dq, dk, dv;                // gradients
  View key_mask, query_mask;      // of tokens
  View firsts, stops;             // one number for each item and head: keys that are seen have firsts ≤ j < stops
  View inverses, slopes;          // 1/den and γ of each query; not there where nothing is divided
  View keyed, queried;            // states of keys and of queries: rows are segments, columns [S, z] or [R, r]
  View initial_S, initial_z;      // what the sums over keys start from, or those over queries from their end
  View final_S, final_z;          // the whole sums
  double scale, eps;
  int heads, groups, members;     // query heads; how many share a head of k and v; how many share a state of keys
  int queries, keys, d, e;
  int stop, shift, start;         // keys from `stop` on are seen by no query; `start` is the first position
  int segment;                    // positions of a segment
  int query_positions, key_positions;
  int causal, normalize, stateful;  // stateful: a state came first, which every query sees
  const long long *edges_q, *edges_k, *reach;  // where packed sequences begin and end: tokens, and positions if causal
  int sequences, aligned;                      // aligned: the last query stands at the last key

  __device__ int positions(bool of_queries) const { return of_queries ? query_positions : key_positions; }
  __device__ const long long* edges(bool of_queries) const { return causal ? reach : of_queries ? edges_q : edges_k; }

  // Leaves one of packed sequences.
  __device__ void keep(int sequence) {
    const long long first_query = edges_q[sequence], first_key = edges_k[sequence];
    move(keyed, first_block(edges(false), sequence, segment));
    move(queried, first_block(edges(true), sequence, segment));
    queries = (int)(edges_q[sequence + 1] - first_query);
    keys = (int)(edges_k[sequence + 1] - first_key);
    shift = aligned ? keys - queries : 0;
    start = smaller(shift, 0);
    stop = causal ? smaller(keys, queries + shift) : queries ? keys : 0;
    query_positions = larger(causal ? larger(keys, queries) : queries, 1);
    key_positions = causal ? query_positions : larger(keys, 1);
    View* const of_queries[] = {&q, &o, &dq, &inverses, &slopes};
    View* const of_keys[] = {&k, &v, &dk, &dv};
    for (View* x : of_queries) move(*x, first_query);
    for (View* x : of_keys) move(*x, first_key);
  }
};

// The tokens of one query head that take part. Others are 0 before anything is computed from them.
struct Taking {
  Matrix key_mask, query_mask;
  int first, stop, queries, shift;
  bool causal, stateful;

  __device__ Taking(const Linear& l, int item, int head)
      : key_mask(matrix_of(l.key_mask, item, head)), query_mask(matrix_of(l.query_mask, item, head)), first(0),
        stop(l.stop), queries(l.queries), shift(l.shift), causal(l.causal), stateful(l.stateful) {
    const Matrix firsts = matrix_of(l.firsts, item, head), stops = matrix_of(l.stops, item, head);
    if (firsts.at) first = (int)*(const long long*)firsts.at;
    if (stops.at && *(const long long*)stops.at < stop) stop = (int)*(const long long*)stops.at;
  }

  __device__ bool key(int j) const {
    return j >= first && j < stop && (!key_mask.at || *key_mask.element(j, 0));
  }

  // Whether query i sees a key or a state.
  __device__ bool query(int i) const {
    if (i < 0 || i >= queries || (query_mask.at && !*query_mask.element(i, 0))) return false;
    return stateful || (first < stop && (!causal || i + shift >= first));
  }
};

// The four tokens by position: `at(p, n)` is element n of their `width`, `factor(p)` their α or β.
template <class C, class Phi>
struct QueryFeatures {
  static constexpr bool FACTOR = false;
  Taking taking;
  Matrix q;
  int width;
  C scale;

  __device__ QueryFeatures(const Linear& l, int item, int head)
      : taking(l, item, head), q(matrix_of(l.q, item, head)), width(l.d), scale(C(l.scale)) {}
  __device__ bool present(int p) const { return taking.query(p - taking.shift); }
  __device__ C at(int p, int n) const { return scale * Phi::value(load_number<C>(q, p - taking.shift, n)); }
  __device__ C factor(int p) const { return C(0); }
};

template <class C, class Phi>
struct KeyFeatures {
  static constexpr bool FACTOR = false;
  Taking taking;
  Matrix k;
  int width;

  __device__ KeyFeatures(const Linear& l, int item, int head)
      : taking(l, item, head), k(matrix_of(l.k, item, head / l.groups)), width(l.d) {}
  __device__ bool present(int p) const { return taking.key(p); }
  __device__ C at(int p, int n) const { return Phi::value(load_number<C>(k, p, n)); }
  __device__ C factor(int p) const { return C(0); }
};

template <class C>
struct Values {
  static constexpr bool FACTOR = true;
  Taking taking;
  Matrix v;
  int width;

  __device__ Values(const Linear& l, int item, int head)
      : taking(l, item, head), v(matrix_of(l.v, item, head / l.groups)), width(l.e) {}
  __device__ bool present(int p) const { return taking.key(p); }
  __device__ C at(int p, int n) const { return load_number<C>(v, p, n); }
  __device__ C factor(int p) const { return C(1); }
};

template <class C>
struct Cotangents {
  static constexpr bool FACTOR = true;
  Taking taking;
  Matrix pulled, inverses, slopes;
  int width;

  __device__ Cotangents(const Linear& l, int item, int head)
      : taking(l, item, head), pulled(matrix_of(l.o, item, head)), inverses(matrix_of(l.inverses, item, head)),
        slopes(matrix_of(l.slopes, item, head)), width(l.e) {}
  __device__ bool present(int p) const { return taking.query(p - taking.shift); }
  __device__ C at(int p, int n) const {
    const C x = load_number<C>(pulled, p - taking.shift, n);
    return inverses.at ? x * *(const C*)inverses.element(p - taking.shift, 0) : x;
  }
  __device__ C factor(int p) const { return slopes.at ? *(const C*)slopes.element(p - taking.shift, 0) : C(0); }
};

// What a block keeps in shared memory; `shared_bytes` of linear.py counts it.
template <class Tiles>
struct LinearShared {
  using C = typename Tiles::C;
  static constexpr int OWN = Tiles::ROWS * Tiles::TILE_PITCH, PASSING = Tiles::COLUMNS * Tiles::TILE_PITCH;

  C* memory;

  __device__ C* own() const { return memory; }
  __device__ C* passing(int n) const { return memory + OWN + n * PASSING; }
  __device__ C* scratch() const { return memory + OWN + 2 * PASSING; }
  __device__ C* of_rows() const { return scratch() + Tiles::SCRATCH; }
  __device__ C* of_columns() const { return of_rows() + Tiles::ROWS; }
};

// Tokens of the positions p0 .. p0 + N - 1 into a tile, and their factors; 0 where a token takes no part.
template <class Tiles, int N, class Token, class C>
__device__ inline void load_tokens(C* tile, C* factors, const Token& token, int p0) {
  for (int n = threadIdx.x; n < N * Tiles::WIDTH; n += Tiles::THREADS) {
    const int row = n / Tiles::WIDTH, column = n % Tiles::WIDTH;
    const bool present = column < token.width && token.present(p0 + row);
    tile[row * Tiles::TILE_PITCH + column] = present ? token.at(p0 + row, column) : C(0);
  }
  if (!factors) return;
  for (int n = threadIdx.x; n < N; n += Tiles::THREADS) factors[n] = token.present(p0 + n) ? token.factor(p0 + n) : C(0);
}

// f(sum, row, column) for each sum that this thread has.
template <class Tiles, class F>
__device__ inline void each_sum(typename Tiles::Sums& sums, F f) {
  const int y = threadIdx.x / Tiles::WIDE, x = threadIdx.x % Tiles::WIDE;
#pragma unroll
  for (int r = 0; r < Tiles::ROWS / Tiles::HIGH; r++) {
#pragma unroll
    for (int w = 0; w < Tiles::WIDTH / Tiles::WIDE; w++) f(sums.at[r][w], y + r * Tiles::HIGH, x + w * Tiles::WIDE);
  }
}

// Σ_c x_rc weight(c) of the factors that add_product has left in `scratch`, for the row r of this thread, if it has one.
template <class Tiles, class C, class Weight>
__device__ inline C row_sum(const C* scratch, Weight weight) {
  C sum = 0;
  if (threadIdx.x < Tiles::ROWS) {
    for (int c = 0; c < Tiles::COLUMNS; c++) sum += scratch[threadIdx.x * (Tiles::COLUMNS + 1) + c] * weight(c);
  }
  return sum;
}

// The state that a position's segment starts from, (d, e) numbers in rows and a vector of d behind them.
template <class C>
struct State {
  const C* at;  // 0 where there is nothing before the only segment
  int row, column;
  const C* vector;

  __device__ State turned() const { return {at, column, row, vector}; }
};

template <class C>
__device__ inline State<C> state_of(const Linear& l, const View& states, int item, int held, int p0) {
  const Matrix own = matrix_of(states, item, held);
  const C* at = own.at ? (const C*)own.element(l.causal ? (p0 - l.start) / l.segment : 0, 0) : nullptr;
  return {at, l.e, 1, at ? at + (long long)l.d * l.e : nullptr};
}

// sums_rw += Σ_s (a_r·b_s + α_r β_s) c_sw for ROWS positions from p0 on, over the state and the segment of p0, forwards
// or backwards. With TOTAL the answer is Σ_s a_r·b_s for the row of this thread. All threads have to call it.
template <class Tiles, bool BACKWARDS, bool TOTAL, class A, class B, class T>
__device__ inline typename Tiles::C add_tokens(typename Tiles::Sums& sums, const Linear& l,
                                               const LinearShared<Tiles>& shared, const A& a, const B& b, const T& c,
                                               const State<typename Tiles::C>& state, int p0, int positions) {
  using C = typename Tiles::C;
  constexpr int COLUMNS = Tiles::COLUMNS, PITCH = Tiles::TILE_PITCH;
  constexpr bool FACTORS = A::FACTOR && B::FACTOR;
  C total = 0;
  typename Tiles::Scores x;
  __syncthreads();  // what was there before is not needed any more
  load_tokens<Tiles, Tiles::ROWS>(shared.own(), A::FACTOR ? shared.of_rows() : nullptr, a, p0);
  for (int f0 = 0; state.at && f0 < a.width; f0 += COLUMNS) {
    for (int n = threadIdx.x; n < COLUMNS * Tiles::WIDTH; n += Tiles::THREADS) {
      const int f = f0 + n / Tiles::WIDTH, w = n % Tiles::WIDTH;
      const bool present = f < a.width && w < c.width;
      shared.passing(1)[n / Tiles::WIDTH * PITCH + w] = present ? state.at[f * state.row + w * state.column] : C(0);
    }
    __syncthreads();
    Tiles::each_score([&](int n, int row, int column) { x[n] = shared.own()[row * PITCH + f0 + column]; });
    Tiles::add_product(sums, x, shared.passing(1), shared.scratch());
    if (TOTAL) {
      total += row_sum<Tiles>(shared.scratch(), [&](int n) { return f0 + n < a.width ? state.vector[f0 + n] : C(0); });
    }
    __syncthreads();
  }
  if (A::FACTOR && state.at) {
    each_sum<Tiles>(sums, [&](C& sum, int row, int w) {
      if (w < c.width) sum += shared.of_rows()[row] * state.vector[w];
    });
  }
  if (!l.causal) return total;
  const int begin = l.start + (p0 - l.start) / l.segment * l.segment;
  const int first = BACKWARDS ? p0 : begin;
  const int last = BACKWARDS ? smaller(begin + l.segment, l.start + positions) : p0 + 1;
  for (int s0 = first; s0 < last; s0 += COLUMNS) {
    load_tokens<Tiles, COLUMNS>(shared.passing(0), FACTORS ? shared.of_columns() : nullptr, b, s0);
    load_tokens<Tiles, COLUMNS>(shared.passing(1), (C*)nullptr, c, s0);
    __syncthreads();
    Tiles::multiply(x, shared.own(), shared.passing(0));
    Tiles::each_score([&](int n, int row, int column) {
      if (FACTORS) x[n] += shared.of_rows()[row] * shared.of_columns()[column];
      if (BACKWARDS ? s0 + column < p0 + row : s0 + column > p0 + row) x[n] = 0;
    });
    Tiles::add_product(sums, x, shared.passing(1), shared.scratch());
    if (TOTAL) total += row_sum<Tiles>(shared.scratch(), [](int) { return C(1); });
    __syncthreads();
  }
  return total;
}

}  // namespace attnkit
