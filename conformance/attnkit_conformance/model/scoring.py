"""The exact scores of an attention case, and the exponents that its op takes of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np

from attnkit_conformance.model import tolerance
from attnkit_conformance.model.case import Case, compute_dtype, finfo
from attnkit_conformance.model.types import Keywords, Params
from attnkit_reference._core import Scores, row_lengths, scores
from attnkit_reference.forgetting import forgetting_attention, forgetting_scores
from attnkit_reference.pointwise import SCORE_FUNCTIONS
from attnkit_reference.stick_breaking import stick_breaking_attention, stick_breaking_scores

Array = np.ndarray
Settings = Callable[[Params], Params]

COMMON = (
    "mask", "bias", "causal", "window", "key_lengths", "query_mask", "scale", "enable_gqa", "dropout_mask", "dropout",
)  # fmt: skip

OWN_ORDER: Mapping[str, Callable[..., Scores]] = {
    stick_breaking_attention.__name__: stick_breaking_scores,
    forgetting_attention.__name__: forgetting_scores,
}
"""The scores of ops that are causal themselves."""


def subject(case: Case) -> str:
    """The attention op of a case's scores: the op itself, or that of its weights or statistics."""
    return str(case.params.get("op", case.op.removesuffix("_weights")))


def options(case: Case, own: Collection[str] = ()) -> Keywords:
    """The options of attention in a case, and those of its op of these names."""
    return {name: x for name, x in (*case.arrays.items(), *case.params.items()) if name in (*own, *COMMON)}


def case_scores(case: Case, with_v: bool = True) -> Scores:
    """Sanitised inputs, exact scores and visibility of an attention case."""
    values, op = case.arrays.get("v") if with_v else None, subject(case)
    own = options(case, ("attend_current", "log_forget"))
    return OWN_ORDER.get(op, scores)(op, case.arrays["q"], case.arrays["k"], values, **own)


def no_settings(params: Params) -> Params:
    """The parameters of point-wise attention itself."""
    return {}


def pointwise_settings(case: Case, settings: Settings) -> Keywords:
    """The parameters of point-wise attention of which the case is an instance."""
    own = {"activation": "relu", "alpha": 1.0, "gain": 1.0, "length": "visible", "shift": 0.0}
    options = {name: x for name, x in (*case.params.items(), *case.arrays.items()) if name in own}
    return {**own, **settings(case.params), **options}


def shift_scores(case: Case, sc: Scores, settings: Settings | None) -> Array:
    """The argument of the activation: s + shift for the point-wise family, s for others."""
    if settings is None:
        return sc.s
    own = pointwise_settings(case, settings)
    if isinstance(own["shift"], str):
        return sc.s - np.log(row_lengths(sc, own["length"]))[..., None]
    shift = np.asarray(own["shift"])
    moved: Array = sc.s + (shift[..., None, None] if shift.ndim else shift)
    return moved


def score_movement(sc: Scores) -> Array:
    """By how many roundings of 1 partial sums move each score from one order of summation to another:
    ½ √d √(Σ (scale q_i k_i)²)."""
    squares = sc.q**2 @ np.swapaxes(sc.k**2, -1, -2)
    return np.asarray(np.abs(sc.scale) * tolerance.SUMS * np.sqrt(sc.q.shape[-1] * squares))


def largest_exponent(case: Case, settings: Settings | None) -> float:
    """max |visible exponent|, infinite ones (weight exactly 0) left out."""
    sc = case_scores(case, with_v=False)
    x = np.abs(shift_scores(case, sc, settings)[sc.visible])
    x = x[np.isfinite(x)]
    of_activation = (
        None if settings is None else SCORE_FUNCTIONS[pointwise_settings(case, settings)["activation"]].growth
    )
    exponent = x if of_activation is None else of_activation(x)
    vanishing = -np.log(float(finfo(compute_dtype(case.dtype)).smallest_subnormal))
    return float(np.max(np.maximum(x, np.minimum(exponent, vanishing)), initial=0.0))
