"""ReLUFormer's regulariser, which keeps rows of relu weights summing to about 1 and not too flat."""

import numbers
from typing import NamedTuple

from attnkit._core import check
from attnkit._core.dispatch import namespace
from attnkit._core.special import magnitude
from attnkit._core.typing import Array, Namespace, OfLibrary
from attnkit.ops.statistics import RowStatistics


class _Terms(NamedTuple):
    """What forward and backward need of each row; `valid` marks the rows that count."""

    valid: Array  # (..., L)
    log_total: Array  # (..., L)
    excess: Array  # (..., L)
    share: Array  # (): 1/number of valid rows


def _regulariser_terms(
    op: str, stats: RowStatistics, entropy_cap: float, query_mask: Array | None
) -> tuple[Namespace, _Terms]:
    total, entropy, visible = _rows(op, stats)
    xp = namespace(total)
    valid = (visible > 0) & (total > 0)
    if query_mask is not None:
        check.boolean_array(op, "query_mask", query_mask, "stats.total", total, tuple(total.shape), "(..., L)")
        valid = valid & query_mask
    log_total = xp.log(xp.where(valid, total, 1.0))
    cap = entropy_cap * xp.log(xp.where(valid, visible, 1.0))
    excess = xp.where(valid, entropy, 0.0) - cap
    number = xp.sum(xp.astype(valid, total.dtype))
    return xp, _Terms(valid, log_total, excess, 1.0 / xp.where(number > 0, number, 1.0))


def _rows(op: str, stats: RowStatistics) -> list[Array]:
    """total, entropy and visible: float arrays of the same library, device, dtype and shape."""
    rows = {f"stats.{name}": getattr(stats, name, None) for name in ("total", "entropy", "visible")}
    missing = [name.removeprefix("stats.") for name, x in rows.items() if x is None]
    if missing:
        raise ValueError(f"{op}: stats must hold total, entropy and visible; {', '.join(missing)} missing")
    found: dict[str, Array] = {name: x for name, x in rows.items() if x is not None}
    check.one_home(op, found, found.values())
    shape = tuple(found["stats.total"].shape)
    for name, x in found.items():
        if tuple(x.shape) != shape:
            check.wrong_shape(op, name, x, f"{shape}, the shape of stats.total")
    return [*found.values()]


def _check_cotangent(op: str, total: OfLibrary, name: str, x: OfLibrary) -> None:
    """None, a number, or a scalar array of the library and device of the statistics."""
    if x is None or isinstance(x, numbers.Real):
        return
    check.float_array(op, name, x)
    check.same_home(op, "stats.total", total, name, x)
    if tuple(x.shape):
        check.wrong_shape(op, name, x, "(), the shape of a loss")


def attention_regulariser(
    stats: RowStatistics,
    *,
    entropy_cap: float = 0.7,
    sum_weight: float = 1.0,
    entropy_weight: float = 1.0,
    query_mask: Array | None = None,
) -> tuple[Array, Array, Array]:
    """ReLUFormer's regulariser: sum_weight·mean |log Z| + entropy_weight·mean max(H - entropy_cap·log n, 0).

    Shen et al. 2023 eq 7 with C = 0.7·log n, and with the absolute value that their text names and the printed equation
    lost. Z = `stats.total` of the raw weights, H = `stats.entropy` of the normalised ones, n = `stats.visible`, natural
    logarithms. The means run over the valid rows (n > 0, Z > 0, `query_mask` True) of this call; callers add layers.
    Without a valid row all three results are 0. |log Z| has gradient 0 at Z = 1, max(·, 0) at 0.

    Args:
        stats: from `row_statistics` or `attention_with_statistics`; total, entropy and visible must be present.
        entropy_cap: the share of log n up to which entropy is free.
        sum_weight, entropy_weight: weights of the two terms. The paper gives none: the defaults are ours.
        query_mask: boolean (..., L), True = the row counts.

    Returns:
        (loss, sum_term, entropy_term), scalars in the dtype of the statistics; the terms are the unweighted means.
    """
    op = "attention_regulariser"
    for name, value in (
        ("entropy_cap", entropy_cap),
        ("sum_weight", sum_weight),
        ("entropy_weight", entropy_weight),
    ):
        check.number(op, name, value)
    xp, t = _regulariser_terms(op, stats, entropy_cap, query_mask)
    sum_term = xp.sum(magnitude(xp, t.log_total)) * t.share
    entropy_term = xp.sum(xp.where(t.excess <= 0, 0.0, t.excess)) * t.share
    return sum_weight * sum_term + entropy_weight * entropy_term, sum_term, entropy_term


def attention_regulariser_vjp(
    stats: RowStatistics,
    dloss: Array | None,
    dsum_term: float | Array | None = None,
    dentropy_term: float | Array | None = None,
    *,
    entropy_cap: float = 0.7,
    sum_weight: float = 1.0,
    entropy_weight: float = 1.0,
    query_mask: Array | None = None,
) -> dict[str, Array]:
    """Gradients {"total", "entropy"} of `attention_regulariser`: sign(log Z)/Z and [H > cap], over the valid rows.

    Cotangents are scalars, arrays () or numbers; None = 0.
    """
    op = "attention_regulariser_vjp"
    xp, t = _regulariser_terms(op, stats, entropy_cap, query_mask)
    for name, x in (("dloss", dloss), ("dsum_term", dsum_term), ("dentropy_term", dentropy_term)):
        _check_cotangent(op, stats.total, name, x)
    on_sum = sum_weight * (0.0 if dloss is None else dloss) + (0.0 if dsum_term is None else dsum_term)
    on_entropy = entropy_weight * (0.0 if dloss is None else dloss) + (0.0 if dentropy_term is None else dentropy_term)
    slope = xp.sign(t.log_total) / xp.where(t.valid, stats.total, 1.0)
    return {
        "total": xp.where(t.valid, slope, 0.0) * (t.share * on_sum),
        "entropy": xp.where(t.valid & (t.excess > 0), t.share * on_entropy, 0.0),
    }
