"""Row of the op database: the gated attention unit, whose weights are arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from attnkit_conformance.families.memory import Scene
from attnkit_conformance.model.case import Case, ErrorSample, Sample, compute_dtype, generator, rounded, sample
from attnkit_conformance.model.errors import calls, zeros
from attnkit_conformance.model.grammar import Level, Row
from attnkit_conformance.model.op import ALL_TOKENS, Op, Tokens, o_only
from attnkit_conformance.model.types import Keywords, Params
from attnkit_conformance.scenes import attention
from attnkit_conformance.scenes.attention import CAUSAL, LENGTH_ARRAY
from attnkit_conformance.scenes.options import of_some_dtype
from attnkit_conformance.scenes.rows import parameters, sizes
from attnkit_conformance.scenes.sizes import of_one_item
from attnkit_reference._core import visibility

Array = np.ndarray
Shape = tuple[int, ...]
UNIT_WEIGHTS = ("w_z", "w_u", "w_v", "w_o", "gamma_q", "beta_q", "gamma_k", "beta_k")
UNIT = (
    Scene("cross", 65),
    Scene("causal-padded", 64, options=("key_lengths", "query_mask", "bias", "poison"), params=CAUSAL, quick=True),
    Scene("mask", 63, options=("mask", "query_mask", "poison"), params={"alpha": 1.0}, quick=True),
    Scene("causal", 65, params={**CAUSAL, "alpha": 1.0}),
    Scene("upper-left", 63, params={"causal": "upper_left", "alpha": 0.5}),
    Scene("window", 64, params={"window": (5, 3)}),
    Scene("length-all", 65, options=("key_mask", "query_mask", "poison"), params={"length": "all"}),
    Scene("length-array", 63, params={"length": LENGTH_ARRAY}),
    Scene("no-length", 33, params={"alpha": 0.0}),
    Scene("bias", 33, options=("bias_per_key",)),
    Scene("float32-weights", 33, options=("wide_weights",)),
    Scene("large", 63, size=3.0),
    Scene("dropout", 63, params={"dropout": (0.25, 11)}),
    Scene("dropout-mask", 33, options=("dropout_mask", "mask")),
    Scene("no-leading-axes", 65, lead=((), ()), params=CAUSAL),
    Scene("one-token", 1),
    Scene("no-tokens", 0),
)


def unit_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """Both lengths of the papers, masks with padding that holds NaN, dropout, weights in a dtype of their own."""
    for scene in UNIT:
        if scene.quick or profile == "full":
            yield sample(op.name, dtype, scene.name, unit_case, op, scene, dtype)


def unit_case(op: Op, scene: Scene, dtype: str) -> Case:
    rng, (lead, _), T = generator(f"gated/{scene.name}"), scene.lead, scene.tokens
    D, s, e = scene.d, scene.s, scene.e
    shapes = {"w_z": (D, s), "w_u": (D, e), "w_v": (D, e), "w_o": (e, D)}
    arrays = {"x": scene.size * rng.standard_normal((*lead, T, D))}
    arrays |= {name: rng.standard_normal(shape) / shape[0] ** 0.5 for name, shape in shapes.items()}
    arrays |= {name: rng.standard_normal(s) for name in UNIT_WEIGHTS[4:]}
    dtypes = dict.fromkeys(UNIT_WEIGHTS, compute_dtype(dtype)) if "wide_weights" in scene.options else {}
    params = dict(scene.params)
    if params.get("length") == LENGTH_ARRAY:
        del params["length"]
        arrays["length"] = rng.integers(1, 90, (*lead[-1:], T)).astype(float)
    arrays |= unit_options(scene, lead, rng)
    arrays = {n: rounded(x, dtypes.get(n, dtype)) if x.dtype.kind == "f" else x for n, x in arrays.items()}
    tags = frozenset((scene.name, *scene.options))
    case = Case(f"{op.name}/{dtype}/{scene.name}", op.name, dtype, arrays, params, {}, tags, dtypes)
    if "poison" in scene.options:
        visible = pairs_of(case)
        arrays["x"][~(visible.any(-1) | visible.any(-2))] = np.resize([np.nan, np.inf, -np.inf], D)
        if "bias" in arrays and arrays["bias"].shape == visible.shape:
            arrays["bias"][~visible] = np.nan
    return replace(case, cotangents={"o": rounded(rng.standard_normal((*lead, T, D)), dtype)})


LEVELS: Mapping[str, tuple[Level, ...]] = {
    "shape": ("9", "13", "2"),  # tokens
    "width": ("12x20", "5x8"),  # features of x and of values
    "batch": ("two", "none", "one"),
    "values": ("normal", "small"),
    "poison": ("no", "yes"),
    "mask": ("none", "mask", "mask_2d", "key_mask", "key_mask_1d"),
    "bias": ("none", "bias", "bias_2d", "bias_per_key"),
    "causal": ("none", "lower_right", "upper_left"),
    "window": ("none", "left", "right", "both"),
    "key_lengths": ("none", "some", "number"),
    "query_mask": ("none", "some"),
    "dropout": ("none", "mask", "seed"),
    "alpha": (None, 0.0, 0.5),
    "length": (None, "all", 50.0, LENGTH_ARRAY),
    "weights": ("same", "float32"),
}
TILES = ("65", "64", "129")
SIZES: tuple[Row, ...] = of_one_item(
    "width",
    ("63", "64x128x128"),
    ("128", "128x256x64"),
    ("129", "80x96x33"),
    ("513", "17x40x64"),
    ("1025", "16x16x8"),
)
"""Features of queries and keys too, 12 of them elsewhere."""
LEADS: Mapping[str, Shape] = {"two": (2, 2), "one": (2,), "none": (), "single": (1,)}


def unit_row(op: Op, name: str, row: Row, dtype: str, size: float) -> Case:
    """A row of the grammar."""
    (T,), (d, e, *s) = sizes(row["shape"]), sizes(row["width"])
    drawn = {own: row[own] == "some" for own in ("key_lengths", "query_mask")}
    options = [*(own for own, there in drawn.items() if there), *(str(row[own]) for own in ("mask", "bias"))]
    options += {"mask": ["dropout_mask"]}.get(str(row["dropout"]), [])
    options += ["poison"] if row["poison"] == "yes" else []
    options += ["wide_weights"] if row["weights"] == "float32" else []
    size *= 0.3 if row["values"] == "small" else 1.0
    params = {**parameters(name, {"heads": "equal", **row}, T, T, exact=False),
              **{own: row[own] for own in ("alpha", "length") if row[own] is not None}}  # fmt: skip
    lead = LEADS[str(row["batch"])]
    scene = Scene(name, T, 0, (lead, ()), (), tuple(options), params, size, d=d, e=e)
    return unit_case(op, replace(scene, s=s[0]) if s else scene, dtype)


def unit_property(op: Op, scene: attention.Scene, params: Params, label: str, dtype: str) -> Case:
    """The scene of a property, with a key mask and a bias per key, so that tokens can be permuted."""
    of_keys = {"mask": "key_mask", "bias": "bias_per_key"}
    options = tuple(of_keys.get(name, name) for name in scene.options)
    own = Scene(scene.name, scene.S, lead=(scene.lead[0], ()), options=options, params={**scene.params, **params})
    return unit_case(op, own, dtype)


def unit_options(scene: Scene, lead: Shape, rng: np.random.Generator) -> dict[str, Array]:
    """The optional arrays of a scene; padding masks queries and keys."""
    T = scene.tokens
    options: dict[str, Array] = {}
    there = rng.random((*lead, T)) < 0.7
    if "key_lengths" in scene.options:
        ends = np.linspace(T * 0.8, 0, int(np.prod(lead))).astype(np.int64).reshape(lead)
        options["key_lengths"] = of_some_dtype(scene.name, T, ends)
        there = np.arange(T) < options["key_lengths"][..., None]
    if "mask" in scene.options:
        options["mask"] = (rng.random((*lead, T, T)) < 0.6) & there[..., None, :]
        options["mask"][..., ::5, :] = False
    if "key_mask" in scene.options:
        options["mask"] = there[..., None, :]
    if "key_mask_1d" in scene.options:
        options["mask"] = rng.random(T) < 0.7
    if "mask_2d" in scene.options:
        options["mask"] = rng.random((T, T)) < 0.7
    if "query_mask" in scene.options:
        options["query_mask"] = there
    if "bias" in scene.options:
        options["bias"] = rng.standard_normal((*lead, T, T))
    if "bias_per_key" in scene.options:
        options["bias"] = rng.standard_normal((*lead[:1], *(1 for _ in lead[1:]), 1, T))
    if "bias_2d" in scene.options:
        options["bias"] = rng.standard_normal((T, T))
    if "dropout_mask" in scene.options:
        options["dropout_mask"] = (rng.random((*lead, T, T)) < 0.75) / 0.75
    return options


HIDING = ("mask", "causal", "window", "key_lengths", "query_mask")


def pairs_of(case: Case) -> Array:
    """A3, (..., T, T)."""
    x = case.arrays["x"]
    masks: Keywords = {name: y for name, y in (*case.arrays.items(), *case.params.items()) if name in HIDING}
    return visibility(case.id, (*x.shape[:-1], x.shape[-2]), **masks)


def unit_zeros(case: Case) -> tuple[dict[str, Array], dict[str, Array]]:
    """Tokens that see nothing give 0; if no query sees them either, their gradient is 0."""
    visible = pairs_of(case)
    null, unseen = (np.asarray(~np.logical_or.reduce(visible, axis=axis)) for axis in (-1, -2))
    gradients: dict[str, Array] = {"x": (null & unseen)[..., None]}
    if "bias" in case.arrays and case.arrays["bias"].shape == visible.shape:
        gradients["bias"] = ~visible
    return {"o": null[..., None]}, gradients


def unit_errors(op: Op) -> Iterator[ErrorSample]:
    """Weights that do not fit, and arguments that have no meaning without heads."""
    good = {
        "x": zeros(2, 5, 4), "w_z": zeros(4, 3), "w_u": zeros(4, 6), "w_v": zeros(4, 6), "w_o": zeros(6, 4),
        "gamma_q": zeros(3), "beta_q": zeros(3), "gamma_k": zeros(3), "beta_k": zeros(3),
    }  # fmt: skip
    yield from calls(
        op, good, {},
        ("w_z", zeros(3, 3), ValueError, "w_z"),
        ("w_z", zeros(4, 0), ValueError, "w_z.*at least 1"),
        ("w_u", zeros(4, 5), ValueError, "w_u"),
        ("w_o", zeros(5, 4), ValueError, "w_o"),
        ("w_v", zeros(4), ValueError, "w_v.*matrix"),
        ("gamma_k", zeros(1), ValueError, "gamma_k"),
        ("beta_q", zeros(3, dtype=np.int32), TypeError, "beta_q"),
        ("x", zeros(2, 5, 4, dtype=np.int32), TypeError, r"\bx\b"),
        ("mask", zeros(5, 5), TypeError, "mask.*bias|bias.*mask"),
        ("mask", zeros(4, 5, dtype=bool), ValueError, "mask"),
        ("query_mask", zeros(4, dtype=bool), ValueError, "query_mask"),
        ("alpha", float("nan"), ValueError, "alpha"),
        ("length", 0.0, ValueError, "length"),
        ("scale", 1.0, ValueError, "unexpected argument 'scale'"),
        ("enable_gqa", True, ValueError, "unexpected argument 'enable_gqa'"),
        ("dropout", (1.0, 0), ValueError, "dropout"),
    )  # fmt: skip


OPS: tuple[Op, ...] = (
    Op(
        name="gated_attention_unit",
        formula="o = (u ⊙ n^-alpha relu(q kᵀ)² v) W_o with u, v, z = silu(x W), q and k scaled and shifted z",
        arguments=("x", *UNIT_WEIGHTS),
        outputs=o_only,
        samples=unit_samples,
        own=("alpha", "length"),
        levels=LEVELS,
        tiles=TILES,
        sizes=SIZES,
        row_case=unit_row,
        optional=("mask", "bias", "key_lengths", "query_mask", "dropout_mask", "length"),
        differentiable=("x", *UNIT_WEIGHTS, "bias"),
        errors=unit_errors,
        zeros=unit_zeros,
        growth=lambda case: 2.0,  # an error of the scores counts twice in their square
        variants=({}, {"alpha": 1.0}),
        tokens=Tokens({"x": -2, "o": -2}, {"x": -2, "o": -2, "mask": -1, "query_mask": -1, "bias": -1}),
        invariances=(*ALL_TOKENS, "causal_prefix"),
        scene_case=unit_property,
    ),
)
