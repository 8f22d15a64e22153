"""The non-linearities of point-wise attention far from 0 and at kinks, in every library, by every derivative."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import array_api_strict
import jax
import numpy as np
import pytest
import torch

from attnkit._core.activations import ACTIVATIONS, NAMES
from attnkit._core.dispatch import namespace
from attnkit._core.special import relu

from . import tails, torch_tails
from .torch_tails import DTYPES

ROOT = Path(__file__).parents[2]
ARRAYS = {"numpy": np.array, "torch": torch.tensor, "jax": jax.numpy.asarray, "strict": array_api_strict.asarray}


@pytest.fixture(autouse=True)
def _float64_in_jax() -> Any:
    with jax.enable_x64(True):
        yield


def grid(library: str, dtype: str) -> Any:
    return ARRAYS[library](tails.GRID.astype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("library", ["numpy", "jax", "strict"])
@pytest.mark.parametrize("name", NAMES)
def test_h_and_its_slope(name: str, library: str, dtype: str) -> None:
    s = grid(library, dtype)
    tails.assert_tails(name, False, ACTIVATIONS[name].h(namespace(s), s))
    tails.assert_tails(name, True, ACTIVATIONS[name].slope(namespace(s), s))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_automatic_derivatives_of_jax(name: str, dtype: str) -> None:
    s = grid("jax", dtype)

    def h(s: Any) -> Any:
        return ACTIVATIONS[name].h(namespace(s), s)

    slope = jax.grad(lambda s: h(s).sum())
    tails.assert_tails(name, True, jax.jit(slope)(s))
    tails.assert_tails(name, True, jax.jit(lambda s: jax.jvp(h, (s,), (jax.numpy.ones_like(s),))[1])(s))
    tails.assert_curvature(name, jax.jit(jax.grad(lambda s: slope(s).sum()))(s))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check", [torch_tails.values, torch_tails.by_reverse_mode, torch_tails.by_forward_mode])
@pytest.mark.parametrize("name", NAMES)
def test_torch(name: str, check: Any, dtype: str) -> None:
    check(name, dtype)


@pytest.mark.emulated
@pytest.mark.parametrize("capability", ["DEFAULT", "AVX2"])
def test_torch_by_fewer_instructions(capability: str) -> None:
    """All of the above, by what torch runs on other processors."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability.lower(), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.library.torch_tails"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in (capability, "DEFAULT", "NO AVX")  # a machine may have fewer; "NO AVX" in torch 2.6


# ---------------------------------------------------------------------------------------------- kinks (semantics A8)

KINKS = {name: [-0.0, *h.kinks] for name, h in ACTIVATIONS.items() if h.kinks}
SECOND = {"relu": (0.0, 0.0), "relu_squared": (0.0, 2.0), "relu6": (0.0, 0.0)}  # left and right of 0


FUNCTIONS: dict[str, tuple[Any, Any, Any]] = {
    "torch": (torch.func, torch, lambda function: function),
    "jax": (jax, jax.numpy, jax.jit),
}


@pytest.mark.parametrize("library", FUNCTIONS)
@pytest.mark.parametrize("name", [*KINKS, "relu of _special"])
def test_slopes_at_kinks_are_zero(name: str, library: str) -> None:
    name, _, bare = name.partition(" of ")
    func, xp, compiled = FUNCTIONS[library]

    def h(s: Any) -> Any:
        return (relu if bare else ACTIVATIONS[name].h)(namespace(s), s)

    s = ARRAYS[library](KINKS[name])
    slopes = (
        func.vjp(h, s)[1](xp.ones_like(s))[0],
        func.jvp(h, (s,), (xp.ones_like(s),))[1],
        func.vmap(func.grad(h))(s),
        ACTIVATIONS[name].slope(namespace(s), s),
    )
    assert not any(slope.any() for slope in slopes)
    second = compiled(func.hessian(lambda s: h(s).sum()))(ARRAYS[library]([-1.0, 1.0]))
    assert second.diagonal().tolist() == [*SECOND[name]]


@pytest.mark.parametrize("library", ARRAYS)
@pytest.mark.parametrize("name", NAMES)
def test_nan_stays_and_zeros_are_exact(name: str, library: str) -> None:
    s = ARRAYS[library](np.array([np.nan, 0.0, -0.0], np.float32))
    value = np.asarray(ACTIVATIONS[name].h(namespace(s), s))
    assert np.isnan(value[0])
    assert ACTIVATIONS[name].through_zero == (value[1] == 0.0) == (value[2] == 0.0)
