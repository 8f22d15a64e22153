"""Samples of the analyses: weights with null and dead rows, sets of vectors, branches with residuals, kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, ParamSpec

import numpy as np

from attnkit_conformance.model import tolerance
from attnkit_conformance.model.case import Case, Sample, compute_dtype, generator, rounded, sample
from attnkit_conformance.model.grammar import Level, Row
from attnkit_conformance.model.types import Params, option
from attnkit_conformance.scenes.attention import QUICK
from attnkit_conformance.scenes.layouts import OF_KERNELS
from attnkit_conformance.scenes.rows import sizes
from attnkit_reference import newton_inverse
from attnkit_reference.lowrank.soft import gaussian

if TYPE_CHECKING:
    from attnkit_conformance.model.op import Op

Array = np.ndarray
CONDITION_STEP = 32.0
P = ParamSpec("P")


def array_case(
    op: Op, name: str, dtype: str, params: Params, maker: Callable[P, dict[str, Array]],
    *arguments: P.args, **keywords: P.kwargs,
) -> Case:  # fmt: skip
    """A case of the arrays that `maker(*arguments)` draws."""
    return new_case(op, name, dtype, maker(*arguments, **keywords), params)


def new_case(op: Op, name: str, dtype: str, arrays: Mapping[str, Array], params: Params) -> Case:
    inputs = {n: rounded(x, dtype) if x.dtype.kind == "f" else x for n, x in arrays.items()}
    return Case(f"{op.name}/{dtype}/{name}", op.name, dtype, inputs, params, {}, frozenset({name}))


# ---------------------------------------------------------------------------------------- rows of weights

ROWS = (2, 2, QUICK[2].L, QUICK[2].S)


def weights_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """relu and softmax weights, some hidden; besides one key, ties, 257 keys, no keys, no rows, percent·n/100 whole."""
    params = [op.variants[n % len(op.variants)] for n in range(3)]
    scenes: list[tuple[str, tuple[int, ...], Params, str, str]] = [
        ("relu", ROWS, params[0], "relu", "none"),
        ("masked", ROWS, params[1], "relu", "pairs"),
    ]
    if profile == "full":
        rounded_up = {name: (17.6, 64.4) if name == "percents" else 17.6 for name in params[0] if name != "rank"}
        scenes += [
            ("softmax", ROWS, params[2], "softmax", "none"),
            # 17.6·375/100 is 66, and in float64 a little more
            ("whole", (2, 375), {**params[0], **rounded_up}, "relu", "none"),
            ("masked-whole", (3, 40, 100), params[0], "relu", "pairs"),
            ("masked-broadcast", (2, 2, 7, 100), params[2], "relu", "heads"),
            ("one-row", (65,), params[1], "relu", "none"),
            ("one-key", (2, 7, 1), params[0], "relu", "none"),
            ("ties", (2, 7, 63), params[0], "ties", "none"),
            ("wide", (2, 65, 257), params[1], "relu", "none"),
            ("huge", (2, 7, 63), params[0], "huge", "none"),
            ("nothing-visible", (2, 7, 63), params[0], "relu", "nothing"),
            ("no-keys", (2, 7, 0), params[0], "relu", "none"),
            ("no-rows", (2, 0, 63), params[0], "relu", "none"),
        ]
    for name, shape, own, kind, visible in scenes:
        yield sample(op.name, dtype, name, array_case, op, name, dtype, own, weights, name, shape, kind, visible)


def weights(name: str, shape: tuple[int, ...], kind: str = "relu", visible: str = "none") -> dict[str, Array]:
    """Rows of a kind, some hidden: "pairs" of their own, those of all "heads", or "keys"."""
    rng = generator(f"analysis/{name}")
    w = np.maximum(rng.standard_normal(shape), 0.0) / max(shape[-1], 1)
    if kind == "softmax":
        w = np.exp(2.0 * rng.standard_normal(shape))
        w = w / w.sum(axis=-1, keepdims=True)
    if kind == "ties":
        w = np.round(4.0 * w * shape[-1]) / 4.0
    if kind == "huge":
        w = w * 1e4
    arrays: dict[str, Array] = {"weights": w}
    if visible in ("pairs", "heads", "keys"):
        forms = {"pairs": shape, "heads": (*shape[:-3], *(1 for _ in shape[-3:-2]), *shape[-2:]), "keys": shape[-1:]}
        seen = rng.random(forms[visible]) < 0.7
        if visible != "keys" and shape[-2] > 3:
            seen[..., 2, :] = False
            w[..., 3, :] = 0.0
        arrays["visible"] = seen
        w[~np.broadcast_to(seen, shape)] = np.nan  # must not be read
    if visible == "nothing":
        arrays["visible"] = np.zeros(shape[-1], bool)
    return arrays


WEIGHTS: Mapping[str, tuple[Level, ...]] = {
    "shape": ("7x63", "9x20", "5x1", "4x257"),
    "batch": ("two", "none", "one"),
    "values": ("relu", "softmax", "ties", "huge"),
    "visible": ("none", "pairs", "heads", "keys"),
}
LONG_WEIGHTS: tuple[Row, ...] = tuple(
    {"shape": shape, "batch": "single"}
    for shape in ("65x64", "9x513", "129x127", "5x1024", "513x65", "3x2049", "4x4096", "2049x7", "1x8192")
)
BATCHES: Mapping[Level, tuple[int, ...]] = {"two": (2, 2), "one": (3,), "none": (), "single": (1, 1)}


def parameters_of(op: Op, row: Row) -> Params:
    """The parameters of a row; several percents are one level: "0.2+10"."""
    own = {name: row[name] for name in op.own if row[name] is not None}
    return {n: tuple(map(float, x.split("+"))) if isinstance(x, str) else x for n, x in own.items()}


def weights_row(op: Op, name: str, row: Row, dtype: str, size: float) -> Case:
    shape = (*BATCHES[row["batch"]], *sizes(row["shape"]))
    arrays = weights(name, shape, str(row["values"]), str(row["visible"]))
    return new_case(op, name, dtype, arrays, parameters_of(op, row))


# ------------------------------------------------------------------------------------------- vectors


def anisotropy_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """Vectors around a common direction, with zero vectors and masks; also random, orthogonal, equal, too few."""
    shapes: dict[str, tuple[int, ...]] = {"narrow": (2, 2, 65, 12), "masked": (2, 2, 65, 12)}
    if profile == "full":
        shapes |= {
            "random": (2, 257, 20), "orthogonal": (12, 12), "equal": (2, 7, 12), "one": (3, 1, 12),
            "zero": (2, 7, 12), "none": (2, 0, 12), "tiny": (2, 7, 12), "one-feature": (2, 65, 1),
        }  # fmt: skip
    for name, shape in shapes.items():
        yield sample(op.name, dtype, name, array_case, op, name, dtype, {}, vectors, name, shape)


VECTORS: Mapping[str, tuple[Level, ...]] = {
    "shape": ("9x12", "65x5", "4x1"),
    "batch": ("two", "none", "one"),
    "values": ("narrow", "random", "tiny"),
    "mask": ("none", "masked", "1d"),
}


LONG_VECTORS: tuple[Row, ...] = tuple(
    {"shape": shape, "batch": "single"}
    for shape in ("64x64", "129x128", "65x256", "513x80", "1025x33", "9x1024", "2049x16", "4096x8")
)


def vectors_row(op: Op, name: str, row: Row, dtype: str, size: float) -> Case:
    """A mask is of the tokens of an item, or of all."""
    shape, kind = (*BATCHES[row["batch"]], *sizes(row["shape"])), str(row["values"])
    arrays = vectors(kind, shape, name)
    if row["mask"] != "none":
        arrays = masked_vectors(generator(f"analysis/{name}/mask"), arrays["x"], row["mask"] == "1d")
    return new_case(op, name, dtype, arrays, {})


def masked_vectors(rng: np.random.Generator, x: Array, of_all: bool) -> dict[str, Array]:
    """Vectors of which some are not to be read."""
    shape = x.shape
    there = rng.random(shape[-2:-1] if of_all else (*shape[:-3], *(1 for _ in shape[-3:-2]), shape[-2])) < 0.7
    x[~np.broadcast_to(there, shape[:-1])] = np.inf
    return {"x": x, "mask": there}


def vectors(name: str, shape: tuple[int, ...], seed: str = "") -> dict[str, Array]:
    """Vectors of the kind `name`."""
    rng = generator(f"analysis/{seed or name}")
    x = rng.standard_normal(shape)
    if name in ("narrow", "masked"):
        x = x + 1.0
        x[..., 3:4, :] = 0.0
    if name == "orthogonal":
        x = 3.0 * np.eye(shape[-1])
    if name == "equal":
        x = np.broadcast_to(x[:, :1], shape).copy()
    if name == "zero":
        x = np.zeros(shape)
    if name == "tiny":
        x = x * 1e-6
    return masked_vectors(rng, x, of_all=False) if name == "masked" else {"x": x}


def ratio_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """Pooled and per token, with padding; also a mean far from 0, one feature, residuals that do not vary, none."""
    per_token = {"pooled": False}
    scenes = [("masked", (2, 65, 12), {}), ("per-token", (2, 65, 12), per_token)]
    if profile == "full":
        scenes += [
            ("plain", (2, 65, 12), {}),
            ("masked-per-token", (2, 65, 12), per_token),
            ("offset", (4, 65, 20), {}),
            ("offset-per-token", (4, 65, 20), per_token),
            ("one-feature", (2, 65, 1), {}),
            ("flat", (2, 7, 12), {}),
            ("flat-token", (2, 7, 12), per_token),
            ("all-masked", (2, 7, 12), {}),
            ("all-masked-per-token", (2, 7, 12), per_token),
            ("empty", (2, 0, 12), {}),
        ]
    for name, shape, params in scenes:
        yield sample(op.name, dtype, name, array_case, op, name, dtype, params, branch_and_residual, name, shape)


RATIO: Mapping[str, tuple[Level, ...]] = {
    "shape": ("9x12", "65x5", "4x2"),
    "batch": ("two", "none", "one"),
    "values": ("plain", "offset"),
    "mask": ("none", "masked"),
    "pooled": (None, False, True),
}


def ratio_row(op: Op, name: str, row: Row, dtype: str, size: float) -> Case:
    shape = (*BATCHES[row["batch"]], *sizes(row["shape"]))
    kind = f"{row['values']}-{row['mask']}"
    return new_case(op, name, dtype, branch_and_residual(kind, shape, name), parameters_of(op, row))


def branch_and_residual(name: str, shape: tuple[int, ...], seed: str = "") -> dict[str, Array]:
    """A branch and a residual of the kind `name`."""
    rng = generator(f"analysis/{seed or name}")
    branch, residual = 0.5 * rng.standard_normal(shape), rng.standard_normal(shape)
    if name.startswith("offset"):
        branch, residual = branch + 8.0, residual - 8.0
    if name == "flat":
        residual = np.ones(shape)
    if name == "flat-token":
        residual[1, 2] = 2.0
    arrays: dict[str, Array] = {"branch": branch, "residual": residual}
    if "masked" in name:
        there = rng.random(shape[:-1]) < (0.0 if name.startswith("all") else 0.6)
        arrays["mask"] = there
        branch[~there], residual[~there] = np.nan, np.inf
    return arrays


# ------------------------------------------------------------------------------------------- spectra


def spectra_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """Kernels of spread and of clustered landmarks; besides identity, ones, zero, one entry, matrices not square."""
    names, iterates = ["spread", "clustered"], "newton_steps" in op.own
    if profile == "full":
        names += ["identity", "one", "no-leading-axes", "few-steps"]
        names += ["ones", "zero"] if op.growth is not condition_growth else []  # σ_min is 0, but for rounding
        names += ["wide", "tall"] if not iterates else []
    for name in names:
        few = {"newton_steps": 3, "init_scale": 0.5} if iterates else {}
        params = few if name == "few-steps" else {}
        yield sample(op.name, dtype, name, array_case, op, name, dtype, params, kernel, name)


SPECTRA: Mapping[str, tuple[Level, ...]] = {
    "shape": ("9", "4", "1"),
    "batch": ("two", "none", "one"),
    "values": ("spread", "clustered"),
    "layout": OF_KERNELS,
}
NEWTON: Mapping[str, tuple[Level, ...]] = {"newton_steps": (None, 3, 0), "init_scale": (None, 0.5)}
SIDES: Mapping[str, tuple[Level, ...]] = {"sides": ("equal", "wide", "tall")}
LARGE_SPECTRA: tuple[Row, ...] = tuple({"shape": shape, "batch": "single"} for shape in ("33", "64", "65"))


def spectra_row(op: Op, name: str, row: Row, dtype: str, size: float) -> Case:
    """The kernel of points, or a matrix that is not square."""
    (m,), lead, rng = sizes(row["shape"]), BATCHES[row["batch"]], generator(f"analysis/{name}")
    d = 12 if m <= 12 else 2 * m
    x = (12 / d) ** 0.25 * rng.standard_normal((*lead, m, d))  # no farther apart in √d than few points
    if row["values"] == "clustered":
        x = x[..., :1, :] + 0.5 * x
    a = gaussian(x, x, d**-0.5)
    if row.get("sides", "equal") != "equal":
        a = rng.standard_normal((*lead, *((m, m + 4) if row["sides"] == "wide" else (m + 4, m))))
    return new_case(op, name, dtype, {"a": a}, parameters_of(op, row))


def kernel(name: str) -> dict[str, Array]:
    return {"a": matrix(name)}


def matrix(name: str) -> Array:
    rng, m = generator(f"analysis/{name}"), 1 if name == "one" else 9
    if name in ("wide", "tall"):
        return rng.standard_normal((3, 5, 9) if name == "wide" else (3, 9, 5))
    if name in ("identity", "ones", "zero"):
        return {"identity": np.eye(m), "ones": np.ones((m, m)), "zero": np.zeros((m, m))}[name]
    x = rng.standard_normal((m, 12) if name == "no-leading-axes" else (2, 3, m, 12))
    if name == "clustered":
        x = x[..., :1, :] + 0.5 * x
    return gaussian(x, x, 12**-0.5)


def condition(case: Case) -> float:
    return float(np.max(np.linalg.cond(case.arrays["a"])))


def in_double(case: Case, growth: float) -> float:
    """Growth for results computed in float64 and rounded once: scaled by the ratio of precisions."""
    return max(1.0, growth * tolerance.eps("float64") / tolerance.eps(compute_dtype(case.dtype)))


def condition_growth(case: Case) -> float:
    """κ: σ_min has an error of eps·σ₁."""
    return in_double(case, condition(case))


def residual_growth(case: Case) -> float:
    """1 + κ/32 with κ = max ‖A‖₂‖X‖₂, as for newton_inverse."""
    a = case.arrays["a"]
    x = newton_inverse(a, newton_steps=option(case.params, "newton_steps", 20))
    largest = np.linalg.norm(a, 2, axis=(-2, -1)) * np.linalg.norm(x, 2, axis=(-2, -1))
    return in_double(case, 1.0 + float(largest.max()) / CONDITION_STEP)
