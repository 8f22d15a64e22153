"""Statistics of the weights of each query, for any op, and the regulariser that ReLUFormer builds on them."""

import numbers
from collections.abc import Callable, Iterable
from typing import NamedTuple, cast

import numpy as np
from scipy.special import xlogy

from attnkit_reference._check import (
    Array,
    as_float,
    boolean,
    broadcast,
    cotangent,
    number,
    refuse_none,
    refuse_unexpected,
)
from attnkit_reference._core import Rows, attend, output_cotangent, row_cotangent, weight_cotangent
from attnkit_reference._op import DROPOUT, ROWS, derived_gradients, keyword_parameters, refuse_others
from attnkit_reference.rela import rela_attention, rela_attention_magnitudes, rela_attention_vjp

Op = str | Callable[..., object]  # an op by name, or its public function


class Apart(NamedTuple):
    """An op whose output is not w v: its functions, and its arguments that the weights do not depend on."""

    op: Callable[..., Array]
    vjp: Callable[..., dict[str, Array]]
    magnitudes: Callable[..., dict[str, Array]]
    outside: tuple[str, ...]


APART = {
    rela_attention.__name__: Apart(
        rela_attention,
        rela_attention_vjp,
        rela_attention_magnitudes,
        ("norm_weight", "gate_weight", "norm_axis", "eps"),
    ),
}


class RowStatistics(NamedTuple):
    """One number per query, each (..., L): None if it was not requested. Null and dead rows hold 0.

    total Z = Σ_j w_ij; entropy H = log Z - (Σ w log w)/Z = -Σ p log p of the normalised weights p = w/Z, in nats;
    sum_squares Σ w²; maximum over the visible keys; nonzero, the number of keys that get weight; visible, the number
    of keys that are visible (dead rows keep it, so that null and dead rows can be counted).
    """

    total: Array | None = None  # (..., L)
    entropy: Array | None = None  # (..., L)
    sum_squares: Array | None = None  # (..., L)
    maximum: Array | None = None  # (..., L)
    nonzero: Array | None = None  # (..., L)
    visible: Array | None = None  # (..., L)


def _name(op: Op) -> str:
    return op if isinstance(op, str) else getattr(op, "__name__", repr(op))


def _prepare(
    function: str,
    op: Op,
    arrays: tuple[Array, ...],
    fields: Iterable[str] | None,
    params: dict[str, object],
) -> tuple[Rows, tuple[str, ...]]:
    """The weights of `op` and the requested fields, after checking the arguments."""
    name = _name(op)
    if name not in ROWS:
        raise ValueError(f"{function}: op; expected one of {', '.join(ROWS)} or its function, got {name!r}")
    rows_of, label = ROWS[name], f"{function}({name})"
    legal = [p.name for p in keyword_parameters(rows_of, *(() if len(arrays) == 3 else DROPOUT))]
    outside = APART[name].outside if name in APART and len(arrays) == 3 else ()
    refuse_unexpected(label, params, [*legal, *outside, "fields"])
    refuse_none(label, dict(zip("qkv", arrays, strict=False)), "qkv")
    params = {key: value for key, value in params.items() if key not in outside}
    names = RowStatistics._fields if fields is None else tuple(fields)
    if isinstance(fields, str) or not set(names) <= set(RowStatistics._fields):
        legal_fields = ", ".join(RowStatistics._fields)
        raise ValueError(f"{label}: fields; expected a tuple of names out of {legal_fields}, got {fields!r}")
    rows = rows_of(label, *arrays, **params)
    if rows.signed and "entropy" in names:
        others = tuple(field for field in RowStatistics._fields if field != "entropy")
        raise ValueError(
            f"{label}: entropy; expected weights that cannot be negative, got signed ones: pass fields={others}"
        )
    return rows, names


def _valid(rows: Rows) -> Array:
    """Rows that are neither null nor dead (every visible weight 0)."""
    return cast(Array, rows.live & np.any(rows.w != 0, axis=-1))


