"""The CUDA kernels of row statistics: judged on the CPU, planted bugs found, compiled."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnkit import row_statistics
from attnkit.backends.cupy import statistics
from attnkit_conformance import core
from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.adapters.cuda_cpu import CudaOnCpu
from attnkit_conformance.model.case import Case, numpy_dtype
from tests.library.arrays import assert_agrees

from .emulated import assert_found, draw
from .selection import first_now, later

JUDGED = (
    ("row_statistics", "float32", "cross.sigmoid_attention"),
    ("row_statistics", "float32", "1x257.pointwise_attention"),
    ("row_statistics", "float32", "mask-none-visible.reluformer_attention"),
    ("row_statistics", "float32", "kinks.pointwise_attention"),
    ("attention_with_statistics", "float32", "causal-padded.pointwise_attention"),
    ("attention_with_statistics", "float32", "causal-padded.gaussian_attention"),
    ("attention_with_statistics", "float32", "causal-padded.softmax_attention"),
    ("attention_with_statistics", "float32", "causal-padded.entmax_attention.alpha=1.25"),
    ("attention_with_statistics", "float32", "dropout.pointwise_attention"),
    ("attention_with_statistics", "bfloat16", "gqa-mask.reluformer_attention"),
    ("attention_with_statistics", "bfloat16", "100x257.sigmoid_attention"),
    ("attention_with_statistics", "bfloat16", "dropout-mask.pointwise_attention"),
    ("attention_with_statistics", "float32", "bias-inf.gaussian_attention"),
    ("attention_with_statistics", "bfloat16", "100x257.gaussian_attention"),
    ("attention_with_statistics", "float64", "gqa-mask.gaussian_attention"),
    ("row_statistics", "float32", "empty-keys.softmax_attention"),
    ("row_statistics", "float32", "mask-none-visible.softmax_attention"),
    ("attention_with_statistics", "float32", "dropout.softmax_attention"),
    ("attention_with_statistics", "float32", "bias-inf.softmax_attention"),
    ("attention_with_statistics", "bfloat16", "100x257.softmax_attention"),
    ("attention_with_statistics", "float64", "gqa-mask.softmax_attention"),
    ("row_statistics", "float32", "kinks.entmax_attention.alpha=1.25"),
    ("row_statistics", "float32", "kinks.entmax_attention.alpha=1.0"),
    ("row_statistics", "float32", "1x257.entmax_attention.alpha=2.0"),
    ("row_statistics", "float32", "mask-none-visible.sparsemax_attention"),
    ("attention_with_statistics", "float32", "dropout.sparsemax_attention"),
    ("attention_with_statistics", "float32", "bias-inf.entmax_attention.alpha=2.0"),
    ("attention_with_statistics", "bfloat16", "cross.entmax_attention"),
    ("attention_with_statistics", "bfloat16", "100x257.sparsemax_attention"),
    ("attention_with_statistics", "float64", "gqa-mask.entmax_attention.alpha=1.25"),
)
"""Op, dtype and the beginning of a sample's name: the full profile by hand has all of them, in all dtypes."""


def case_of(op: str, dtype: str, name: str) -> Case:
    """The first sample of that name; others are not drawn."""
    samples = core.samples(op, "scenes", (dtype,))
    return core.draw_case(next(sample for sample in samples if sample.id.split("/")[2].startswith(name)))


@pytest.mark.parametrize(("op", "dtype", "name"), [*JUDGED[:8], *(later(*case) for case in JUDGED[8:])])
def test_conforms(op: str, dtype: str, name: str, kernels: CudaOnCpu) -> None:
    result = core.check(kernels, case_of(op, dtype, name))
    assert result.status == "pass", f"{result.id}\n{result.message}"


def test_other_ops_and_gradients_are_refused(kernels: CudaOnCpu) -> None:
    x = np.zeros((2, 5, 8), np.float32)
    refused = statistics.unsupported_options(x, x, op="rela_attention")
    assert refused == "statistics of rela_attention are served by the generic implementation"
    refused = statistics.unsupported_options(x, x, op="entmax_attention", alpha=np.full((5, 1), 1.5))
    assert refused == "an array alpha is served by the generic implementation"
    with pytest.raises(Unsupported, match="has no gradients"):
        kernels.vjp("row_statistics", {"q": x, "k": x}, {"op": "pointwise_attention"}, {})


