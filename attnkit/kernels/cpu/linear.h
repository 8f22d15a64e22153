// Linear attention with a sum of the row as its denominator: linear, cosine and Performer attention.
//
//     o_i = num_i/den_i     num_i = scale S_iᵀφ(q_i)     S_i = Σ_j φ(k_j) v_jᵀ     den_i of raw_i = scale z_i·φ(q_i)
//
// over the keys j that query i sees (Katharopoulos et al. 2020 eq 4-12), in one pass over the tokens. For gradients two:
// with dn = scale do/den and dd = -(φ(q)·S dn) scale den'(raw)/den,
//
//     dφ(q_i) = S_i dn_i + z_i dd_i                            from the start
//     dφ(k_j) = R_j v_j + r_j        dv_j = R_jᵀφ(k_j)         from the end, R_j = Σ_i φ(q_i) dn_iᵀ, r_j = Σ_i φ(q_i) dd_i
//
// over the queries i that see key j (eq 13-15, which leave out the denominator). Features that are exponentials have a
// level, by whose exponential S, z, R and r are divided. An item is one task.
#pragma once

#include "feature_map.h"
#include "tokens.h"

namespace attnkit {

template <class T>
class Linear {
 public:
  explicit Linear(const Call &call)
      : call_(call),
        plan_(call.plan),
        segments_(segments(plan_)),
        count_(FeatureMap<T>(plan_).count),
        width_(padded<T>(count_)),
        wide_(padded<T>(plan_.values)),
        wider_(padded<T>(plan_.values + 1)),
        divides_(plan_.op != ATTNKIT_LINEAR || plan_.normalize) {}

  void forward() const {
    parallel(call_.items(), threads_for_states(call_, count_, 1), [this](int64_t item) { forward(item); });
  }

  void backward() const {
    const TokenGradients<T> to(call_, plan_.features, count_, 1);
    parallel(call_.items(), threads_for_states(call_, count_, 3), [&](int64_t item) { backward(item, to); });
    to.join();
  }

 private:
  static constexpr int W = kLanes<T>;  // of a level, of which only the first lane is looked at
  static constexpr T kOne = 1;

  struct Workspace {
    Buffer<T> tokens, x, y, values, normalisers, out, cotangents, grads;
    RunningSums<T> sums, normaliser, more;
    Level<T> level;
    Buffer<T> own, tops, fades;  // levels of keys, of the sums with them, and how these fade
  };

  // One item: its arrays, its map, working memory, and what a returned state depends on.
  struct Task {
    const Sequence<T> s;
    const FeatureMap<T> map;
    Workspace &w;
    T start = -kInfinity<T>, top = -kInfinity<T>;           // the first and the last level
    double dtop = 0;                                        // its gradient: terms of it cancel
    int64_t highest = -1;                                   // the first key with the last level; -1: the state has it
    int64_t feature = 0;                                    // of that key, the first with this exponent

    Task(const Call &call, int64_t item)
        : s(call, item_index(call.plan, item)), map(call, s.item.index), w(workspace()) {}

    const Index &index() const { return s.item.index; }

    static Workspace &workspace() {
      static thread_local Workspace w;
      return w;
    }
  };

  int64_t first_query(const Segment &s) const { return s.begin - shift_of(plan_); }

  // ------------------------------------------------------------------------------------------ features

  void read_queries(Task &t, const Segment &s) const {
    T *tokens = t.w.tokens.reserve(kSegment * t.map.wide), *x = t.w.x.reserve(kSegment * width_);
    const int64_t first = first_query(s);
    read_rows<T>(t.s.item.q, first, s.count, plan_.features, t.map.wide, tokens,
                 [&t](int64_t i) { return t.s.shown.query(i); });
    if (t.map.is_exponential) {
      t.map.exponents(s.count, tokens, x);
      for (int64_t i = 0; i < s.count; ++i) t.map.exponential(largest(x + i * width_), x + i * width_);
    } else {
      t.map.map(s.count, tokens, x);
    }
    for (int64_t i = 0; i < s.count; ++i)
      if (!t.s.shown.query(first + i)) std::fill(x + i * width_, x + (i + 1) * width_, T{});
  }

