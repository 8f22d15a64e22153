// Matrix arithmetic of a block of threads on 16-bit numbers, by tensor cores with float32 sums.
//
// A tile has N rows of WIDTH numbers in shared memory, in pieces of 16 bytes whose places are exchanged within a row so
// that the eight rows of a fragment lie in different banks. A warp owns 16 of the ROWS rows of every result.
#pragma once

#include "views.cuh"

namespace attnkit {

template <class Number, int ROWS_, int COLUMNS_, int WIDTH_, int STAGES_>
struct TensorTiles {
  using T = Number;
  using C = float;
  using Input = Number;
  static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, WIDTH = WIDTH_, STAGES = STAGES_;
  static constexpr int THREADS = ROWS / 16 * WARP;
  static constexpr int TILE_PITCH = WIDTH;  // numbers from row to row
  static constexpr int SCRATCH = 0;         // numbers that add_product needs

  static constexpr int PIECE = 8, PIECES = WIDTH / PIECE;
  static constexpr int LINE = PIECES >= 8 ? 1 : 8 / PIECES;  // rows in 128 bytes
  static constexpr int EXCHANGED = (PIECES >= 8 ? 8 : PIECES) - 1;

  static __device__ int place(int row, int column) {
    return row * WIDTH + (((column / PIECE) ^ ((row / LINE) & EXCHANGED)) * PIECE) + column % PIECE;
  }

  // Rows first .. first + N - 1 of a (tokens, width) matrix, zeros where keep(row) is false and beyond the width.
  template <int N, class Keep>
  static __device__ void load(T* tile, const Matrix& from, int first, int width, Keep keep) {
    const bool whole_pieces = from.column == sizeof(T) && from.row % 16 == 0 && width % PIECE == 0 &&
                              (unsigned long long)from.at % 16 == 0;
    for (int n = threadIdx.x; n < N * PIECES; n += THREADS) {
      const int row = n / PIECES, column = n % PIECES * PIECE;
      T* to = tile + place(row, column);
      const bool kept = keep(row);
      if (whole_pieces) {
        const bool present = kept && column < width;
        copy_async<16>(to, present ? from.element(first + row, column) : from.at, present);
      } else {
        for (int c = 0; c < PIECE; c++) {
          const bool present = kept && column + c < width;
          to[c] = present ? *(const T*)from.element(first + row, column + c) : T{0};
        }
      }
    }
  }

  static __device__ void clear(T* tile, int row) {
    for (int column = 0; column < WIDTH; column++) tile[place(row, column)] = T{0};
  }

  // (ROWS, COLUMNS) numbers, divided among the threads.
  struct Scores {
    C at[COLUMNS / 8][4];
    __device__ C& operator[](int n) { return at[n / 4][n % 4]; }
  };

  // f(n, row, column) for each element n of Scores that this thread has.
  template <class F>
  static __device__ void each_score(F f) {
    const int lane = threadIdx.x % WARP, row = threadIdx.x / WARP * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < COLUMNS / 8 * 4; n++) f(n, row + n % 4 / 2 * 8, n / 4 * 8 + lane % 4 * 2 + n % 2);
  }

  // x_rc = Σ_w a_rw b_cw.
  static __device__ void multiply(Scores& x, const T* a, const T* b) {
    const int lane = threadIdx.x % WARP, row = threadIdx.x / WARP * 16;
#pragma unroll
    for (int n = 0; n < COLUMNS / 8 * 4; n++) x[n] = 0;
#pragma unroll
    for (int w = 0; w < WIDTH; w += 16) {
      unsigned of_a[4];
      load_matrices(of_a, a + place(row + lane % 16, w + lane / 16 * 8));
#pragma unroll
      for (int c = 0; c < COLUMNS / 16; c++) {
        unsigned of_b[4];
        load_matrices(of_b, b + place(c * 16 + lane / 16 * 8 + lane % 8, w + lane / 8 % 2 * 8));
        multiply_add<T>(x.at[2 * c], of_a, of_b[0], of_b[1]);
        multiply_add<T>(x.at[2 * c + 1], of_a, of_b[2], of_b[3]);
      }
    }
  }

  // The scores of the tokens of two tiles, before scale and bias.
  static __device__ void compare(Scores& x, const T* own, const T* passing) { multiply(x, own, passing); }

