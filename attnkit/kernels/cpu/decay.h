// Linear attention with a decay: key l multiplies the sums before it by exp(g_l), g_l <= 0 (Sun et al. 2023 eq 5).
//
// Tokens come in chunks whose pairs are multiplied out. With E_ij = exp(Σ_{j < l <= i} g_l) for pairs i >= j of a chunk, 0
// for others, and F_i = exp(Σ_{l <= i} g_l) for the sums S, z before it,
//
//     A = E ⊙ φ(Q)φ(K)ᵀ       num_i = F_i Sᵀφ(q_i) + Σ_j A_ij v_j       raw_i = F_i z·φ(q_i) + Σ_j A_ij
//
// and for gradients, with dn and dd as linear attention has them, H_ij = dn_i·v_j + dd_i, and R, r the sums after a chunk,
// which fade by B_j on their way back to key j,
//
//     dφ(q_i) = F_i (S dn_i + z dd_i) + Σ_j (E ⊙ H)_ij φ(k_j)
//     dφ(k_j) = B_j (R v_j + r) + Σ_i (E ⊙ H)_ij φ(q_i)              dv_j = B_j Rᵀφ(k_j) + Σ_i A_ij dn_i
//     dg_l    = Σ_{j < l <= i} ds_ij s_ij
//
// The last is a sum over the pairs on both sides of l, with an initial state among the keys and the cotangent of the final
// one among the queries. It is put together in every chunk: from its pairs (A ⊙ H), from its queries and the sums before
// it, from its keys and the sums after it, and from both sums. Nothing is subtracted, so that small gates keep their
// digits; and no exponential is above 1.
#pragma once

#include "feature_map.h"
#include "pack.h"
#include "tokens.h"

namespace attnkit {

constexpr int64_t kChunk = 32;  // tokens whose pairs are multiplied out
constexpr int64_t kStep = 16;   // rows of pairs at a time, with the keys up to the last of them

// The pairs of a chunk of n tokens: rows of queries, kChunk numbers apart. Right of the diagonal E, A and E ⊙ H are 0.
// What gradients need on the way back stays from the way there, for every chunk.
template <class T>
struct Pairs {
  Buffer<T> fades, weights, faded;       // E, A and E ⊙ H
  T *scores = nullptr, *grads = nullptr;  // φ(Q)φ(K)ᵀ and H of the chunk that was opened
  Buffer<T> kept, panels, rows;
  T before[kChunk];  // F

  void reserve(int64_t width, size_t chunks) {
    for (Buffer<T> *buffer : {&fades, &weights, &faded}) {
      T *numbers = buffer->reserve(kChunk * kChunk);
      std::fill(numbers, numbers + kChunk * kChunk, T{});
    }
    kept.reserve(chunks * 2 * kChunk * kChunk);
    panels.reserve((kChunk + kPanel<T>) * width);
    open(0);
  }

  void open(size_t chunk) {
    scores = kept.data() + chunk * 2 * kChunk * kChunk;
    grads = scores + kChunk * kChunk;
  }

  // E and F of keys that leave these factors.
  void fade(int64_t n, const T *factors) {
    constexpr int W = kLanes<T>;
    T left = 1;
    for (int64_t i = 0; i < n; ++i) {
      T *row = fades.data() + i * kChunk;
      for (int64_t j = 0; j < i; j += W) store<T>(row + j, load(row + j - kChunk) * factors[i]);
      row[i] = 1;
      before[i] = left *= factors[i];
    }
  }

  // out_ij = x_i·y_j for rows of `depth` numbers, where i >= j; others are of no use, and may be infinite.
  void multiply_rows(int64_t n, int64_t depth, Rows<T> x, Rows<T> y, T *out) {
    pack_panels<T>(InPlace<T>{y.data, y.stride}, 0, n, depth, nullptr, rows, panels.data(),
                   [&](int64_t j, T *row) { std::copy_n(y.data + j * y.stride, depth, row); });
    for (int64_t i = 0; i < n; i += kStep) {
      const int64_t end = std::min(n, i + kStep);
      multiply_panels<T>(end - i, depth, padded<T>(end), x.data + i * x.stride, x.stride, panels.data(),
                         out + i * kChunk, kChunk);
    }
  }

