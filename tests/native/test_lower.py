"""From a call to its plan: what depends on the shapes of a call alone."""

import platform

import numpy as np
import pytest

import attnkit
from attnkit.backends.native import build, lower
from attnkit.ops.softmax import SOFTMAX

pytestmark = pytest.mark.usefixtures("library")


@pytest.mark.parametrize(
    ("leading", "groups", "mapped", "heads", "items"),
    [
        ((3,), 1, 0, [1], [0]),
        ((2, 3), 1, 0, [0, 1], [1, 0]),
        ((5, 2, 3), 1, 0, [0, 0, 1], [2, 1, 0]),
        ((5, 2, 6), 2, 0, [0, 0, 2, 1], [2, 1, 0, 0]),
        ((5, 2, 3), 1, 1, [0, 0, 1], [0, 1, 0]),
        ((3,), 1, 1, [0], [0]),
        ((), 1, 0, [], []),
    ],
)
def test_the_counter_of_dropout_counts_heads_and_items_but_no_mapped_axis(leading, groups, mapped, heads, items):
    assert lower.Axes(leading, groups).counters(mapped) == (heads, items)


def test_a_call_that_the_library_refuses_is_not_run():
    shape = (2,) * 7 + (3, 4)
    operands = tuple((name, shape, lower.contiguous(shape), "float32") for name in "qkv")
    refused = lower.prepare(SOFTMAX.name, False, operands, (), ("o",))
    pointers = [np.zeros(shape, np.float32).ctypes.data] * 4
    with pytest.raises(NotImplementedError, match="impl='native' cannot serve this call: more than 6 leading axes"):
        lower.run(refused, pointers, 1)


@pytest.mark.parametrize(
    ("leading", "shared", "gqa", "fits"),
    [
        ((2,) * 6, (2,) * 6, False, True),
        ((2,) * 7, (2,) * 7, False, False),
        ((2,) * 7, (), False, False),
        ((1, *(2,) * 6), (), False, True),
        ((2,) * 4 + (4,), (2,) * 5, True, True),
        ((2,) * 5 + (4,), (2,) * 6, True, False),
        ((2,) * 5 + (4,), (2,) * 5 + (1,), True, True),
        ((2,) * 6, (2,) * 6, True, True),
    ],
)
def test_axes_of_size_1_are_not_counted_and_groups_of_heads_are(leading, shared, gqa, fits):
    """A key head for several query heads makes an axis of its own; one for all, or for one, does not."""
    q, k = (np.broadcast_to(np.float32(0), (*axes, 3, 4)) for axes in (leading, shared))
    reason = None if fits else lower.TOO_MANY
    assert lower.refused_axes(q, k, k, enable_gqa=gqa) == reason
    assert attnkit.explain(attnkit.softmax_attention, q, k, k, enable_gqa=gqa)["native"] == reason


@pytest.mark.parametrize(("machine", "level"), [("aarch64", "aarch64"), ("", "unknown")])
def test_other_machines_have_a_level_without_flags(machine, level, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert build.levels() == {level: (1, ())}
