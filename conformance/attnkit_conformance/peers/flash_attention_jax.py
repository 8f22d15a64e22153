"""flash-attention-jax: plain attention and the two in blocks, with and without causality.

`flash_attention` and `attention` take masks of keys, (B, S), `causal_flash_attention` and `causal_attention` none;
`flash_attention` needs as many features in v as in k, as its causal form does. float32 only: the blocks are float32.
"""

from __future__ import annotations

from functools import partial
from importlib.metadata import version

import flash_attention_jax
import jax
import numpy as np

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.model.types import Arrays, Params
from attnkit_conformance.peers.heads import Call, Function, Takes
from attnkit_conformance.peers.jax_base import JaxHeads

NAME = "flash_attention_jax"
VERSION = 'importlib.metadata.version("flash-attention-jax")'
PLAIN = "{q}, {k}, {v}"


def with_keys(name: str, call: Call) -> jax.Array:
    seen = np.ones((call.k.shape[0], call.k.shape[2]), bool) if call.seen is None else call.seen
    o: jax.Array = getattr(flash_attention_jax, name)(call.q, call.k, call.v, jax.numpy.asarray(seen))
    return o


def causal(name: str, call: Call) -> jax.Array:
    o: jax.Array = getattr(flash_attention_jax, name)(call.q, call.k, call.v)
    return o


def is_causal(arrays: Arrays, params: Params) -> str | None:
    return None if params.get("causal") else "is always causal"


def adapters() -> list[Adapter]:
    """Four functions."""
    about = f"flash-attention-jax {version('flash-attention-jax')}"
    functions = []
    for name, blocks in (("attention", False), ("flash_attention", True)):
        functions.append(
            Function(
                f"{NAME}-{name}", f"{about}, {name}", ("float32",), Takes("keys", equal_features=blocks),
                partial(with_keys, name), f"{name}({PLAIN}, {{keys}})",
                ("import importlib.metadata", f"from flash_attention_jax import {name}"), VERSION,
            )
        )  # fmt: skip
        functions.append(
            Function(
                f"{NAME}-causal_{name}", f"{about}, causal_{name}", ("float32",),
                Takes(causal="lower_right", equal_features=blocks),
                partial(causal, f"causal_{name}"), f"causal_{name}({PLAIN})",
                ("import importlib.metadata", f"from flash_attention_jax import causal_{name}"), VERSION,
                limits=is_causal,
            )
        )  # fmt: skip
    return [JaxHeads(function) for function in functions]