  // out = E ⊙ x; what has faded to 0 is 0.
  void apply_fades(int64_t n, const T *x, T *out) const {
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = i * kChunk; j < (i + 1) * kChunk; j += kLanes<T>) {
        const Vec<T> fade = load(fades.data() + j);
        store<T>(out + j, fade == 0 ? Vec<T>{} : fade * load(x + j));
      }
    }
  }

  // Σ_j A_ij, and Σ_j A_ij x_ij.
  T total(int64_t i) const {
    Vec<T> sums{};
    for (int64_t j = 0; j < kChunk; j += kLanes<T>) sums += load(weights.data() + i * kChunk + j);
    return sum<T>(sums);
  }
  T total(int64_t i, const T *x) const {
    Vec<T> sums{};
    for (int64_t j = 0; j < kChunk; j += kLanes<T>) {
      const Vec<T> weight = load(weights.data() + i * kChunk + j);
      sums += weight == 0 ? Vec<T>{} : weight * load(x + j);
    }
    return sum<T>(sums);
  }
};

// out_i += Σ_{j <= i} w_ij c_j
template <class T>
void add_keys(int64_t n, int64_t width, const T *w, Rows<T> c, T *out, int64_t stride) {
  for (int64_t i = 0; i < n; i += kStep) {
    const int64_t end = std::min(n, i + kStep);
    multiply<T>(end - i, end, width, w + i * kChunk, kChunk, c.data, c.stride, out + i * stride, stride);
  }
}

// out_j += Σ_{i >= j} w_ij c_i
template <class T>
void add_queries(int64_t n, int64_t width, const T *w, Rows<T> c, T *out, int64_t stride) {
  for (int64_t j = 0; j < n; j += kStep)
    multiply_transposed<T>(std::min(kStep, n - j), n - j, width, w + j * kChunk + j, kChunk, c.data + j * c.stride,
                           c.stride, out + j * stride, stride);
}

template <class T>
ATTNKIT_INLINE void scale_row(T factor, int64_t width, const T *x, T *out) {
  for (int64_t at = 0; at < width; at += kLanes<T>) store<T>(out + at, load(x + at) * factor);
}

// The gradient of the gates of one item, in double: sums of it are long.
template <class T>
class DecayGradient {
 public:
  void reserve(const attnkit_plan &plan, bool asked, int64_t size) {
    asked_ = asked;
    size_ = size;
    segments_ = 0;
    if (!asked) return;
    std::fill_n(grads_.reserve(plan.keys), plan.keys, 0.0);
    starts_.reserve((plan.keys / kChunk + kBorders) * size);
  }

  bool is_asked() const { return asked_; }

  // Sᵀ and z before a segment.
  void keep_start(const T *sums) {
    if (asked_) std::copy(sums, sums + size_, starts_.data() + segments_++ * size_);
  }

  // From query i and the sums before its chunk: a term of all gates up to its own.
  void add_query(int64_t i, double term) {
    if (asked_) grads_.data()[i] = term;
  }

  // A chunk whose first token is `begin`, from the last one on: `of_keys` are terms of the gates after each key, and that of
  // all gates is `left` of the sums before the chunk with those after it.
  void finish(int64_t begin, int64_t n, bool queries, const double *of_keys, double left, const T *sums,
              const Pairs<T> &pairs) {
    const T *start = starts_.data() + --segments_ * size_;
    double *grads = grads_.data() + begin, later = left == 0 ? 0 : left * product(start, sums, size_), earlier = 0;
    for (int64_t l = n; l-- > 0;) grads[l] = later += queries ? grads[l] : 0;
    for (int64_t l = 0; l < n; ++l) {
      grads[l] += earlier;
      earlier += of_keys[l];
    }
    if (queries) add_pairs(n, grads, pairs);
  }

