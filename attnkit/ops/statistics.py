"""Statistics of each row of attention weights, without an (L, S) array in memory."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from attnkit._core import check, quadratic
from attnkit._core.dispatch import (
    OPTION,
    Kernel,
    Key,
    as_kernel,
    call_signature,
    choose,
    kernels_of,
    known_beside_an_op,
    namespace,
    remember_prepared,
    repeat,
    run,
)
from attnkit._core.family import RECORDS, Family, Record
from attnkit._core.mask import Rows, positions
from attnkit._core.special import take_along
from attnkit._core.tokens import cotangent
from attnkit._core.typing import A, AnyFunction, Array, Arrays, FullName, Impl, Keywords, Namespace, OfLibrary

R = TypeVar("R")
Measured = FullName | AnyFunction  # an op or its name
Fields = Iterable[str] | None  # names of `RowStatistics`, None = all

_TILE = 2**23  # weights at a time: 32 MiB; smaller blocks stay in the C heap when freed, and torch grew by gigabytes


def outside(family: Family) -> tuple[str, ...]:
    """Names of arguments that belong to the output only."""
    return ("dropout_mask", "dropout", *family.output_only)


def options_of(record: Record, with_output: bool) -> tuple[str, ...]:
    """The options that an op takes here; arrays beside q, k and v are among them."""
    left_out = {"impl", "return_lse", "return_remainder", *record.family.stateful}
    left_out |= set() if with_output else {*outside(record.family)}
    return tuple(name for name in record.options if name not in left_out)


class RowStatistics(NamedTuple):
    """Per query, (..., H, L) in the compute dtype; fields that were not requested are None.

    With w the weights of the row (before dropout): `total` Z = Σw · `entropy` H = -Σ p log p of p = w/Z, in nats, with
    0·log 0 = 0 · `sum_squares` Σw² · `maximum` max w over visible keys · `nonzero` the number of w ≠ 0, exact for relu,
    relu_squared, relu6, sparsemax, entmax and ReLA and the number of visible keys otherwise · `visible` n_i.

    A row without visible keys (null) and one whose weights are all 0 (dead) has 0 in every field but `visible`, which
    stays n_i so that both kinds can be counted; no gradient flows from them.
    """

    total: OfLibrary | None = None  # (..., L)
    entropy: OfLibrary | None = None  # (..., L)
    sum_squares: OfLibrary | None = None  # (..., L)
    maximum: OfLibrary | None = None  # (..., L)
    nonzero: OfLibrary | None = None  # (..., L)
    visible: OfLibrary | None = None  # (..., L)


class _Call(NamedTuple):
    """A checked call: the family, its own options and the common ones, and the fields to compute."""

    xp: Namespace
    op: str
    family: Family
    own: Keywords
    common: Keywords
    fields: tuple[str, ...]
    exact_zeros: bool
    context: check.Context


def _call(caller: str, op: "Measured", arrays: dict[str, Array], fields: Fields, params: Keywords) -> _Call:
    name = getattr(op, "__name__", op)
    if name not in RECORDS:
        check.refuse_name(caller, "op", name, RECORDS)
    label = f"{caller}({name})"
    record = RECORDS[name]
    accepted, family = options_of(record, "v" in arrays), record.family
    options = {key: x for key, x in params.items() if key not in family.output_only}
    check.known_options(label, params, accepted)
    if OPTION in accepted and OPTION not in params:
        raise TypeError(f"{label}: missing argument {OPTION!r}")
    context = check.call(label, tuple(arrays), tuple(arrays.values()), options, accepted, family.context, family.checks)
    fields = RowStatistics._fields if fields is None else tuple(fields)
    for field in fields:
        if field not in RowStatistics._fields:
            check.refuse_name(label, "fields", field, RowStatistics._fields)
    own, common = family.split_options(context.options)
    own = family.translated(arrays["q"], own)
    if "entropy" in fields and family.signed(**own):
        rest = tuple(field for field in RowStatistics._fields if field != "entropy")
        got = ", ".join(f"{key}={value!r}" for key, value in own.items())
        raise ValueError(f"{label}: entropy needs weights that are not negative; got {got}; pass fields={rest}")
    return _Call(namespace(arrays["q"]), name, family, own, common, fields, family.exact_zeros(**own), context)


def _tiles(q: Array, k: Array, scores: int | None = None) -> Iterator[Rows]:
    """Blocks of queries with about `scores` weights each (default `_TILE`)."""
    total = q.shape[-2]
    heads = max(math.prod(q.shape[:-2]), math.prod(k.shape[:-2]))
    size = max(1, (scores or _TILE) // max(1, heads * k.shape[-2]))
    if total <= size:  # no loop: torch.compile would fix its length
        yield Rows(0, total, total)
        return
    for start in range(0, total, size):
        yield Rows(start, min(start + size, total), total)


def _first_maximum(xp: Namespace, a: quadratic.Inputs, w: Array) -> tuple[Array, Array]:
    """max w over the visible keys and the first key that attains it, both (..., L, 1)."""
    visible = w if a.pairs is None else xp.where(a.pairs, w, -math.inf)
    index = xp.argmax(visible, axis=-1, keepdims=True)
    return take_along(xp, w, index, -1), index


def _alive(xp: Namespace, w: Array) -> tuple[Array, Array, Array]:
    """(alive, Z, p): whether any weight is not 0, the row sum, and the normalised weights (0 on dead rows)."""
    alive = xp.any(w != 0, axis=-1, keepdims=True)
    total = xp.sum(w, axis=-1, keepdims=True)
    safe = xp.where(alive & (total != 0), total, 1.0)
    return alive, total, w / safe


def _measure(call: _Call, a: quadratic.Inputs, w: Array) -> RowStatistics:
    """The statistics of the rows of w (..., L, S)."""
    xp, fields = call.xp, {}
    alive, total, p = _alive(xp, w)
    live = alive[..., 0]
    # numbers first: torch.compile turns them into symbols without attributes
    constant = isinstance(a.count, (int, float)) or not hasattr(a.count, "ndim")
    visible = xp.full_like(total, a.count) if constant else xp.broadcast_to(a.count, total.shape)
    if "total" in call.fields:
        fields["total"] = total[..., 0]
    if "entropy" in call.fields:
        fields["entropy"] = -xp.sum(p * xp.log(xp.where(p > 0, p, 1.0)), axis=-1)
    if "sum_squares" in call.fields:
        fields["sum_squares"] = xp.sum(w * w, axis=-1)
    if "maximum" in call.fields:
        fields["maximum"] = _first_maximum(xp, a, w)[0][..., 0] if a.keys else total[..., 0]
    if "nonzero" in call.fields:
        exact = xp.sum(xp.astype(w != 0, a.dtype), axis=-1)
        fields["nonzero"] = exact if call.exact_zeros else visible[..., 0]
    # also so that a cotangent of a dead row, which may be NaN, reaches no number that all rows share
    fields = {name: xp.where(live, x, 0.0) for name, x in fields.items()}
    if "visible" in call.fields:
        fields["visible"] = visible[..., 0]
    return RowStatistics(**fields)


_FAINT = 128.0
"""Smallest normal numbers to which the weights of a row sum up where the gradient of its entropy begins: below, weights
lose their digits, and the gradient of one, (log p + H)/Z, is beyond the largest number."""


def _weight_gradient(call: _Call, a: quadratic.Inputs, w: Array, d: RowStatistics) -> Array:
    """dw from the cotangents of the statistics: dZ - dH (log p + H)/Z on the support + 2 w dΣw² + dmax at the first
    maximum; 0 on dead and null rows, and of H on faint ones."""
    xp = call.xp
    alive, total, p = _alive(xp, w)
    dw = xp.zeros_like(w)
    if d.total is not None:
        dw = dw + d.total[..., None]
    if d.entropy is not None:
        log_p = xp.log(xp.where(p > 0, p, 1.0))
        entropy = -xp.sum(p * log_p, axis=-1, keepdims=True)
        known = total >= _FAINT * float(xp.finfo(w.dtype).smallest_normal)
        slope = (log_p + entropy) / xp.where(known, total, 1.0)
        dw = dw - xp.where(known & (p > 0), slope, 0.0) * d.entropy[..., None]
    if d.sum_squares is not None:
        dw = dw + 2.0 * w * d.sum_squares[..., None]
    if d.maximum is not None and a.keys:
        columns = positions(xp, w, 0, a.keys)
        dw = dw + xp.where(columns == _first_maximum(xp, a, w)[1], d.maximum[..., None], 0.0)
    return xp.where(alive, dw, 0.0)


def _join(xp: Namespace, parts: Sequence[Array], axis: int) -> Array:
    return parts[0] if len(parts) == 1 else xp.concat(parts, axis=axis)


def _join_statistics(xp: Namespace, parts: list[RowStatistics]) -> RowStatistics:
    columns = zip(*parts, strict=True)
    return RowStatistics(*(None if column[0] is None else _join(xp, list(column), -1) for column in columns))


def _forward_tile(call: _Call, rows: Rows, q: Array, k: Array, v: Array | None) -> tuple[OfLibrary, RowStatistics]:
    xp = call.xp
    a, s = call.family.scored(xp, call.family.prepare(xp, q, k, v, rows=rows, **call.common), call.own)
    u, r = call.family.weigh(xp, s, a, **call.own)
    statistics = _measure(call, a, u * r)
    if v is None:
        return None, statistics
    o = quadratic.cast(xp, quadratic.output(xp, a, u, r), q.dtype)
    return o, RowStatistics(*(None if x is None else xp.broadcast_to(x, o.shape[:-1]) for x in statistics))


def _signature(caller: str, op: "Measured", fields: Fields, impl: Impl, arrays: Arrays, params: Keywords) -> Key | None:
    """What a repeated call is known by; None if it is checked each time."""
    name = getattr(op, "__name__", op)
    if not isinstance(impl, str) or not isinstance(name, str) or not isinstance(fields, (tuple, list, type(None))):
        return None
    text = fields and ",".join(map(str, fields))
    return call_signature(caller, impl, arrays, {**params, "op": name, "fields": text})


def _served(
    caller: str,
    impl: Impl,
    generic: Callable[[], R],
    call: _Call,
    *arrays: Array,
    key: Key | None = None,
    params: Keywords | None = None,
    **more: object,
) -> R:
    """The result of `generic`, the body in this module, or of the kernel that `impl` names, which calls with this key
    get too if all that is not a number reaches it as it is in `params`."""
    own = {**call.own, **call.common}
    options = {"op": call.op, "fields": call.fields, **own, **more}
    body, rows = as_kernel(lambda *_, **__: generic()), kernels_of(caller, arrays[0])
    kernel = choose(caller, impl, rows, body, arrays, options)
    plain = (bool, int, float, str, type(None))
    if params is not None and all(isinstance(x, plain) or x is params.get(name) for name, x in own.items()):
        remember_prepared(key, kernel, arrays, options)
    first = repeat(key, arrays, params or {})
    answer: R = run(caller, impl, kernel, arrays, options) if first is None else first
    return answer


@known_beside_an_op
def row_statistics(
    op: "Measured",
    q: Array,
    k: Array,
    *,
    fields: Fields = None,
    impl: Impl = "auto",
    **params: object,
) -> RowStatistics:
    """Statistics of each row of the weights that `op` gives q and k (semantics: `RowStatistics`).

    Queries are processed in blocks, so memory is O(L·d + block·S). Automatic differentiation stores the
    blocks; `row_statistics_vjp` recomputes them instead.

    Args:
        op: an attention op of this package or its name: one of those with `row_statistics` beside them on their pages.
        q, k: (..., L, d) and (..., S, d), as in the op.
        fields: names of the fields to compute; None = all six.
        impl: "auto", "generic", the name of a kernel, or a tuple or list of names tried in order (see
            `attnkit.explain`).
        **params: the op's own options and its mask, bias, causal, ... without those that affect only the output:
            dropout, and the norm and gate of ReLA.

    Raises:
        ValueError: an option that the op does not take; entropy of weights that can be negative (identity, gelu,
            gelu_tanh, silu, gain < 0 or learned): pass `fields` without it. Otherwise as the op.
        TypeError: as the op.
        NotImplementedError: `impl` names a kernel that cannot serve this call.
    """
    key = _signature("row_statistics", op, fields, impl, (q, k), params)
    again: RowStatistics | None = repeat(key, (q, k), params)
    if again is not None:
        return again
    call = _call("row_statistics", op, {"q": q, "k": k}, fields, params)

    def generic() -> RowStatistics:
        parts = [_forward_tile(call, rows, q, k, None)[1] for rows in _tiles(q, k)]
        return _join_statistics(call.xp, parts)

    return _served("row_statistics", impl, generic, call, q, k, key=key, params=params)


@known_beside_an_op
def attention_with_statistics(
    op: "Measured",
    q: A,
    k: A,
    v: A,
    *,
    fields: Fields = None,
    impl: Impl = "auto",
    **params: object,
) -> tuple[A, RowStatistics]:
    """(o, statistics): the output of `op` and the statistics of its weights from the same scores.

    Arguments and errors as in `row_statistics`; `params` may contain dropout, which affects only o.
    """
    key = _signature("attention_with_statistics", op, fields, impl, (q, k, v), params)
    both: tuple[A, RowStatistics] | None = repeat(key, (q, k, v), params)
    if both is not None:
        return both
    call = _call("attention_with_statistics", op, {"q": q, "k": k, "v": v}, fields, params)

    def generic() -> tuple[OfLibrary, RowStatistics]:
        if call.family.apart is not None:
            return _forward_apart(call, op, q, k, v, params, _within(impl))
        parts = [_forward_tile(call, rows, q, k, v) for rows in _tiles(q, k)]
        return _join(call.xp, [o for o, _ in parts], -2), _join_statistics(call.xp, [s for _, s in parts])

    return _served("attention_with_statistics", impl, generic, call, q, k, v, key=key, params=params)


def _within(impl: Impl) -> Impl:
    """The implementation of ops that the generic body calls."""
    return "auto" if impl == "auto" else "generic"


def _forward_apart(
    call: _Call, op: "Measured", q: Array, k: Array, v: Array, params: Keywords, impl: Impl
) -> tuple[Array, RowStatistics]:
    assert call.family.apart is not None
    o = call.family.apart.op(q, k, v, **params, impl=impl)
    statistics = row_statistics(op, q, k, fields=call.fields, **_of_weights(call.family, params), impl=impl)
    shape = (*quadratic.leading_axes(q, k, v, params.get("enable_gqa", False)), q.shape[-2])
    return o, RowStatistics(*(None if x is None else call.xp.broadcast_to(x, shape) for x in statistics))


def _of_weights(family: Family, params: Keywords) -> Keywords:
    return {name: value for name, value in params.items() if name not in outside(family)}


def _rows_of(x: Array | None, rows: Rows, axis: int) -> Array | None:
    if x is None or rows.stop - rows.start == rows.total:
        return x
    return x[..., rows.start : rows.stop] if axis == -1 else x[..., rows.start : rows.stop, :]


def _backward_tile(
    call: _Call, rows: Rows, like: dict[str, Array], do: Array | None, dstats: RowStatistics
) -> dict[str, Array]:
    """Gradients, in the compute dtype, of what the rows of one tile contribute."""
    family, of_tile = call.family, RowStatistics(*(_rows_of(x, rows, -1) for x in dstats))
    inputs = family.prepare(call.xp, like["q"], like["k"], like.get("v"), rows=rows, **call.common)
    a, s = family.scored(call.xp, inputs, call.own)

    def from_statistics(w: Array) -> Array:
        return _weight_gradient(call, a, w, of_tile)

    return family.gradients(call.xp, a, s, like, _rows_of(do, rows, -2), call.own, from_statistics)


_OF_KEYS = ("k", "v", "log_forget", "log_decay")


def _backward(call: _Call, like: dict[str, Array], do: Array | None, dstats: RowStatistics) -> dict[str, Array]:
    """Gradients of a whole call: those of q (and of options with an axis of queries) are joined, the others added."""
    xp, q = call.xp, like["q"]
    parts = [_backward_tile(call, rows, like, do, dstats) for rows in _tiles(q, like["k"])]
    grads = {}
    for name in parts[0]:
        column = [part[name] for part in parts]
        per_query = name not in _OF_KEYS and like[name].ndim >= 2 and like[name].shape[-2] != 1
        grads[name] = _join(xp, column, -2) if per_query else sum(column[1:], start=column[0])
    return quadratic.rounded(xp, grads, like)


def _beside(call: _Call) -> Keywords:
    """The options that have gradients: bias, which may be None, and others that are arrays."""
    return {"bias": call.common.get("bias"), **call.family.learned(call.own, call.common)}


def _backward_apart(
    call: _Call,
    op: "Measured",
    arrays: dict[str, Array],
    do: Array | None,
    dstats: RowStatistics,
    params: Keywords,
    impl: Impl,
) -> dict[str, Array]:
    """The gradients through the output and those through the statistics, added in the compute dtype."""
    xp, like, apart = call.xp, {**arrays, **params}, call.family.apart
    assert apart is not None
    dtype = quadratic.compute_dtype(xp, arrays["q"])
    q, k, v = (quadratic.cast(xp, x, dtype) for x in arrays.values())
    of_rows = _of_weights(call.family, params)
    rows = (*quadratic.leading_axes(q, k, None, params.get("enable_gqa", False)), q.shape[-2])  # v may have more
    dstats = RowStatistics(*(None if x is None else quadratic.sum_to(xp, x, rows) for x in dstats))
    grads = row_statistics_vjp(op, q, k, dstats, fields=call.fields, **of_rows, impl=impl)
    do = xp.zeros_like(apart.op(q, k, v, **params, impl=impl)) if do is None else quadratic.cast(xp, do, dtype)
    through = apart.vjp(q, k, v, do=do, **params, impl=impl)
    both = {name: through[name] + grads[name] if name in grads else through[name] for name in through}
    return quadratic.rounded(xp, both, like)


def _check_cotangents(c: check.Context, dstats: object) -> None:
    if not isinstance(dstats, RowStatistics):
        raise TypeError(f"{c.op}: dstats must be a RowStatistics of cotangents; got {type(dstats).__name__}")
    rows = (*c.leading, c.queries)
    for name, x in zip(RowStatistics._fields, dstats, strict=True):
        if x is None:
            continue
        check.float_array(c.op, f"dstats.{name}", x)
        check.same_home(c.op, "q", c.first, f"dstats.{name}", x)
        if tuple(x.shape) != rows:
            check.wrong_shape(c.op, f"dstats.{name}", x, f"{rows}, the shape of the statistics")


@known_beside_an_op
def row_statistics_vjp(
    op: "Measured",
    q: Array,
    k: Array,
    dstats: RowStatistics,
    *,
    fields: Fields = None,
    impl: Impl = "auto",
    **params: object,
) -> dict[str, Array]:
    """Gradients {"q", "k"}, "bias" if one was passed, and those of numbers, α, gates and decays that are arrays, for
    the cotangents `dstats` (None = 0).

    `nonzero` and `visible` are counts: their cotangents are not used. Arguments and errors as in `row_statistics`.
    """
    call = _call("row_statistics_vjp", op, {"q": q, "k": k}, fields, params)
    _check_cotangents(call.context, dstats)

    def generic() -> dict[str, Array]:
        return _backward(call, {"q": q, "k": k, **_beside(call)}, None, dstats)

    grads: dict[str, Array] = _served("row_statistics_vjp", impl, generic, call, q, k, dstats=dstats)
    return call.family.pull(grads, **call.family.own(params))


@known_beside_an_op
def attention_with_statistics_vjp(
    op: "Measured",
    q: Array,
    k: Array,
    v: Array,
    do: Array | None,
    dstats: RowStatistics,
    *,
    fields: Fields = None,
    impl: Impl = "auto",
    **params: object,
) -> dict[str, Array]:
    """Gradients of `attention_with_statistics` for the cotangents do and dstats (None = 0): those of the op's own vjp,
    plus those of `row_statistics_vjp`.
    """
    call = _call("attention_with_statistics_vjp", op, {"q": q, "k": k, "v": v}, fields, params)
    _check_cotangents(call.context, dstats)
    if do is not None:
        check.one_home(call.context.op, ("q", "do"), (q, do))
        if call.family.apart is None:
            cotangent(call.context.op, "do", do, (*call.context.leading, q.shape[-2], v.shape[-1]))

    def generic() -> dict[str, Array]:
        if call.family.apart is None:
            return _backward(call, {"q": q, "k": k, "v": v, **_beside(call)}, do, dstats)
        return _backward_apart(call, op, {"q": q, "k": k, "v": v}, do, dstats, params, _within(impl))

    caller = "attention_with_statistics_vjp"
    grads: dict[str, Array] = _served(caller, impl, generic, call, q, k, v, do=do, dstats=dstats)
    return call.family.pull(grads, **call.family.own(params))


def kernels(
    rows: Kernel, with_output: Kernel, rows_vjp: Kernel | None = None, with_output_vjp: Kernel | None = None
) -> dict[str, Kernel]:
    """The table of a library whose kernels serve these functions; without gradients those are the generic ones."""
    served = {
        row_statistics: rows,
        attention_with_statistics: with_output,
        row_statistics_vjp: rows_vjp,
        attention_with_statistics_vjp: with_output_vjp,
    }
    return {op.__name__: kernel for op, kernel in served.items() if kernel is not None}
