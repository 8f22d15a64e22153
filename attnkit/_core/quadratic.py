"""The parts of a quadratic op that do not depend on its score function: mask and cast the inputs, form scores, multiply
by v, and the same backwards.

A family is one function `weigh(xp, s, a, **own) -> (u, r)`: the weights are w = r·u, u (..., L, S) from the scores and
r a factor per row (a number or (..., L, 1)). The factor commutes with the product, so o = r·(u v) multiplies L·e
numbers instead of L·S, and u may stay unnormalised.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

from attnkit._core.check import broadcast, is_learned
from attnkit._core.dropout import keep_mask
from attnkit._core.mask import Rows, Visibility, row_length, seen_keys, tile
from attnkit._core.special import inverse_root, stop_gradient, transposed
from attnkit._core.typing import (
    DEFAULTS,
    A,
    Array,
    Bindings,
    Common,
    DType,
    Factor,
    Length,
    Namespace,
    OfLibrary,
    Picks,
    Seed,
    Seeing,
)

COMMON = tuple(DEFAULTS)


class Normalised(NamedTuple):
    """q and k before a per-token function was applied, and pull(xp, x, g): the gradient of x from that of f(x)."""

    q: Array  # (..., L, d)
    k: Array  # (..., S, d)
    pull: Callable[[Namespace, Array, Array], Array]


class Inputs(NamedTuple):
    """The arguments of a quadratic op in the compute dtype, with everything invisible replaced by 0 (semantics A6)."""

    q: Array  # (..., L, d)
    k: Array  # (..., S, d)
    v: Array | None  # (..., S, e)
    scale: float | Array  # a number, or an array that broadcasts to (..., L, S)
    bias: Array | None  # broadcasts to (..., L, S)
    pairs: Array | None  # visible(i, j), broadcasts to (..., L, S); None = all
    live: Array | None  # (..., L, 1) queries that see a key, None = all
    count: Any  # n_i, a number or (..., L, 1); tuples have a method of that name
    drop: Array | None  # broadcasts to (..., L, S): multiplies the weights just before the product with v
    rows: Rows
    dtype: DType  # the compute dtype
    normalised: Normalised | None = None  # the normalisation that gradients of q and k pass through
    factor: float | Array = 1.0  # of the products of a row: a number or (..., L, 1)
    passed: Array | None = None  # (..., L, S) tokens up to the query whose gates count, of ops that have gates
    log_decay: Factor | None = None  # of features that fade, as given: a number, (), (H,) or (..., S)

    @property
    def keys(self) -> int:
        return self.k.shape[-2]

    @property
    def multiplier(self) -> Factor:
        """What multiplies the products q kᵀ."""
        return self.scale if isinstance(self.factor, float) and self.factor == 1.0 else self.scale * self.factor


Weigh = Callable[..., tuple[Array, Factor]]


class Preparing(Common, total=False):
    """The options of `prepare`."""

    rows: Rows | None
    part: tuple[tuple[int, ...], Picks] | None


def compute_dtype(xp: Namespace, x: Array) -> DType:
    return xp.float64 if x.dtype == xp.float64 else xp.float32


def cast(xp: OfLibrary, x: A, dtype: DType) -> A:
    return x if x.dtype == dtype else xp.astype(x, dtype)


def cast_for(q: A, xp: Namespace, x: OfLibrary, dtype: DType) -> A:
    """`cast` of what the type of q, an array of the same library, is not known of."""
    converted: A = cast(xp, x, dtype)
    return converted


def prepare(
    xp: Namespace,
    q: Array,
    k: Array,
    v: Array | None = None,
    *,
    bias: Array | None = None,
    scale: float | Array | None = None,
    enable_gqa: bool = False,
    dropout_mask: Array | None = None,
    dropout: tuple[float, Seed] | None = None,
    rows: Rows | None = None,
    part: tuple[tuple[int, ...], Picks] | None = None,
    **seeing: Unpack[Seeing],
) -> Inputs:
    """Cast, compute visibility, and zero the keys that no query sees and the queries that see no key.

    `seeing` holds the fields of `Visibility`. `part` is for dropout: the leading axes of the whole call, and the
    indices of this block within them.
    """
    dtype = compute_dtype(xp, q)
    total, keys = q.shape[-2], k.shape[-2]
    rows = rows or Rows(0, total, total)
    heads, shared = (q.shape[-3], k.shape[-3]) if enable_gqa else (1, 1)
    leading, picked = part or (leading_axes(q, k, v, enable_gqa) if dropout is not None else (), ())

    visibility = Visibility(**seeing).tile(rows)
    pairs = visibility.pairs(xp, q, keys, rows)
    q, bias, drop = tile(q, -2, rows), tile(bias, -2, rows), tile(dropout_mask, -2, rows)
    q, k = cast(xp, q, dtype), cast(xp, k, dtype)
    v = None if v is None else cast(xp, v, dtype)
    bias = None if bias is None else cast(xp, bias, dtype)
    drop = None if drop is None else cast(xp, stop_gradient(drop), dtype)
    live: Array | None = None
    count: Factor = keys
    if pairs is not None:
        count = visibility.counts(xp, q, pairs, keys, rows, dtype)
        drop = None if drop is None else xp.where(pairs, drop, 0.0)
        all_live, all_seen = visibility.always(rows, keys)
        if not all_seen:
            visible_keys = seen_keys(xp, pairs, heads, shared)
            k = xp.where(visible_keys, k, 0.0)
            v = None if v is None else xp.where(visible_keys, v, 0.0)
        if not all_live:
            live = xp.any(pairs, axis=-1, keepdims=True)
            q = xp.where(live, q, 0.0)
    if dropout is not None and dropout[0] > 0:
        p, seed = dropout
        drop = cast(xp, keep_mask(xp, q, p, seed, leading, keys, rows, picked), dtype) * (1.0 / (1.0 - p))
    scale = inverse_root(xp, q.shape[-1], dtype) if scale is None else number(xp, scale, dtype)
    return Inputs(q, k, v, scale, bias, pairs, live, count, drop, rows, dtype)


def number(xp: Namespace, x: Factor, dtype: DType) -> Factor:
    """A number, or an array of one () or of one per head (H,) in this dtype, as it multiplies (..., H, L, S)."""
    if isinstance(x, (int, float)) or not is_learned(x):
        return float(x)
    x = cast(xp, x, dtype)
    return x[..., None, None] if x.ndim else x


def number_gradient(xp: Namespace, g: Array, like: Array) -> Array:
    """Summands (..., H, L, ·) of the gradient of such an array added up."""
    return sum_to(xp, xp.sum(g, axis=(-2, -1)), tuple(like.shape))


def leading_axes(q: Array, k: Array, v: Array | None, enable_gqa: bool) -> tuple[int, ...]:
    """The leading axes of the output."""
    return leading_shape(tuple(q.shape), tuple(k.shape), None if v is None else tuple(v.shape), enable_gqa)


def leading_shape(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...] | None, enable_gqa: bool
) -> tuple[int, ...]:
    """The leading axes, from the shapes of q, k and v."""
    end = -3 if enable_gqa else -2
    leading = broadcast("attention", "leading axes", *(x[:end] for x in (q, k, v) if x is not None))
    return (*leading, q[-3]) if enable_gqa else leading


def mean(xp: Namespace, x: Array, axes: tuple[int, ...]) -> Array:
    """The mean along axes, which are kept; 0 for empty axes, without NumPy's warning."""
    nothing = 0 in [x.shape[axis] for axis in axes]
    return xp.sum(x, axis=axes, keepdims=True) if nothing else xp.mean(x, axis=axes, keepdims=True)


