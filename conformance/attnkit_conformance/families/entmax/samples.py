"""Samples of sparsemax, entmax, ReLA and SimA, with the functions that their golden values need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from attnkit_conformance.model import scoring, tolerance
from attnkit_conformance.model.case import Case, Sample, compute_dtype, generator, rounded
from attnkit_conformance.model.scene import Scene
from attnkit_conformance.model.types import Keywords, Params, option
from attnkit_conformance.scenes.attention import CAUSAL, GQA, LENGTH_ARRAY, MARGIN, attention_samples, scene_sample
from attnkit_reference import _core as reference
from attnkit_reference.entmax import entmax_rows
from attnkit_reference.rela import rela_rows, rela_summed

if TYPE_CHECKING:
    from attnkit_conformance.model.op import Op

Array = np.ndarray
OTHER_SIGNS = 40

ALPHAS = (
    1.0,
    1.2,
    1.25,
    1.4,
    1.5,
    2.0,
)  # of arrays; between 1.5 and 2 the slope at the edge of the support is infinite
WIDE = 0.01  # distance in scenes that ask for it, and of exact scores, which the probe does not move: small weights
# are differences of large numbers
EXACT_ALPHAS = (1.5, 2.0)  # as numbers they are exact on exact scores, including ties with the threshold
STEEP = Scene("steep", 4, 3, lead=((1, 2),) * 3, options=("far",))
FEW_NORMAL = 16.0  # smallest normal numbers: below, a weight may have become 0
SINGLE = Scene("single", 1, 1, e=1, lead=((3, 4),) * 3, options=("bias",))  # no sums: large enough for bfloat16
NO_VALUES = Scene("zero-values", 5, 7, e=3)  # a norm of 0 passes 1/√eps to v
ONE_QUERY = Scene("one-query", 1, 11, lead=((4,), (2,), (2,)), params=GQA, options=("gqa",))
MANY = Scene("many-keys", 3, 2048, size=0.3, options=("positive_values",))  # sums over a support of hundreds of keys
PART = replace(MANY, name="part-of-many", size=0.5)  # of so few that kernels list them, as sparsemax has dozens of MANY
NEAR_ONE = (Scene("near-one", 63, 65), Scene("near-one-causal", 65, 65, params=CAUSAL))


def normals(case: Case, name: str, shape: tuple[int, ...]) -> Array:
    """Standard normal numbers that depend on the scene and the variant, but not on the dtype."""
    return generator(f"{case.id.split('/', 2)[2]}/{name}").standard_normal(shape)


def with_array(case: Case, name: str, x: Array, dtype: str) -> Case:
    """The case with one more array, in a dtype of its own, instead of the parameter that requests it."""
    params = {n: value for n, value in case.params.items() if n != name}
    return replace(
        case, params=params, arrays={**case.arrays, name: rounded(x, dtype)}, dtypes={**case.dtypes, name: dtype}
    )


# ---------------------------------------------------------------------------------------------- sparsemax, entmax


def entmax_complete(case: Case, alpha: float = 1.5) -> Case | None:
    """An α per query or per head where the variant asks for an array; among them 1, whose gradient is a limit. Scores
    are integers, which often lie on the threshold, only where α is exact."""
    if "integers" in case.tags and case.params.get("alpha", alpha) not in (1.0, *EXACT_ALPHAS):
        moved = {n: case.arrays[n] + 0.1 * normals(case, n, case.arrays[n].shape) for n in ("q", "k")}
        arrays = {**case.arrays, **{n: rounded(x, case.dtype) for n, x in moved.items()}}
        case = replace(case, arrays=arrays, tags=case.tags - {"integers"})
    return settle(with_alpha(case), alpha)


def with_alpha(case: Case) -> Case:
    if case.params.get("alpha") != LENGTH_ARRAY:
        return case
    leading, queries = scoring.case_scores(case, with_v=False).n.shape[:-1], case.arrays["q"].shape[-2]
    per_head = bool(leading) and "mask" in case.arrays
    shape = (leading[-1], 1, 1) if per_head else (queries, 1)
    order = np.argsort(normals(case, "alpha", (int(np.prod(shape)),)))
    return with_array(case, "alpha", np.take(ALPHAS, order % len(ALPHAS)).reshape(shape), compute_dtype(case.dtype))


def alphas_of(case: Case, alpha: float) -> float | Array:
    """The α of a case, as entmax_attention takes it; `alpha` where the case names none."""
    return case.arrays.get("alpha", option(case.params, "alpha", alpha))


def settle(case: Case, default: float) -> Case | None:
    """The case with other queries where rounding could move a score across the threshold of its row: nonzero and, for
    α > 1.5 and for entropy, slopes jump there. A query is replaced by its features in another order, with other signs,
    one of a single feature by that of another query; where that does not help, as it does not if keys are equal, it
    takes another draw.
    """
    alpha = alphas_of(case, default)
    if "integers" in case.tags and not isinstance(alpha, np.ndarray) and alpha in EXACT_ALPHAS:
        return case
    rng, q = generator(f"{case.id.split('/', 2)[2]}/settled"), case.arrays["q"].copy()
    for _ in range(OTHER_SIGNS):
        case = replace(case, arrays={**case.arrays, "q": q})
        rows = reference.reduce_to(near_threshold(case, alpha)[..., None], (*q.shape[:-1], 1), 1, np.logical_or)[..., 0]
        if not np.any(rows):
            return case
        if "equal_keys" in case.tags:  # a row's scores move together
            return None
        features = rng.permuted(q[rows], axis=-1) if q.shape[-1] > 1 else rng.choice(q.ravel(), q[rows].shape)
        q = q.copy()
        q[rows] = features * rng.choice([-1.0, 1.0], features.shape)
    return None


def near_threshold(case: Case, alpha: float | Array) -> Array:
    """Rows (..., L) with a score so near to the threshold that rounding decides on which side it lies, or, where
    weights are counted, with one so small that it may become 0. As a number α = 1 is softmax, of which all count.
    """
    rows = entmax_rows("sample", case.arrays["q"], case.arrays["k"], alpha=alpha, **score_options(case))
    sc = rows.scores
    above = np.broadcast_to(alpha, (*sc.n.shape, 1)) - 1.0
    top = np.max(sc.s, axis=-1, keepdims=True, initial=-np.inf, where=sc.visible)
    compared = sc.visible & np.isfinite(sc.s) & np.isfinite(top) & (above > 0)
    size = abs(sc.scale) * (np.abs(sc.q) @ np.abs(np.swapaxes(sc.k, -1, -2)))
    size = np.where(compared, size + (0.0 if sc.bias is None else np.abs(np.where(compared, sc.bias, 0.0))), 0.0)
    below = np.where(compared, sc.s, 0.0) - np.where(np.isfinite(top), top, 0.0)
    largest = np.max(rows.w, axis=-1, keepdims=True, initial=0.0)
    distance = np.abs(above * below + np.where(above > 0, largest**above, 1.0))
    margin = np.maximum(MARGIN * (1.0 + above * (size + np.max(size, axis=-1, keepdims=True, initial=0.0))), 0.0)
    wide = WIDE * (1.0 if "far" in case.tags else np.minimum(above, 1.0) if "grid" in case.tags else 0.0)
    lost = (rows.w > 0) & (rows.w < FEW_NORMAL * tolerance.smallest_normal(compute_dtype(case.dtype)))
    counted = "op" in case.params and (isinstance(alpha, np.ndarray) or alpha > 1.0)
    close: Array = np.any(compared & (distance < np.maximum(margin, wide)) | lost & counted, axis=-1)
    return close


def entmax_growth(case: Case, alpha: float = 1.5) -> float:
    """D: 1/(α-1) for the smallest α above 1; besides, scores have errors eps·|s|, and weights have dp = p^{2-α} ds.

    Relative to the largest weight p these are p^{1-α} times as large, which shows for ties of many keys if a library's
    products of equal keys differ in their last bit. Half types are computed in float32 and need none of it.
    """
    alpha_rows = alphas_of(case, alpha)
    alphas = np.ravel(alpha_rows)
    sc = scoring.case_scores(case, with_v=False)
    largest = float(np.max(np.abs(sc.s), initial=0.0, where=sc.visible & np.isfinite(sc.s)))
    of_scores = tolerance.growth_of_exponent(largest) - 1.0
    if case.dtype in ("float64", "float32"):
        weights = entmax_rows("sample", case.arrays["q"], case.arrays["k"], alpha=alpha_rows, **score_options(case)).w
        largest = max(float(np.max(weights, initial=0.0)), float(np.finfo(np.float32).tiny))
        of_scores *= largest ** (1.0 - np.max(alphas, initial=1.0))
    return float(1.0 / (np.min(alphas[alphas != 1], initial=2.0) - 1.0) + of_scores)


def score_options(case: Case) -> Keywords:
    """What weights take of a case beside q, k and α."""
    return {name: x for name, x in scoring.options(case).items() if not name.startswith("dropout")}


def steep(params: Params) -> bool:
    """α > 1.5: a small weight is t^{1/(α-1)} with t a difference, and its gradient does not vanish."""
    return isinstance(params.get("alpha"), str) or option(params, "alpha", 1.5) > 1.5


def entmax_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """The scenes of attention; α near 1 if the bound of the dtype is still meaningful; α = 1.75; rows with so many
    weights that sums in a half type lose them, and with many that are listed.
    """
    yield from attention_samples(op, dtype, profile)
    listed = (PART, "float32") if "alpha" in op.own else (MANY, "bfloat16")
    for scene in (MANY, PART):
        if profile == "full" or ((scene, dtype) == listed and "v" in op.arguments):
            yield scene_sample(op, scene, {}, dtype)
    if profile == "full" and "alpha" in op.own:
        yield scene_sample(op, STEEP, {"alpha": 1.75}, dtype)
    if profile == "full" and "alpha" in op.own and dtype in ("float64", "float32"):
        for scene in NEAR_ONE:
            for alpha in (1.01, 1.05):
                yield scene_sample(op, scene, {"alpha": alpha}, dtype)


# ---------------------------------------------------------------------------------------------- rela


def rela_complete(case: Case) -> Case:
    """norm_weight, and gate_weight if the variant requests it, small enough for a meaningful bound."""
    leading, features = scoring.case_scores(case).n.shape[:-1], case.arrays["v"].shape[-1]
    if case.params.get("norm_axis", "hidden") == "hidden" and leading:
        features *= leading[-1]
    dtype = compute_dtype(case.dtype) if "bias_float32" in case.tags else case.dtype
    if NO_VALUES.name in case.tags:
        case = replace(case, arrays={**case.arrays, "v": np.zeros_like(case.arrays["v"])})
    gated = case.params.get("gate_weight") == LENGTH_ARRAY
    case = with_array(case, "norm_weight", 1 + 0.3 * normals(case, "norm_weight", (features,)), dtype)
    if not gated:
        return case
    gate, largest = normals(case, "gate_weight", (features,)), tolerance.LARGEST_GROWTH.get(case.dtype, np.inf)
    case = with_array(case, "gate_weight", gate, dtype)
    excess = (rela_growth(case) - 1.0) / (largest - 1.0)
    return with_array(case, "gate_weight", 0.1 / excess * gate, dtype) if excess > 1.0 else case


def rela_resummed(case: Case) -> tuple[Array, reference.Scores, Array] | None:
    """dw/ds = 1 where the norm of Σ w v stays; statistics have no norm."""
    if "norm_weight" not in case.arrays:
        return None
    own = scoring.options(case, ("gate_weight", "norm_axis", "eps"))
    arrays = (*(case.arrays[name] for name in ("q", "k", "v", "norm_weight")), case.cotangents["o"])
    rows, dx = rela_summed("sample", *arrays, **own)
    return np.asarray(rows.w > 0, np.float64), rows.scores, dx


def rela_growth(case: Case) -> float:
    """D: 1 + max|exponent|/16 of the gate, x counted as Σ w |v|."""
    if "gate_weight" not in case.arrays:
        return 1.0
    rows = rela_rows("sample", case.arrays["q"], case.arrays["k"], case.arrays["v"], **scoring.options(case))
    largest = np.max(reference.attend(rows, absolute=True), initial=0.0) * np.max(np.abs(case.arrays["gate_weight"]))
    return tolerance.growth_of_exponent(float(largest))


def of_masks(case: Case) -> tuple[Array, Array, dict[str, Array]]:
    """Null queries (..., L), unseen keys (..., S), and the entries of input gradients that are exactly 0."""
    sc = scoring.case_scores(case)
    null, unseen = np.asarray(~sc.visible.any(-1)), np.asarray(~sc.visible.any(-2))
    by = {"q": (null, 1), "k": (unseen, sc.groups), "v": (unseen, sc.groups)}
    zeros = {
        name: reference.reduce_to(hidden[..., None], (*case.arrays[name].shape[:-1], 1), groups, np.logical_and)
        for name, (hidden, groups) in by.items()
        if name in case.arrays
    }
    if "bias" in case.arrays:
        zeros["bias"] = reference.reduce_to(~sc.visible, case.arrays["bias"].shape, 1, np.logical_and)
    return null, unseen, zeros


def rela_zeros(case: Case) -> tuple[dict[str, Array], dict[str, Array]]:
    """A token is 0 if none of its heads sees a key."""
    null, _, gradients = of_masks(case)
    return {"o": (np.logical_and.reduce(null, axis=-2) if null.ndim > 1 else null)[..., None]}, gradients


# ---------------------------------------------------------------------------------------------- sima


PADDED = ("key_lengths", "query_mask", "poison")
SIMA_QUICK = (
    Scene("cross", 65, 100),
    Scene("self-padded", 64, 64, options=PADDED),
    Scene("gqa-padded", 7, 63, lead=((2, 4), (2, 2), (2, 2)), params=GQA, options=(*PADDED, "gqa")),
)
SIMA = (
    *SIMA_QUICK,
    Scene("1x1", 1, 1),
    Scene("1x257", 1, 257),
    Scene("65x1-single", 65, 1, d=1, e=1),  # gradients with one summand, large enough for bfloat16
    Scene("1x65-single", 1, 65, d=1, e=1),
    Scene("63x65", 63, 65, d=17, e=5),
    Scene("100x257", 100, 257, d=64, e=32, lead=((1, 2),) * 3),
    Scene("key-lengths", 63, 65, options=("key_lengths", "poison")),
    Scene("key-mask", 65, 100, options=("key_mask", "poison")),
    Scene("key-mask-1d", 2, 63, options=("key_mask_1d", "poison")),
    Scene("query-mask", 65, 63, options=("query_mask", "poison")),
    Scene("huge", 63, 65, size=12.0),
    Scene("tiny", 63, 65, size=1e-2),
    Scene("integers", 33, 35, d=3, options=("integers",)),
    Scene("nothing", 2, 65, size=0.0),
    Scene("positive-values", 2, 257, options=("positive_values",)),
    Scene("transposed", 63, 65, layout="turned"),
    Scene("strided", 65, 65, layout="stepped"),
    Scene("no-leading-axes", 63, 65, lead=((), (), ())),
    Scene("broadcast", 63, 2, lead=((3, 1), (1, 2), (2,))),
    Scene("gqa", 63, 65, lead=((2, 6), (2, 2), (2, 2)), params=GQA, options=("gqa",)),
    Scene("mqa", 65, 63, lead=((2, 3), (2, 1), (2, 1)), params=GQA, options=("gqa", "key_mask")),
    Scene("empty-queries", 0, 65, options=("poison",)),
    Scene("empty-keys", 63, 0, options=("poison",)),
)  # fmt: skip


def sima_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """Masks of keys and of queries, self and cross, groups of heads."""
    for scene in SIMA_QUICK if profile == "quick" else SIMA:
        yield scene_sample(op, scene, {}, dtype)


def sima_adapt(scene: Scene, params: Params) -> Scene:
    """The scene without bias and causality, with a key mask."""
    options = tuple("key_mask" if name == "mask" else name for name in scene.options if name != "bias")
    return replace(scene, options=options, params={n: x for n, x in scene.params.items() if n != "causal"})


def sima_zeros(case: Case) -> tuple[dict[str, Array], dict[str, Array]]:
    """Masked queries and keys."""
    null, unseen, gradients = of_masks(case)
    return {"o": null[..., None], "w": null[..., None] | unseen[..., None, :]}, gradients
