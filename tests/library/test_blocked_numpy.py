"""Blocks of NumPy arrays: what the conformance kit does not ask of them."""

import inspect
from typing import Any

import numpy as np
import pytest

import attnkit
from attnkit._core import blocks
from attnkit.backends.numpy import blocked
from attnkit_conformance.judge import judge
from attnkit_conformance.judge.selection import find

from .arrays import normal, traced_memory


def both(op: str, impl: str, do: np.ndarray, *arrays: np.ndarray, **options: Any) -> list[np.ndarray]:
    """The output and its gradients, by name."""
    o = getattr(attnkit, op)(*arrays, impl=impl, **options)
    return [o, *by_name(getattr(attnkit, f"{op}_vjp")(*arrays, do=do, impl=impl, **options))]


def by_name(gradients: dict[str, np.ndarray]) -> list[np.ndarray]:
    return [gradients[name] for name in sorted(gradients)]


def test_the_kit_finds_a_planted_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters, every = find(["numpy-blocked"]), blocks.blocks

    def verdicts() -> set[str]:
        ops = ("gaussian_attention",)
        return {result.status for result in judge(adapters, "small", "causal-padded", ("float32",), ops=ops)}

    assert verdicts() == {"pass"}
    monkeypatch.setattr(blocks, "blocks", lambda c: (block._replace(keys=block.keys - 1) for block in every(c)))
    assert "fail" in verdicts()


def test_auto_takes_blocks_where_there_are_many_scores() -> None:
    few, many = (np.zeros((1, 2, length, 8), np.float32) for length in (20, 1500))
    for op in (attnkit.pointwise_attention, attnkit.sigmoid_attention):
        assert [name for name in attnkit.explain(op, few, few, few) if name != "native"] == ["generic", "blocked"]
        told = attnkit.explain(op, many, many, many)
        assert [name for name in told if name != "native"] == ["blocked", "generic"]


@pytest.mark.parametrize("op", blocked.OPS)
def test_memory_is_that_of_a_block(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The array of all scores would have 64 MiB."""
    monkeypatch.setattr(blocks.Call, "size", 1 << 17)
    q, k, v = normal((1, 1, 2048, 8), (1, 1, 2048, 8), (1, 1, 2048, 8), dtype="float32")
    with traced_memory() as memory:
        every = {"causal": True, "log_forget": -np.abs(k[..., 0])}
        options = {name: x for name, x in every.items() if name in inspect.signature(getattr(attnkit, op)).parameters}
        both(op, "blocked", v, q, k, v, **options)
    assert memory.peak < 2048 * 2048 * 4 * 0.6
