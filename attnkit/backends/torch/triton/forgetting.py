"""The gates of forgetting attention on torch tensors: their running sum, which the kernels of `rows` read, and their
gradient, from the sums that `attnkit.kernels.triton.rows_gradients` leaves.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnkit._core.dispatch import namespace
from attnkit._core.special import sum_before
from attnkit._core.typing import Keywords, OfLibrary
from attnkit.backends.torch.triton.launch import Group, view_of
from attnkit.kernels.plan import Layout, blocks_of, summed_axes
from attnkit.ops.forgetting import FORGETTING, running_sum, seeing

OP, GATES = FORGETTING.name, "log_forget"


class Fading(NamedTuple):
    """The running sum of the gates in two numbers, high + low, and the tokens whose gates count, None for all."""

    high: Tensor  # (..., S)
    low: Tensor  # (..., S)
    kept: Tensor | None  # broadcasts to (..., S)

    def view(self, a: Layout) -> Group:
        """The tuple `fade` of `attnkit.kernels.triton.rows`."""
        high, low = (view_of(x, a.leading, a.keys) for x in (self.high, self.low))
        assert high is not None
        assert low is not None
        return high[0], low[0], *high[1:], a.keys - a.queries, a.keys


def fading(options: Keywords) -> Fading | None:
    """That of a call, None without gates."""
    gates = options.get(GATES)
    if gates is None:
        return None
    hiding = {name: options.get(name) for name in ("mask", "key_lengths")}
    kept: Tensor | None = seeing(log_forget=gates, **hiding).get("kept")
    gates = gates.to(torch.float32)
    gates = gates if kept is None else torch.where(kept, gates, 0.0)
    c: tuple[OfLibrary, OfLibrary] = running_sum(namespace(gates), gates)
    return Fading(*c, kept)


class Sums(NamedTuple):
    """What kernels write for the gradient of gates, as `attnkit.kernels.triton.rows_gradients` defines it."""

    crossing: Tensor  # (items, heads, S)
    tiles: Tensor  # (items, heads, groups of queries, groups)
    later: Tensor  # (items, heads, S)
    size: int  # queries of a group
    lacking: int  # tokens of its first group

    @property
    def arguments(self) -> Group:
        """The tuple `gates` of the kernels."""
        return *self, self.tiles.shape[-1]


def room_for_sums(q: Tensor, a: Layout, size: int) -> Sums:
    """Memory for the sums, 0 where no program writes."""
    lacking = (a.queries - a.keys) % size  # so that the first query begins a group
    heads = a.items, a.heads
    groups = blocks_of(a.queries, size), blocks_of(a.keys + lacking, size)
    crossing, tiles, later = (
        q.new_zeros((*heads, *rest), dtype=torch.float32) for rest in ((a.keys,), groups, (a.keys,))
    )
    return Sums(crossing, tiles, later, size, lacking)


def gradient(sums: Sums, fade: Fading, a: Layout, gain: float, like: Tensor) -> Tensor:
    """dlog_forget in the shape and dtype of `like`."""
    xp, groups = namespace(like), sums.tiles.shape[-1]
    first = (a.keys - a.queries + sums.lacking) // sums.size  # the group of the first query
    earlier = sum_before(xp, sums.tiles)
    far = torch.tril(earlier, first - 1).sum(-2)  # of the queries in groups behind each
    rest = groups * sums.size - sums.lacking - a.keys
    near = sum_before(xp, pad(sums.later, (sums.lacking, rest)).unflatten(-1, (groups, sums.size)))
    behind = (near + far[..., None]).flatten(-2).narrow(-1, sums.lacking, a.keys)
    found = ((behind + sums.crossing) * gain).reshape(*a.leading, a.keys)
    found = found if fade.kept is None else found.masked_fill(~fade.kept, 0.0)
    axes = summed_axes(tuple(found.shape), tuple(like.shape))
    return (found.sum(axes) if axes else found).reshape(like.shape).to(like.dtype)
