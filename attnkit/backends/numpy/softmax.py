"""Softmax attention on a block of scores that is overwritten. The formulas are those of `attnkit.ops.softmax`."""

from typing import NamedTuple

import numpy as np

from attnkit._core import blocks, quadratic
from attnkit._core.mask import Rows
from attnkit._core.typing import Namespace
from attnkit.backends import in_place
from attnkit.backends.in_place import Prepared, Workspace
from attnkit.backends.numpy.workspace import above

Array = np.ndarray


class Row(NamedTuple):
    """exp(s - m) in the memory of the scores, m, and its sum Z; m = Z = 0 on rows without a finite visible score."""

    u: Array
    m: Array
    z: Array

    @property
    def inverse(self) -> Array:
        """1/Z, and 1 where Z is 0."""
        return 1 / np.where(self.z == 0, self.z.dtype.type(1), self.z)


def forbidden(p: Prepared, s: Array) -> Array:
    """s with -inf on invisible pairs."""
    if p.edge is not None:
        beside = s[..., p.edge :]
        np.copyto(beside, -np.inf, where=above(beside))
        return s
    if p.a.pairs is None:
        return s
    if not in_place.fits(p.a.pairs, s):
        return np.where(p.a.pairs, s, s.dtype.type(-np.inf))
    np.copyto(s, -np.inf, where=~p.a.pairs)
    return s


def rows_of(work: Workspace, p: Prepared) -> Row:
    """The exponentials of a block."""
    s = forbidden(p, in_place.scores(work, p.a))
    m = np.max(s, axis=-1, keepdims=True)
    m[m == -np.inf] = 0
    s -= m
    np.exp(s, out=s)
    return Row(s, m, np.sum(s, axis=-1, keepdims=True))


def forward_block(work: Workspace, xp: Namespace, c: blocks.Call, rows: Rows) -> tuple[Array, Array]:
    """o and lse of a block, in the compute dtype."""
    p = in_place.prepared(work, xp, c, rows)
    row = rows_of(work, p)
    with np.errstate(divide="ignore"):
        lse = row.m + np.log(row.z)
    return quadratic.output(xp, p.a, row.u, row.inverse), lse[..., 0]


def backward_block(
    work: Workspace, xp: Namespace, c: blocks.Call, rows: Rows, do: Array, dlse: Array | None = None
) -> dict[str, Array]:
    """Gradients of a block, in the compute dtype: ds = w ⊙ (dw - Σ_j w dw + dlse)."""
    p = in_place.prepared(work, xp, c, rows)
    a, row = p.a, rows_of(work, p)
    w = np.multiply(row.u, row.inverse, out=row.u)
    do = quadratic.masked_rows(xp, a, quadratic.cast(xp, do, a.dtype))
    dw = work.product("ds", do, xp.matrix_transpose(a.v))
    dropped = w
    if a.drop is not None:
        dw, dropped = dw * a.drop, w * a.drop
    along = np.sum(w * dw, axis=-1, keepdims=True)
    ds = dw - (along if dlse is None else along - dlse[..., None])
    ds = quadratic.masked(xp, a, ds * w)
    like = {"bias": None, **c.arrays}
    grads: dict[str, Array] = quadratic.score_gradients(xp, a, ds, like["q"], like["k"], like["bias"])
    return grads | {"v": quadratic.sum_to(xp, dropped.mT @ do, tuple(like["v"].shape))}
