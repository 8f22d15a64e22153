"""Gradients of whole heads, which the kit draws few of. Run by test_triton_interpreted.py with TRITON_INTERPRET=1."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import attnkit
from attnkit.backends.torch.triton import launch, pointwise
from attnkit.kernels.triton import whole_head
from attnkit_conformance.adapters import triton_bfloat16

triton_bfloat16.install()
LENGTHS = torch.tensor([[70], [3]])


def inputs(queries: int, keys: int, groups: int = 1, d: int = 16, e: int = 8) -> list[torch.Tensor]:
    shapes = ((groups, queries, d), (1, keys, d), (1, keys, e), (groups, queries, e))
    draws = [torch.Generator().manual_seed(n) for n in range(4)]
    return [torch.randn(2, *shape, generator=draw).bfloat16() for shape, draw in zip(shapes, draws, strict=True)]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that were launched."""
    names: list[str] = []

    def noted(q: torch.Tensor, launches: Any) -> None:
        names.extend(made.kernel.fn.__name__ for made in launches)
        run(q, launches)

    run = launch.run
    monkeypatch.setattr(launch, "run", noted)
    return names


def errors(tensors: list[torch.Tensor], **options: Any) -> dict[str, float]:
    """How far gradients are from those in float64, relative to their norms."""
    q, k, v, do = tensors
    options |= {"enable_gqa": True}
    exact = attnkit.pointwise_attention_vjp(*(x.double() for x in tensors), impl="generic", **options)
    found = pointwise.pull(q, k, v, do, **options)
    return {name: float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact}


@pytest.mark.parametrize(
    ("queries", "keys", "groups", "options"),
    [
        (197, 197, 1, {"activation": "relu"}),
        (256, 65, 1, {"activation": "sigmoid", "shift": "-log_length"}),
        (33, 256, 2, {"activation": "gelu", "causal": True, "alpha": 0.5}),
        (100, 70, 3, {"activation": "silu", "window": (5, 3)}),
        (70, 100, 2, {"activation": "softplus", "causal": "upper_left", "window": (40, None)}),
        (40, 130, 2, {"activation": "gelu_tanh", "key_lengths": LENGTHS}),
        (40, 130, 1, {"activation": "sigmoid", "key_lengths": 65}),
    ],
)
def test_gradients_of_heads_in_several_blocks(
    queries: int, keys: int, groups: int, options: dict[str, Any], launched: list[str]
) -> None:
    found = errors(inputs(queries, keys, groups), **options)
    assert launched[-1] == "backward_whole"
    assert all(error < 2.0**-8 for error in found.values()), found


@triton.jit
def skipping_the_first(shared, member, groups):
    return shared * groups + tl.maximum(member, 1)


def test_a_member_of_a_group_that_is_skipped_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_head, "member_of", skipping_the_first)
    assert errors(inputs(40, 70, 2))["k"] > 2.0**-8


def test_reruns_and_other_items_give_the_same_bits() -> None:
    tensors = inputs(70, 100, 2)
    options = {"activation": "sigmoid", "causal": True, "enable_gqa": True}
    first, again = (pointwise.pull(*tensors, **options) for _ in range(2))
    alone = pointwise.pull(*(x[1:] for x in tensors), **options)
    for name, x in first.items():
        assert torch.equal(x, again[name])
        assert torch.equal(x[1:], alone[name])


def test_what_nobody_sees_may_be_nan() -> None:
    """Keys after the lengths or the last window, and queries before the first key."""
    for options in ({"key_lengths": LENGTHS}, {"window": (0, 0), "causal": "upper_left"}):
        q, k, v, do = inputs(40, 100)
        clean = pointwise.pull(q, k, v, do, **options)
        seen = torch.arange(100)[:, None] < LENGTHS[..., None] if "key_lengths" in options else torch.arange(100) < 40
        hidden = ~seen.reshape(-1, 1, 100, 1)
        k, v = k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan)
        for name, x in pointwise.pull(q, k, v, do, **options).items():
            assert torch.equal(x, clean[name])
    q, k, v, do = inputs(100, 40)  # lower right: queries 0 .. 59 see nothing
    clean = pointwise.pull(q, k, v, do, causal=True)
    q[..., :60, :], do[..., :60, :] = torch.nan, torch.nan
    for name, x in pointwise.pull(q, k, v, do, causal=True).items():
        assert torch.equal(x, clean[name])


@pytest.mark.parametrize(
    ("queries", "options"),
    [
        (257, {}), (40, {"dropout": (0.1, 3)}), (40, {"query_mask": torch.arange(40) > 3}),
        (40, {"mask": torch.ones(40, 20, dtype=torch.bool)}), (40, {"bias": torch.zeros(40, 20).bfloat16()}),
        (40, {"ordered": True}), (40, pointwise.GAUSSIAN),
    ],
    ids=str,
)  # fmt: skip
def test_other_calls_go_to_other_kernels(queries: int, options: dict[str, Any], launched: list[str]) -> None:
    q, k, v, do = inputs(queries, 20)
    pointwise.pull(q, k, v, do, **options)
    assert "backward_whole" not in launched
    assert "backward_keys" in launched
