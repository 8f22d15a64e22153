"""Nyströmformer attention: three softmaxes through the means of segments, and a cubic iteration for an inverse."""

import math
from functools import partial
from typing import Generic, NamedTuple, Required, Unpack

from attnkit._core import check
from attnkit._core.derived import vjp_like, weights_like
from attnkit._core.dispatch import Kernel, namespace, operation_checked_by, with_gradients
from attnkit._core.mask import positions
from attnkit._core.quadratic import cast, compute_dtype, sum_to
from attnkit._core.special import cumulative_sum
from attnkit._core.tokens import (
    ScaledTokens,
    both,
    chosen,
    diagonal,
    first_maximum,
    gradient_like,
    join_heads,
    key_mask,
    one_of,
    split_heads,
    steps,
    valid_keys,
    whole,
)
from attnkit._core.typing import A, Array, Factor, Impl, Keywords, Namespace, OfLibrary
from attnkit.ops.lowrank.products import Attention, Softmax, W, Weigh
from attnkit.ops.softmax import softmax_attention, softmax_attention_vjp

Products = Softmax | Attention


class _Inputs(NamedTuple):
    """Tokens in the compute dtype, 0 where invalid, heads split under GQA; and the op's own options."""

    q: Array  # (..., n, d)
    k: Array  # (..., n, d)
    v: OfLibrary  # (..., n, e), None for weights
    valid: Array | None  # (..., n), None = all
    scale: float
    shared: int | None  # heads of k under GQA
    num_landmarks: int
    inverse_steps: int
    init: str


class _Norm(NamedTuple):
    """What divides K2ᵀ in Z_0, not 0, and where its gradient goes."""

    value: Array  # (..., 1, 1), or (1,) for the whole batch
    first: Array  # (..., 1, m)


class _Landmarks(NamedTuple, Generic[W]):
    """o = K1 (exact ? M v : Z K3 v): with at most m tokens each landmark is a token, and K1 is the whole softmax."""

    means: Array  # M (..., m, n)
    exact: Array | None  # (..., 1, 1), None = no item
    k1: W  # (..., n, m)
    k2: Softmax
    k3: W
    norm: _Norm
    zs: list[Array]  # Z_0 .. Z, the inverse, each (..., m, m)


class _Options(ScaledTokens, total=False):
    num_landmarks: Required[int]
    inverse_steps: int
    init: str


def _prepare(
    xp: Namespace,
    q: Array,
    k: Array,
    v: Array | None,
    *,
    num_landmarks: int,
    inverse_steps: int = 6,
    init: str = "exact",
    **common: Unpack[ScaledTokens],
) -> _Inputs:
    dtype, n = compute_dtype(xp, q), q.shape[-2]
    shared = k.shape[-3] if common.get("enable_gqa") else None
    keys = valid_keys(xp, q, n, common.get("mask"), common.get("key_lengths"))
    valid = both(keys, common.get("query_mask"))
    if valid is not None:
        valid = split_heads(xp, xp.broadcast_to(valid, (*valid.shape[:-1], n)), shared, axis=-2)
    scale = common.get("scale")
    q, k = (chosen(xp, valid, split_heads(xp, cast(xp, x, dtype), shared)) for x in (q, k))
    v = None if v is None else chosen(xp, valid, split_heads(xp, cast(xp, v, dtype), shared))
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    return _Inputs(q, k, v, valid, scale, shared, num_landmarks, inverse_steps, init)


def _segment_starts(xp: Namespace, a: _Inputs, m: int) -> tuple[Array, Array, Array | None]:
    """The rank of each token among the valid ones (..., n), the first rank of each segment (..., m + 1), and the
    number of valid tokens (..., 1) where it is not n.

    m - (N mod m) segments of floor(N/m) tokens, then N mod m of one more; with N < m the first m - N are empty.
    """
    n = a.q.shape[-2]
    i = xp.astype(positions(xp, a.q, 0, m + 1), xp.int32)
    base: int | Array
    longer: int | Array
    if a.valid is None:
        rank, count, base, longer = xp.astype(positions(xp, a.q, 0, n), xp.int32), None, n // m, n % m
    else:
        ones = xp.astype(a.valid, xp.int32)
        rank = cumulative_sum(xp, ones, axis=-1, dtype=xp.int32) - 1
        count = xp.sum(ones, axis=-1, keepdims=True, dtype=xp.int32)
        base = count // m
        longer = count - base * m
    over = i - (m - longer)
    return rank, i * base + xp.where(over > 0, over, 0), count


