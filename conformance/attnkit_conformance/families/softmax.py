"""Row of the op database: softmax attention."""

from __future__ import annotations

from attnkit_conformance.model import errors
from attnkit_conformance.model.op import OPTIONAL, QKV, Op, always, o_and_lse
from attnkit_conformance.scenes import attention

OPS = (
    Op(
        name="softmax_attention",
        formula="w = exp(s - m) / Σ exp(s - m)",
        arguments=QKV,
        outputs=o_and_lse,
        samples=attention.attention_samples,
        group="a",
        own=("return_lse",),
        variants=({}, {"return_lse": True}),
        levels={"return_lse": (None, True)},
        optional=tuple(name for name in OPTIONAL if name != "length"),
        differentiable=(*QKV, "bias", "scale"),
        compute_outputs=("lse",),
        errors=errors.attention_errors,
        exponent=always,
        weights=True,
        statistics=True,
        bias_inf=True,
    ),
)