def _statistics(rows: Rows, fields: tuple[str, ...]) -> RowStatistics:
    w, visible, valid = rows.w, rows.scores.visible, _valid(rows)
    n = rows.scores.n.astype(np.float64)
    compute: dict[str, Callable[[], Array]] = {
        "total": lambda: w.sum(axis=-1),
        "entropy": lambda: _entropy(w, valid),
        "sum_squares": lambda: (w * w).sum(axis=-1),
        "maximum": lambda: np.where(valid, np.max(w, axis=-1, initial=-np.inf, where=visible), 0.0),
        "nonzero": lambda: np.where(valid, (w != 0).sum(axis=-1) if rows.exact_zeros else n, 0.0),
        "visible": lambda: n,
    }
    return RowStatistics(**{field: compute[field]() for field in fields})


def _entropy(w: Array, valid: Array) -> Array:
    p = w / np.where(valid, w.sum(axis=-1), 1.0)[..., None]
    return np.where(valid, 0.0 - xlogy(p, p).sum(axis=-1), 0.0)


def _first_maximum(rows: Rows) -> Array:
    """1 at the first visible key that has the maximal weight of its row, 0 elsewhere."""
    visible = rows.scores.visible
    maximum = np.max(rows.w, axis=-1, keepdims=True, initial=-np.inf, where=visible)
    largest = visible & (rows.w == maximum)
    first: Array = largest & (np.cumsum(largest, axis=-1) == 1)
    return first


def _statistics_cotangent(rows: Rows, dstats: RowStatistics, fields: tuple[str, ...]) -> tuple[Array, Array]:
    """dw for the cotangents of the statistics, and the sum of the absolute values of its summands.

    dZ gives 1, dH gives -(log p + H)/Z on the support (p = w/Z), dΣw² gives 2w, dmax goes to the first maximum. The
    derivative of -p log p is -(log p + 1); the 1 cancels through Z, in rounded arithmetic nearly.
    """
    w, valid = rows.w, _valid(rows)
    cotangents = {field: _cotangent(rows, dstats, field, fields, valid) for field in RowStatistics._fields[:4]}
    dw = cotangents["total"] + 2.0 * w * cotangents["sum_squares"]
    size = np.abs(cotangents["total"]) + np.abs(2.0 * w * cotangents["sum_squares"])
    at_maximum = _first_maximum(rows) * cotangents["maximum"]
    dw, size = dw + at_maximum, size + np.abs(at_maximum)
    if "entropy" in fields:
        total, entropy = np.where(valid, w.sum(axis=-1), 1.0)[..., None], _entropy(w, valid)[..., None]
        log_w = np.log(np.where(w > 0, w, 1.0))
        scale = np.where(w > 0, cotangents["entropy"] / total, 0.0)
        dw = dw - scale * (log_w - np.log(total) + entropy)
        size = size + np.abs(scale) * (1.0 + np.abs(log_w) + np.abs(np.log(total)) + entropy)
    return dw, size


def _cotangent(rows: Rows, dstats: RowStatistics, field: str, fields: tuple[str, ...], valid: Array) -> Array:
    if not hasattr(dstats, field):
        kind = type(dstats).__name__
        raise TypeError(f"{rows.scores.op}: dstats; expected RowStatistics of cotangents, got {kind}")
    cotangent = getattr(dstats, field)
    if cotangent is not None and field not in fields:
        raise ValueError(f"{rows.scores.op}: dstats.{field}; expected None for a field not in fields={fields}")
    return np.where(valid, row_cotangent(rows, f"dstats.{field}", cotangent), 0.0)[..., None]


