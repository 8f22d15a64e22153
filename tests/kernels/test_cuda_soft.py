"""SOFT by the CUDA kernels of Gaussian attention and of the Newton inverse, executed on the CPU."""

from typing import Any

import numpy as np
import pytest

from attnkit import soft_attention, soft_attention_vjp
from attnkit.backends.cupy import soft
from attnkit.kernels import predicted
from attnkit_conformance.adapters.cuda_cpu import CudaOnCpu
from tests.library.arrays import assert_agrees, close

from .emulated import draw

OP = "soft_attention"


def agree(kernels: CudaOnCpu, inverse_grad: str) -> None:
    """Landmarks that all items share, and an init_scale for each of them: X has more leading axes than A."""
    arrays = {"q": draw(0, 3, 2, 7, 6), "v": draw(1, 3, 1, 7, 4), "landmarks": draw(2, 5, 6)}
    do, scales = draw(3, 3, 2, 7, 4), np.asarray([[0.5], [0.7], [0.9]], np.float32)
    options: dict[str, Any] = {"init_scale": scales, "newton_steps": 3, "inverse_grad": inverse_grad, "ridge": 0.5}
    wide = {name: x.astype(np.float64) for name, x in arrays.items()}
    exact = {**options, "init_scale": scales.astype(np.float64)}
    assert_agrees(kernels.call(OP, arrays, options)["o"], soft_attention(**wide, **exact))
    expected = soft_attention_vjp(*wide.values(), do.astype(np.float64), **exact)
    grads = kernels.vjp(OP, arrays, options, {"o": do})
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():  # through three steps of Newton's iteration
        close(grad, expected[name])


@pytest.mark.parametrize("inverse_grad", ["implicit", "unrolled"])
def test_shared_landmarks(inverse_grad: str, kernels: CudaOnCpu) -> None:
    agree(kernels, inverse_grad)


@pytest.mark.emulated
def test_a_planted_bug_is_found(kernels: CudaOnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that share an X whose cotangents are not summed."""
    options: dict[str, Any] = {"newton_steps": 3, "ridge": 0.5}
    arrays, do = {"q": draw(0, 3, 7, 6), "v": draw(1, 3, 7, 4), "landmarks": draw(2, 5, 6)}, draw(3, 3, 7, 4)
    right = kernels.vjp(OP, arrays, options, {"o": do})
    monkeypatch.setattr(soft, "sum_to", lambda xp, x, shape: x[0])
    wrong = kernels.vjp(OP, arrays, options, {"o": do})
    assert_agrees(wrong["v"], right["v"])
    with pytest.raises(AssertionError):
        assert_agrees(wrong["landmarks"], right["landmarks"])


def test_what_is_taken() -> None:
    tokens, landmarks = np.empty((predicted.KEPT // 4 // 64, 1), np.float32), np.empty((64, 1), np.float32)
    assert not soft.keeps(tokens, tokens, landmarks)
    assert soft.keeps(tokens, tokens, np.empty((65, 1), np.float32))
