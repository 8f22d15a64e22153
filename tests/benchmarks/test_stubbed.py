"""What a call costs until its launches are with the driver: no path to one asks for much more than the plain one."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

# What imports triton stands behind the skip.
from benchmarks import stubbed
from tests.shared import watched

MOST = 1.3  # times the calls of functions of the plain path
MISSED = {"relu, packed": 1.4, "linear, states": 1.4}
"""Paths over the aim: packed sequences are bounded in each launch, of which gradients of whole heads have fewer; states
are four launches where there are two."""


def count(call: Callable[[], Any]) -> int:
    """How many functions a call calls, those in C included: steadier than seconds."""
    calls = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with watched(note):
        call()
    return calls


@pytest.fixture(scope="module")
def counts() -> dict[str, int]:
    """Of forward and gradients, by name."""
    names = [name for plain, paths in stubbed.PATHS.items() for name in (plain, *paths)]
    names += ["torch alone", "torch alone, compiled", *(f"{name}, compiled" for name in stubbed.COMPILED)]
    found = {}
    with stubbed.stubbed():
        table = stubbed.calls()
        for name in names:
            call = table[name + stubbed.GRADIENTS]
            for _ in range(4):  # compiled, met, recorded, and straight to the driver
                call()
            found[name] = count(call)
    return found


@pytest.mark.parametrize(("plain", "path"), [(plain, path) for plain, paths in stubbed.PATHS.items() for path in paths])
def test_a_path_costs_little_more_than_the_plain_one(plain: str, path: str, counts: dict[str, int]) -> None:
    assert counts[path] <= MISSED.get(path, MOST) * counts[plain], counts


@pytest.mark.parametrize("name", stubbed.COMPILED)
def test_a_compiled_call_adds_little_to_what_torch_does(name: str, counts: dict[str, int]) -> None:
    """Beside the graph and its custom ops, which are torch's own, there is the plain path."""
    own, plain = counts[f"{name}, compiled"] - counts["torch alone, compiled"], counts[name] - counts["torch alone"]
    assert own <= MOST * plain, counts
