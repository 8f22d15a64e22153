"""A variant of quadratic attention is one record, from which its weights, gradients, statistics and blocks are derived.

`weigh(xp, s, a, **own) -> (u, r)` turns scores into weights w = r·u, and `score_gradient(xp, s, a, w, dw, **own)` takes
the gradient of the weights to that of the scores. `prepare` may normalise queries and keys; its pull-back is in
`Inputs.normalised`. A special case is a record too: it translates its options into those of the op that it calls.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Concatenate, NamedTuple, ParamSpec, Self, overload

from attnkit._core import check, quadratic
from attnkit._core.derived import DO, DROPOUT, Op, Vjp, Weights, WithRows, derived_signature, signature_like
from attnkit._core.dispatch import namespace, operation_checked_by, special_case
from attnkit._core.typing import (
    LEARNED,
    AnyFunction,
    Array,
    Bindings,
    Decorator,
    Factor,
    Impl,
    Keywords,
    Namespace,
    OfLibrary,
    Results,
)

P = ParamSpec("P")


def never(**own: object) -> bool:
    return False


def always(**own: object) -> bool:
    return True


def nothing(*args: Array, **own: object) -> dict[str, Array]:
    return {}


def same(**own: object) -> Keywords:
    return own


def passed_on(grads: dict[str, Array], **own: object) -> dict[str, Array]:
    return grads


FeatureWeights = tuple[Array, Factor, Callable[..., dict[str, Array]]]
"""Weights r·u, u (..., L, S) and r (..., L, 1) or 1, and pull(dw, like) -> {"q", "k"}, their gradients in the compute
dtype. The weights may be those of a part of the queries of `like`."""


class Apart(NamedTuple):
    """For an op whose output is not w v: the public functions for its output and gradients."""

    op: Callable[..., Array]
    vjp: Callable[..., dict[str, Array]]
    joins_heads: bool  # the output is (..., L, H·e)


class Family(NamedTuple):
    """What defines a variant; everything else is shared."""

    name: str
    weigh: quadratic.Weigh
    score_gradient: Callable[..., OfLibrary]
    prepare: Callable[..., quadratic.Inputs] = quadratic.prepare
    scores: Callable[..., OfLibrary] = quadratic.scores
    beside: Callable[..., dict[str, Array]] = nothing  # gradients added to those through the scores
    constant_factor: bool = False  # r does not depend on the scores: `score_gradient` takes u and its gradient
    signed: Callable[..., bool] = never  # of the options of `weigh`: can weights be negative
    exact_zeros: Callable[..., bool] = never  # likewise: are weights of 0 exact, not underflow
    checks: Mapping[str, check.OptionCheck] = check.NO_CHECKS  # of the options of this variant alone
    arrays: tuple[str, ...] = ()  # its options that have gradients when they are arrays
    numbers: tuple[str, ...] = ()  # options of `weigh` that may be arrays of one number or of one per head
    output_only: tuple[str, ...] = ()  # arguments that do not affect the weights, apart from v and dropout
    of: str = ""  # the op that a special case calls
    translate: Callable[..., Keywords] = same  # options of the op -> those of `weigh`
    pull: Callable[..., dict[str, Array]] = passed_on  # (grads, **own): gradients of the latter -> of the former
    apart: Apart | None = None
    common: frozenset[str] = frozenset(quadratic.COMMON)  # options that are not the op's own
    context: check.ContextOf = check.attention_context  # checks the arrays of statistics
    stateful: tuple[str, ...] = ()  # its options that only apply with a state
    of_features: Callable[..., FeatureWeights] | None = None  # (xp, a, **own), for weights made of features
    not_of_kernels: tuple[
        str, ...
    ] = ()  # numbers that are None unless a call has them, and then need kernels that know
    row_factor: AnyFunction | None = None  # (xp, a, **own): what multiplies the products q kᵀ of a row
    seeing: Callable[..., Keywords] | None = None  # (**common) -> those of `prepare`, of ops that hide pairs

    def special(
        self, name: str, translate: Callable[..., Keywords], pull: Callable[..., dict[str, Array]] = passed_on
    ) -> Self:
        """The record of an op that calls this one with options of its own."""
        return self._replace(name=name, of=self.name, translate=translate, pull=pull, checks=check.NO_CHECKS, arrays=())

    def split_options(self, options: Bindings) -> tuple[Keywords, Keywords]:
        """Own options, and the common ones as `prepare` takes them."""
        if not options and self.seeing is None:
            return {}, {}
        common = {name: x for name, x in options.items() if name in self.common}
        return self.own(options), common if self.seeing is None else self.seeing(**common)

    def own(self, options: Bindings) -> Keywords:
        """Own options alone."""
        return {name: x for name, x in options.items() if name not in self.common}

    def translated(self, q: Array, own: Bindings) -> Keywords:
        """The options of `weigh` for those of the op, learned numbers in the compute dtype if they change."""
        if not self.of:
            return self.translate(**own)
        learned = [name for name in own if check.is_learned(own[name])]
        if learned:
            xp = namespace(q)
            dtype = quadratic.compute_dtype(xp, q)
            own = {**own, **{name: quadratic.cast(xp, own[name], dtype) for name in learned}}
        return self.translate(**own)

    def learned(self, own: Bindings, common: Bindings) -> dict[str, Array]:
        """The options that have a gradient because they are arrays, beside bias."""
        names = ("scale", *self.arrays, *self.numbers)
        options = {name: own.get(name, common.get(name)) for name in names}
        return {name: x for name, x in options.items() if check.is_learned(x)}

    def scored(self, xp: Namespace, a: quadratic.Inputs, own: Bindings) -> tuple[quadratic.Inputs, Array]:
        """The inputs that `prepare` gave, with the factor of their rows, and their scores."""
        if self.row_factor is not None:
            a = a._replace(factor=self.row_factor(xp, a, **own))
        return a, self.scores(xp, a)

    def attend(self, q: Array, k: Array, v: Array, **options: object) -> Array:
        """o in the dtype of q."""
        own, common = self.split_options(options)
        xp = namespace(q)
        a, s = self.scored(xp, self.prepare(xp, q, k, v, **common), own)
        return quadratic.cast(xp, quadratic.output(xp, a, *self.weigh(xp, s, a, **own)), q.dtype)

    def weights(self, q: Array, k: Array, **options: object) -> Array:
        """w (..., L, S) in the dtype of q."""
        own, common = self.split_options(options)
        xp = namespace(q)
        a, s = self.scored(xp, self.prepare(xp, q, k, **common), own)
        u, r = self.weigh(xp, s, a, **own)
        leading = quadratic.leading_axes(q, k, None, common.get("enable_gqa", False))
        leading = check.broadcast("attention", "leading axes", tuple(u.shape[:-2]), leading)
        return quadratic.cast(xp, xp.broadcast_to(u * r, (*leading, *u.shape[-2:])), q.dtype)

    def vjp(self, q: Array, k: Array, v: Array, do: Array, **options: object) -> dict[str, Array]:
        """Gradients in the dtypes of their arguments."""
        own, common = self.split_options(options)
        xp = namespace(q)
        a, s = self.scored(xp, self.prepare(xp, q, k, v, **common), own)
        like = {"q": q, "k": k, "v": v, "bias": common.get("bias"), **self.learned(own, common)}
        return quadratic.rounded(xp, self.gradients(xp, a, s, like, do, own), like)

    def gradients(
        self,
        xp: Namespace,
        a: quadratic.Inputs,
        s: Array,
        like: Bindings,
        do: Array | None,
        own: Bindings,
        of_weights: Callable[[Array], Array] | None = None,
        of_scores: Callable[[Array], Array] | None = None,
    ) -> dict[str, Array]:
        """Gradients in the compute dtype.

        `of_weights(w)` and `of_scores(w)` are further gradients of the weights and the scores, beside those through o.
        """
        if self.of_features is not None:
            u, r, pull = self.of_features(xp, a, **own)
            dw, of_v = quadratic.product_gradients(xp, a, u * r, do, like.get("v"))
            return pull(dw if of_weights is None else dw + of_weights(u * r), like) | of_v
        u, r = self.weigh(xp, s, a, **own)
        early = self.constant_factor and not any(name in like for name in self.numbers)  # gradients of r need dw
        w = u if early else u * r
        if early and do is not None:
            do = quadratic.cast(xp, do, a.dtype) * r  # L·e multiplications instead of L·S
        beside = dict[str, Array]()

        def ds_of(dw: Array) -> Array:
            if of_weights is not None:
                dw = dw + (of_weights(u * r) * r if early else of_weights(w))
            late = self.constant_factor and not early
            ds: Array = self.score_gradient(xp, s, a, u if late else w, dw * r if late else dw, **own)
            ds = ds if of_scores is None else ds + of_scores(w)
            if self.beside is not nothing:
                beside.update(self.beside(xp, s, a, u if late else w, dw, ds, like, **own))
            return ds

        grads = quadratic.backward(xp, a, w, do, ds_of, like)
        return grads | {name: grads[name] + x if name in grads else x for name, x in beside.items()}


# ---------------------------------------------------------------------------------------------- all records


class Record(NamedTuple):
    """A public op and its definition."""

    op: AnyFunction
    family: Family
    options: tuple[str, ...]  # its arguments beside q, k and v


RECORDS: dict[str, Record] = {}
"""Every op whose weights are made of scores or features of pairs, registered when its module is imported."""


def recorded(family: Family) -> Callable[[Op], Op]:
    """Decorate the op of a record: statistics, blocks, models and benchmarks iterate over `RECORDS`."""

    def decorate(op: Op) -> Op:
        options = (name for name in inspect.signature(op).parameters if name not in ("q", "k", "v"))
        RECORDS[family.name] = Record(op, family, tuple(options))
        return op

    return decorate


def special_cases() -> dict[str, str]:
    """{op: the op that it calls with fixed parameters}."""
    return {name: record.family.of for name, record in RECORDS.items() if record.family.of}


def base_op(op: str) -> str:
    """The op that a special case calls; any other op itself."""
    return RECORDS[op].family.of or op


def measured(op: str, options: Bindings) -> tuple[str, bool]:
    """For statistics: the op that `op` is or calls, its options, and whether its weights of 0 are exact."""
    family = RECORDS[op].family
    return base_op(op), family.exact_zeros(**family.own(options))


def score_ops() -> tuple[str, ...]:
    """The ops whose weights come from scores alone, so that blocks of queries suffice; without special cases."""
    families = {name: record.family for name, record in RECORDS.items()}
    return tuple(name for name, f in families.items() if not (f.of or f.apart or f.stateful))


def joins_heads(op: AnyFunction) -> bool:
    """Whether an op gives (..., L, H·e) for heads (..., H, L, e)."""
    record = RECORDS.get(op.__name__)
    return record is not None and record.family.apart is not None and record.family.apart.joins_heads


def hides_later_keys(op: AnyFunction) -> bool:
    """Whether an op's record is of one order, in which a query sees no later key, so that it has no option causal."""
    record = RECORDS.get(op.__name__)
    return record is not None and record.family.seeing is not None


