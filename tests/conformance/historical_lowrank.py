"""Bugs of Nyström attention and SOFT; see historical.py."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from .historical import Array, Minimal, heads_repeated, visible_pairs


def softmax(s: Array) -> Array:
    e = np.exp(s - np.max(s, axis=-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Nystrom(Minimal):
    """Softmax through means of segments (Xiong et al. 2021), one item after the other on its valid tokens."""

    takes = (
        "q", "k", "v", "key_lengths", "mask", "query_mask", "scale", "enable_gqa", "num_landmarks", "inverse_steps",
        "init",
    )  # fmt: skip

    def outputs(self, given: dict[str, Any]) -> dict[str, Array]:
        valid = visible_pairs(given)
        q, (k, v) = given["q"], heads_repeated(given, "k", "v")
        lead = np.broadcast_shapes(valid.shape[:-2], q.shape[:-2], k.shape[:-2], v.shape[:-2])
        q, k, v = (np.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (q, k, v))
        tokens = np.broadcast_to(np.diagonal(valid, axis1=-2, axis2=-1), (*lead, q.shape[-2]))
        scale = given.get("scale", q.shape[-1] ** -0.5)
        kernels = {at: self.kernels(q[at], k[at], tokens[at], scale, given["num_landmarks"]) for at in np.ndindex(lead)}
        o = np.zeros((*lead, *v.shape[-2:]), v.dtype)
        largest = max((self.norm(inner) for _, inner, _ in kernels.values() if len(inner)), default=1.0)
        for at, (left, inner, right) in kernels.items():
            if not len(inner):  # no more tokens than landmarks: left is softmax attention itself
                o[at][tokens[at]] = left @ v[at][tokens[at]]
                continue
            alone = given.get("init", "exact") == "exact"
            z = inner.T / self.first_norm(inner, alone, largest)
            for _ in range(given.get("inverse_steps", 6)):
                y, one = inner @ z, np.eye(len(z), dtype=z.dtype)
                z = z @ (13 * one - y @ (15 * one - y @ (7 * one - y))) / 4
            o[at][tokens[at]] = left @ (z @ (right @ v[at][tokens[at]]))
        return {"o": o}

    def kernels(self, q: Array, k: Array, valid: Array, scale: float, m: int) -> tuple[Array, Array, Array]:
        own, n = [*self.segments(valid, m)], int(valid.sum())
        if n <= m:
            return softmax(scale * (q[valid] @ k[valid].T)) if n else np.zeros((0, 0)), np.zeros((0, 0)), q
        marks_q, marks_k = (np.stack([x[at].mean(0, dtype=x.dtype) for at in own]) for x in (q, k))
        return tuple(softmax(scale * (x @ y.T)) for x, y in (  # type: ignore[return-value]
            (q[valid], marks_k), (marks_q, marks_k), (marks_q, k[valid])))  # fmt: skip

    def segments(self, valid: Array, m: int) -> Iterator[Array]:
        """Indices of the tokens of each landmark."""
        at, (size, rest) = np.nonzero(valid)[0], divmod(int(valid.sum()), m)
        ends = np.cumsum([size] * (m - rest) + [size + 1] * rest)
        yield from np.split(at, ends[:-1])

    def norm(self, inner: Array) -> float:
        return float(np.max(np.sum(inner, axis=0)))

    def first_norm(self, inner: Array, alone: bool, largest: float) -> float:
        return self.norm(inner) if alone else largest


class NormOverTheBatch(Nystrom):
    """Nyströmformer's own code by default: Z₀ is divided by the largest column sum of all matrices of the batch."""

    def first_norm(self, inner: Array, alone: bool, largest: float) -> float:
        return largest


class PaddingInMeans(Nystrom):
    """Nyströmformer's own code: segments are of all positions, padding is counted as zeros."""

    def segments(self, valid: Array, m: int) -> Iterator[Array]:
        yield from super().segments(np.ones_like(valid), m)

    def kernels(self, q: Array, k: Array, valid: Array, scale: float, m: int) -> tuple[Array, Array, Array]:
        q, k = np.where(valid[:, None], q, 0), np.where(valid[:, None], k, 0)
        return super().kernels(q, k, valid, scale, m)


class Soft(Minimal):
    """SOFT by Newton's iteration (Lu et al. 2021, algorithm 1 and 2), its first iterate made smaller by 0.9."""

    takes = (
        "q", "v", "landmarks", "landmark_mask", "key_lengths", "mask", "query_mask", "newton_steps", "init_scale",
        "ridge", "inverse_grad",
    )  # fmt: skip
    shrink = 0.9

    def outputs(self, given: dict[str, Any]) -> dict[str, Array]:
        q, marks, m = given["q"], given["landmarks"], given["landmarks"].shape[-2]
        tokens = np.diagonal(visible_pairs({**given, "k": q}), axis1=-2, axis2=-1)[..., None, :]
        chosen = given.get("landmark_mask", np.ones(m, bool))[..., None]
        marks = np.where(chosen, marks, 0)
        a = np.where(chosen & np.swapaxes(chosen, -1, -2), gauss(marks, marks), 0)
        a = a + given.get("ridge", 0.0) * np.eye(m, dtype=a.dtype) * chosen
        p = np.where(chosen & tokens, gauss(marks, q), 0)
        norm = np.max(np.sum(np.abs(a), axis=-2), axis=-1, initial=0.0)
        alpha = 2 * given.get("init_scale", self.shrink) / np.where(norm > 0, norm, 1).astype(a.dtype) ** 2
        x = alpha[..., None, None] * a
        for _ in range(given.get("newton_steps", 20)):
            x = 2 * x - x @ (a @ x)
        return {"o": np.swapaxes(p, -1, -2) @ (x @ (p @ np.where(np.swapaxes(tokens, -1, -2), given["v"], 0)))}


class AsPrinted(Soft):
    """Algorithm 2 as printed: α = 2/‖A‖₁², on the edge of what converges; for A = I it gives 2I, then 0."""

    shrink = 1.0


def gauss(x: Array, y: Array) -> Array:
    """exp(-‖x - y‖² / 2√d), (..., n, m)."""
    square = np.sum((x[..., :, None, :] - y[..., None, :, :]) ** 2, axis=-1)
    return np.exp(-square / (2 * x.shape[-1] ** 0.5))
