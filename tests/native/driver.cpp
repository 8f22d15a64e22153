// The CPU library against formulas written out, without Python: `driver LIBRARY [fault]` prints what is wrong.
//
// Outputs are compared with sums in double; gradients, in double, with central differences of those along random
// directions. `fault` plants an error in the formulas, which must show.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "attnkit.h"

namespace {

using Numbers = std::vector<double>;
std::mt19937_64 generator(7);
bool fault = false;

struct Case {
  int op, causal, keys_shown;
  bool mask, bias, queries_masked;
  int64_t items, L, S, d, e;
};

struct Inputs {
  Numbers q, k, v, bias;
  std::vector<uint8_t> mask, query_mask;
};

Numbers normal(int64_t n) {
  std::normal_distribution<double> draw;
  Numbers x(n);
  for (double &value : x) value = draw(generator);
  return x;
}

std::vector<uint8_t> coins(int64_t n, double p) {
  std::bernoulli_distribution draw(p);
  std::vector<uint8_t> x(n);
  for (uint8_t &value : x) value = draw(generator);
  return x;
}

bool is_linear(int op) { return op >= ATTNKIT_LINEAR; }  // its masks are those of keys

bool visible(const Case &c, const Inputs &x, int64_t i, int64_t j) {
  const bool before = !c.causal || j <= i + c.S - c.L + (fault ? 1 : 0);
  return before && j < c.keys_shown && (!c.mask || x.mask[(is_linear(c.op) ? 0 : i * c.S) + j]) && (!c.queries_masked || x.query_mask[i]);
}

// The weights of a row of scores, of the visible keys only.
Numbers weights(int op, Numbers s) {
  if (s.empty()) return s;
  const double top = *std::max_element(s.begin(), s.end());
  if (op == ATTNKIT_ENTMAX) {  // sparsemax: the threshold by bisection
    double low = top - 1, high = top;
    for (int step = 0; step < 200; ++step) {
      const double middle = (low + high) / 2;
      double sum = 0;
      for (double x : s) sum += std::max(x - middle, 0.0);
      (sum >= 1 ? low : high) = middle;
    }
    for (double &x : s) x = std::max(x - low, 0.0);
    return s;
  }
  double total = 0;
  for (double &x : s) {
    if (op == ATTNKIT_SOFTMAX) x = std::exp(x - top);
    else if (op == ATTNKIT_GAUSSIAN) x = std::exp(x);
    else x = std::max(x, 0.0);
    total += x;
  }
  for (double &x : s) {
    if (op == ATTNKIT_SOFTMAX) x /= total;
    if (op == ATTNKIT_POINTWISE) x /= static_cast<double>(s.size());
  }
  return s;
}

double elu_plus_one(double x) { return x > 0 ? x + 1 : std::exp(x); }

// The weights of linear attention for the keys that a query sees; rows of d features.
Numbers linear_weights(const Case &c, const double *q, const std::vector<const double *> &keys) {
  Numbers w(keys.size()), norms(keys.size());
  double total = 1e-6, norm = 0, features = 0;
  for (int64_t f = 0; f < c.d; ++f) {
    norm += q[f] * q[f];
    features += std::exp(q[f]);
  }
  for (size_t n = 0; n < keys.size(); ++n)
    for (int64_t f = 0; f < c.d; ++f) norms[n] += keys[n][f] * keys[n][f];
  for (int64_t f = 0; f < c.d; ++f) {
    double sum = 0;
    for (const double *k : keys) sum += std::exp(k[f]);
    for (size_t n = 0; n < keys.size(); ++n) {
      const double k = keys[n][f];
      if (c.op == ATTNKIT_LINEAR) w[n] += elu_plus_one(q[f]) * elu_plus_one(k);
      if (c.op == ATTNKIT_COSINE) w[n] += q[f] * k / std::sqrt(norm * norms[n]) + 1.0 / static_cast<double>(c.d);
      if (c.op == ATTNKIT_EFFICIENT) w[n] += std::exp(q[f]) / features * std::exp(k) / sum;
    }
  }
  if (c.op == ATTNKIT_EFFICIENT) return w;
  for (double x : w) total += x;
  for (double &x : w) x /= total;
  return w;
}

Numbers attend(const Case &c, const Inputs &x) {
  Numbers o(c.items * c.L * c.e);
  const double scale = 1 / std::sqrt(static_cast<double>(c.d));
  for (int64_t row = 0; row < c.items * c.L; ++row) {
    const int64_t item = row / c.L, i = row % c.L;
    Numbers s;
    std::vector<int64_t> seen;
    for (int64_t j = 0; j < c.S; ++j) {
      if (!visible(c, x, i, j)) continue;
      double product = 0, distance = 0;
      for (int64_t f = 0; f < c.d; ++f) {
        const double a = x.q[row * c.d + f], b = x.k[(item * c.S + j) * c.d + f];
        product += a * b;
        distance += (a - b) * (a - b);
      }
      s.push_back(scale * (c.op == ATTNKIT_GAUSSIAN ? -distance / 2 : product) + (c.bias ? x.bias[i * c.S + j] : 0));
      seen.push_back(j);
    }
    std::vector<const double *> rows;
    for (int64_t j : seen) rows.push_back(x.k.data() + (item * c.S + j) * c.d);
    const Numbers w = is_linear(c.op) ? linear_weights(c, x.q.data() + row * c.d, rows) : weights(c.op, s);
    for (size_t n = 0; n < seen.size(); ++n)
      for (int64_t f = 0; f < c.e; ++f) o[row * c.e + f] += w[n] * x.v[(item * c.S + seen[n]) * c.e + f];
  }
  return o;
}

// A plan and its pointers. Arrays of pairs are those of all items.
struct Call {
  attnkit_plan plan{};
  std::vector<int64_t> places;
  std::vector<void *> pointers;

