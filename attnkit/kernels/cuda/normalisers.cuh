// How rows of scores become weights that sum to 1. With top = max s of a row, a threshold τ and a rest c of it,
//
//     p = weigh(relative(s))/Σ        tilt(p): what the gradient of a score is proportional to
//
// and `slope` is the derivative of `weigh` (Peters et al. 2019 eq 8-11). above = α - 1, power = 1/(α - 1).
#pragma once

#include "activations.cuh"

namespace attnkit {

// exp(s - top); there is no threshold.
struct Softmax {
  template <class C>
  static __device__ inline C relative(C s, C top, C tau, C c, C above) { return s - top; }
  template <class C>
  static __device__ inline C weigh(C x, C power) { return exponential(x); }
  template <class C>
  static __device__ inline C slope(C x, C power) { return exponential(x); }
  template <class C>
  static __device__ inline C tilt(C p, C above) { return p; }
};

// What the others share: (α-1)(s - top) - τ - c.
struct WithThreshold {
  template <class C>
  static __device__ inline C relative(C s, C top, C tau, C c, C above) { return (s - top) * above - tau - c; }
};

// [x]₊, α = 2.
struct Sparsemax : WithThreshold {
  template <class C>
  static __device__ inline C weigh(C x, C power) { return Relu::value(x); }
  template <class C>
  static __device__ inline C slope(C x, C power) { return Relu::slope(x); }
  template <class C>
  static __device__ inline C tilt(C p, C above) { return Relu::slope(p); }
};

// [x]₊², α = 1.5.
struct EntmaxOneHalf : WithThreshold {
  template <class C>
  static __device__ inline C weigh(C x, C power) { return ReluSquared::value(x); }
  template <class C>
  static __device__ inline C slope(C x, C power) { return ReluSquared::slope(x); }
  template <class C>
  static __device__ inline C tilt(C p, C above) { return square_root(p); }
};

// [x]₊^power, any α > 1.
struct Entmax : WithThreshold {
  template <class C>
  static __device__ inline C weigh(C x, C power) { return x <= 0 ? C(0) : raised(x, power); }
  template <class C>
  static __device__ inline C slope(C x, C power) { return x <= 0 ? C(0) : power * raised(x, power - 1); }
  template <class C>
  static __device__ inline C tilt(C p, C above) { return p <= 0 ? C(0) : raised(p, 1 - above); }
};

}  // namespace attnkit
