"""The decay of linear attention on torch tensors: the levels of its tokens, which the kernels of `linear` read, and the
gradient of the argument from that of its gates.
"""

import torch
from torch import Tensor

from attnkit._core.dispatch import namespace
from attnkit._core.typing import Keywords, OfLibrary
from attnkit.kernels.linear_calls import Setting
from attnkit.kernels.plan import Layout, Shape, summed_axes
from attnkit.ops.forgetting import running_sum
from attnkit.ops.linear.states import shown_keys

LEAST = -200.0
"""Of gates, whose exponential is 0 in float32: a running sum with one of -∞ has no differences after it."""


def decaying_tokens(q: Tensor, s: Setting, options: Keywords) -> Tensor | None:
    """The tokens that decay (..., S), None for all: those that neither a key mask nor key_lengths hides."""
    shown: OfLibrary = shown_keys(namespace(q), q, s.a.keys, options.get("mask"), options.get("key_lengths"))
    return shown


def _of_tokens(x: Tensor, a: Layout) -> Tensor:
    """The argument as it broadcasts to (..., S)."""
    return x[..., None] if x.ndim == 0 or (x.ndim == 1 and a.leading) else x


def of_query_heads(x: Tensor, a: Layout) -> Tensor:
    """x (..., S) with the heads of q, if it has those of k."""
    if a.groups == 1 or x.ndim < 2 or x.shape[-2] != a.kv_heads:
        return x
    return x[..., None, :].expand(*x.shape[:-1], a.groups, x.shape[-1]).flatten(-3, -2)


def levels(x: Tensor | float, s: Setting, like: Tensor, shown: Tensor | None) -> tuple[Tensor, Tensor]:
    """-Σ_{l <= p} g_l of the tokens p as high + low, (..., S); gates of hidden tokens are read as 0."""
    if isinstance(x, Tensor):
        g = _of_tokens(x.to(torch.float32), s.a)
    else:
        g = torch.full((s.a.keys,), float(x), dtype=torch.float32, device=like.device)
    g = g.expand(*g.shape[:-1], s.a.keys).clamp(min=LEAST)
    if shown is not None:
        apart = shown.ndim > 1 and shown.shape[-2] not in (1, s.a.kv_heads)
        g = torch.where(shown, of_query_heads(g, s.a) if apart else g, 0.0)
    c: tuple[OfLibrary, OfLibrary] = running_sum(namespace(g), -g)
    return c


def axes(arguments: Keywords) -> Shape:
    """The leading axes of a decay among the arguments of a call, which the state that it returns has too."""
    x = arguments.get("log_decay")
    if not isinstance(x, Tensor) or not x.ndim:
        return ()
    of_heads = x.ndim == 1 and max(arguments[name].ndim for name in "qkv") > 2
    return tuple(x.shape) if of_heads else tuple(x.shape[:-1])


def gradient(dg: Tensor, s: Setting, like: Tensor, shown: Tensor | None) -> Tensor:
    """The gradient of an argument `like` from that of the gates of every state, (..., S)."""
    dg = dg if shown is None else dg.masked_fill(~shown, 0.0)
    if s.plan.members < s.a.groups:
        dg = dg.unflatten(-2, (-1, s.a.groups)).sum(-2)
    found = summed_axes(tuple(dg.shape), tuple(_of_tokens(like, s.a).shape))
    return (dg.sum(found) if found else dg).reshape(like.shape).to(like.dtype)
