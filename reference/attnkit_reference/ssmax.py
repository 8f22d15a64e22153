"""Scalable-softmax attention: softmax of scores that grow with the logarithm of the number of keys."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Unpack

import numpy as np

from attnkit_reference._check import Array
from attnkit_reference._core import (
    Common,
    attend,
    contract,
    gradients,
    learned,
    reduce_to,
    row_lengths,
    scores,
    transposed,
)
from attnkit_reference._op import derived_gradients, derived_weights, keywords_of
from attnkit_reference.softmax import SoftmaxRows, softmax_of


class Ssmax(Common, total=False):
    """Its keyword arguments."""

    slope: float | Array
    intercept: float | Array
    length: str | float | Array


@dataclass(frozen=True)
class SsmaxRows(SoftmaxRows):
    """Rows of softmax for queries f q, which are those in `scores`; f = slope log n + intercept."""

    q: Array = field(default_factory=lambda: np.zeros(0))  # as they were
    factor: Array = field(default_factory=lambda: np.zeros(0))  # f (..., L, 1)
    slopes: Mapping[str, Array] = field(default_factory=dict)  # df/dx (..., L, 1) of the number x
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of q and of the numbers that are arrays

    def to_inputs(self, ds: Array, do: Array | None, absolute: bool = False) -> dict[str, Array]:
        """With g the gradient of f q: dq = f g and dx = Σ (g·q) df/dx."""
        size = np.abs if absolute else np.asarray
        grads = contract(self, ds, do, absolute)
        g = grads["q"]
        grads["q"] = reduce_to(size(self.factor) * g, self.shapes["q"])
        of_factor = np.sum(g * size(self.q), axis=-1, keepdims=True)
        for name, slope in self.slopes.items():
            if name in self.shapes:
                grads[name] = reduce_to(np.sum(of_factor * size(slope), axis=(-2, -1)), self.shapes[name])
        return grads


def ssmax_rows(
    op: str,
    q: Array,
    k: Array,
    v: Array | None = None,
    *,
    slope: float | Array = 1.0,
    intercept: float | Array = 0.0,
    length: str | float | Array = "visible",
    **options: Unpack[Common],
) -> SsmaxRows:
    """w = softmax of t = scale (f q) k^T + bias, f = slope log n + intercept; dt = w (dw - Σ w dw)."""
    sc = scores(op, q, k, v, **options)
    if sc.bias is not None and np.any(sc.bias == -np.inf):
        raise ValueError(f"{op}: bias; expected finite values on visible pairs (hide pairs by `mask`), got -inf")
    log_n = np.log(row_lengths(sc, length))[..., None]
    f = learned(op, "slope", slope, sc.leading) * log_n + learned(op, "intercept", intercept, sc.leading)
    shapes = {name: x.shape for name, x in (("slope", slope), ("intercept", intercept)) if isinstance(x, np.ndarray)}

    with np.errstate(over="ignore", invalid="ignore"):
        product = f * sc.q
        t = np.where(sc.visible, sc.scale * (product @ transposed(sc.k)), 0.0)
    t = t if sc.bias is None else t + sc.bias
    rows = softmax_of(replace(sc, q=product, s=t, shapes=sc.shapes | {"q": product.shape}))
    slopes = {"slope": log_n, "intercept": np.ones_like(log_n)}
    return SsmaxRows(**vars(rows), q=sc.q, factor=f, slopes=slopes, shapes={"q": sc.shapes["q"], **shapes})


@keywords_of(ssmax_rows)
def ssmax_attention(q: Array, k: Array, v: Array, **params: Unpack[Ssmax]) -> Array:
    """o_i = Σ_j w_ij v_j with w_ij = exp(t_ij)/Σ_j exp(t_ij) over the keys visible to i, t = scale (f q) k^T + bias and
    f_i = slope log n_i + intercept.

    With bias 0 and intercept 0 w_ij ∝ n_i^(slope s_ij), s = scale q k^T: what a key has to stand out by in order to
    keep its weight does not grow with n. slope and intercept are numbers or arrays () or (H,), a number for each head,
    which are learned; slope 0 and intercept 1 is softmax. length is n_i as in `pointwise_attention`, by default the
    number of keys visible to query i.

    The other arguments are those of `softmax_attention`; bias is finite on visible pairs and not multiplied by f. A
    query that sees no key gets 0 and passes no gradient. One that sees one key gets its value: f = intercept.
    ValueError for shapes, values and unknown arguments, TypeError for dtypes. Source: Nakanishi 2025, "Scalable-Softmax
    Is Superior for Attention".
    """
    return attend(ssmax_rows("ssmax_attention", q, k, v, **params))


ssmax_attention_weights = derived_weights(ssmax_attention, ssmax_rows)
ssmax_attention_vjp, ssmax_attention_magnitudes = derived_gradients(
    ssmax_attention,
    ssmax_rows,
    """Gradients of `ssmax_attention`: {"q", "k", "v"}, "bias" if given, and "scale", "slope" and "intercept" where they
    are arrays, each in the shape of its input.

    do (..., L, e). With dw = dropout ⊙ do v^T, dt = w (dw - Σ_j w dw) and f = slope log n + intercept: dq = f scale
    dt k, dk = scale dt^T (f q), dv = (dropout ⊙ w)^T do, dbias = dt, dscale = Σ dt ⊙ (f q) k^T, dslope = Σ dt ⊙ log n
    scale q k^T and dintercept = Σ dt ⊙ scale q k^T. length is not differentiated.
    """,
    """What rounding errors of "o" and the gradients are measured against: the summands of the last contraction in
    absolute value, for example |f| |scale| Σ_j w (|dw| + |Σ w dw|) |k| for q.
    """,
    pull=gradients,
)
