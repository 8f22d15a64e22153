"""numpy.linalg.pinv for the inverse and scipy.spatial.distance.cdist for the distances of SOFT, in float64.

SOFT's A† is the limit of Newton's iteration. A singular value σ of A leaves (1 - ασ²)^(2^T) after T steps, α =
2·init_scale/‖A‖₁²: supported are calls in which that is below rounding for every σ that pinv keeps. Outputs only.
"""

from __future__ import annotations

import numpy as np
from scipy.spatial.distance import cdist

from attnkit_conformance.adapter import Adapter, Unsupported
from attnkit_conformance.adapters.bases.arguments import refusal, visible_pairs
from attnkit_conformance.model.types import Arrays, Params, option
from attnkit_conformance.peers.base import Source

Array = np.ndarray
TAKEN = (
    "q", "v", "landmarks", "landmark_mask", "mask", "key_lengths", "query_mask", "init_scale", "newton_steps", "ridge",
    "inverse_grad",
)  # fmt: skip
MASKS = ("mask", "key_lengths", "query_mask")  # of tokens
ROUNDING = 1e-17  # the largest remaining error
SINGULAR = 1e-14  # of the largest singular value: smaller ones are 0


def gauss(x: Array, y: Array) -> Array:
    """exp(-‖x - y‖²/(2√d)) over leading axes."""
    lead = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    x, y = (np.broadcast_to(z, (*lead, *z.shape[-2:])) for z in (x, y))
    kernel = np.empty((*lead, x.shape[-2], y.shape[-2]))
    for at in np.ndindex(lead):
        kernel[at] = np.exp(-cdist(x[at], y[at], "sqeuclidean") / (2 * x.shape[-1] ** 0.5))
    return kernel


class Pinv:
    """soft_attention and its weights in NumPy and SciPy."""

    ops = ("soft_attention", "soft_attention_weights")
    dtypes = ("float64", "float32")
    name = "numpy_pinv"
    description = f"numpy {np.__version__}, numpy.linalg.pinv, outputs only"

    def array(self, x: Array, dtype: str) -> Array:
        return x

    def numpy(self, x: Array) -> Array:
        return np.asarray(x)

    def kernels(self, arrays: Arrays, params: Params) -> tuple[Array, Array, Array]:
        """A, P and the valid tokens."""
        q, marks = arrays["q"].astype(np.float64), arrays["landmarks"].astype(np.float64)
        pairs = visible_pairs({**arrays, "k": arrays["q"]}, params)
        tokens = np.ones(q.shape[-2], bool) if pairs is None else np.diagonal(
            np.broadcast_to(pairs, (*pairs.shape[:-2], q.shape[-2], q.shape[-2])), axis1=-2, axis2=-1)  # fmt: skip
        present = arrays.get("landmark_mask", np.ones(marks.shape[-2], bool))
        q, marks = np.where(tokens[..., None], q, 0), np.where(present[..., None], marks, 0)
        a = gauss(marks, marks) * present[..., :, None] * present[..., None, :]
        a = a + option(params, "ridge", 0.0) * np.eye(a.shape[-1]) * present[..., None]
        p = gauss(marks, q) * present[..., :, None] * tokens[..., None, :]
        return a, p, tokens

    def unsupported(self, op: str, arrays: Arrays, params: Params) -> str | None:
        """Why a call is unsupported: the steps do not converge."""
        reason = refusal(arrays, params, TAKEN)
        if reason is not None or not arrays["landmarks"].size or not arrays["q"].size:
            return reason or "empty matrices have no singular values"
        a = self.kernels(arrays, params)[0]
        sizes, norm = np.linalg.svdvals(a), np.max(np.sum(np.abs(a), axis=-2), axis=-1)
        alpha = 2 * arrays.get("init_scale", params.get("init_scale", 0.9)) / np.where(norm > 0, norm, 1) ** 2
        regular = sizes > SINGULAR * sizes[..., :1]
        left = np.abs(1 - alpha[..., None] * sizes**2) ** (2.0 ** option(params, "newton_steps", 20))
        if np.any(regular & (left > ROUNDING)):
            return "Newton's iteration has not converged after so many steps"
        return None

    def call(self, op: str, arrays: Arrays, params: Params) -> dict[str, Array]:
        reason = self.unsupported(op, arrays, params)
        if reason is not None:
            raise Unsupported(reason)
        a, p, tokens = self.kernels(arrays, params)
        dtype, x = arrays["q"].dtype, np.linalg.pinv(a, rcond=SINGULAR, hermitian=True)
        if op.endswith("weights"):
            return {"w": (p.mT @ x @ p).astype(dtype)}
        v = np.where(tokens[..., None], arrays["v"], 0).astype(np.float64)
        return {"o": (p.mT @ (x @ (p @ v))).astype(dtype)}

    def vjp(self, op: str, arrays: Arrays, params: Params, cotangents: Arrays) -> dict[str, Array]:
        raise Unsupported("pinv has no gradient")

    def source(self, op: str, arrays: Arrays, params: Params) -> Source:
        """The same call, without masks of tokens, which no known disagreement needs."""
        if masks := sorted({*MASKS} & {*arrays, *params}):
            raise ValueError(f"numpy_pinv: a program shows no masks of tokens; got {', '.join(masks)}")
        lines = [
            "def gauss(x, y):",
            "    x, y = x.astype(np.float64)[..., :, None, :], y.astype(np.float64)[..., None, :, :]",
            "    return np.exp(-((x - y) ** 2).sum(-1) / (2 * x.shape[-1] ** 0.5))",
            "",
            "a, p = gauss(landmarks, landmarks), gauss(landmarks, q)",
        ]
        if "landmark_mask" in arrays:
            lines += ["present = landmark_mask[..., None]", "a, p = a * present * present.mT, p * present"]
        if params.get("ridge"):
            present = " * present" if "landmark_mask" in arrays else ""
            lines.append(f"a = a + {params['ridge']!r} * np.eye(a.shape[-1]){present}")
        lines.append(f"inverse = np.linalg.pinv(a, rcond={SINGULAR}, hermitian=True)")
        result = "p.mT @ inverse @ p" if op.endswith("weights") else "p.mT @ (inverse @ (p @ v))"
        return Source("numpy", (), tuple(lines), f"({result}).astype(q.dtype)", "np.__version__")


def adapters() -> list[Adapter]:
    """The only adapter."""
    return [Pinv()]
