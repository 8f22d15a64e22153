// Running sums over tokens, the inner loop of linear attention:
//
//     S_j = f_j S_{j-1} + y_j c_jᵀ        out_j = S_jᵀ x_j
//
// (Katharopoulos et al. 2020 eq 16-20; f_j = 1 there). S is `rows` x `width`, a width of whole vectors. Tokens come in
// segments, for which a block of S stays in registers: no pair of tokens is multiplied out, and no sum is stored.
#pragma once

#include "memory.h"
#include "tile.h"

namespace attnkit {

// Rows of tokens, `stride` numbers from one token to the next; negative where the last token comes first.
template <class T>
struct Rows {
  const T *data;
  int64_t stride;
};

// The factors f_j in [0, 1]: none, one for all rows of S or for each, at data[j * stride + r * row] with row 0 or 1, or one
// for each of its columns.
enum class Fading { kNone, kRows, kColumns };

template <class T>
struct Fades {
  Fading kind = Fading::kNone;
  const T *data = nullptr;
  int64_t stride = 0, row = 0;
};

// S after the tokens so far. What a segment adds is summed from 0 and joins the total with Kahan's compensation, so that
// rounding errors grow with the length of a segment and not with the number of tokens.
template <class T>
class RunningSums {
 public:
  // S = 0.
  void reset(int64_t rows, int64_t width);

  // The total, row by row, `width` numbers each. A caller may fill it after `reset`.
  T *total() const { return total_.data(); }

  // The tokens of a segment one after the other: out_j += S_jᵀ x_j, at out[j * stride].
  void recur(int64_t n, Rows<T> x, Rows<T> y, Rows<T> c, const Fades<T> &fades, T *out, int64_t stride);

  // The same without queries: S = f S + Σ y_j c_jᵀ with one fade for all that was there before.
  void add(int64_t n, Rows<T> y, Rows<T> c, const Fades<T> &fade);

  // The same without keys: out_j += Sᵀ x_j.
  void draw(int64_t n, Rows<T> x, T *out, int64_t stride) const;

 private:
  void multiply_fades(int64_t n, const Fades<T> &fades);
  void join(int64_t begin, int64_t rows, const Fades<T> &fades);

  int64_t rows_ = 0, width_ = 0;
  Buffer<T> total_, lost_, fresh_, faded_;
};

extern template class RunningSums<float>;
extern template class RunningSums<double>;

}  // namespace attnkit
