"""From a call to its plan: what depends on the shapes of a call alone."""

import platform

import numpy as np
import pytest

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


@pytest.mark.parametrize(("machine", "level"), [("aarch64", "aarch64"), ("", "unknown")])
def test_other_machines_have_a_level_without_flags(machine, level, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert build.levels() == {level: (1, ())}
