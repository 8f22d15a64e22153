"""How attention weights are spread over keys: concentration, ranks, exact zeros; at once or in blocks of queries."""

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from attnkit._core import check, quadratic
from attnkit._core.dispatch import namespace
from attnkit._core.family import RECORDS
from attnkit._core.library import beside
from attnkit._core.mask import positions
from attnkit._core.special import floats, needs_values, promoted, promoting, readable, without_autocast
from attnkit._core.tokens import whole
from attnkit._core.typing import A, AnyFunction, Array, Bindings, DType, FullName, Keywords, Namespace, OfLibrary
from attnkit.ops import statistics

_BLOCK = 2**20  # weights in a block: 4 MiB in float32, a few times that while they are sorted
_CACHE_SIZE = 64  # tables that are cached
_SLACK = 1e-9  # of n: rounding in percent·n/100 that does not count as one more key


class Sparsity(NamedTuple):
    """Scalars in the compute dtype, shares in 0..1 but for `active`.

    `zeros`: visible pairs whose weight is exactly 0 · `null`: rows without a visible key · `dead`: rows that see keys
    and give all of them 0 · `active`: the mean number of keys with weight over the remaining, valid rows.
    """

    zeros: Array  # ()
    null: Array  # ()
    dead: Array  # ()
    active: Array  # ()


Tables = dict[Hashable, tuple[Array, Array]]


class _Rows(NamedTuple):
    """Weights (..., S) in the compute dtype, 0 where invisible, and facts about their rows."""

    xp: Namespace
    w: Array  # (..., S)
    n: int | Array  # visible keys: a number, or integers (...)
    valid: Array  # (...): some key has weight
    negative: Array | None  # (): whether there is a negative weight, when it could not be read


def _rows_of(op: str, weights: Array, visible: Array | None, signed: bool = False) -> _Rows:
    """Checked weights; ValueError for negative ones unless `signed`."""
    check.float_array(op, "weights", weights)
    if weights.ndim < 1:
        check.wrong_shape(op, "weights", weights, "at least one axis, (..., S)")
    xp = namespace(weights)
    w = quadratic.cast(xp, weights, quadratic.compute_dtype(xp, weights))
    n: int | Array = weights.shape[-1]
    if visible is not None:
        check.boolean_array(op, "visible", visible, "weights", weights, tuple(weights.shape), "the shape of weights")
        visible = xp.broadcast_to(visible, w.shape)
        w, n = xp.where(visible, w, 0.0), xp.sum(xp.astype(visible, xp.int32), axis=-1)
    negative = None if signed else xp.any(w < 0)
    if negative is not None and readable(weights):
        if bool(negative):
            raise ValueError(f"{op}: weights must not be negative; got {float(xp.min(w))}")
        negative = None
    return _Rows(xp, w, n, xp.any(w != 0, axis=-1), negative)


def _descending(rows: _Rows) -> tuple[Array, Array]:
    """The weights of each row in descending order, and their sum, 1 in rows of zeros: (..., S) and (...)."""
    ordered = rows.xp.sort(rows.w, axis=-1, descending=True)
    total = rows.xp.sum(ordered, axis=-1)
    return ordered, rows.xp.where(rows.valid, total, 1.0)


def _count(rows: _Rows, rows_that: Array) -> Array:
    return rows.xp.sum(rows.xp.astype(rows_that, rows.w.dtype))


def _mean(rows: _Rows, x: Array) -> OfLibrary:
    """Mean over the valid rows of an x that is 0 on others; 0 without one; nan if there are negative weights."""
    count = _count(rows, rows.valid)
    mean = rows.xp.sum(x) / rows.xp.where(count > 0, count, 1.0)
    return mean if rows.negative is None else rows.xp.where(rows.negative, math.nan, mean)


# ---------------------------------------------------------------------------------------------- the k largest


def _largest(n: int, percent: float, fractional: bool) -> tuple[int, float]:
    """How many of n keys `percent` is: (k, 0.0), or whole keys and the fraction of the next."""
    t = percent * n / 100.0
    if fractional:
        return math.floor(t), t - math.floor(t)
    return max(1, math.ceil(t - _SLACK * n)), 0.0


def _table(rows: _Rows, dtype: DType, percent: float, fractional: bool, cache: Tables) -> tuple[Array, Array]:
    """`_largest` for 0 .. S visible keys, as (k, part); float32 is too inexact to round percent·n/100 up.

    `cache` holds the tables of earlier calls, which would otherwise be sent to the device for each block.
    """
    xp, keys = rows.xp, rows.w.shape[-1]
    device = beside(rows.w)
    name = (keys, percent, fractional, rows.w.dtype, str(device))
    if name not in cache:
        if len(cache) >= _CACHE_SIZE:
            cache.clear()
        counts, parts = zip(*(_largest(n, percent, fractional) for n in range(keys + 1)), strict=True)
        cache[name] = (xp.asarray(counts, dtype=dtype, **device), xp.asarray(parts, dtype=rows.w.dtype, **device))
    return cache[name]