def _statistics_magnitudes(rows: Rows, fields: tuple[str, ...]) -> dict[str, Array]:
    w, valid = rows.w, _valid(rows)
    total = np.where(valid, w.sum(axis=-1), 1.0)
    statistics = _statistics(rows, fields)._asdict()
    if "total" in fields:
        statistics["total"] = np.abs(w).sum(axis=-1)
    if "entropy" in fields:
        statistics["entropy"] = (
            np.where(valid, 1.0, 0.0) + np.abs(xlogy(w, w)).sum(axis=-1) / total + np.abs(np.log(total))
        )
    return {field: np.abs(value) for field, value in statistics.items() if value is not None}


def row_statistics(
    op: Op, q: Array, k: Array, *, fields: Iterable[str] | None = None, **params: object
) -> RowStatistics:
    """The statistics of the weights of `op` for each query: see `RowStatistics` for the formulas.

    op is a public attention function or its name; q (..., L, d), k (..., S, d); params are that op's keyword arguments
    without dropout, which statistics ignore. fields names those to compute (None: all six).

    nonzero counts exact zeros out for relu, relu_squared, relu6, sparsemax, entmax and ReLA and equals visible
    otherwise. Rows that see no key (null) or whose weights are all 0 (dead) hold 0 except in visible. ValueError for an
    argument that op does not take, and for the entropy of weights that can be negative (identity, gelu, gelu_tanh,
    silu, gain < 0). Source: Shen et al. 2023 §4.1-4.2 (total, entropy).
    """
    return _statistics(*_prepare("row_statistics", op, (q, k), fields, params))


def row_statistics_vjp(
    op: Op,
    q: Array,
    k: Array,
    dstats: RowStatistics,
    *,
    fields: Iterable[str] | None = None,
    **params: object,
) -> dict[str, Array]:
    """Gradients {"q", "k"} and "bias", if passed, of `row_statistics`; dstats holds a cotangent per field, None = 0.

    dw = dZ - dH (log p + H)/Z [w > 0] + 2 w dΣw² + dmax at the first maximum; 0 in null and dead rows; nonzero and
    visible have no gradient. Then as in the op's own vjp.
    """
    rows, names = _prepare("row_statistics_vjp", op, (q, k), fields, params)
    return rows.to_arguments(*_statistics_cotangent(rows, dstats, names), None)


def row_statistics_magnitudes(
    op: Op,
    q: Array,
    k: Array,
    dstats: RowStatistics,
    *,
    fields: Iterable[str] | None = None,
    **params: object,
) -> dict[str, Array]:
    """The scale of rounding errors: the requested fields and the gradients, with the summands of their
    last contraction in absolute value, for example 1 + Σ|w log w|/Z + |log Z| for entropy: a relative error of p
    changes -p log p by p (1 + log p) times that.
    """
    rows, names = _prepare("row_statistics_magnitudes", op, (q, k), fields, params)
    dw, size = _statistics_cotangent(rows, dstats, names)
    return {**_statistics_magnitudes(rows, names), **rows.to_arguments(dw, size, None, absolute=True)}


def attention_with_statistics(
    op: Op,
    q: Array,
    k: Array,
    v: Array,
    *,
    fields: Iterable[str] | None = None,
    **params: object,
) -> tuple[Array, RowStatistics]:
    """(o, RowStatistics): the output of `op` and the statistics of its weights; see `row_statistics`.

    params are the op's keyword arguments; dropout, and the norm and gate of ReLA, affect only o.
    """
    rows, names = _prepare("attention_with_statistics", op, (q, k, v), fields, params)
    apart = APART.get(_name(op))
    o = attend(rows) if apart is None else apart.op(q, k, v, **params)
    return o, _statistics(rows, names)


