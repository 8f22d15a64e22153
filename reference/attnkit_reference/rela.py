"""ReLA: relu of the scores without a normaliser, followed by RMSNorm."""

from typing import NamedTuple, Unpack, cast

import numpy as np

from attnkit_reference._check import Array, as_float, cotangent, number
from attnkit_reference._core import Common, Rows, attend, reduce_to, weight_cotangent
from attnkit_reference._op import derived_gradients, derived_weights, keywords_of
from attnkit_reference.pointwise import pointwise_rows, sigmoid, sigmoid_slope

NORM_AXES = ("hidden", "head")


class Rela(Common, total=False):
    """The keyword arguments of `rela_attention`."""

    gate_weight: Array | None
    norm_axis: str
    eps: float


def rela_rows(op: str, q: Array, k: Array, v: Array | None = None, **options: Unpack[Common]) -> Rows:
    """w = relu(s), the weights in row statistics of ReLA."""
    return pointwise_rows(op, q, k, v, activation="relu", alpha=0.0, **options)


class _Normed(NamedTuple):
    """x = relu(s) v and its norm, (..., H, L, e), or (..., L, e) without heads."""

    rows: Rows
    x: Array  # (..., H, L, e)
    size: Array  # (..., H, L, e): Σ w |v|, the summands of x in absolute value
    inverse: Array  # (..., 1, L, 1) or (..., H, L, 1): 1/√(mean x² + eps)
    weight: Array  # (H, 1, e) or (e,): norm_weight as it multiplies x
    gate: Array | None  # as `weight`: (H, 1, e) or (e,)
    axes: tuple[int, ...]  # over which the mean is taken
    shapes: dict[str, tuple[int, ...]]  # of the arguments norm_weight and gate_weight

    def mean(self, x: Array) -> Array:
        mean: Array = x.mean(axis=self.axes, keepdims=True)
        return mean

    @property
    def y(self) -> Array:
        return self.x * self.inverse * self.weight


def _rela(
    op: str,
    q: Array,
    k: Array,
    v: Array,
    norm_weight: Array,
    *,
    gate_weight: Array | None = None,
    norm_axis: str = "hidden",
    eps: float = 1e-8,
    **options: Unpack[Common],
) -> _Normed:
    rows = rela_rows(op, q, k, v, **options)
    if norm_axis not in NORM_AXES:
        raise ValueError(f"{op}: norm_axis; expected 'hidden' or 'head', got {norm_axis!r}")
    eps = number(op, "eps", eps, positive=True)
    x = attend(rows)
    heads = norm_axis == "hidden" and x.ndim > 2
    features = (x.shape[-3] * x.shape[-1],) if heads else x.shape[-1:]
    spread = {}
    for name, weight in (("norm_weight", norm_weight), ("gate_weight", gate_weight)):
        if weight is None:
            continue
        wide = as_float(op, name, weight)
        if wide.shape != features:
            raise ValueError(f"{op}: {name} has the wrong shape; expected {features}, got {wide.shape}")
        spread[name] = wide.reshape(x.shape[-3], 1, x.shape[-1]) if heads else wide
    axes = (-3, -1) if heads else (-1,)
    inverse = 1.0 / np.sqrt(np.mean(x**2, axis=axes, keepdims=True) + eps)
    sizes, shapes = attend(rows, absolute=True), dict.fromkeys(spread, features)
    return _Normed(rows, x, sizes, inverse, spread["norm_weight"], spread.get("gate_weight"), axes, shapes)


def _joined(x: Array) -> Array:
    """(..., H, L, e) -> (..., L, H·e), heads in order."""
    return x if x.ndim < 3 else np.moveaxis(x, -3, -2).reshape(*x.shape[:-3], x.shape[-2], x.shape[-3] * x.shape[-1])


def _split_cotangent(rows: Rows, x: Array, do: Array) -> Array:
    """do (..., L, H·e) in the layout of x, 0 in null rows (of single heads)."""
    do = cotangent(rows.scores.op, "do", do, _joined(x).shape)
    if x.ndim > 2:
        do = np.moveaxis(do.reshape(*do.shape[:-1], x.shape[-3], x.shape[-1]), -2, -3)
    return np.where(rows.live[..., None], do, 0.0)


def _of_features(gradient: Array, shape: tuple[int, ...]) -> Array:
    """A gradient (..., H, L, e) summed to that of a weight of `shape`, (e,) or (H·e,)."""
    keep = gradient.shape[-1:] if shape == gradient.shape[-1:] else (gradient.shape[-3], 1, gradient.shape[-1])
    return reduce_to(gradient, keep).reshape(shape)


def _norm_gradients(normed: _Normed, do: Array) -> dict[str, Array]:
    """dx, and the summands of dnorm_weight and dgate_weight."""
    x, r, weight, gate = normed.x, normed.inverse, normed.weight, normed.gate
    unit, dy, through_gate, grads = x * r, do, np.zeros(1), {}
    if gate is not None:
        dy = do * sigmoid(gate * x)
        slope = do * normed.y * sigmoid_slope(gate * x)
        through_gate, grads["gate_weight"] = slope * gate, slope * x
    g = dy * weight
    return {"x": r * (g - unit * normed.mean(g * unit)) + through_gate, "norm_weight": dy * unit, **grads}