  // φ(k), tokens, and v as rows of `wide` numbers. On the way to the end the level rises, and back it falls; the answer
  // is how sums fade, for every key where a segment has queries and for all at once where it has none.
  Fades<T> read_keys(Task &t, const Segment &s, int64_t wide, bool back) const {
    const auto takes = [&t](int64_t j) { return t.s.shown.key(j); };
    T *tokens = t.w.tokens.reserve(kSegment * t.map.wide), *y = t.w.y.reserve(kSegment * width_);
    read_rows<T>(t.s.v, s.begin, s.count, plan_.values, wide, t.w.values.reserve(kSegment * wider_), takes);
    read_rows<T>(t.s.k, s.begin, s.count, plan_.features, t.map.wide, tokens, takes);
    Fades<T> fades;
    if (t.map.is_exponential) {
      t.map.exponents(s.count, tokens, y);
      fades = levels(t, s, y, back);
      const T *tops = t.w.tops.data() + s.begin * W;
      for (int64_t j = 0; j < s.count; ++j) t.map.exponential(tops[j * W], y + j * width_);
    } else {
      t.map.map(s.count, tokens, y);
    }
    for (int64_t j = 0; j < s.count; ++j)
      if (!takes(s.begin + j)) std::fill(y + j * width_, y + (j + 1) * width_, T{});
    return fades;
  }

  Fades<T> levels(Task &t, const Segment &s, const T *kappa, bool back) const {
    Workspace &w = t.w;
    T *own = w.own.reserve(kSegment * W), *fades = w.fades.reserve(kSegment * W);
    T *tops = w.tops.retain(plan_.keys * W) + s.begin * W;
    const int64_t steps = s.queries ? s.count : 1;
    if (back) {
      w.level.fall(steps, tops, fades);
      return {Fading::kRows, fades + (steps - 1) * W, -W, 0};
    }
    for (int64_t j = 0; j < s.count; ++j) {
      const T level = t.s.shown.key(s.begin + j) ? largest(kappa + j * width_) : -kInfinity<T>;
      std::fill(own + j * W, own + (j + 1) * W, level);
      if (level > t.top) {
        t.top = level;
        t.highest = s.begin + j;
        t.feature = std::find(kappa + j * width_, kappa + j * width_ + count_, level) - (kappa + j * width_);
      }
    }
    if (s.queries) {
      w.level.rise(s.count, own, tops, fades);
    } else {
      w.level.rise_at_once(s.count, own, tops, fades);
    }
    return {Fading::kRows, fades, W, 0};
  }

  T largest(const T *row) const {
    Vec<T> top = splat(-kInfinity<T>);
    for (int64_t f = 0; f < width_; f += W) top = larger(top, load(row + f));
    return maximum<T>(top);
  }

  // ------------------------------------------------------------------------------------------ states

  // The initial z, S or its transpose, and their level. Nothing has been seen at the level -infinity.
  void open(Task &t, bool transposed) const {
    Workspace &w = t.w;
    w.normaliser.reset(1, width_);
    w.sums.reset(transposed ? plan_.values : count_, transposed ? width_ : wide_);
    if (t.s.level) t.start = t.top = t.s.level.template read<T>(0);
    T level[W];
    std::fill(level, level + W, t.start);
    w.level.reset(level, W);
    if (!t.s.state || (t.map.is_exponential && t.start == -kInfinity<T>)) return;
    read_state(t.s.state, transposed, count_, plan_.values, w.sums.total(), transposed ? width_ : wide_);
    t.s.normaliser.template read<T>(0, 0, count_, T{1}, w.normaliser.total(), width_);
  }

