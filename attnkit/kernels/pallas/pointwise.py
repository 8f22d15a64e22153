"""Point-wise attention without its factor per row: o = h(s + shift) v on the keys first_i ≤ j < limit_i, and gradients.

A program has one item of the leading axes and a tile of its queries (of its keys for dk and dv), and loops over tiles of
the others. Arrays are (items, L or S, width) in multiples of the tiles, vectors (items, 1, L). Bounds of queries cover
causality, windows, lengths and null rows: what lies outside is replaced by 0 before and after h, and may hold NaN.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

Function = Callable[[Array], Array]
Ref = Any  # memory that a kernel reads and writes


def product(x: Array, y: Array) -> Array:
    """x y in float32."""
    return lax.dot(x, y, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def tile(ref: Ref, number: Any, size: int) -> Array:
    """The rows of a tile in float32."""
    return ref[0, pl.ds(number * size, size), :].astype(jnp.float32)


def strip(ref: Ref, number: Any, size: int) -> Array:
    """The entries of a vector that belong to a tile."""
    return ref[0, 0, pl.ds(number * size, size)]


def seen(first: Array, limit: Array, number: Any, keys: int) -> Array:
    """Which keys of a tile the queries of a tile see."""
    j = number * keys + lax.broadcasted_iota(jnp.int32, (first.shape[0], keys), 1)
    return (j >= first[:, None]) & (j < limit[:, None])


def alive(x: Array, rows: Array) -> Array:
    """x with 0 in rows that are not wanted."""
    return jnp.where(rows[:, None], x, 0.0)


def pointwise(h: Function, s: Array, shift: Array, pairs: Array) -> Array:
    """h(s + shift), 0 on invisible pairs."""
    return jnp.where(pairs, h(jnp.where(pairs, s + shift[:, None], 0.0)), 0.0)


def forward(h: Function, keys: int, q: Ref, k: Ref, v: Ref, shift: Ref, first: Ref, limit: Ref, o: Ref) -> None:
    """o of a tile of queries; `q` holds scale·q."""
    lo, hi, queries = first[0, 0, :], limit[0, 0, :], q.shape[1]
    x = alive(tile(q, 0, queries), hi > lo)

    def add(number: Any, total: Array) -> Array:
        pairs = seen(lo, hi, number, keys)
        wanted = jnp.any(pairs, axis=0)
        s = product(x, alive(tile(k, number, keys), wanted).T)
        return total + product(pointwise(h, s, shift[0, 0, :], pairs), alive(tile(v, number, keys), wanted))

    start, stop = jnp.min(lo) // keys, pl.cdiv(jnp.max(hi), keys)
    o[0, :, :] = lax.fori_loop(start, stop, add, jnp.zeros(o.shape[1:], jnp.float32))


def gradient_of_queries(
    dh: Function, keys: int, q: Ref, k: Ref, v: Ref, do: Ref, shift: Ref, first: Ref, limit: Ref, dq: Ref
) -> None:
    """Σ_j ds_ij k_j of a tile of queries, ds = h'(s + shift)·(do vᵀ)."""
    lo, hi, queries = first[0, 0, :], limit[0, 0, :], q.shape[1]
    x, dy = alive(tile(q, 0, queries), hi > lo), alive(tile(do, 0, queries), hi > lo)

    def add(number: Any, total: Array) -> Array:
        pairs = seen(lo, hi, number, keys)
        wanted = jnp.any(pairs, axis=0)
        y = alive(tile(k, number, keys), wanted)
        du = product(dy, alive(tile(v, number, keys), wanted).T)
        return total + product(pointwise(dh, product(x, y.T), shift[0, 0, :], pairs) * du, y)

    start, stop = jnp.min(lo) // keys, pl.cdiv(jnp.max(hi), keys)
    dq[0, :, :] = lax.fori_loop(start, stop, add, jnp.zeros(dq.shape[1:], jnp.float32))


def gradients_of_keys(
    h: Function, dh: Function, queries: int, q: Ref, k: Ref, v: Ref, do: Ref, shift: Ref, first: Ref, limit: Ref,
    start: Ref, stop: Ref, dk: Ref, dv: Ref,
) -> None:  # fmt: skip
    """Σ_i ds_ij q_i and Σ_i u_ij do_i of a tile of keys, over the tiles of queries from `start` to `stop`."""
    keys, number = k.shape[1], pl.program_id(1)
    y, z = tile(k, 0, keys), tile(v, 0, keys)

    def add(at: Any, totals: tuple[Array, Array]) -> tuple[Array, Array]:
        lo, hi = strip(first, at, queries), strip(limit, at, queries)
        x, dy = alive(tile(q, at, queries), hi > lo), alive(tile(do, at, queries), hi > lo)
        pairs, by = seen(lo, hi, number, keys), strip(shift, at, queries)
        wanted = jnp.any(pairs, axis=0)
        s, du = product(x, alive(y, wanted).T), product(dy, alive(z, wanted).T)
        ds = pointwise(dh, s, by, pairs) * du
        return totals[0] + product(ds.T, x), totals[1] + product(pointwise(h, s, by, pairs).T, dy)

    zero = (jnp.zeros(dk.shape[1:], jnp.float32), jnp.zeros(dv.shape[1:], jnp.float32))
    dk[0, :, :], dv[0, :, :] = lax.fori_loop(start[0, 0, 0], stop[0, 0, 0], add, zero)
