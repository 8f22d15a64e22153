"""Special cases of point-wise attention, for adapters that call kernels without attnkit's public functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnkit.ops.pointwise import reluformer_options, sigmoid_options

POINTWISE: dict[str, Callable[..., dict[str, Any]]] = {
    "pointwise_attention": dict,
    "reluformer_attention": reluformer_options,
    "sigmoid_attention": sigmoid_options,
}
"""{op: its own options as those of pointwise_attention}."""
OWN = ("gamma", "length")


def as_pointwise(op: str, given: dict[str, Any]) -> dict[str, Any]:
    """The options of an op as those of pointwise_attention."""
    if op == "pointwise_attention":
        return given
    own = {name: given[name] for name in OWN if name in given}
    return {name: x for name, x in given.items() if name not in own} | POINTWISE[op](**own)
