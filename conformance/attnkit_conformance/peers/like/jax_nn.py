"""Functions with the signature of jax.nn.dot_product_attention."""

from __future__ import annotations

from collections.abc import Callable, Collection

import jax
import numpy as np

from attnkit_conformance.adapter import Unsupported, refusing
from attnkit_conformance.adapters.bases import HIDING, NUMBERS, declaration_of
from attnkit_conformance.adapters.bases.arguments import visible_pairs
from attnkit_conformance.adapters.bases.jax import JaxAdapter
from attnkit_conformance.adapters.derivatives.jax import Arrays
from attnkit_conformance.adapters.jax import light
from attnkit_conformance.model.types import Keywords, Params, window_sides
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.peers.jax_nn import FLOATS, JaxNn, broadcast, pairs_of
from attnkit_conformance.peers.like import describe, function_at, keywords_of
from attnkit_conformance.peers.like.axes import FourAxes

KEYWORDS = ("bias", "mask", "scale", "is_causal", "key_value_seq_lengths", "local_window_size")


class Called(JaxNn):
    """The calls of such a function: is_causal, local_window_size and key_value_seq_lengths where they say everything,
    else one mask.
    """

    def __init__(self, name: str, function: Callable[..., object], takes: Collection[str]) -> None:
        super().__init__(name, (), function)
        self.takes = takes

    def unsupported(self, op: str, arrays: Arrays, params: Params) -> str | None:
        """Also arguments that are lacking, and rows in which a bias hides everything, which are NaN in JAX."""
        reason = super().unsupported(op, arrays, params)
        if reason is not None:
            return reason
        if hides_everything(arrays, params):
            return "a row whose scores are all -inf is NaN in JAX"
        if "bias" in arrays and arrays["bias"].dtype != arrays["q"].dtype:
            return "bias has the dtype of q"
        needed = [*(["bias"] if "bias" in arrays else []), *self.options(arrays, params)]
        return next((f"takes no {name}" for name in needed if name not in self.takes), None)

    def options(self, arrays: Arrays, params: Params) -> Arrays:
        """The keyword arguments of a call, but for the bias."""
        options: Keywords = {}
        features, values = arrays["q"].shape[-1], arrays["v"].shape[-1]
        if "scale" in params or features < values:  # q is padded
            options["scale"] = params.get("scale", features**-0.5)
        own = hidden_by_name(arrays, params)
        if own is not None and all(name in self.takes for name in own):
            return {**options, **own}
        seen = np.broadcast_to(np.asarray(visible_pairs(arrays, params)), pairs_of(arrays))
        return {**options, "mask": jax.numpy.asarray(seen)}

    def outputs(self, arrays: Arrays, params: Params) -> Callable[[Arrays], Arrays]:
        """The outputs, 0 in rows that see nothing: these have the mean of all values by JAX's definition."""
        function, seen = super().outputs(arrays, params), visible_pairs(arrays, params)
        if seen is None and arrays["k"].shape[-2]:
            return function
        some = np.any(np.broadcast_to(True if seen is None else seen, pairs_of(arrays)), axis=-1, keepdims=True)
        return lambda leaves: {name: jax.numpy.where(some, x, 0) for name, x in function(leaves).items()}


def hidden_by_name(arrays: Arrays, params: Params) -> Keywords | None:
    """What hides pairs as arguments of their own, {} if nothing does; None if it takes a mask. JAX aligns causality and
    windows at the upper left, and has one length per item.
    """
    given = [name for name in HIDING if name in arrays or params.get(name)]
    square = arrays["q"].shape[-2] == arrays["k"].shape[-2]
    if given == ["causal"] and (square or params["causal"] == "upper_left"):
        return {"is_causal": True}
    left, right = window_sides(params)
    if given == ["window"] and square and left is not None and right is not None:
        longest = arrays["k"].shape[-2]
        return {"local_window_size": (min(left, longest), min(right, longest))}
    if given == ["key_lengths"] and "key_lengths" in arrays:
        lengths = np.asarray(arrays["key_lengths"])
        if lengths.ndim == 2 and lengths.shape[1] == 1:
            items = np.broadcast_to(lengths[:, 0], arrays["q"].shape[:1])
            return {"key_value_seq_lengths": jax.numpy.asarray(items.astype(np.int32))}
    return None if given else {}