  void hide(int64_t j) { grads_.data()[j] = 0; }

  void write(const Parts<T> &to, const Index &index, int64_t keys, bool has_one) {
    if (!asked_) return;
    T *row = row_.reserve(std::max<int64_t>(1, keys));
    double sum = 0;
    for (int64_t j = 0; j < keys; ++j) {
      sum += grads_.data()[j];
      row[j] = static_cast<T>(grads_.data()[j]);
    }
    if (has_one) row[0] = static_cast<T>(sum);
    to.write(index, 0, 0, row);
  }

 private:
  static constexpr int kBorders = 4;  // where segments end early

  // Σ_{j < l <= i} E_ij H_ij φ(q_i)·φ(k_j): for l from the last query on, the terms of all i >= l by key, then the keys
  // before l.
  static void add_pairs(int64_t n, double *grads, const Pairs<T> &pairs) {
    double terms[kChunk] = {};
    for (int64_t l = n; l-- > 0;) {
      const int64_t at = l * kChunk;
      const T *fades = pairs.fades.data() + at, *scores = pairs.scores + at, *grads_of = pairs.grads + at;
      for (int64_t j = 0; j < kChunk; ++j) {
        const double product = static_cast<double>(scores[j]) * static_cast<double>(grads_of[j]);
        terms[j] += fades[j] == 0 ? 0 : static_cast<double>(fades[j]) * product;
      }
      int64_t j = 0;
      Vec<double> sums{};
      for (; j + kLanes<double> <= l; j += kLanes<double>) sums += load(terms + j);
      double rest = sum<double>(sums);
      for (; j < l; ++j) rest += terms[j];
      grads[l] += rest;
    }
  }

  bool asked_ = false;
  int64_t size_ = 0, segments_ = 0;
  Buffer<double> grads_;
  Buffer<T> starts_, row_;
};

template <class T>
class Decayed {
 public:
  static bool serves(const Call &call) {
    return call.plan.op == ATTNKIT_LINEAR && (call.plan.log_decay != 0 || call.has(ATTNKIT_LOG_DECAY));
  }

  explicit Decayed(const Call &call)
      : call_(call),
        plan_(call.plan),
        segments_(segments(plan_, kChunk)),
        count_(plan_.features),
        width_(padded<T>(count_)),
        wide_(padded<T>(plan_.values)),
        wider_(padded<T>(plan_.values + 1)) {}

  void forward() const {
    parallel(call_.items(), threads_for_states(call_, count_, 1), [this](int64_t item) { forward(item); });
  }

  void backward() const {
    const TokenGradients<T> to(call_, count_, count_, 1);
    parallel(call_.items(), threads_for_states(call_, count_, 3), [&](int64_t item) { backward(item, to); });
    to.join();
  }

 private:
  static constexpr T kOne = 1;

  struct Workspace {
    Buffer<T> queries, keys, x, y, values, factors, scaled;  // tokens, features, [v, 1], exp(g), features times a factor
    Buffer<T> drawn, out, dx, cotangents;
    Pairs<T> pairs;
    RunningSums<T> sums, more, normaliser;
    DecayGradient<T> decay;
  };

  struct Task {
    const Sequence<T> s;
    const FeatureMap<T> map;
    const Matrix gates;
    Workspace &w;
    T next = 0;  // the gate of the first key so far on the way back

    Task(const Call &call, int64_t item, size_t chunks)
        : s(call, item_index(call.plan, item)),
          map(call, s.item.index),
          gates(call, ATTNKIT_LOG_DECAY, s.item.index),
          w(workspace()) {
      const int64_t width = map.width, wider = padded<T>(call.plan.values + 1);
      for (Buffer<T> *buffer : {&w.queries, &w.keys, &w.x, &w.y, &w.scaled}) buffer->reserve(kChunk * width);
      for (Buffer<T> *buffer : {&w.drawn, &w.out, &w.dx}) buffer->reserve(kChunk * std::max(width, wider));
      w.values.reserve(kChunk * wider);
      w.factors.reserve(2 * kChunk);
      w.pairs.reserve(std::max(width, wider), chunks);
    }