def contract(xp: Namespace, x: Array, y: Array) -> Array:
    """x y for x with the heads of the queries and y with those of the keys.

    Under GQA the query heads that share a y are folded into the row axis, so y is neither repeated nor copied.
    """
    if x.ndim < 3 or y.ndim < 3 or y.shape[-3] in (1, x.shape[-3]) or x.shape[-3] == 1:
        return x @ y
    heads, shared, length = x.shape[-3], y.shape[-3], x.shape[-2]
    folded = xp.reshape(x, (*x.shape[:-3], shared, heads // shared * length, x.shape[-1]))
    product = folded @ y
    return xp.reshape(product, (*product.shape[:-3], heads, length, y.shape[-1]))


def scores(xp: Namespace, a: Inputs) -> Array:
    """s = scale·q kᵀ + bias (semantics A2), before invisible scores are masked."""
    s = contract(xp, a.q * a.multiplier, transposed(a.k))
    return s if a.bias is None else s + a.bias


def length_of_rows(xp: Namespace, a: Inputs, length: Length) -> Factor:
    return row_length(xp, length, a.count, a.keys, a.rows, a.dtype)


def output(xp: Namespace, a: Inputs, u: Array, r: Factor) -> Array:
    """o = r·((u ⊙ dropout) v) in the compute dtype, 0 on rows that see nothing."""
    assert a.v is not None
    o = contract(xp, u if a.drop is None else u * a.drop, a.v)
    o = o if isinstance(r, float) and r == 1.0 else o * r
    return masked_rows(xp, a, o)


def masked(xp: Namespace, a: Inputs, w: Array) -> Array:
    """w with exactly 0 on invisible pairs."""
    return w if a.pairs is None else xp.where(a.pairs, w, 0.0)


def sum_to(xp: OfLibrary, g: A, shape: tuple[int, ...]) -> A:
    """A gradient summed over the axes along which its input was broadcast; a head axis that is a multiple of the
    input's (GQA) is summed over each group."""
    extra = g.ndim - len(shape)
    if extra:
        g = xp.sum(g, axis=tuple(range(extra)))
    if len(shape) >= 3 and shape[-3] not in (1, g.shape[-3]):
        groups = (shape[-3], g.shape[-3] // shape[-3])
        g = xp.sum(xp.reshape(g, (*g.shape[:-3], *groups, *g.shape[-2:])), axis=-3)
    axes = tuple(i for i, (have, want) in enumerate(zip(g.shape, shape, strict=True)) if have != want)
    return xp.sum(g, axis=axes, keepdims=True) if axes else g


def _shape_intile(x: Array, a: Inputs) -> tuple[int, ...]:
    """The shape of x, which has an axis of queries, for these rows."""
    shape = tuple(x.shape)
    if len(shape) < 2 or shape[-2] != a.rows.total:
        return shape
    return (*shape[:-2], a.rows.stop - a.rows.start, shape[-1])


def score_gradients(xp: Namespace, a: Inputs, ds: Array, like: Bindings) -> dict[str, Array]:
    """Gradients of the arguments q, k, bias and scale (in the compute dtype) from ds, the gradient of the scores."""
    q, k, bias, scale = like["q"], like["k"], like["bias"], like.get("scale")
    towards_q = contract(xp, ds, a.k)
    dq, dk = towards_q * a.multiplier, ds.mT @ (a.q * a.multiplier)
    if a.normalised is not None:
        before = a.normalised
        dq = before.pull(xp, before.q, sum_to(xp, dq, tuple(before.q.shape)))
        dk = before.pull(xp, before.k, sum_to(xp, dk, tuple(before.k.shape)))
    grads = {"q": sum_to(xp, dq, _shape_intile(q, a)), "k": sum_to(xp, dk, tuple(k.shape))}
    if bias is not None:
        grads["bias"] = sum_to(xp, ds, _shape_intile(bias, a))
    if scale is not None:
        grads["scale"] = number_gradient(xp, towards_q * a.q * a.factor, scale)
    return grads


def backward(
    xp: Namespace,
    a: Inputs,
    w: Array,
    do: Array | None,
    ds_of: Callable[[OfLibrary], Array],
    like: Bindings,
) -> dict[str, Array]:
    """Gradients of q, k, v, bias and scale for o = (w ⊙ dropout) v in the compute dtype; `like` holds the arguments.

    `ds_of(dw)` maps the gradient of the weights to that of the scores.
    """
    dw, of_v = product_gradients(xp, a, w, do, like.get("v"))
    return score_gradients(xp, a, masked(xp, a, ds_of(dw)), like) | of_v


def product_gradients(
    xp: Namespace, a: Inputs, w: Array, do: Array | None, v: Array | None
) -> tuple[Array | float, dict[str, Array]]:
    """The gradient of the weights, and {"v"}, for o = (w ⊙ dropout) v; do=None means 0, v=None no product."""
    if v is None:
        return 0.0, {}
    if do is None:
        return 0.0, {"v": xp.zeros_like(cast(xp, v, a.dtype))}
    do = masked_rows(xp, a, cast(xp, do, a.dtype))
    dw, dropped = contract(xp, do, xp.matrix_transpose(a.v)), w
    if a.drop is not None:
        dw, dropped = dw * a.drop, w * a.drop
    return dw, {"v": sum_to(xp, dropped.mT @ do, tuple(v.shape))}


def masked_rows(xp: Namespace, a: Inputs, x: Array) -> Array:
    """x (..., L, ·) with 0 on rows that see nothing."""
    return x if a.live is None else xp.where(a.live, x, 0.0)


def rounded(xp: Namespace, grads: dict[str, Array], like: Bindings) -> dict[str, OfLibrary]:
    """Gradients in the dtypes of their arguments, rounded once."""
    return {name: cast(xp, g, like[name].dtype) for name, g in grads.items()}
