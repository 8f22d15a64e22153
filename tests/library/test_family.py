"""What follows from a record that normalises its inputs: softmax of scale·q̂·k̂ with x̂ = x/‖x‖, and 0 for x = 0."""

import math
from typing import Any, Unpack

import numpy as np
import pytest
import torch

from attnkit._core import blocks, quadratic
from attnkit._core.family import Family, op, vjp_of, weights_of
from attnkit._core.typing import Array, Common, Impl, Namespace
from attnkit.ops import records, softmax, statistics

from .arrays import assert_agrees


def unit(xp: Namespace, x: Array) -> tuple[Array, Array]:
    """x/‖x‖ and 1/‖x‖, 0 where ‖x‖ is 0."""
    square = xp.sum(x * x, axis=-1, keepdims=True)
    inverse = xp.where(square > 0, 1.0 / xp.sqrt(xp.where(square > 0, square, 1.0)), 0.0)
    return x * inverse, inverse


def pull(xp: Namespace, x: Array, g: Array) -> Array:
    """(g - x̂ (x̂·g))/‖x‖."""
    along, inverse = unit(xp, x)
    return (g - along * xp.sum(along * g, axis=-1, keepdims=True)) * inverse


def prepare(xp: Namespace, q: Array, k: Array, v: Array | None = None, **common: Any) -> quadratic.Inputs:
    a = quadratic.prepare(xp, q, k, v, **{"scale": 1.0, **common})
    before = quadratic.Normalised(a.q, a.k, pull)
    return a._replace(q=unit(xp, a.q)[0], k=unit(xp, a.k)[0], normalised=before)


FAMILY = Family("angle_attention", softmax.weigh, softmax.score_gradient, prepare)


@op(FAMILY)
def angle_attention(q: Array, k: Array, v: Array, *, impl: Impl = "auto", **common: Unpack[Common]) -> Array:
    """Softmax of scale·q̂·k̂."""


angle_attention_weights = weights_of(angle_attention, FAMILY)
angle_attention_vjp = vjp_of(angle_attention, FAMILY, "Through softmax and the norms.")

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "scale": 3.0},
    "padded": {"key_lengths": torch.tensor([5, 0]).reshape(2, 1)},
    "gqa": {"enable_gqa": True},
}


def tensors(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    heads = 2 if name == "gqa" else 4
    shapes = {"q": (2, 4, 7, 3), "k": (2, heads, 9, 3), "v": (2, heads, 9, 5)}
    made = {n: torch.randn(shape, generator=generator, dtype=torch.float64) for n, shape in shapes.items()}
    made["k"][0, 0, 1] = 0.0
    if name == "padded":
        made["k"][1] = math.nan  # nobody sees it
    return made


@pytest.mark.parametrize("name", OPTIONS)
def test_weights_output_and_gradients(name: str) -> None:
    arrays, options = tensors(name), OPTIONS[name]
    leaves = {n: x.clone().requires_grad_() for n, x in arrays.items()}
    w = angle_attention_weights(leaves["q"], leaves["k"], **options)
    o = angle_attention(**leaves, **options)
    groups = 2 if name == "gqa" else 1
    seen = torch.nan_to_num(leaves["v"]).repeat_interleave(groups, -3)
    torch.testing.assert_close(w @ seen, o)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(4), dtype=o.dtype)
    exact = torch.autograd.grad(o, list(leaves.values()), do)
    found = angle_attention_vjp(*arrays.values(), do, **options)
    for n, x in zip(leaves, exact, strict=True):
        assert_agrees(found[n].numpy(), x.numpy(), 4.0)


def test_a_pull_back_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "pull", lambda xp, x, g: g)
    with pytest.raises(AssertionError):
        test_weights_output_and_gradients("plain")


def test_statistics_and_blocks_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    record = records.Record(angle_attention, FAMILY)
    monkeypatch.setitem(statistics.RECORDS, FAMILY.name, record)
    for output in (False, True):
        monkeypatch.setitem(statistics._ACCEPTED, (FAMILY.name, output), statistics._accepted(record, output))
    q, k, v = (x.numpy() for x in tensors("plain").values())
    o, rows = statistics.attention_with_statistics(FAMILY.name, q, k, v, causal=True)
    w = angle_attention_weights(q, k, causal=True)
    assert_agrees(o, w @ v, 1.0)
    assert_agrees(rows.sum_squares, np.sum(w * w, axis=-1), 1.0)
    call = blocks.call(FAMILY, q, k, v, {"causal": True}, 20)
    assert_agrees(blocks.forward(np, call), o, 1.0)
    do = np.ones_like(o)
    grads = blocks.backward(np, call, do, ("q", "k", "v"))
    for name, x in angle_attention_vjp(q, k, v, do, causal=True).items():
        assert_agrees(grads[name], x, 4.0)