    const Index &index() const { return s.item.index; }

    static Workspace &workspace() {
      static thread_local Workspace w;
      return w;
    }
  };

  int64_t first_query(const Segment &s) const { return s.begin - shift_of(plan_); }

  // ------------------------------------------------------------------------------------------ tokens

  // Features of the tokens that take part, zeros for the others.
  template <class Takes>
  void read_features(const Task &t, const Matrix &from, int64_t first, int64_t n, T *tokens, T *phi,
                     const Takes &takes) const {
    read_rows<T>(from, first, n, count_, width_, tokens, takes);
    t.map.map(n, tokens, phi);
    for (int64_t i = 0; i < n; ++i)
      if (!takes(first + i)) std::fill(phi + i * width_, phi + (i + 1) * width_, T{});
  }

  // Features of queries and keys, [v, 1], E and F.
  void read(Task &t, const Segment &s) const {
    Workspace &w = t.w;
    const auto query = [&t](int64_t i) { return t.s.shown.query(i); };
    const auto key = [&t](int64_t j) { return t.s.shown.key(j); };
    if (s.queries)
      read_features(t, t.s.item.q, first_query(s), s.count, w.queries.data(), w.x.data(), query);
    if (!s.keys) return;
    read_features(t, t.s.k, s.begin, s.count, w.keys.data(), w.y.data(), key);
    read_rows<T>(t.s.v, s.begin, s.count, plan_.values, wider_, w.values.data(), key);
    T *factors = w.factors.data(), *gates = factors + kChunk;
    std::fill_n(gates, s.count, static_cast<T>(plan_.log_decay));
    if (t.gates) t.gates.template read<T>(0, s.begin, s.count, T{1}, gates, s.count);
    for (int64_t j = 0; j < s.count; ++j) {
      w.values.data()[j * wider_ + plan_.values] = key(s.begin + j) ? 1 : 0;
      if (!t.s.shown.valid(s.begin + j)) gates[j] = 0;
    }
    for (int64_t j = 0; j < s.count; j += kLanes<T>) store<T>(factors + j, exp<T>(load(gates + j)));
    w.pairs.fade(s.count, factors);
  }

  // A of a chunk with queries.
  void weigh(Workspace &w, const Segment &s) const {
    if (!s.keys) return;
    w.pairs.multiply_rows(s.count, width_, {w.x.data(), width_}, {w.y.data(), width_}, w.pairs.scores);
    w.pairs.apply_fades(s.count, w.pairs.scores, w.pairs.weights.data());
  }

  // raw of query i: what z before the chunk and its pairs give.
  T add_weights(const Workspace &w, const Segment &s, int64_t i, const T *z) const {
    const T raw = dot(w.x.data() + i * width_, z, width_);
    if (!s.keys) return raw;
    return raw * w.pairs.before[i] + w.pairs.total(i);
  }

  Denominator<T> denominator(T raw) const { return {plan_, static_cast<T>(plan_.scale) * raw}; }

  // Features times what is left of each at the end of the chunk, or, `back`, at its first key.
  Rows<T> scale(Workspace &w, const Segment &s, const T *phi, bool back) const {
    if (!s.keys) return {phi, width_};
    for (int64_t i = 0; i < s.count; ++i) {
      const T left = w.pairs.fades.data()[back ? i * kChunk : (s.count - 1) * kChunk + i];
      scale_row(left, width_, phi + i * width_, w.scaled.data() + i * width_);
    }
    return {w.scaled.data(), width_};
  }

  static Fades<T> fade(const T &factor) { return {Fading::kRows, &factor, 0, 0}; }

  // ------------------------------------------------------------------------------------------ forward

