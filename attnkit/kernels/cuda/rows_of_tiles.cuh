// Rows of a tile that several threads share: numbers of rows, and what is reduced along them.
#pragma once

#include "distance_tiles.cuh"
#include "plain_tiles.cuh"
#include "tensor_tiles.cuh"

namespace attnkit {

// COUNT rows of Scores and Sums belong to this thread and the LANES - 1 beside it: of_score(n) says to which the element
// n of Scores belongs, place(r) which row of the tile it is.
template <class Tiles>
struct OwnRows;

template <class T, int ROWS, int COLUMNS, int WIDTH, int STAGES>
struct OwnRows<TensorTiles<T, ROWS, COLUMNS, WIDTH, STAGES>> {
  using Tiles = TensorTiles<T, ROWS, COLUMNS, WIDTH, STAGES>;
  static constexpr int COUNT = 2, LANES = 4;
  static __device__ int of_score(int n) { return n % 4 / 2; }
  static __device__ int place(int r) { return threadIdx.x / WARP * 16 + threadIdx.x % WARP / 4 + r * 8; }
  static __device__ void scale(typename Tiles::Sums& sums, int r, float by) {
#pragma unroll
    for (int n = 0; n < WIDTH / 8 * 2; n++) sums.at[n / 2][2 * r + n % 2] *= by;
  }
};

template <class T, int ROWS, int COLUMNS, int WIDTH, int STAGES>
struct OwnRows<PlainTiles<T, ROWS, COLUMNS, WIDTH, STAGES>> {
  using Tiles = PlainTiles<T, ROWS, COLUMNS, WIDTH, STAGES>;
  static constexpr int COUNT = ROWS / Tiles::HIGH, LANES = Tiles::WIDE;
  static __device__ int of_score(int n) { return n / (COLUMNS / Tiles::WIDE); }
  static __device__ int place(int r) { return threadIdx.x / LANES + r * Tiles::HIGH; }
  static __device__ void scale(typename Tiles::Sums& sums, int r, T by) {
#pragma unroll
    for (int w = 0; w < WIDTH / Tiles::WIDE; w++) sums.at[r][w] *= by;
  }
};

template <class T, int ROWS, int COLUMNS, int WIDTH, int STAGES>
struct OwnRows<DistanceTiles<T, ROWS, COLUMNS, WIDTH, STAGES>>
    : OwnRows<typename DistanceTiles<T, ROWS, COLUMNS, WIDTH, STAGES>::Plain> {};

// A number of each of this thread's rows.
template <class Tiles>
struct OfRows {
  using C = typename Tiles::C;
  static constexpr int COUNT = OwnRows<Tiles>::COUNT;
  C at[COUNT];

  __device__ explicit OfRows(C x) {
#pragma unroll
    for (int r = 0; r < COUNT; r++) at[r] = x;
  }
  __device__ C& operator[](int r) { return at[r]; }
  __device__ C& of_score(int n) { return at[OwnRows<Tiles>::of_score(n)]; }

  // join(x, y) over the threads that share a row: all of them hold the same bits afterwards.
  template <class Join>
  __device__ void reduce(Join join) {
#pragma unroll
    for (int r = 0; r < COUNT; r++) {
#pragma unroll
      for (int lanes = 1; lanes < OwnRows<Tiles>::LANES; lanes *= 2) at[r] = join(at[r], shuffle_xor(at[r], lanes));
    }
  }
  __device__ void sum() {
    reduce([](C x, C y) { return x + y; });
  }
};

// f(r, row) for each of this thread's rows.
template <class Tiles, class F>
__device__ inline void each_row(F f) {
#pragma unroll
  for (int r = 0; r < OwnRows<Tiles>::COUNT; r++) f(r, OwnRows<Tiles>::place(r));
}

// f(r, row) for each row, by one of the threads that share it.
template <class Tiles, class F>
__device__ inline void each_row_once(F f) {
  if (threadIdx.x % OwnRows<Tiles>::LANES == 0) each_row<Tiles>(f);
}

// The larger of two numbers, NaN if one is.
template <class C>
__device__ inline C greater(C x, C y) {
  return x > y || x != x ? x : y;
}

template <class C>
__device__ inline C minus_infinity() {
  return (C)float_of(0xFF800000u);
}

// Whether x holds for some thread of a warp.
__device__ inline bool any_of_warp(bool x) {
  float found = x ? 1.0f : 0.0f;
#pragma unroll
  for (int lanes = 1; lanes < WARP; lanes *= 2) found = greater(found, shuffle_xor(found, lanes));
  return found > 0;
}

// The same for a block, which tells one another in a word of shared memory.
__device__ inline bool any_of_block(bool x, int* word) {
  if (threadIdx.x == 0) *word = 0;
  __syncthreads();
  if (any_of_warp(x)) *word = 1;
  __syncthreads();
  const bool found = *word != 0;
  __syncthreads();
  return found;
}

}  // namespace attnkit
