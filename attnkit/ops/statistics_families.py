"""The ops whose rows have statistics, and what statistics need of each."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from attnkit._core import check, quadratic
from attnkit._core.typing import Array, Namespace
from attnkit.ops import entmax, gaussian, pointwise, rela, softmax
from attnkit.ops.linear import attention, by_feature, cosine, efficient, performer, rule


def _never(**own: Any) -> bool:
    return False


def _always(**own: Any) -> bool:
    return True


def _nothing(*args: Any, **own: Any) -> dict[str, Array]:
    return {}


class Apart(NamedTuple):
    """For an op whose output is not w v: its public functions give the output and the gradients through it."""

    op: Callable[..., Array]
    vjp: Callable[..., dict[str, Array]]
    outside: tuple[str, ...]  # its arguments that the weights do not depend on, beside v and dropout


class Family(NamedTuple):
    """What statistics need of an op: its weights, how their gradient becomes that of the scores, its own options."""

    op: Callable[..., Any]
    weigh: quadratic.Weigh
    score_gradient: Callable[..., Array]
    translate: Callable[..., dict[str, Any]]  # the op's own options -> those of `weigh`
    signed: Callable[..., bool] = _never  # of the translated options: can a weight be negative
    exact_zeros: Callable[..., bool] = _never  # likewise: is a weight of 0 meant, not underflow
    checks: Mapping[str, check.OptionCheck] = check.NO_CHECKS  # of options that only this op has
    prepare: Callable[..., quadratic.Inputs] = quadratic.prepare
    scores: Callable[..., Array] = quadratic.scores
    beside: Callable[..., dict[str, Array]] = _nothing  # gradients to add to those of the scores
    apart: Apart | None = None
    common: frozenset[str] = frozenset(quadratic.COMMON)  # options that are not the op's own
    refused: tuple[str, ...] = ()  # options of the op that weights without a state do not have

    @property
    def outside(self) -> tuple[str, ...]:
        """Names of arguments that belong to the output only."""
        return ("dropout_mask", "dropout", "return_lse", *(self.apart.outside if self.apart else ()))

    def accepted(self, with_output: bool) -> tuple[str, ...]:
        """The options that this op takes here; arrays beside q, k and v are among them."""
        names = [name for name in inspect.signature(self.op).parameters if name not in ("q", "k", "v")]
        left_out = {"impl", "return_lse", *self.refused} | (set() if with_output else set(self.outside))
        return tuple(name for name in names if name not in left_out)


def _pointwise_family(op: Callable[..., Any], translate: Callable[..., dict[str, Any]]) -> Family:
    return Family(
        op,
        pointwise.weigh,
        pointwise.score_gradient,
        translate,
        pointwise.has_signed_weights,
        pointwise.has_exact_zeros,
    )


def _entmax_family(op: Callable[..., Any], translate: Callable[..., dict[str, Any]]) -> Family:
    return Family(
        op,
        entmax.weigh,
        entmax.score_gradient,
        translate,
        exact_zeros=entmax.has_exact_zeros,
        checks=entmax.OWN,
        beside=entmax.beside,
    )


def _feature_family(
    op: Callable[..., Any],
    rows_of: Callable[..., rule.FoundRows],
    checks: Mapping[str, check.OptionCheck],
    signed: Callable[..., bool] = _never,
) -> Family:
    """An op whose weights are made of features of q and of k: its gradients do not come through scores."""

    def weigh(xp: Namespace, s: None, a: quadratic.Inputs, **own: Any) -> tuple[Array, Any]:
        return rows_of(xp, a, **own)[:2]

    def nothing(xp: Namespace, s: None, a: quadratic.Inputs, w: Array, dw: Array, **own: Any) -> Array:
        return xp.zeros_like(w)

    def gradients(
        xp: Namespace, a: quadratic.Inputs, w: Array, dw: Array, ds: Array, like: dict[str, Array], **own: Any
    ) -> dict[str, Array]:
        return rows_of(xp, a, **own)[2](dw, like)

    return Family(
        op,
        weigh,
        nothing,
        lambda **own: own,
        signed,
        checks=checks,
        prepare=partial(quadratic.prepare, scale=1.0),
        scores=lambda xp, a: None,
        beside=gradients,
        common=frozenset(quadratic.COMMON) - {"scale"},
        refused=("chunk_size", "initial_state", "return_state"),
    )


FAMILIES = {
    family.op.__name__: family
    for family in (
        Family(softmax.softmax_attention, softmax.weigh, softmax.score_gradient, lambda: {}),
        _pointwise_family(pointwise.pointwise_attention, lambda **own: own),
        _pointwise_family(pointwise.reluformer_attention, pointwise.reluformer_options),
        _pointwise_family(pointwise.sigmoid_attention, pointwise.sigmoid_options),
        _entmax_family(entmax.sparsemax_attention, entmax.sparsemax_options),
        _entmax_family(entmax.entmax_attention, lambda **own: own),
        Family(
            rela.rela_attention,
            pointwise.weigh,
            pointwise.score_gradient,
            lambda: rela.RELU,
            exact_zeros=_always,
            apart=Apart(
                rela.rela_attention,
                rela.rela_attention_vjp,
                ("norm_weight", "gate_weight", "norm_axis", "eps"),
            ),
        ),
        Family(
            gaussian.gaussian_attention,
            gaussian.weigh,
            gaussian.score_gradient,
            lambda: {},
            prepare=gaussian.prepare,
            scores=gaussian.exponents,
            beside=gaussian.beside,
        ),
        _feature_family(attention.linear_attention, attention.rows, attention.OWN, attention.signed),
        _feature_family(cosine.cosine_attention, cosine.rows, cosine.OWN),
        _feature_family(performer.performer_attention, performer.rows, performer.OF_ROWS),
        _feature_family(efficient.efficient_attention, by_feature.rows, efficient.OWN),
    )
}