  void forward(int64_t item) const {
    Task t(call_, item, 1);
    Workspace &w = t.w;
    w.sums.reset(count_, wide_);
    w.normaliser.reset(1, width_);
    if (t.s.state) {
      read_state(t.s.state, false, count_, plan_.values, w.sums.total(), wide_);
      t.s.normaliser.template read<T>(0, 0, count_, T{1}, w.normaliser.total(), width_);
    }
    for (const Segment &s : segments_) {
      call_.look();
      read(t, s);
      if (s.queries) write(t, s);
      if (!s.keys) continue;
      const Rows<T> y = scale(w, s, w.y.data(), false);
      const T left = w.pairs.before[s.count - 1];
      w.sums.add(s.count, y, {w.values.data(), wider_}, fade(left));
      w.normaliser.add(s.count, constant(kOne), y, fade(left));
    }
    if (t.s.keeps)
      write_final_state<T>(call_, t.index(), w.sums.total(), wide_, w.normaliser.total(), count_, &kOne, 0);
  }

  void write(Task &t, const Segment &s) const {
    Workspace &w = t.w;
    T *out = w.out.data();
    weigh(w, s);
    std::fill(out, out + s.count * wide_, T{});
    w.sums.draw(s.count, {w.x.data(), width_}, out, wide_);
    for (int64_t i = 0; i < s.count && s.keys; ++i)
      scale_row(w.pairs.before[i], wide_, out + i * wide_, out + i * wide_);
    if (s.keys) add_keys(s.count, wide_, w.pairs.weights.data(), {w.values.data(), wider_}, out, wide_);
    const Matrix o(call_, ATTNKIT_O, t.index());
    const T scale = static_cast<T>(plan_.scale);
    for (int64_t i = 0; i < s.count; ++i, out += wide_) {
      const int64_t query = first_query(s) + i;
      const Denominator<T> den = denominator(add_weights(w, s, i, w.normaliser.total()));
      if (den.gives && t.s.shown.query(query)) {
        scale_row(scale / den.value, wide_, out, out);
      } else {
        std::fill(out, out + wide_, T{});
      }
      if (o) o.write<T>(query, 0, plan_.values, out);
    }
  }

  // ------------------------------------------------------------------------------------------ gradients

  void backward(int64_t item, const TokenGradients<T> &to) const {
    Task t(call_, item, segments_.size());
    t.w.cotangents.reserve((plan_.queries + 1) * wider_);  // [dn, dd] of every query
    t.w.decay.reserve(plan_, call_.has(ATTNKIT_DLOG_DECAY), (plan_.values + 1) * width_);
    from_the_start(t, to);
    from_the_end(t, to);
  }

  T *cotangents(const Task &t, const Segment &s) const {
    return t.w.cotangents.data() + std::max<int64_t>(0, first_query(s)) * wider_;
  }

  // dφ(q) with [S, z]ᵀ.
  void from_the_start(Task &t, const TokenGradients<T> &to) const {
    Workspace &w = t.w;
    w.sums.reset(plan_.values + 1, width_);
    if (t.s.state) {
      read_state(t.s.state, true, count_, plan_.values, w.sums.total(), width_);
      t.s.normaliser.template read<T>(0, 0, count_, T{1}, w.sums.total() + plan_.values * width_, width_);
    }
    for (size_t n = 0; n < segments_.size(); ++n) {
      call_.look();
      const Segment &s = segments_[n];
      w.pairs.open(n);
      read(t, s);
      if (s.keys) w.decay.keep_start(w.sums.total());
      if (s.queries) finish_queries(t, s, to);
      if (!s.keys) continue;
      const T left = w.pairs.before[s.count - 1];
      w.sums.add(s.count, {w.values.data(), wider_}, scale(w, s, w.y.data(), false), fade(left));
    }
  }

  // dn = scale do/den; 0 in rows without an output.
  void read_cotangents(const Task &t, const Segment &s, Denominator<T> *dens, T *dn) const {
    const Matrix d_o(call_, ATTNKIT_DO, t.index());
    const T scale = static_cast<T>(plan_.scale), *z = t.w.sums.total() + plan_.values * width_;
    for (int64_t i = 0; i < s.count; ++i, dn += wider_) {
      const int64_t query = first_query(s) + i;
      dens[i] = denominator(add_weights(t.w, s, i, z));
      if (d_o && dens[i].gives && t.s.shown.query(query)) {
        d_o.read<T>(query, 0, plan_.values, scale / dens[i].value, dn, wider_);
      } else {
        std::fill(dn, dn + wider_, T{});
      }
    }
  }

