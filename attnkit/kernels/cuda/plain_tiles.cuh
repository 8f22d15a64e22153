// The same arithmetic on float32 or float64, by fused multiplications and additions of each thread.
//
// 8×16 threads: thread (y, x) owns the rows y, y + 8, ... and the columns x, x + 16, ... of every result. Rows of a tile
// are one number longer than they need to be, so that neighbouring threads read different banks.
#pragma once

#include "views.cuh"

namespace attnkit {

template <class Number, int ROWS_, int COLUMNS_, int WIDTH_, int STAGES_>
struct PlainTiles {
  using T = Number;
  using C = Number;
  using Input = Number;
  static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, WIDTH = WIDTH_, STAGES = STAGES_;
  static constexpr int HIGH = 8, WIDE = 16, THREADS = HIGH * WIDE;
  static constexpr int TILE_PITCH = WIDTH + 1;
  static constexpr int SCRATCH = ROWS * (COLUMNS + 1);

  template <int N, class Keep>
  static __device__ void load(T* tile, const Matrix& from, int first, int width, Keep keep) {
    for (int n = threadIdx.x; n < N * WIDTH; n += THREADS) {
      const int row = n / WIDTH, column = n % WIDTH;
      const bool present = keep(row) && column < width;
      const char* at = present ? from.element(first + row, column) : from.at;
      copy_async<sizeof(T)>(tile + row * TILE_PITCH + column, at, present);
    }
  }

  static __device__ void clear(T* tile, int row) {
    for (int column = 0; column < WIDTH; column++) tile[row * TILE_PITCH + column] = 0;
  }

  struct Scores {
    C at[ROWS / HIGH * (COLUMNS / WIDE)];
    __device__ C& operator[](int n) { return at[n]; }
  };

  template <class F>
  static __device__ void each_score(F f) {
    const int y = threadIdx.x / WIDE, x = threadIdx.x % WIDE;
#pragma unroll
    for (int r = 0; r < ROWS / HIGH; r++) {
#pragma unroll
      for (int c = 0; c < COLUMNS / WIDE; c++) f(r * (COLUMNS / WIDE) + c, y + r * HIGH, x + c * WIDE);
    }
  }

  static __device__ void multiply(Scores& x, const T* a, const T* b) {
    each_score([&](int n, int, int) { x[n] = 0; });
    for (int w = 0; w < WIDTH; w++) {
      each_score([&](int n, int row, int column) { x[n] += a[row * TILE_PITCH + w] * b[column * TILE_PITCH + w]; });
    }
  }

  // The scores of the tokens of two tiles, before scale and bias.
  static __device__ void compare(Scores& x, const T* own, const T* passing) { multiply(x, own, passing); }

  struct Sums {
    C at[ROWS / HIGH][WIDTH / WIDE];

    __device__ Sums() {
#pragma unroll
      for (int r = 0; r < ROWS / HIGH; r++) {
#pragma unroll
        for (int w = 0; w < WIDTH / WIDE; w++) at[r][w] = 0;
      }
    }
  };

  // All threads have to call it: factors of a product change hands in `scratch`.
  static __device__ void hand_over(Scores& x, C* scratch) {
    __syncthreads();
    each_score([&](int n, int row, int column) { scratch[row * (COLUMNS + 1) + column] = x[n]; });
    __syncthreads();
  }

  static __device__ void add_product(Sums& sums, Scores& x, const T* b, C* scratch) {
    hand_over(x, scratch);
    const int y = threadIdx.x / WIDE, left = threadIdx.x % WIDE;
    for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
      for (int r = 0; r < ROWS / HIGH; r++) {
        const C factor = scratch[(y + r * HIGH) * (COLUMNS + 1) + c];
#pragma unroll
        for (int w = 0; w < WIDTH / WIDE; w++) sums.at[r][w] += factor * b[c * TILE_PITCH + left + w * WIDE];
      }
    }
  }

  // sums_r += Σ_c x_rc times the gradient of the score of r and c by the token r of `own`.
  static __device__ void add_gradient(Sums& sums, Scores& x, const T* own, const T* passing, C* scratch) {
    add_product(sums, x, passing, scratch);
  }

  // The sums of row r times factor(r) into row first + r, as numbers of type N.
  template <class N, class Factor>
  static __device__ void store(const Sums& sums, const Matrix& to, int first, int rows, int columns, Factor factor) {
    const int y = threadIdx.x / WIDE, x = threadIdx.x % WIDE;
#pragma unroll
    for (int r = 0; r < ROWS / HIGH; r++) {
      const int row = y + r * HIGH;
      if (first + row >= rows) continue;
      const C own = factor(row);
#pragma unroll
      for (int w = 0; w < WIDTH / WIDE; w++) {
        const int column = x + w * WIDE;
        if (column < columns) *(N*)to.element(first + row, column) = rounded_to<N>(sums.at[r][w] * own);
      }
    }
  }
};

}  // namespace attnkit
