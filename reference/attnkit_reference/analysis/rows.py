"""How attention weights are spread over keys: concentration, ranks, exact zeros."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np

from attnkit_reference._check import Array, as_float, boolean, broadcast, number
from attnkit_reference._op import refuse_others
from attnkit_reference.lowrank.newton import whole

SLACK = 1e-9  # of n: rounding in percent·n/100 that does not count as one more key


class Sparsity(NamedTuple):
    """Shares in 0..1 but for `active`.

    zeros: visible pairs whose weight is exactly 0; null: rows without a visible key; dead: rows that see keys but have
    only zero weights; active: the mean number of keys with weight over the remaining, valid rows.
    """

    zeros: np.float64
    null: np.float64
    dead: np.float64
    active: np.float64


@refuse_others
def concentration(
    weights: Array, percent: float, visible: Array | None = None, *, fractional: bool = False
) -> np.float64:
    """Mean over valid rows of the share of a row's sum that its k largest weights hold.

    k = max(1, ceil(t - 1e-9 n)), t = percent·n/100, n the number of visible keys; `fractional`: the floor(t) largest
    and the part t - floor(t) of the next. weights (..., L, S), not negative, need not sum to 1; visible: boolean,
    broadcast to weights. Rows whose weights are all 0 do not count; 0 if there is no other. percent in (0, 100].
    Source: Shen et al. 2023 §3.4, Figures 2 and 4.
    """
    w, n, valid = _rows("concentration", weights, visible)
    return _mean(_share_of_largest(w, n, _percent("concentration", percent), fractional), valid)


@refuse_others
def concentration_curve(
    weights: Array, percents: Sequence[float], visible: Array | None = None, *, fractional: bool = False
) -> Array:
    """`concentration` at each of `percents`, (len(percents),)."""
    op = "concentration_curve"
    w, n, valid = _rows(op, weights, visible)
    values = [_mean(_share_of_largest(w, n, _percent(op, percent), fractional), valid) for percent in percents]
    return np.array(values, dtype=np.float64)


@refuse_others
def mass_at_rank(weights: Array, rank: int, visible: Array | None = None) -> np.float64:
    """Mean over valid rows of the share of a row's sum held by its rank-th largest weight (1 = the largest).

    A row that sees fewer keys gives 0. weights and visible as in `concentration`.
    """
    w, _, valid = _rows("mass_at_rank", weights, visible)
    rank = whole("mass_at_rank", "rank", rank, 1)
    if rank > w.shape[-1]:
        return np.float64(0.0)
    return _mean(_descending(w)[..., rank - 1] / _row_sum(w), valid)


@refuse_others
def sparsity(weights: Array, visible: Array | None = None) -> Sparsity:
    """Exact zeros among the visible pairs, rows that are null or dead, keys that get weight: see `Sparsity`.

    weights (..., L, S) may be negative; visible: boolean, broadcast to weights. Without rows, or pairs, 0.
    """
    w, n, valid = _rows("sparsity", weights, visible, signed=True)
    active = (w != 0).sum(axis=-1)
    rows = max(n.size, 1)
    return Sparsity(
        np.float64((n - active).sum() / max(n.sum(), 1)),
        np.float64((n == 0).sum() / rows),
        np.float64(((n > 0) & ~valid).sum() / rows),
        _mean(active, valid),
    )


def _rows(op: str, weights: Array, visible: Array | None, signed: bool = False) -> tuple[Array, Array, Array]:
    """Weights with 0 where invisible, the number of visible keys and whether any of them has weight, (...)."""
    w = as_float(op, "weights", weights)
    if w.ndim < 1:
        raise ValueError(f"{op}: weights; expected at least one axis, (..., S), got {w.shape}")
    mask = np.ones(w.shape, dtype=bool)
    if visible is not None:
        mask = broadcast(op, "visible", boolean(op, "visible", visible), w.shape)
    w = np.where(mask, w, 0.0)
    if not signed and np.any(w < 0):
        raise ValueError(f"{op}: weights; expected weights that are not negative, got {w.min()}")
    return w, mask.sum(axis=-1), np.any(w != 0, axis=-1)


def _share_of_largest(w: Array, n: Array, percent: float, fractional: bool) -> Array:
    t = percent * n / 100.0
    full = np.floor(t) if fractional else np.maximum(1.0, np.ceil(t - SLACK * n))
    part = (t - full)[..., None] if fractional else 0.0
    place = np.arange(w.shape[-1])
    share = np.where(place < full[..., None], 1.0, np.where(place == full[..., None], part, 0.0))
    return cast(Array, (_descending(w) * share).sum(axis=-1) / _row_sum(w))


def _descending(w: Array) -> Array:
    return -np.sort(-w, axis=-1)


def _row_sum(w: Array) -> Array:
    """Σw, 1 in rows of zeros."""
    total = w.sum(axis=-1)
    return np.where(np.any(w != 0, axis=-1), total, 1.0)


def _mean(x: Array, valid: Array) -> np.float64:
    return np.float64(np.where(valid, x, 0.0).sum() / max(int(valid.sum()), 1))


def _percent(op: str, percent: object) -> float:
    value = number(op, "percent", percent)
    if not 0 < value <= 100:
        raise ValueError(f"{op}: percent; expected a number in (0, 100], got {percent!r}")
    return value
