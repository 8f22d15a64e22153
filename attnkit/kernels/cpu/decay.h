// Decay of linear attention: key l multiplies the sums before it by exp(g_l), g_l <= 0. Its gradient,
//
//     dg_l = Σ_{j < l <= i} ds_ij s_ij
//
// over the pairs on both sides of l, with an initial state among the keys and the cotangent of the final one among the
// queries, is put together in every segment of tokens: from its pairs, from its queries and the sums before it, from its
// keys and the sums after it, and from both sums. Nothing is subtracted, so that small gates keep their digits.
#pragma once

#include "feature_map.h"
#include "tokens.h"

namespace attnkit {

template <class T>
struct DecaySpace {
  Buffer<T> gates, fades, drawn;
  Buffer<T> starts;       // [Sᵀ, z] before each segment
  Buffer<double> grads;   // of all tokens; of a segment with queries first its terms of the sums before it
  double of_queries[kSegment], of_normaliser[kSegment], of_keys[kSegment];
};

template <class T>
class Decay {
 public:
  Decay(const Call &call, const Sequence<T> &s, DecaySpace<T> &w)
      : plan_(call.plan),
        shown_(s.shown),
        gates_(call, ATTNKIT_LOG_DECAY, s.item.index),
        w_(w),
        width_(padded<T>(features_of(call.plan))),
        is_there_(call.plan.op == ATTNKIT_LINEAR && (call.plan.log_decay != 0 || call.has(ATTNKIT_LOG_DECAY))),
        pulls_(is_there_ && call.has(ATTNKIT_DLOG_DECAY)),
        has_one_(TokenGradients<T>::has_one_decay(call)) {
    if (!pulls_) return;
    std::fill_n(w.grads.reserve(plan_.keys), plan_.keys, 0.0);
    w.starts.reserve((plan_.keys / kSegment + kBorders) * size());
  }

  bool is_there() const { return is_there_; }

  // What the first token leaves of an initial state, once all have been seen from the end.
  T first() const { return std::exp(next_); }

  // How the sums fade at each key of a segment.
  Fades<T> rise(const Segment &s) {
    if (!is_there_) return {};
    read(s);
    return {Fading::kTokens, w_.fades.data(), 1, 0};
  }

  // The same from the end: at each key by the gate of the one after it.
  Fades<T> fall(const Segment &s) {
    if (!is_there_) return {};
    after_ = next_;
    read(s);
    T *back = w_.fades.data() + kSegment;
    for (int64_t j = 0; j < s.count; ++j) back[j] = j + 1 < s.count ? w_.fades.data()[j + 1] : std::exp(after_);
    next_ = w_.gates.data()[0];
    return {Fading::kTokens, back + s.count - 1, -1, 0};
  }

  // ------------------------------------------------------------------------------------------ gradients

  // Sᵀ and z before a segment.
  void keep_start(const T *sums, const T *normaliser) {
    if (!pulls_) return;
    T *start = w_.starts.data() + segments_ * size();
    std::copy(sums, sums + plan_.values * width_, start);
    std::copy(normaliser, normaliser + width_, start + plan_.values * width_);
    ++segments_;
  }

  // φ(q_i)·S dn_i and φ(q_i)·z for the sums before the segment.
  void draw_start(const Segment &s, const RunningSums<T> &sums, Rows<T> dn, const T *x) {
    if (!pulls_) return;
    T *drawn = w_.drawn.reserve(kSegment * width_);
    std::fill_n(drawn, s.count * width_, T{});
    sums.draw(s.count, dn, drawn, width_);
    const T *z = w_.starts.data() + (segments_ - 1) * size() + plan_.values * width_;
    for (int64_t i = 0; i < s.count; ++i) {
      w_.of_queries[i] = dot(x + i * width_, drawn + i * width_, width_);
      w_.of_normaliser[i] = dot(x + i * width_, z, width_);
    }
  }

