"""Bugs that are planted in the CUDA kernels, which are executed on the CPU: the kit finds each of them."""

import numpy as np
import pytest

from attnkit.backends.cupy import rows
from attnkit_conformance import core
from attnkit_conformance.adapters.cuda_cpu import CudaOnCpu
from attnkit_conformance.adapters.cuda_cpu.machine import KernelFault

from .emulated import Forward, assert_found, draw
from .selection import case_of

HALF, HALVES, FLOAT32 = ("float16", "bfloat16"), ("bfloat16", "float16"), ("float32",)
BARRIER = "    __syncthreads();\n"
SWEEP = "    wait_for_copies<STAGES - 1>();\n    __syncthreads();\n    use(x0, stage);\n    __syncthreads();\n"
SUM = "sum += a[row][w] * b[column][w];"
SUM_IN_HALF = "{ T x; from_float(x, sum + a[row][w] * b[column][w]); sum = to_float(x); }"
SQUARES = "x[n] -= difference * difference;"
EXPANDED = """{ const C a = own[row * TILE_PITCH + w], b = passing[column * TILE_PITCH + w];
        x[n] += 2 * a * b - a * a - b * b; }"""
LEFT_OUT = " - own[(y + r * HIGH) * TILE_PITCH + column];"
LOADED = "    __syncthreads();\n    Tiles::multiply(x"
KEEP = "    each(part, [&](C& element, int i, int j) { at[i * pitch() + j] = element; });\n    __syncthreads();\n"
BUGS: dict[str, dict[str, tuple[str, str, str, str, tuple[str, ...], str, set[str]]]] = {
    "pointwise": {
        "no barrier before a tile is used": (
            "pointwise.cuh", SWEEP, SWEEP.replace(BARRIER, "", 1), "pointwise_attention", HALF, "cross", {"exception"},
        ),
        "no barrier after a tile was used": (
            "pointwise.cuh", SWEEP, SWEEP[: -len(BARRIER)], "pointwise_attention", HALF, "positive-values",
            {"exception"},
        ),
        "no barrier before results are stored": (
            "pointwise.cuh", "  __syncthreads();  // `queries`, where the sweep was empty\n", "", "pointwise_attention",
            HALF, "causal-padded", {"exception"},
        ),
        "no wait for copies": (
            "pointwise.cuh", SWEEP, SWEEP.partition("\n")[2], "pointwise_attention", HALF, "257x100-causal",
            {"exception", "nonfinite"},
        ),
        "an unmasked last tile": (
            "pairs.cuh", "&& j0 + columns <= smaller(keys, i0 + a.right + 1)", "", "pointwise_attention", HALF,
            "257x100-causal", {"bound"},
        ),
        "sums in half precision": (
            "intrinsics_on_host.h", SUM, SUM_IN_HALF, "sigmoid_attention", HALF, "2x4096-tail", {"bound"},
        ),
        "padding that is not cleared": (
            "pointwise.cuh", "if (seen(row)) continue;", "continue;", "pointwise_attention", HALF, "mask",
            {"nonfinite"},
        ),
        "an upper bound of the window too many": (
            "pairs.cuh", "smaller(keys, i + a.right + 1)", "smaller(keys, i + a.right + 2)", "pointwise_attention",
            HALF, "63x63-causal", {"bound"},
        ),
        "dropout of the transposed pair": (
            "pairs.cuh", "philox_word(j, i, head", "philox_word(i, j, head", "pointwise_attention", HALF, "dropout",
            {"bound"},
        ),
        "a write behind a local array": (
            "tensor_tiles.cuh", "for (int n = 0; n < 4; n++) of_x[n]", "for (int n = 0; n <= 4; n++) of_x[n]",
            "pointwise_attention", HALF, "cross", {"exception"},
        ),
        "rows of float16 that are not rescaled": (
            "tensor_tiles.cuh", "if constexpr (same<T, half>) rescale(sums, x);", "", "pointwise_attention", HALF,
            "huge", {"bound", "nonfinite"},
        ),
    },
    "gaussian": {
        "squares that are expanded without a centre": (
            "distance_tiles.cuh", SQUARES, EXPANDED, "gaussian_attention", FLOAT32, "offset-mask", {"bound"},
        ),
        "a gradient of products": (
            "distance_tiles.cuh", LEFT_OUT, ";", "gaussian_attention", FLOAT32, "cross", {"bound"},
        ),
        "weights of 0 times padding": (
            "distance_tiles.cuh", "factor == 0 ? C(0) : factor * difference", "factor * difference",
            "gaussian_attention", FLOAT32, "offset-padded", {"nonfinite"},
        ),
        "half types that are read beyond a row": (
            "distance_tiles.cuh", "keep(row) && column < width", "keep(row)", "gaussian_attention", HALVES, "cross",
            {"exception", "bound"},
        ),
        "sums of half types that are stored as float32": (
            "pointwise.cuh", "kind_of<typename Tiles::Input>", "kind_of<typename Tiles::T>", "gaussian_attention",
            HALVES, "cross", {"exception"},
        ),
        "products in the gradient of the bias": (
            "pointwise_gradients.cuh", "Tiles::compare(s, shared.own(0), shared.passing(0, 0));",
            "Tiles::multiply(s, shared.own(0), shared.passing(0, 0));", "gaussian_attention", FLOAT32, "bias-per-key",
            {"bound"},
        ),
    },
    "linear": {
        "no barrier before pairs are multiplied": (
            "linear.cuh", LOADED, LOADED.partition("\n")[2], "linear_attention", FLOAT32, "strided-causal",
            {"exception"},
        ),
        "no barrier after pairs were multiplied": (
            "linear.cuh", "[](int) { return C(1); });\n    __syncthreads();\n", "[](int) { return C(1); });\n",
            "linear_attention", FLOAT32, "strided-causal", {"exception"},
        ),
        "no barrier before 1/den is used": (
            "linear_kernels.cuh", "inverse : C(0);\n  }\n  __syncthreads();\n", "inverse : C(0);\n  }\n",
            "linear_attention", FLOAT32, "cross", {"exception", "nonfinite"},
        ),
        "an unmasked last tile": (
            "linear.cuh", "j >= first && j < stop", "j >= first", "linear_attention", FLOAT32, "cross", {"exception"},
        ),
        "padding that is not masked": (
            "linear.cuh", "*(const long long*)stops.at < stop", "false", "linear_attention", FLOAT32, "causal-padded",
            {"bound", "nonfinite"},
        ),
        "pairs of the future": (
            "linear.cuh", "s0 + column > p0 + row", "s0 + column > p0 + row + 1", "linear_attention", FLOAT32,
            "63x63-causal", {"bound"},
        ),
        "a state that is not carried": (
            "linear_kernels.cuh", "total += own;", "total = own;", "linear_attention", FLOAT32, "1x257", {"bound"},
        ),
        "a state of queries that is carried the wrong way": (
            "linear_kernels.cuh", "QUERIES ? segments - 1 - step : step", "step", "linear_attention", FLOAT32,
            "strided-causal", {"bound"},
        ),
        "z left out": (
            "linear.cuh", "f0 + n < a.width ? state.vector[f0 + n] : C(0)", "C(0)", "linear_attention", FLOAT32,
            "1x257", {"bound"},
        ),
        "the denominator's gradient left out": (
            "linear_kernels.cuh", "-dot * inverse * inverse", "C(0)", "linear_attention", FLOAT32, "cross", {"bound"},
        ),
        "all heads of a group but the first left out": (
            "linear_kernels.cuh", "head < (at.head + 1) * l.groups; head++) {\n    add_tokens",
            "head < at.head * l.groups + 1; head++) {\n    add_tokens", "linear_attention", FLOAT32, "mqa-causal",
            {"bound"},
        ),
    },
    "newton": {
        "no barrier behind a matrix that is kept": (
            "newton.cuh", KEEP, KEEP.rpartition("    __")[0], "newton_inverse", FLOAT32, "random", {"nonfinite"},
        ),
        "no barrier before a matrix is replaced": (
            "newton.cuh", "    __syncthreads();\n" + KEEP, KEEP, "newton_inverse", FLOAT32, "random", {"exception"},
        ),
        "no barrier behind the sums of columns": (
            "newton.cuh", "  }\n  __syncthreads();\n}", "  }\n}", "newton_inverse", FLOAT32, "random", {"nonfinite"},
        ),
        "a step too few": (
            "newton.cuh", "step < n.steps; step++", "step < n.steps - 1; step++", "newton_inverse", FLOAT32,
            "init-scale", {"nonfinite"},
        ),
        "a last row left out": (
            "newton.cuh", "n < m; n++) {\n      C of_x", "n < m - 1; n++) {\n      C of_x", "newton_inverse", FLOAT32,
            "random", {"bound"},
        ),
        "row sums instead of columns'": (
            "newton.cuh", "size_of(a[i * squares.pitch() + j])", "size_of(a[j * squares.pitch() + i])",
            "newton_inverse", FLOAT32, "not-symmetric-unrolled", {"bound"},
        ),
        "a product not transposed": (
            "newton.cuh", "da.subtract(squares.template product<false, true>",
            "da.subtract(squares.template product<false, false>", "newton_inverse", FLOAT32, "not-symmetric-unrolled",
            {"bound"},
        ),
        "a constant norm": (
            "newton.cuh", "if (j == first) element", "if (j < 0) element", "newton_inverse", FLOAT32,
            "not-symmetric-unrolled", {"bound"},
        ),
    },
    "rows": {
        "a threshold that stops early": (
            "rows.cuh", "if (count >= a.steps) break;", "if (count >= 2) break;", "sparsemax_attention", ("float64",),
            "cross", {"bound"},
        ),
        "an unmasked last tile": (
            "pairs.cuh", "&& j0 + columns <= smaller(keys, i0 + a.right + 1)", "", "softmax_attention", ("bfloat16",),
            "cross", {"bound", "nonfinite"},
        ),
        "sums that are not shrunk": (
            "rows.cuh", "OwnRows<Tiles>::scale(sums, r, shrink);", "", "softmax_attention", ("bfloat16",), "cross",
            {"bound"},
        ),
        "lanes that do not join their maxima": (
            "rows.cuh", "higher.reduce([](C x, C y) { return greater(x, y); });", "", "softmax_attention",
            ("bfloat16",), "cross", {"bound", "nonfinite"},
        ),
        "a mean that is left out": (
            "rows_gradients.cuh", "u[n] *= dp[n] - delta.of_score(n);", "u[n] *= dp[n];", "softmax_attention", FLOAT32,
            "cross", {"bound"},
        ),
        "a cotangent of lse that is left out": (
            "rows_gradients.cuh", "if (a.dlse.at && ", "if (false && ", "softmax_attention", FLOAT32, "causal-padded",
            {"bound"},
        ),
        "dropout of invisible pairs": (
            "rows.cuh", "const bool seen = pairs.visible(queries[r], i0 + r, j0 + c);", "const bool seen = true;",
            "softmax_attention", FLOAT32, "dropout-mask", {"exception"},
        ),
    },
    "statistics": {
        "lanes that keep maxima of their own": (
            "statistics.cuh", "  higher.reduce([](C x, C y) { return greater(x, y); });\n", "",
            "attention_with_statistics", FLOAT32, "cross.sigmoid_attention", {"bound"},
        ),
        "a sum over the keys of one lane": (
            "statistics.cuh", "    total.sum();\n", "", "attention_with_statistics", FLOAT32, "cross.sigmoid_attention",
            {"bound"},
        ),
        "an entropy whose maximum rises alone": (
            "statistics.cuh", "spread[r] -= total[r] * logarithm_or_zero(largest[r] / higher[r]);", ";",
            "attention_with_statistics", FLOAT32, "1x257.sigmoid_attention", {"bound"},
        ),
        "visible pairs that count weights": (
            "statistics.cuh", "visible.of_score(n) += 1;", "visible.of_score(n) += s[n] != 0;",
            "attention_with_statistics", FLOAT32, "kinks.pointwise_attention", {"bound"},
        ),
        "no barrier before rows are stored": (
            "statistics.cuh", "  __syncthreads();  // `queries`, where the sweep was empty\n", "",
            "attention_with_statistics", FLOAT32, "causal-padded.pointwise_attention", {"exception"},
        ),
        "weights with the gain of dropout": (
            "statistics.cuh", "C(a.weight_gain) * queries", "C(a.gain) * queries", "attention_with_statistics", FLOAT32,
            "dropout.pointwise_attention", {"bound"},
        ),
        "products in the place of distances": (
            "statistics.cuh", "Tiles::compare(s, ", "Tiles::multiply(s, ", "attention_with_statistics", FLOAT32,
            "causal-padded.gaussian_attention", {"bound"},
        ),
        "a visible key that counts by its weight": (
            "statistics.cuh", "a.exact ? alive[r]", "true ? alive[r]", "attention_with_statistics", FLOAT32,
            "bias-inf.gaussian_attention", {"bound"},
        ),
        "weights that are not divided by their sum": (
            "statistics.cuh", " * numbers[OwnRows<Tiles>::of_score(n)].inverse", "", "attention_with_statistics",
            FLOAT32, "causal-padded.softmax_attention", {"bound"},
        ),
        "the numbers of another row": (
            "statistics.cuh", "block.i0 + row, false", "block.i0 + row + 1, false", "attention_with_statistics",
            FLOAT32, "causal-padded.softmax_attention", {"bound"},
        ),
        "weights of 0 that count": (
            "statistics.cuh", "a.exact ? alive[r]", "false ? alive[r]", "attention_with_statistics", FLOAT32,
            "kinks.entmax_attention.alpha=1.25", {"bound"},
        ),
        "the threshold of softmax": (
            "statistics.cuh", "numbers_of<C>(a, at.item, at.head, block.i0 + row, false);",
            "numbers_of<C>(a, at.item, at.head, block.i0 + row, false), numbers[r].tau = 0;",
            "attention_with_statistics", FLOAT32, "cross.sparsemax_attention", {"bound"},
        ),
        "weights that sum to 1 with the gain of dropout": (
            "statistics.cuh", "C(a.weight_gain) * numbers", "C(a.gain) * numbers", "attention_with_statistics", FLOAT32,
            "dropout.softmax_attention", {"bound"},
        ),
        "invisible pairs with a weight": (
            "statistics.cuh", "s[n] = seen ? ", "s[n] = true ? ", "attention_with_statistics", FLOAT32,
            "causal-padded.softmax_attention", {"bound", "nonfinite"},
        ),
    },
}  # fmt: skip
"""By family and name: file, text and what takes its place, op, dtypes and scene of a sample, checks that may fail."""


