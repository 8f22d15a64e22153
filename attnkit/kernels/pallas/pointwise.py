"""Point-wise attention without its factor per row: o_i = Σ_j h(scale·q_i·k_j + shift_i) v_j, first_i ≤ j < limit_i.

A program processes one item of the leading axes and a tile of its queries (of its keys for dk and dv), and loops over
tiles of the others. Arrays are (items, L or S, width) padded to multiples of the tiles, vectors (items, 1, L). The
bounds of queries encode causality, windows, lengths and null rows: everything outside is replaced by 0 before and after
h, and may be NaN.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

Ref = Any  # memory that a kernel reads and writes


class Score(NamedTuple):
    """How a product becomes a weight, and the derivative of h."""

    h: Callable[[Array], Array]
    derivative: Callable[[Array], Array]
    scale: float


class Rows(NamedTuple):
    """The vectors of a tile of queries."""

    shift: Array
    first: Array
    limit: Array

    def masked(self, x: Array) -> Array:
        """x with 0 in rows that see nothing."""
        return mask_rows(x, self.limit > self.first)

    def sees(self, number: Any, keys: int) -> Array:
        """The keys of a tile that they see."""
        j = number * keys + lax.broadcasted_iota(jnp.int32, (self.first.shape[0], keys), 1)
        return (j >= self.first[:, None]) & (j < self.limit[:, None])

    def weights(self, function: Callable[[Array], Array], s: Array, pairs: Array) -> Array:
        """function(s + shift), 0 on invisible pairs."""
        return jnp.where(pairs, function(jnp.where(pairs, s + self.shift[:, None], 0.0)), 0.0)


def mask_rows(x: Array, mask: Array) -> Array:
    """x with 0 where `mask` is False."""
    return jnp.where(mask[:, None], x, 0.0)


def product(x: Array, y: Array) -> Array:
    """x y in float32."""
    return lax.dot(x, y, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def tile(ref: Ref, number: Any, size: int) -> Array:
    """The tokens of a tile in float32."""
    return ref[0, pl.ds(number * size, size), :].astype(jnp.float32)


def rows_of(shift: Ref, first: Ref, limit: Ref, number: Any, size: int) -> Rows:
    """The vectors of a tile of queries."""
    return Rows(*(ref[0, 0, pl.ds(number * size, size)] for ref in (shift, first, limit)))


def over_keys(rows: Rows, keys: int, body: Callable[[Any, Array], Array], total: Array) -> Array:
    """body(tile of keys, total) for the tiles that a tile of queries may see."""
    return lax.fori_loop(jnp.min(rows.first) // keys, pl.cdiv(jnp.max(rows.limit), keys), body, total)


def any_query(pairs: Array) -> Array:
    """Whether any query sees a key. Pallas does not reduce truth values on GPUs."""
    return jnp.max(pairs.astype(jnp.int32), axis=0) > 0


def forward(score: Score, keys: int, q: Ref, k: Ref, v: Ref, shift: Ref, first: Ref, limit: Ref, o: Ref) -> None:
    """o of a tile of queries."""
    rows = rows_of(shift, first, limit, 0, q.shape[1])
    x = rows.masked(tile(q, 0, q.shape[1]))

    def add(number: Any, total: Array) -> Array:
        pairs = rows.sees(number, keys)
        seen = any_query(pairs)
        s = product(x, mask_rows(tile(k, number, keys), seen).T) * score.scale
        return total + product(rows.weights(score.h, s, pairs), mask_rows(tile(v, number, keys), seen))

    o[0, :, :] = over_keys(rows, keys, add, jnp.zeros(o.shape[1:], jnp.float32))


def gradient_of_queries(
    score: Score, keys: int, q: Ref, k: Ref, v: Ref, do: Ref, shift: Ref, first: Ref, limit: Ref, dq: Ref
) -> None:
    """Σ_j ds_ij k_j of a tile of queries, ds = h'·(do vᵀ)."""
    rows = rows_of(shift, first, limit, 0, q.shape[1])
    x, dy = rows.masked(tile(q, 0, q.shape[1])), rows.masked(tile(do, 0, q.shape[1]))

    def add(number: Any, total: Array) -> Array:
        pairs = rows.sees(number, keys)
        seen = any_query(pairs)
        y, z = mask_rows(tile(k, number, keys), seen), mask_rows(tile(v, number, keys), seen)
        slope = rows.weights(score.derivative, product(x, y.T) * score.scale, pairs)
        return total + product(slope * product(dy, z.T), y)

    dq[0, :, :] = over_keys(rows, keys, add, jnp.zeros(dq.shape[1:], jnp.float32))


def gradients_of_keys(
    score: Score, queries: int, q: Ref, k: Ref, v: Ref, do: Ref, shift: Ref, first: Ref, limit: Ref, start: Ref,
    stop: Ref, dk: Ref, dv: Ref,
) -> None:  # fmt: skip
    """Σ_i ds_ij q_i and Σ_i u_ij do_i of a tile of keys, from the tiles of queries `start` to `stop`."""
    keys, number = k.shape[1], pl.program_id(1)
    y, z = tile(k, 0, keys), tile(v, 0, keys)

    def add(at: Any, totals: tuple[Array, Array]) -> tuple[Array, Array]:
        rows = rows_of(shift, first, limit, at, queries)
        x, dy = rows.masked(tile(q, at, queries)), rows.masked(tile(do, at, queries))
        pairs = rows.sees(number, keys)
        seen = any_query(pairs)
        s = product(x, mask_rows(y, seen).T) * score.scale
        ds = rows.weights(score.derivative, s, pairs) * product(dy, mask_rows(z, seen).T)
        return totals[0] + product(ds.T, x), totals[1] + product(rows.weights(score.h, s, pairs).T, dy)

    zero = (jnp.zeros(dk.shape[1:], jnp.float32), jnp.zeros(dv.shape[1:], jnp.float32))
    dk[0, :, :], dv[0, :, :] = lax.fori_loop(start[0, 0, 0], stop[0, 0, 0], add, zero)
