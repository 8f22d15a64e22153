"""Softmax attention as somebody outside may write it: torch, in tiles, with gradients by formulas. It is right.

Every bug of `bugs` is a change of the text of this file. N is batch x heads: an item is one head of one batch item.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from attnkit_conformance.families import softmax
from attnkit_conformance.model.case import DTYPES
from attnkit_conformance.model.types import Foreign

TILE_Q, TILE_K, SPLIT = 128, 64, 512  # queries and keys of a tile; keys that one partial result is made of

Arrays = Mapping[str, Tensor]
Params = Mapping[str, Foreign]  # read as by somebody who knows what each of them is
Lead = tuple[int, ...]
Array = np.ndarray
T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One call in the compute dtype, item by item; what nobody sees is 0."""

    q: Tensor  # (N, L, d)
    k: Tensor  # (N, S, d)
    v: Tensor  # (N, S, e)
    scale: float | Tensor  # (N, 1, 1)
    visible: Tensor  # (N, L, S)
    bias: Tensor | None  # (N, L, S)
    keep: Tensor | None  # (N, L, S), by which dropout multiplies the weights
    sink: float | Tensor | None  # (N, 1, 1), a score without a value
    lead: Lead
    groups: int  # heads of q for one of k and v


class Softmax:
    """The adapter."""

    name = "honest"
    dtypes = DTYPES
    ops = tuple(op.name for op in softmax.OPS)
    copied = ("negative", "read_only")

    def array(self, x: np.ndarray, dtype: str) -> Tensor:
        """A tensor in the same memory."""
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16) if dtype == "bfloat16" else torch.from_numpy(x)

    def numpy(self, x: Tensor) -> np.ndarray:
        """The inverse of `array`."""
        if not isinstance(x, Tensor):
            raise TypeError(f"expected a tensor, got {type(x).__name__}")
        if x.dtype != torch.bfloat16:
            return x.numpy()
        import ml_dtypes

        return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)

    def call(self, op: str, arrays: Arrays, params: Params) -> dict[str, Tensor]:
        """o, and lse if it is asked for."""
        call = call_of(arrays, params)
        o, m, total = forward(call)
        results = {"o": o.reshape(*call.lead, *o.shape[1:]).to(arrays["q"].dtype)}
        if params.get("return_lse"):
            lse = m + torch.log(total)
            results["lse"] = lse.reshape(*call.lead, lse.shape[1])
        return results

    def vjp(self, op: str, arrays: Arrays, params: Params, cotangents: Arrays) -> dict[str, Tensor]:
        """The gradients of q, k, v, the bias, and of a scale and a sink that are arrays."""
        call = call_of(arrays, params)
        grads = backward(call, cotangents)
        return {
            name: summed(name, grads[name], call, x.shape).to(x.dtype) for name, x in arrays.items() if name in grads
        }


# ------------------------------------------------------------------------------------------------- the call


def call_of(arrays: Arrays, params: Params) -> Call:
    """Arguments as items in the compute dtype, without what padding holds."""
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    groups = q.shape[-3] // k.shape[-3] if params.get("enable_gqa") else 1
    if groups > 1:
        k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    lead = tuple(torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2]))
    L, S = q.shape[-2], k.shape[-2]
    visible = items(visibility(arrays, params, lead, L, S), lead)
    unseen = ~visible.any(1)[..., None]
    bias, keep = arrays.get("bias"), dropout(arrays, params, lead, L, S)
    return Call(
        q=items(q.to(wide), lead).masked_fill(~visible.any(2)[..., None], 0),
        k=items(k.to(wide), lead).masked_fill(unseen, 0),
        v=items(v.to(wide), lead).masked_fill(unseen, 0),
        scale=factor(arrays.get("scale", params.get("scale")), math.prod(lead), q.shape[-1], wide),
        visible=visible,
        bias=None if bias is None else pairs(bias, lead, L, S).to(wide).masked_fill(~visible, 0),
        keep=None if keep is None else pairs(keep, lead, L, S).to(wide).masked_fill(~visible, 0),
        sink=of_items(arrays.get("sink", params.get("sink")), math.prod(lead), wide),
        lead=lead,
        groups=groups,
    )


def items(x: Tensor, lead: Lead) -> Tensor:
    """(..., n, m) as (N, n, m)."""
    x = x.expand(*lead, *x.shape[-2:])
    return x.reshape(math.prod(lead), *x.shape[-2:])


def pairs(x: Tensor, lead: Lead, L: int, S: int) -> Tensor:
    """What broadcasts to (..., L, S), as (N, L, S)."""
    return items(x.expand(*lead, L, S), lead)