  // ------------------------------------------------------------------------------------------ forward

  void forward(int64_t item) const {
    Task t(call_, item);
    open(t, false);
    T *out = t.w.out.reserve(kSegment * wide_);
    for (const Segment &s : segments_) {
      call_.look();
      const Fades<T> fades = s.keys ? read_keys(t, s, wide_, false) : Fades<T>();
      if (s.queries) read_queries(t, s);
      normalise(t, s, fades);
      std::fill(out, out + s.count * wide_, T{});
      move<T>(t.w.sums, s.keys, s.queries, s.count, {t.w.x.data(), width_}, {t.w.y.data(), width_},
              {t.w.values.data(), wide_}, fades, out, wide_);
      if (s.queries) write(t, s, out);
    }
    const Workspace &w = t.w;
    if (t.s.keeps)
      write_final_state(call_, t.index(), w.sums.total(), wide_, w.normaliser.total(), count_, w.level.now(), 1);
  }

  // z of every query of a segment.
  void normalise(Task &t, const Segment &s, const Fades<T> &fades) const {
    T *z = t.w.normalisers.reserve(kSegment * std::max(width_, wide_));
    std::fill(z, z + s.count * width_, T{});
    move<T>(t.w.normaliser, s.keys, s.queries, s.count, {&kOne, 0}, {&kOne, 0}, {t.w.y.data(), width_}, fades, z,
            width_);
  }

  Denominator<T> denominator(const Task &t, int64_t i) const {
    if (!divides_) return {plan_, T{1}};
    const int64_t at = i * width_;
    return {plan_, static_cast<T>(plan_.scale) * dot(t.w.x.data() + at, t.w.normalisers.data() + at, width_)};
  }

  void write(const Task &t, const Segment &s, T *out) const {
    const Matrix o(call_, ATTNKIT_O, t.index());
    const T scale = static_cast<T>(plan_.scale);
    for (int64_t i = 0; i < s.count; ++i) {
      const int64_t query = first_query(s) + i;
      const Denominator<T> den = denominator(t, i);
      const bool gives = den.gives && t.s.shown.query(query);
      const Vec<T> factor = splat(scale / den.value);
      T *row = out + i * wide_;
      for (int64_t e = 0; e < wide_; e += W) store<T>(row + e, gives ? load(row + e) * factor : Vec<T>{});
      if (o) o.write<T>(query, 0, plan_.values, row);
    }
  }

  // ------------------------------------------------------------------------------------------ gradients

  void backward(int64_t item, const TokenGradients<T> &to) const {
    Task t(call_, item);
    T *cotangents = t.w.cotangents.reserve((plan_.queries + 1) * wider_);  // [dn, dd] of every query
    from_the_start(t, cotangents, to);
    from_the_end(t, cotangents, to);
  }

  // dφ(q) with Sᵀ and z.
  void from_the_start(Task &t, T *cotangents, const TokenGradients<T> &to) const {
    open(t, true);
    T *grads = t.w.grads.reserve(kSegment * width_);
    for (const Segment &s : segments_) {
      call_.look();
      T *dn = cotangents + std::max<int64_t>(0, first_query(s)) * wider_;
      const Fades<T> fades = s.keys ? read_keys(t, s, wide_, false) : Fades<T>();
      if (s.queries) read_queries(t, s);
      normalise(t, s, fades);
      if (s.queries) read_cotangents(t, s, dn);
      std::fill(grads, grads + s.count * width_, T{});
      move<T>(t.w.sums, s.keys, s.queries, s.count, {dn, wider_}, {t.w.values.data(), wide_},
              {t.w.y.data(), width_}, fades, grads, width_);
      if (s.queries) finish_queries(t, s, dn, grads, to);
    }
  }

