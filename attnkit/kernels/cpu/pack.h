// Arrays as operands of products: keys in panels, values and tokens row by row, in the compute dtype.
#pragma once

#include <type_traits>

#include "call.h"
#include "memory.h"
#include "tile.h"

namespace attnkit {

// An edit of rows that leaves them as they are.
template <class T>
struct Nothing {
  void operator()(T *) const {}
};

// A block of kLanes rows of `width` columns, transposed: out[c * kPanel + j] = rows[j * stride + c].
template <class T>
void transpose_block(const T *rows, int64_t stride, int64_t width, T *out) {
  constexpr int W = kLanes<T>;
  int64_t c = 0;
  for (; c + W <= width; c += W) {
    Vec<T> block[W];
    for (int j = 0; j < W; ++j) block[j] = load(rows + j * stride + c);
    transpose<T>(block);
    for (int j = 0; j < W; ++j) store<T>(out + (c + j) * kPanel<T>, block[j]);
  }
  for (; c < width; ++c)
    for (int j = 0; j < W; ++j) out[c * kPanel<T> + j] = rows[j * stride + c];
}

// Tokens first .. first + n in panels of kPanel: out[panel][feature][token], zeros up to a vector of tokens and for
// those that are not `seen` (NULL: all are). `edit(row)` may change a row before: `width` features, of which it owns
// those beyond d.
template <class T, class Edit>
void pack_panels(const Matrix &x, int64_t first, int64_t n, int64_t d, int64_t width, const uint8_t *seen,
                 Buffer<T> &rows, T *out, const Edit &edit) {
  constexpr int W = kLanes<T>;
  constexpr bool kAsTheyAre = std::is_same_v<Edit, Nothing<T>>;
  const bool direct = kAsTheyAre && seen == nullptr && x.holds<T>() && x.column == 1 && d == width;
  T *block = rows.reserve(W * width);
  for (int64_t j0 = 0; j0 < n; j0 += W) {
    T *to = out + j0 / kPanel<T> * kPanel<T> * width + j0 % kPanel<T>;
    if (direct && j0 + W <= n) {
      transpose_block(x.at<const T>(first + j0, 0), x.row, width, to);
      continue;
    }
    for (int64_t j = j0; j < j0 + W; ++j) {
      T *row = block + (j - j0) * width;
      if (j < n && (seen == nullptr || seen[first + j])) {
        x.read<T>(first + j, 0, d, T{1}, row, width);
        edit(row);
      } else {
        std::fill(row, row + width, T{});
      }
    }
    transpose_block(block, width, width, to);
  }
}

// Tokens first .. first + n, one after the other, `width` features each.
template <class T, class Edit>
void pack_rows(const Matrix &x, int64_t first, int64_t n, int64_t d, int64_t width, const uint8_t *seen, T *out,
               const Edit &edit) {
  for (int64_t j = 0; j < n; ++j) {
    T *row = out + j * width;
    if (seen == nullptr || seen[first + j]) {
      x.read<T>(first + j, 0, d, T{1}, row, width);
      edit(row);
    } else {
      std::fill(row, row + width, T{});
    }
  }
}

}  // namespace attnkit