@pytest.mark.emulated
@pytest.mark.parametrize(("family", "name"), [(family, name) for family, bugs in BUGS.items() for name in bugs])
def test_a_planted_bug_is_found(family: str, name: str) -> None:
    file, before, after, op, dtypes, scene, checks = BUGS[family][name]
    kind = Forward if family == "pointwise" else CudaOnCpu
    wrong = kind("planted", {file: (before, after)})
    assert_found(wrong, case_of(wrong, op, dtypes, scene), checks)


IN_GRADIENTS: dict[str, tuple[str, str, str, set[str]]] = {
    "queries of padding that are loaded": (
        "return larger(query.lo, j0) < smaller(query.hi, j0 + ROWS);", "return i0 + c < a.queries;", "query-mask",
        {"nonfinite"},
    ),
    "all heads of a group but the first left out": (
        "head < (at.head + 1) * a.groups", "head < at.head * a.groups + 1", "gqa", {"bound"},
    ),
}  # fmt: skip


@pytest.mark.emulated
@pytest.mark.parametrize("name", IN_GRADIENTS)
def test_a_planted_bug_in_the_gradients_is_found(name: str) -> None:
    before, after, scene, checks = IN_GRADIENTS[name]
    wrong = CudaOnCpu("planted", {"pointwise_gradients.cuh": (before, after)})
    failed = core.check(wrong, case_of(wrong, "pointwise_attention", HALF, scene))
    assert failed.checks & checks, f"{failed.id}: {failed.message}"
    assert not any(text.startswith("o:") for _, text in failed.failures)


