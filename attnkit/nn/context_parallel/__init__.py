"""Attention over a sequence whose tokens are split over several processes (torch.distributed).

Every process holds a contiguous part of the tokens, with their queries and keys, and gets the same part of the output.
The communication depends on the family: see `pointwise`, `linear` and `softmax` in this package for the formulas, and
docs/context-parallel.md for a table.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import attnkit
from attnkit._core.typing import LEARNED, AnyFunction, Causal, Keywords
from attnkit.nn.context_parallel import linear, pointwise, softmax
from attnkit.nn.context_parallel.collectives import Traffic, count_traffic
from attnkit.nn.context_parallel.shards import Mesh, Visibility, shards_of

__all__ = ["SERVED", "Traffic", "context_parallel", "count_traffic"]

SERVED: dict[AnyFunction, Callable[..., Tensor]] = {
    attnkit.softmax_attention: softmax.attend,
    attnkit.pointwise_attention: pointwise.attend,
    attnkit.reluformer_attention: pointwise.attend,
    attnkit.sigmoid_attention: pointwise.attend,
    attnkit.gaussian_attention: pointwise.attend,
    attnkit.linear_attention: linear.attend,
    attnkit.cosine_attention: linear.attend,
    attnkit.performer_attention: linear.attend,
    attnkit.efficient_attention: linear.attend,
}
"""{op: its implementation}."""

_NOT_SERVED = (
    *("bias", "dropout", "dropout_mask", "return_lse", "sink", "return_remainder", "return_state", "initial_state"),
    "log_decay",
)


def context_parallel(
    op: AnyFunction,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: Mesh,
    lengths: Sequence[int] | None = None,
    causal: Causal = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Tensor | None = None,
    key_lengths: Tensor | int | None = None,
    query_mask: Tensor | None = None,
    **options: object,
) -> Tensor:
    """The local part of `op(q, k, v, ...)` of the whole sequence, tokens of all processes in the order of their ranks.

    Every process of the mesh calls this with the same op and options; all of them compute gradients or none, because
    both passes communicate. o and the gradients equal those of a single process up to rounding.

    Args:
        op: an attention op of attnkit, one of `SERVED`.
        q: (..., own tokens, d). Leading axes, features and dtype must agree on all processes; lengths may differ.
        k: (..., own tokens, d), of the same tokens.
        v: (..., own tokens, e).
        mesh: a DeviceMesh of one dimension or a ProcessGroup; None is the default group.
        lengths: tokens of every process. None: they exchange them, 8 bytes each, which synchronises a GPU.
        causal: by positions in the whole sequence; True and "upper_left" are the same here.
        window: (left, right), likewise; makes a mask of pairs for a part of the sequence at a time.
        mask: a key mask (..., 1, own tokens) or (own tokens,), True = may be attended to.
        key_lengths: of the whole sequence: keys at positions below it may be attended to.
        query_mask: (..., own tokens), False = a null row.
        **options: `scale`, `enable_gqa`, `impl` and the op's own (`activation`, `alpha`, `projection`, ...). `length`
            counts keys of the whole sequence; it is a name or a number here, and `scale`, `alpha`, `gain`, `shift` and
            `gamma` are numbers.

    Returns:
        o (..., own tokens, e) in the dtype of q.

    Raises:
        NotImplementedError: an op that is not in `SERVED`; masks of pairs, bias, dropout, lse and states.
        ValueError, TypeError: arguments that do not fit. If one process raises, the others wait until the
            timeout of their group.
        RuntimeError: a second derivative.
    """
    name = getattr(op, "__name__", repr(op))
    if op not in SERVED:
        names = ", ".join(function.__name__ for function in SERVED)
        raise NotImplementedError(f"context_parallel: {name} is not served; served are {names}")
    for option in _NOT_SERVED:
        if options.get(option) is not None and options[option] is not False:
            raise NotImplementedError(f"context_parallel: {name} with {option} is not served")
    options = {option: value for option, value in options.items() if option not in _NOT_SERVED}
    for option in ("length", *LEARNED):
        if isinstance(options.get(option), Tensor):
            expected = "pass a number or a name" if option in ("length", "shift") else "pass a number"
            raise NotImplementedError(f"context_parallel: {name} with an array as {option} is not served; {expected}")
    if not q.shape[-2] == k.shape[-2] == v.shape[-2]:
        tokens = ", ".join(str(x.shape[-2]) for x in (q, k, v))
        raise ValueError(f"context_parallel: q, k and v must be of the same tokens; got {tokens} of them")
    _check_on_no_tokens(op, q, k, v, options, causal=causal, window=window, key_lengths=key_lengths)
    if mask is not None:
        mask = _marks(name, "mask", _without_queries(name, mask), q.shape[-2])
    if query_mask is not None:
        query_mask = _marks(name, "query_mask", query_mask, q.shape[-2])
        q = torch.where(query_mask[..., None], q, 0.0)
    shards = shards_of(mesh, q.shape[-2], lengths, q.device)
    visibility = Visibility(bool(causal), window, mask, key_lengths)
    o = SERVED[op](op, q, k, v, shards, visibility, options)
    return o if query_mask is None else torch.where(query_mask[..., None], o, 0.0)


def _check_on_no_tokens(op: AnyFunction, q: Tensor, k: Tensor, v: Tensor, own: Keywords, **visibility: object) -> None:
    """Run the op's argument checks on zero tokens, the same on all processes, before any of them communicates."""
    options = {name: x for name, x in {**own, **visibility}.items() if x is not None and name != "impl"}
    with torch.no_grad():
        op(*(x[..., :0, :] for x in (q, k, v)), impl="generic", **options)


def _without_queries(op: str, mask: Tensor) -> Tensor:
    """A key mask without its axis of queries, (..., tokens)."""
    if mask.ndim > 1 and mask.shape[-2] != 1:
        raise NotImplementedError(
            f"context_parallel: {op} with a mask of pairs is not served; got shape {tuple(mask.shape)}, expected a key "
            "mask (..., 1, own tokens)"
        )
    return mask[..., 0, :] if mask.ndim > 1 else mask


def _marks(op: str, name: str, marks: Tensor, tokens: int) -> Tensor:
    """Marks of the own tokens (..., tokens), checked."""
    if marks.dtype != torch.bool:
        raise TypeError(f"context_parallel: {op}'s {name} has dtype {marks.dtype}; expected bool")
    if not marks.ndim or marks.shape[-1] not in (1, tokens):
        raise ValueError(f"context_parallel: {op}'s {name} marks {tuple(marks.shape)} tokens; expected (..., {tokens})")
    return marks.expand(*marks.shape[:-1], tokens)