# ---------------------------------------------------------------------------------------------- planted bugs

PLANTED: dict[str, tuple[str, str, str, set[str]]] = {
    "lanes that keep maxima of their own": (
        "  higher.reduce([](C x, C y) { return greater(x, y); });\n", "", "cross.sigmoid_attention", {"bound"},
    ),
    "a sum over the keys of one lane": ("    total.sum();\n", "", "cross.sigmoid_attention", {"bound"}),
    "an entropy whose maximum rises alone": (
        "spread[r] -= total[r] * logarithm_or_zero(largest[r] / higher[r]);", ";", "1x257.sigmoid_attention", {"bound"},
    ),
    "visible pairs that count weights": (
        "visible.of_score(n) += 1;", "visible.of_score(n) += s[n] != 0;", "kinks.pointwise_attention", {"bound"},
    ),
    "no barrier before rows are stored": (
        "  __syncthreads();  // `queries`, where the sweep was empty\n", "", "causal-padded.pointwise_attention",
        {"exception"},
    ),
    "weights with the gain of dropout": (
        "C(a.weight_gain) * queries", "C(a.gain) * queries", "dropout.pointwise_attention", {"bound"},
    ),
    "products in the place of distances": (
        "Tiles::compare(s, ", "Tiles::multiply(s, ", "causal-padded.gaussian_attention", {"bound"},
    ),
    "a visible key that counts by its weight": (
        "a.exact ? alive[r]", "true ? alive[r]", "bias-inf.gaussian_attention", {"bound"},
    ),
    "weights that are not divided by their sum": (
        " * numbers[OwnRows<Tiles>::of_score(n)].inverse", "", "causal-padded.softmax_attention", {"bound"},
    ),
    "the numbers of another row": (
        "block.i0 + row, false", "block.i0 + row + 1, false", "causal-padded.softmax_attention", {"bound"},
    ),
    "weights of 0 that count": (
        "a.exact ? alive[r]", "false ? alive[r]", "kinks.entmax_attention.alpha=1.25", {"bound"},
    ),
    "the threshold of softmax": (
        "numbers_of<C>(a, at.item, at.head, block.i0 + row, false);",
        "numbers_of<C>(a, at.item, at.head, block.i0 + row, false), numbers[r].tau = 0;", "cross.sparsemax_attention",
        {"bound"},
    ),
    "weights that sum to 1 with the gain of dropout": (
        "C(a.weight_gain) * numbers", "C(a.gain) * numbers", "dropout.softmax_attention", {"bound"},
    ),
    "invisible pairs with a weight": (
        "s[n] = seen ? ", "s[n] = true ? ", "causal-padded.softmax_attention", {"bound", "nonfinite"},
    ),
}  # fmt: skip
"""By name: text of statistics.cuh and what takes its place, the beginning of a sample's name, checks that may fail."""


@pytest.mark.parametrize("name", first_now(PLANTED))
@pytest.mark.emulated
def test_a_planted_bug_is_found(name: str) -> None:
    before, after, scene, checks = PLANTED[name]
    wrong = CudaOnCpu("planted", {"statistics.cuh": (before, after)})
    assert_found(wrong, case_of("attention_with_statistics", "float32", scene), checks)


# ---------------------------------------------------------------------------------------------- the kernel


@pytest.mark.parametrize(
    "op", ["pointwise_attention", "softmax_attention", later("gaussian_attention"), later("sparsemax_attention")]
)
def test_the_output_is_that_of_the_op(op: str, kernels: CudaOnCpu) -> None:
    """The same bits as without statistics."""
    q, k, v = (draw(n, 3, 70, 16, dtype="float16") for n in range(3))
    arrays = {"q": q, "k": k, "v": v}
    both = kernels.call("attention_with_statistics", arrays, {"op": op, "causal": True})
    assert np.array_equal(both["o"], kernels.call(op, arrays, {"causal": True})["o"])


