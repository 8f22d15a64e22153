// The micro kernels. One holds a block of C in registers, as many rows and vectors as there are registers for. B is
// read vector by vector, A element by element: by rows, or by columns where the product is with Aᵀ.
#include "tile.h"

namespace attnkit {
namespace {

// Element (i, p) of A stands at a[i * row + p * column].
template <class E>
struct Left {
  const E *a;
  int64_t row, column;
};

template <class E, int M, int N, bool kAdd>
ATTNKIT_INLINE void micro(int64_t depth, const E *a, int64_t row, int64_t column, const E *b, int64_t ldb, SumOf<E> *c,
                          int64_t ldc) {
  using T = SumOf<E>;
  constexpr int W = kLanes<E>;
  Vec<T> sums[M][N];
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) sums[i][j] = kAdd ? load(c + i * ldc + j * W) : Vec<T>{};
  for (int64_t p = 0; p < depth; ++p) {
    Vec<E> right[N];
    for (int j = 0; j < N; ++j) right[j] = load(b + p * ldb + j * W);
    for (int i = 0; i < M; ++i) {
      const Vec<E> left = splat(a[i * row + p * column]);
      for (int j = 0; j < N; ++j) add_product(sums[i][j], left, right[j]);
    }
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) store<T>(c + i * ldc + j * W, sums[i][j]);
}

// The rows that are left, fewer than kRows.
template <class E, int M, int N, bool kAdd, bool kByColumns>
inline void micro_rest(int rows, int64_t depth, Left<E> left, const E *b, int64_t ldb, SumOf<E> *c, int64_t ldc) {
  if constexpr (M > 0) {
    if (rows == M) {
      micro<E, M, N, kAdd>(depth, left.a, kByColumns ? 1 : left.row, kByColumns ? left.column : 1, b, ldb, c, ldc);
    } else {
      micro_rest<E, M - 1, N, kAdd, kByColumns>(rows, depth, left, b, ldb, c, ldc);
    }
  }
}

// C (rows x N vectors) (+)= A (rows x depth) B.
template <class E, int N, bool kAdd, bool kByColumns>
void columns(int64_t rows, int64_t depth, Left<E> left, const E *b, int64_t ldb, SumOf<E> *c, int64_t ldc) {
  if constexpr (kHasTiles<E>) return multiply_tiles<kAdd>(rows, depth, N * kTile, left.a, left.row, b, ldb, c, ldc);
  const int64_t row = kByColumns ? 1 : left.row, column = kByColumns ? left.column : 1;
  int64_t i = 0;
  for (; i + kRows <= rows; i += kRows)
    micro<E, kRows, N, kAdd>(depth, left.a + i * row, row, column, b, ldb, c + i * ldc, ldc);
  const Left<E> rest{left.a + i * row, left.row, left.column};
  micro_rest<E, kRows - 1, N, kAdd, kByColumns>(static_cast<int>(rows - i), depth, rest, b, ldb, c + i * ldc, ldc);
}

// The columns that are left, fewer than kVectors vectors of them.
template <class E, bool kAdd, bool kByColumns>
void columns_rest(int64_t vectors, int64_t rows, int64_t depth, Left<E> left, const E *b, int64_t ldb, SumOf<E> *c,
                  int64_t ldc) {
  switch (vectors) {
    case 1:
      return columns<E, 1, kAdd, kByColumns>(rows, depth, left, b, ldb, c, ldc);
    case 2:
      if constexpr (kVectors > 2) columns<E, 2, kAdd, kByColumns>(rows, depth, left, b, ldb, c, ldc);
      return;
    case 3:
      if constexpr (kVectors > 3) columns<E, 3, kAdd, kByColumns>(rows, depth, left, b, ldb, c, ldc);
      return;
    default:
      return;
  }
}

// C (rows x width) (+)= A (rows x depth) B (depth x width) for a width that is a multiple of a vector.
template <class E, bool kAdd, bool kByColumns>
void product(int64_t rows, int64_t depth, int64_t width, Left<E> left, const E *b, int64_t ldb, SumOf<E> *c,
             int64_t ldc) {
  int64_t j = 0;
  for (; j + kPanel<E> <= width; j += kPanel<E>)
    columns<E, kVectors, kAdd, kByColumns>(rows, depth, left, b + j, ldb, c + j, ldc);
  columns_rest<E, kAdd, kByColumns>((width - j) / kLanes<E>, rows, depth, left, b + j, ldb, c + j, ldc);
}

}  // namespace

template <class E>
void multiply(int64_t rows, int64_t depth, int64_t width, const E *a, int64_t lda, const E *b, int64_t ldb,
              SumOf<E> *c, int64_t ldc) {
  [[maybe_unused]] const TileRegisters<E> registers;
  product<E, true, false>(rows, depth, width, Left<E>{a, lda, 1}, b, ldb, c, ldc);
}

template <class T>
void multiply_transposed(int64_t rows, int64_t depth, int64_t width, const T *a, int64_t lda, const T *b, int64_t ldb,
                         T *c, int64_t ldc) {
  product<T, true, true>(rows, depth, width, Left<T>{a, 1, lda}, b, ldb, c, ldc);
}

template <class E>
void multiply_panels(int64_t rows, int64_t depth, int64_t keys, const E *a, int64_t lda, const E *panels, SumOf<E> *c,
                     int64_t ldc) {
  [[maybe_unused]] const TileRegisters<E> registers;
  const Left<E> left{a, lda, 1};
  int64_t j = 0;
  for (; j + kPanel<E> <= keys; j += kPanel<E>)
    columns<E, kVectors, false, false>(rows, depth, left, panels + j * depth, kPanel<E>, c + j, ldc);
  columns_rest<E, false, false>((keys - j) / kLanes<E>, rows, depth, left, panels + j * depth, kPanel<E>, c + j, ldc);
}

ATTNKIT_PRODUCTS(float, float, )
ATTNKIT_PRODUCTS(double, double, )
#if defined(__AVX512BF16__)
ATTNKIT_PRODUCTS(Pair, float, )
#endif
ATTNKIT_TRANSPOSED(float, )
ATTNKIT_TRANSPOSED(double, )

}  // namespace attnkit
