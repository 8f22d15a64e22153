"""A cache of keys that grows by a token meets a new signature in every call: what one costs, counted."""

import cProfile
import pstats
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import attnkit
from attnkit._core import check
from attnkit.backends.native import lower
from attnkit.backends.numpy.native import _operands
from attnkit.ops.entmax import ENTMAX
from attnkit.ops.linear.attention import LINEAR
from attnkit.ops.pointwise import POINTWISE
from attnkit.ops.softmax import SOFTMAX

pytestmark = pytest.mark.usefixtures("library")
OPS = (attnkit.softmax_attention, attnkit.reluformer_attention, attnkit.linear_attention)


@pytest.mark.parametrize("make", [np.ones, torch.ones], ids=["numpy", "torch"])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_a_token_more_is_one_check_and_one_plan(op: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"check": 0, "prepare": 0}

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return function(*arguments, **options)

        return call

    def decode(keys: int) -> None:
        op(make((1, 2, 1, 8)), make((1, 2, keys, 8)), make((1, 2, keys, 8)), impl="native")

    decode(20)
    monkeypatch.setattr(check, "call", counted("check", check.call))
    monkeypatch.setattr(lower, "prepare", counted("prepare", lower.prepare))
    for keys in range(21, 25):
        decode(keys)
    assert counts["check"] == counts["prepare"] == 4


MOST = {
    "softmax_attention": {"numpy": 310, "torch": 355},
    "pointwise_attention": {"numpy": 310, "torch": 425},
    "reluformer_attention": {"numpy": 400, "torch": 510},
    "linear_attention": {"numpy": 340, "torch": 440},
}
"""Function calls, a fifth more than there are: a bound on time that other programs on the machine do not move."""


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("op", MOST)
def test_a_token_more_takes_few_function_calls(op: str, library: str) -> None:
    make = {"numpy": np.ones, "torch": torch.ones}[library]
    arrays = [(make((1, 2, 1, 8)), *(make((1, 2, 600, 8))[:, :, :keys] for _ in "kv")) for keys in range(500, 520)]
    getattr(attnkit, op)(*arrays.pop())
    profile = cProfile.Profile()
    with profile:
        for q, k, v in arrays:
            getattr(attnkit, op)(q, k, v)
    assert pstats.Stats(profile).prim_calls / len(arrays) <= MOST[op][library]


# ---------------------------------------------------------------------------------------------- plans


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": "upper_left"},
    {"window": (3, 1)},
    {"window": (None, 2), "causal": True},
    {"key_lengths": 2},
)
HEADS = (((), ()), ((2, 3), (2, 3)), ((2, 3), (1, 1)), ((2, 4), (2, 2)), ((2, 4), (2, 1)), ((0, 3), (0, 3)))


def tokens(leading: tuple[int, ...], count: int, features: int) -> np.ndarray:
    return np.zeros((*leading, count, features), np.float32)


def layouts(leading: tuple[int, ...], keys: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """k and v: whole, in the room for more, transposed, expanded."""
    yield tokens(leading, keys, 8), tokens(leading, keys, 5)
    yield tokens(leading, 16, 8)[..., :keys, :], tokens(leading, 16, 5)[..., :keys, :]
    yield np.swapaxes(tokens(leading, 8, keys), -1, -2), tokens(leading, keys, 5)
    yield np.broadcast_to(tokens((), keys, 8), (*leading, keys, 8)), tokens(leading, keys, 5)


def calls(keys: int) -> Iterator[tuple[Any, ...]]:
    """Arguments of `lower.prepare`, forward and backward; every layout with half of what is beside keys."""
    for leading, shared in HEADS:
        q, do = tokens(leading, 2, 8), tokens(leading, 2, 5)
        pairs = np.zeros((*leading, 2, keys), np.float32)
        beside: tuple[dict[str, np.ndarray], ...] = (
            {},
            {"mask": pairs[..., :1, :] == 0},
            {"mask": np.zeros((*leading, 1, 16), bool)[..., :keys]},
            {"bias": pairs},
            {"bias": pairs[..., :1]},
            {"key_lengths": np.zeros(leading, np.int64), "query_mask": pairs[..., 0] == 0} if keys else {},
        )
        for place, (k, v) in enumerate(layouts(shared, keys)):
            for more in beside[place % 2 :: 2]:
                for options in OPTIONS:
                    plain = tuple((options | {"enable_gqa": shared[-1:] in ((1,), (2,))}).items())
                    operands = {"q": q, "k": k, "v": v} | more
                    for op in (SOFTMAX, POINTWISE, ENTMAX, LINEAR):
                        yield op.name, False, _operands(operands), plain, ("o",)
                    names = ("dq", "dk", "dv", *(("dbias",) if "bias" in more else ()))
                    yield SOFTMAX.name, True, _operands(operands | {"do": do}), plain, names
    packed = {"q": tokens((4,), 4, 8), "k": tokens((keys,), 2, 8), "v": tokens((keys,), 2, 5)}
    packed |= {name: np.zeros(3, np.int64) for name in lower.EDGES}
    for options in OPTIONS[:-1]:
        yield SOFTMAX.name, False, _operands(packed), tuple((options | {"enable_gqa": True}).items()), ("o", "lse")


def test_a_plan_does_not_depend_on_the_number_of_keys_of_another() -> None:
    """Byte for byte: what is made from scratch, and what follows calls with other numbers of keys."""
    alone = {keys: [(call, fresh(call)) for call in calls(keys)] for keys in (0, 1, 2, 5)}
    for others in ((7, 1), (0, 9)):
        lower._common.cache_clear()
        for count in others:
            for call in calls(count):
                lower.prepare.__wrapped__(*call)
        made = lower._common.cache_info().misses
        for plans in alone.values():
            for call, plan in plans:
                after = lower.prepare.__wrapped__(*call)
                assert bytes(after.plan) == bytes(plan.plan), call
                assert after.extents == plan.extents
                assert after.outputs == plan.outputs
                assert after.reason == plan.reason
        assert lower._common.cache_info().misses == made, "what calls with other numbers of keys have made is used"


def fresh(call: tuple[Any, ...]) -> lower.PlacedPlan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lower, "_common", lower._common.__wrapped__)
        return lower.prepare.__wrapped__(*call)
