// Arrays as kernels see them: any strides, any kind of number.
#pragma once

#include "intrinsics.cuh"

namespace attnkit {

enum Kind { BYTE, INT64, HALF, BFLOAT16, FLOAT, DOUBLE };

template <class T>
constexpr int kind_of = same<T, half> ? HALF : same<T, bfloat16> ? BFLOAT16 : same<T, float> ? FLOAT : DOUBLE;

// An array (items, heads, rows, columns), strides in bytes; `at` is 0 where a call has no such array.
struct View {
  char* at;
  long long item, head, row, column;
  long long kind;
};

// One of its matrices.
struct Matrix {
  char* at;
  long long row, column;
  int kind;

  __device__ char* element(long long i, long long j) const { return at + i * row + j * column; }
};

__device__ inline Matrix matrix_of(const View& view, long long item, long long head) {
  char* at = view.at ? view.at + item * view.item + head * view.head : nullptr;
  return {at, view.row, view.column, (int)view.kind};
}

template <class T>
__device__ inline auto number_of(T x) {
  if constexpr (same<T, half> || same<T, bfloat16>) {
    return to_float(x);
  } else {
    return x;
  }
}

template <class T, class C>
__device__ inline T rounded_to(C x) {
  if constexpr (same<T, half> || same<T, bfloat16>) {
    T y;
    from_float(y, (float)x);
    return y;
  } else {
    return (T)x;
  }
}

// A real number of any kind.
template <class C>
__device__ inline C load_number(const Matrix& x, long long i, long long j) {
  const char* at = x.element(i, j);
  switch (x.kind) {
    case HALF: return (C)to_float(*(const half*)at);
    case BFLOAT16: return (C)to_float(*(const bfloat16*)at);
    case FLOAT: return (C)*(const float*)at;
    default: return (C)*(const double*)at;
  }
}

// A number rounded to the kind of an array.
template <class C>
__device__ inline void store_number(const Matrix& to, int i, int j, C x) {
  char* at = to.element(i, j);
  switch (to.kind) {
    case HALF: *(half*)at = rounded_to<half>(x); break;
    case BFLOAT16: *(bfloat16*)at = rounded_to<bfloat16>(x); break;
    case FLOAT: *(float*)at = (float)x; break;
    default: *(double*)at = (double)x;
  }
}

}  // namespace attnkit
