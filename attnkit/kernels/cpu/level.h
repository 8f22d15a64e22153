// Levels: sums of exponentials are kept divided by the exponential of the largest exponent so far, so that nothing
// overflows. One level for all features, or one for each. It rises along the sequence and older sums fade; on the way
// back it falls.
#pragma once

#include "memory.h"
#include "vector.h"

namespace attnkit {

// exp(x - level) for x <= level; 1 where nothing has a level yet.
template <class T>
ATTNKIT_INLINE Vec<T> fade(Vec<T> x, Vec<T> level) {
  return level == -kInfinity<T> ? Vec<T>{} + 1 : exp_below<T>(x - level);
}

// Rows of `width` numbers, a multiple of a vector.
template <class T>
class Level {
 public:
  // At `start` (NULL: nothing has been seen).
  void reset(const T *start, int64_t width) {
    width_ = width;
    T *now = now_.reserve(width);
    if (start == nullptr) {
      std::fill(now, now + width, -kInfinity<T>);
    } else {
      std::copy(start, start + width, now);
    }
  }

  const T *now() const { return now_.data(); }

  // The levels after each of n keys with levels `own`, -infinity at those that do not count; and the fade of each.
  void rise(int64_t n, const T *own, T *tops, T *fades) {
    for (int64_t j = 0; j < n; ++j) move(own + j * width_, tops + j * width_, fades + j * width_, true);
  }

  // The level after them all, for each of them, and one fade.
  void rise_at_once(int64_t n, const T *own, T *tops, T *fades) {
    for (int64_t w = 0; w < width_; w += kLanes<T>) {
      const Vec<T> before = load(now_.data() + w);
      Vec<T> top = before;
      for (int64_t j = 0; j < n; ++j) top = larger(top, load(own + j * width_ + w));
      for (int64_t j = 0; j < n; ++j) store<T>(tops + j * width_ + w, top);
      store<T>(fades + w, fade<T>(before, top));
      store<T>(now_.data() + w, top);
    }
  }

  // From the last of n keys to the first, whose fades are those of sums on their way back.
  void fall(int64_t n, const T *tops, T *fades) {
    for (int64_t j = n; j-- > 0;) move(tops + j * width_, nullptr, fades + j * width_, false);
  }

 private:
  void move(const T *own, T *tops, T *fades, bool rises) {
    for (int64_t w = 0; w < width_; w += kLanes<T>) {
      const Vec<T> before = load(now_.data() + w), top = rises ? larger(before, load(own + w)) : load(own + w);
      store<T>(fades + w, rises ? fade<T>(before, top) : fade<T>(top, before));
      store<T>(now_.data() + w, top);
      if (tops != nullptr) store<T>(tops + w, top);
    }
  }

  int64_t width_ = 0;
  Buffer<T> now_;
};

}  // namespace attnkit