  explicit Call(const Case &c) {
    plan.size = sizeof plan;
    plan.version = ATTNKIT_VERSION;
    plan.op = c.op;
    plan.length_kind = ATTNKIT_LENGTH_VISIBLE;
    std::fill(plan.axes, plan.axes + ATTNKIT_AXES, 1);
    plan.axes[ATTNKIT_AXES - 1] = c.items;
    plan.queries = c.L, plan.keys = c.S, plan.features = c.d, plan.values = c.e;
    plan.lowest = INT64_MIN;
    plan.highest = c.causal ? c.S - c.L : INT64_MAX;
    plan.key_length = c.keys_shown;
    plan.scale = is_linear(c.op) ? 1 : 1 / std::sqrt(static_cast<double>(c.d));
    plan.normalize = 1;
    plan.eps = c.op == ATTNKIT_LINEAR ? 1e-6 : 1e-12;
    plan.gain = 1;
    plan.alpha = c.op == ATTNKIT_ENTMAX ? 2 : 1;
    plan.sink = -std::numeric_limits<double>::infinity();
  }

  void add(int array, int dtype, int64_t rows, int64_t columns, bool of_items, void *data) {
    plan.arrays[array] = {dtype, 0, {}, columns, 1};
    if (columns == 0) plan.arrays[array].row = 1;
    if (array == ATTNKIT_MASK && is_linear(plan.op)) plan.arrays[array].row = 0;
    if (of_items) plan.arrays[array].axes[ATTNKIT_AXES - 1] = rows * columns;
    places.push_back(array);
    pointers.push_back(data);
  }
};

std::string name_of(const Case &c) {
  char text[200];
  std::snprintf(text, sizeof text, "op %d (%d, %d, %d, %d, %d) causal %d keys %d mask %d bias %d queries %d", c.op,
                static_cast<int>(c.items), static_cast<int>(c.L), static_cast<int>(c.S), static_cast<int>(c.d),
                static_cast<int>(c.e), c.causal, c.keys_shown, c.mask, c.bias, c.queries_masked);
  return text;
}

template <class T>
std::vector<T> as(const Numbers &x) {
  return std::vector<T>(x.begin(), x.end());
}

double inner(const Numbers &a, const Numbers &b) {
  double sum = 0;
  for (size_t n = 0; n < a.size(); ++n) sum += a[n] * b[n];
  return sum;
}

using Run = int (*)(const attnkit_plan *, const int64_t *, int64_t, void *const *, int, attnkit_openmp);

int serve(Run run, const Call &call) {
  return run(&call.plan, call.places.data(), static_cast<int64_t>(call.places.size()), call.pointers.data(), 2,
             nullptr);
}

template <class T>
void check_output(Run run, const Case &c, Inputs x, int dtype, double bound) {
  const Numbers expected = attend(c, x);
  std::vector<T> q = as<T>(x.q), k = as<T>(x.k), v = as<T>(x.v), bias = as<T>(x.bias), o(expected.size(), T(9));
  Call call(c);
  call.add(ATTNKIT_Q, dtype, c.L, c.d, true, q.data());
  call.add(ATTNKIT_K, dtype, c.S, c.d, true, k.data());
  call.add(ATTNKIT_V, dtype, c.S, c.e, true, v.data());
  call.add(ATTNKIT_O, dtype, c.L, c.e, true, o.data());
  if (c.bias) call.add(ATTNKIT_BIAS, dtype, c.L, c.S, false, bias.data());
  if (c.mask) call.add(ATTNKIT_MASK, ATTNKIT_BOOL, c.L, c.S, false, x.mask.data());
  if (c.queries_masked) call.add(ATTNKIT_QUERY_MASK, ATTNKIT_BOOL, c.L, 0, false, x.query_mask.data());
  const int code = serve(run, call);
  double worst = 0;
  for (size_t n = 0; n < o.size(); ++n) worst = std::max(worst, std::abs(o[n] - expected[n]));
  if (code != ATTNKIT_OK || !(worst < bound))
    std::printf("output: %s: code %d, error %g\n", name_of(c).c_str(), code, worst);
}

void check_gradients(Run run, const Case &c, Inputs x) {
  Numbers d_o = normal(c.items * c.L * c.e), dq(x.q.size(), 9), dk(x.k.size(), 9), dv(x.v.size(), 9);
  Numbers db(x.bias.size(), 9);
  Call call(c);
  call.plan.pass = ATTNKIT_BACKWARD;
  call.add(ATTNKIT_Q, ATTNKIT_FLOAT64, c.L, c.d, true, x.q.data());
  call.add(ATTNKIT_K, ATTNKIT_FLOAT64, c.S, c.d, true, x.k.data());
  call.add(ATTNKIT_V, ATTNKIT_FLOAT64, c.S, c.e, true, x.v.data());
  call.add(ATTNKIT_DO, ATTNKIT_FLOAT64, c.L, c.e, true, d_o.data());
  call.add(ATTNKIT_DQ, ATTNKIT_FLOAT64, c.L, c.d, true, dq.data());
  call.add(ATTNKIT_DK, ATTNKIT_FLOAT64, c.S, c.d, true, dk.data());
  call.add(ATTNKIT_DV, ATTNKIT_FLOAT64, c.S, c.e, true, dv.data());
  if (c.bias) call.add(ATTNKIT_BIAS, ATTNKIT_FLOAT64, c.L, c.S, false, x.bias.data());
  if (c.bias) call.add(ATTNKIT_DBIAS, ATTNKIT_FLOAT64, c.L, c.S, false, db.data());
  if (c.mask) call.add(ATTNKIT_MASK, ATTNKIT_BOOL, c.L, c.S, false, x.mask.data());
  if (c.queries_masked) call.add(ATTNKIT_QUERY_MASK, ATTNKIT_BOOL, c.L, 0, false, x.query_mask.data());
  const int code = serve(run, call);
  const double step = 1e-6;
  Numbers *const inputs[] = {&x.q, &x.k, &x.v, &x.bias};
  const Numbers *const grads[] = {&dq, &dk, &dv, &db};
  for (int n = 0; n < (c.bias ? 4 : 3); ++n) {
    const Numbers kept = *inputs[n], direction = normal(static_cast<int64_t>(kept.size()));
    double values[2];
    for (int side = 0; side < 2; ++side) {
      for (size_t m = 0; m < kept.size(); ++m) (*inputs[n])[m] = kept[m] + (side ? step : -step) * direction[m];
      values[side] = inner(attend(c, x), d_o);
    }
    *inputs[n] = kept;
    const double expected = (values[1] - values[0]) / (2 * step), got = inner(*grads[n], direction);
    if (code != ATTNKIT_OK || !(std::abs(got - expected) < 1e-4 * (1 + std::abs(expected))))
      std::printf("gradient %d: %s: code %d, %g instead of %g\n", n, name_of(c).c_str(), code, got, expected);
  }
}

// Packed sequences against the formulas of each.
void check_packed(Run run, int op, int causal) {
  int64_t queries[] = {0, 5, 5, 38}, keys[] = {0, 7, 9, 40};
  const Case whole{op, causal, 40, false, false, false, 1, 38, 40, 16, 12};
  Inputs x{normal(38 * 16), normal(40 * 16), normal(40 * 12), {}, {}, {}};
  Numbers o(38 * 12, 9), expected;
  for (int b = 0; b < 3; ++b) {
    const auto rows = [b](const Numbers &all, const int64_t *edges, int64_t width) {
      return Numbers(all.begin() + edges[b] * width, all.begin() + edges[b + 1] * width);
    };
    const Inputs own{rows(x.q, queries, 16), rows(x.k, keys, 16), rows(x.v, keys, 12), {}, {}, {}};
    const int64_t L = queries[b + 1] - queries[b], S = keys[b + 1] - keys[b];
    const Numbers part = attend({op, causal, static_cast<int>(S), false, false, false, 1, L, S, 16, 12}, own);
    expected.insert(expected.end(), part.begin(), part.end());
  }
  Call call(whole);
  call.plan.sequences = 3;
  call.plan.highest = INT64_MAX;
  call.plan.before = INT64_MIN;
  call.plan.after = causal ? 0 : INT64_MAX;
  call.add(ATTNKIT_Q, ATTNKIT_FLOAT64, 38, 16, true, x.q.data());
  call.add(ATTNKIT_K, ATTNKIT_FLOAT64, 40, 16, true, x.k.data());
  call.add(ATTNKIT_V, ATTNKIT_FLOAT64, 40, 12, true, x.v.data());
  call.add(ATTNKIT_O, ATTNKIT_FLOAT64, 38, 12, true, o.data());
  call.add(ATTNKIT_EDGES_Q, ATTNKIT_INT64, 4, 0, false, queries);
  call.add(ATTNKIT_EDGES_K, ATTNKIT_INT64, 4, 0, false, keys);
  const int code = serve(run, call);
  double worst = 0;
  for (size_t n = 0; n < o.size(); ++n) worst = std::max(worst, std::abs(o[n] - expected[n]));
  if (code != ATTNKIT_OK || !(worst < 1e-12))
    std::printf("packed: op %d causal %d: code %d, error %g\n", op, causal, code, worst);
}

// The delta rule, with one gate for each feature, each token or none, and gated linear attention: the recurrence of one
// sequence of n tokens.
enum Gates { kNone, kTokens, kFeatures };

struct Tokens {
  int op;
  Gates gates;
  int64_t n, d, e;
  Numbers q, k, v, beta, gate;
};

Numbers recur(const Tokens &t) {
  Numbers o(t.n * t.e), state(t.d * t.e);
  for (int64_t j = 0; j < t.n; ++j) {
    const double *q = t.q.data() + j * t.d, *k = t.k.data() + j * t.d, *v = t.v.data() + j * t.e;
    for (int64_t f = 0; f < t.d && t.gates != kNone; ++f)
      for (int64_t x = 0; x < t.e; ++x)
        state[f * t.e + x] *= std::exp(t.gate[t.gates == kTokens ? j : j * t.d + f]);
    for (int64_t x = 0; x < t.e; ++x) {
      double u = v[x], out = 0;
      for (int64_t f = 0; f < t.d && t.op == ATTNKIT_DELTA; ++f) u -= k[f] * state[f * t.e + x];
      if (t.op == ATTNKIT_DELTA) u *= t.beta[j];
      for (int64_t f = 0; f < t.d; ++f) out += q[f] * (state[f * t.e + x] += k[f] * u * (fault ? 1.01 : 1));
      o[j * t.e + x] = out / std::sqrt(static_cast<double>(t.d));
    }
  }
  return o;
}

// Its arrays in a call, or its gradients: q, k, v and the gates.
void add_tokens(Call &call, const Tokens &t, bool grads, Numbers *const *arrays) {
  const int gate = t.gates == kTokens ? (grads ? ATTNKIT_DLOG_DECAY : ATTNKIT_LOG_DECAY)
                                      : (grads ? ATTNKIT_DLOG_GATE : ATTNKIT_LOG_GATE);
  const int names[] = {grads ? ATTNKIT_DQ : ATTNKIT_Q, grads ? ATTNKIT_DK : ATTNKIT_K, grads ? ATTNKIT_DV : ATTNKIT_V,
                       grads ? ATTNKIT_DBETA : ATTNKIT_BETA, gate};
  const int64_t widths[] = {t.d, t.d, t.e, 0, t.gates == kTokens ? 0 : t.d};
  for (int n = 0; n < 5; ++n) {
    if ((n == 3 && t.op != ATTNKIT_DELTA) || (n == 4 && t.gates == kNone)) continue;
    call.add(names[n], ATTNKIT_FLOAT64, t.n, widths[n], true, arrays[n]->data());
    if (widths[n] == 0) call.plan.arrays[names[n]].row = 0;
  }
}

void check_tokens(Run run, int op, Gates gates, int64_t n, int64_t d, int64_t e) {
  Tokens t{op, gates, n, d, e, normal(n * d), normal(n * d), normal(n * e), normal(n), normal(n * d)};
  for (double &x : t.k) x /= std::sqrt(static_cast<double>(d));
  for (double &x : t.beta) x = std::abs(x) / 2;
  for (double &x : t.gate) x = -std::abs(x);
  Numbers *const inputs[] = {&t.q, &t.k, &t.v, &t.beta, &t.gate};
  Numbers o(n * e, 9), d_o = normal(n * e), grads[5];
  Numbers *pointers[5];
  for (int x = 0; x < 5; ++x) grads[x].resize(inputs[x]->size(), 9), pointers[x] = &grads[x];
  const Case whole{op, 1, static_cast<int>(n), false, false, false, 1, n, n, d, e};
  Call forward(whole), backward(whole);
  for (Call *call : {&forward, &backward}) {
    call->plan.scale = 1 / std::sqrt(static_cast<double>(d));
    add_tokens(*call, t, false, inputs);
  }
  forward.add(ATTNKIT_O, ATTNKIT_FLOAT64, n, e, true, o.data());
  backward.plan.pass = ATTNKIT_BACKWARD;
  backward.add(ATTNKIT_DO, ATTNKIT_FLOAT64, n, e, true, d_o.data());
  add_tokens(backward, t, true, pointers);
  const int code = serve(run, forward), code_back = serve(run, backward);
  const Numbers expected = recur(t);
  double worst = 0;
  for (size_t x = 0; x < o.size(); ++x) worst = std::max(worst, std::abs(o[x] - expected[x]));
  if (code != ATTNKIT_OK || !(worst < 1e-12))
    std::printf("tokens: op %d gates %d: code %d, error %g\n", op, gates, code, worst);
  for (int x = 0; x < 5; ++x) {
    if ((x == 3 && op != ATTNKIT_DELTA) || (x == 4 && gates == kNone)) continue;
    const Numbers kept = *inputs[x], direction = normal(static_cast<int64_t>(kept.size()));
    double values[2], got = 0;
    for (int side = 0; side < 2; ++side) {
      for (size_t m = 0; m < kept.size(); ++m) (*inputs[x])[m] = kept[m] + (side ? 1e-6 : -1e-6) * direction[m];
      values[side] = inner(recur(t), d_o);
    }
    *inputs[x] = kept;
    const int64_t own = x == 4 && gates == kTokens ? n : static_cast<int64_t>(kept.size());
    for (int64_t m = 0; m < own; ++m) got += grads[x][m] * direction[m];
    const double slope = (values[1] - values[0]) / 2e-6;
    if (code_back != ATTNKIT_OK || !(std::abs(got - slope) < 1e-4 * (1 + std::abs(slope))))
      std::printf("tokens: gradient %d: op %d gates %d: code %d, %g instead of %g\n", x, op, gates, code_back, got, slope);
  }
}

}  // namespace