def test_a_missing_barrier_between_the_rows_of_warps_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other warps that need more steps than those of the first."""
    monkeypatch.setattr(rows, "RESIDENT", 0)
    reset = "  if (threadIdx.x == 0) *word = 0;\n  __syncthreads();\n"
    wrong = CudaOnCpu("planted", {"rows_of_tiles.cuh": (reset, reset.partition("\n")[0] + "\n")})
    assert_found(wrong, case_of(wrong, "sparsemax_attention", FLOAT32, "cross"), {"exception", "bound"})


@pytest.mark.emulated
def test_a_missing_barrier_between_the_heads_of_a_group_is_found() -> None:
    """It matters where heads have padding of their own: their factors of the same keys differ."""
    barrier = "  __syncthreads();  // what was there before is not needed any more\n"
    wrong = CudaOnCpu("planted", {"linear.cuh": (barrier, "")})
    q, k = draw(0, 1, 2, 9, 6), draw(1, 1, 1, 40, 6)
    arrays = {"q": q, "k": k, "v": k, "key_lengths": np.array([[40, 20]])}
    with pytest.raises(KernelFault, match="depends on the order of threads"):
        wrong.vjp("linear_attention", arrays, {"enable_gqa": True}, {"o": q})


def test_numbers_of_rows_that_are_not_moved_are_found() -> None:
    text = "for (View* x : of_queries) move(*x, edges_q[sequence]);"
    case = next(iter(core.cases("softmax_attention_packed", "small", ("float32",))))
    assert_found(CudaOnCpu("planted", {"rows.cuh": (text, "")}), case, {"bound", "nonfinite", "exception"})