  // dn, dd, dφ and dq.
  void finish_queries(Task &t, const Segment &s, const TokenGradients<T> &to) const {
    Workspace &w = t.w;
    Denominator<T> dens[kChunk];
    T *dn = cotangents(t, s), *drawn = w.drawn.data(), *out = w.out.data();
    const T *x = w.x.data(), *z = w.sums.total() + plan_.values * width_;
    weigh(w, s);
    read_cotangents(t, s, dens, dn);
    std::fill(drawn, drawn + s.count * width_, T{});
    w.sums.draw(s.count, {dn, wider_}, drawn, width_);
    if (s.keys)
      w.pairs.multiply_rows(s.count, wide_, {dn, wider_}, {w.values.data(), wider_}, w.pairs.grads);
    for (int64_t i = 0; i < s.count; ++i, x += width_, drawn += width_, dn += wider_, out += width_) {
      const T left = s.keys ? w.pairs.before[i] : T{1}, of_sums = dot(x, drawn, width_);
      T *grads = w.pairs.grads + i * kChunk;
      const T along = left * of_sums + (s.keys ? w.pairs.total(i, grads) : T{});
      const T dd = dens[i].gives ? -along * dens[i].slope * static_cast<T>(plan_.scale) / dens[i].value : T{};
      dn[plan_.values] = dd;
      for (int64_t j = 0; j <= i && s.keys; ++j) grads[j] += dd;
      for (int64_t f = 0; f < width_; f += kLanes<T>)
        store<T>(out + f, (load(drawn + f) + load(z + f) * dd) * left);
      if (s.keys) w.decay.add_query(s.begin + i, static_cast<double>(left) * (of_sums + dd * dot(x, z, width_)));
    }
    if (s.keys) {
      w.pairs.apply_fades(s.count, w.pairs.grads, w.pairs.faded.data());
      add_keys(s.count, width_, w.pairs.faded.data(), {w.y.data(), width_}, w.out.data(), width_);
    }
    pull(t, first_query(s), s.count, w.queries.data(), w.x.data(), to.q,
         [&t](int64_t i) { return t.s.shown.query(i); });
  }

  // dx of n tokens from dφ, which is in working memory.
  template <class Takes>
  void pull(Task &t, int64_t first, int64_t n, const T *tokens, const T *phi, const Parts<T> &to,
            const Takes &takes) const {
    T *dx = t.w.dx.data();
    t.map.pull(n, tokens, phi, t.w.out.data(), dx);
    for (int64_t i = 0; i < n; ++i) {
      T *row = dx + i * width_;
      if (!takes(first + i)) std::fill(row, row + width_, T{});
      to.write(t.index(), 0, first + i, row);
    }
  }

  // dφ(k) with [R, r]ᵀ, dv with R.
  void from_the_end(Task &t, const TokenGradients<T> &to) const {
    Workspace &w = t.w;
    close(t);
    for (size_t n = segments_.size(); n-- > 0;) {
      call_.look();
      const Segment &s = segments_[n];
      w.pairs.open(n);
      read(t, s);
      const double after = std::exp(static_cast<double>(t.next));  // sums that come back have not faded at this key
      double left = after;
      t.next = 0;
      if (s.keys) {
        finish_keys(t, s, after, to);
        left *= w.pairs.fades.data()[(s.count - 1) * kChunk];
        t.next = w.factors.data()[kChunk];
      }
      const Rows<T> x = s.queries ? scale(w, s, w.x.data(), true) : Rows<T>{}, dn{cotangents(t, s), wider_};
      const T factor = static_cast<T>(left);
      w.sums.add(s.queries ? s.count : 0, dn, x, fade(factor));
      w.more.add(s.queries ? s.count : 0, x, dn, fade(factor));
    }
    w.decay.write(to.decay, t.index(), plan_.keys, TokenGradients<T>::has_one_decay(call_));
    write_state(t, to);
  }

