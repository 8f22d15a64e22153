"""keras.ops on the CPU, one process per backend: the backend is chosen when keras is imported.

Supported: softmax_attention by keras.ops.dot_product_attention, (B, T, N, H) as in JAX, with all masks passed as one
and a bias beside a mask except on torch; sparsemax_attention and its weights by keras.ops.sparsemax on scores that the
adapter forms, with -inf at hidden pairs. sparsemax is not called for rows that see nothing; the adapter writes 0.
Gradients are the backend's; NumPy has none.
"""

from __future__ import annotations

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.adapters.bases.arguments import visible_pairs
from attnkit_conformance.adapters.worker import WorkerAdapter
from attnkit_conformance.model.types import Arrays, Params
from attnkit_conformance.peers.base import Source

BACKENDS = ("torch", "jax", "numpy")
WORKER = "attnkit_conformance.peers.keras_worker"


class Keras(WorkerAdapter):
    """keras on one backend, in its process."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        environment = {"KERAS_BACKEND": backend, **({"JAX_ENABLE_X64": "0"} if backend == "jax" else {})}
        super().__init__(f"keras-{backend}", f"{WORKER}:{backend}_backend", environment)

    def source(self, op: str, arrays: Arrays, params: Params) -> Source:
        """The same call on NumPy arrays."""
        environment = (("KERAS_BACKEND", self.backend),)
        hides = visible_pairs(arrays, params) is not None
        lines: list[str] = []
        if op == "softmax_attention":
            options = [
                f"{name}={name if name == 'bias' else 'seen'}"
                for name in ("bias", "mask")
                if name in arrays or (name == "mask" and hides)
            ]
            options += [f"scale={params['scale']!r}"] if "scale" in params else []
            lines = ["turned = lambda x: x.swapaxes(1, 2)"]
            call = f"keras.ops.dot_product_attention({', '.join(('turned(q)', 'turned(k)', 'turned(v)', *options))})"
            result = f"turned(keras.ops.convert_to_numpy({call}))"
        else:
            scale = repr(params["scale"]) if "scale" in params else "q.shape[-1] ** -0.5"
            lines = [f"s = q @ k.swapaxes(-1, -2) * {scale}"]
            lines += ["s = s + bias"] if "bias" in arrays else []
            lines += ["s = np.where(seen, s, -np.inf)"] if hides else []
            result = "keras.ops.convert_to_numpy(keras.ops.sparsemax(s))"
            result += "" if op.endswith("weights") else " @ v"
        return Source("numpy", ("import keras",), tuple(lines), result, "keras.__version__", environment)


def adapters() -> list[Adapter]:
    """One per backend that is installed."""
    return [Keras(backend) for backend in BACKENDS]