  // dn = scale do/den; 0 in rows without an output.
  void read_cotangents(const Task &t, const Segment &s, T *dn) const {
    const Matrix d_o(call_, ATTNKIT_DO, t.index());
    const T scale = static_cast<T>(plan_.scale);
    for (int64_t i = 0; i < s.count; ++i) {
      const int64_t query = first_query(s) + i;
      const Denominator<T> den = denominator(t, i);
      T *row = dn + i * wider_;
      if (d_o && den.gives && t.s.shown.query(query)) {
        d_o.read<T>(query, 0, plan_.values, scale / den.value, row, wider_);
      } else {
        std::fill(row, row + wider_, T{});
      }
    }
  }

  // From S dn: dd, dφ = S dn + z dd, and dq.
  void finish_queries(Task &t, const Segment &s, T *dn, T *grads, const TokenGradients<T> &to) const {
    for (int64_t i = 0; i < s.count && divides_; ++i) {
      const Denominator<T> den = denominator(t, i);
      T *row = grads + i * width_;
      const T along = dot(t.w.x.data() + i * width_, row, width_);
      const T dd = den.gives ? -along * den.slope * static_cast<T>(plan_.scale) / den.value : T{};
      dn[i * wider_ + plan_.values] = dd;
      const T *z = t.w.normalisers.data() + i * width_;
      for (int64_t f = 0; f < width_; f += W) store<T>(row + f, load(row + f) + load(z + f) * dd);
    }
    pull(t, s, first_query(s), t.w.x.data(), grads, to.q, [&t](int64_t i) { return t.s.shown.query(i); });
  }

  // dx of the tokens of a segment, which are in working memory.
  template <class Takes>
  void pull(Task &t, const Segment &s, int64_t first, const T *phi, const T *dphi, const Parts<T> &to,
            const Takes &takes) const {
    T *dx = t.w.out.reserve(kSegment * std::max(t.map.wide, wide_));
    t.map.pull(s.count, t.w.tokens.data(), phi, dphi, dx);
    for (int64_t i = 0; i < s.count; ++i) {
      T *row = dx + i * t.map.wide;
      if (!takes(first + i)) std::fill(row, row + t.map.wide, T{});
      to.write(t.index(), 0, first + i, row);
    }
  }

  // dφ(k) with [R, r]ᵀ, dv with R.
  void from_the_end(Task &t, const T *cotangents, const TokenGradients<T> &to) const {
    Workspace &w = t.w;
    close(t);
    T *grads = w.grads.reserve(kSegment * width_), *dv = w.normalisers.reserve(kSegment * std::max(width_, wide_));
    for (size_t n = segments_.size(); n-- > 0;) {
      call_.look();
      const Segment &s = segments_[n];
      const int64_t last = s.count - 1;
      if (s.queries) read_queries(t, s);
      const Fades<T> fades = s.keys ? read_keys(t, s, wider_, true) : Fades<T>();
      T *values = w.values.data();
      for (int64_t j = 0; j < s.count && s.keys; ++j)
        values[j * wider_ + plan_.values] = t.s.shown.key(s.begin + j) ? 1 : 0;
      std::fill(grads, grads + s.count * width_, T{});
      std::fill(dv, dv + s.count * wide_, T{});
      const T *dn = cotangents + std::max<int64_t>(0, first_query(s)) * wider_;
      const Rows<T> x{w.x.data() + last * width_, -width_}, y{w.y.data() + last * width_, -width_};
      const Rows<T> c{values + last * wider_, -wider_}, d{dn + last * wider_, -wider_};
      move<T>(w.sums, s.queries, s.keys, s.count, c, d, x, fades, grads + last * width_, -width_);
      move<T>(w.more, s.queries, s.keys, s.count, y, x, d, fades, dv + last * wide_, -wide_);
      if (s.keys) finish_keys(t, s, grads, dv, to);
    }
    write_state(t, to);
  }

