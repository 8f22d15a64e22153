"""Softmax attention to be judged, and its adapter: a class with `call` alone."""

import numpy as np

from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.adapters.bases.numpy import NumpyAdapter


def attention(q, k, v, mask=None, scale=None):
    """softmax(scale q kᵀ) v over the visible keys; rows that see nothing are 0."""
    scores = (q.shape[-1] ** -0.5 if scale is None else scale) * (q @ k.swapaxes(-1, -2))
    seen = np.ones(scores.shape, bool) if mask is None else np.broadcast_to(mask, scores.shape)
    largest = np.max(scores, axis=-1, keepdims=True, where=seen, initial=-np.inf)
    weights = np.where(seen, np.exp(np.where(seen, scores - largest, -np.inf)), 0)
    return weights @ v / np.maximum(weights.sum(axis=-1, keepdims=True), np.finfo(q.dtype).tiny)


class Mine(NumpyAdapter):
    """What the function serves: masks of any shape and a scale; the judge draws its cases from that."""

    name, dtypes, ops = "mine", ("float32", "float64"), ("softmax_attention",)
    serves = {  # noqa: RUF012
        "softmax_attention": {
            "mask": ("pairs", "2d", "heads", "keys", "1d", "queries"),
            "scale": ("0.7", "-0.3"),
            "batch": ("none", "broadcast"),
        }
    }

    def call(self, op, arrays, params):
        if arrays.keys() - {"q", "k", "v", "mask"} or params.keys() - {"scale"}:
            raise Unsupported("only a mask and a scale")
        return {"o": attention(*(arrays[name] for name in "qkv"), arrays.get("mask"), params.get("scale"))}


ADAPTER = Mine()