def _looked_up(xp: Namespace, table: Array, n: Array) -> OfLibrary:
    """table[n], (..., 1)."""
    return xp.reshape(xp.take(table, xp.reshape(n, (-1,)), axis=0), (*n.shape, 1))


def _taken(rows: _Rows, percent: float, fractional: bool, cache: Tables) -> Array:
    """The factor of each rank in descending order: 1, the fraction, or 0."""
    xp, place = rows.xp, positions(rows.xp, rows.w, 0, rows.w.shape[-1])
    if isinstance(rows.n, int):
        full, part = _largest(rows.n, percent, fractional)
    else:
        full, part = (_looked_up(xp, table, rows.n) for table in _table(rows, place.dtype, percent, fractional, cache))
    one = xp.astype(place < full, rows.w.dtype)
    return one + xp.astype(place == full, rows.w.dtype) * part if fractional else one


def _percents(op: str, percents: Iterable[float]) -> tuple[float, ...]:
    values = tuple(check.number(op, "percent", percent) for percent in percents)
    for value in values:
        if not 0 < value <= 100:
            raise ValueError(f"{op}: percent must lie in (0, 100]; got {value}")
    return values


def _shares(rows: _Rows, percents: Sequence[float], fractional: bool, cache: Tables | None = None) -> list[Array]:
    """For each percent the share of the row sum, (...); 0 on rows that are not valid."""
    ordered, total = _descending(rows)
    cache = {} if cache is None else cache
    return [rows.xp.sum(ordered * _taken(rows, percent, fractional, cache), axis=-1) / total for percent in percents]


@promoted
def concentration(weights: A, percent: float, visible: Array | None = None, *, fractional: bool = False) -> A:
    """Mean over valid rows of the share of a row's sum that its k largest weights hold.

    With n visible keys and t = percent·n/100: k = max(1, ceil(t - 1e-9·n)); with `fractional` the floor(t) largest and
    the part t - floor(t) of the next (Shen et al. 2023 §3.4, Figures 2 and 4; the rounding is ours, they give none).

    Args:
        weights: (..., L, S), not negative; rows need not sum to 1.
        percent: in (0, 100].
        visible: boolean, broadcast to weights; False = not there. None = all visible.
        fractional: whether a fraction of a key may count.

    Returns:
        A scalar in the compute dtype. Rows whose weights are all 0 do not count; 0 if there is no other.

    Raises:
        ValueError: negative weights, shapes, values. While a program is traced (jax.jit) values cannot be read: the
            result is nan where a weight is negative.
        TypeError: dtypes, libraries, devices.
    """
    percents = _percents("concentration", (percent,))
    rows = _rows_of("concentration", weights, visible)
    return _mean(rows, _shares(rows, percents, fractional)[0])


@promoted
def concentration_curve(
    weights: A, percents: Sequence[float], visible: Array | None = None, *, fractional: bool = False
) -> A:
    """`concentration` at each of `percents`, (len(percents),), from one sort."""
    percents = _percents("concentration_curve", percents)
    rows = _rows_of("concentration_curve", weights, visible)
    curve = rows.xp.stack([_mean(rows, share) for share in _shares(rows, percents, fractional)])
    return quadratic.cast_for(weights, rows.xp, curve, rows.w.dtype)


@promoted
def mass_at_rank(weights: A, rank: int, visible: Array | None = None) -> A:
    """Mean over valid rows of the share of a row's sum held by its rank-th largest weight (1 = the largest).

    A row that sees fewer than `rank` keys gives 0. Otherwise as `concentration`.
    """
    whole("mass_at_rank", "rank", rank, 1)
    rows = _rows_of("mass_at_rank", weights, visible)
    if rank > rows.w.shape[-1]:
        return _mean(rows, rows.xp.zeros_like(rows.xp.sum(rows.w, axis=-1)))
    ordered, total = _descending(rows)
    return _mean(rows, ordered[..., rank - 1] / total)


