// The delta rule and gated linear attention, and their gradients, one token after the other:
//
//     P_t = diag(a_t) S_{t-1}    u_t = β_t r_t, r_t = v_t - P_tᵀk_t    S_t = P_t + k_t u_tᵀ    o_t = scale S_tᵀq_t
//
// with a_t = exp of the gate: one number (Yang et al. 2025 eq 10), one for each feature (Kimi 2025, GLA §4) or 1 (Schlag et
// al. 2021 §4). Gated linear attention has u_t = v_t instead. With R_t the gradient of S_t, q_t's own part in it,
//
//     dq_t = scale S_t do_t    du_t = R_tᵀk_t    dβ_t = du_t·r_t    dv_t = β_t du_t = dr_t    dk_t = R_t u_t - P_t dr_t
//     dP_t = R_t - k_t dr_tᵀ   dg_t = dP_t ⊙ P_t, summed over what has one gate              R_{t-1} = diag(a_t) dP_t
//
// (gated linear: dv_t = du_t, and dr_t = 0 in the others). Columns of S know nothing of each other, so those of a few
// vectors take all tokens of a segment; a state of 64 x 64 stays in the first cache. No pair of tokens is multiplied out,
// no gate is divided by another, and no exponential is above 1.
#pragma once

#include "tokens.h"

namespace attnkit {

constexpr int64_t kTokens = 32;  // of a segment; on the way back the states of one are there

// The tokens of a segment in working memory: rows of q (times scale), k, a·k and a, `width` numbers apart, of v and do,
// `wide` apart, and β. Those that take no part are 0, their a is 1. `step` is that of a from one row of S to the next.
template <class T>
struct Gated {
  int64_t n, width, wide, step;
  const T *q, *k, *faded_k, *a, *v, *dout, *beta;
};

// The columns of S from `column` on, N vectors of them.
template <class T, int N, bool kFades, bool kCorrects>
struct Columns {
  static constexpr int W = kLanes<T>;
  const Gated<T> &s;
  const int64_t column;

  // From S before token t to S after it, which may be the same memory; r_t, and o_t where it is asked for.
  ATTNKIT_INLINE void advance(int64_t t, const T *from, T *to, T *r, T *out) const {
    const T *a = s.a + t * s.width, *k = s.k + t * s.width, *q = s.q + t * s.width;
    Vec<T> u[N], o[N] = {};
    for (int v = 0; v < N; ++v) u[v] = load(s.v + t * s.wide + column + v * W);
    if constexpr (kCorrects) {
      const T *faded = s.faded_k + t * s.width;
      Vec<T> held[2][N] = {};  // two sums of each: a sum waits for its additions
      for (int64_t f = 0; f < s.width; f += 2)
        for (int odd = 0; odd < 2; ++odd)
          for (int v = 0; v < N; ++v)
            held[odd][v] += load(from + (f + odd) * s.wide + column + v * W) * splat(faded[f + odd]);
      for (int v = 0; v < N; ++v) {
        u[v] -= held[0][v] + held[1][v];
        if (r != nullptr) store<T>(r + t * s.wide + column + v * W, u[v]);
        u[v] *= splat(s.beta[t]);
      }
    }
    for (int64_t f = 0; f < s.width; ++f) {
      const Vec<T> key = splat(k[f]), query = splat(q[f]), left = splat(kFades ? a[f * s.step] : T{1});
      for (int v = 0; v < N; ++v) {
        const int64_t at = f * s.wide + column + v * W;
        Vec<T> sum = load(from + at);
        if constexpr (kFades) sum *= left;
        sum += key * u[v];
        store<T>(to + at, sum);
        o[v] += query * sum;
      }
    }
    for (int v = 0; v < N && out != nullptr; ++v) store<T>(out + t * s.wide + column + v * W, o[v]);
  }

