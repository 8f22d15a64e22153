"""Stick-breaking attention: gradients of the remainder, sums over thousands of keys, and what it is not."""

from typing import Any

import numpy as np
import pytest
import torch

import attnkit
from attnkit.nn import MultiHeadAttention

from .arrays import assert_close, normal

NAME = "stick_breaking_attention"
Q, K, V = normal(*[(2, 3, 6, 4)] * 3)


def test_the_remainder_is_differentiable() -> None:
    leaves = [torch.as_tensor(x).requires_grad_() for x in (Q, K, V)]
    o, r = attnkit.stick_breaking_attention(*leaves, return_remainder=True)
    do, dr = torch.randn_like(o), torch.randn_like(r)
    found = torch.autograd.grad((o, r), leaves, (do, dr))
    explicit = attnkit.stick_breaking_attention_vjp(*leaves, do, dr)
    alone = attnkit.stick_breaking_attention_vjp(*leaves, None, dr)
    for name, x in zip("qkv", found, strict=True):
        assert_close(explicit[name], x)
    assert not torch.any(alone["v"])
    assert_close(
        torch.autograd.grad(attnkit.stick_breaking_attention(*leaves, return_remainder=True)[1], leaves[0], dr)[0],
        alone["q"],
    )


def of_many(xp: Any, keys: int, level: float) -> tuple[Any, float]:
    """The weight of the farthest of so many equal keys in float32, and what it is."""
    q, k = (xp.asarray(np.full((n, 1), x, np.float32)) for n, x in ((1, 1.0), (keys, level)))
    w = attnkit.stick_breaking_attention_weights(q, k, scale=1.0, attend_current=True)
    return float(w[0, 0]), float(np.exp(-np.logaddexp(0, -level) - (keys - 1) * np.logaddexp(0.0, level)))


@pytest.mark.parametrize("library", [np, torch], ids=["numpy", "torch"])
def test_the_sum_over_thousands_of_keys_keeps_its_digits(library: Any) -> None:
    """Added one by one in float32, equal numbers lose hundreds of eps."""
    found, expected = of_many(library, 65_536, float(np.float32(-9.3)))
    assert abs(found / expected - 1) < 40 * np.finfo(np.float32).eps


def test_what_it_does_not_take() -> None:
    with pytest.raises(ValueError, match=r"row_statistics\(stick_breaking_attention\): unexpected argument 'causal'"):
        attnkit.row_statistics(NAME, Q, K, causal=True)
    with pytest.raises(NotImplementedError, match=f"{NAME}: .*blocked: the remainder is served by the generic"):
        attnkit.stick_breaking_attention(Q, K, V, return_remainder=True, impl="blocked")


def test_a_module_sees_only_earlier_tokens() -> None:
    layer = MultiHeadAttention(8, 2, op="stick_breaking", causal=True).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    later = x.clone()
    later[:, 3:] += 1
    assert torch.equal(layer(x)[:, :3], layer(later)[:, :3])
    assert_close(layer(x)[:, 0], layer.out_proj.bias.expand(2, 8))


def test_cotangents_of_rows_that_see_nothing_reach_no_second_derivative() -> None:
    q, k, v, do = (torch.as_tensor(x).requires_grad_() for x in normal((3, 4), (3, 4), (3, 4), (3, 4)))
    bias, seen = torch.zeros(3, 3, dtype=q.dtype, requires_grad=True), torch.tensor([True, False, True])
    dr = torch.where(seen, 1.0, torch.nan).to(q.dtype)
    grads = attnkit.stick_breaking_attention_vjp(q, k, v, do, dr, bias=bias, query_mask=seen, impl="generic")
    second = torch.autograd.grad(sum(x.square().sum() for x in grads.values()), (q, k, v, do, bias))
    assert all(x.isfinite().all() for x in (*grads.values(), *second))
