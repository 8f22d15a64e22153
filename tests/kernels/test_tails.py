"""The non-linearities far from 0 in the kernels for GPUs: CUDA executed on the CPU, Triton in its interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from attnkit.backends.cupy import launch
from attnkit_conformance.adapters.cuda_cpu import CudaOnCpu, build
from tests.library import tails

from .interpreted import MODE


def test_triton() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from attnkit.kernels.triton.activations import ACTIVATIONS

    command = [sys.executable, "-m", "tests.kernels.tails_in_interpreter"]
    done = subprocess.run(
        command, env={**os.environ, **MODE}, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [*ACTIVATIONS]


@pytest.mark.skipif(build.missing_compiler() is not None, reason=str(build.missing_compiler()))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
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