  // The cotangent of the final state is what R and r begin with.
  void close(Task &t) const {
    Workspace &w = t.w;
    const Matrix d_state(call_, ATTNKIT_DFINAL_STATE, t.index());
    const Matrix d_normaliser(call_, ATTNKIT_DFINAL_NORMALISER, t.index());
    w.sums.reset(plan_.values + 1, width_);
    w.more.reset(count_, wide_);
    if (t.s.keeps && d_state) {
      read_state(d_state, true, count_, plan_.values, w.sums.total(), width_);
      read_state(d_state, false, count_, plan_.values, w.more.total(), wide_);
    }
    if (t.s.keeps && d_normaliser)
      d_normaliser.read<T>(0, 0, count_, T{1}, w.sums.total() + plan_.values * width_, width_);
  }

  void finish_keys(Task &t, const Segment &s, double after, const TokenGradients<T> &to) const {
    Workspace &w = t.w;
    const auto takes = [&t](int64_t j) { return t.s.shown.key(j); };
    T *grads = w.out.data(), *dv = w.drawn.data();
    const T *y = w.y.data(), *dn = cotangents(t, s);
    std::fill(grads, grads + s.count * width_, T{});
    std::fill(dv, dv + s.count * wide_, T{});
    w.sums.draw(s.count, {w.values.data(), wider_}, grads, width_);
    w.more.draw(s.count, {y, width_}, dv, wide_);
    double of_keys[kChunk];
    for (int64_t j = 0; j < s.count; ++j) {
      T *row = grads + j * width_;
      const double left = after * w.pairs.fades.data()[(s.count - 1) * kChunk + j];
      of_keys[j] = left * dot(y + j * width_, row, width_);
      scale_row(static_cast<T>(left), width_, row, row);
      scale_row(static_cast<T>(left), wide_, dv + j * wide_, dv + j * wide_);
    }
    if (s.queries) {
      w.pairs.apply_fades(s.count, w.pairs.scores, w.pairs.weights.data());
      w.pairs.apply_fades(s.count, w.pairs.grads, w.pairs.faded.data());
      add_queries(s.count, width_, w.pairs.faded.data(), {w.x.data(), width_}, grads, width_);
      add_queries(s.count, wide_, w.pairs.weights.data(), {dn, wider_}, dv, wide_);
    }
    if (w.decay.is_asked()) {
      w.decay.finish(s.begin, s.count, s.queries, of_keys, after * w.pairs.before[s.count - 1], w.sums.total(), w.pairs);
      for (int64_t l = s.begin; l < s.begin + s.count; ++l)
        if (!t.s.shown.valid(l)) w.decay.hide(l);
    }
    pull(t, s.begin, s.count, w.keys.data(), w.y.data(), to.k, takes);
    for (int64_t j = 0; j < s.count; ++j, dv += wide_) {
      if (!takes(s.begin + j)) std::fill(dv, dv + wide_, T{});
      to.v.write(t.index(), 0, s.begin + j, dv);
    }
  }

  // What is left of R and r before the first token is the gradient of the initial state.
  void write_state(Task &t, const TokenGradients<T> &to) const {
    Workspace &w = t.w;
    if (!t.s.state) return;
    const T left = std::exp(t.next);
    T *state = w.more.total(), *normaliser = w.sums.total() + plan_.values * width_;
    scale_row(left, count_ * wide_, state, state);
    scale_row(left, width_, normaliser, normaliser);
    for (int64_t f = 0; f < count_; ++f) to.state.write(t.index(), 0, f, state + f * wide_);
    to.normaliser.write(t.index(), 0, 0, normaliser);
  }

  const Call &call_;
  const attnkit_plan &plan_;
  const std::vector<Segment> segments_;
  const int64_t count_, width_;  // features
  const int64_t wide_, wider_;   // rows of values, and of values with one more column
};

}  // namespace attnkit
