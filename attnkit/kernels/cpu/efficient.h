// Efficient attention (Shen et al. 2021): every feature c has sums over the keys and a level of its own,
//
//     o_i = Σ_c x_ic S_ic/z_ic     x = softmax(q)     S_ic = Σ_j exp(k_jc - m_ic) v_j     z_ic = Σ_j exp(k_jc - m_ic)
//
// over the keys j that query i sees, m_ic the largest k_jc of them. With u = x/z and y = exp(k - m) the gradients are
//
//     dx_ic = S_ic·do_i/z_ic                                      from the start
//     dk_jc = y_jc (R_jc·v_j - r_jc)     dv_j = Σ_c y_jc R_jc     from the end, R_jc = Σ_i u_ic do_i, r_jc = Σ_i u_ic dx_ic
//
// over the queries i that see key j, and R and r fade with m as S and z do. An item is one task.
#pragma once

#include "feature_map.h"
#include "tokens.h"

namespace attnkit {

template <class T>
class Efficient {
 public:
  explicit Efficient(const Call &call)
      : call_(call),
        plan_(call.plan),
        segments_(segments(plan_)),
        count_(plan_.features),
        width_(padded<T>(count_)),
        wide_(padded<T>(plan_.values)) {}

  void forward() const {
    parallel(call_.items(), threads_for_states(call_, count_, 2), [this](int64_t item) { forward(item); });
  }

  void backward() const {
    const TokenGradients<T> to(call_, count_, count_, count_);
    parallel(call_.items(), threads_for_states(call_, count_, 5), [&](int64_t item) { backward(item, to); });
    to.join();
  }

 private:
  static constexpr int W = kLanes<T>;
  static constexpr T kOne = 1, kMinusOne = -1;

  struct Workspace {
    Buffer<T> x, y, z, values, out, grads, shares, shared_grads;
    RunningSums<T> sums, normaliser, more;
    Level<T> level;
    Buffer<T> start, own, tops, fades, top;  // levels: at the start, of keys, of the sums with them; and the last
    Buffer<double> dtop;                           // the gradient of the last: terms of it cancel
    Buffer<int64_t> highest;                       // by feature, the first key with the last level; -1: the state has it
  };

  struct Task {
    const Sequence<T> s;
    Workspace &w;

    Task(const Call &call, int64_t item)
        : s(call, item_index(call.plan, item)), w(workspace()) {}

    const Index &index() const { return s.item.index; }

    static Workspace &workspace() {
      static thread_local Workspace w;
      return w;
    }
  };

  int64_t first_query(const Segment &s) const { return s.begin - shift_of(plan_); }

  // How [S, z] fade: row by row in S, column by column in its transpose and in z.
  struct Both {
    Fades<T> rows, columns;
  };
  static Both both(const T *fades, int64_t stride) {
    return {{Fading::kRows, fades, stride, 1}, {Fading::kColumns, fades, stride, 0}};
  }

  // ------------------------------------------------------------------------------------------ tokens

  // x = softmax(q), 0 in rows that take no part.
  void read_queries(Task &t, const Segment &s) const {
    T *x = t.w.x.reserve(kSegment * width_);
    for (int64_t i = 0; i < s.count; ++i) {
      T *row = x + i * width_;
      std::fill(row, row + width_, T{});
      if (!t.s.shown.query(first_query(s) + i)) continue;
      t.s.item.q.template read<T>(first_query(s) + i, 0, count_, T{1}, row, count_);
      std::fill(row + count_, row + width_, -kInfinity<T>);
      Vec<T> top = splat(-kInfinity<T>), total{};
      for (int64_t c = 0; c < width_; c += W) top = larger(top, load(row + c));
      const Vec<T> level = splat(maximum<T>(top));
      for (int64_t c = 0; c < width_; c += W) {
        const Vec<T> u = exp_below<T>(load(row + c) - level);
        store<T>(row + c, u);
        total += u;
      }
      const Vec<T> sums = splat(sum<T>(total));
      for (int64_t c = 0; c < width_; c += W) store<T>(row + c, load(row + c) / sums);
    }
  }

