"""Softmax attention over processes: keys and values are passed around a ring, and outputs are merged by their lse.

    lse_i = log Σ_r exp(lse_i^(r)),   o_i = Σ_r exp(lse_i^(r) - lse_i) o_i^(r)

for the blocks r of keys and values (ring attention, Liu et al. 2023, Algorithm 1). Backward they go round again,
together with their gradients. Block r gets the cotangents a·do and a·(do·o^(r) - do·o) of o^(r) and lse^(r), a =
exp(lse^(r) - lse). o^(r) and lse^(r) are recomputed, not stored, so memory is that of two blocks.

With W processes, n tokens, Hkv heads of keys and a batch of B each, b bytes in the dtype of q and c in the compute
dtype, a process sends (W - 1)·B·Hkv·n·(d + e)·b bytes forward in W - 1 sends, and backward as much again and
W·B·Hkv·n·(d + e)·c for dk and dv, in 2W - 1 sends (none if W = 1). A key mask adds one all-gather of it.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import attnkit
from attnkit._core.typing import AnyFunction, Keywords
from attnkit.nn.context_parallel.collectives import Context, compute_dtype, send_on
from attnkit.nn.context_parallel.shards import Shards, Visibility, all_keys, between, reach


def attend(
    op: AnyFunction,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shards: Shards,
    visibility: Visibility,
    options: Keywords,
) -> Tensor:
    """The local part of o."""
    o: Tensor = _Ring.apply(q, k, v, shards, visibility, all_keys(visibility, shards, q.device), options)
    return o


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """exp(part - whole) (..., L, 1), 0 where both are -inf."""
    return torch.exp(part - torch.where(whole == -math.inf, 0.0, whole))[..., None]


def _shapes(k: Tensor, v: Tensor, tokens: int) -> list[tuple[int, ...]]:
    return [(*x.shape[:-2], tokens, x.shape[-1]) for x in (k, v)]


def _block_options(
    block: int,
    shards: Shards,
    visibility: Visibility,
    valid: Tensor | None,
    options: Keywords,
    device: torch.device,
) -> Keywords | None:
    """The op's options for the own queries and the keys of a process; None if none of them sees any."""
    keys, own = shards.tokens(block), shards.own
    rows = reach(keys, shards.total, visibility)
    if rows.stop <= own.start or rows.start >= own.stop:
        return None
    part = None if valid is None else valid[..., keys.start : keys.stop]
    return {**between(own, keys, part, visibility, device), **options}


def _round(k: Tensor, v: Tensor, shards: Shards) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(process, its k, its v): the local ones, then the received ones, passed on while they are used."""
    block_kv = (k, v)
    for step in range(shards.processes):
        block = (shards.rank - step) % shards.processes
        receive = None
        if step < shards.processes - 1:
            coming = shards.lengths[(block - 1) % shards.processes]
            receive = send_on(block_kv, _shapes(k, v, coming), shards.group)
        yield (block, *block_kv)
        if receive is not None:
            block_kv = receive()  # type: ignore[assignment]


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Context,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        shards: Shards,
        visibility: Visibility,
        valid: Tensor | None,
        options: Keywords,
    ) -> Tensor:
        o: Tensor | None = None
        lse: Tensor | None = None
        for block, k_there, v_there in _round(k, v, shards):
            partial = _block_options(block, shards, visibility, valid, options, q.device)
            if block != shards.rank and partial is None:
                continue
            part, part_lse = attnkit.softmax_attention(q, k_there, v_there, return_lse=True, **(partial or options))
            part = part.to(compute_dtype(q))
            if o is None or lse is None:
                o, lse = part, part_lse
                continue
            joint = torch.logaddexp(lse, part_lse)
            o = o * _share(lse, joint) + part * _share(part_lse, joint)
            lse = joint
        assert o is not None
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse, valid)
        ctx.call = shards, visibility, options
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, valid = ctx.saved_tensors
        shards, visibility, options = ctx.call
        wide = compute_dtype(q)
        along = (do.to(wide) * o.to(wide)).sum(-1)
        dq = torch.zeros_like(q, dtype=wide)
        grads = [torch.zeros_like(x, dtype=wide) for x in (k, v)]
        for block, k_there, v_there in _round(k, v, shards):
            if block != shards.rank:
                grads = list(send_on(grads, _shapes(k, v, shards.lengths[block]), shards.group)())
            partial = _block_options(block, shards, visibility, valid, options, q.device)
            if partial is None:
                continue
            block_grads = _block_gradients(q, k_there, v_there, do, along, lse, partial)
            dq += block_grads["q"]
            grads = [grads[0] + block_grads["k"], grads[1] + block_grads["v"]]
        if shards.processes > 1:
            grads = list(send_on(grads, [k.shape, v.shape], shards.group)())
        return dq.to(q.dtype), grads[0].to(k.dtype), grads[1].to(v.dtype), None, None, None, None


def _block_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, along: Tensor, lse: Tensor, options: Keywords
) -> dict[str, Tensor]:
    """Gradients of q, k and v through one block of keys; `along` is do·o of the whole row."""
    o, own_lse = attnkit.softmax_attention(q, k, v, return_lse=True, **options)
    share = _share(own_lse, lse)
    dlse = share[..., 0] * ((do.to(along.dtype) * o.to(along.dtype)).sum(-1) - along)
    grads: dict[str, Tensor] = attnkit.softmax_attention_vjp(
        q, k, v, (share * do).to(q.dtype).contiguous(), dlse, **options
    )
    return grads