  // The gradients of token t, added to those of other columns, from S before and after it; R is that of S after it without
  // o_t before, and that of S before it afterwards.
  ATTNKIT_INLINE void pull(int64_t t, const T *before, const T *after, const T *r, T *R, T *dq, T *dk, T *dv, T *dbeta,
                           T *da) const {
    const T *a = s.a + t * s.width, *k = s.k + t * s.width, *q = s.q + t * s.width;
    Vec<T> dout[N], du[N] = {}, u[N], dr[N];
    for (int v = 0; v < N; ++v) dout[v] = load(s.dout + t * s.wide + column + v * W);
    for (int64_t f = 0; f < s.width; f += W) {
      Vec<T> sums[W];
      for (int row = 0; row < W; ++row) {
        const Vec<T> key = splat(k[f + row]), query = splat(q[f + row]);
        sums[row] = Vec<T>{};
        for (int v = 0; v < N; ++v) {
          const int64_t at = (f + row) * s.wide + column + v * W;
          const Vec<T> grad = load(R + at) + query * dout[v];
          store<T>(R + at, grad);
          du[v] += grad * key;
          sums[row] += load(after + at) * dout[v];
        }
      }
      store<T>(dq + t * s.width + f, load(dq + t * s.width + f) + sums_of_each<T>(sums));
    }
    Vec<T> of_beta{}, of_gate{};
    for (int v = 0; v < N; ++v) {
      const int64_t at = t * s.wide + column + v * W;
      if constexpr (kCorrects) {
        const Vec<T> error = load(r + at);
        of_beta += du[v] * error;
        u[v] = error * splat(s.beta[t]);
        du[v] *= splat(s.beta[t]);
      } else {
        u[v] = load(s.v + at);
      }
      dr[v] = du[v];
      store<T>(dv + at, du[v]);
    }
    if constexpr (kCorrects) dbeta[t] += sum<T>(of_beta);
    for (int64_t f = 0; f < s.width; f += W) {
      Vec<T> sums[W], gates[W];
      for (int row = 0; row < W; ++row) {
        const Vec<T> key = splat(k[f + row]), left = splat(kFades ? a[(f + row) * s.step] : T{1});
        sums[row] = gates[row] = Vec<T>{};
        for (int v = 0; v < N; ++v) {
          const int64_t at = (f + row) * s.wide + column + v * W;
          Vec<T> grad = load(R + at), held{};
          sums[row] += grad * u[v];
          if constexpr (kFades || kCorrects) held = load(before + at);
          if constexpr (kFades) held *= left;
          if constexpr (kCorrects) {
            sums[row] -= held * dr[v];
            grad -= key * dr[v];
          }
          if constexpr (kFades) {
            gates[row] += grad * held;
            grad *= left;
          }
          if constexpr (kFades || kCorrects) store<T>(R + at, grad);
        }
        if (s.step == 0) of_gate += gates[row];
      }
      store<T>(dk + t * s.width + f, load(dk + t * s.width + f) + sums_of_each<T>(sums));
      if (kFades && s.step != 0)
        store<T>(da + t * s.width + f, load(da + t * s.width + f) + sums_of_each<T>(gates));
    }
    if (kFades && s.step == 0) da[t * s.width] += sum<T>(of_gate);
  }
};

template <class T>
class Delta {
 public:
  explicit Delta(const Call &call)
      : call_(call),
        plan_(call.plan),
        corrects_(plan_.op == ATTNKIT_DELTA),
        fades_(call.has(ATTNKIT_LOG_GATE) || call.has(ATTNKIT_LOG_DECAY)),
        count_(plan_.features),
        width_(padded<T>(count_)),
        wide_(padded<T>(plan_.values)),
        size_(width_ * wide_) {}

  void forward() const {
    parallel(call_.items(), threads_for_states(call_, count_, 1), [this](int64_t item) { forward(item); });
  }

  void backward() const {
    const Gradients to(call_);
    parallel(call_.items(), threads_for_states(call_, count_, 4), [&](int64_t item) { backward(item, to); });
    to.join();
  }

 private:
  static constexpr bool apart(int) { return false; }

  struct Gradients {
    const Parts<T> q, k, v, beta, decay, gate, state;

    explicit Gradients(const Call &call)
        : q(call, ATTNKIT_DQ, call.plan.queries, call.plan.features, 1, apart),
          k(call, ATTNKIT_DK, call.plan.keys, call.plan.features, 1, apart),
          v(call, ATTNKIT_DV, call.plan.keys, call.plan.values, 1, apart),
          beta(call, ATTNKIT_DBETA, 1, call.plan.keys, 1, apart),
          decay(call, ATTNKIT_DLOG_DECAY, 1, call.plan.keys, 1, apart),
          gate(call, ATTNKIT_DLOG_GATE, call.plan.keys, call.plan.features, 1, apart),
          state(call, ATTNKIT_DSTATE, call.plan.features, call.plan.values, 1, apart) {}

    void join() const {
      for (const Parts<T> *parts : {&q, &k, &v, &beta, &decay, &gate, &state}) parts->join();
    }
  };

  struct Workspace {
    Buffer<T> q, k, faded_k, a, v, dout, beta;  // of a segment
    Buffer<T> out, r, sums, states, starts, back;
    Buffer<T> dq, dk, dv, dbeta, dgate, of_beta, of_decay;  // the last two of all tokens
  };

  struct Task {
    const Sequence<T> s;
    const Matrix beta, decay, gate;
    Workspace &w;

    Task(const Call &call, int64_t item)
        : s(call, item_index(call.plan, item)),
          beta(call, ATTNKIT_BETA, s.item.index),
          decay(call, ATTNKIT_LOG_DECAY, s.item.index),
          gate(call, ATTNKIT_LOG_GATE, s.item.index),
          w(workspace()) {}

