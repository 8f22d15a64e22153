"""The grammars of SOFT, Nyström and Linformer attention, of Newton's inverse and of samplers of landmarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from attnkit_conformance.families.lowrank import samples, softmax_samples
from attnkit_conformance.model.case import Case, NoDraw, compute_dtype, generator, rounded
from attnkit_conformance.model.grammar import Choice, Level, Row
from attnkit_conformance.model.op import Op
from attnkit_conformance.model.types import Option, Params
from attnkit_conformance.scenes.layouts import OF_KERNELS
from attnkit_conformance.scenes.rows import HEADS, sizes
from attnkit_conformance.scenes.sizes import of_one_item
from attnkit_reference.lowrank.soft import gaussian

Factors = Mapping[str, tuple[Level, ...]]
SIZES = {
    "normal": 1.0,
    "small": 0.5,
    "spread": 1.5,
    "large": 2.0,
}  # of q, k and landmarks, in which iterations converge
HALVED = 0.4  # of those in whose matrix the start is too large
OF_TOKENS: Factors = {
    "width": ("12x20", "17x5", "9x1"),  # features of q and of v
    "batch": ("two", "none", "broadcast"),
    "poison": ("no", "yes"),
    "mask": ("none", "keys", "1d"),
    "key_lengths": ("none", "some", "number"),
    "query_mask": ("none", "some"),
}
OF_ITEMS = (("mask", "keys"), ("key_lengths", "some"), ("query_mask", "some"))
FORBIDDEN: tuple[tuple[Choice, ...], ...] = (
    (("poison", "yes"), ("batch", "broadcast")),  # a row of a broadcast input is used by several items
    *((("batch", "none"), choice) for choice in OF_ITEMS),  # without heads there are no leading axes
)
OF_HEADS: Factors = {"heads": tuple(HEADS)}
SCALES: Factors = {"scale": (None, 0.7, -0.3)}
INVERSE: Factors = {
    "inverse_grad": (None, "unrolled"),
    "newton_steps": (None, 2, 0),
    "init_scale": (None, "items", 0.6),
    "halvings": (None, 10, 1),
}

SOFT: Factors = {
    "shape": ("13x4", "7x5", "16x2", "1x1"),  # tokens and landmarks
    **OF_TOKENS,
    "values": ("normal", "spread"),  # near landmarks have an almost singular matrix, far ones the identity
    "landmark_mask": ("none", "some"),
    **INVERSE,
    "ridge": (None, 0.5),
}
SOFT_FORBIDDEN: tuple[tuple[Choice, ...], ...] = (*FORBIDDEN, (("batch", "none"), ("init_scale", "items")))
SOFT_TILES = ("65x9", "64x12", "100x7", "257x8")
SOFT_SIZES: tuple[Row, ...] = of_one_item(
    "width",
    ("65x16", "64x64"),
    ("129x9", "128x128"),
    ("512x33", "33x65"),
    ("196x49", "16x16"),
    ("127x5", "80x96"),
    ("33x7", "256x192"),
    ("1025x8", "32x24"),
    ("2049x16", "16x16"),
    ("4096x5", "8x12"),
)
FEATURES = 20  # of which Gaussians of normal tokens are no smaller than half types hold
NYSTROM: Factors = {
    "shape": ("13x4", "12x4", "9x9", "5x8"),
    **OF_TOKENS,
    **OF_HEADS,
    "values": ("normal", "small", "large"),
    **SCALES,
    "inverse_steps": (None, 2, 0),
    "init": (None, "batch_max"),
}
NYSTROM_TILES = ("65x9", "64x16", "100x32", "257x8")
NYSTROM_SIZES: tuple[Row, ...] = of_one_item(
    "width",
    ("65x16", "64x64"),
    ("129x32", "128x128"),
    ("513x33", "33x65"),
    ("128x9", "80x96"),
    ("127x64", "256x192"),
    ("1025x16", "8x12"),
    ("2049x8", "8x8"),
)
LINFORMER: Factors = {
    "shape": ("9x13x4", "13x9x5", "1x11x3", "7x7x1"),  # queries, keys and slots
    **OF_TOKENS,
    **OF_HEADS,
    "values": ("normal", "small", "large"),
    **SCALES,
    "projections": ("shared", "per_head", "per_item"),
    "slots": ("of_all", "beyond"),  # projections of more keys than there are, and a slot of none of them
    "projection_dtype": ("same", "float32"),
    "dropout_mask": ("none", "some"),
}
LINFORMER_TILES = ("65x100x9", "64x64x16", "100x65x32", "33x257x8")
LINFORMER_SIZES: tuple[Row, ...] = of_one_item(
    "width",
    ("65x63x32", "64x64"),
    ("129x127x65", "128x128"),
    ("16x513x33", "80x96"),
    ("7x128x33", "256x192"),
    ("9x1024x32", "33x65"),
    ("513x65x9", "32x128"),
    ("3x2049x16", "24x40"),
    ("1x4096x32", "16x16"),
    ("2049x3x4", "8x8"),
)


def leads(row: Row) -> tuple[tuple[int, ...], ...]:
    """Leading axes of q, k and v, or of q, v and landmarks; masks have those of q."""
    of_q, of_k = HEADS[str(row.get("heads", "equal"))]
    if row["batch"] == "single":
        return ((1, 1),) * 3 if of_q == of_k else ((1, of_q), (1, of_k), (1, of_k))
    if row["batch"] == "none":
        return ((), (), ()) if of_q == of_k else ((of_q,), (of_k,), (of_k,))
    if row["batch"] == "broadcast":
        return (3, 2, of_q), (2, of_k), (3, 1, of_k)
    return (2, of_q), (2, of_k), (2, of_k)


def scene_of(name: str, row: Row, size: float, options: Mapping[str, bool]) -> samples.Scene:
    """The scene of a row; `options` are those of the op by whether they are there."""
    (n, m), (d, e) = (sizes(row["shape"])[i] for i in (0, -1)), sizes(row["width"])
    grouped = row.get("heads", "equal") != "equal"
    there = {
        "mask": row["mask"] == "keys",
        "mask_1d": row["mask"] == "1d",
        "key_lengths": row["key_lengths"] == "some",
        "query_mask": row["query_mask"] == "some",
        "poison": row["poison"] == "yes",
        "gqa": grouped,
        **options,
    }
    params: dict[str, Option] = {"enable_gqa": True} if grouped else {}
    params |= {own: row[own] for own in ("scale", "ridge", "inverse_grad", "newton_steps", "halvings", "inverse_steps")
               if row.get(own) is not None}  # fmt: skip
    params |= {"key_lengths": max(1, sizes(row["shape"])[-2] - 2)} if row["key_lengths"] == "number" else {}
    return samples.Scene(
        name, n, m, sizes(row["shape"])[-2], d, e, leads(row), size * SIZES[str(row["values"])],
        tuple(option for option, is_there in there.items() if is_there), params,
    )  # fmt: skip


def soft_row(op: Op, name: str, row: Row, dtype: str, size: float) -> Case:
    """A row of SOFT; a number of init_scale is a parameter."""
    options = {"landmark_mask": row["landmark_mask"] == "some", "init_scale": row["init_scale"] == "items"}
    scene = scene_of(name, row, size, options)
    nearer = min(1.0, FEATURES / scene.d) ** 0.25  # as far apart in √d as of fewer features
    nearer *= HALVED if row["halvings"] else 1.0
    scene = replace(scene, size=scene.size * nearer, params={**scene.params, **few_steps(row)})
    case = samples.soft_case(op, scene, dtype)
    return with_init_scale(case, row)


def few_steps(row: Row) -> Params:
    """After many steps nothing but rounding is left of the gradient of init_scale."""
    if (row["init_scale"], row["inverse_grad"], row["newton_steps"]) == ("items", "unrolled", None):
        return {"newton_steps": 2}
    return {}


def with_init_scale(case: Case, row: Row) -> Case:
    """The case with its init_scale where that is a number."""
    if isinstance(row["init_scale"], float):
        return replace(case, params={**case.params, "init_scale": row["init_scale"]})
    return case


def nystrom_row(op: Op, name: str, row: Row, dtype: str, size: float) -> Case:
    variant = {} if row["init"] is None else {"init": row["init"]}
    return softmax_samples.nystrom_case(op, scene_of(name, row, size, {}), dtype, variant, label="")


def linformer_row(op: Op, name: str, row: Row, dtype: str, size: float) -> Case:
    options = {
        "per_head": row["projections"] == "per_head",
        "per_item": row["projections"] == "per_item",
        "longer": row.get("slots") == "beyond",
        "projection_float32": row["projection_dtype"] == "float32",
        "dropout_mask": row.get("dropout_mask", "none") == "some",
    }
    return softmax_samples.linformer_case(op, scene_of(name, row, size, options), dtype)


# --------------------------------------------------------------------------------- the inverse and samplers

NEWTON: Factors = {
    "shape": ("5", "8", "1"),
    "batch": ("two", "none", "one"),
    "values": ("normal", "large"),
    "symmetric": ("yes", "no"),
    "layout": OF_KERNELS,
    **INVERSE,
}
NEWTON_SIZES: tuple[Row, ...] = tuple({"shape": shape, "batch": "single"} for shape in ("16", "33", "64", "65"))
NEWTON_FORBIDDEN: tuple[tuple[Choice, ...], ...] = ((("batch", "none"), ("init_scale", "items")),)
BATCHES: Mapping[Level, tuple[int, ...]] = {"two": (2, 3), "one": (1, 3), "none": (), "single": (1, 1)}


def newton_row(op: Op, name: str, row: Row, dtype: str, size: float) -> Case:
    """The kernel of fewer points than features, or one that is almost symmetric."""
    rng, (m,), lead = generator(f"newton/{name}"), sizes(row["shape"]), BATCHES[row["batch"]]
    d = 12 if m <= 12 else 2 * m
    near = HALVED if row["halvings"] else 1.0
    x = near * SIZES[str(row["values"])] * (12 / d) ** 0.25 * rng.standard_normal((*lead, m, d))
    a = gaussian(x, x, d**-0.5) + 0.02 * (row["symmetric"] == "no") * rng.standard_normal((*lead, m, m))
    params = {own: row[own] for own in ("inverse_grad", "newton_steps", "halvings") if row[own] is not None}
    params |= few_steps(row)
    arrays = {"a": rounded(a, dtype)}
    if row["init_scale"] == "items":
        arrays["init_scale"] = rounded(rng.uniform(0.1, 0.3, lead), compute_dtype(dtype))
    cotangents = {"axa": rounded(rng.standard_normal(a.shape), dtype)}
    case = Case(f"{op.name}/{dtype}/{name}", op.name, dtype, arrays, {**params, "return_residuals": True}, cotangents)
    return with_init_scale(case, row)


SAMPLERS: Factors = {
    "shape": ("6x8x2", "7x9x2", "5x5x5", "3x4x1"),  # height, width and side of a window
    "features": ("12", "1", "17"),
    "batch": ("two", "none", "one"),
    "query_mask": ("none", "some", "1d"),
    "poison": ("no", "yes"),
}
SAMPLERS_SIZES: tuple[Row, ...] = of_one_item(
    "features",
    ("14x14x2", "64"),
    ("32x33x4", "32"),
    ("65x9x8", "128"),
    ("2x1025x2", "33"),
    ("9x9x3", "256"),
    ("64x64x7", "8"),
)
SAMPLERS_FORBIDDEN: tuple[tuple[Choice, ...], ...] = ((("batch", "none"), ("query_mask", "some")),)


def sampler_row(op: Op, name: str, row: Row, dtype: str, size: float) -> Case:
    height, width, r = sizes(row["shape"])
    if r > min(height, width):
        raise NoDraw(f"{name}: no window fits")
    (features,), mask, poison = sizes(row["features"]), str(row["query_mask"]), row["poison"] == "yes"
    return samples.sampler_case(op, name, dtype, (height, width, r), mask, BATCHES[row["batch"]], features, poison)
