"""Bugs that were published once, made again. Each is a small right implementation with one method replaced.

The right class (the base) passes every case that it serves and its wrong child does not, so that it is the bug that the
kit catches. Padding that holds NaN is set to 0 on entry: none of these bugs is about what padding contains.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.model.case import compute_dtype, rounded
from attnkit_conformance.opdb import BY_NAME
from attnkit_reference._core import Scores, scores, visibility
from tests.conformance.plain import OnNumpy

Array = np.ndarray
VISIBILITY = ("mask", "causal", "window", "key_lengths", "query_mask")


class Minimal(OnNumpy):
    """An adapter on NumPy arrays that computes in the compute dtype and serves the arguments that it `takes`."""

    dtypes: tuple[str, ...] = ("float64", "float32")
    takes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return type(self).__name__

    def given(self, arrays: Mapping[str, Array], params: Mapping[str, Any]) -> dict[str, Any]:
        """Arrays in the compute dtype, and parameters; Unsupported for what is not taken."""
        others = sorted({*arrays, *params} - {*self.takes})
        if others:
            raise Unsupported(f"{self.name} does not take {', '.join(others)}")
        wide = compute_dtype(arrays["q"].dtype.name)
        made: dict[str, Any] = {n: x if x.dtype.kind in "biu" else x.astype(wide) for n, x in arrays.items()}
        for name in ("q", "k", "v"):
            if name in made:
                made[name] = np.where(np.isfinite(made[name]), made[name], 0)
        return {**made, **params}

    def call(self, op: str, arrays: Mapping[str, Array], params: Mapping[str, Any]) -> dict[str, Array]:
        answer = self.outputs(self.given(arrays, params))
        dtype = arrays["q"].dtype
        wide = compute_dtype(dtype.name)
        return {n: x.astype(wide if n in BY_NAME[op].compute_outputs else dtype) for n, x in answer.items()}

    def outputs(self, given: dict[str, Any]) -> dict[str, Array]:
        raise NotImplementedError


def heads_repeated(given: Mapping[str, Any], *names: str) -> list[Array]:
    """Arrays of key heads, one per query head."""
    if not given.get("enable_gqa"):
        return [given[name] for name in names]
    groups = given["q"].shape[-3] // given["k"].shape[-3]
    return [np.repeat(given[name], groups, axis=-3) for name in names]


def visible_pairs(given: Mapping[str, Any]) -> Array:
    """A3, (..., L, S)."""
    q, k = given["q"], given["k"]
    lead = q.shape[:-2] if given.get("enable_gqa") else np.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    masks = {name: given[name] for name in VISIBILITY if name in given}
    return visibility("historical", (*lead, q.shape[-2], k.shape[-2]), **masks)


# ---------------------------------------------------------------------------------------------- sparse


class Thresholded(Minimal):
    """Weights by a threshold on the visible scores of a row; the scores are the reference's."""

    takes = ("q", "k", "v", "bias", "scale", "enable_gqa", "alpha", *VISIBILITY)

    def outputs(self, given: dict[str, Any]) -> dict[str, Array]:
        if isinstance(given.get("alpha"), np.ndarray) or given.pop("alpha", 1.5) != 1.5:
            raise Unsupported("alpha is 1.5")
        if not given["k"].shape[-2]:
            raise Unsupported("no keys")
        sc: Scores = scores("historical", **given)
        finite = sc.visible & np.isfinite(sc.s)
        top = np.max(sc.s, axis=-1, keepdims=True, initial=-np.inf, where=finite)
        s = np.where(finite, sc.s, 0) - np.where(np.isfinite(top), top, 0)
        w = np.where(finite, self.project(np.where(finite, s, -4.0)), 0)  # 4 below the maximum nothing has a weight
        return {"o": w @ sc.v}

    def project(self, s: Array) -> Array:
        """Weights of scores (..., n) whose maximum is 0."""
        raise NotImplementedError


class Sparsemax(Thresholded):
    """τ = (Σ of the support - 1) / size of the support (Martins and Astudillo 2016, algorithm 1)."""

    def project(self, s: Array) -> Array:
        z = -np.sort(-s, axis=-1)
        total = np.cumsum(z, axis=-1)
        support = 1 + np.arange(1, z.shape[-1] + 1) * z > total
        tau = (self.sum_of_support(z, total, support) - 1) / support.sum(-1, keepdims=True)
        return np.maximum(s - tau, 0)

    def sum_of_support(self, z: Array, total: Array, support: Array) -> Array:
        return np.where(support, z, 0).sum(-1, keepdims=True)


class SumsCumulativeSums(Sparsemax):
    """Keras from 2024 to 2026, on all its backends: the cumulative sums of the support are summed again."""

    def sum_of_support(self, z: Array, total: Array, support: Array) -> Array:
        return np.where(support, total, 0).sum(-1, keepdims=True)


class Entmax15(Thresholded):
    """τ of the longest prefix whose τ is not above its last entry (Peters et al. 2019, algorithm 2)."""

    dtypes = ("bfloat16",)

    def project(self, s: Array) -> Array:
        x, keep = s / 2, self.keep
        z = -np.sort(-x, axis=-1)
        r = np.arange(1, z.shape[-1] + 1)
        mean = keep(keep(np.cumsum(z, axis=-1)) / r)
        mean_square = keep(keep(np.cumsum(keep(z**2), axis=-1)) / r)
        spread = keep(r * keep(mean_square - keep(mean**2)))
        tau = keep(mean - keep(np.sqrt(np.maximum(keep((1 - spread) / r), 0))))
        last = np.sum(tau <= z, axis=-1, keepdims=True) - 1
        return keep(np.maximum(keep(x - np.take_along_axis(tau, last, axis=-1)), 0) ** 2)

    def keep(self, x: Array) -> Array:
        """How an intermediate result is kept."""
        return x


class AccumulatesInBfloat16(Entmax15):
    """entmax 1.3 on bfloat16 scores: means, squares and τ are rounded to 8 bits."""

    def keep(self, x: Array) -> Array:
        return rounded(x, "bfloat16")
