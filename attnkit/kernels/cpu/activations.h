// The score functions h of pointwise attention (B) and their derivatives, which are 0 at kinks (A8) and keep the digits
// of their tails (E5). A visible NaN stays one.
#pragma once

#include "vector.h"

namespace attnkit {

template <class T>
ATTNKIT_INLINE Vec<T> select(Mask<T> mask, Vec<T> a, Vec<T> b) {
  return mask ? a : b;
}

// With e = exp(-|x|): σ(x) = 1/(1 + e) for x >= 0 and e/(1 + e) below.
template <class T>
struct Logistic {
  Vec<T> e, inverse;
  Mask<T> below;

  ATTNKIT_INLINE explicit Logistic(Vec<T> x)
      : e(exp_below<T>(-absolute<T>(x))), inverse(1 / (1 + e)), below(x < Vec<T>{}) {}
  ATTNKIT_INLINE Vec<T> value() const { return select<T>(below, e, splat(T{1})) * inverse; }
  ATTNKIT_INLINE Vec<T> complement() const { return select<T>(below, splat(T{1}), e) * inverse; }
};

// y σ(x), which may be a normal number where σ(x) is none: both factors of e = exp(-|x|/2)² are applied to y.
template <class T>
struct Gate {
  Vec<T> root, inverse;
  Mask<T> below;

  ATTNKIT_INLINE explicit Gate(Vec<T> x)
      : root(exp_below<T>(absolute<T>(x) * T(-0.5))), inverse(1 / (1 + root * root)), below(x < Vec<T>{}) {}
  ATTNKIT_INLINE Vec<T> operator()(Vec<T> y) const {
    const Vec<T> factor = select<T>(below, root, splat(T{1}));
    return y * factor * inverse * factor;
  }
  ATTNKIT_INLINE Vec<T> complement() const { return select<T>(below, splat(T{1}), root * root) * inverse; }  // σ(-x)
};

template <class T>
struct Relu {
  static ATTNKIT_INLINE Vec<T> value(Vec<T> x) { return larger(Vec<T>{}, x); }
  static ATTNKIT_INLINE Vec<T> slope(Vec<T> x) { return select<T>(x <= Vec<T>{}, Vec<T>{}, splat(T{1})); }
};

template <class T>
struct ReluSquared {
  static ATTNKIT_INLINE Vec<T> value(Vec<T> x) { return Relu<T>::value(x) * Relu<T>::value(x); }
  static ATTNKIT_INLINE Vec<T> slope(Vec<T> x) { return 2 * Relu<T>::value(x); }
};

template <class T>
struct Relu6 {
  static ATTNKIT_INLINE Vec<T> value(Vec<T> x) { return smaller(splat(T{6}), larger(Vec<T>{}, x)); }
  static ATTNKIT_INLINE Vec<T> slope(Vec<T> x) {
    return select<T>((x <= Vec<T>{}) | (x >= 6), Vec<T>{}, splat(T{1}));
  }
};

template <class T>
struct Identity {
  static ATTNKIT_INLINE Vec<T> value(Vec<T> x) { return x; }
  static ATTNKIT_INLINE Vec<T> slope(Vec<T>) { return splat(T{1}); }
};

template <class T>
struct Sigmoid {
  static ATTNKIT_INLINE Vec<T> value(Vec<T> x) { return Logistic<T>(x).value(); }
  static ATTNKIT_INLINE Vec<T> slope(Vec<T> x) {
    const Logistic<T> p(x);
    return p.e * p.inverse * p.inverse;
  }
};

// log(1 + exp(x)) = max(x, 0) + log(1 + exp(-|x|))
template <class T>
struct Softplus {
  static ATTNKIT_INLINE Vec<T> value(Vec<T> x) {
    return Relu<T>::value(x) + log_1_plus<T>(exp_below<T>(-absolute<T>(x)));
  }
  static ATTNKIT_INLINE Vec<T> slope(Vec<T> x) { return Sigmoid<T>::value(x); }
};

template <class T>
struct Silu {
  static ATTNKIT_INLINE Vec<T> value(Vec<T> x) { return Gate<T>(x)(x); }
  static ATTNKIT_INLINE Vec<T> slope(Vec<T> x) {
    const Gate<T> gate(x);
    return gate(1 + x * gate.complement());
  }
};

// x σ(2y) with y = (2/π)^½ (x + 0.044715 x³): (1 + tanh y)/2 has a tail there. |x| is bounded where x is only a
// factor of σ(-2y), beyond which that is 0.
template <class T>
struct GeluTanh {
  static constexpr T kLinear = static_cast<T>(1.5957691216057308), kCubic = static_cast<T>(0.07135481627260024);

