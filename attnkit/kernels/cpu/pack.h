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

// Rows as they lie in memory, `stride` from one to the next; none where data is NULL.
template <class E>
struct InPlace {
  const E *data = nullptr;
  int64_t stride = 0;
};

// Tokens first .. first + n in panels of kPanel: out[panel][feature][token], `width` features, zeros up to a vector of
// tokens and for those that are not `seen` (NULL: all are). `read(token, row)` fills a row, if rows are not in place.
template <class E, class Read>
void pack_panels(InPlace<E> in_place, int64_t first, int64_t n, int64_t width, const uint8_t *seen, Buffer<E> &rows,
                 E *out, const Read &read) {
  constexpr int W = kLanes<E>;
  E *block = rows.reserve(W * width);
  for (int64_t j0 = 0; j0 < n; j0 += W) {
    E *to = out + j0 / kPanel<E> * kPanel<E> * width + j0 % kPanel<E>;
    if (in_place.data != nullptr && seen == nullptr && j0 + W <= n) {
      transpose_block(in_place.data + (first + j0) * in_place.stride, in_place.stride, width, to);
      continue;
    }
    for (int64_t j = j0; j < j0 + W; ++j) {
      E *row = block + (j - j0) * width;
      if (j < n && (seen == nullptr || seen[first + j])) {
        read(first + j, row);
      } else {
        std::fill(row, row + width, E{});
      }
    }
    transpose_block(block, width, width, to);
  }
}

// The same of d columns of x; `edit(row)` may change a row before: it owns the features beyond d.
template <class T, class Edit>
void pack_panels(const Matrix &x, int64_t first, int64_t n, int64_t d, int64_t width, const uint8_t *seen,
                 Buffer<T> &rows, T *out, const Edit &edit) {
  const bool in_place = std::is_same_v<Edit, Nothing<T>> && x.holds<T>() && x.column == 1 && d == width;
  pack_panels<T>(in_place ? InPlace<T>{x.at<const T>(0, 0), x.row} : InPlace<T>(), first, n, width, seen, rows, out,
                 [&](int64_t token, T *row) {
                   x.read<T>(token, 0, d, T{1}, row, width);
                   edit(row);
                 });
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

// Pairs for n numbers, as many as products take.
inline int64_t pairs(int64_t n) { return ((n + 1) / 2 + kPairDepth - 1) / kPairDepth * kPairDepth; }

// Row i of n numbers of bfloat16 as `depth` pairs, with zeros at its end.
inline void read_pairs(const Matrix &x, int64_t i, int64_t n, Pair *out, int64_t depth) {
  const BFloat16 *from = x.at<const BFloat16>(i, 0);
  std::fill(out + n / 2, out + depth, Pair{});
  char *to = reinterpret_cast<char *>(out);
  if (x.column == 1) {
    std::memcpy(to, from, n * sizeof *from);
    return;
  }
  for (int64_t c = 0; c < n; ++c) std::memcpy(to + c * sizeof *from, from + c * x.column, sizeof *from);
}

// Tokens first .. first + n of bfloat16 in panels, `depth` pairs of features each (see `pack_panels`).
inline void pack_pair_panels(const Matrix &x, int64_t first, int64_t n, int64_t features, int64_t depth,
                             const uint8_t *seen, Buffer<Pair> &rows, Pair *out) {
  const Pair *data = x.at<const Pair>(0, 0);
  const bool in_place = x.column == 1 && features == 2 * depth && x.row % 2 == 0 &&
                        reinterpret_cast<uintptr_t>(data) % sizeof(Pair) == 0;
  pack_panels<Pair>(in_place ? InPlace<Pair>{data, x.row / 2} : InPlace<Pair>(), first, n, depth, seen, rows, out,
                    [&](int64_t token, Pair *row) { read_pairs(x, token, features, row, depth); });
}

// Tokens first .. first + n in pairs, each of them with the next: out[token / 2][column], `width` columns, zeros for
// those that are out of reach or not `seen`, and up to pairs(n).
inline void pack_pairs(const Matrix &x, Range reach, int64_t first, int64_t n, int64_t columns, int64_t width,
                       const uint8_t *seen, Pair *out) {
  std::fill(out, out + pairs(n) * width, Pair{});
  for (int64_t j = 0; j < n; ++j) {
    const int64_t token = first + j;
    if (token < reach.begin || token >= reach.end || (seen != nullptr && !seen[token])) continue;
    const BFloat16 *from = x.at<const BFloat16>(token, 0);
    Pair *row = out + j / 2 * width;
    for (int64_t c = 0; c < columns; ++c) {
      const uint32_t bits = uint32_t{from[c * x.column].bits} << 16 * (j % 2);
      row[c] = static_cast<Pair>(static_cast<uint32_t>(row[c]) | bits);
    }
  }
}

// Rows of `depth` pairs of features, turned: out[feature][row / 2] has pairs of rows, zeros up to pairs(rows). Features
// go up to a vector of pairs, and so do pairs of rows.
inline void transpose_pairs(int64_t rows, int64_t depth, const Pair *x, Pair *out, int64_t stride) {
  constexpr int W = kLanes<Pair>;
  for (int64_t r0 = 0; r0 < pairs(rows); r0 += W) {
    for (int64_t c = 0; c < depth; c += W) {
      Int32Vector even[W], odd[W];
      for (int r = 0; r < W; ++r) {
        const int64_t i = 2 * (r0 + r);
        const Int32Vector first = i < rows ? load(x + i * depth + c) : Int32Vector{};
        const Int32Vector second = i + 1 < rows ? load(x + (i + 1) * depth + c) : Int32Vector{};
        even[r] = (first & 0xffff) | (Int32Vector)((Bits32Vector)second << 16);
        odd[r] = (Int32Vector)((Bits32Vector)first >> 16) | (second & ~0xffff);
      }
      transpose<Pair>(even);
      transpose<Pair>(odd);
      for (int f = 0; f < W; ++f) {
        store<Pair>(out + 2 * (c + f) * stride + r0, even[f]);
        store<Pair>(out + (2 * (c + f) + 1) * stride + r0, odd[f]);
      }
    }
  }
}

}  // namespace attnkit