def visibility(arrays: Arrays, params: Params, lead: Lead, L: int, S: int) -> Tensor:
    """Which query sees which key (..., L, S)."""
    i, j = torch.arange(L)[:, None], torch.arange(S)
    offset = S - L
    visible = torch.ones(*lead, L, S, dtype=torch.bool)
    if "mask" in arrays:
        visible &= arrays["mask"]
    causal = params.get("causal", False)
    if causal:
        visible &= j <= i + (0 if causal == "upper_left" else offset)
    left, right = params.get("window") or (None, None)
    if left is not None:
        visible &= j - (i + offset) >= -min(left, L + S)
    if right is not None:
        visible &= j - (i + offset) <= min(right, L + S)
    if (lengths := arrays.get("key_lengths", params.get("key_lengths"))) is not None:
        per_item = at_most(lengths, S).expand(lead)
        visible &= j < per_item[..., None, None]
    if "query_mask" in arrays:
        visible &= arrays["query_mask"][..., None]
    return visible


def at_most(lengths: int | Tensor, S: int) -> Tensor:
    """Lengths of any integer type, at most S."""
    if isinstance(lengths, int):
        return torch.tensor(min(lengths, S))
    x = lengths.numpy()
    wide = x.astype(np.int64 if x.dtype.kind == "i" else np.uint64)
    return torch.from_numpy(np.asarray(np.minimum(wide, S), np.int64))


def factor(scale: float | Tensor | None, N: int, d: int, wide: torch.dtype) -> float | Tensor:
    """The factor of the scores: a number, or one for each item."""
    return 1 / math.sqrt(d) if scale is None else of_items(scale, N, wide)


