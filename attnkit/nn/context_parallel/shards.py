"""Which tokens a process holds, visibility between processes, and the exchange of tokens."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from attnkit._core.typing import Keywords
from attnkit.nn.context_parallel.collectives import Gather, Group, ReduceScatter, all_gather, compute_dtype

Mesh: TypeAlias = "DeviceMesh | Group"


class Shards(NamedTuple):
    """A sequence cut into one contiguous part per process: process r holds `lengths[r]` tokens."""

    group: Group
    rank: int
    lengths: tuple[int, ...]

    @property
    def processes(self) -> int:
        return len(self.lengths)

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def own(self) -> range:
        return self.tokens(self.rank)

    def tokens(self, rank: int) -> range:
        """The positions of a process's tokens in the whole sequence."""
        start = sum(self.lengths[:rank])
        return range(start, start + self.lengths[rank])


def shards_of(mesh: Mesh, tokens: int, lengths: Sequence[int] | None, device: torch.device) -> Shards:
    """The parts of all processes; without `lengths` they exchange them."""
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(f"context_parallel: mesh must have one dimension; got {mesh.ndim}: pass mesh['name']")
        mesh = mesh.get_group()
    rank, processes = dist.get_rank(mesh), dist.get_world_size(mesh)
    if rank < 0:
        raise ValueError("context_parallel: this process does not belong to mesh")
    if lengths is None:
        lengths = all_gather(torch.tensor(tokens, device=device), mesh).tolist()
    lengths = tuple(int(n) for n in lengths)
    if len(lengths) != processes or min(lengths) < 0:
        raise ValueError(
            f"context_parallel: lengths must be {processes} numbers of tokens, one a process; got {lengths}"
        )
    if lengths[rank] != tokens:
        raise ValueError(
            f"context_parallel: lengths gives process {rank} {lengths[rank]} tokens; its q, k and v have {tokens}"
        )
    return Shards(mesh, rank, lengths)


def gather_tokens(x: Tensor, shards: Shards) -> Tensor:
    """x (..., own tokens, f) of all processes: (..., total, f). Shards are padded to the longest for the exchange."""
    longest = max(shards.lengths)
    parts = Gather.apply(pad(x, (0, 0, 0, longest - x.shape[-2])), shards.group)
    return torch.cat([part[..., :n, :] for part, n in zip(parts, shards.lengths, strict=True)], dim=-2)


def reduce_scatter_tokens(x: Tensor, shards: Shards) -> Tensor:
    """The local tokens of x (..., total, f) summed over all processes."""
    longest = max(shards.lengths)
    parts = [pad(part, (0, 0, 0, longest - part.shape[-2])) for part in x.split(shards.lengths, dim=-2)]
    own: Tensor = ReduceScatter.apply(torch.stack(parts), shards.group)
    return own[..., : len(shards.own), :]


class Visibility(NamedTuple):
    """Visibility by positions in the whole sequence and by a mask of the local keys."""

    causal: bool
    window: tuple[int | None, int | None] | None
    mask: Tensor | None  # (..., own tokens), True = a key that may be attended to
    key_lengths: Tensor | int | None  # of the whole sequence, broadcasts to (...)


def _before(tokens: range, key_lengths: Tensor | int | None, device: torch.device) -> Tensor | None:
    if key_lengths is None:
        return None
    positions = torch.arange(tokens.start, tokens.stop, device=device)
    return positions < (key_lengths[..., None] if isinstance(key_lengths, Tensor) else key_lengths)


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a & b


def own_keys(visibility: Visibility, shards: Shards, device: torch.device) -> Tensor | None:
    """Which local keys may be attended to (..., own tokens), None = all; without communication."""
    return _both(visibility.mask, _before(shards.own, visibility.key_lengths, device))


def all_keys(visibility: Visibility, shards: Shards, device: torch.device) -> Tensor | None:
    """The same for all keys (..., total): a mask is gathered, lengths need not be."""
    mask = None if visibility.mask is None else gather_tokens(visibility.mask[..., None], shards)[..., 0]
    return _both(mask, _before(range(shards.total), visibility.key_lengths, device))


def reach(keys: range, total: int, visibility: Visibility) -> range:
    """The queries that may see some of these keys."""
    left, right = visibility.window or (None, None)
    right = 0 if visibility.causal else right
    first = 0 if right is None else max(0, keys.start - right)
    stop = total if left is None else min(total, keys.stop + left)
    return range(first, max(first, stop))


def between(
    queries: range, keys: range, valid: Tensor | None, visibility: Visibility, device: torch.device
) -> Keywords:
    """An op's options for some queries and some keys of the sequence; `valid` (..., keys): those not masked.

    Causality is an option of the op if both begin at the same token, and no option if all keys come before.
    """
    options: Keywords = {}
    pairs = None if valid is None else valid[..., None, :]
    past = keys.stop <= queries.start + 1
    if visibility.window is None and visibility.causal and not past and keys.start == queries.start:
        options["causal"] = "upper_left"
    elif visibility.window is not None or (visibility.causal and not past):
        i = torch.arange(queries.start, queries.stop, device=device)[:, None]
        j = torch.arange(keys.start, keys.stop, device=device)
        left, right = visibility.window or (None, None)
        right = 0 if visibility.causal else right
        pairs = _both(pairs, None if left is None else j >= i - left)
        pairs = _both(pairs, None if right is None else j <= i + right)
    return options if pairs is None else {**options, "mask": pairs}


def visible_counts(valid: Tensor | None, shards: Shards, visibility: Visibility, like: Tensor) -> Tensor | int:
    """n_i of every query of the sequence, (..., total), at least 1; a number if all are equal.

    n_i = c[last_i + 1] - c[first_i], c_t the number of valid keys before position t: O(total), without pairs.
    """
    left, right = visibility.window or (None, None)
    right = 0 if visibility.causal else right
    total = shards.total
    if valid is None and left is None and right is None:
        return max(total, 1)
    i = torch.arange(total, device=like.device)
    first = None if left is None else (i - left).clamp_(min=0)
    stop = i.add_(total if right is None else right + 1).clamp_(max=total)  # in place: i is not needed any more
    if valid is None:
        n = stop if first is None else stop - first
    else:
        before = pad(valid.cumsum(-1), (1, 0))
        n = before[..., stop] if first is None else before[..., stop] - before[..., first]
    return n.clamp_(min=1).to(compute_dtype(like))
