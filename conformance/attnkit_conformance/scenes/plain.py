"""Samples of the ops that are not attention: qk_layernorm and attention_regulariser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from attnkit_conformance.model.case import Case, Sample, compute_dtype, generator, rounded, sample
from attnkit_conformance.model.grammar import Level, Row
from attnkit_conformance.model.layout import DENSE
from attnkit_conformance.model.types import Params
from attnkit_conformance.scenes.attention import QUICK
from attnkit_conformance.scenes.layouts import lay_out

if TYPE_CHECKING:
    from attnkit_conformance.model.op import Op


def build(
    op: Op,
    name: str,
    dtype: str,
    arrays: Mapping[str, np.ndarray],
    params: Params,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str] | None = None,
) -> Case:
    """A case with rounded arrays and a drawn cotangent of each of `shapes`."""
    dtypes = dtypes or {}
    rng = generator(f"{op.name}/{name}/cotangents")
    inputs = {n: rounded(x, dtypes.get(n, dtype)) if x.dtype.kind == "f" else x for n, x in arrays.items()}
    cotangents = {n: rounded(rng.standard_normal(shape), dtype) for n, shape in shapes.items()}
    tags = frozenset({name})
    return Case(f"{op.name}/{dtype}/{name}", op.name, dtype, inputs, params, cotangents, tags, dtypes)


def layernorm_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """The quick shapes, and no tokens; also flat rows (variance 0), a large mean, one feature, a large eps, float32
    weights."""
    plain = [(s.name, (*s.lead[0], s.L, s.d), (*s.lead[1], s.S, s.d)) for s in QUICK]
    plain += [("empty", (2, 0, 12), (2, 5, 12))]
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
    case = build(op, name, dtype, arrays, params, {"q_normed": q_shape, "k_normed": k_shape}, dtypes)
    return lay_out(op, case, {"transposed": "turned", "strided": "stepped"}.get(name, DENSE))


BATCHES: Mapping[Level, tuple[int, ...]] = {"two": (2, 2), "one": (3,), "none": (), "single": (1,)}
SEVERAL: tuple[Level, ...] = ("two", "one", "none")
LAYERNORM: Mapping[str, tuple[Level, ...]] = {
    "shape": ("9x5x12", "7x13x33", "1x2x1", "3x3x5"),  # tokens of q and of k, features
    "batch": SEVERAL,
    "values": ("normal", "tiny", "large", "offset"),
    "eps": (None, 0.1),
    "weights": ("same", "float32"),
}
LONG_LAYERNORM: tuple[Row, ...] = tuple(
    {"shape": shape, "batch": "single"}
    for shape in ("65x63x64", "1x129x128", "513x3x33", "9x5x256", "2x1025x16", "2049x1x8", "7x3x1024")
)
SIZES = {"tiny": 1e-2, "large": 30.0}


def layernorm_row(op: Op, name: str, row: Row, dtype: str, size: float) -> Case:
    """A row of the grammar of qk_layernorm."""
    L, S, d = map(int, str(row["shape"]).split("x"))
    rng, lead, size = generator(f"layernorm/{name}"), BATCHES[row["batch"]], SIZES.get(str(row["values"]), 1.0)
    shapes = {"q_normed": (*lead, L, d), "k_normed": (*lead, S, d)}
    offset = 8.0 if row["values"] == "offset" else 0.0
    arrays = {n[0]: offset + size * rng.standard_normal(shape) for n, shape in shapes.items()}
    arrays |= {w: 1 + 0.3 * rng.standard_normal(d) for w in ("q_weight", "k_weight")}
    wide = row["weights"] == "float32"
    dtypes = {w: compute_dtype(dtype) for w in ("q_weight", "k_weight") if wide}
    params = {} if row["eps"] is None else {"eps": row["eps"]}
    return build(op, name, dtype, arrays, params, shapes, dtypes)


REGULARISER: Mapping[str, tuple[Level, ...]] = {
    "shape": ("9", "33", "1"),  # rows
    "batch": SEVERAL,
    "query_mask": ("none", "some"),
    "null": ("none", "some"),
    "dead": ("none", "some"),
    "entropy_cap": (None, 0.3),
    "sum_weight": (None, 0.5, 0.0),
    "entropy_weight": (None, 2.5),
}


LONG_REGULARISER: tuple[Row, ...] = tuple(
    {"shape": shape, "batch": "single"} for shape in ("129", "513", "1024", "2049", "4097")
)


def regulariser_row(op: Op, name: str, row: Row, dtype: str, size: float) -> Case:
    """A row of the grammar of attention_regulariser."""
    rng, rows = generator(f"regulariser/{name}"), (*BATCHES[row["batch"]], int(str(row["shape"])))
    null, dead = (rng.random(rows) < 0.3 * (row[kind] == "some") for kind in ("null", "dead"))
    arrays = statistics_of_rows(rng, rows, null, dead)
    if row["query_mask"] == "some":
        arrays["query_mask"] = rng.random(rows) < 0.6
    params = {own: row[own] for own in op.own if row[own] is not None}
    return build(op, name, dtype, arrays, params, dict.fromkeys(op.outputs(params), ()))


def statistics_of_rows(
    rng: np.random.Generator, rows: tuple[int, ...], null: np.ndarray, dead: np.ndarray
) -> dict[str, np.ndarray]:
    """Sums, entropies and visible keys of rows, of which some see nothing and some have only weights of 0."""
    visible = rng.integers(1, 100, rows).astype(np.float64)
    arrays = {"total": np.exp(rng.standard_normal(rows)), "entropy": rng.random(rows) * np.log(visible)}
    arrays = {name: np.where(null | dead, 0.0, x) for name, x in arrays.items()}
    return {**arrays, "visible": np.where(null, 0.0, visible)}


def regulariser_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """Statistics with null rows (n = 0), dead rows (Z = 0), rows on both sides of the cap, and no valid row."""
    quick = [("plain", {}), ("query-mask", {}), ("cap", {"entropy_cap": 0.3, "entropy_weight": 2.5})]
    more = [("one-row", {}), ("nothing-valid", {}), ("sum-only", {"entropy_weight": 0.0, "sum_weight": 0.5})]
    for name, params in quick if profile == "quick" else quick + more:
        yield sample(op.name, dtype, name, regulariser_case, op, name, dtype, params)


def regulariser_case(op: Op, name: str, dtype: str, params: Params) -> Case:
    rng = generator(f"regulariser/{name}")
    rows = (1, 1) if name == "one-row" else (2, 2, QUICK[0].L)
    null, dead = (rng.random(rows) < 0.1 * (name != "one-row") for _ in range(2))
    arrays = statistics_of_rows(rng, rows, null | (name == "nothing-valid"), dead)
    if name == "query-mask":
        arrays["query_mask"] = rng.random(rows) < 0.6
    return build(op, name, dtype, arrays, params, dict.fromkeys(op.outputs(params), ()))
