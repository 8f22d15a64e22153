// Scores -‖a - b‖²/2 in the place of products, in float32 or float64 for inputs of any kind.
//
// Numbers are subtracted before they are squared, and before a gradient weighs them: a common offset of all tokens costs
// no digit, and there is no centre to subtract first. Differences of two half types are exact, but not in a half type:
// tensor cores are not used.
#pragma once

#include "plain_tiles.cuh"

namespace attnkit {

template <class Number, int ROWS, int COLUMNS, int WIDTH, int STAGES>
struct DistanceTiles : PlainTiles<decltype(number_of(Number{})), ROWS, COLUMNS, WIDTH, STAGES> {
  using Plain = PlainTiles<decltype(number_of(Number{})), ROWS, COLUMNS, WIDTH, STAGES>;
  using Input = Number;
  using typename Plain::C, typename Plain::Scores, typename Plain::Sums;
  using Plain::HIGH, Plain::WIDE, Plain::TILE_PITCH;

  template <int N, class Keep>
  static __device__ void load(C* tile, const Matrix& from, int first, int width, Keep keep) {
    if constexpr (same<Number, C>) {
      Plain::template load<N>(tile, from, first, width, keep);
    } else {
      for (int n = threadIdx.x; n < N * WIDTH; n += Plain::THREADS) {
        const int row = n / WIDTH, column = n % WIDTH;
        const bool present = keep(row) && column < width;
        tile[row * TILE_PITCH + column] = present ? to_float(*(const Number*)from.element(first + row, column)) : C(0);
      }
    }
  }

  static __device__ void compare(Scores& x, const C* own, const C* passing) {
    Plain::each_score([&](int n, int, int) { x[n] = 0; });
    for (int w = 0; w < WIDTH; w++) {
      Plain::each_score([&](int n, int row, int column) {
        const C difference = own[row * TILE_PITCH + w] - passing[column * TILE_PITCH + w];
        x[n] -= difference * difference;
      });
    }
    Plain::each_score([&](int n, int, int) { x[n] *= C(0.5); });
  }

  // Tokens of a pair without weight, which may hold NaN, are passed over.
  static __device__ void add_gradient(Sums& sums, Scores& x, const C* own, const C* passing, C* scratch) {
    Plain::hand_over(x, scratch);
    const int y = threadIdx.x / WIDE, left = threadIdx.x % WIDE;
    for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
      for (int r = 0; r < ROWS / HIGH; r++) {
        const C factor = scratch[(y + r * HIGH) * (COLUMNS + 1) + c];
#pragma unroll
        for (int w = 0; w < WIDTH / WIDE; w++) {
          const int column = left + w * WIDE;
          const C difference = passing[c * TILE_PITCH + column] - own[(y + r * HIGH) * TILE_PITCH + column];
          sums.at[r][w] += factor == 0 ? C(0) : factor * difference;
        }
      }
    }
  }
};

}  // namespace attnkit
