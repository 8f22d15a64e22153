// The CPU library against formulas written out, without Python: `driver LIBRARY [fault]` prints what is wrong.
//
// Outputs are compared with sums in double; gradients, in double, with central differences of those along random
// directions. `fault` plants an error in the formulas, which must show.
#include <dlfcn.h>

#include <algorithm>
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
  return 0;
}
