"""Gaussian attention by the CUDA kernels of point-wise attention, executed on the CPU: what the kit does not ask."""

import numpy as np
import pytest

from attnkit import gaussian_attention, gaussian_attention_vjp
from attnkit_conformance.adapters.cuda_cpu import CudaOnCpu
from tests.library.arrays import assert_agrees

from .emulated import draw
from .selection import later

OP = "gaussian_attention"


# ---------------------------------------------------------------------------------------------- the kernels


@pytest.mark.parametrize(("dtype", "d"), [later("float16", 129), ("float32", 256), later("float64", 200)])
def test_wide_heads(dtype: str, d: int, kernels: CudaOnCpu) -> None:
    arrays = {name: draw(n, 1, 33, d, dtype=dtype) for n, name in enumerate("qkv")}
    do, scale = draw(4, 1, 33, d, dtype=dtype), 1 / d
    wide = [x.astype(np.float64) for x in (*arrays.values(), do)]
    found = kernels.call(OP, arrays, {"scale": scale})["o"]
    assert_agrees(found, gaussian_attention(*wide[:3], scale=scale))
    expected = gaussian_attention_vjp(*wide, scale=scale)
    for name, grad in kernels.vjp(OP, arrays, {"scale": scale}, {"o": do}).items():
        assert_agrees(grad, expected[name])


@pytest.mark.parametrize(("dtype", "offset"), [("float32", 1024.0), ("float16", 64.0)])
def test_a_common_offset_changes_no_bit(dtype: str, offset: float, kernels: CudaOnCpu) -> None:
    """Numbers that both can hold: multiples of the unit of the offset."""
    q, k = (np.round(draw(n, 1, 40, 8) * 16).astype(dtype) / np.asarray(16, dtype) for n in range(2))
    v, moved = draw(2, 1, 40, 8, dtype=dtype), np.asarray(offset, dtype)
    found = [kernels.call(OP, {"q": q + at, "k": k + at, "v": v}, {})["o"] for at in (0 * moved, moved)]
    assert np.array_equal(*found)