  // y = exp(k - m) and v. On the way to the end the level m rises, and back it falls; the answer is how sums fade, for
  // every key where a segment has queries and for all at once where it has none.
  Both read_keys(Task &t, const Segment &s, bool back) const {
    Workspace &w = t.w;
    const auto takes = [&t](int64_t j) { return t.s.shown.key(j); };
    T *y = w.y.reserve(kSegment * width_), *values = w.values.reserve(kSegment * wide_);
    read_rows<T>(t.s.v, s.begin, s.count, plan_.values, wide_, values, takes);
    for (int64_t j = 0; j < s.count; ++j) {
      T *row = y + j * width_;
      std::fill(row, row + width_, -kInfinity<T>);
      if (takes(s.begin + j)) t.s.k.template read<T>(s.begin + j, 0, count_, T{1}, row, count_);
    }
    const Both fades = levels(t, s, y, back);
    const T *tops = w.tops.data() + s.begin * width_;
    for (int64_t at = 0; at < s.count * width_; at += W) {
      const Vec<T> k = load(y + at), top = load(tops + at);
      store<T>(y + at, k == -kInfinity<T> ? Vec<T>{} : exp_below<T>(k - top));
    }
    return fades;
  }

  Both levels(Task &t, const Segment &s, const T *own, bool back) const {
    Workspace &w = t.w;
    T *fades = w.fades.reserve(kSegment * width_), *tops = w.tops.retain(plan_.keys * width_) + s.begin * width_;
    const int64_t steps = s.queries ? s.count : 1;
    if (back) {
      w.level.fall(steps, tops, fades);
      return both(fades + (steps - 1) * width_, -width_);
    }
    if (call_.plan.pass == ATTNKIT_BACKWARD && t.s.keeps) find_highest(t, s, own);
    if (s.queries) {
      w.level.rise(s.count, own, tops, fades);
    } else {
      w.level.rise_at_once(s.count, own, tops, fades);
    }
    return both(fades, width_);
  }

  void find_highest(Task &t, const Segment &s, const T *own) const {
    T *top = t.w.top.data();
    for (int64_t j = 0; j < s.count; ++j) {
      for (int64_t c = 0; c < count_; ++c) {
        if (!(own[j * width_ + c] > top[c])) continue;
        top[c] = own[j * width_ + c];
        t.w.highest.data()[c] = s.begin + j;
      }
    }
  }

  // ------------------------------------------------------------------------------------------ states

  // The initial z, S or its transpose, and their levels. A feature at the level -infinity has seen nothing.
  void open(Task &t, bool transposed) const {
    Workspace &w = t.w;
    const int64_t stride = transposed ? width_ : wide_;
    w.normaliser.reset(1, width_);
    w.sums.reset(transposed ? plan_.values : count_, stride);
    T *start = w.start.reserve(width_), *top = w.top.reserve(width_);
    std::fill(start, start + width_, -kInfinity<T>);
    if (t.s.level) t.s.level.template read<T>(0, 0, count_, T{1}, start, count_);
    std::copy(start, start + width_, top);
    w.level.reset(start, width_);
    int64_t *highest = w.highest.reserve(width_);
    std::fill(highest, highest + width_, -1);
    if (!t.s.state) return;
    T *sums = w.sums.total();
    read_state(t.s.state, transposed, count_, plan_.values, sums, stride);
    t.s.normaliser.template read<T>(0, 0, count_, T{1}, w.normaliser.total(), width_);
    for (int64_t c = 0; c < count_; ++c) {
      if (start[c] != -kInfinity<T>) continue;
      w.normaliser.total()[c] = 0;
      for (int64_t e = 0; e < plan_.values; ++e) sums[transposed ? e * stride + c : c * stride + e] = 0;
    }
  }

  // ------------------------------------------------------------------------------------------ forward

  void forward(int64_t item) const {
    Task t(call_, item);
    Workspace &w = t.w;
    const Matrix o(call_, ATTNKIT_O, t.index());
    open(t, false);
    T *out = w.out.reserve(kSegment * wide_), *share = w.shares.reserve(kSegment * width_);
    for (const Segment &s : segments_) {
      call_.look();
      const Both fades = s.keys ? read_keys(t, s, false) : Both();
      divide(t, s, fades, share);
      std::fill(out, out + s.count * wide_, T{});
      move<T>(w.sums, s.keys, s.queries, s.count, {share, width_}, {w.y.data(), width_}, {w.values.data(), wide_},
              fades.rows, out, wide_);
      for (int64_t i = 0; i < s.count && s.queries && o; ++i) {
        T *row = out + i * wide_;
        if (!t.s.shown.query(first_query(s) + i)) std::fill(row, row + wide_, T{});
        o.write<T>(first_query(s) + i, 0, plan_.values, row);
      }
    }
    if (t.s.keeps)
      write_final_state(call_, t.index(), w.sums.total(), wide_, w.normaliser.total(), count_, w.level.now(), count_);
  }