def scales_scores(op: AnyFunction) -> bool:
    """Whether an op takes a scale of q·k, 1/√d by default; a scale of features is an option of the op itself."""
    record = RECORDS.get(op.__name__)
    return "scale" in inspect.signature(op).parameters and (record is None or "scale" in record.family.common)


# ---------------------------------------------------------------------------------------------- public functions


def op(family: Family, runs: AnyFunction | None = None, *, calls: AnyFunction | None = None) -> Callable[[Op], Op]:
    """Make a documented signature (q, k, v, *, own..., impl, **common) the op of a record.

    Its generic body is what it `runs`, `family.attend`. A special case `calls` another op instead, with its own options
    translated.
    """
    body = _body(family, runs or family.attend, calls)
    return lambda documented: recorded(family)(_checked(family, body)(documented))


@overload
def weights_of(forward: WithRows[P], family: Family, calls: AnyFunction | None = None) -> Weights[P]: ...
@overload
def weights_of(
    forward: Callable[Concatenate[Array, Array, Array, P], object], family: Family, calls: AnyFunction | None = None
) -> Weights[P]: ...
def weights_of(
    forward: WithRows[P] | Callable[Concatenate[Array, Array, Array, P], object],
    family: Family,
    calls: AnyFunction | None = None,
) -> Weights[P]:
    """`<op>_weights`, with the signature of the op without v, dropout and what affects only the output."""
    doc = f"The weights w (..., L, S) of `{family.name}`, before dropout, in the dtype of q; 0 where invisible."
    signature = signature_like(forward, Array, ("v", *DROPOUT, *family.output_only))
    body = _body(family, family.weights, calls)
    weights: Weights[P] = _checked(family, body)(derived_signature(forward, f"{family.name}_weights", signature, doc))
    return weights


