// The non-linearities h of point-wise attention (`value`) and of Gaussian attention, the last, and their derivatives (`slope`), in float or double.
//
// Derivatives at kinks are 0, and NaN stays NaN. Nothing is exact for small arguments only: no fast exponential, no
// tanh in the place of a sigmoid and no 1 + erf, whose tails they would round away.
#pragma once

#include "intrinsics.cuh"

namespace attnkit {

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }
__device__ inline float logarithm_plus_one(float x) { return log1pf(x); }
__device__ inline double logarithm_plus_one(double x) { return log1p(x); }
__device__ inline float complementary_error_function(float x) { return erfcf(x); }
__device__ inline double complementary_error_function(double x) { return erfc(x); }
__device__ inline float raised(float x, float y) { return powf(x, y); }
__device__ inline double raised(double x, double y) { return pow(x, y); }
__device__ inline float square_root(float x) { return sqrtf(x); }
__device__ inline double square_root(double x) { return sqrt(x); }
__device__ inline float size_of(float x) { return fabsf(x); }
__device__ inline double size_of(double x) { return fabs(x); }

// s.
struct Identity {
  template <class C>
  static __device__ inline C value(C s) { return s; }
  template <class C>
  static __device__ inline C slope(C s) { return s * 0 + 1; }
};

// max(s, 0).
struct Relu {
  template <class C>
  static __device__ inline C value(C s) { return s <= 0 ? C(0) : s; }
  template <class C>
  static __device__ inline C slope(C s) { return s <= 0 ? C(0) : C(1); }
};

// max(s, 0)².
struct ReluSquared {
  template <class C>
  static __device__ inline C value(C s) { return Relu::value(s) * Relu::value(s); }
  template <class C>
  static __device__ inline C slope(C s) { return 2 * Relu::value(s); }
};

// min(max(s, 0), 6).
struct Relu6 {
  template <class C>
  static __device__ inline C value(C s) { return s <= 0 ? C(0) : s >= 6 ? C(6) : s; }
  template <class C>
  static __device__ inline C slope(C s) { return s <= 0 || s >= 6 ? C(0) : C(1); }
};

// 1/(1 + exp(-s)), or exp(s)/(1 + exp(s)) below 0: no rounding of the tail, no overflow.
struct Sigmoid {
  template <class C>
  static __device__ inline C value(C s) {
    const C z = exponential(-size_of(s));
    return (s < 0 ? z : C(1)) / (1 + z);
  }
  // σ(s)·σ(-s).
  template <class C>
  static __device__ inline C slope(C s) {
    const C z = exponential(-size_of(s));
    return z / ((1 + z) * (1 + z));
  }
};

// log(1 + exp(s)) = max(s, 0) + log(1 + exp(-|s|)).
struct Softplus {
  template <class C>
  static __device__ inline C value(C s) { return Relu::value(s) + logarithm_plus_one(exponential(-size_of(s))); }
  template <class C>
  static __device__ inline C slope(C s) { return Sigmoid::value(s); }
};

// s·σ(s).
struct Silu {
  template <class C>
  static __device__ inline C value(C s) { return s * Sigmoid::value(s); }
  template <class C>
  static __device__ inline C slope(C s) { return Sigmoid::value(s) + s * Sigmoid::slope(s); }
};

// s·Φ(s), Φ the distribution function of the normal distribution.
struct Gelu {
  template <class C>
  static __device__ inline C cdf(C s) {
    return C(0.5) * complementary_error_function(s * C(-0.70710678118654752));
  }
  template <class C>
  static __device__ inline C value(C s) { return s * cdf(s); }
  template <class C>
  static __device__ inline C slope(C s) {
    return cdf(s) + s * exponential(C(-0.5) * s * s) * C(0.39894228040143268);
  }
};

// s·(1 + tanh(t))/2 = s·σ(2t) with t = √(2/π)·(s + 0.044715 s³).
struct GeluTanh {
  template <class C>
  static __device__ inline C twice(C s) { return (s + s * s * s * C(0.044715)) * C(1.5957691216057308); }
  template <class C>
  static __device__ inline C value(C s) { return s * Sigmoid::value(twice(s)); }
  template <class C>
  static __device__ inline C slope(C s) {
    const C d = (s * s * C(3 * 0.044715) + 1) * C(1.5957691216057308);
    return Sigmoid::value(twice(s)) + s * Sigmoid::slope(twice(s)) * d;
  }
};

// exp(s), of distances.
struct Exponential {
  template <class C>
  static __device__ inline C value(C s) { return exponential(s); }
  template <class C>
  static __device__ inline C slope(C s) { return exponential(s); }
};

// The feature map of linear attention: s + 1 above 0, exp(s) below. Its slope at 0 is 1.
struct EluPlusOne {
  template <class C>
  static __device__ inline C value(C s) { return s > 0 ? s + 1 : exponential(s); }
  template <class C>
  static __device__ inline C slope(C s) { return s > 0 ? C(1) : exponential(s); }
};

}  // namespace attnkit