  // z of a segment, 1 where nothing has been seen, and u = x/z of its queries.
  void divide(Task &t, const Segment &s, const Both &fades, T *share) const {
    Workspace &w = t.w;
    if (s.queries) read_queries(t, s);
    T *z = w.z.reserve(kSegment * width_);
    std::fill(z, z + s.count * width_, T{});
    move<T>(w.normaliser, s.keys, s.queries, s.count, {&kOne, 0}, {&kOne, 0}, {w.y.data(), width_}, fades.columns, z,
            width_);
    for (int64_t at = 0; at < s.count * width_ && s.queries; at += W) {
      const Vec<T> sums = load(z + at), divisor = sums <= 0 ? Vec<T>{} + 1 : sums;
      store<T>(z + at, divisor);
      store<T>(share + at, load(w.x.data() + at) / divisor);
    }
  }

  // ------------------------------------------------------------------------------------------ gradients

  void backward(int64_t item, const TokenGradients<T> &to) const {
    Task t(call_, item);
    t.w.shares.reserve((plan_.queries + 1) * width_);        // u of every query
    t.w.shared_grads.reserve((plan_.queries + 1) * width_);  // u dx
    from_the_start(t, to);
    from_the_end(t, to);
  }

  // do of a segment, 0 in rows that take no part.
  T *read_cotangents(Task &t, const Segment &s) const {
    const Matrix d_o(call_, ATTNKIT_DO, t.index());
    T *out = t.w.out.reserve(kSegment * std::max(width_, wide_));
    read_rows<T>(d_o, first_query(s), s.count, plan_.values, wide_, out,
                 [&](int64_t i) { return d_o && t.s.shown.query(i); });
    return out;
  }

  int64_t place(const Segment &s) const { return std::max<int64_t>(0, first_query(s)) * width_; }

  // dx with Sᵀ, and dq = x (dx - Σ x dx).
  void from_the_start(Task &t, const TokenGradients<T> &to) const {
    Workspace &w = t.w;
    open(t, true);
    T *grads = w.grads.reserve(kSegment * width_);
    for (const Segment &s : segments_) {
      call_.look();
      const Both fades = s.keys ? read_keys(t, s, false) : Both();
      T *share = w.shares.data() + place(s), *shared_grads = w.shared_grads.data() + place(s);
      divide(t, s, fades, share);
      const T *d_o = s.queries ? read_cotangents(t, s) : nullptr;
      std::fill(grads, grads + s.count * width_, T{});
      move<T>(w.sums, s.keys, s.queries, s.count, {d_o, wide_}, {w.values.data(), wide_}, {w.y.data(), width_},
              fades.columns, grads, width_);
      for (int64_t i = 0; i < s.count && s.queries; ++i) {
        T *dx = grads + i * width_;
        const T *x = w.x.data() + i * width_;
        const bool live = t.s.shown.query(first_query(s) + i);
        for (int64_t c = 0; c < width_; c += W) {
          const Vec<T> d = live ? load(dx + c) / load(w.z.data() + i * width_ + c) : Vec<T>{};
          store<T>(dx + c, d);
          store<T>(shared_grads + i * width_ + c, load(share + i * width_ + c) * d);
        }
        const Vec<T> mean = splat(dot(x, dx, width_));
        for (int64_t c = 0; c < width_; c += W) store<T>(dx + c, load(x + c) * (load(dx + c) - mean));
        to.q.write(t.index(), 0, first_query(s) + i, dx);
      }
    }
  }

  // dk with Rᵀ and r, dv with R.
  void from_the_end(Task &t, const TokenGradients<T> &to) const {
    Workspace &w = t.w;
    close(t);
    T *grads = w.grads.reserve(kSegment * width_), *dv = w.z.reserve(kSegment * std::max(width_, wide_));
    for (size_t n = segments_.size(); n-- > 0;) {
      call_.look();
      const Segment &s = segments_[n];
      const int64_t last = s.count - 1;
      const Both fades = s.keys ? read_keys(t, s, true) : Both();
      const T *d_o = s.queries ? read_cotangents(t, s) + last * wide_ : nullptr;
      const T *share = w.shares.data() + place(s) + last * width_;
      const T *shared_grads = w.shared_grads.data() + place(s) + last * width_;
      const Rows<T> y{w.y.data() + last * width_, -width_}, v{w.values.data() + last * wide_, -wide_};
      std::fill(grads, grads + s.count * width_, T{});
      std::fill(dv, dv + s.count * wide_, T{});
      move<T>(w.sums, s.queries, s.keys, s.count, v, {d_o, -wide_}, {share, -width_}, fades.columns,
              grads + last * width_, -width_);
      move<T>(w.normaliser, s.queries, s.keys, s.count, {&kMinusOne, 0}, {&kOne, 0}, {shared_grads, -width_},
              fades.columns, grads + last * width_, -width_);
      move<T>(w.more, s.queries, s.keys, s.count, y, {share, -width_}, {d_o, -wide_}, fades.rows, dv + last * wide_,
              -wide_);
      if (s.keys) finish_keys(t, s, grads, dv, to);
    }
    write_state(t, to);
  }

