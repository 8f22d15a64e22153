"""Bugs of linear and random-feature attention; see historical.py."""

from typing import Any

import numpy as np

from attnkit_conformance.adapter import Unsupported

from .historical import Array, Minimal, heads_repeated, visible_pairs

MAPS = {  # φ and φ'
    "elu_plus_one": (
        lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
        lambda x: np.where(x > 0, 1, np.exp(np.minimum(x, 0))),
    ),
    "relu": (lambda x: np.where(x > 0, x, 0), lambda x: np.where(x > 0, 1.0, 0.0).astype(x.dtype)),
    "identity": (lambda x: x, np.ones_like),
}


def later(x: Array, axis: int) -> Array:
    """Cumulative sums from the end."""
    return np.flip(np.cumsum(np.flip(x, axis), axis=axis), axis)


def over_groups(x: Array, axis: int, given: Array) -> Array:
    """Summed over the query heads of a group, in the shape and dtype of what was given."""
    shape = list(x.shape)
    shape[axis : axis + 1 or None] = [given.shape[axis], x.shape[axis] // given.shape[axis]]
    return x.reshape(shape).sum(axis).astype(given.dtype)


class Running(Minimal):
    """Causal linear attention by sums over time, S of φ(k)vᵀ and z of φ(k), and gradients by sums from the end."""

    takes = (
        "q", "k", "v", "causal", "key_lengths", "mask", "initial_S", "initial_z", "return_state", "chunk_size",
        "enable_gqa", "feature_map", "normalize", "eps", "scale",
    )  # fmt: skip

    def sums(self, given: dict[str, Any]) -> dict[str, Any]:
        """Features, their sums, denominators and outputs."""
        q, mask = given["q"], given.get("mask", np.ones((1, 1), bool))
        if not given.get("causal") or q.shape[-2] != given["k"].shape[-2] or (mask.ndim > 1 and mask.shape[-2] != 1):
            raise Unsupported("causal self-attention with key masks only")
        k, v = heads_repeated(given, "k", "v")
        tokens = np.arange(k.shape[-2]) < given.get("key_lengths", np.asarray(k.shape[-2]))[..., None]
        seen = (tokens & (mask[..., 0, :] if mask.ndim > 1 else mask))[..., None]
        name = given.get("feature_map", "elu_plus_one")
        phi, slope = MAPS[name]
        made = {"fq": phi(q), "fk": self.visible_keys(phi(k), seen), "v": np.where(seen, v, 0), "seen": seen}
        first, total = self.initial(given)
        made["S"] = first + np.cumsum(made["fk"][..., None] * made["v"][..., None, :], axis=-3)
        made["z"] = total + self.over_time(made["fk"])
        made["scale"] = self.scale(given)
        den = made["scale"] * np.sum(made["fq"] * made["z"], axis=-1, keepdims=True) + given.get("eps", 1e-6)
        normalize = given.get("normalize")
        made["normalize"] = name != "identity" if normalize is None else normalize
        made["den"] = den if made["normalize"] else np.ones_like(den)
        made["o"] = made["scale"] * np.einsum("...tf,...tfe->...te", made["fq"], made["S"]) / made["den"]
        return {**made, "slopes": (slope(q), slope(k))}

    def visible_keys(self, fk: Array, seen: Array) -> Array:
        return np.where(seen, fk, 0)

    def over_time(self, fk: Array) -> Array:
        return np.cumsum(fk, axis=-2)

    def initial(self, given: dict[str, Any]) -> tuple[Any, Any]:
        if "initial_S" not in given:
            return 0, 0
        groups = given["q"].shape[-3] // given["k"].shape[-3]
        first, total = np.repeat(given["initial_S"], groups, -3), np.repeat(given["initial_z"], groups, -2)
        return first[..., None, :, :], total[..., None, :]

    def scale(self, given: dict[str, Any]) -> float:
        return float(given.get("scale", 1.0))

    def outputs(self, given: dict[str, Any]) -> dict[str, Array]:
        made = self.sums(given)
        if not given.get("return_state"):
            return {"o": made["o"]}
        groups = given["q"].shape[-3] // given["k"].shape[-3]
        return {"o": made["o"], "S": made["S"][..., ::groups, -1, :, :], "z": made["z"][..., ::groups, -1, :]}

    def vjp(self, op: str, arrays: Any, params: Any, cotangents: Any) -> dict[str, Array]:
        given = self.given(arrays, params)
        made, groups = self.sums(given), given["q"].shape[-3] // given["k"].shape[-3]
        pulled = {name: x.astype(made["o"].dtype) for name, x in cotangents.items()}
        dn = pulled["o"] / made["den"]
        dd = -np.sum(dn * made["o"], axis=-1, keepdims=True) * made["normalize"]
        dfq = np.einsum("...te,...tfe->...tf", dn, made["S"]) + made["z"] * dd
        back = made["scale"] * later(made["fq"][..., None] * dn[..., None, :], -3)
        own = made["scale"] * self.through_denominator(made["fq"], dd)
        if "S" in pulled:  # one state for the heads of a group
            back[..., ::groups, :, :, :] += pulled["S"][..., None, :, :]
            own[..., ::groups, :, :] += pulled["z"][..., None, :]
        dfk = np.einsum("...te,...tfe->...tf", made["v"], back) + own
        dv = np.einsum("...tf,...tfe->...te", made["fk"], back)
        slope_q, slope_k = made["slopes"]
        grads = {"q": made["scale"] * dfq * slope_q, "k": np.where(made["seen"], dfk * slope_k, 0)}
        grads |= {"v": np.where(made["seen"], dv, 0), "initial_S": back[..., 0, :, :], "initial_z": own[..., 0, :]}
        heads = {n: -2 if n == "initial_z" else -3 for n in grads}
        return {n: over_groups(x, heads[n], arrays[n]) for n, x in grads.items() if n in arrays}

    def through_denominator(self, fq: Array, dd: Array) -> Array:
        """What φ(k) gets through z: it is in the denominator of every later row."""
        return later(fq * dd, -2)


class SumsOverHeads(Running):
    """flash-linear-attention 0.2.0 to 0.3.2: axis 1 was the time before the layout changed, and the heads after."""

    def over_time(self, fk: Array) -> Array:
        return np.cumsum(fk, axis=-3)


class MasksValuesOnly(Running):
    """flash-linear-attention's layers and performer-pytorch: v of padding is 0, its φ(k) stays in the denominator."""

    def visible_keys(self, fk: Array, seen: Array) -> Array:
        return fk


class ForgetsKeySum(Running):
    """flash-linear-attention before 2026-04: a call that resumes from S knows nothing of the keys before it."""

    def initial(self, given: dict[str, Any]) -> tuple[Any, Any]:
        return super().initial(given)[0], 0


class CutsDenominator(Running):
    """flash-linear-attention 0.5.1: no gradient flows from the denominator to k."""

    def through_denominator(self, fq: Array, dd: Array) -> Array:
        return np.zeros_like(fq)


class DividesByRootOfLength(Running):
    """Linear attention in a Long Range Arena comparison: q and k over the fourth root of the wrong axis, the length."""

    def scale(self, given: dict[str, Any]) -> float:
        return super().scale(given) / given["q"].shape[-2] ** 0.5


class Favor(Minimal):
    """Random features of exp(q·k/√d), all pairs at once; the level of the keys is the maximum over those visible."""

    takes = (
        "q", "k", "v", "projection", "causal", "key_lengths", "mask", "query_mask", "enable_gqa", "kernel",
        "chunk_size",
    )  # fmt: skip

    def exponents(self, x: Array, projection: Array) -> Array:
        x = self.shrunk(x)
        return x @ projection.mT - 0.5 * np.sum(x * x, axis=-1, keepdims=True)

    def shrunk(self, x: Array) -> Array:
        return x * x.shape[-1] ** -0.25

    def level(self, u: Array, visible: Array) -> Array:
        """Per query (..., L, 1, 1), of exponents (..., S, m)."""
        largest = np.where(visible, np.max(u, axis=-1)[..., None, :], -np.inf)
        return np.max(largest, axis=-1, initial=-np.inf)[..., None, None]

    def outputs(self, given: dict[str, Any]) -> dict[str, Array]:
        if given.get("kernel", "softmax") != "softmax":
            raise Unsupported("the softmax kernel only")
        visible = visible_pairs(given)
        k, v = heads_repeated(given, "k", "v")
        (own,) = heads_repeated(given, "projection") if given["projection"].ndim > 2 else (given["projection"],)
        of_q, of_k = (self.exponents(x, own) for x in (given["q"], k))
        fq = np.exp(of_q - np.max(of_q, axis=-1, keepdims=True))
        level = self.level(of_k, visible)
        with np.errstate(over="ignore", invalid="ignore"):
            fk = np.where(visible[..., None], np.exp(of_k[..., None, :, :] - level), 0)
        return {"o": self.attend(fq, fk, v, given)}

    def attend(self, fq: Array, fk: Array, v: Array, given: dict[str, Any]) -> Array:
        w = (fk @ fq[..., None])[..., 0]
        total = w.sum(-1, keepdims=True)
        return np.where(total > 0, w @ v / np.where(total > 0, total, 1), 0)


class DividesTwice(Favor):
    """A Performer of a Long Range Arena comparison: q and k over the fourth root of d outside, and again inside."""

    def shrunk(self, x: Array) -> Array:
        return super().shrunk(super().shrunk(x))


class SumsOverFeatures(Favor):
    """xformers' causal FAVOR: q and k of one position multiplied, cumulative sums along the features of v."""

    def attend(self, fq: Array, fk: Array, v: Array, given: dict[str, Any]) -> Array:
        if not given.get("causal") or fk.shape[-3] != fk.shape[-2]:
            return super().attend(fq, fk, v, given)
        own = np.einsum("...ir,...iir->...i", fq, fk)[..., None]
        total = np.cumsum(np.broadcast_to(own, v.shape), axis=-1)
        return np.where(total > 0, np.cumsum(own * v, axis=-1) / np.where(total > 0, total, 1), 0)


class LevelOfTheFuture(Favor):
    """Performer's own code: the level of the keys is the maximum over all positions, those not yet visible included."""

    def level(self, u: Array, visible: Array) -> Array:
        return super().level(u, np.broadcast_to(visible.any(-2, keepdims=True), visible.shape))
