"""The code in a keras process: its functions on the arrays of one backend, chosen by KERAS_BACKEND."""

from __future__ import annotations

import keras
import numpy as np

from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.adapters.bases.arguments import refusal, visible_pairs
from attnkit_conformance.model.types import Arrays, Foreign, Params, Results
from attnkit_conformance.opdb import BY_NAME

SCORES = ("q", "k", "mask", "bias", "key_lengths", "query_mask", "causal", "window", "scale", "enable_gqa")
OPS = ("softmax_attention", "sparsemax_attention", "sparsemax_attention_weights")


class Functions:
    """keras.ops on one backend. Array arguments arrive as NumPy's, and floats are converted to the backend."""

    ops = OPS
    without = ("return_lse",)

    def __init__(self, backend: str, dtypes: tuple[str, ...], gradients: str) -> None:
        if keras.backend.backend() != backend:
            raise ValueError(f"keras: backend {keras.backend.backend()}; expected KERAS_BACKEND={backend}")
        self.name, self.dtypes, self.backend = f"keras-{backend}", dtypes, backend
        self.description = f"keras {keras.__version__}, keras.ops, CPU, backend {backend}, {gradients}"

    def array(self, x: np.ndarray, dtype: str) -> np.ndarray:
        return x

    def numpy(self, x: object) -> np.ndarray:
        return np.asarray(x)

    def unsupported(self, op: str, arrays: Arrays, params: Params) -> str | None:
        """Why a call is unsupported: other than two leading axes, empty inputs, and a bias beside a mask on torch."""
        names = [name for name in ("q", "k", "v") if name in arrays]
        shapes = [arrays[name].shape for name in names]
        if any(len(shape) != 4 or shape[0] != shapes[0][0] for shape in shapes) or shapes[1][1] != shapes[-1][1]:
            return "takes (B, T, N, H) arrays"
        if shapes[0][1] != shapes[1][1] and not params.get("enable_gqa"):
            return "heads do not broadcast"
        if 0 in (shapes[0][2], shapes[1][2]):
            return "takes no empty inputs"
        reason = refusal(arrays, params, (*SCORES, "v"))
        both = "bias" in arrays and visible_pairs(arrays, params) is not None
        if reason is None and op == "softmax_attention" and both and self.backend == "torch":
            return "takes a mask or a bias, not both"
        return reason

    def outputs(self, op: str, arrays: Arrays, params: Params, floats: Arrays) -> Results:
        """One call, `floats` being the float arrays as tensors of the backend."""
        shape = (*arrays["q"].shape[:-1], arrays["k"].shape[-2])
        pairs = visible_pairs(arrays, params)
        seen = None if pairs is None else np.broadcast_to(pairs, shape)
        if op != "softmax_attention":
            return self.sparsemax(op, seen, params, floats)
        q, k, v = (keras.ops.swapaxes(floats[name], 1, 2) for name in ("q", "k", "v"))
        bias = floats.get("bias")
        bias = None if bias is None else keras.ops.broadcast_to(bias, shape)
        mask = None if seen is None else keras.ops.convert_to_tensor(seen)
        features, values = q.shape[-1], v.shape[-1]
        scale = params.get("scale", features**-0.5)
        q, k, v = (pad_features(x, max(features, values)) for x in (q, k, v))
        o = keras.ops.dot_product_attention(q, k, v, bias=bias, mask=mask, scale=scale)
        return {"o": keras.ops.swapaxes(o, 1, 2)[..., :values]}

    def sparsemax(self, op: str, seen: np.ndarray | None, params: Params, floats: Arrays) -> Results:
        """Scores with -inf at hidden pairs, keras.ops.sparsemax, and the product with v."""
        q, k, v = floats["q"], floats["k"], floats.get("v")
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = keras.ops.repeat(k, groups, 1), v if v is None else keras.ops.repeat(v, groups, 1)
        clean = seen is None
        seen = np.ones((*q.shape[:-1], k.shape[-2]), bool) if seen is None else seen
        rows, keys = (keras.ops.convert_to_tensor(np.any(seen, axis=axis, keepdims=True)) for axis in (-1, -2))
        keys = keras.ops.swapaxes(keys, -1, -2)
        if not clean:
            q, k = keras.ops.where(rows, q, 0.0), keras.ops.where(keys, k, 0.0)
            v = v if v is None else keras.ops.where(keys, v, 0.0)
        s = keras.ops.matmul(q, keras.ops.swapaxes(k, -1, -2)) * params.get("scale", q.shape[-1] ** -0.5)
        s = s if "bias" not in floats else s + keras.ops.cast(floats["bias"], s.dtype)
        s = s if clean else keras.ops.where(keras.ops.convert_to_tensor(seen), s, -np.inf)
        alive = keras.ops.any(s != -np.inf, axis=-1, keepdims=True)
        w = keras.ops.where(alive, keras.ops.sparsemax(keras.ops.where(alive, s, 0.0)), 0.0)
        return {"w": w} if v is None else {"o": keras.ops.matmul(w, v)}

    def call(self, op: str, arrays: Arrays, params: Params) -> Results:
        reason = self.unsupported(op, arrays, params)
        if reason is not None:
            raise Unsupported(reason)
        floats = {name: keras.ops.convert_to_tensor(x) for name, x in arrays.items() if x.dtype.kind == "f"}
        outputs = self.outputs(op, arrays, params, floats)
        return {name: keras.ops.convert_to_numpy(x) for name, x in outputs.items()}

    def vjp(self, op: str, arrays: Arrays, params: Params, cotangents: Arrays) -> Results:
        raise Unsupported("NumPy has no gradient")


class Torch(Functions):
    """Gradients by torch's autograd."""

    def vjp(self, op: str, arrays: Arrays, params: Params, cotangents: Arrays) -> Results:
        import torch

        names = [name for name in BY_NAME[op].differentiable if name in arrays]
        leaves = {name: torch.from_numpy(np.array(arrays[name])).requires_grad_() for name in names}
        outputs = self.outputs(op, arrays, params, leaves)
        of_outputs = [torch.from_numpy(np.array(cotangents[name])) for name in outputs]
        grads = torch.autograd.grad(list(outputs.values()), list(leaves.values()), of_outputs, allow_unused=True)
        pairs = zip(leaves.items(), grads, strict=True)
        return {name: (torch.zeros_like(leaf) if x is None else x).detach().numpy() for (name, leaf), x in pairs}


class Jax(Functions):
    """Gradients by jax.vjp."""

    def vjp(self, op: str, arrays: Arrays, params: Params, cotangents: Arrays) -> Results:
        import jax

        leaves = {name: jax.numpy.asarray(arrays[name]) for name in BY_NAME[op].differentiable if name in arrays}
        pull = jax.vjp(lambda floats: self.outputs(op, arrays, params, floats), leaves)[1]
        grads = pull({name: jax.numpy.asarray(x) for name, x in cotangents.items()})[0]
        return {name: np.asarray(x) for name, x in grads.items()}


def pad_features(x: Foreign, features: int) -> Foreign:
    """x padded with zeros."""
    return x if x.shape[-1] == features else keras.ops.pad(x, [(0, 0)] * 3 + [(0, features - x.shape[-1])])


DTYPES = ("float32",)  # convert_to_tensor converts float64, and JAX's and NumPy's softmax everything, to it


def torch_backend() -> Functions:
    return Torch("torch", DTYPES, "autograd")


def jax_backend() -> Functions:
    return Jax("jax", DTYPES, "jax.vjp")


def numpy_backend() -> Functions:
    return Functions("numpy", DTYPES, "outputs only")