def _norm_sizes(normed: _Normed, do: Array) -> dict[str, Array]:
    """The same, and the output, in absolute values, with Σ w |v| for x."""
    x, r, weight, gate, do = normed.size, normed.inverse, np.abs(normed.weight), normed.gate, np.abs(do)
    y, dy, through_gate, sizes = x * r * weight, do, np.zeros(1), {}
    if gate is not None:
        opening, slope = sigmoid(gate * normed.x), sigmoid_slope(gate * normed.x)
        along = do * y * slope
        y, dy = y * opening, do * opening
        through_gate, sizes["gate_weight"] = along * np.abs(gate), along * x
    g, unit = dy * weight, np.abs(normed.x) * r
    dx = r * (g + unit * normed.mean(g * unit)) + through_gate
    return {"o": y, "x": dx, "norm_weight": dy * x * r, **sizes}


def _pull(a: _Normed, do: Array, absolute: bool = False) -> dict[str, Array]:
    """Through the norm and the gate to x, and from there as for any output."""
    do = _split_cotangent(a.rows, a.x, do)
    exact = _norm_gradients(a, do)
    grads = _norm_sizes(a, do) if absolute else exact
    dw = weight_cotangent(a.rows, exact["x"])
    size = _weight_sizes(a.rows, grads["x"]) if absolute else np.abs(dw)
    output = {"o": _joined(grads["o"])} if absolute else {}
    own = {name: _of_features(grads[name], shape) for name, shape in a.shapes.items()}
    return {**a.rows.to_arguments(dw, size, grads["x"], absolute), **output, **own}


def rela_summed(
    op: str, q: Array, k: Array, v: Array, norm_weight: Array, do: Array, **options: Unpack[Rela]
) -> tuple[Rows, Array]:
    """The rows of a call, and the gradient of Σ w v for the cotangent do of what norm and gate make of it."""
    normed = _rela(op, q, k, v, norm_weight, **options)
    return normed.rows, _norm_gradients(normed, _split_cotangent(normed.rows, normed.x, do))["x"]


def _weight_sizes(rows: Rows, dx: Array) -> Array:
    """Σ |dx| |v|: the norm makes dx orthogonal to x, so a row with one key has dw = 0 with large summands."""
    sc = rows.scores
    size = np.where(sc.visible, dx @ np.swapaxes(np.abs(cast(Array, sc.v)), -1, -2), 0.0)
    return size if sc.keep is None else size * np.abs(sc.keep)


@keywords_of(rela_rows)
def rela_attention(
    q: Array,
    k: Array,
    v: Array,
    norm_weight: Array,
    *,
    gate_weight: Array | None = None,
    norm_axis: str = "hidden",
    eps: float = 1e-8,
    **params: Unpack[Common],
) -> Array:
    """RMSNorm of x_i = Σ_j relu(s_ij) v_j, s = scale q k^T + bias: heads concatenated in order, (..., L, H·e).

    q (..., H, L, d), k (..., H, S, d), v (..., H, S, e); without a head axis H = 1. No length scale; scale None is
    1/sqrt(d). norm_axis "hidden" takes the mean square over all H·e features, "head" over the e of one head:
    y = x/√(mean x² + eps) ⊙ norm_weight, norm_weight (H·e,) or (e,). gate_weight, of the same shape, multiplies y by
    sigmoid(gate_weight ⊙ x) with x not normalised. eps = 1e-8 is the official code's.

    The other arguments are those of `softmax_attention`; bias is finite on visible pairs. A query that sees no key in
    any head gives 0, and so does one whose scores are all negative. ValueError for shapes, values and unknown
    arguments, TypeError for dtypes. Source: Zhang et al. 2021 "Sparse Attention with Linear Units" §3 and its official
    code, whose norm is "hidden"; "head" is that of a popular port. Baseline of Shen et al. 2023.
    """
    op = "rela_attention"
    a = _rela(op, q, k, v, norm_weight, gate_weight=gate_weight, norm_axis=norm_axis, eps=eps, **params)
    return _joined(a.y if a.gate is None else a.y * sigmoid(a.gate * a.x))


rela_attention_weights = derived_weights(
    rela_attention,
    rela_rows,
    doc="The weights relu(s) (..., L, S) of `rela_attention`, before dropout and norm; exactly 0 where invisible.",
)
rela_attention_vjp, rela_attention_magnitudes = derived_gradients(
    rela_attention,
    _rela,
    """Gradients of `rela_attention`: {"q", "k", "v", "norm_weight"}, "gate_weight", "bias", a learned "scale".

    do (..., L, H·e). With r = 1/√(mean x² + eps), σ = sigmoid(gate_weight ⊙ x), dy = do σ and g = dy ⊙ norm_weight:
    dx = r (g - x r² mean(g x)) + do y σ(1-σ) gate_weight, dnorm_weight = Σ dy x r, dgate_weight = Σ do y σ(1-σ) x; then
    as in `pointwise_attention_vjp` with dx for do.
    """,
    """What rounding errors of "o" and the gradients are measured against: the summands of x, dx and of the sums over
    tokens in absolute value, for example |norm_weight| Σ_j w |v|/√(mean x² + eps) for o without a gate.
    """,
    pull=_pull,
)
