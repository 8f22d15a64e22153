"""Views by strides are the broadcast array with its outer axes joined."""

import math
from typing import Any

import numpy as np
import pytest

from attnkit.kernels.strides import as_items, row_major


def view(x: np.ndarray, strides: tuple[int, ...], leading: tuple[int, ...], *rest: int) -> np.ndarray:
    heads = leading[-1] if leading else 1
    shape = (math.prod(leading[:-1]), heads, *rest)
    return np.lib.stride_tricks.as_strided(x, shape, strides)


@pytest.mark.parametrize(
    ("shape", "axes", "leading"),
    [
        ((4, 8), (0, 1), ()),
        ((3, 4, 8), (0, 1, 2), (3,)),
        ((2, 3, 4, 8), (0, 2, 1, 3), (2, 3)),
        ((1, 3, 4, 8), (0, 1, 3, 2), (5, 3)),
        ((3, 4, 8), (0, 1, 2), (2, 5, 3)),
        ((2, 5, 1, 4, 8), (0, 1, 2, 3, 4), (2, 5, 3)),
        ((4, 8), (1, 0), (2, 5, 3)),
        ((4, 1), (0, 1), (2, 3)),
    ],
)
def test_the_view_is_the_broadcast_array(shape: Any, axes: Any, leading: Any) -> None:
    inside = np.random.default_rng(0).standard_normal([shape[n] for n in axes])
    x = inside.transpose(np.argsort(axes))
    strides = as_items(x.shape, x.strides, leading, 4, 8)
    assert strides is not None
    expected = np.broadcast_to(x, (*leading, 4, 8)).reshape(-1, leading[-1] if leading else 1, 4, 8)
    assert np.array_equal(view(x, strides, leading, 4, 8), expected)


def test_axes_that_cannot_be_joined_say_so() -> None:
    x = np.zeros((2, 1, 3, 4, 8))
    assert as_items(x.shape, x.strides, (2, 5, 3), 4, 8) is None
    swapped = np.zeros((5, 2, 3, 4, 8)).transpose(1, 0, 2, 3, 4)
    assert as_items(swapped.shape, swapped.strides, (2, 5, 3), 4, 8) is None


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3, 4), (2, 0, 3)])
def test_row_major_strides_are_numpys(shape: Any) -> None:
    x = np.zeros(shape)
    if x.size:
        assert row_major(shape) == [n // x.itemsize for n in x.strides]
    assert len(row_major(shape)) == len(shape)
