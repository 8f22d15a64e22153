"""Gaussian attention: the kernel of SOFT (Lu et al. 2021) with separate queries and keys and no normaliser.

Distances are expanded into products after a vector near the keys is subtracted from all queries and keys of a head, so
a common offset costs no precision.
"""

from typing import Unpack

from attnkit._core import quadratic
from attnkit._core.check import is_learned
from attnkit._core.family import Family, op, vjp_of, weights_of
from attnkit._core.special import cumulative_sum, stop_gradient
from attnkit._core.typing import A, Array, Common, Impl, Namespace


def _heads(x: Array) -> int:
    return x.shape[-3] if x.ndim >= 3 else 1


def _centre(xp: Namespace, a: quadratic.Inputs) -> Array:
    """The mean of the keys visible to the first query with a key, (..., 1, d), so that results are bitwise causal.

    It is a matrix product because XLA may compute a sum twice in different orders when it is subtracted twice, and q
    and k would then have different centres.
    """
    if a.pairs is None:
        return (xp.matrix_transpose(xp.zeros_like(a.k[..., :1])) + 1.0 / a.keys) @ a.k
    pairs, heads, shared = a.pairs, _heads(a.q), _heads(a.k)
    if shared > 0 and heads not in (1, shared) and _heads(pairs) == heads:
        grouped = (*pairs.shape[:-3], shared, heads // shared, *pairs.shape[-2:])
        pairs = xp.any(xp.reshape(pairs, grouped), axis=-3)
    live = xp.any(pairs, axis=-1, keepdims=True)
    first = live & (cumulative_sum(xp, xp.astype(live, xp.int32), axis=-2) == 1)
    visible = xp.any(pairs & first, axis=-2)[..., None]
    share = xp.astype(visible, a.dtype)
    count = xp.sum(share, axis=-2, keepdims=True)
    share = xp.matrix_transpose(share / xp.where(count == 0, 1.0, count))
    return share @ xp.where(visible, a.k, 0.0)


def _for_queries(xp: Namespace, x: Array, heads: int) -> Array:
    """x with the heads of the keys, repeated for the query heads that share them."""
    if heads == 1 or _heads(x) in (1, heads):
        return x
    wide = (*x.shape[:-2], heads // x.shape[-3], *x.shape[-2:])
    return xp.reshape(xp.broadcast_to(x[..., None, :, :], wide), (*x.shape[:-3], heads, *x.shape[-2:]))


def centred(xp: Namespace, a: quadratic.Inputs) -> quadratic.Inputs:
    """The inputs with the centre of the keys subtracted from q and k."""
    if a.keys == 0:
        return a
    centre = stop_gradient(_centre(xp, a))
    return a._replace(q=a.q - _for_queries(xp, centre, _heads(a.q)), k=a.k - centre)


def prepare(
    xp: Namespace, q: Array, k: Array, v: Array | None = None, **common: Unpack[quadratic.Preparing]
) -> quadratic.Inputs:
    """`quadratic.prepare`, and the centre of the keys subtracted."""
    return centred(xp, quadratic.prepare(xp, q, k, v, **common))


def exponents(xp: Namespace, a: quadratic.Inputs) -> Array:
    """-(scale/2)‖q - k‖² + bias from centred inputs. Squares that are negative by rounding count as 0."""
    half = 0.5 * a.scale
    of_queries = half * xp.sum(a.q * a.q, axis=-1, keepdims=True)
    of_keys = half * xp.matrix_transpose(_for_queries(xp, xp.sum(a.k * a.k, axis=-1, keepdims=True), _heads(a.q)))
    s = quadratic.scores(xp, a._replace(bias=None)) - of_queries - of_keys
    if is_learned(a.scale):
        beyond = xp.where(a.scale > 0, s > 0, s < 0)
    else:
        beyond = s > 0 if a.scale > 0 else s < 0
    excess: Array = stop_gradient(xp.where(beyond, s, 0.0))
    s = s - excess
    return s if a.bias is None else s + a.bias


def weigh(xp: Namespace, s: Array, a: quadratic.Inputs) -> tuple[Array, float]:
    """exp(s) from `exponents`, 0 on invisible pairs."""
    return quadratic.masked(xp, a, xp.exp(quadratic.masked(xp, a, s))), 1.0


def score_gradient(xp: Namespace, s: Array, a: quadratic.Inputs, w: Array, dw: Array) -> Array:
    """ds = w dw."""
    return w * dw


def beside(
    xp: Namespace, s: Array, a: quadratic.Inputs, w: Array, dw: Array, ds: Array, like: dict[str, Array]
) -> dict[str, Array]:
    """Gradients through ‖q‖² and ‖k‖², beside those of the product: -scale·q_i Σ_j ds_ij, -scale·k_j Σ_i ds_ij, and of
    scale -½ Σ_i ‖q_i‖² Σ_j ds_ij - ½ Σ_j ‖k_j‖² Σ_i ds_ij where it is an array."""
    ds = quadratic.masked(xp, a, ds)
    q_shape = (*like["q"].shape[:-2], *a.q.shape[-2:])
    rows, columns = xp.sum(ds, axis=-1, keepdims=True), xp.sum(ds, axis=-2)[..., None]
    of_queries = rows * a.scale * a.q
    of_keys = quadratic.sum_to(xp, columns * a.scale, _key_rows(ds, a.k)) * a.k
    grads = {
        "q": -quadratic.sum_to(xp, of_queries, q_shape),
        "k": -quadratic.sum_to(xp, of_keys, tuple(like["k"].shape)),
    }
    if "scale" in like:
        of_tokens = [quadratic.number_gradient(xp, rows * a.q * a.q, like["scale"])]
        squares = _for_queries(xp, xp.sum(a.k * a.k, axis=-1, keepdims=True), _heads(ds))
        of_tokens.append(quadratic.number_gradient(xp, columns * squares, like["scale"]))
        grads["scale"] = -0.5 * (of_tokens[0] + of_tokens[1])
    return grads


def _key_rows(ds: Array, k: Array) -> tuple[int, ...]:
    """The shape of Σ_i ds once the query heads that share a key head are added up, other axes as they are."""
    shape = (*ds.shape[:-2], k.shape[-2], 1)
    if len(shape) < 3 or k.ndim < 3 or k.shape[-3] == 1:
        return shape
    return (*shape[:-3], k.shape[-3], *shape[-2:])


GAUSSIAN = Family("gaussian_attention", weigh, score_gradient, prepare, exponents, beside)


@op(GAUSSIAN, GAUSSIAN.attend)
def gaussian_attention(q: A, k: A, v: A, *, impl: Impl = "auto", **common: Unpack[Common]) -> A:
    """o_i = Σ_j w_ij v_j with w_ij = exp(-(scale/2)·‖q_i - k_j‖² + bias_ij) on the visible keys, without a normaliser.

    Lu et al. 2021 (SOFT) eq 4-5, where k = q: with scale = 1/√d the exponent is -‖q_i - k_j‖²/(2√d).

    Args:
        q: (..., L, d). Leading axes broadcast; heads are axis -3.
        k: (..., S, d).
        v: (..., S, e).
        impl: "auto", "generic", the name of a kernel, or a tuple or list of names tried in order (see
            `attnkit.explain`).
        **common: `mask`, `bias` (-inf allowed), `causal`, `window`, `key_lengths`, `query_mask`, `scale` (None = 1/√d),
            `enable_gqa`, `dropout_mask`, `dropout`; see docs/semantics.md. A
            scale that is an array, () or (H,) with a number for each head, is differentiable.

    Returns:
        o (..., L, e) in the dtype of q, computed in float32 (float64 for float64). A row that sees no key is 0.

    Raises:
        ValueError: shapes or values that do not fit; an argument that this op does not take.
        TypeError: dtypes, libraries or devices that do not fit.
        NotImplementedError: `impl` names a kernel that cannot serve this call.
    """


gaussian_attention_weights = weights_of(gaussian_attention, GAUSSIAN)
gaussian_attention_vjp = vjp_of(
    gaussian_attention,
    GAUSSIAN,
    """With ds = w ⊙ dropout ⊙ (do vᵀ) and G = -(scale/2)·ds: dq_i = 2 Σ_j G_ij (q_i - k_j), dk_j = -2 Σ_i G_ij (q_i -
    k_j), dv = (w ⊙ dropout)ᵀ do, dbias = ds.""",
)
