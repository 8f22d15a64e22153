// Products of small matrices, the inner loops of every kernel: C (+)= A B with B and C of rows of vectors.
#pragma once

#include <algorithm>
#include <cstddef>

#include "amx.h"

namespace attnkit {

// Vectors of C side by side, and rows for each number of them.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kVectors = 4;
constexpr int kRows = 6;
#elif defined(__AVX2__)
constexpr int kVectors = 2;
constexpr int kRows = 6;
#else
constexpr int kVectors = 2;
constexpr int kRows = 4;
#endif
// Columns of a panel of keys: a micro kernel's width.
template <class T>
constexpr int kPanel = kVectors * kLanes<T>;

template <class T>
constexpr int64_t padded(int64_t n) {
  return (n + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

// Sums of pairs go by so many pairs, and products with them take so many rows. Depths of pairs are multiples of the one,
// padded with zeros, so that a further pair changes no order of sums; A and C have rows up to a multiple of the other,
// which may hold anything.
#if defined(__AMX_BF16__)
constexpr int kPairDepth = kTile, kPairRows = kTile;
#else
constexpr int kPairDepth = 1, kPairRows = 1;
#endif

// C += A B and C += Aᵀ B: C is rows x width, a multiple of a vector, and `depth` is summed over. A, B and C lie in
// memory row by row, with lda, ldb and ldc from one to the next. Of pairs, both numbers are summed over.
template <class E>
void multiply(int64_t rows, int64_t depth, int64_t width, const E *a, int64_t lda, const E *b, int64_t ldb,
              SumOf<E> *c, int64_t ldc);
template <class T>
void multiply_transposed(int64_t rows, int64_t depth, int64_t width, const T *a, int64_t lda, const T *b, int64_t ldb,
                         T *c, int64_t ldc);

// C = A B for keys in panels (see `pack_panels`), a multiple of a vector of them.
template <class E>
void multiply_panels(int64_t rows, int64_t depth, int64_t keys, const E *a, int64_t lda, const E *panels,
                     SumOf<E> *c, int64_t ldc);

#define ATTNKIT_PRODUCTS(E, T, EXTERN)                                                                                \
  EXTERN template void multiply<E>(int64_t, int64_t, int64_t, const E *, int64_t, const E *, int64_t, T *, int64_t);  \
  EXTERN template void multiply_panels<E>(int64_t, int64_t, int64_t, const E *, int64_t, const E *, T *, int64_t);
#define ATTNKIT_TRANSPOSED(T, EXTERN)                                                                                 \
  EXTERN template void multiply_transposed<T>(int64_t, int64_t, int64_t, const T *, int64_t, const T *, int64_t, T *, \
                                              int64_t);

ATTNKIT_PRODUCTS(float, float, extern)
ATTNKIT_PRODUCTS(double, double, extern)
ATTNKIT_PRODUCTS(Pair, float, extern)
ATTNKIT_TRANSPOSED(float, extern)
ATTNKIT_TRANSPOSED(double, extern)

}  // namespace attnkit
