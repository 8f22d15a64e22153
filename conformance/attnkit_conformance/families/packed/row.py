"""Rows of the op database: packed sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from attnkit_conformance.families.linear.row import LINEAR_ATTENTION
from attnkit_conformance.families.pointwise import POINTWISE_LEVELS
from attnkit_conformance.model import tolerance
from attnkit_conformance.model.case import Case, ErrorSample, Sample, compute_dtype, generator, rounded, sample
from attnkit_conformance.model.errors import zeros
from attnkit_conformance.model.grammar import Choice, Level, Row
from attnkit_conformance.model.op import QKV, Op, Tokens, always, exponentiates, has_kinks, o_and_lse, o_only
from attnkit_conformance.model.scene import Scene
from attnkit_conformance.model.types import Params, option
from attnkit_conformance.scenes.attention import LENGTH_ARRAY, variant_label
from attnkit_conformance.scenes.rows import GROUPED, HEADS, sizes

TOKENS = Tokens({"q": 0, "o": 0, "lse": 0}, {"k": 0, "v": 0})
INVARIANCES = ("rerun", "causal_prefix", "key_permutation", "batch_mates", "visible_nan")  # no padding
EDGES = ("cu_seqlens_q", "cu_seqlens_k")
GOOD = {
    **{name: zeros(tokens, 2, 4) for name, tokens in (("q", 5), ("k", 6), ("v", 6))},
    "cu_seqlens_q": np.asarray([0, 2, 5], np.int32),
    "cu_seqlens_k": np.asarray([0, 4, 6], np.int32),
}


class Pack(NamedTuple):
    """Lengths of the sequences, heads of q and of k, options, features of q and of v."""

    name: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: tuple[int, int] = (2, 2)
    params: Params = MappingProxyType({})
    width: tuple[int, ...] = (8, 5)


QUICK = (
    Pack("cross", (7, 1, 20), (33, 5, 12)),
    Pack("causal", (13, 0, 4, 16), (13, 3, 9, 8), (4, 2), {"causal": True, "enable_gqa": True}),
)
FULL = (
    *QUICK,
    Pack("one", (9,), (11,)),
    Pack("upper-left", (5, 9), (9, 5), params={"causal": "upper_left"}),
    Pack("window", (17, 30), (20, 25), params={"window": (4, 2)}),
    Pack("window-causal", (17, 30), (17, 30), params={"window": (4, None), "causal": True, "scale": 0.4}),
    Pack("no-keys", (4, 6), (8, 0)),
    Pack("nothing", (), ()),
    Pack("opposite-keys", (9, 4), (2, 2)),  # softmax gradients without cancellation: large enough for half types
)


def edges_of(lengths: tuple[int, ...]) -> np.ndarray:
    return np.cumsum((0, *lengths), dtype=np.int32)


def name_of(pack: Pack, variant: Params) -> str:
    return ".".join(filter(None, (pack.name, variant_label(variant))))


def packed_case(op: Op, pack: Pack, variant: Params, dtype: str) -> Case:
    """A seeded case; scores are exact, so that rounding does not decide the side of a kink."""
    label = variant_label(variant)
    rng = generator(f"packed/{pack.name}/{label}")
    tokens, sources = sum(pack.queries), sum(pack.keys)
    d, e = pack.width
    shapes = {"q": (tokens, pack.heads[0], d), "k": (sources, pack.heads[1], d), "v": (sources, pack.heads[1], e)}
    arrays = {name: np.round(rng.standard_normal(shape) * 4 + 0.5) / 4 for name, shape in shapes.items()}
    if pack.name == "opposite-keys":
        arrays |= {
            name: np.where(np.arange(sources)[:, None, None] % 2, -0.25, 0.25) * arrays[name][:1] for name in "kv"
        }
    arrays |= {"cu_seqlens_q": edges_of(pack.queries), "cu_seqlens_k": edges_of(pack.keys)}
    params, dtypes = {"scale": 0.25, **pack.params, **variant}, {}
    if params.get("length") == LENGTH_ARRAY:
        del params["length"]
        shapes_of_length = (tokens,), (pack.heads[0], tokens), ()
        shape = shapes_of_length[generator(f"packed/{pack.name}/{label}/length").integers(3)]
        arrays["length"] = rng.integers(1, 40, shape).astype(np.float64)
        dtypes["length"] = compute_dtype(dtype)
    rows = (tokens, pack.heads[0])
    answers: dict[str, tuple[int, ...]] = {"o": (*rows, e), "lse": rows}
    cotangents = {
        name: rounded(rng.standard_normal(answers[name]), op.output_dtype(name, dtype)) for name in op.outputs(params)
    }
    name, tags = f"{op.name}/{dtype}/{name_of(pack, variant)}", frozenset((pack.name, "packed", "grid"))
    return Case(name, op.name, dtype, arrays, params, cotangents, tags, dtypes)


LEVELS: Mapping[str, tuple[Level, ...]] = {
    "shape": ("7+1+12x9+5+14", "5+9x9+5", "4+6+0x8+0+3", "9x11"),  # queries and keys of each sequence
    "width": ("8x5", "17x3", "1x8"),
    "heads": tuple(HEADS),
    "causal": ("none", "lower_right", "upper_left"),
    "scale": (None, 0.5, -0.25),
    "boundaries": ("arrays", "tuples"),
}
OF_FEATURES = ("feature_map", "normalize", "eps", "chunk_size")
WITHOUT_DENOMINATOR: tuple[tuple[Choice, ...], ...] = tuple(
    (choice, ("eps", 0.1)) for choice in (("normalize", False), ("feature_map", "identity"))
)
"""Where eps says nothing."""
CAUSAL: Mapping[Level, Params] = {
    "none": {}, "lower_right": {"causal": True}, "upper_left": {"causal": "upper_left"},
}  # fmt: skip
WINDOWS: Mapping[Level, Params] = {
    "none": {}, "left": {"window": (3, None)}, "right": {"window": (None, 2)}, "both": {"window": (4, 2)},
}  # fmt: skip
TILES = ("65+3+100x64+7+130", "33+64x257+65")
MANY = "+".join(12 * ["91"])  # no sequence is long, but all of them are
SIZES: tuple[Row, ...] = tuple(
    {"shape": shape, "width": width, "heads": "one"}
    for shape, width in (
        ("64+1+65x65+2+63", "64x64"),
        ("127+128x128+9", "128x128"),
        ("1+1+1x1024+0+513", "33x65"),  # decoding
        ("16+3x513+65", "32x32"),
        ("7+33x37+9", "256x192"),
        ("513+5x9+64", "80x96"),
        ("4+1x2047+33", "16x16"),
        ("2049+1x3+7", "16x24"),
        ("3+1+4x5+4096+1", "8x16"),
        (f"{MANY}x{MANY}", "8x8"),
    )
)
"""Sequences around tiles and splits of keys, and the longest of them first, in the middle and last."""


def packed_row(op: Op, name: str, row: Row, dtype: str, size: float) -> Case:
    """A row of the grammar."""
    queries, keys = (tuple(map(int, part.split("+"))) for part in str(row["shape"]).split("x"))
    params = {**CAUSAL[row["causal"]], **WINDOWS[row.get("window", "none")]}
    params |= {"enable_gqa": True} if row["heads"] in GROUPED else {}
    params |= {own: row[own] for own in ("scale", *op.own) if row.get(own) is not None}
    heads, width = HEADS.get(str(row["heads"]), (1, 1)), sizes(row["width"])
    case = packed_case(op, Pack(name, queries, keys, heads, params, width), {}, dtype)
    return with_tuples(case) if row["boundaries"] == "tuples" else case


def with_tuples(case: Case) -> Case:
    """The case with boundaries that are known before the call runs."""
    arrays = {name: x for name, x in case.arrays.items() if name not in EDGES}
    edges = {name: tuple(case.arrays[name].tolist()) for name in EDGES}
    return replace(case, arrays=arrays, params={**case.params, **edges})


def packed_property(op: Op, scene: Scene, params: Params, label: str, dtype: str) -> Case:
    """The scene of a property as three sequences; changes at the end are in the last one."""
    pack = Pack(scene.name, (5, 0, scene.L - 5), (7, 3, scene.S - 10), params=scene.params)
    return packed_case(op, pack, params, dtype)


def packed_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """Packs in turn with the variants, and every variant with the first."""
    every = QUICK if profile == "quick" else FULL
    packs = [pack for pack in every if "window" not in pack.params or takes_windows(op)]
    pairs = [(pack, n % len(op.variants)) for n, pack in enumerate(packs)]
    pairs += [(FULL[0], n) for n in range(len(op.variants))] if profile == "full" else []
    for m, (pack, n) in enumerate(pairs):
        if (pack, n) not in pairs[:m]:
            yield sample(op.name, dtype, name_of(pack, op.variants[n]), packed_case, op, pack, op.variants[n], dtype)


def takes_windows(op: Op) -> bool:
    """Chunks of features know no pairs."""
    return "chunk_size" not in op.own


def pointwise_growth(case: Case) -> float:
    return growth(case) if exponentiates(case.params) else 1.0


def growth(case: Case) -> float:
    """D: 1 + max|exponent|/16, by the largest score of any pair."""
    q, k = case.arrays["q"], case.arrays["k"]
    largest = np.max(np.linalg.norm(q, axis=-1), initial=0.0) * np.max(np.linalg.norm(k, axis=-1), initial=0.0)
    return tolerance.growth_of_exponent(float(abs(option(case.params, "scale", 1.0)) * largest))


def linear_growth(case: Case) -> float:
    """Of sums over keys that are all equal, as where tokens share one place in memory."""
    k = case.arrays["k"]
    return tolerance.growth_of_equal_summands(len(k)) if len(k) > 1 and np.all(k == k[:1]) else 1.0


def packed_errors(op: Op) -> Iterator[ErrorSample]:
    """Layouts, boundaries, and options that packed sequences do not support."""
    for name, arrays, params, exception, pattern in (
        ("two-axes", {"q": zeros(5, 4)}, {}, ValueError, r"\bq\b.*tokens, heads"),
        ("features-differ", {"k": zeros(6, 2, 3)}, {}, ValueError, r"\bk\b"),
        ("heads-differ", {"k": zeros(6, 1, 4), "v": zeros(6, 3, 4)}, {}, ValueError, "broadcast"),
        ("edges-float", {"cu_seqlens_q": zeros(3)}, {}, TypeError, "cu_seqlens_q.*int"),
        ("edges-2d", {"cu_seqlens_k": zeros(1, 3, dtype=np.int32)}, {}, ValueError, "cu_seqlens_k"),
        ("edges-of-fewer", {"cu_seqlens_k": zeros(2, dtype=np.int32)}, {}, ValueError, "as many sequences"),
        ("mask-not-taken", {"mask": zeros(5, 6, dtype=bool)}, {}, ValueError, "unexpected argument 'mask'"),
        ("key-lengths-not-taken", {}, {"key_lengths": 3}, ValueError, "unexpected argument 'key_lengths'"),
        ("dropout-not-taken", {}, {"dropout": (0.5, 1)}, ValueError, "unexpected argument 'dropout'"),
        ("causal-unknown", {}, {"causal": "lower"}, ValueError, "causal"),
        ("scale-nan", {}, {"scale": float("nan")}, ValueError, "scale"),
    ):
        yield ErrorSample(name, {**GOOD, **arrays}, params, exception, pattern)
    tokens = {name: x for name, x in GOOD.items() if name not in EDGES}
    for name, edges in (("edges-from-1", (1, 2, 5)), ("edges-to-4", (0, 2, 4)), ("edges-fall", (0, 6, 5))):
        both = {"cu_seqlens_q": edges, "cu_seqlens_k": (0, 4, 6)}
        yield ErrorSample(name, tokens, both, ValueError, "cu_seqlens_q")


OPS = (
    Op(
        name="softmax_attention_packed",
        formula="softmax_attention of each of several sequences, concatenated",
        arguments=(*QKV, *EDGES),
        outputs=o_and_lse,
        samples=packed_samples,
        own=("return_lse",),
        levels={**LEVELS, "window": tuple(WINDOWS), "return_lse": (None, True)},
        tiles=TILES,
        sizes=SIZES,
        row_case=packed_row,
        variants=({}, {"return_lse": True}),
        differentiable=QKV,
        compute_outputs=("lse",),
        errors=packed_errors,
        exponent=always,
        growth=growth,
        dropout=False,
        tokens=TOKENS,
        invariances=INVARIANCES,
        scene_case=packed_property,
    ),
    Op(
        name="pointwise_attention_packed",
        formula="pointwise_attention of each of several sequences, concatenated",
        arguments=(*QKV, *EDGES),
        outputs=o_only,
        samples=packed_samples,
        own=("activation", "alpha", "gain", "length", "shift"),
        levels={**LEVELS, "window": tuple(WINDOWS), **POINTWISE_LEVELS},
        tiles=TILES,
        sizes=SIZES,
        row_case=packed_row,
        variants=(
            {},
            {"activation": "softplus", "alpha": 0.5, "length": "all"},
            {"activation": "sigmoid", "alpha": 0.0, "shift": "-log_length"},
            {"activation": "relu_squared", "length": LENGTH_ARRAY},
        ),
        optional=("length",),
        differentiable=QKV,
        errors=packed_errors,
        exponent=exponentiates,
        kinks=has_kinks,
        growth=pointwise_growth,
        dropout=False,
        tokens=TOKENS,
        invariances=INVARIANCES,
        scene_case=packed_property,
    ),
    Op(
        name="linear_attention_packed",
        formula="linear_attention of each of several sequences, concatenated",
        arguments=(*QKV, *EDGES),
        outputs=o_only,
        samples=packed_samples,
        own=OF_FEATURES,
        levels={
            **LEVELS,
            **{name: LINEAR_ATTENTION.levels[name] for name in ("feature_map", "normalize", "eps", "chunk_size")},
        },
        tiles=TILES,
        sizes=SIZES,
        row_case=packed_row,
        forbidden=WITHOUT_DENOMINATOR,
        variants=({}, {"feature_map": "relu", "eps": 0.1, "chunk_size": 5}, {"feature_map": "identity"}),
        differentiable=QKV,
        growth=linear_growth,
        errors=packed_errors,
        dropout=False,
        tokens=TOKENS,
        invariances=INVARIANCES,
        scene_case=packed_property,
    ),
)
