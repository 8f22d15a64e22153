"""Gaussian attention: the kernel of SOFT with separate queries and keys and no normaliser."""

from dataclasses import dataclass, field, replace
from typing import Unpack

import numpy as np

from attnkit_reference._check import Array
from attnkit_reference._core import Common, Rows, attend, contract, gradients, reduce_to, scores
from attnkit_reference._op import derived_gradients, derived_weights, keywords_of


@dataclass(frozen=True)
class GaussianRows(Rows):
    """Rows whose scores are computed from distances instead of products."""

    differences: Array = field(default_factory=lambda: np.zeros(0))  # q_i - k_j, (..., L, S, d)

    def to_inputs(self, ds: Array, do: Array | None, absolute: bool = False) -> dict[str, Array]:
        """As `contract`, but dq_i = 2 Σ_j G_ij (q_i - k_j), dk_j = -2 Σ_i G_ij (q_i - k_j) with G = -(scale/2) ds, and
        dscale = -½ Σ ds_ij ‖q_i - k_j‖²."""
        sc, sign = self.scores, 1.0 if absolute else -1.0
        g, differences = np.where(sc.visible, -0.5 * sc.scale * ds, 0.0), self.differences
        if absolute:
            g, differences = np.abs(g), np.abs(differences)
        with np.errstate(over="ignore", invalid="ignore"):
            terms = np.where(sc.visible[..., None], 2.0 * g[..., None] * differences, 0.0)
            halves = np.where(sc.visible, 0.5 * sign * ds * np.sum(differences**2, axis=-1), 0.0)
        of_scale = {"scale": reduce_to(halves.sum(axis=(-2, -1)), sc.shapes["scale"])} if "scale" in sc.shapes else {}
        return {
            **contract(self, ds, do, absolute),
            **of_scale,
            "q": reduce_to(terms.sum(axis=-2), sc.shapes["q"]),
            "k": reduce_to(sign * terms.sum(axis=-3), sc.shapes["k"], sc.groups),
        }


def gaussian_rows(op: str, q: Array, k: Array, v: Array | None = None, **options: Unpack[Common]) -> GaussianRows:
    """w = exp(s), s = -(scale/2) ‖q - k‖² + bias on visible keys; ds = w dw."""
    sc = scores(op, q, k, v, **options)
    differences = sc.q[..., :, None, :] - sc.k[..., None, :, :]
    with np.errstate(over="ignore", invalid="ignore"):
        s = -0.5 * sc.scale * np.sum(differences**2, axis=-1)
        s = np.where(sc.visible, s if sc.bias is None else s + sc.bias, 0.0)
        w = np.where(sc.visible, np.exp(s), 0.0)

    def pull(dw: Array, size: Array) -> tuple[Array, Array]:
        return w * dw, w * size

    return GaussianRows(replace(sc, s=s), w, sc.n > 0, pull, differences=differences)


@keywords_of(gaussian_rows)
def gaussian_attention(q: Array, k: Array, v: Array, **params: Unpack[Common]) -> Array:
    """o_i = Σ_j w_ij v_j with w_ij = exp(-(scale/2) ‖q_i - k_j‖² + bias_ij) on the keys visible to i; no normaliser.

    q (..., L, d), k (..., S, d), v (..., S, e) -> o (..., L, e). Leading axes broadcast; heads are axis -3. scale None
    is 1/sqrt(d), so that the exponent is -‖q - k‖²/(2 sqrt(d)). Distances are sums of squared differences: a vector
    added to all q and k changes nothing.

    The other arguments are those of `softmax_attention`; bias may be -inf (weight 0). A query that sees no key gets
    weights, output and gradients 0. ValueError for shapes, values and unknown arguments, TypeError for dtypes. Source:
    Lu et al. 2021 "SOFT: Softmax-free Transformer with Linear Complexity" eq 4-5, where k = q.
    """
    return attend(gaussian_rows("gaussian_attention", q, k, v, **params))


gaussian_attention_weights = derived_weights(gaussian_attention, gaussian_rows)
gaussian_attention_vjp, gaussian_attention_magnitudes = derived_gradients(
    gaussian_attention,
    gaussian_rows,
    """Gradients of `gaussian_attention`: {"q", "k", "v"}, "bias" if given and "scale" if it is an array, each in the
    shape of its input.

    With ds = w ⊙ dropout ⊙ (do v^T) and G = -(scale/2) ds: dq_i = 2 Σ_j G_ij (q_i - k_j), dk_j = -2 Σ_i G_ij (q_i -
    k_j), dv = (dropout ⊙ w)^T do, dbias = ds.
    """,
    """What rounding errors are measured against: "o" and the gradients with the summands of their last contraction in
    absolute value, for example Σ_j w |v| for o and |scale| Σ_j |ds| |q - k| for q.
    """,
    pull=gradients,
)
