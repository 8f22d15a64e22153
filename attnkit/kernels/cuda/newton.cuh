// The Newton-Raphson iteration X ← 2X - XAX from X = factor·2/‖A‖₁²·A (Lu et al. 2021, Algorithm 2), and its gradients.
//
// A block has one matrix of m ≤ 64 rows, in float or double, through all steps. Matrices that are multiplied stand in
// shared memory, at most four at a time; a gradient takes the iterates from global memory, where `newton_iterations` put
// them. ‖A‖₁ is the largest sum of a column.
#pragma once

#include "activations.cuh"
#include "views.cuh"

namespace attnkit {

// The argument of both kernels; `backends/cupy/newton.py` has the same structure.
struct Newton {
  View a, x, dx, da;     // x is not there where only the iterates are asked for
  View factors;          // one for each matrix, or not there
  View dfactors;         // their gradients, in the compute type
  void* iterates;        // (matrices, kept, m, m): the last X, or with `all` X_0 .. X_T
  double factor;         // of all matrices, where `factors` is not there
  int heads, m, steps, all;
};

// Products of (m, m) matrices by 16×16 threads: thread (y, x) owns the rows y, y + 16, ... and columns x, x + 16, ...
template <class C>
struct Squares {
  static constexpr int SIDE = 16, THREADS = SIDE * SIDE, MOST = 64, EACH = MOST / SIDE;

  // What this thread has of a matrix.
  struct Part {
    C at[EACH][EACH];

    __device__ void add(const Part& other) {
#pragma unroll
      for (int n = 0; n < EACH * EACH; n++) at[n / EACH][n % EACH] += other.at[n / EACH][n % EACH];
    }
    __device__ void subtract(const Part& other) {
#pragma unroll
      for (int n = 0; n < EACH * EACH; n++) at[n / EACH][n % EACH] -= other.at[n / EACH][n % EACH];
    }
  };

  int m;

  __device__ int pitch() const { return m + 1; }
  __device__ int size() const { return m * pitch(); }

  // f(element, row, column) for each element that this thread has.
  template <class F>
  __device__ void each(Part& part, F f) const {
    const int y = threadIdx.x / SIDE, x = threadIdx.x % SIDE;
#pragma unroll
    for (int r = 0; r < EACH; r++) {
#pragma unroll
      for (int c = 0; c < EACH; c++) {
        if (y + r * SIDE < m && x + c * SIDE < m) f(part.at[r][c], y + r * SIDE, x + c * SIDE);
      }
    }
  }

  // x y, or of the transposes that are asked for.
  template <bool TURN_X, bool TURN_Y>
  __device__ Part product(const C* x, const C* y) const {
    Part sums = {};
    const int row = threadIdx.x / SIDE, column = threadIdx.x % SIDE;
    for (int n = 0; n < m; n++) {
      C of_x[EACH], of_y[EACH];
#pragma unroll
      for (int r = 0; r < EACH; r++) {
        const int i = row + r * SIDE, j = column + r * SIDE;
        of_x[r] = i < m ? x[TURN_X ? n * pitch() + i : i * pitch() + n] : C(0);
        of_y[r] = j < m ? y[TURN_Y ? j * pitch() + n : n * pitch() + j] : C(0);
      }
#pragma unroll
      for (int r = 0; r < EACH; r++) {
#pragma unroll
        for (int c = 0; c < EACH; c++) sums.at[r][c] += of_x[r] * of_y[c];
      }
    }
    return sums;
  }

  // A part into shared memory, once nobody reads what was there, and all of it there for everybody.
  __device__ void keep(C* at, Part& part) const {
    __syncthreads();
    each(part, [&](C& element, int i, int j) { at[i * pitch() + j] = element; });
    __syncthreads();
  }

  __device__ Part loaded(const Matrix& from) const {
    Part part = {};
    each(part, [&](C& element, int i, int j) { element = load_number<C>(from, i, j); });
    return part;
  }