def hides_everything(arrays: Arrays, params: Params) -> bool:
    """Whether a bias is -inf at all pairs that a query sees."""
    if "bias" not in arrays:
        return False
    seen = np.broadcast_to(True if (pairs := visible_pairs(arrays, params)) is None else pairs, pairs_of(arrays))
    left = seen & ~np.isneginf(np.asarray(arrays["bias"]).astype(np.float64))
    return bool(np.any(seen.any(axis=-1) & ~left.any(axis=-1)))


class Like(JaxAdapter):
    """A function that is called as JAX documents it, under jit: (B, T, N, H) arrays. Keyword arguments that it does not
    have are not asked for, and a NotImplementedError is a refusal. One that JAX cannot differentiate is judged without
    gradients. Rows that see nothing are not judged: JAX defines them otherwise.
    """

    ops = JaxNn.ops
    without = ("return_lse",)

    def __init__(self, name: str, function: Callable[..., object], takes: Collection[str]) -> None:
        self.name, self.peer = name, Called(name, function, takes)
        on_cpu = jax.default_backend() == "cpu"  # not all of which multiply float16
        doubles = jax.dtypes.canonicalize_dtype(np.float64) == np.float64  # JAX_ENABLE_X64
        half = ("bfloat16",) if on_cpu else ("bfloat16", "float16")
        self.dtypes = (*(("float64",) if doubles else ()), "float32", *half)
        self.forward_only = no_gradient(function)
        self.serves = declaration_of(self.ops[0], *levels(takes), self.without)
        self.description = describe("called like jax.nn.dot_product_attention", takes, KEYWORDS, self.forward_only)

    def function(self, op: str, arrays: Arrays, params: Params) -> Callable[[Arrays], Arrays]:
        """The outputs of a call as a function of its floats."""
        axes = FourAxes(broadcast, arrays, params)
        wide = axes.arrays(arrays)
        reason = self.peer.unsupported(op, wide, params)
        if reason is not None:
            raise Unsupported(reason)

        def outputs(floats: Arrays) -> Arrays:
            return axes.outputs(self.peer.outputs(wide, params)(axes.arrays(floats)))

        return outputs

    def call(self, op: str, arrays: Arrays, params: Params) -> Arrays:
        """One call, under jit."""
        with refusing():
            outputs = self.function(op, arrays, params)
            return compile_function(outputs)({name: arrays[name] for name in FLOATS if name in arrays})

    def vjp(self, op: str, arrays: Arrays, params: Params, cotangents: Arrays) -> Arrays:
        """jax.vjp, under jit."""
        if self.forward_only:
            raise Unsupported("no gradients")
        with refusing():
            outputs = self.function(op, arrays, params)
            leaves = {name: arrays[name] for name in BY_NAME[op].differentiable if name in arrays}
            pull = compile_function(lambda leaves, cotangents: jax.vjp(outputs, leaves)[1](cotangents)[0])
            return pull(leaves, dict(cotangents))


def compile_function(function: Callable[..., Arrays]) -> Callable[..., Arrays]:
    """A function under jit, which runs it once."""
    jitted: Callable[..., Arrays] = jax.jit(function, compiler_options=light())
    return jitted


def levels(takes: Collection[str]) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """The factors of which functions with these arguments take every level, and of others some. Without a mask lengths
    of items, causality and windows are refused where JAX means something else by them.
    """
    some: dict[str, tuple[str, ...]] = {"scale": NUMBERS} if "scale" in takes else {}
    every = ("batch", "heads", *(("bias",) if "bias" in takes else ()))
    if "mask" in takes:
        return (*every, *HIDING), some
    own = {"is_causal": "causal", "local_window_size": "window", "key_value_seq_lengths": "key_lengths"}
    return (*every, *(factor for name, factor in own.items() if name in takes)), some


def no_gradient(function: Callable[..., object]) -> bool:
    """Whether a plain call answers, but cannot be differentiated."""
    x = jax.numpy.ones((1, 64, 1, 64))
    try:
        function(x, x, x)
    except Exception:
        return False
    try:
        jax.vjp(lambda x: function(x, x, x), x)
    except Exception:
        return True
    return False


def adapter(target: str) -> Like:
    """The adapter of a function at "package.module:function"."""
    function = function_at(target)
    return Like(target, function, keywords_of(function, KEYWORDS))