  static ATTNKIT_INLINE Vec<T> value(Vec<T> x) { return Gate<T>(x * (x * x * kCubic + kLinear))(x); }
  static ATTNKIT_INLINE Vec<T> slope(Vec<T> s) {
    const Vec<T> x = smaller(splat(T{64}), larger(splat(T{-64}), s));
    const Gate<T> gate(x * (x * x * kCubic + kLinear));
    return gate(1 + x * gate.complement() * (x * x * (3 * kCubic) + kLinear));
  }
};

// Mills' ratio m(a) = Φ(-a)/φ(a) for a >= 0: (1 + a) m(a) is a polynomial in (a - 4)/(a + 4), an interpolation at
// Chebyshev nodes for a up to 14 with a relative error of 7e-8, and to 39 with one of 5e-17.
template <class T>
struct Mills;
template <>
struct Mills<float> {
  static constexpr float c[] = {1.18326199f,    -0.242399558f, 0.0350893252f,  0.0716858357f,   -0.0806730092f,
                                0.045018442f,   -0.0126840863f, -0.00100717472f, 0.00186496507f, 0.000247430202f};
};
template <>
struct Mills<double> {
  static constexpr double c[] = {1.1832619145678034,      -0.24239967052180744,   0.035091880234750863,
                                 0.0716904812013675,      -0.08070800967922126,   0.04495912907918444,
                                 -0.01253910361649989,    -0.0007159509346364681, 0.0017418487274732644,
                                 -0.00023670153402391412, -0.00022021525354578076, 5.326592873318071e-05,
                                 3.4157402262815145e-05,  -8.603125055401714e-06, -6.5493205820384295e-06,
                                 1.0137014901542394e-06,  1.3831853785326601e-06, 3.819879904610877e-09,
                                 -2.777271352086815e-07,  -4.9896305405547557e-08, 4.391889396202827e-08,
                                 1.5564544144164463e-08,  -3.778653873745926e-09, -1.9379462362944427e-09};
};

// x Φ(x) = max(x, 0) - |x| m(|x|) φ(x), and Φ(x) + x φ(x)
template <class T>
struct Gelu {
  static constexpr T kDensity = static_cast<T>(0.39894228040143267794);  // φ(0)

  static ATTNKIT_INLINE Vec<T> mills(Vec<T> a) {
    return polynomial<T>(1 - 8 / (a + 4), Mills<T>::c) / (1 + a);
  }
  static ATTNKIT_INLINE Vec<T> value(Vec<T> x) {
    const Vec<T> a = smaller(splat(T{64}), absolute<T>(x));
    return Relu<T>::value(x) - a * mills(a) * (exp_below<T>(a * a * T(-0.5)) * kDensity);
  }
  static ATTNKIT_INLINE Vec<T> slope(Vec<T> x) {
    const Vec<T> a = smaller(splat(T{64}), absolute<T>(x));
    const Vec<T> root = exp_below<T>(a * a * T(-0.25));  // a φ(a) may be a normal number where φ(a) is none
    const Vec<T> tail = (a - mills(a)) * root * (root * kDensity);
    return select<T>(x <= Vec<T>{}, -tail, 1 + tail);
  }
};

}  // namespace attnkit
