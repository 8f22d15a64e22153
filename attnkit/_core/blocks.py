"""Quadratic attention in blocks of heads and queries, forward and backward: memory O((L + S)·d + block).

For libraries with writable arrays. The scores of a block stay in the cache, and under causality a block skips the keys
that none of its queries may see. The family says how scores become weights; this module knows no family.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from attnkit._core import quadratic, typing
from attnkit._core.dispatch import Kernel
from attnkit._core.family import Family
from attnkit._core.library import beside
from attnkit._core.mask import Rows
from attnkit._core.typing import AnyFunction, Array, Bindings, Keywords, Namespace, OfLibrary, Picks

LEARNED = tuple(name for name in typing.LEARNED if name not in ("alpha", "gamma"))
"""Numbers that blocks take as arrays; alpha of entmax is one per query, and ReLUFormer translates gamma."""
FURTHER = {"return_lse": "lse", "return_remainder": "the remainder"}
"""Outputs beside o, by the options that ask for them."""
SCORES = 1 << 18  # per block: 1 MiB in float32, about a core's cache
TRAILING = {
    "q": 2, "k": 2, "v": 2, "do": 2, "mask": 2, "bias": 2, "dropout_mask": 2, "alpha": 2, "query_mask": 1, "length": 1,
    "log_forget": 1, "kept": 1,
    "key_lengths": 0, **dict.fromkeys(LEARNED, 0),
}  # fmt: skip
"""The number of trailing axes of each argument."""
QUERY_AXIS = {
    "q": -2,
    "do": -2,
    "mask": -2,
    "bias": -2,
    "dropout_mask": -2,
    "alpha": -2,
    "query_mask": -1,
    "length": -1,
}
DIFFERENTIABLE = ("q", "k", "v", "bias", "alpha", "log_forget", *LEARNED)
KEY_AXIS = {"k": -2, "v": -2, "mask": -1, "bias": -1, "dropout_mask": -1, "log_forget": -1, "kept": -1}


class Block(NamedTuple):
    """Some of the leading axes of the output, some of its queries, and the keys before `keys`."""

    leading: Picks
    rows: Rows
    keys: int


class Call(NamedTuple):
    """A call: `arrays` holds its arrays, `common` and `own` its other options."""

    family: Family
    arrays: Mapping[str, OfLibrary]
    common: Bindings
    own: Bindings
    size: int = SCORES

    @property
    def leading(self) -> tuple[int, ...]:
        q, k, v = (self.arrays[name] for name in "qkv")
        return quadratic.leading_axes(q, k, v, self.common.get("enable_gqa", False))

    @property
    def groups(self) -> int:
        """Query heads that share a head of k and v."""
        return self.arrays["q"].shape[-3] // self.arrays["k"].shape[-3] if self.common.get("enable_gqa") else 1

    @property
    def lengths(self) -> tuple[int, int]:
        return self.arrays["q"].shape[-2], self.arrays["k"].shape[-2]


def call(family: Family, q: Array, k: Array, v: Array, options: Bindings, size: int = SCORES) -> Call:
    """The call of an op, without options that are None and outputs that blocks do not compute."""
    options = {name: x for name, x in options.items() if x is not None and name not in FURTHER}
    arguments = {"q": q, "k": k, "v": v, **options}
    common = {name: x for name, x in arguments.items() if name in family.common}
    common = common if family.seeing is None else family.seeing(**common)
    own = family.translated(q, {n: x for n, x in arguments.items() if n not in (*family.common, "q", "k", "v")})
    if isinstance(own.get("length"), str) and own["length"] == "all":
        own["length"] = max(k.shape[-2], 1)
    every = (*arguments.items(), *common.items(), *own.items())
    arrays = {name: x for name, x in every if hasattr(x, "ndim") and name in TRAILING}
    common, own = ({name: x for name, x in entries.items() if name not in arrays} for entries in (common, own))
    return Call(family, arrays, common, own, size)


def blocks(c: Call) -> Iterator[Block]:
    """Blocks of about `c.size` scores that together cover the output; blocks without keys are skipped."""
    queries, keys = c.lengths
    rows = min(max(1, c.size // max(1, keys)), queries)
    shared = len(c.leading) - 1 if c.groups > 1 else None
    axes = [axis for axis in range(len(c.leading)) if axis != shared]
    together = max(axes, key=lambda axis: c.leading[axis], default=None)
    several = max(1, c.size // max(1, rows * keys))
    for leading in _leading_picks(c.leading, together, several):
        for start in range(0, queries, max(1, rows)):
            stop = min(start + rows, queries)
            visible, total = keys, queries
            if c.common.get("causal") and not _two_alignments(c.common):
                total = stop
                visible = min(keys, stop if c.common["causal"] == "upper_left" else stop + keys - queries)
            if visible > 0:
                yield Block(leading, Rows(start, stop, total), visible)


def _two_alignments(common: Bindings) -> bool:
    """Whether causality is aligned with the first tokens and the window with the last: no slice of keys fits both."""
    return common.get("causal") == "upper_left" and "window" in common


def _leading_picks(shape: tuple[int, ...], together: int | None, several: int) -> Iterator[Picks]:
    """Every item of the leading axes, `several` at a time along the axis `together`."""
    if not shape:
        yield ()
        return
    ranges: list[list[int | slice]] = [list(range(size)) for size in shape]
    if together is not None:
        size = shape[together]
        ranges[together] = [slice(at, min(at + several, size)) for at in range(0, size, several)]
    for number in range(math.prod(len(choices) for choices in ranges)):
        picks = []
        for choices in reversed(ranges):
            number, at = divmod(number, len(choices))
            picks.append(choices[at])
        yield tuple(reversed(picks))


def picks(c: Call, name: str, x: Array, block: Block, *, prefix: bool) -> Picks:
    """The index of the part of argument `name` that a block needs; an axis of size 1 serves every block.

    `prefix` includes the queries before the block, because `quadratic.prepare` counts positions from the first one.
    """
    trailing = min(TRAILING[name], x.ndim)
    own = x.ndim - trailing
    index: list[int | slice] = []
    for axis, pick in zip(range(own), block.leading[len(block.leading) - own :], strict=True):
        if x.shape[axis] == 1:
            index.append(0 if isinstance(pick, int) else slice(0, 1))
        elif name in ("k", "v") and axis == own - 1 and c.groups > 1:
            assert isinstance(pick, int)
            index.append(pick // c.groups)
        else:
            index.append(pick)
    index += [slice(None)] * trailing
    for axes, part in ((QUERY_AXIS, _of_queries(block.rows, prefix)), (KEY_AXIS, slice(0, block.keys))):
        at = axes.get(name, 0)
        if at and x.ndim >= -at and x.shape[at] != 1:
            index[at] = part
    return tuple(index)


def _of_queries(rows: Rows, prefix: bool) -> slice:
    return slice(0, rows.total) if prefix else slice(rows.start, rows.stop)


def part(c: Call, block: Block) -> Call:
    """The call restricted to a block: fewer leading axes, and no heads that share keys."""
    arrays = {name: x[picks(c, name, x, block, prefix=True)] for name, x in c.arrays.items()}
    common = {name: x for name, x in c.common.items() if name != "enable_gqa"}
    common["part"] = (c.leading, block.leading)
    return c._replace(arrays=arrays, common=common)


Scored = tuple[quadratic.Inputs, Array]


def inputs_and_scores(xp: Namespace, c: Call, rows: Rows) -> Scored:
    """Inputs and scores of a part."""
    options = {**c.common, **{name: x for name, x in c.arrays.items() if name in c.family.common}}
    q, k, v = (c.arrays[name] for name in "qkv")
    return c.family.scored(xp, c.family.prepare(xp, q, k, v, rows=rows, **options), options_of(c))


def options_of(c: Call) -> Keywords:
    """The family's own options of a part, arrays among them."""
    common = {*c.family.common, "q", "k", "v", "do"}
    return {**c.own, **{name: x for name, x in c.arrays.items() if name not in common}}