@promoted
def sparsity(weights: Array, visible: Array | None = None) -> Sparsity:
    """Exact zeros among the visible pairs, rows that are null or dead, keys that get weight: see `Sparsity`.

    weights (..., L, S) may be negative; `visible` as in `concentration`. Without rows, or visible pairs, the shares
    are 0. `row_statistics` gives the same counts (`nonzero`, `visible`) without an (L, S) array.
    """
    rows = _rows_of("sparsity", weights, visible, signed=True)
    xp, dtype = rows.xp, rows.w.dtype
    active = xp.sum(xp.astype(rows.w != 0, dtype), axis=-1)
    n = xp.full_like(active, rows.n) if isinstance(rows.n, int) else xp.astype(rows.n, dtype)
    pairs, number = xp.sum(n), max(math.prod(n.shape), 1)
    return Sparsity(
        xp.sum(n - active) / xp.where(pairs > 0, pairs, 1.0),
        _count(rows, n == 0) / number,
        _count(rows, (n > 0) & (active == 0)) / number,
        _mean(rows, active),
    )


# ---------------------------------------------------------------------------------------------- in blocks


def weight_blocks(
    op: "FullName | AnyFunction", q: Array, k: Array, **params: object
) -> Iterator[tuple[Array, Array | None]]:
    """Blocks of queries: (weights (..., block, S) in the compute dtype, visible pairs or None = all).

    Feeds the analyses of this module without an (L, S) array in memory. Arguments and errors as in `row_statistics`.

    >>> import numpy as np
    >>> from attnkit import analysis
    >>> curve, q = analysis.Concentration([1, 10, 50]), np.random.default_rng(0).standard_normal((300, 8))
    >>> for weights, visible in analysis.weight_blocks("softmax_attention", q, q, causal=True):
    ...     curve.update(weights, visible)
    >>> [round(share, 2) for share in curve.value]
    [0.2, 0.45, 0.84]
    """
    call = statistics._call("weight_blocks", op, {"q": q, "k": k}, ("total",), params)
    return _blocks(call, q, k)


def _blocks(call: statistics._Call, q: Array, k: Array) -> Iterator[tuple[Array, Array | None]]:
    for rows in statistics._tiles(q, k, _BLOCK):
        with without_autocast(q), promoting(q):
            inputs = call.family.prepare(call.xp, q, k, rows=rows, **call.common)
            a, s = call.family.scored(call.xp, inputs, call.own)
            u, r = call.family.weigh(call.xp, s, a, **call.own)
            w = u * r
        yield w, a.pairs


def served(op: "FullName | AnyFunction", options: Bindings) -> tuple[tuple[str, ...], Keywords, str]:
    """The fields that `row_statistics` supports for an op with these options, the options to pass, and why not all.

    No entropy if weights may be negative; no fields for an op, or one of its options, that it does not support.
    """
    name = getattr(op, "__name__", str(op))
    record = RECORDS.get(name)
    if record is None:
        return (), {}, f"{name} has no row statistics"
    family, accepted = record.family, statistics.options_of(record, with_output=False)
    of_weights = {option: x for option, x in options.items() if option not in statistics.outside(family)}
    for option in of_weights:
        if option not in accepted:
            return (), {}, f"row statistics of {name} take no {option}"
    fields = statistics.RowStatistics._fields
    if family.signed(**family.translate(**family.split_options(of_weights)[0])):
        return tuple(field for field in fields if field != "entropy"), of_weights, f"{name} may give negative weights"
    return fields, of_weights, ""


class Concentration:
    """`concentration_curve` of weights in batches: rows are summed on their device, batches in float64 on the host.

    A batch is any set of rows, each with all its keys. `value` is the curve, 0 before the first valid row; `rows`
    counts valid rows.
    """

    def __init__(self, percents: Sequence[float], *, fractional: bool = False) -> None:
        self.percents, self.fractional = _percents("Concentration", percents), fractional
        self.rows = 0
        self._sums = [0.0] * len(self.percents)
        self._tables: Tables = {}

    @promoted
    def update(self, weights: Array, visible: Array | None = None) -> None:
        """Add rows (..., S); arguments as in `concentration`."""
        rows = _rows_of("Concentration", weights, visible)
        needs_values("Concentration", weights)
        sums = [rows.xp.sum(share) for share in _shares(rows, self.percents, self.fractional, self._tables)]
        totals = floats(rows.xp.stack([_count(rows, rows.valid), *sums]))
        self.rows += int(totals[0])
        self._sums = [a + b for a, b in zip(self._sums, totals[1:], strict=True)]

    def merge(self, other: "Concentration") -> None:
        """Add the totals of another accumulator; ValueError if its percents differ."""
        if (self.percents, self.fractional) != (other.percents, other.fractional):
            others = f"{other.percents} (fractional={other.fractional})"
            raise ValueError(f"Concentration: cannot merge percents {others} into {self.percents}")
        self.rows += other.rows
        self._sums = [a + b for a, b in zip(self._sums, other._sums, strict=True)]

    @property
    def value(self) -> tuple[float, ...]:
        return tuple(total / max(self.rows, 1) for total in self._sums)