def _landmarks(xp: Namespace, weigh: Weigh[W], a: _Inputs) -> _Landmarks[W]:
    """Landmarks, the three softmaxes and the inverse."""
    m = a.num_landmarks
    rank, starts, count = _segment_starts(xp, a, m)
    start, stop = starts[..., :-1][..., None], starts[..., 1:][..., None]
    inside = (rank[..., None, :] >= start) & (rank[..., None, :] < stop)
    full = None
    if a.valid is not None:
        inside = inside & a.valid[..., None, :]
        full = (stop > start)[..., 0]
    size = xp.astype(xp.where(stop > start, stop - start, 1), a.q.dtype)
    means = xp.where(inside, 1.0 / size, 0.0)
    q, k = means @ a.q, means @ a.k
    exact = None if count is None else (count <= m)[..., None]
    k2 = Softmax.of(q, k, full, full, a.scale)
    norm = _norm(xp, k2.w, exact, a.init)
    zs = _inverses(xp, k2.w, norm, a.inverse_steps)
    k1, k3 = weigh(a.q, k, a.valid, full, a.scale), weigh(q, a.k, full, a.valid, a.scale)
    return _Landmarks(means, exact, k1, k2, k3, norm, zs)


def _norm(xp: Namespace, k2: Array, exact: Array | None, init: str) -> _Norm:
    """‖K2‖₁ of each matrix, or the largest of all that are inverted ("batch_max")."""
    sums = xp.sum(k2, axis=-2, keepdims=True)
    if init == "exact":
        largest, first = first_maximum(xp, sums)
    else:
        sums = sums if exact is None else xp.where(exact, 0.0, sums)
        largest, first = first_maximum(xp, xp.reshape(sums, (math.prod(sums.shape),)))
        first = xp.reshape(first, sums.shape)
    return _Norm(xp.where(largest == 0, 1.0, largest), first)


def _inverses(xp: Namespace, k2: Array, norm: _Norm, count: int) -> list[Array]:
    """Z_0 = K2ᵀ/norm, then `count` times Z <- ¼ Z (13 I - K2 Z (15 I - K2 Z (7 I - K2 Z)))."""
    eye = xp.astype(diagonal(xp, k2), k2.dtype)
    zs = [xp.matrix_transpose(k2) / norm.value]
    for _ in range(count):
        z = zs[-1]
        kz = k2 @ z
        zs.append(0.25 * (z @ (13.0 * eye - kz @ (15.0 * eye - kz @ (7.0 * eye - kz)))))
    return zs


def _inverse_gradient(xp: Namespace, x: _Landmarks[W], dz: Array, init: str) -> Array:
    """dK2 for a cotangent of the last iterate, back through every step and the norm."""
    k2, norm = x.k2.w, x.norm
    eye = xp.astype(diagonal(xp, k2), k2.dtype)
    dk2 = dz * 0.0
    for z in reversed(x.zs[:-1]):
        kz = k2 @ z
        inner = 7.0 * eye - kz
        middle = 15.0 * eye - kz @ inner
        outer = 13.0 * eye - kz @ middle
        to_outer = 0.25 * (z.mT @ dz)
        to_middle = -(kz.mT @ to_outer)
        to_kz = kz.mT @ to_middle - to_outer @ middle.mT - to_middle @ inner.mT
        dk2 = dk2 + to_kz @ z.mT
        dz = 0.25 * (dz @ outer.mT) + k2.mT @ to_kz
    to_norm = -xp.sum(dz.mT * k2, axis=(-2, -1), keepdims=True) / (norm.value * norm.value)
    if init == "batch_max":
        to_norm = xp.sum(to_norm)  # the batch shares one norm
    return dk2 + dz.mT / norm.value + xp.where(norm.first, to_norm, 0.0)