  // One of the iterates.
  __device__ Part iterate(const C* from) const {
    Part part = {};
    each(part, [&](C& element, int i, int j) { element = from[i * m + j]; });
    return part;
  }
};

// The sums of the columns of |A| into `sums`, for everybody.
template <class C>
__device__ inline void column_sums(const Squares<C>& squares, C* sums, const C* a) {
  for (int j = threadIdx.x; j < squares.m; j += Squares<C>::THREADS) {
    C sum = 0;
    for (int i = 0; i < squares.m; i++) sum += size_of(a[i * squares.pitch() + j]);
    sums[j] = sum;
  }
  __syncthreads();
}

// The first largest of `sums`; a NaN counts as larger than all.
template <class C>
__device__ inline int first_largest(const C* sums, int m) {
  int first = 0;
  for (int j = 1; j < m; j++) {
    if (sums[first] == sums[first] && !(sums[j] <= sums[first])) first = j;
  }
  return first;
}

template <class C>
__device__ inline C factor_of(const Newton& n, int item, int head) {
  return n.factors.at ? load_number<C>(matrix_of(n.factors, item, head), 0, 0) : C(n.factor);
}

// X_T into `x` and the iterates.
template <class C>
__global__ void __launch_bounds__(Squares<C>::THREADS, 1) newton_iterations(const __grid_constant__ Newton n) {
  using Part = typename Squares<C>::Part;
  const Squares<C> squares = {n.m};
  const int item = blockIdx.x / n.heads, head = blockIdx.x % n.heads;
  C* a = (C*)shared_memory();
  C *x = a + squares.size(), *xa = x + squares.size(), *sums = xa + squares.size();
  C* kept = n.iterates ? (C*)n.iterates + (long long)blockIdx.x * (n.all ? n.steps + 1 : 1) * n.m * n.m : nullptr;
  const auto put = [&](Part& part) {
    squares.each(part, [&](C& element, int i, int j) { kept[i * n.m + j] = element; });
  };
  Part part = squares.loaded(matrix_of(n.a, item, head));
  squares.keep(a, part);
  column_sums(squares, sums, a);
  const C norm = sums[first_largest(sums, n.m)], safe = norm == 0 ? C(1) : norm;
  const C factor = factor_of<C>(n, item, head) * 2 / safe;
  squares.each(part, [&](C& element, int, int) { element = element / safe * factor; });
  for (int step = 0; step < n.steps; step++) {
    if (n.all && kept) {
      put(part);
      kept += n.m * n.m;
    }
    squares.keep(x, part);
    Part product = squares.template product<false, false>(x, a);
    squares.keep(xa, product);
    product = squares.template product<false, false>(xa, x);
    part.add(part);
    part.subtract(product);
  }
  if (kept) put(part);
  const Matrix to = matrix_of(n.x, item, head);
  if (to.at) squares.each(part, [&](C& element, int i, int j) { *(C*)to.element(i, j) = element; });
}

// dA = -Xᵀ dX Xᵀ with the last X.
template <class C>
__global__ void __launch_bounds__(Squares<C>::THREADS, 1) newton_implicit_gradient(const __grid_constant__ Newton n) {
  using Part = typename Squares<C>::Part;
  const Squares<C> squares = {n.m};
  const int item = blockIdx.x / n.heads, head = blockIdx.x % n.heads;
  C *x = (C*)shared_memory(), *dx = x + squares.size();
  Part part = squares.iterate((const C*)n.iterates + (long long)blockIdx.x * n.m * n.m);
  squares.keep(x, part);
  part = squares.loaded(matrix_of(n.dx, item, head));
  squares.keep(dx, part);
  part = squares.template product<true, false>(x, dx);
  squares.keep(dx, part);
  part = squares.template product<false, true>(dx, x);
  const Matrix to = matrix_of(n.da, item, head);
  squares.each(part, [&](C& element, int i, int j) { store_number(to, i, j, -element); });
}

// dA = -Σ_k X_kᵀ dX_k+1 X_kᵀ and that of X_0, with dX_k = 2 dX_k+1 - dX_k+1 (A X_k)ᵀ - (X_k A)ᵀ dX_k+1. That of ‖A‖₁
// goes to the first of its largest columns.
template <class C>
__global__ void __launch_bounds__(Squares<C>::THREADS, 1) newton_unrolled_gradient(const __grid_constant__ Newton n) {
  using Part = typename Squares<C>::Part;
  const Squares<C> squares = {n.m};
  const int item = blockIdx.x / n.heads, head = blockIdx.x % n.heads, each = n.m * n.m;
  C* a = (C*)shared_memory();
  C *x = a + squares.size(), *dx = x + squares.size(), *between = dx + squares.size();
  C *sums = between + squares.size(), *alongs = sums + n.m;
  Part part = squares.loaded(matrix_of(n.a, item, head));
  squares.keep(a, part);
  part = squares.loaded(matrix_of(n.dx, item, head));
  Part da = {};
  for (int step = n.steps - 1; step >= 0; step--) {
    Part own = squares.iterate((const C*)n.iterates + ((long long)blockIdx.x * (n.steps + 1) + step) * each);
    squares.keep(x, own);
    squares.keep(dx, part);
    own = squares.template product<true, false>(x, dx);
    squares.keep(between, own);
    da.subtract(squares.template product<false, true>(between, x));
    part.add(part);
    part.subtract(squares.template product<true, false>(a, between));
    own = squares.template product<false, true>(dx, x);
    squares.keep(between, own);
    part.subtract(squares.template product<false, true>(between, a));
  }
  column_sums(squares, sums, a);
  C along = 0;
  squares.each(part, [&](C& element, int i, int j) { along += element * a[i * squares.pitch() + j]; });
  alongs[threadIdx.x] = along;
  __syncthreads();
  along = 0;
  for (int t = 0; t < Squares<C>::THREADS; t++) along += alongs[t];
  const int first = first_largest(sums, n.m);
  const C norm = sums[first], safe = norm == 0 ? C(1) : norm, twice = 2 / (safe * safe);
  const C factor = factor_of<C>(n, item, head);
  const C dnorm = norm == 0 ? C(0) : factor * twice * along * -2 / safe;
  const Matrix to = matrix_of(n.da, item, head);
  squares.each(da, [&](C& element, int i, int j) {
    const C own = a[i * squares.pitch() + j];
    if (j == first) element += own > 0 ? dnorm : own < 0 ? -dnorm : C(0);
  });
  squares.each(part, [&](C& element, int, int) { element *= factor * twice; });
  da.add(part);
  squares.each(da, [&](C& element, int i, int j) { store_number(to, i, j, element); });
  const Matrix dfactors = matrix_of(n.dfactors, item, head);
  if (dfactors.at && threadIdx.x == 0) *(C*)dfactors.at = twice * along;
}

}  // namespace attnkit
