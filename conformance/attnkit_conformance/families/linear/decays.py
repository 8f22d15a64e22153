"""Logarithms of decays and gates: those that keep, fade slowly or forget, and decays of linear attention."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from attnkit_conformance.model import scoring, tolerance
from attnkit_conformance.model.case import Case, compute_dtype, generator, rounded
from attnkit_conformance.model.scene import Scene
from attnkit_conformance.model.types import Option, Params, option
from attnkit_conformance.scenes.attention import valid_keys
from attnkit_conformance.scenes.options import DECAYS, LEARNED
from attnkit_reference._core import reduce_to

if TYPE_CHECKING:
    from attnkit_conformance.model.grammar import Level

Array = np.ndarray
Shape = tuple[int, ...]

FAR, FAINT = -30.0, 1e-3
PIECES = ("far", "faint", "zero", "usual", "far", "faint")  # of a sequence with mixed gates
RATES = (-0.25, -0.0625, -1.5, 0.0)  # of heads; equal numbers are rounded alike when added up, but these are not
LEVELS: tuple[Level, ...] = (None, RATES[0], *LEARNED, "tokens")
CAUSAL = {"causal": True}
LONGEST = 4096


def of_gates(kind: str, d: int, e: int, **own: Option) -> tuple[Scene, Params]:
    """A scene of 70 tokens with gates of one kind."""
    return Scene(f"decay-{kind}", 70, 70, d=d, e=e, params=CAUSAL), {"log_decay": kind, **own}


SCENES: tuple[tuple[Scene, Params], ...] = (
    of_gates("zero", 8, 5, return_state=True),
    of_gates("far", 5, 21, feature_map="identity"),  # memory for v alone is not enough for k, nor the reverse
    of_gates("faint", 8, 5, initial_state="<array>", return_state=True, chunk_size=32),
    of_gates("mixed", 5, 21, initial_state="<array>", return_state=True, normalize=False),
    (Scene("decay-hidden", 65, 65, d=8, e=5, params=CAUSAL, options=("key_lengths", "poison")),
     {"log_decay": "tokens", "return_state": True}),
    (Scene("decay-heads", 7, 63, d=8, e=5, lead=((2, 4), (2, 2), (2, 2)), params={**CAUSAL, "enable_gqa": True},
           options=("gqa", "key_mask", "query_mask")), {"log_decay": "heads", "feature_map": "identity"}),
)  # fmt: skip
LONG_SCENE: tuple[Scene, Params] = (
    Scene(f"decay-mixed-{LONGEST}", 64, LONGEST, d=8, e=3, lead=((1,),) * 3, params=CAUSAL),
    {"log_decay": "mixed", "return_state": True},
)
"""The last tokens as queries, in one dtype: a running sum in float32 has no digits left for what they see."""


def log_gates(kind: str, shape: Shape, rng: np.random.Generator) -> Array:
    """Logarithms of gates (..., T, w)."""
    if kind == "mixed":
        edges = np.linspace(0, shape[-2], len(PIECES) + 1).astype(int)
        counts = (int(stop - start) for start, stop in itertools.pairwise(edges))
        parts = [log_gates(piece, (*shape[:-2], n, shape[-1]), rng) for piece, n in zip(PIECES, counts, strict=True)]
        return np.concatenate(parts, axis=-2)
    if kind == "usual":
        return np.asarray(-np.log1p(np.exp(-rng.standard_normal(shape))))
    return -FAINT * rng.random(shape) if kind == "faint" else np.full(shape, FAR if kind == "far" else 0.0)


def decay(level: Level, leading: Shape, heads: Shape, tokens: int, rng: np.random.Generator) -> Array:
    """The argument of a level: one number, one for each head, or one for each token over `leading` axes."""
    if level == "array":
        return np.asarray(RATES[0])
    if level == "heads":
        return np.resize(np.asarray(RATES), heads)
    return log_gates("usual" if level == "tokens" else str(level), (*leading, tokens, 1), rng)[..., 0]


def growth(case: Case) -> float:
    """1 + max|exponent|/16 of a decay that is a number, by which no probe moves what is left of far tokens; exponents
    of which nothing is left do not count."""
    x = case.params.get("log_decay")
    if not isinstance(x, float):
        return 1.0
    least = -float(np.log(np.finfo(compute_dtype(case.dtype)).smallest_normal))
    return tolerance.growth_of_exponent(min(-x * case.arrays["k"].shape[-2], least))


def is_drawn(params: Params) -> bool:
    """Whether a call has a decay that is an array to be drawn."""
    return any(isinstance(params.get(name), str) for name in DECAYS)


def with_decay(case: Case) -> Case:
    """The case with the decay that its parameters ask for; NaN where hidden tokens have one, in a poisoned case."""
    params, rng = dict(case.params), generator(f"{case.id.split('/', 2)[2]}/decay")
    level, of_v = params.pop("log_decay"), case.arrays["v"].shape if "v" in case.arrays else case.arrays["k"].shape
    leads = [case.arrays[name].shape[:-2] for name in "qkv" if name in case.arrays]
    grouped = params.get("enable_gqa", False)
    heads = leads[1][-1:] if grouped else np.broadcast_shapes(*leads)[-1:]
    dtype = case.dtype if level == "tokens" else compute_dtype(case.dtype)
    x = rounded(decay(level, of_v[:-2], heads, of_v[-2], rng), dtype)
    case = replace(case, params=params, arrays={**case.arrays, "log_decay": x})
    case = replace(case, dtypes={**case.dtypes, "log_decay": dtype})
    hides = hidden_decays(case)
    if hides is not None and "poison" in case.tags:
        x[hides] = np.nan
    return case


def hidden_decays(case: Case) -> Array | None:
    """Of a decay for each token, those of tokens that no query may see, whatever the order."""
    x = case.arrays.get("log_decay")
    sc = scoring.case_scores(case, with_v=False)
    if x is None or x.ndim < min(2, 1 + len(sc.leading)):
        return None
    S = sc.visible.shape[-1]
    valid = valid_keys(case.arrays, S) & (np.arange(S) < option(case.params, "key_lengths", S))
    leading = np.broadcast_shapes(sc.leading, valid.shape[:-1])
    wide = np.broadcast_to(~valid, (*leading, S))[..., None]
    return reduce_to(wide, (*x.shape, 1), sc.groups, np.logical_and)[..., 0]