    const Index &index() const { return s.item.index; }

    static Workspace &workspace() {
      static thread_local Workspace w;
      return w;
    }
  };

  // ------------------------------------------------------------------------------------------ tokens

  void reserve(Workspace &w) const {
    for (Buffer<T> *buffer : {&w.q, &w.k, &w.faded_k, &w.a, &w.dq, &w.dk, &w.dgate}) buffer->reserve(kTokens * width_);
    for (Buffer<T> *buffer : {&w.v, &w.dout, &w.out, &w.r, &w.dv}) buffer->reserve(kTokens * wide_);
    for (Buffer<T> *buffer : {&w.beta, &w.dbeta}) buffer->reserve(kTokens);
    std::fill_n(w.sums.reserve(size_), size_, T{});
  }

  Gated<T> read(Task &t, int64_t begin, int64_t n) const {
    Workspace &w = t.w;
    const auto query = [&t](int64_t i) { return t.s.shown.query(i); };
    const auto key = [&t](int64_t j) { return t.s.shown.valid(j); };
    read_rows<T>(t.s.item.q, begin, n, count_, width_, w.q.data(), query);
    for (int64_t x = 0; x < n * width_; ++x) w.q.data()[x] *= static_cast<T>(plan_.scale);
    read_rows<T>(t.s.k, begin, n, count_, width_, w.k.data(), key);
    read_rows<T>(t.s.v, begin, n, plan_.values, wide_, w.v.data(), key);
    for (int64_t j = 0; j < n && corrects_; ++j) {
      w.beta.data()[j] = 0;
      if (key(begin + j)) t.beta.template read<T>(0, begin + j, 1, T{1}, w.beta.data() + j, 1);
    }
    const T *faded = w.k.data();
    if (fades_) {
      read_gates(t, begin, n);
      faded = w.faded_k.data();
    }
    return {n,           width_,       wide_,    t.gate ? 1 : 0, w.q.data(), w.k.data(), faded, w.a.data(),
            w.v.data(), w.dout.data(), w.beta.data()};
  }

  void read_gates(Task &t, int64_t begin, int64_t n) const {
    Workspace &w = t.w;
    const auto key = [&t](int64_t j) { return t.s.shown.valid(j); };
    if (t.gate) {
      read_rows<T>(t.gate, begin, n, count_, width_, w.a.data(), key);
    } else {
      for (int64_t j = 0; j < n; ++j) {
        T g = 0;
        if (key(begin + j)) t.decay.template read<T>(0, begin + j, 1, T{1}, &g, 1);
        std::fill_n(w.a.data() + j * width_, width_, g);
      }
    }
    for (int64_t x = 0; x < n * width_; x += kLanes<T>) {
      const Vec<T> a = exp<T>(load(w.a.data() + x));
      store<T>(w.a.data() + x, a);
      store<T>(w.faded_k.data() + x, a * load(w.k.data() + x));
    }
  }

  // f(columns) for all columns of S.
  template <class F>
  void each_column(const Gated<T> &s, const F &f) const {
    if (corrects_) {
      fades_ ? sweep<true, true>(s, f) : sweep<false, true>(s, f);
    } else {
      sweep<true, false>(s, f);
    }
  }

  template <bool kFades, bool kCorrects, class F>
  void sweep(const Gated<T> &s, const F &f) const {
    int64_t at = 0;
    for (; at + kPanel<T> <= wide_; at += kPanel<T>) f(Columns<T, kVectors, kFades, kCorrects>{s, at});
    for (; at < wide_; at += kLanes<T>) f(Columns<T, 1, kFades, kCorrects>{s, at});
  }

  void read_start(Task &t) const {
    reserve(t.w);
    if (t.s.state) read_state(t.s.state, false, count_, plan_.values, t.w.sums.data(), wide_);
  }

  // ------------------------------------------------------------------------------------------ forward

  void forward(int64_t item) const {
    Task t(call_, item);
    Workspace &w = t.w;
    read_start(t);
    const Matrix o(call_, ATTNKIT_O, t.index());
    T *sums = w.sums.data(), *out = w.out.data();
    for (int64_t begin = 0; begin < plan_.keys; begin += kTokens) {
      call_.look();
      const Gated<T> s = read(t, begin, std::min(kTokens, plan_.keys - begin));
      each_column(s, [&](const auto &columns) {
        for (int64_t j = 0; j < s.n; ++j) columns.advance(j, sums, sums, nullptr, out);
      });
      for (int64_t i = 0; i < s.n && o; ++i) {
        if (!t.s.shown.query(begin + i)) std::fill_n(out + i * wide_, wide_, T{});
        o.write<T>(begin + i, 0, plan_.values, out + i * wide_);
      }
    }
    const Matrix final(call_, ATTNKIT_FINAL_STATE, t.index());
    for (int64_t f = 0; f < count_ && t.s.keeps && final; ++f) final.write<T>(f, 0, plan_.values, sums + f * wide_);
  }