  // The cotangent of the final state is what R and r begin with. That of its level goes where the level comes from; S and
  // z are divided by its exponential.
  void close(Task &t) const {
    Workspace &w = t.w;
    const Matrix d_level(call_, ATTNKIT_DFINAL_LEVEL, t.index());
    if (t.s.keeps && d_level) t.dtop = d_level.read<T>(0);
    Buffer<T> row(plan_.values * width_ + width_);
    T *state = row.data(), *normaliser = row.data() + plan_.values * width_;
    std::fill(state, normaliser + width_, T{});
    const Matrix d_state(call_, ATTNKIT_DFINAL_STATE, t.index());
    const Matrix d_normaliser(call_, ATTNKIT_DFINAL_NORMALISER, t.index());
    if (t.s.keeps && d_state) read_state(d_state, true, count_, plan_.values, state, width_);
    if (t.s.keeps && d_normaliser) d_normaliser.read<T>(0, 0, count_, T{1}, normaliser, width_);
    if (t.map.is_exponential) {
      t.dtop -= product(state, w.sums.total(), plan_.values * width_);
      t.dtop -= product(normaliser, w.normaliser.total(), width_);
    }
    w.sums.reset(plan_.values + 1, width_);
    std::copy(state, normaliser + width_, w.sums.total());
    w.more.reset(count_, wide_);
    if (t.s.keeps && d_state) read_state(d_state, false, count_, plan_.values, w.more.total(), wide_);
  }

  void finish_keys(Task &t, const Segment &s, T *grads, T *dv, const TokenGradients<T> &to) const {
    const auto takes = [&t](int64_t j) { return t.s.shown.key(j); };
    const int64_t first = t.highest - s.begin;
    if (t.map.is_exponential && t.s.keeps && first >= 0 && first < s.count) {
      const int64_t place = first * width_ + t.feature;
      grads[place] += static_cast<T>(t.dtop) / t.w.y.data()[place];
    }
    pull(t, s, s.begin, t.w.y.data(), grads, to.k, takes);
    for (int64_t j = 0; j < s.count; ++j) {
      T *row = dv + j * wide_;
      if (!takes(s.begin + j)) std::fill(row, row + wide_, T{});
      to.v.write(t.index(), 0, s.begin + j, row);
    }
  }

  // What is left of R and r at the start is the gradient of the initial state. [S, z] stand for [S, z] exp(c): that is
  // the gradient of c, and that of the last level where c is the largest.
  void write_state(Task &t, const TokenGradients<T> &to) const {
    Workspace &w = t.w;
    if (!t.s.state) return;
    T *state = w.more.total(), *normaliser = w.sums.total() + plan_.values * width_;
    const bool seen = t.map.is_exponential && t.start != -kInfinity<T>;
    if (t.map.is_exponential) {
      const T factor = seen ? std::exp(t.start - *w.level.now()) : T{};
      for (int64_t at = 0; at < count_ * wide_; ++at) state[at] *= factor;
      for (int64_t f = 0; f < width_; ++f) normaliser[f] *= factor;
    }
    double sum = t.highest < 0 && seen && t.s.keeps ? t.dtop : 0;
    Buffer<T> row(std::max(wide_, width_));
    for (int64_t f = 0; f < count_; ++f) {
      t.s.state.template read<T>(f, 0, plan_.values, T{1}, row.data(), wide_);
      sum += product(row.data(), state + f * wide_, plan_.values);
      to.state.write(t.index(), 0, f, state + f * wide_);
    }
    t.s.normaliser.template read<T>(0, 0, count_, T{1}, row.data(), width_);
    sum += product(row.data(), normaliser, count_);
    const T dlevel = static_cast<T>(sum);
    to.normaliser.write(t.index(), 0, 0, normaliser);
    to.level.write(t.index(), 0, 0, &dlevel);
  }

  const Call &call_;
  const attnkit_plan &plan_;
  const std::vector<Segment> segments_;
  const int64_t count_, width_;  // features
  const int64_t wide_, wider_;   // rows of values, and of values with one more column
  const bool divides_;
};

}  // namespace attnkit
