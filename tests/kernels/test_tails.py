"""The non-linearities far from 0 in the kernels for GPUs: CUDA executed on the CPU, Triton in its interpreter."""

import numpy as np
import pytest

from attnkit.backends.cupy import launch
from attnkit_conformance.adapters.cuda_cpu import CudaOnCpu, build
from tests.library import tails

from .interpreted import interpreted
from .selection import later


@pytest.mark.emulated
def test_triton() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from attnkit.kernels.triton.activations import ACTIVATIONS

    assert interpreted("tests.kernels.tails_in_interpreter").split() == [*ACTIVATIONS]


@pytest.mark.skipif(build.missing_compiler() is not None, reason=str(build.missing_compiler()))
@pytest.mark.parametrize("dtype", ["float32", later("float64")])
@pytest.mark.parametrize("activation", launch.ACTIVATIONS)
def test_cuda(activation: str, dtype: str, kernels: CudaOnCpu) -> None:
    """q = 0, scores from the bias alone and v = 1: the output is h and the gradient of the bias its slope."""
    s = tails.GRID.astype(dtype)[:, None]
    one = np.ones((1, 1), dtype)
    arrays = {"q": np.zeros_like(s), "k": one, "v": one, "bias": s}
    options = {"activation": activation, "alpha": 0.0}
    tails.assert_tails(activation, False, kernels.call("pointwise_attention", arrays, options)["o"][:, 0])
    grads = kernels.vjp("pointwise_attention", arrays, options, {"o": np.ones_like(s)})
    tails.assert_tails(activation, True, grads["bias"][:, 0])
