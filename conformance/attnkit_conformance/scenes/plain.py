"""Samples of the ops that are not attention: qk_layernorm and attention_regulariser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from attnkit_conformance.model.case import Case, Sample, compute_dtype, generator, rounded, sample
from attnkit_conformance.scenes.attention import QUICK

if TYPE_CHECKING:
    from attnkit_conformance.model.op import Op


def build(
    op: Op,
    name: str,
    dtype: str,
    arrays: Mapping[str, np.ndarray],
    params: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str] | None = None,
    layout: str = "contiguous",
) -> Case:
    """A case with rounded arrays and a drawn cotangent of each of `shapes`."""
    dtypes = dtypes or {}
    rng = generator(f"{op.name}/{name}/cotangents")
    inputs = {n: rounded(x, dtypes.get(n, dtype)) if x.dtype.kind == "f" else x for n, x in arrays.items()}
    cotangents = {n: rounded(rng.standard_normal(shape), dtype) for n, shape in shapes.items()}
    tags = frozenset({name})
    return Case(f"{op.name}/{dtype}/{name}", op.name, dtype, inputs, params, cotangents, tags, dtypes, layout)


def layernorm_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """The quick shapes; also flat rows (variance 0), a large mean, one feature, a large eps, float32 weights."""
    plain = [(s.name, (*s.lead[0], s.L, s.d), (*s.lead[1], s.S, s.d)) for s in QUICK]
    more = [
        ("one-row", (1, 17), (1, 17)),
        ("one-feature", (2, 3, 1), (2, 5, 1)),
        ("offset", (2, 7, 64), (2, 9, 64)),
        ("flat-rows", (2, 2, 7, 12), (2, 1, 9, 12)),
        ("eps", (2, 2, 7, 12), (2, 1, 9, 12)),
        ("weights-float32", (2, 7, 33), (2, 9, 33)),
        ("transposed", (2, 3, 65, 12), (2, 3, 63, 12)),
        ("strided", (2, 3, 65, 12), (2, 3, 63, 12)),
        ("wide", (257, 128), (100, 128)),
        ("empty", (2, 0, 12), (2, 5, 12)),
    ]
    for name, q_shape, k_shape in plain if profile == "quick" else plain + more:
        yield sample(op.name, dtype, name, layernorm_case, op, name, dtype, q_shape, k_shape)


def layernorm_case(op: Op, name: str, dtype: str, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> Case:
    rng = generator(f"layernorm/{name}")
    arrays = {
        "q": rng.standard_normal(q_shape),
        "k": rng.standard_normal(k_shape),
        "q_weight": 1 + 0.3 * rng.standard_normal(q_shape[-1]),
        "k_weight": 1 + 0.3 * rng.standard_normal(k_shape[-1]),
    }
    if name == "offset":
        arrays["q"], arrays["k"] = arrays["q"] + 8, arrays["k"] - 8
    if name == "flat-rows":
        arrays["q"][..., ::2, :] = 1.5
    dtypes = {w: compute_dtype(dtype) for w in ("q_weight", "k_weight")} if name == "weights-float32" else {}
    params = {"eps": 0.1} if name in ("eps", "flat-rows") else {}
    layout = name if name in ("transposed", "strided") else "contiguous"
    shapes = {"q_normed": q_shape, "k_normed": k_shape}
    return build(op, name, dtype, arrays, params, shapes, dtypes, layout)


def regulariser_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """Statistics with null rows (n = 0), dead rows (Z = 0), rows on both sides of the cap, and no valid row."""
    quick = [("plain", {}), ("query-mask", {}), ("cap", {"entropy_cap": 0.3, "entropy_weight": 2.5})]
    more = [("one-row", {}), ("nothing-valid", {}), ("sum-only", {"entropy_weight": 0.0, "sum_weight": 0.5})]
    for name, params in quick if profile == "quick" else quick + more:
        yield sample(op.name, dtype, name, regulariser_case, op, name, dtype, params)


def regulariser_case(op: Op, name: str, dtype: str, params: Mapping[str, Any]) -> Case:
    rng = generator(f"regulariser/{name}")
    rows = (1, 1) if name == "one-row" else (2, 2, QUICK[0].L)
    visible = rng.integers(1, 100, rows).astype(np.float64)
    arrays: dict[str, np.ndarray] = {
        "total": np.exp(rng.standard_normal(rows)),
        "entropy": rng.random(rows) * np.log(visible),
        "visible": visible,
    }
    if name != "one-row":
        null, dead = rng.random(rows) < 0.1, rng.random(rows) < 0.1
        null |= name == "nothing-valid"
        arrays["visible"][null] = 0
        for field in ("total", "entropy"):
            arrays[field][null | dead] = 0
    if name == "query-mask":
        arrays["query_mask"] = rng.random(rows) < 0.6
    return build(op, name, dtype, arrays, params, dict.fromkeys(op.outputs(params), ()))