  // (ROWS, WIDTH) sums of products, each row times a power of two; `size` has it for the two rows of this thread.
  //
  // float16 has little range: there each row of a factor is divided by the power of two below the largest element that
  // the row has had so far, and the sums with it.
  struct Sums {
    C at[WIDTH / 8][4];
    C size[2];

    __device__ Sums() {
#pragma unroll
      for (int n = 0; n < WIDTH / 8 * 4; n++) at[n / 4][n % 4] = 0;
      size[0] = size[1] = float_of(0x00800000u);
    }
  };

  static __device__ void rescale(Sums& sums, Scores& x) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      C most = 0;
#pragma unroll
      for (int n = 0; n < COLUMNS / 8 * 2; n++) most = fmaxf(most, fabsf(x.at[n / 2][2 * r + n % 2]));
      most = fmaxf(most, shuffle_xor(most, 1));
      most = fmaxf(most, shuffle_xor(most, 2));
      unsigned bits = bits_of(most) & 0x7F800000u, before = bits_of(sums.size[r]);
      bits = bits > 0x7E800000u ? 0x7E800000u : bits < before ? before : bits;
      const C inverse = float_of(0x7F000000u - bits), change = sums.size[r] * inverse;
#pragma unroll
      for (int n = 0; n < COLUMNS / 8 * 2; n++) x.at[n / 2][2 * r + n % 2] *= inverse;
#pragma unroll
      for (int n = 0; n < WIDTH / 8 * 2; n++) sums.at[n / 2][2 * r + n % 2] *= change;
      sums.size[r] = float_of(bits);
    }
  }

  // sums_rw += Σ_c x_rc b_cw, x rounded to the type of b; x is overwritten.
  static __device__ void add_product(Sums& sums, Scores& x, const T* b, C* scratch) {
    const int lane = threadIdx.x % WARP;
    if constexpr (same<T, half>) rescale(sums, x);
#pragma unroll
    for (int c = 0; c < COLUMNS / 16; c++) {
      unsigned of_x[4];
#pragma unroll
      for (int n = 0; n < 4; n++) of_x[n] = pack<T>(x[c * 8 + n * 2], x[c * 8 + n * 2 + 1]);
#pragma unroll
      for (int w = 0; w < WIDTH / 16; w++) {
        unsigned of_b[4];
        load_matrices_transposed(of_b, b + place(c * 16 + lane % 16, w * 16 + lane / 16 * 8));
        multiply_add<T>(sums.at[2 * w], of_x, of_b[0], of_b[1]);
        multiply_add<T>(sums.at[2 * w + 1], of_x, of_b[2], of_b[3]);
      }
    }
  }

  // sums_r += Σ_c x_rc times the gradient of the score of r and c by the token r of `own`.
  static __device__ void add_gradient(Sums& sums, Scores& x, const T* own, const T* passing, C* scratch) {
    add_product(sums, x, passing, scratch);
  }

  // The sums of row r times factor(r) into row first + r, as numbers of type N; two at once where they are neighbours.
  template <class N, class Factor>
  static __device__ void store(const Sums& sums, const Matrix& to, int first, int rows, int columns, Factor factor) {
    struct alignas(2 * sizeof(N)) Two {
      N x, y;
    };
    const bool pairs = to.column == sizeof(N) && to.row % sizeof(Two) == 0 && columns % 2 == 0 &&
                       (unsigned long long)to.at % sizeof(Two) == 0;
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = threadIdx.x / WARP * 16 + lane / 4 + r * 8;
      if (first + row >= rows) continue;
      const C own = factor(row), size = same<T, half> ? sums.size[r] : C(1);
#pragma unroll
      for (int n = 0; n < WIDTH / 8; n++) {
        const int column = n * 8 + lane % 4 * 2;
        const N x = rounded_to<N>(sums.at[n][2 * r] * size * own);
        const N y = rounded_to<N>(sums.at[n][2 * r + 1] * size * own);
        N* at = (N*)to.element(first + row, column);
        if (pairs) {
          if (column < columns) *(Two*)at = {x, y};
        } else {
          if (column < columns) *at = x;
          if (column + 1 < columns) *(N*)to.element(first + row, column + 1) = y;
        }
      }
    }
  }
};

}  // namespace attnkit