  void finish_start(const Segment &s, const T *dd, int64_t stride) {
    if (!pulls_) return;
    double left = 1;
    for (int64_t i = 0; i < s.count; ++i) {
      left *= w_.fades.data()[i];
      w_.grads.data()[s.begin + i] = left * (w_.of_queries[i] + w_.of_normaliser[i] * dd[i * stride]);
    }
  }

  // The gradient of a segment, from the last one on: `sums` are [R, r]ᵀ after it.
  void pull(const Segment &s, const RunningSums<T> &sums, Rows<T> y, Rows<T> c, Rows<T> x, Rows<T> dn) {
    if (!pulls_) return;
    --segments_;
    const T *fades = w_.fades.data(), *start = w_.starts.data() + segments_ * size();
    T *drawn = w_.drawn.reserve(kSegment * width_);
    std::fill_n(drawn, s.count * width_, T{});
    sums.draw(s.count, c, drawn, width_);
    double left = std::exp(static_cast<double>(after_));
    for (int64_t j = s.count; j-- > 0; left *= fades[j])
      w_.of_keys[j] = left * dot(y.data + j * width_, drawn + j * width_, width_);
    const double of_both = left == 0 ? 0 : left * product(start, sums.total(), size());

    double *grads = w_.grads.data() + s.begin, later = of_both, earlier = 0;
    for (int64_t l = s.count; l-- > 0;) grads[l] = later += s.queries ? grads[l] : 0;
    for (int64_t l = 0; l < s.count; ++l) {
      grads[l] += earlier;
      earlier += w_.of_keys[l];
    }
    for (int64_t i = 1; i < s.count && s.queries; ++i) add_pairs(i, y, c, x, dn, grads);
    for (int64_t l = 0; l < s.count; ++l)
      if (!shown_.valid(s.begin + l)) grads[l] = 0;
  }

  void write(const Parts<T> &to, const Index &index) const {
    if (!pulls_) return;
    T *row = w_.drawn.reserve(std::max<int64_t>(1, plan_.keys));
    double sum = 0;
    for (int64_t j = 0; j < plan_.keys; ++j) {
      sum += w_.grads.data()[j];
      row[j] = static_cast<T>(w_.grads.data()[j]);
    }
    if (has_one_) row[0] = static_cast<T>(sum);
    to.write(index, 0, 0, row);
  }

 private:
  static constexpr int kBorders = 4;  // where segments end early

  static int64_t features_of(const attnkit_plan &plan) { return plan.features; }
  int64_t size() const { return (plan_.values + 1) * width_; }

  // Gates of a segment, 0 at hidden keys, and what they leave.
  void read(const Segment &s) {
    T *gates = w_.gates.reserve(kSegment), *fades = w_.fades.reserve(2 * kSegment);
    std::fill_n(gates, s.count, static_cast<T>(plan_.log_decay));
    if (gates_) gates_.template read<T>(0, s.begin, s.count, T{1}, gates, s.count);
    for (int64_t j = 0; j < s.count; ++j) {
      if (!shown_.valid(s.begin + j)) gates[j] = 0;
      fades[j] = std::exp(gates[j]);
    }
  }

  // Those of query i with the keys before it in its segment.
  void add_pairs(int64_t i, Rows<T> y, Rows<T> c, Rows<T> x, Rows<T> dn, double *grads) const {
    double terms[kSegment], left = 1, sum = 0;
    for (int64_t j = i; j-- > 0;) {
      left *= w_.fades.data()[j + 1];
      terms[j] = left == 0 ? 0
                           : left * dot(x.data + i * x.stride, y.data + j * y.stride, width_) *
                                 dot(dn.data + i * dn.stride, c.data + j * c.stride, c.stride);
    }
    for (int64_t l = 1; l <= i; ++l) grads[l] += sum += terms[l - 1];
  }

  const attnkit_plan &plan_;
  const Shown<T> &shown_;
  const Matrix gates_;
  DecaySpace<T> &w_;
  const int64_t width_;
  const bool is_there_, pulls_, has_one_;
  int64_t segments_ = 0;
  T next_ = 0, after_ = 0;  // the gates of the first key so far on the way back, and of the one before that
};

}  // namespace attnkit