int main(int count, char **arguments) {
  void *const library = count > 1 ? dlopen(arguments[1], RTLD_NOW) : nullptr;
  const Run run = library ? reinterpret_cast<Run>(dlsym(library, "attnkit_run")) : nullptr;
  if (run == nullptr) {
    std::printf("no library: %s\n", dlerror());
    return 2;
  }
  fault = count > 2;
  const int64_t sizes[][5] = {{2, 5, 7, 8, 4}, {1, 33, 130, 24, 40}, {2, 100, 100, 16, 16}, {1, 1, 300, 64, 64}};
  for (int op : {ATTNKIT_POINTWISE, ATTNKIT_SOFTMAX, ATTNKIT_ENTMAX, ATTNKIT_GAUSSIAN, ATTNKIT_LINEAR, ATTNKIT_COSINE,
                 ATTNKIT_EFFICIENT}) {
    for (int causal : {0, 1}) check_packed(run, op, causal);
    for (const auto &n : sizes) {
      for (int options = 0; options < 16; ++options) {
        const Case c{op, options & 1, static_cast<int>(options & 2 ? n[2] - 2 : n[2]), (options & 4) != 0,
                     (options & 8) != 0, options == 15, n[0], n[1], n[2], n[3], n[4]};
        if (is_linear(op) && c.bias) continue;
        const Inputs x{normal(c.items * c.L * c.d), normal(c.items * c.S * c.d), normal(c.items * c.S * c.e),
                       normal(c.L * c.S), coins(c.L * c.S, 0.7), coins(c.L, 0.7)};
        check_output<float>(run, c, x, ATTNKIT_FLOAT32, 2e-5);
        check_output<double>(run, c, x, ATTNKIT_FLOAT64, 1e-12);
        if (options % 5 == 0) check_gradients(run, c, x);
      }
    }
  }
  for (const auto &n : {std::array<int64_t, 3>{1, 3, 2}, {40, 16, 24}, {70, 33, 5}}) {
    check_tokens(run, ATTNKIT_GATED_LINEAR, kFeatures, n[0], n[1], n[2]);
    for (Gates gates : {kNone, kTokens, kFeatures}) check_tokens(run, ATTNKIT_DELTA, gates, n[0], n[1], n[2]);
  }
  return 0;
}