def _context(op: str, arrays: Keywords, options: Keywords) -> check.Context:
    context = check.attention_context(op, arrays, options)
    if context.queries != context.keys:
        expected = f"(..., {context.queries}, d): queries and keys are the same tokens"
        check.wrong_shape(op, "k", arrays["k"], expected)
    if "num_landmarks" not in options:
        raise TypeError(f"{op}: missing argument 'num_landmarks'")
    return context


def _positive(c: check.Context, name: str, value: object) -> None:
    whole(c.op, name, value, 1)


_OWN = {
    "scale": check.plain_number,
    "num_landmarks": _positive,
    "inverse_steps": steps,
    "init": one_of("exact", "batch_max"),
    "mask": key_mask,
}


def _exact(weigh: Weigh[W], a: _Inputs) -> W:
    """The weights of exact softmax attention."""
    return weigh(a.q, a.k, a.valid, a.valid, a.scale)


def _middle(xp: Namespace, x: _Landmarks[W], u: Array, v: Array | None) -> Array:
    """What K1 multiplies, from u = K3 v; v = None stands for the identity."""
    middle = x.zs[-1] @ u
    return middle if x.exact is None else xp.where(x.exact, x.means if v is None else x.means @ v, middle)


def attend(weigh: Weigh[Products], q: Array, k: Array, v: Array, **options: Unpack[_Options]) -> Array:
    """`nystrom_attention` with products like those of `Softmax.of`."""
    xp = namespace(q)
    a = _prepare(xp, q, k, v, **options)
    if a.num_landmarks >= q.shape[-2]:
        o = _exact(weigh, a).times(a.v)
    else:
        x = _landmarks(xp, weigh, a)
        o = x.k1.times(_middle(xp, x, x.k3.times(a.v), a.v))
    return cast(xp, join_heads(xp, o, a.shared), q.dtype)


def pull(
    weigh: Weigh[Products], q: Array, k: Array, v: Array, do: Array, **options: Unpack[_Options]
) -> dict[str, Array]:
    """`nystrom_attention_vjp` with them."""
    xp = namespace(q)
    a = _prepare(xp, q, k, v, **options)
    do = chosen(xp, a.valid, split_heads(xp, cast(xp, do, a.q.dtype), a.shared))
    exact = a.num_landmarks >= q.shape[-2]
    grads = _exact(weigh, a).pull(a.v, do) if exact else _gradients(xp, weigh, a, do)
    return {name: gradient_like(xp, g, x, a.shared) for name, g, x in zip("qkv", grads, (q, k, v), strict=True)}


