"""flax.nnx.dot_product_attention: as its layers call it, and by its own weights, which it computes where dropout or a
module asks for them (`flax-weights`).

Takes (B, tokens, heads, features), masks of pairs, a bias, and grouped heads; `is_causal` is upper left. The first
hands over to jax.nn.dot_product_attention, which needs as many features in v as in k.
"""

from __future__ import annotations

import flax
import jax
from flax import nnx
from flax.nnx.nn.attention import dot_product_attention_weights

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.model.types import Keywords
from attnkit_conformance.peers.heads import Call, Function, Takes
from attnkit_conformance.peers.jax_base import JaxHeads

TURNED = ("turned = lambda x: x.swapaxes(1, 2)",)


def options(call: Call) -> Keywords:
    return {"bias": call.bias, "mask": None if call.seen is None else jax.numpy.asarray(call.seen)}


def attend(call: Call) -> jax.Array:
    q, k, v = (x.swapaxes(1, 2) for x in (call.q, call.k, call.v))
    o: jax.Array = nnx.dot_product_attention(q, k, v, is_causal=call.causal, **options(call)).swapaxes(1, 2)
    return o


def by_weights(call: Call) -> jax.Array:
    q, k = (x.swapaxes(1, 2) for x in (call.q, call.k))
    o: jax.Array = dot_product_attention_weights(q, k, is_causal=call.causal, **options(call)) @ call.v
    return o


def adapters() -> list[Adapter]:
    """Both."""
    arguments = "turned({q}), turned({k}), "
    others = "bias={bias}, mask={mask}, is_causal={causal})"
    functions = (
        Function(
            "flax-attention", f"flax {flax.__version__}, nnx.dot_product_attention", ("float32",),
            Takes("pairs", "upper_left", bias=True, grouped=True, equal_features=True), attend,
            f"turned(nnx.dot_product_attention({arguments}turned({{v}}), {others})",
            ("import flax", "from flax import nnx"), "flax.__version__", TURNED,
        ),
        Function(
            "flax-weights", f"flax {flax.__version__}, nnx's dot_product_attention_weights", ("float32",),
            Takes("pairs", "upper_left", bias=True), by_weights,
            f"dot_product_attention_weights({arguments}{others} @ {{v}}",
            ("import flax", "from flax.nnx.nn.attention import dot_product_attention_weights"), "flax.__version__",
            TURNED,
        ),
    )  # fmt: skip
    return [JaxHeads(function) for function in functions]
