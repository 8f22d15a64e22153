"""The CUDA kernels of row statistics, executed on the CPU: what the kit does not ask."""

import numpy as np
import pytest

from attnkit import row_statistics
from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.adapters.cuda_cpu import CudaOnCpu
from tests.library.arrays import assert_agrees

from .emulated import draw
from .selection import later


def test_gradients_are_refused(kernels: CudaOnCpu) -> None:
    x = np.zeros((2, 5, 8), np.float32)
    with pytest.raises(Unsupported, match="has no gradients"):
        kernels.vjp("row_statistics", {"q": x, "k": x}, {"op": "pointwise_attention"}, {})


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