def output_of(xp: Namespace, c: Call, scored: Scored) -> OfLibrary:
    """o of a part from its inputs and scores, in the compute dtype."""
    a, s = scored
    return quadratic.output(xp, a, *c.family.weigh(xp, s, a, **options_of(c)))


def gradients_of(xp: Namespace, c: Call, scored: Scored, do: Array) -> dict[str, OfLibrary]:
    """Gradients of a part, in the compute dtype."""
    a, s = scored
    return c.family.gradients(xp, a, s, {"bias": None, **c.arrays}, do, options_of(c))


def forward(xp: Namespace, c: Call) -> OfLibrary:
    """o (..., L, e) in the dtype of q."""
    q, v = c.arrays["q"], c.arrays["v"]
    o: OfLibrary = xp.zeros((*c.leading, q.shape[-2], v.shape[-1]), dtype=q.dtype, **beside(q))
    for block in blocks(c):
        p = part(c, block)
        o[_queries_of(block)] = quadratic.cast(xp, output_of(xp, p, inputs_and_scores(xp, p, block.rows)), o.dtype)
    return o


def backward(xp: Namespace, c: Call, do: Array, names: tuple[str, ...]) -> dict[str, OfLibrary]:
    """Gradients of the arguments `names` in their dtypes, added up over the blocks in the compute dtype."""
    dtype = quadratic.compute_dtype(xp, c.arrays["q"])
    place = beside(c.arrays["q"])
    total: dict[str, OfLibrary] = {name: xp.zeros(tuple(c.arrays[name].shape), dtype=dtype, **place) for name in names}
    for block in blocks(c):
        p = part(c, block)
        grads = gradients_of(xp, p, inputs_and_scores(xp, p, block.rows), do[_queries_of(block)])
        for name in names:
            total[name][picks(c, name, total[name], block, prefix=False)] += grads[name]
    return {name: quadratic.cast(xp, total[name], c.arrays[name].dtype) for name in names}


def _queries_of(block: Block) -> Picks:
    """Where the output of a block lies."""
    return (*block.leading, slice(block.rows.start, block.rows.stop))


# ---------------------------------------------------------------------------------------------- what dispatch asks

ENOUGH = 1 << 22
"""Scores of a call from which blocks come before the generic body: about where both take the same time."""


def unsupported(q: Array, k: Array, v: Array, *cotangents: Array, **options: object) -> str | None:
    """Why a call, or the gradient of one, is not served in blocks."""
    for name, output in FURTHER.items():
        if options.get(name):
            return f"{output} is served by the generic implementation"
    if any(x is not None for x in cotangents[1:]):
        return "gradients of a second output are served by the generic implementation"
    if cotangents and cotangents[0] is None:
        return "no cotangent of the output was given"
    return None


def is_faster(q: Array, k: Array, *rest: Array, **options: object) -> bool:
    """Whether there are enough scores."""
    return max(math.prod(q.shape[:-1]) * k.shape[-2], math.prod(k.shape[:-1]) * q.shape[-2]) >= ENOUGH


def kernel(
    call: AnyFunction,
    unsupported: Callable[..., str | None] = unsupported,
    is_faster: Callable[..., bool] = is_faster,
) -> Kernel:
    """A library's implementation in blocks of an op, or of its gradients."""
    return Kernel("blocked", call, unsupported, is_faster, learned=LEARNED)