  // ------------------------------------------------------------------------------------------ gradients

  void backward(int64_t item, const Gradients &to) const {
    Task t(call_, item);
    Workspace &w = t.w;
    read_start(t);
    const int64_t segments = blocks(plan_.keys, kTokens);
    T *sums = w.sums.data(), *starts = w.starts.reserve(segments * size_);
    for (int64_t n = 0; n < segments; ++n) {
      call_.look();
      std::copy_n(sums, size_, starts + n * size_);
      const Gated<T> s = read(t, n * kTokens, std::min(kTokens, plan_.keys - n * kTokens));
      each_column(s, [&](const auto &columns) {
        for (int64_t j = 0; j < s.n; ++j) columns.advance(j, sums, sums, nullptr, nullptr);
      });
    }
    w.states.reserve((kTokens + 1) * size_);
    w.of_beta.reserve(plan_.keys);
    w.of_decay.reserve(plan_.keys);
    T *back = w.back.reserve(size_);
    std::fill_n(back, size_, T{});
    const Matrix dfinal(call_, ATTNKIT_DFINAL_STATE, t.index());
    if (dfinal && t.s.keeps) read_state(dfinal, false, count_, plan_.values, back, wide_);
    for (int64_t n = segments; n-- > 0;) {
      call_.look();
      pull(t, to, n * kTokens, starts + n * size_);
    }
    if (corrects_) to.beta.write(t.index(), 0, 0, w.of_beta.data());
    if (fades_ && !t.gate) to.decay.write(t.index(), 0, 0, w.of_decay.data());
    for (int64_t f = 0; f < count_ && t.s.state; ++f) to.state.write(t.index(), 0, f, back + f * wide_);
  }

  // A segment, from its last token on.
  void pull(Task &t, const Gradients &to, int64_t begin, const T *start) const {
    Workspace &w = t.w;
    const Gated<T> s = read(t, begin, std::min(kTokens, plan_.keys - begin));
    const Matrix dout(call_, ATTNKIT_DO, t.index());
    const auto query = [&](int64_t i) { return static_cast<bool>(dout) && t.s.shown.query(i); };
    read_rows<T>(dout, begin, s.n, plan_.values, wide_, w.dout.data(), query);
    for (Buffer<T> *buffer : {&w.dq, &w.dk, &w.dgate}) std::fill_n(buffer->data(), s.n * width_, T{});
    std::fill_n(w.dbeta.data(), s.n, T{});
    T *states = w.states.data();
    std::copy_n(start, size_, states);
    each_column(s, [&](const auto &columns) {
      for (int64_t j = 0; j < s.n; ++j)
        columns.advance(j, states + j * size_, states + (j + 1) * size_, w.r.data(), nullptr);
      for (int64_t j = s.n; j-- > 0;)
        columns.pull(j, states + j * size_, states + (j + 1) * size_, w.r.data(), w.back.data(), w.dq.data(),
                     w.dk.data(), w.dv.data(), w.dbeta.data(), w.dgate.data());
    });
    write(t, to, begin, s.n);
  }

  void write(Task &t, const Gradients &to, int64_t begin, int64_t n) const {
    Workspace &w = t.w;
    for (int64_t x = 0; x < n * width_; ++x) w.dq.data()[x] *= static_cast<T>(plan_.scale);
    for (int64_t j = 0; j < n; ++j) {
      T *dq = w.dq.data() + j * width_, *dk = w.dk.data() + j * width_, *dv = w.dv.data() + j * wide_;
      T *dgate = w.dgate.data() + j * width_;
      if (!t.s.shown.query(begin + j)) std::fill_n(dq, width_, T{});
      if (!t.s.shown.valid(begin + j)) {
        std::fill_n(dk, width_, T{});
        std::fill_n(dv, wide_, T{});
        std::fill_n(dgate, width_, T{});
        w.dbeta.data()[j] = 0;
      }
      to.q.write(t.index(), 0, begin + j, dq);
      to.k.write(t.index(), 0, begin + j, dk);
      to.v.write(t.index(), 0, begin + j, dv);
      if (t.gate) to.gate.write(t.index(), 0, begin + j, dgate);
      w.of_decay.data()[begin + j] = dgate[0];
      w.of_beta.data()[begin + j] = w.dbeta.data()[j];
    }
  }

  const Call &call_;
  const attnkit_plan &plan_;
  const bool corrects_, fades_;
  const int64_t count_, width_, wide_, size_;  // features; of a row of q and k, of one of v and S; of S
};

}  // namespace attnkit