def _joint(
    rows: Rows,
    op: Op,
    qkv: tuple[Array, ...],
    do: Array | None,
    dstats: RowStatistics,
    fields: tuple[str, ...],
    absolute: bool,
    params: dict[str, object],
) -> dict[str, Array]:
    """Gradients, or the absolute values of their summands, for the cotangents of the output and of the statistics."""
    dw, size = _statistics_cotangent(rows, dstats, fields)
    apart = APART.get(_name(op))
    if apart is None:
        do = output_cotangent(rows, do)
        through = weight_cotangent(rows, do)
        return rows.to_arguments(dw + through, size + np.abs(through), do, absolute)
    do = np.zeros(apart.op(*qkv, **params).shape) if do is None else do
    grads = (apart.magnitudes if absolute else apart.vjp)(*qkv, do=do, **params)
    of_rows = rows.to_arguments(dw, size, None, absolute)
    return {name: x + of_rows[name] if name in of_rows and name != "v" else x for name, x in grads.items()}


def attention_with_statistics_vjp(
    op: Op,
    q: Array,
    k: Array,
    v: Array,
    do: Array | None,
    dstats: RowStatistics,
    *,
    fields: Iterable[str] | None = None,
    **params: object,
) -> dict[str, Array]:
    """Gradients {"q", "k", "v"} and "bias", if passed, of `attention_with_statistics`: do and dstats together (None is
    0).
    """
    rows, names = _prepare("attention_with_statistics_vjp", op, (q, k, v), fields, params)
    return _joint(rows, op, (q, k, v), do, dstats, names, False, params)


def attention_with_statistics_magnitudes(
    op: Op,
    q: Array,
    k: Array,
    v: Array,
    do: Array | None,
    dstats: RowStatistics,
    *,
    fields: Iterable[str] | None = None,
    **params: object,
) -> dict[str, Array]:
    """Magnitudes of "o", the requested fields and the gradients, as in `row_statistics_magnitudes`."""
    rows, names = _prepare("attention_with_statistics_magnitudes", op, (q, k, v), fields, params)
    sizes = {"o": attend(rows, absolute=True), **_statistics_magnitudes(rows, names)}
    return {**sizes, **_joint(rows, op, (q, k, v), do, dstats, names, True, params)}


class _Regulariser(NamedTuple):
    """One call; Z = n = 1 and H = 0 in rows that are not valid."""

    op: str
    Z: Array  # (..., L)
    H: Array  # (..., L)
    n: Array  # (..., L)
    valid: Array  # (..., L)
    entropy_cap: float
    sum_weight: float
    entropy_weight: float


def _regulariser(
    op: str,
    stats: object,
    *,
    entropy_cap: float = 0.7,
    sum_weight: float = 1.0,
    entropy_weight: float = 1.0,
    query_mask: Array | None = None,
) -> _Regulariser:
    number(op, "entropy_cap", entropy_cap)
    wide = {}
    for field in ("total", "entropy", "visible"):
        if getattr(stats, field, None) is None:
            raise ValueError(f"{op}: stats; expected total, entropy and visible, got none for {field!r}")
        wide[field] = as_float(op, f"stats.{field}", getattr(stats, field))
        if wide[field].shape != wide["total"].shape:
            shapes = f"expected {wide['total'].shape} as for total, got {wide[field].shape}"
            raise ValueError(f"{op}: stats.{field} has the wrong shape; {shapes}")
    valid = (wide["visible"] > 0) & (wide["total"] > 0)
    if query_mask is not None:
        valid = valid & broadcast(op, "query_mask", boolean(op, "query_mask", query_mask), valid.shape)
    Z, n = (np.where(valid, wide[field], 1.0) for field in ("total", "visible"))
    H = np.where(valid, wide["entropy"], 0.0)
    weights = number(op, "sum_weight", sum_weight), number(op, "entropy_weight", entropy_weight)
    return _Regulariser(op, Z, H, n, valid, entropy_cap, *weights)


def _mean(x: Array, valid: Array) -> np.float64:
    return np.float64(np.where(valid, x, 0.0).sum() / max(int(valid.sum()), 1))


def _of_a_number(op: str, name: str, x: Array | float | None) -> Array:
    """The cotangent of an output that is one number, itself an array or a number of Python's."""
    return cotangent(op, name, np.asarray(float(x)) if isinstance(x, numbers.Real) else x, ())