  // The cotangent of the final state is what R and r begin with. That of m goes where m comes from; S and z are divided
  // by its exponential.
  void close(Task &t) const {
    Workspace &w = t.w;
    const Matrix d_state(call_, ATTNKIT_DFINAL_STATE, t.index()), d_level(call_, ATTNKIT_DFINAL_LEVEL, t.index());
    const Matrix d_normaliser(call_, ATTNKIT_DFINAL_NORMALISER, t.index());
    double *dtop = w.dtop.reserve(width_);
    std::fill(dtop, dtop + width_, 0.0);
    Buffer<T> rows((plan_.values + 1) * width_);
    T *state = rows.data(), *normaliser = state + plan_.values * width_;
    std::fill(state, normaliser + width_, T{});
    if (t.s.keeps) {
      if (d_level) d_level.read<double>(0, 0, count_, 1.0, dtop, width_);
      if (d_state) read_state(d_state, true, count_, plan_.values, state, width_);
      if (d_normaliser) d_normaliser.read<T>(0, 0, count_, T{1}, normaliser, width_);
      for (int64_t c = 0; c < count_; ++c) {
        dtop[c] -= product(normaliser + c, w.normaliser.total() + c, 1);
        for (int64_t e = 0; e < plan_.values; ++e)
          dtop[c] -= product(state + e * width_ + c, w.sums.total() + e * width_ + c, 1);
      }
    }
    w.sums.reset(plan_.values, width_);
    w.more.reset(count_, wide_);
    w.normaliser.reset(1, width_);
    std::copy(state, normaliser, w.sums.total());
    for (int64_t c = 0; c < count_; ++c) {
      w.normaliser.total()[c] = -normaliser[c];
      for (int64_t e = 0; e < plan_.values; ++e) w.more.total()[c * wide_ + e] = state[e * width_ + c];
    }
  }

  void finish_keys(Task &t, const Segment &s, T *grads, T *dv, const TokenGradients<T> &to) const {
    for (int64_t j = 0; j < s.count; ++j) {
      const bool takes = t.s.shown.key(s.begin + j);
      T *dk = grads + j * width_, *row = dv + j * wide_;
      for (int64_t c = 0; c < width_; c += W)
        store<T>(dk + c, takes ? load(dk + c) * load(t.w.y.data() + j * width_ + c) : Vec<T>{});
      for (int64_t c = 0; c < count_ && t.s.keeps; ++c)
        if (t.w.highest.data()[c] == s.begin + j) dk[c] += static_cast<T>(t.w.dtop.data()[c]);
      if (!takes) std::fill(row, row + wide_, T{});
      to.k.write(t.index(), 0, s.begin + j, dk);
      to.v.write(t.index(), 0, s.begin + j, row);
    }
  }

  // What is left of R and r at the start is the gradient of the initial state. [S, z] stand for [S, z] exp(m): that is
  // the gradient of m, and that of the last level where m is the largest.
  void write_state(Task &t, const TokenGradients<T> &to) const {
    if (!t.s.state) return;
    Workspace &w = t.w;
    Buffer<T> row(wide_), z(width_), dlevel(width_);
    T *normaliser = w.normaliser.total();
    t.s.normaliser.template read<T>(0, 0, count_, T{1}, z.data(), width_);
    for (int64_t c = 0; c < count_; ++c) {
      const T start = w.start.data()[c];
      const bool seen = start != -kInfinity<T>;
      const T factor = seen ? std::exp(start - w.level.now()[c]) : T{};
      T *grads = w.more.total() + c * wide_;
      t.s.state.template read<T>(c, 0, plan_.values, T{1}, row.data(), wide_);
      for (int64_t e = 0; e < plan_.values; ++e) grads[e] *= factor;
      normaliser[c] *= -factor;
      const double dtop = w.highest.data()[c] < 0 && seen && t.s.keeps ? w.dtop.data()[c] : 0;
      const double sum = product(row.data(), grads, plan_.values) + product(z.data() + c, normaliser + c, 1);
      dlevel.data()[c] = static_cast<T>(sum + dtop);
      to.state.write(t.index(), 0, c, grads);
    }
    to.normaliser.write(t.index(), 0, 0, normaliser);
    to.level.write(t.index(), 0, 0, dlevel.data());
  }

  const Call &call_;
  const attnkit_plan &plan_;
  const std::vector<Segment> segments_;
  const int64_t count_, width_, wide_;  // features, and rows of them and of values
};

}  // namespace attnkit
