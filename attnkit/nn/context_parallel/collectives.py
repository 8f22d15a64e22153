"""The collectives of context parallelism, each counted: all-gather, reduce-scatter, and the send of a ring.

All-gather and reduce-scatter are each other's gradient.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Group: TypeAlias = "dist.ProcessGroup | None"  # None is the default group; a name, for a torch without processes
Context = Any  # of torch.autograd.Function: it holds what `forward` gives it

# torch 2.13 renamed both
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


@dataclass
class Traffic:
    """The traffic sent by this process: filled by `count_traffic`.

    `bytes_sent`: an all-gather of x over W processes and a reduce-scatter to parts as large as x count (W - 1)·bytes of
    x each, which is what their ring algorithms send; a send counts its bytes. `calls`: how often, by kind
    ("all_gather", "reduce_scatter", "send").
    """

    bytes_sent: int = 0
    calls: Counter[str] = field(default_factory=Counter)


_COUNTING: list[Traffic] = []  # not a context variable: gradients on a GPU are computed in other threads


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count what context-parallel calls of this process send while the block runs, their gradients included.

    >>> from attnkit.nn import count_traffic
    >>> with count_traffic() as traffic:
    ...     pass
    >>> traffic.bytes_sent
    0
    """
    traffic = Traffic()
    _COUNTING.append(traffic)
    try:
        yield traffic
    finally:
        _COUNTING[:] = [counting for counting in _COUNTING if counting is not traffic]


def _count(kind: str, size: int) -> None:
    for traffic in _COUNTING:
        traffic.bytes_sent += size
        traffic.calls[kind] += 1


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of sums: float32 for half types."""
    return torch.promote_types(x.dtype, torch.float32)


def all_gather(x: Tensor, group: Group) -> Tensor:
    """x of all processes, (W, *shape); the shapes must be the same."""
    processes = dist.get_world_size(group)
    out = x.new_empty(processes * x.numel())
    getattr(dist, _ALL_GATHER)(out, x.contiguous().view(-1), group=group)
    _count("all_gather", (processes - 1) * x.nbytes)
    return out.view(processes, *x.shape)


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """This process's part of x (W, *shape) summed over all processes in the compute dtype."""
    wide = x.to(compute_dtype(x)).contiguous()
    out = wide.new_empty(wide.shape[1:])
    getattr(dist, _REDUCE_SCATTER)(out.view(-1), wide.view(-1), group=group)
    _count("reduce_scatter", (wide.shape[0] - 1) * out.nbytes)
    return out.to(x.dtype)


class Gather(Function):
    """`all_gather`, differentiable."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, d: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(d, ctx.group), None


class ReduceScatter(Function):
    """`reduce_scatter`, differentiable."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, d: Tensor) -> tuple[Tensor, None]:
        return all_gather(d, ctx.group), None


class _Tied(Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, d: Tensor) -> tuple[Tensor, ...]:
        return d, *(torch.zeros_like(x) for x in ctx.saved_tensors)


def tied(x: Tensor, *others: Tensor) -> Tensor:
    """x, with the gradient 0 for `others`.

    The op's result may have no graph on a process without tokens, which still has to join the collectives of the
    gradient.
    """
    out: Tensor = _Tied.apply(x, *others)
    return out


def send_on(
    tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: Group
) -> Callable[[], tuple[Tensor, ...]]:
    """Start to send tensors of one dtype to the next process; call the result to receive those of the previous process.

    `shapes` are the shapes to receive.
    """
    rank, processes = dist.get_rank(group), dist.get_world_size(group)
    out = torch.cat([x.reshape(-1) for x in tensors])
    sizes = [prod(shape) for shape in shapes]
    coming = out.new_empty(sum(sizes))
    group = dist.group.WORLD if group is None else group
    transfers = [
        dist.P2POp(dist.isend, out, group=group, group_peer=(rank + 1) % processes),
        dist.P2POp(dist.irecv, coming, group=group, group_peer=(rank - 1) % processes),
    ]
    under_way = dist.batch_isend_irecv(transfers)
    _count("send", out.nbytes)

    def receive() -> tuple[Tensor, ...]:
        for transfer in under_way:
            transfer.wait()
        transfers.clear()  # until here they keep the sent tensors alive
        return tuple(x.view(*shape) for x, shape in zip(coming.split(sizes), shapes, strict=True))

    return receive
