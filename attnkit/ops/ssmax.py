"""Scalable-softmax attention: softmax of scores that grow with the logarithm of the number of keys."""

from collections.abc import Callable, Mapping
from typing import Unpack

from attnkit._core import quadratic
from attnkit._core.dispatch import Kernel, namespace
from attnkit._core.family import Family, op, vjp_of, weights_of
from attnkit._core.learned import finite, scaled, served
from attnkit._core.mask import Rows, log, row_length, visibility_of
from attnkit._core.special import times
from attnkit._core.typing import (
    A,
    AnyFunction,
    Array,
    Bindings,
    Common,
    DType,
    Factor,
    Impl,
    Keywords,
    Length,
    Namespace,
    OfLibrary,
)
from attnkit.ops import softmax
from attnkit.ops.softmax import SOFTMAX, softmax_attention, softmax_attention_vjp


def _factor(xp: Namespace, log_n: Factor, dtype: DType, slope: Factor, intercept: Factor) -> Factor:
    return quadratic.number(xp, slope, dtype) * log_n + quadratic.number(xp, intercept, dtype)


def _log_length(xp: Namespace, a: quadratic.Inputs, length: Length) -> Factor:
    return log(xp, quadratic.length_of_rows(xp, a, length))


def row_factor(
    xp: Namespace, a: quadratic.Inputs, slope: float | Array = 1.0, intercept: Factor = 0.0, length: Length = "visible"
) -> Factor:
    """slope·log n + intercept, a number or (..., L, 1)."""
    return _factor(xp, _log_length(xp, a, length), a.dtype, slope, intercept)


def weigh(xp: Namespace, s: Array, a: quadratic.Inputs, **of_rows: object) -> tuple[Array, Array]:
    """Those of softmax: the factor is in the scores."""
    return softmax.weigh(xp, s, a)


def score_gradient(xp: Namespace, s: Array, a: quadratic.Inputs, w: Array, dw: Array, **of_rows: object) -> Array:
    """ds_j = w_j (dw_j - Σ w dw)."""
    return softmax.score_gradient(xp, s, a, w, dw)


def beside(
    xp: Namespace,
    s: Array,
    a: quadratic.Inputs,
    w: Array,
    dw: Array,
    ds: Array,
    like: dict[str, Array],
    *,
    length: Length = "visible",
    **numbers: object,
) -> dict[str, Array]:
    """dslope = Σ ds log n·scale·q kᵀ and dintercept = Σ ds scale·q kᵀ, where they are arrays."""
    if not {"slope", "intercept"} & like.keys():
        return {}
    products = quadratic.contract(xp, quadratic.masked(xp, a, ds), a.k) * a.q * a.scale
    return _of_numbers(xp, products, _log_length(xp, a, length), like)


def _of_numbers(xp: Namespace, products: Array, log_n: float | Array, like: Bindings) -> dict[str, Array]:
    """The gradients of slope and intercept from the summands (..., L, d) of that of the factor."""
    summands = {"slope": products * log_n, "intercept": products}
    return {name: quadratic.number_gradient(xp, g, like[name]) for name, g in summands.items() if name in like}


SSMAX = Family(
    "ssmax_attention",
    weigh,
    score_gradient,
    row_factor=row_factor,
    beside=beside,
    numbers=("slope", "intercept"),
)


@op(SSMAX)
def ssmax_attention(
    q: A,
    k: A,
    v: A,
    *,
    slope: float | Array = 1.0,
    intercept: float | Array = 0.0,
    length: Length = "visible",
    impl: Impl = "auto",
    **common: Unpack[Common],
) -> A:
    """o_i = Σ_j w_ij v_j with w_ij = exp(t_ij) / Σ_t exp(t_it) over the keys t visible to query i, and
    t_ij = (slope·log n_i + intercept)·scale·q_i·k_j + bias_ij.

    Nakanishi 2025, with s = `slope` and without intercept. exp(s·log n·z) = n^(s·z): a score that stands out by 1/slope
    outweighs n others however long the sequence is, where softmax lets the largest weight fade as n grows.

    Args:
        q: (..., L, d). Leading axes broadcast; heads are axis -3.
        k: (..., S, d).
        v: (..., S, e).
        slope: s, a number or an array of any real float dtype, () or (H,) with a number for each head, which is
            differentiable and not read, as are those of `intercept` and `scale`. The paper learns it in each head.
        intercept: likewise. slope = 0 and intercept = 1 is softmax.
        length: n_i. "visible": the number of keys that query i sees, which makes the result independent of padding and
            of batch-mates; "all": S; or a number or an array > 0 broadcast to (..., L), used as given.
        impl: "auto", "generic", the name of a kernel, or a tuple or list of names tried in order (see
            `attnkit.explain`). Kernels are those of softmax for q times the factor of its row; of half types q, k and v
            reach them in float32, because the product is not rounded.
        **common: `mask`, `bias` (finite; not multiplied by the factor), `causal`, `window`, `key_lengths`,
            `query_mask`, `scale` (None = 1/√d), `enable_gqa`, `dropout_mask`, `dropout`; see docs/semantics.md.

    Returns:
        o (..., L, e) in the dtype of q, computed in float32 (float64 for float64). A row that sees no key is 0. One
        that sees a single key is its value, and without intercept passes no gradient to its query.

    Raises:
        ValueError: shapes or values that do not fit; an argument that this op does not take.
        TypeError: dtypes, libraries or devices that do not fit.
        NotImplementedError: `impl` names a kernel that cannot serve this call.
    """


