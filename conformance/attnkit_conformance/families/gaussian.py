"""Row of the op database: Gaussian attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from attnkit_conformance.model import errors, scoring, tolerance
from attnkit_conformance.model.case import Case, Sample, compute_dtype, generator, rounded
from attnkit_conformance.model.op import OPTIONAL, QKV, Op, o_only
from attnkit_conformance.model.scene import Scene
from attnkit_conformance.scenes.attention import CAUSAL, GQA, attention_samples, scene_sample
from attnkit_reference.gaussian import gaussian_rows

OFFSET = 100.0
OFFSETS = (
    Scene("offset", 63, 65, options=("offset",)),
    Scene("offset-causal", 65, 65, params=CAUSAL, options=("offset",)),
    Scene("offset-mask", 63, 65, lead=((2, 4), (2, 2), (2, 2)), params=GQA, options=("offset", "gqa", "mask")),
    Scene("offset-padded", 63, 65, options=("offset", "key_lengths", "query_mask", "poison")),
    Scene("offset-self", 33, 33, options=("offset", "self")),
)


def complete(case: Case) -> Case:
    """q and k with a common offset, or k = q, if the scene requests it; and no integers.

    Equal distances are equal only in exact arithmetic, so that a maximum is no kink by intention. And where the only
    keys with weight are 0 like their query, dq is 0 and the probe cannot move it, whatever it costs to be far from the
    mean key.
    """
    arrays, tags = dict(case.arrays), case.tags
    if "integers" in case.tags:
        noise = generator(f"{sorted(case.tags)}/ties")
        arrays |= {n: rounded(arrays[n] + 0.1 * noise.standard_normal(arrays[n].shape), case.dtype) for n in ("q", "k")}
        tags -= {"integers"}
    if "offset" in case.tags:
        arrays |= {name: rounded(arrays[name] + OFFSET, case.dtype) for name in ("q", "k")}
    if "self" in case.tags:
        arrays["k"] = arrays["q"].copy()
    return replace(case, arrays=arrays, tags=tags)


def growth(case: Case) -> float:
    """D: 1 + max|visible exponent|/16, of -(scale/2) (‖q‖² + ‖k‖² - 2 q·k) + bias with every summand in absolute value.
    q and k are about the mean key of the first query, for no later token may change a bit (A11). Infinite where a
    negative scale makes a weight too large for the compute dtype: what is dropped then counts too, as 0·∞.
    """
    common = {name: x for name, x in scoring.options(case).items() if not name.startswith("dropout")}
    sc = gaussian_rows("sample", case.arrays["q"], case.arrays["k"], **common).scores
    live = sc.visible.any(-1, keepdims=True)
    first = np.any(sc.visible & live & (np.cumsum(live, axis=-2) == 1), axis=-2, keepdims=True)
    centre = first.astype(float) @ sc.k / np.maximum(1, first.sum(-1, keepdims=True))
    q, k = np.abs(sc.q - centre), np.abs(sc.k - centre)
    parts = 0.5 * (np.sum(q * q, axis=-1)[..., :, None] + np.sum(k * k, axis=-1)[..., None, :]) + q @ k.swapaxes(-1, -2)
    exponents = abs(sc.scale) * parts + (0.0 if sc.bias is None else np.abs(sc.bias))
    if np.any(np.asarray(sc.scale) < 0):
        overflow = np.log(np.finfo(compute_dtype(case.dtype)).max)
        apart = np.sum((sc.q[..., :, None, :] - sc.k[..., None, :, :]) ** 2, axis=-1)
        largest = -0.5 * sc.scale * apart + (0.0 if sc.bias is None else sc.bias)
        if np.max(largest, initial=0.0, where=sc.visible & np.isfinite(largest)) > overflow:
            return np.inf
    return tolerance.growth_of_exponent(
        float(np.max(exponents, initial=0.0, where=sc.visible & np.isfinite(exponents)))
    )


def gaussian_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """The scenes of attention, without exponents too large for a half type's bound; and q and k far from 0."""
    yield from attention_samples(op, dtype, profile)
    for scene in OFFSETS:
        if profile != "quick" or scene.name in ("offset", "offset-mask"):
            yield scene_sample(op, scene, {}, dtype)


OPS: tuple[Op, ...] = (
    Op(
        name="gaussian_attention",
        formula="w = exp(-scale/2 · ‖q - k‖² + bias)",
        arguments=QKV,
        outputs=o_only,
        samples=gaussian_samples,
        group="a",
        forbidden=((("values", "integers"), ("scale", "-0.3")),),  # weights beyond float16, also of integers up to 1
        optional=tuple(name for name in OPTIONAL if name != "length"),
        differentiable=(*QKV, "bias", "scale"),
        errors=errors.attention_errors,
        exponent=lambda params: True,
        complete=complete,
        growth=growth,
        weights=True,
        statistics=True,
        ties=False,
        bias_inf=True,
    ),
)
