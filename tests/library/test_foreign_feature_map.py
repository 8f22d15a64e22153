"""A feature map of linear attention that only the op's table knows: computed by its name, or refused by it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
import torch

import attnkit
from attnkit._core import dispatch
from attnkit.backends.cupy import linear as of_cuda
from attnkit.backends.jax.triton import linear as of_jax
from attnkit.backends.native import abi
from attnkit.backends.torch.triton import linear_step
from attnkit.kernels import linear_calls
from attnkit.ops.linear.attention import FEATURE_MAPS

from .arrays import assert_agrees, normal

Q, K, V = normal((2, 7, 3), (2, 9, 3), (2, 9, 4), dtype="float32")
LIBRARIES: dict[str, Callable[..., Any]] = {"numpy": np.asarray, "torch": torch.tensor, "jax": jax.numpy.asarray}
NAME = "square"


@pytest.fixture(autouse=True)
def _planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_choices", {})
    monkeypatch.setitem(FEATURE_MAPS, NAME, (lambda xp, x: x * x, lambda xp, x, d: 2.0 * x * d))


@pytest.mark.parametrize("library", LIBRARIES)
def test_it_is_computed_or_refused_by_name(library: str) -> None:
    q, k, v = map(LIBRARIES[library], (Q, K, V))
    w = np.einsum("bif,bjf->bij", Q.astype(np.float64) ** 2, K.astype(np.float64) ** 2)
    exact = w @ V / (w.sum(-1, keepdims=True) + 1e-6)
    results = []
    for impl in ("auto", "generic"):
        assert_agrees(attnkit.linear_attention(q, k, v, feature_map=NAME, impl=impl), exact)
        results.append(attnkit.linear_attention_vjp(q, k, v, q @ k[:, :3] @ v[:, :3], feature_map=NAME, impl=impl))
    for name in "qkv":
        assert np.array_equal(np.asarray(results[0][name]), np.asarray(results[1][name]))
    with pytest.raises(NotImplementedError, match=f"native: no kernel of native has the feature map '{NAME}'"):
        attnkit.linear_attention(q, k, v, feature_map=NAME, impl="native")


def test_kernels_of_cuda_are_asked_by_name() -> None:
    assert of_cuda.unsupported_options(Q, K, V, feature_map=NAME) == f"no kernel of cuda has the feature map '{NAME}'"
    assert of_cuda.unsupported_options(Q, K, V) is None
    assert {*of_cuda.FEATURE_MAPS} == {*abi.FEATURE_MAPS} == {*FEATURE_MAPS} - {NAME}


def test_kernels_of_triton_are_asked_by_name() -> None:
    pytest.importorskip("triton", minversion="3.6", reason="no Triton that the kernels take")
    from attnkit.kernels.triton import features

    arrays, tensors = [jax.numpy.asarray(x) for x in (Q, K, V)], [torch.tensor(x) for x in (Q, K, V)]
    token = [x[:, 0] for x in tensors]
    for unsupported in (
        partial(linear_calls.unsupported_options, *tensors),
        partial(linear_step.unsupported_options, *token),
        partial(of_jax.unsupported_options, *arrays),
    ):
        assert unsupported(feature_map=NAME) == f"no kernel of triton has the feature map '{NAME}'"
        assert unsupported() is None
    assert {*features.FEATURE_MAPS} == {*features.HALF_FEATURE_MAPS} == {*FEATURE_MAPS} - {NAME}