def _regulariser_pull(
    a: _Regulariser,
    dloss: Array | float | None,
    dsum_term: Array | float | None = None,
    dentropy_term: Array | float | None = None,
    absolute: bool = False,
) -> dict[str, Array | np.float64]:
    """dZ and dH of the m valid rows; with `absolute`, of cotangents and weights in absolute value."""
    size = np.abs if absolute else np.asarray
    sum_weight, entropy_weight = size(a.sum_weight), size(a.entropy_weight)
    given = {"dloss": dloss, "dsum_term": dsum_term, "dentropy_term": dentropy_term}
    of_loss, of_sum, of_entropy = (size(_of_a_number(a.op, name, x)) for name, x in given.items())
    through_sum, through_entropy = of_loss * sum_weight + of_sum, of_loss * entropy_weight + of_entropy
    count = max(int(a.valid.sum()), 1)
    gradients: dict[str, Array | np.float64] = {
        "total": size(np.where(a.valid, through_sum * np.sign(np.log(a.Z)) / a.Z, 0.0) / count),
        "entropy": np.where(a.valid & (a.entropy_cap * np.log(a.n) < a.H), through_entropy, 0.0) / count,
    }
    if not absolute:
        return gradients
    sum_term = _mean(np.abs(np.log(a.Z)), a.valid)
    entropy_term = _mean(np.abs(a.H) + abs(a.entropy_cap) * np.log(a.n), a.valid)
    loss = np.float64(sum_weight * sum_term + entropy_weight * entropy_term)
    return {"loss": loss, "sum_term": sum_term, "entropy_term": entropy_term, **gradients}


@refuse_others
def attention_regulariser(
    stats: RowStatistics,
    *,
    entropy_cap: float = 0.7,
    sum_weight: float = 1.0,
    entropy_weight: float = 1.0,
    query_mask: Array | None = None,
) -> tuple[np.float64, np.float64, np.float64]:
    """(loss, sum_term, entropy_term): keeps rows of relu weights summing to about 1 and not too flat.

    sum_term = mean |log Z|, entropy_term = mean max(H - entropy_cap log n, 0), both unweighted means over the valid
    rows (n > 0, Z > 0, query_mask True; 0 if there is none); loss = sum_weight sum_term + entropy_weight entropy_term.
    stats: `RowStatistics` with total, entropy and visible; Z belongs to the raw weights before dropout. Callers add
    the losses of layers. entropy_cap 0.7 is the paper's (App. A.2); the paper does not give the two weights: 1 is
    ours. ValueError for missing fields and shapes. Source: Shen et al. 2023 eq 7, with the absolute value that its
    text names and its print lost.
    """
    own = {"entropy_cap": entropy_cap, "sum_weight": sum_weight, "entropy_weight": entropy_weight}
    a = _regulariser("attention_regulariser", stats, **own, query_mask=query_mask)
    excess = a.H - entropy_cap * np.log(a.n)
    sum_term = _mean(np.abs(np.log(a.Z)), a.valid)
    entropy_term = _mean(np.where(excess > 0, excess, 0.0), a.valid)
    return np.float64(a.sum_weight * sum_term + a.entropy_weight * entropy_term), sum_term, entropy_term


attention_regulariser_vjp, attention_regulariser_magnitudes = derived_gradients(
    attention_regulariser,
    _regulariser,
    """Gradients {"total", "entropy"} of `attention_regulariser`; None is 0.

    Over the m valid rows: dZ = (dloss sum_weight + dsum_term) sign(log Z)/(Z m) and dH = (dloss entropy_weight +
    dentropy_term) [H > entropy_cap log n]/m; 0 at both kinks and in rows that are not valid.
    """,
    """What rounding errors are measured against: "loss", "sum_term", "entropy_term" with H + |entropy_cap| log n in
    place of their difference, and the gradients "total" and "entropy" with the cotangents in absolute value.
    """,
    pull=_regulariser_pull,
)