ssmax_attention_weights = weights_of(ssmax_attention, SSMAX)
ssmax_attention_vjp = vjp_of(
    ssmax_attention,
    SSMAX,
    """With dw = do vᵀ ⊙ dropout, dt = w ⊙ (dw - Σ_j w dw) and f = slope·log n + intercept: dq = f·scale·dt k,
    dk = scale·dtᵀ (f·q), dv = (w ⊙ dropout)ᵀ do, dbias = dt, dscale = Σ dt ⊙ f·q kᵀ, dslope = Σ dt ⊙ log n·scale·q kᵀ,
    dintercept = Σ dt ⊙ scale·q kᵀ.""",
)


# ---------------------------------------------------------------------------------------------- by kernels of softmax


def _log_of_rows(xp: Namespace, q: Array, k: Array, length: Length, common: Bindings) -> Factor:
    """log n of a call, a number or (..., L, 1), without an array of pairs where visibility can be counted."""
    dtype, queries, keys = quadratic.compute_dtype(xp, q), q.shape[-2], k.shape[-2]
    count: Factor = keys
    if isinstance(length, str) and length == "visible":
        visibility = visibility_of(common)
        if visibility.masked or visibility.causal:
            count = visibility.counted(xp, q, keys, dtype)
    return log(xp, row_length(xp, length, count, keys, Rows(0, queries, queries), dtype))


def kernels(table: Mapping[str, Kernel], is_finite: Callable[..., bool] = lambda q: False) -> dict[str, Kernel]:
    """The table of a library: its kernel of softmax attention for q times the factor of its row, in the compute dtype,
    into which the factor would otherwise be rounded.

    `is_finite(q)` says that no NaN and no infinity has to be kept from the gradient of a learned factor, where that is
    cheap to know: then one pass makes the product.
    """
    of = {name: served(name, table[name]) for name in (SOFTMAX.name, f"{SOFTMAX.name}_vjp")}
    forward, backward = of.values()

    def wide(xp: Namespace, *arrays: Array) -> list[Array]:
        return [quadratic.cast(xp, x, quadratic.compute_dtype(xp, x)) for x in arrays]

    def multiply(xp: Namespace, q: Array, factor: Factor, options: Bindings) -> Array:
        return times(q, factor) if not SSMAX.learned(options, {}) or is_finite(q) else scaled(xp, q, factor)

    def factor_of(xp: Namespace, q: Array, k: Array, options: Bindings) -> tuple[Factor, Factor, Keywords]:
        """log n, the factor, and the options of softmax."""
        own, common = SSMAX.split_options(options)
        log_n = _log_of_rows(xp, q, k, own.get("length", "visible"), common)
        slope, intercept = own.get("slope", 1.0), own.get("intercept", 0.0)
        return log_n, _factor(xp, log_n, quadratic.compute_dtype(xp, q), slope, intercept), common

    def attend(q: Array, k: Array, v: Array, **options: object) -> Array:
        xp = namespace(q)
        _, factor, common = factor_of(xp, q, k, options)
        of_q, of_k, of_v = wide(xp, q, k, v)
        product = multiply(xp, of_q, factor, options)
        wide_o: OfLibrary = softmax_attention(product, of_k, of_v, **common, impl=forward.name)
        o: Array = quadratic.cast(xp, wide_o, q.dtype)
        return o

    def pull(q: Array, k: Array, v: Array, do: Array, **options: object) -> dict[str, Array]:
        xp = namespace(q)
        log_n, factor, common = factor_of(xp, q, k, options)
        of_q, of_k, of_v, of_o = wide(xp, q, k, v, do)
        product = multiply(xp, of_q, factor, options)
        grads = softmax_attention_vjp(product, of_k, of_v, of_o, **common, impl=backward.name)
        of_product, like = grads["q"], {"q": q, "k": k, "v": v, **options}
        if learned := SSMAX.learned(options, {}):
            grads |= _of_numbers(xp, of_product * finite(xp, of_q), log_n, learned)
        grads["q"] = quadratic.sum_to(xp, of_product * factor, tuple(q.shape))
        return quadratic.rounded(xp, grads, like)

    def asked(question: AnyFunction) -> AnyFunction:
        return lambda *arrays, **options: question(*arrays, **SSMAX.split_options(options)[1])

    def kernel(by: Kernel, call: AnyFunction) -> Kernel:
        questions = (asked(by.unsupported), asked(by.is_faster))
        names = ("scale", *SSMAX.numbers)
        return Kernel(by.name, call, *questions, learned=names, taken=by.taken, misplaced=by.misplaced)

    return {SSMAX.name: kernel(forward, attend), f"{SSMAX.name}_vjp": kernel(backward, pull)}
