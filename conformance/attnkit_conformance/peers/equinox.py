"""equinox.nn.MultiheadAttention with its projections replaced by the identity, one call for each item of the batch.

Takes (tokens, heads·features), masks of pairs for each head, and no bias, scale or grouped heads.
"""

from __future__ import annotations

import equinox
import jax

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.peers.heads import Call, Function, Takes
from attnkit_conformance.peers.jax_base import JaxHeads

LINES = (
    "heads, features = q.shape[1], q.shape[3]",
    "module = equinox.nn.MultiheadAttention(heads, heads * features, vo_size=v.shape[3], key=jax.random.key(0))",
    "names = ('query_proj', 'key_proj', 'value_proj', 'output_proj')",
    "parts = lambda module: [getattr(module, name) for name in names]",
    "module = equinox.tree_at(parts, module, [equinox.nn.Identity()] * 4)",
    "joined = lambda x: x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)",
    "split = lambda o: o.reshape(*o.shape[:2], heads, -1).swapaxes(1, 2)",
)
NAMES = ("query_proj", "key_proj", "value_proj", "output_proj")


def attend(call: Call) -> jax.Array:
    batch, heads, _, features = call.q.shape
    module = equinox.nn.MultiheadAttention(heads, heads * features, vo_size=call.v.shape[3], key=jax.random.key(0))
    module = equinox.tree_at(lambda m: [getattr(m, name) for name in NAMES], module, [equinox.nn.Identity()] * 4)
    q, k, v = (x.swapaxes(1, 2).reshape(batch, x.shape[2], -1) for x in (call.q, call.k, call.v))
    mask = None if call.seen is None else jax.numpy.asarray(call.seen)
    o: jax.Array = jax.vmap(module, in_axes=(0, 0, 0, None if mask is None else 0))(q, k, v, mask)
    return o.reshape(*o.shape[:2], heads, -1).swapaxes(1, 2)


def adapters() -> list[Adapter]:
    """The module."""
    text = "split(jax.vmap(module)(joined({q}), joined({k}), joined({v}), {mask}))"
    about = f"equinox {equinox.__version__}, nn.MultiheadAttention without projections"
    function = Function(
        "equinox", about, ("float32", "bfloat16"), Takes("pairs"), attend, text, ("import equinox",),
        "equinox.__version__", LINES,
    )  # fmt: skip
    return [JaxHeads(function)]
