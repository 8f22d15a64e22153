"""Few queries on torch tensors, as in decoding: memory and launches of the kernels that share out keys.

Which calls they serve, and in how many parts, follows from the plan and the device.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attnkit.backends.torch.triton import launch
from attnkit.backends.torch.triton.launch import Call, Group, Launch, View, view
from attnkit.kernels import predicted
from attnkit.kernels.plan import Plan, blocks_of

PROCESSORS = 132  # of a device that is not there, as in the interpreter
PACKED = 16  # rows whose products take less time than their keys need to come
AT_A_TIME = 32  # parts that a program of `combine` reads


class Shares(NamedTuple):
    """How the keys of a call are shared out: into how many parts, and the sizes of tiles."""

    parts: int
    sizes: dict[str, int]
    programs: int


def processors(device: torch.device) -> int:
    """The number of multiprocessors."""
    device = launch.device_of(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def reach(plan: Plan) -> int:
    """How many keys some query may see."""
    s = plan.limits
    stop = s.keys if s.right is None else min(s.keys, plan.layout.queries + s.right)
    return max(0, stop - max(0, 0 if s.left is None else -s.left))


def shares(q: Tensor, c: Call) -> Shares | None:
    """How the keys of a call are shared out; None for a call of other kernels."""
    from attnkit.kernels.triton import sizes

    a = c.plan.layout
    if c.edges_q is not None or c.distances:
        return None
    rows = a.groups * a.queries
    tile = sizes.decoding(q.dtype.itemsize * 8, a.d, a.e, launch.capability(q.device), a.queries, rows)
    if tile is None:
        return None
    tiles = a.kv_heads * a.items * blocks_of(rows, tile.ROWS)
    parts = sizes.parts(tile, tiles, reach(c.plan), processors(q.device))
    return Shares(parts, sizes.with_pairs(tile, launch.bytes_of_pairs(c))._asdict(), tiles * parts)


def room_for_parts(q: Tensor, c: Call, parts: int, *width: int) -> View:
    """Memory for one array of the parts of every query, as a view with the stride of parts at its end."""
    shape = (c.plan.layout.items, c.plan.layout.heads, c.plan.layout.queries, parts, *width)
    x = torch.empty(shape, dtype=torch.float32, device=q.device)
    items, heads, rows, part, *columns = x.stride()
    return (x, items, heads, rows, columns[0] if width else 0, part)


def parts_or(o: View, q: Tensor, c: Call, shared: Shares) -> View:
    """Memory for the parts of o, or o itself if there is one part."""
    if o is not None and shared.parts == 1:
        return (*o, 0)
    return room_for_parts(q, c, shared.parts, c.plan.layout.e)


class Normalised(NamedTuple):
    """What softmax leaves beside o: the numbers of rows, lse, and the parts of maxima and of Σ u."""

    stats: tuple[View, ...] | None = None
    lse: View = None
    tops: View = None
    totals: View = None


def combination(
    c: Call,
    shared: Shares,
    parts: View,
    o: View,
    beside: Normalised,
    WEIGH: object = None,
    rows: Group = (None, None, None),
) -> Launch:
    """The launch that adds up parts."""
    from attnkit.kernels.triton import decoding
    from attnkit.kernels.triton.sizes import padded

    a = c.plan.layout
    stats = None if beside.stats is None else (beside.stats[0], beside.stats[-1])
    views = (parts, beside.tops, beside.totals, o, stats, beside.lse, rows)
    arguments = (*views, c.plan.numbers.gain, a.queries, a.heads, shared.parts)
    constants = {"WEIGH": WEIGH, "e": a.e, "E": padded(a.e), "PARTS": min(AT_A_TIME, padded(shared.parts))}
    return Launch(decoding.combine, a.items * a.heads * a.queries, arguments, constants)


def pointwise_launches(q: Tensor, k: Tensor, v: Tensor, o: Tensor, c: Call) -> list[Launch] | None:
    """The launches for o of point-wise attention; None for a call of other kernels."""
    from attnkit.kernels.triton import decoding

    a, shared = c.plan.layout, shares(q, c)
    if shared is None:
        return None
    rows, before = launch.rows_of(q, c, False)
    result = view(a, "o", o)
    parts = parts_or(result, q, c, shared)
    views = (view(a, "q", q), view(a, "k", k), view(a, "v", v), parts)
    arguments = (*views, *launch.kernel_tuples(c, rows), a.heads, a.groups, shared.parts)
    constants = launch.constants_of("forward", q, c, False, "H") | shared.sizes
    launches = [*before, Launch(decoding.pointwise_parts, shared.programs, arguments, constants)]
    if shared.parts > 1:
        launches.append(combination(c, shared, parts, result, Normalised()))
    return launches


def few(q: Tensor) -> bool:
    """Whether a call has so few queries that programs share out its keys."""
    from attnkit.kernels.triton.sizes import FEW

    return q.shape[-2] <= FEW


def is_faster(kind: str, q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool = False) -> bool:
    """Whether a call without gradients is predicted not to be slower; only heads of a group share what they read."""
    if not k.numel():
        return False
    heads = math.prod(q.shape[:-2]) // math.prod(k.shape[:-2])
    passes = blocks_of(heads * q.shape[-2], PACKED) if enable_gqa else heads
    return predicted.takes_once(kind, q.dtype.itemsize, k.numel() + v.numel(), max(passes, 1))
