// The functions of attnkit/kernels/cuda/intrinsics.cuh on a CPU, for blocks of fibers.
#pragma once

#include <bits/c++config.h>
// the special functions of C++17 are half of the time that a small kernel takes to compile
#undef _GLIBCXX_USE_STD_SPEC_FUNCS
#define _GLIBCXX_USE_STD_SPEC_FUNCS 0
#include <cmath>

#include "fibers.h"

namespace attnkit {

inline unsigned bits_of(float x) {
  unsigned bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline float float_of(unsigned bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

inline float to_float(half x) {
  _Float16 y;
  memcpy(&y, &x, 2);
  return (float)y;
}
inline float to_float(bfloat16 x) { return float_of((unsigned)x.bits << 16); }

inline void from_float(half& x, float y) {
  const _Float16 z = (_Float16)y;
  memcpy(&x, &z, 2);
}
inline void from_float(bfloat16& x, float y) {  // to nearest, ties to even; a NaN stays one
  const unsigned bits = bits_of(y);
  x.bits = (unsigned short)(y != y ? (bits >> 16) | 0x40 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

template <class T>
inline unsigned pack(float low, float high) {
  T x, y;
  from_float(x, low);
  from_float(y, high);
  return (unsigned)x.bits | (unsigned)y.bits << 16;
}

inline unsigned multiply_high(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }

// ------------------------------------------------------------------------------------------------ memory

inline unsigned char* shared_memory() { return fibers::shared(); }

template <int BYTES>
inline void copy_async(void* to, const void* from, bool present) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16);
  fibers::copy_later(to, from, BYTES, present);
}

inline void commit_copies() { fibers::running->groups++; }

template <int PENDING>
inline void wait_for_copies() {
  fibers::wait_for_copies(PENDING);
}

// ------------------------------------------------------------------------------------------------ warps

namespace lanes {

struct Shuffle {
  double x, y;  // float or double
  int from;
};
inline void shuffle(void* const* given) {
  for (int n = 0; n < WARP; n++) {
    Shuffle* own = (Shuffle*)given[n];
    own->y = ((Shuffle*)given[own->from])->x;
  }
}

struct Load {
  const unsigned short* row;
  unsigned* x;
};
template <bool TRANSPOSED>
inline void load(void* const* given) {
  for (int m = 0; m < 4; m++) {
    for (int n = 0; n < WARP; n++) {
      unsigned short pair[2];
      for (int e = 0; e < 2; e++) {
        const int row = TRANSPOSED ? n % 4 * 2 + e : n / 4, column = TRANSPOSED ? n / 4 : n % 4 * 2 + e;
        pair[e] = ((Load*)given[8 * m + row])->row[column];
      }
      ((Load*)given[n])->x[m] = (unsigned)pair[0] | (unsigned)pair[1] << 16;
    }
  }
}

struct Product {
  float* c;
  const unsigned* a;
  unsigned b[2];
};
template <class T>
inline float number(unsigned two, int which) {
  return to_float(T{(unsigned short)(two >> 16 * which)});
}
template <class T>
inline void product(void* const* given) {
  float a[16][16], b[8][16];
  for (int n = 0; n < WARP; n++) {
    const Product* lane = (Product*)given[n];
    const int g = n / 4, t = n % 4 * 2;
    for (int e = 0; e < 2; e++) {
      for (int r = 0; r < 4; r++) a[g + r % 2 * 8][t + r / 2 * 8 + e] = number<T>(lane->a[r], e);
      for (int r = 0; r < 2; r++) b[g][t + r * 8 + e] = number<T>(lane->b[r], e);
    }
  }
  for (int n = 0; n < WARP; n++) {
    Product* lane = (Product*)given[n];
    for (int r = 0; r < 4; r++) {
      const int row = n / 4 + r / 2 * 8, column = n % 4 * 2 + r % 2;
      float sum = lane->c[r];
      for (int w = 0; w < 16; w++) sum += a[row][w] * b[column][w];
      lane->c[r] = sum;
    }
  }
}

}  // namespace lanes

template <class C>
inline C shuffle_xor(C x, int mask, int line = __builtin_LINE()) {
  lanes::Shuffle own = {x, 0, (int)(threadIdx.x % WARP) ^ mask};
  fibers::together("a shuffle", line, &own, lanes::shuffle);
  return (C)own.y;
}

inline void load_fragments(const char* name, int line, unsigned (&x)[4], const void* row,
                           void (*perform)(void* const*)) {
  if ((size_t)row % 16) fibers::fail("%s of line %d: a row that is not aligned to 16 bytes", name, line);
  lanes::Load own = {(const unsigned short*)row, x};
  fibers::together(name, line, &own, perform);
}
inline void load_matrices(unsigned (&x)[4], const void* row, int line = __builtin_LINE()) {
  load_fragments("ldmatrix", line, x, row, lanes::load<false>);
}
inline void load_matrices_transposed(unsigned (&x)[4], const void* row, int line = __builtin_LINE()) {
  load_fragments("ldmatrix.trans", line, x, row, lanes::load<true>);
}

template <class T>
inline void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                         int line = __builtin_LINE()) {
  lanes::Product own = {c, a, {b0, b1}};
  fibers::together("mma", line, &own, lanes::product<T>);
}

}  // namespace attnkit
