// Products of pairs of bfloat16 by AMX, whose registers hold tiles: 16 rows of 16 pairs or floats. One instruction adds
// the product of two tiles to a third.
#pragma once

#include "pairs.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace attnkit {

// Asks the kernel of Linux for the registers, which it lends to a process and its children; false where it has none.
inline bool tiles_are_lent() {
#if defined(__linux__) && defined(__x86_64__)
  constexpr long kRequest = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

constexpr int kTile = 16;

// Whether products of E are those of tiles, and the registers for them while it lives.
template <class E>
constexpr bool kHasTiles = false;
template <class E>
struct TileRegisters {};

template <bool kAdd, class E>
void multiply_tiles(int64_t, int64_t, int64_t, const E *, int64_t, const E *, int64_t, SumOf<E> *, int64_t) {}

#if defined(__AMX_BF16__)
template <>
inline constexpr bool kHasTiles<Pair> = true;

struct alignas(64) TileShapes {
  uint8_t palette = 1, first_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {kTile, kTile, kTile, kTile, kTile, kTile, kTile, kTile};
};
inline constexpr TileShapes kTileShapes{};

template <>
struct TileRegisters<Pair> {
  TileRegisters() { _tile_loadconfig(&kTileShapes); }
  ~TileRegisters() { _tile_release(); }
};

// C (+)= A B for M x N tiles of C, which are in the registers 0 to 3 meanwhile; `depth` is a multiple of a tile.
template <int M, int N, bool kAdd>
ATTNKIT_INLINE void add_tiles(int64_t depth, const Pair *a, int64_t lda, const Pair *b, int64_t ldb, float *c,
                              int64_t ldc) {
  constexpr int64_t kSize = sizeof(Pair);
  float *right = c + kTile, *below = c + kTile * ldc, *last = below + kTile;
  if constexpr (kAdd) {
    _tile_loadd(0, c, ldc * kSize);
    if constexpr (N == 2) _tile_loadd(1, right, ldc * kSize);
    if constexpr (M == 2) _tile_loadd(2, below, ldc * kSize);
    if constexpr (M == 2 && N == 2) _tile_loadd(3, last, ldc * kSize);
  } else {
    _tile_zero(0);
    if constexpr (N == 2) _tile_zero(1);
    if constexpr (M == 2) _tile_zero(2);
    if constexpr (M == 2 && N == 2) _tile_zero(3);
  }
  for (int64_t p = 0; p < depth; p += kTile) {
    _tile_loadd(4, a + p, lda * kSize);
    _tile_loadd(6, b + p * ldb, ldb * kSize);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N == 2) {
      _tile_loadd(7, b + p * ldb + kTile, ldb * kSize);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (M == 2) {
      _tile_loadd(5, a + kTile * lda + p, lda * kSize);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (N == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, ldc * kSize);
  if constexpr (N == 2) _tile_stored(1, right, ldc * kSize);
  if constexpr (M == 2) _tile_stored(2, below, ldc * kSize);
  if constexpr (M == 2 && N == 2) _tile_stored(3, last, ldc * kSize);
}

// The same for as many rows and columns as there are, up to whole tiles.
template <int N, bool kAdd>
void add_tile_columns(int64_t rows, int64_t depth, const Pair *a, int64_t lda, const Pair *b, int64_t ldb, float *c,
                      int64_t ldc) {
  int64_t i = 0;
  for (; i + kTile < rows; i += 2 * kTile) add_tiles<2, N, kAdd>(depth, a + i * lda, lda, b, ldb, c + i * ldc, ldc);
  if (i < rows) add_tiles<1, N, kAdd>(depth, a + i * lda, lda, b, ldb, c + i * ldc, ldc);
}

template <bool kAdd>
void multiply_tiles(int64_t rows, int64_t depth, int64_t width, const Pair *a, int64_t lda, const Pair *b, int64_t ldb,
                    float *c, int64_t ldc) {
  int64_t j = 0;
  for (; j + kTile < width; j += 2 * kTile) add_tile_columns<2, kAdd>(rows, depth, a, lda, b + j, ldb, c + j, ldc);
  if (j < width) add_tile_columns<1, kAdd>(rows, depth, a, lda, b + j, ldb, c + j, ldc);
}
#endif

}  // namespace attnkit