def of_items(x: T, N: int, wide: torch.dtype) -> T | Tensor:
    """A number of the call as it is, or one for each item (N, 1, 1) of those of its heads."""
    if not isinstance(x, Tensor):
        return x
    flat = x.to(wide).reshape(-1)
    return flat.repeat(N // len(flat))[:, None, None]


def dropout(arrays: Arrays, params: Params, lead: Lead, L: int, S: int) -> Tensor | None:
    """The multiplier of the weights: the mask that is given, or 1/(1-p) where the first word of Philox says so."""
    if "dropout_mask" in arrays:
        return arrays["dropout_mask"]
    if "dropout" not in params:
        return None
    p, seed = params["dropout"]
    heads = lead[-1] if lead else 1
    i, j, item = np.arange(L)[:, None], np.arange(S), np.arange(math.prod(lead))[:, None, None]
    word = philox(j, i, item % heads, item // heads, seed)[0]
    keep = np.where(word / 2**32 < 1 - p, 1 / (1 - p), 0.0)
    return torch.from_numpy(keep.reshape(*lead, L, S))


def philox(a: Array, b: Array, c: Array, d: Array, seed: int) -> tuple[Array, Array, Array, Array]:
    """The four words of Philox4x32-10 for the counter (a, b, c, d)."""
    a, b, c, d = (np.asarray(x).astype(np.uint64) for x in (a, b, c, d))
    low, high = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        x, y = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, c = (y >> np.uint64(32)) ^ b ^ np.uint64(low), (x >> np.uint64(32)) ^ d ^ np.uint64(high)
        b, d = y & np.uint64(0xFFFFFFFF), x & np.uint64(0xFFFFFFFF)
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return a, b, c, d


# ---------------------------------------------------------------------------------------------- the way forth


def tiles(first: int, last: int, size: int) -> Iterator[slice]:
    """Slices of some tokens."""
    return (slice(n, min(n + size, last)) for n in range(first, last, size))


def products(call: Call, rows: slice, keys: slice) -> Tensor:
    """q kᵀ of a tile."""
    q, k = call.q[:, rows], call.k[:, keys]
    return q @ k.mT


def scores(call: Call, rows: slice, keys: slice) -> Tensor:
    """The scores of a tile, -inf where nothing is seen."""
    s = call.scale * products(call, rows, keys)
    if call.bias is not None:
        s = s + call.bias[:, rows, keys]
    return s.masked_fill(~call.visible[:, rows, keys], -math.inf)


def dropped(call: Call, w: Tensor, rows: slice, keys: slice) -> Tensor:
    """Weights of a tile, or their gradients, after dropout."""
    return w if call.keep is None else w * call.keep[:, rows, keys]


def finite(m: Tensor) -> Tensor:
    """Maxima of rows, 0 where nothing is seen."""
    return torch.where(m == -math.inf, 0.0, m)


def forward(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """o (N, L, e), and of each row the maximum m of its scores and the total of exp(s - m), (N, L, 1)."""
    L, S = call.visible.shape[1:]
    acc = call.q.new_zeros(*call.q.shape[:2], call.v.shape[2])
    m, total = call.q.new_full((*call.q.shape[:2], 1), -math.inf), call.q.new_zeros(*call.q.shape[:2], 1)
    for rows in tiles(0, L, TILE_Q):
        for keys in tiles(0, S, SPLIT):
            more, m_more, total_more = partial(call, rows, keys)
            new = torch.maximum(m[:, rows], m_more)
            before, after = torch.exp(m[:, rows] - finite(new)), torch.exp(m_more - finite(new))
            acc[:, rows] = before * acc[:, rows] + after * more
            total[:, rows] = before * total[:, rows] + after * total_more
            m[:, rows] = new
    if call.sink is not None:  # no part of rows without keys; by logaddexp, which keeps the digits of a sum of nearly 1
        sink = torch.as_tensor(call.sink, dtype=m.dtype)
        lse = torch.where(total == 0, m, torch.logaddexp(m + torch.log(total), sink))
        acc, total, m = torch.exp(m - finite(lse)) * acc, (total != 0).to(m.dtype), lse
    return torch.where(total == 0, 0.0, acc / total), m, total


def partial(call: Call, rows: slice, keys: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Σ exp(s - m) v, m and Σ exp(s - m) over some of the keys."""
    q = call.q[:, rows]
    acc = q.new_zeros(*q.shape[:2], call.v.shape[2])
    m, total = q.new_full((*q.shape[:2], 1), -math.inf), q.new_zeros(*q.shape[:2], 1)
    for tile in tiles(keys.start, keys.stop, TILE_K):
        s = scores(call, rows, tile)
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        p, shrink = torch.exp(s - finite(new)), torch.exp(m - finite(new))
        total = shrink * total + p.sum(-1, keepdim=True)
        acc = shrink * acc + dropped(call, p, rows, tile) @ call.v[:, tile]
        m = new
    return acc, m, total


# ---------------------------------------------------------------------------------------------- the way back


def cotangent(x: Tensor | None, total: Tensor, width: int) -> Tensor:
    """The cotangent of an output (N, L, width) in the compute dtype, 0 where there is none and in rows without keys."""
    if x is None:
        return total.new_zeros(*total.shape[:2], width)
    return x.reshape(*total.shape[:2], width).to(total.dtype).masked_fill(total == 0, 0)


def backward(call: Call, cotangents: Arrays) -> dict[str, Tensor]:
    """The gradients of an item each: ds = w (dw - Σ w dw + dlse), w recomputed from m and the totals."""
    L, S = call.visible.shape[1:]
    o, m, total = forward(call)
    do = cotangent(cotangents.get("o"), total, o.shape[2])
    dlse = cotangent(cotangents.get("lse"), total, 1)
    total = total.masked_fill(total == 0, 1)
    delta = (do * o).sum(-1, keepdim=True)
    dq, dk, dv = (torch.zeros_like(x) for x in (call.q, call.k, call.v))
    dbias = call.q.new_zeros(call.visible.shape if call.bias is not None else 0)
    dscale = call.q.new_zeros(len(call.q), 1, 1)
    grads = {}
    if isinstance(call.sink, Tensor):
        weight = torch.where(m == -math.inf, 0.0, torch.exp(call.sink - finite(m)))
        grads["sink"] = (weight * (dlse - delta)).sum((1, 2), keepdim=True)
    for keys in tiles(0, S, TILE_K):
        for rows in tiles(0, L, TILE_Q):
            w = torch.exp(scores(call, rows, keys) - finite(m[:, rows])) / total[:, rows]
            dw = dropped(call, do[:, rows] @ call.v[:, keys].mT, rows, keys)
            ds = w * (dw - delta[:, rows] + dlse[:, rows])
            dv[:, keys] += dropped(call, w, rows, keys).mT @ do[:, rows]
            dk[:, keys] += ds.mT @ call.q[:, rows]
            dq[:, rows] += ds @ call.k[:, keys]
            if call.bias is not None:
                dbias[:, rows, keys] = ds
            dscale += (ds * products(call, rows, keys)).sum((1, 2), keepdim=True)
    return {**grads, "q": call.scale * dq, "k": call.scale * dk, "v": dv, "bias": dbias, "scale": dscale}


def summed(name: str, x: Tensor, call: Call, shape: Lead) -> Tensor:
    """The gradient of an argument of this shape: that of its items, added up where they share it."""
    if name in ("scale", "sink"):
        return x.reshape(-1, *shape).sum(0)
    x = x.reshape(*call.lead, *x.shape[1:])
    if name in ("k", "v") and call.groups > 1:
        x = x.unflatten(-3, (-1, call.groups)).sum(-3)
    return x.sum_to_size(shape)
