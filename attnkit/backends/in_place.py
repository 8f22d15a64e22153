"""Point-wise attention on a block of scores that is overwritten: fewer passes over memory than the generic body.

For libraries whose arrays can be written to; a `Library` says how. The formulas are those of
`attnkit.ops.pointwise`; the factor gain·n^-alpha multiplies rows of o and of do, never the block. Blocks use the same
memory one after the other, and under causality alone only the columns beside the diagonal are looked at again.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from attnkit._core import blocks, quadratic
from attnkit._core.activations import ACTIVATIONS
from attnkit._core.mask import Rows, log, positions, visibility_of
from attnkit._core.typing import Array, Namespace
from attnkit.ops import pointwise

SCORES = 1 << 21  # of a block: products of several heads at a time keep all cores busy
QUERIES, CAUSAL_QUERIES = 512, 256  # of a block; causality hides more of a higher one

Overwrite = Callable[[Array], Array]
Pull = Callable[[Array, Array], tuple[Array, Array]]


class Library(NamedTuple):
    """What a library has for arrays that may be overwritten.

    `overwrite` and `pull` hold those non-linearities that it has to full accuracy: h(s), and (h(s), h'(s)·ds). The
    others are evaluated as in the generic body.
    """

    empty: Callable[[int, Array], Array]  # a vector of that length like an array, with anything in it
    multiply: Callable[[Array, Array, Array], Array]  # the product of two arrays, in the third
    clear: Callable[[Array, Array], Array]  # an array with 0 where the second, a boolean one, says so
    clear_above: Callable[[Array], Array]  # with 0 on and above the diagonal of its last two axes
    overwrite: Mapping[str, Overwrite]
    pull: Mapping[str, Pull]


def fits(x: Array, into: Array) -> bool:
    """Whether x broadcasts to the shape of `into`."""
    return x.ndim <= into.ndim and all(n <= m for n, m in zip(x.shape[::-1], into.shape[::-1], strict=False))


class Workspace:
    """Memory of one call, by name."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.held: dict[str, Array] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Array) -> Array:
        """A contiguous array with anything in it."""
        size = math.prod(shape)
        if name not in self.held or self.held[name].shape[0] < size:
            self.held[name] = self.library.empty(size, like)
        return self.held[name][:size].reshape(shape)

    def product(self, name: str, x: Array, y: Array) -> Array:
        """x y, in this memory where no axis is broadcast."""
        if x.ndim > 3 or x.shape[:-2] != y.shape[:-2]:
            return x @ y
        return self.library.multiply(x, y, self.take(name, (*x.shape[:-1], y.shape[-1]), x))


class Prepared(NamedTuple):
    """Inputs of a block, and the first column behind the key that its first query stands at, where that is all."""

    a: quadratic.Inputs
    edge: int | None
    library: Library

    def hide(self, xp: Namespace, x: Array) -> Array:
        """x with 0 on invisible pairs, in place where no axis is missing."""
        if self.edge is not None:
            self.library.clear_above(x[..., self.edge :])
            return x
        if self.a.pairs is None or not fits(self.a.pairs, x):
            return quadratic.masked(xp, self.a, x)
        return self.library.clear(x, ~self.a.pairs)


def prepared(work: Workspace, xp: Namespace, c: blocks.Call, rows: Rows) -> Prepared:
    """The inputs of a block; with causality alone, without an array of what is visible."""
    options = {**c.common, **{name: x for name, x in c.arrays.items() if name in c.family.common}}
    q, k, v = (c.arrays[name] for name in "qkv")
    keys, causal = k.shape[-2], options.get("causal", False)
    first = rows.start + (0 if causal == "upper_left" else keys - rows.total)
    if not causal or first < 0 or visibility_of(options).masked:
        return Prepared(quadratic.prepare(xp, q, k, v, rows=rows, **options), None, work.library)
    a = quadratic.prepare(xp, q, k, v, rows=rows, **{**options, "causal": False})
    count = positions(xp, a.q, first + 1, first + 1 + rows.stop - rows.start)
    count = xp.astype(xp.where(count < keys, count, keys), a.dtype)
    return Prepared(a._replace(count=count[:, None]), first + 1, work.library)


def scores(work: Workspace, a: quadratic.Inputs) -> Array:
    """s = scale·q kᵀ + bias, in the memory of the call where no axis is missing."""
    s = work.product("s", a.q * a.scale, a.k.mT)
    if a.bias is None:
        return s
    if not fits(a.bias, s):
        return s + a.bias
    s += a.bias
    return s


def arguments(work: Workspace, xp: Namespace, a: quadratic.Inputs, own: Mapping[str, Any]) -> Array:
    """s + shift."""
    s, shift = scores(work, a), own["shift"]
    if isinstance(shift, str):
        length = log(xp, quadratic.length_of_rows(xp, a, own["length"]))
        if hasattr(length, "ndim") and not fits(length, s):
            return s - length
        s -= length
    elif shift:
        s += shift
    return s


def unscaled(work: Workspace, xp: Namespace, a: quadratic.Inputs, own: Mapping[str, Any]) -> Array:
    """u = h(s + shift)."""
    s, name = arguments(work, xp, a, own), own["activation"]
    overwrite = work.library.overwrite
    return overwrite[name](s) if name in overwrite else ACTIVATIONS[name].h(xp, s)


def pulled(work: Workspace, xp: Namespace, name: str, s: Array, ds: Array) -> tuple[Array, Array]:
    """h(s) and h'(s)·ds."""
    if name in work.library.pull and ds.shape == s.shape:
        return work.library.pull[name](s, ds)
    return ACTIVATIONS[name].h(xp, s), ds * ACTIVATIONS[name].derivative(xp, s)


def factor(xp: Namespace, a: quadratic.Inputs, own: Mapping[str, Any]) -> Any:
    """gain·n^-alpha."""
    return pointwise.row_factor(xp, a, own["alpha"], own["gain"], own["length"])


def settings(c: blocks.Call) -> dict[str, Any]:
    """The options of pointwise_attention."""
    defaults = {"activation": "relu", "alpha": 1.0, "gain": 1.0, "length": "visible", "shift": 0.0}
    return defaults | blocks.options_of(c)


def sized(c: blocks.Call) -> blocks.Call:
    """The call in blocks of the size that is fastest here."""
    return c._replace(size=SCORES, queries=CAUSAL_QUERIES if c.common.get("causal") else QUERIES)


def forward_block(work: Workspace, xp: Namespace, c: blocks.Call, rows: Rows) -> Array:
    """o of a block, in the compute dtype."""
    p, own = prepared(work, xp, c, rows), settings(c)
    return quadratic.output(xp, p.a, p.hide(xp, unscaled(work, xp, p.a, own)), factor(xp, p.a, own))


def backward_block(work: Workspace, xp: Namespace, c: blocks.Call, rows: Rows, do: Array) -> dict[str, Array]:
    """Gradients of a block, in the compute dtype: five products of matrices."""
    p, own = prepared(work, xp, c, rows), settings(c)
    a, s = p.a, arguments(work, xp, p.a, own)
    do = quadratic.masked_rows(xp, a, quadratic.cast(xp, do, a.dtype)) * factor(xp, a, own)
    du = work.product("ds", do, xp.matrix_transpose(a.v))
    u, ds = pulled(work, xp, own["activation"], s, du if a.drop is None else du * a.drop)
    u, ds = p.hide(xp, u), p.hide(xp, ds)
    dropped = u if a.drop is None else u * a.drop
    like = {"bias": None, **c.arrays}
    grads: dict[str, Array] = quadratic.score_gradients(xp, a, ds, like["q"], like["k"], like["bias"])
    return grads | {"v": quadratic.sum_to(xp, dropped.mT @ do, tuple(like["v"].shape))}