def test_only_the_fields_that_are_asked_for(kernels: CudaOnCpu) -> None:
    q, k = (draw(n, 70, 16) for n in range(2))
    found = kernels.call("row_statistics", {"q": q, "k": k}, {"op": "pointwise_attention", "fields": ("maximum",)})
    assert {*found} == {"maximum"}
    exact = row_statistics("pointwise_attention", q.astype(np.float64), k.astype(np.float64)).maximum
    assert_agrees(found["maximum"], exact)


@pytest.mark.parametrize("op", ["softmax_attention", "gaussian_attention"])
def test_the_entropy_of_weights_that_almost_underflow(op: str, kernels: CudaOnCpu) -> None:
    """The largest divided by them is no number any more, in its own tile of keys and in one before."""
    q, k, bias = np.zeros((1, 8), np.float32), np.zeros((70, 8), np.float32), np.full((1, 70), -95, np.float32)
    bias[0, -2:] = 0, -1
    found = kernels.call("row_statistics", {"q": q, "k": k, "bias": bias}, {"op": op, "fields": ("entropy",)})
    exact = row_statistics(op, q.astype(np.float64), k.astype(np.float64), bias=bias.astype(np.float64)).entropy
    assert_agrees(found["entropy"], exact)


def test_weights_have_the_last_step_of_their_threshold(kernels: CudaOnCpu) -> None:
    """Without it, which is too small for the digits of the threshold, the total is off by 3 units of rounding."""
    q, k = np.linspace(0.01, 60, 9, dtype=np.float32)[:, None], draw(1, 300, 1)
    params = {"op": "sparsemax_attention", "scale": 1.0, "fields": ("total",)}
    total = kernels.call("row_statistics", {"q": q, "k": k}, params)["total"]
    assert np.max(np.abs(total - 1)) <= np.finfo(np.float32).eps


OPTIONS: dict[str, dict[str, Any]] = {
    "sigmoid_attention": {"activation": "sigmoid"},
    "sparsemax_attention": {"alpha": 2.0},
    "entmax_attention": {"alpha": 1.25},
}
LAUNCHED = {
    "sigmoid_attention": ["pointwise_rows", "statistics_forward"],
    "gaussian_attention": ["statistics_forward"],
    "softmax_attention": ["rows_softmax", "statistics_of_rows"],
    "sparsemax_attention": ["rows_threshold", "statistics_of_rows"],
    "entmax_attention": ["rows_threshold", "statistics_of_rows"],
}


@pytest.mark.parametrize(
    ("op", "dtype", "d", "capability"),
    [
        later("sigmoid_attention", "float16", 64, 80),
        ("sigmoid_attention", "bfloat16", 128, 90),
        later("sigmoid_attention", "float32", 64, 80),
        later("gaussian_attention", "float16", 64, 90),
        later("gaussian_attention", "float32", 256, 80),
        later("softmax_attention", "float16", 64, 80),
        later("softmax_attention", "bfloat16", 128, 90),
        later("softmax_attention", "float64", 128, 80),
        ("entmax_attention", "float16", 128, 80),
        later("sparsemax_attention", "bfloat16", 64, 90),
        later("sparsemax_attention", "float32", 256, 80),
    ],
)
@pytest.mark.parametrize("pairs", [later(False), True], ids=["plain", "pairs"])
def test_no_spills_and_enough_memory(op: str, dtype: str, d: int, capability: int, pairs: bool, tmp_path: Path) -> None:
    from .test_cuda_compile import MEMORY, Noting, compiled

    device, x = Noting(), np.zeros((1, 2, 128, d), numpy_dtype(dtype))
    options = {"mask": np.ones((128, 128), bool), "dropout": (0.1, 5)} if pairs else {}
    statistics.forward(device, x, x, x, op=op, causal=True, **options, **OPTIONS.get(op, {}))
    wanted = {launch.name: launch for launch in device.launches}
    for name, kernel in compiled(wanted, capability, tmp_path).items():
        assert kernel.stack == 0, f"{name} spills {kernel.stack} bytes"
        assert kernel.shared <= MEMORY[capability]
    assert [launch.kernel for launch in device.launches] == LAUNCHED[op]