def _gradients(xp: Namespace, weigh: Weigh[Products], a: _Inputs, do: Array) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v through landmarks."""
    x = _landmarks(xp, weigh, a)
    u = x.k3.times(a.v)
    direct: Factor = 0.0
    dq, dk_means, dmiddle = x.k1.pull(_middle(xp, x, u, a.v), do)
    if x.exact is not None:
        direct = sum_to(xp, x.means.mT @ xp.where(x.exact, dmiddle, 0.0), tuple(a.v.shape))
        dmiddle = xp.where(x.exact, 0.0, dmiddle)
    dz = sum_to(xp, dmiddle @ u.mT, tuple(x.k2.w.shape))
    from_inverse = x.k2.pull_weights(_inverse_gradient(xp, x, dz, a.init))
    dq_means, dk, dv = x.k3.pull(a.v, x.zs[-1].mT @ dmiddle)
    dq = dq + x.means.mT @ (dq_means + from_inverse[0])
    return dq, dk + x.means.mT @ (dk_means + from_inverse[1]), dv + direct


@operation_checked_by(_context, _OWN, runs=partial(attend, Softmax.of))
def nystrom_attention(
    q: A,
    k: A,
    v: A,
    *,
    num_landmarks: int,
    inverse_steps: int = 6,
    init: str = "exact",
    impl: Impl = "auto",
    **common: Unpack[ScaledTokens],
) -> A:
    """o = K1 Z K3 v with K1 = softmax(q k̃ᵀ), K2 = softmax(q̃ k̃ᵀ), K3 = softmax(q̃ kᵀ), all scaled, and Z ≈ K2⁻¹.

    Xiong et al. 2021, Algorithm 1. q̃ and k̃ are means over segments of the valid tokens of each item: m - (n mod m)
    segments of ⌊n/m⌋ tokens in order, then n mod m of one more. Z_0 = K2ᵀ/‖K2‖₁ and `inverse_steps` times
    Z <- ¼ Z (13 I - K2 Z (15 I - K2 Z (7 I - K2 Z))). There is no causal form: a mean mixes the future in.

    Args:
        q, k: (..., n, d). Leading axes broadcast; heads are axis -3.
        v: (..., n, e).
        num_landmarks: m. An item with at most m valid tokens gets exact softmax attention.
        inverse_steps: part of the definition, not a precision: 6, the authors' choice, leaves Z far from the inverse.
        init: "exact" takes ‖K2‖₁, the maximum column sum, of each matrix; "batch_max" the largest of all leading axes,
            as the authors' code does by default: an item then depends on its batch-mates. Items that get exact softmax
            are left out.
        impl: "auto", "generic", the name of a kernel, or a tuple or list of names tried in order (see
            `attnkit.explain`).
        **common: `mask`, a key mask (..., 1, n) or (n,), `key_lengths` and `query_mask` (..., n): a token that one of
            them excludes is neither key nor query, and its output is 0. `scale` (None = 1/√d), `enable_gqa`.

    Returns:
        o (..., n, e) in the dtype of q, computed in float32 (float64 for float64).

    Raises:
        ValueError: shapes or values that do not fit; an argument that this op does not take.
        TypeError: dtypes, libraries or devices that do not fit.
        NotImplementedError: `impl` names a kernel that cannot serve this call.
    """


@operation_checked_by(_context, _OWN)
@weights_like(nystrom_attention)
def nystrom_attention_weights(q: Array, k: Array, **options: Unpack[_Options]) -> Array:
    """K1 Z K3 (..., n, n), by which `nystrom_attention` multiplies v, in the dtype of q; entries may be negative."""
    xp = namespace(q)
    a = _prepare(xp, q, k, None, **options)
    if a.num_landmarks >= q.shape[-2]:
        w = _exact(Softmax.of, a).w
    else:
        x = _landmarks(xp, Softmax.of, a)
        w = x.k1.w @ _middle(xp, x, x.k3.w, None)
    return cast(xp, join_heads(xp, w, a.shared), q.dtype)


@operation_checked_by(_context, _OWN)
@vjp_like(nystrom_attention)
def nystrom_attention_vjp(q: Array, k: Array, v: Array, do: Array, **options: Unpack[_Options]) -> dict[str, Array]:
    """Gradients {"q", "k", "v"} for the cotangent do: through the three softmaxes, the means, every inverse step and
    the norm of Z_0, whose maximum passes its gradient to the first column (of the whole batch for "batch_max").
    """
    return pull(Softmax.of, q, k, v, do, **options)


# ---------------------------------------------------------------------------------------------- kernels


ENOUGH = 1 << 18
"""Weights of a call, n·m for every head, from which the CPU library takes less time. With 8 heads of 64 features, on
NumPy, torch and JAX: at n = 2048 and m = 64, 0.70 to 0.79 of the generic time forward and 0.72 to 0.81 with gradients;
at n = 4096 and m = 256, 0.60 to 0.71 and 0.50 to 0.67; with half as many weights, 0.78 to 0.89 and 0.94 to 1.15."""


def is_faster(q: Array, *rest: Array, num_landmarks: int, **options: object) -> bool:
    """Whether the products outweigh what is beside them."""
    return math.prod(q.shape[:-1]) * min(num_landmarks, q.shape[-2]) >= ENOUGH


def kernels(of: Kernel) -> dict[str, Kernel]:
    """The table of a library: products with the three softmaxes by its kernel of softmax attention."""
    weigh = Attention.by(softmax_attention, softmax_attention_vjp, of.name)

    def unsupported(*arrays: Array, enable_gqa: bool = False, **options: object) -> str | None:
        return of.unsupported(*arrays, enable_gqa=enable_gqa)

    kernel = Kernel(of.name, partial(attend, weigh), unsupported, is_faster)
    return with_gradients(nystrom_attention, kernel, partial(pull, weigh))
