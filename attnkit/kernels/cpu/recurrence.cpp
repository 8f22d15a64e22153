// The micro kernel of the recurrence: a block of S, and of what the segment adds to it, in registers.
#include "recurrence.h"

namespace attnkit {
namespace {

constexpr int kFeatures = 2;  // rows of a block

// One call for all the tokens of a segment. Pointers stand at the first row and column of the block.
template <class T>
struct Segment {
  int64_t n;
  Rows<T> x, y, c;
  Fades<T> fades;
  T *out;
  int64_t out_stride;
  const T *total;
  T *fresh;
  int64_t width;

  Segment at(int64_t row, int64_t column) const {
    Segment s = *this;
    s.x.data += row;
    s.y.data += row;
    s.c.data += column;
    s.out += column;
    s.total += row * width + column;
    s.fresh += row * width + column;
    s.fades.data += fades.kind == Fading::kRows ? row * fades.row : fades.kind == Fading::kColumns ? column : 0;
    return s;
  }
};

template <class T, int M, int N, Fading kFading>
void block(Segment<T> s) {
  constexpr int W = kLanes<T>;
  Vec<T> total[M][N], fresh[M][N];
  for (int m = 0; m < M; ++m) {
    for (int v = 0; v < N; ++v) {
      total[m][v] = load(s.total + m * s.width + v * W);
      fresh[m][v] = Vec<T>{};
    }
  }
  for (int64_t j = 0; j < s.n; ++j) {
    Vec<T> right[N], found[N];
    for (int v = 0; v < N; ++v) {
      right[v] = load(s.c.data + v * W);
      found[v] = load(s.out + v * W);
    }
    for (int m = 0; m < M; ++m) {
      const Vec<T> left = splat(s.y.data[m]), query = splat(s.x.data[m]);
      for (int v = 0; v < N; ++v) {
        if constexpr (kFading != Fading::kNone) {
          const Vec<T> fade =
              kFading == Fading::kRows ? splat(s.fades.data[m * s.fades.row]) : load(s.fades.data + v * W);
          total[m][v] *= fade;
          fresh[m][v] *= fade;
        }
        fresh[m][v] += left * right[v];
        found[v] += query * (total[m][v] + fresh[m][v]);
      }
    }
    for (int v = 0; v < N; ++v) store<T>(s.out + v * W, found[v]);
    s.x.data += s.x.stride;
    s.y.data += s.y.stride;
    s.c.data += s.c.stride;
    s.out += s.out_stride;
    s.fades.data += s.fades.stride;
  }
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < N; ++v) store<T>(s.fresh + m * s.width + v * W, fresh[m][v]);
}

// N vectors of columns, all rows.
template <class T, int N, Fading kFading>
void panel(const Segment<T> &s, int64_t rows, int64_t column) {
  int64_t r = 0;
  for (; r + kFeatures <= rows; r += kFeatures) block<T, kFeatures, N, kFading>(s.at(r, column));
  for (; r < rows; ++r) block<T, 1, N, kFading>(s.at(r, column));
}

template <class T, Fading kFading>
void sweep(const Segment<T> &s, int64_t rows) {
  int64_t column = 0;
  for (; column + kPanel<T> <= s.width; column += kPanel<T>) panel<T, kVectors, kFading>(s, rows, column);
  for (; column < s.width; column += kLanes<T>) panel<T, 1, kFading>(s, rows, column);
}

}  // namespace

template <class T>
void RunningSums<T>::reset(int64_t rows, int64_t width) {
  rows_ = rows;
  width_ = width;
  for (Buffer<T> *buffer : {&total_, &lost_, &fresh_}) {
    T *numbers = buffer->reserve(rows * width);
    std::fill(numbers, numbers + rows * width, T{});
  }
}

template <class T>
void RunningSums<T>::recur(int64_t n, Rows<T> x, Rows<T> y, Rows<T> c, const Fades<T> &fades, T *out, int64_t stride) {
  const Segment<T> s{n, x, y, c, fades, out, stride, total_.data(), fresh_.data(), width_};
  switch (fades.kind) {
    case Fading::kNone:
      sweep<T, Fading::kNone>(s, rows_);
      break;
    case Fading::kRows:
      sweep<T, Fading::kRows>(s, rows_);
      break;
    case Fading::kColumns:
      sweep<T, Fading::kColumns>(s, rows_);
      break;
  }
  multiply_fades(n, fades);
  join(0, rows_, fades);
}

// A few rows at a time, so that what is added is still in the nearest cache when it joins the total.
template <class T>
void RunningSums<T>::add(int64_t n, Rows<T> y, Rows<T> c, const Fades<T> &fade) {
  multiply_fades(1, fade);
  T *fresh = fresh_.data();
  for (int64_t r = 0; r < rows_; r += kRows) {
    const int64_t rows = std::min<int64_t>(kRows, rows_ - r);
    std::fill(fresh, fresh + rows * width_, T{});
    multiply_transposed<T>(rows, n, width_, y.data + r, y.stride, c.data, c.stride, fresh, width_);
    join(r, rows, fade);
  }
}

template <class T>
void RunningSums<T>::draw(int64_t n, Rows<T> x, T *out, int64_t stride) const {
  multiply<T>(n, rows_, width_, x.data, x.stride, total_.data(), width_, out, stride);
}

// f, the product of the fades of n tokens.
template <class T>
void RunningSums<T>::multiply_fades(int64_t n, const Fades<T> &fades) {
  const int64_t count = fades.kind == Fading::kColumns ? width_ : fades.row != 0 ? rows_ : 1;
  T *faded = faded_.reserve(count);
  std::fill(faded, faded + count, T{1});
  for (int64_t j = 0; j < n && fades.kind != Fading::kNone; ++j)
    for (int64_t w = 0; w < count; ++w) faded[w] *= fades.data[j * fades.stride + w];
}

// total = f total + fresh for some rows, of which fresh begins with the first; `lost` is what rounding takes (Møller 1965,
// Kahan 1965: the error of a sum of two numbers is a number). Where the total is infinite, nothing is lost.
template <class T>
void RunningSums<T>::join(int64_t begin, int64_t rows, const Fades<T> &fades) {
  const bool columns = fades.kind == Fading::kColumns, each = fades.kind == Fading::kRows && fades.row != 0;
  for (int64_t r = 0; r < rows; ++r) {
    T *total = total_.data() + (begin + r) * width_, *lost = lost_.data() + (begin + r) * width_;
    const T *fresh = fresh_.data() + r * width_, *faded = faded_.data() + (each ? begin + r : 0);
    for (int64_t w = 0; w < width_; w += kLanes<T>) {
      const Vec<T> fade = columns ? load(faded + w) : splat(*faded);
      const Vec<T> before = load(total + w) * fade, added = load(fresh + w) + load(lost + w) * fade;
      const Vec<T> sum = before + added, moved = sum - before;
      const Vec<T> rest = (before - (sum - moved)) + (added - moved);
      store<T>(total + w, sum);
      store<T>(lost + w, rest == rest ? rest : Vec<T>{});
    }
  }
}

template class RunningSums<float>;
template class RunningSums<double>;

}  // namespace attnkit