def vjp_of(
    forward: Callable[Concatenate[Array, Array, Array, P], object],
    family: Family,
    formula: str,
    calls: AnyFunction | None = None,
) -> Vjp[P]:
    """`<op>_vjp`, with the signature of the op with the cotangent do after v; `formula` says what the gradients are."""
    options = inspect.signature(forward).parameters
    arrays = ", ".join(f'"{name}"' for name in LEARNED if name in options)
    doc = f"""Gradients {{"q", "k", "v"}} of `{family.name}`, "bias" where one was passed, and {arrays} where an array
    was, for the cotangent do.

    {formula}

    Each has the shape and dtype of its argument.
    """
    signature = signature_like(forward, dict[str, Array], more=[DO])
    body = _body(family, family.vjp, calls)

    def pulled(*arrays: Array, **options: object) -> Results:
        grads = body(*arrays, **options)
        return family.pull(grads, **family.own(options)) if type(grads) is dict else grads

    vjp: Vjp[P] = _checked(family, pulled)(derived_signature(forward, f"{family.name}_vjp", signature, doc))
    return vjp


def _body(family: Family, body: AnyFunction, calls: Callable[..., Results] | None) -> AnyFunction:
    """The generic body, or for a special case a call of the general op."""
    if calls is None:
        return body

    def call(*arrays: Array, impl: Impl, **options: object) -> Results:
        own, common = family.split_options(options)
        return calls(*arrays, **family.translated(arrays[0], own), impl=impl, **common)

    return call


def _checked(family: Family, body: AnyFunction) -> Decorator:
    return special_case(body) if family.of else operation_checked_by(own=family.checks, runs=body)
