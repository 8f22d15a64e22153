"""Adapters of functions with a C interface, in a shared library: attention of dense arrays by their addresses.

    int NAME_float32(const float *q, const float *k, const float *v, const uint8_t *mask, double scale,
                     int64_t n, int64_t L, int64_t S, int64_t d, int64_t e, float *o);
    int NAME_float32_vjp(const float *q, const float *k, const float *v, const uint8_t *mask, double scale,
                         int64_t n, int64_t L, int64_t S, int64_t d, int64_t e,
                         const float *o_bar, float *dq, float *dk, float *dv);

q is (n, L, d), k (n, S, d), v (n, S, e) and o (n, L, e), row after row; heads and items of a batch are the first axis.
mask is NULL if every query sees every key, else (n, L, S) with 1 where a pair is visible. A function returns 0, or
anything else for a call that it does not support. Functions of other dtypes end with _float64 (double), _float16 and
_bfloat16 (uint16_t); those are judged that the library has. _vjp is optional.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from attnkit_conformance.adapter import IllFormed, Unsupported
from attnkit_conformance.adapters.bases import HIDING, NUMBERS, declaration_of
from attnkit_conformance.adapters.bases.arguments import refusal, visible_pairs
from attnkit_conformance.adapters.bases.numpy import NumpyAdapter
from attnkit_conformance.families import softmax
from attnkit_conformance.model.case import DTYPES
from attnkit_conformance.model.types import Arrays, Params, Results, option

TAKEN = ("q", "k", "v", "mask", "key_lengths", "query_mask", "causal", "window", "scale", "enable_gqa")
GUARD = 64  # bytes before and behind each array, which nobody may write to
WATCHED = 0xA5  # their content


class SharedLibrary(NumpyAdapter):
    """The functions `name`_<dtype> of the shared library at `path`, as the module says.

    They are judged on plain attention with a scale and grouped heads, and on whatever says which pairs are visible:
    masks, lengths, causality and windows arrive as `mask`. `op` is softmax attention by default. A function that
    writes outside of its outputs, or to its inputs, has failed. IllFormed if the library has none of these functions.
    """

    without = ("return_lse",)

    def __init__(self, path: str | Path, name: str, op: str = softmax.OPS[0].name) -> None:
        self.name, self.ops = name, (op,)
        self.serves = declaration_of(op, (*HIDING, "heads", "batch"), {"scale": NUMBERS}, self.without)
        try:
            library = ctypes.CDLL(str(Path(path).resolve()))
        except OSError as error:
            raise IllFormed(f"{path}: cannot be loaded: {error}") from error
        wanted = [f"{name}_{dtype}{ending}" for dtype in DTYPES for ending in ("", "_vjp")]
        self.functions = {symbol: getattr(library, symbol) for symbol in wanted if hasattr(library, symbol)}
        self.dtypes = tuple(dtype for dtype in DTYPES if f"{name}_{dtype}" in self.functions)
        if not self.dtypes:
            raise IllFormed(f"{path}: has none of the functions {', '.join(f'{name}_{dtype}' for dtype in DTYPES)}")
        self.description = f"{Path(path).name}: {', '.join(self.functions)}"

    def call(self, op: str, arrays: Arrays, params: Params) -> Results:
        """One call of NAME_<dtype>."""
        dense = Dense(arrays, params)
        (o,) = self.answer("", dense, (), {"o": (*dense.lead, *dense.L_e)})
        return {"o": o}

    def vjp(self, op: str, arrays: Arrays, params: Params, cotangents: Arrays) -> Results:
        """One call of NAME_<dtype>_vjp."""
        dense = Dense(arrays, params)
        outputs = {f"d{name}": x.shape for name, x in zip("qkv", dense.qkv, strict=True)}
        grads = self.answer("_vjp", dense, (np.broadcast_to(cotangents["o"], (*dense.lead, *dense.L_e)),), outputs)
        return {name: dense.reduced(name, grad) for name, grad in zip("qkv", grads, strict=True)}

    def answer(
        self, ending: str, dense: Dense, further: tuple[np.ndarray, ...], outputs: Mapping[str, tuple[int, ...]]
    ) -> list[np.ndarray]:
        """The outputs of a function, which are NaN before it writes them."""
        dtype = dense.qkv[0].dtype
        symbol = f"{self.name}_{dtype.name}{ending}"
        reason = refusal(dense.arrays, dense.params, TAKEN)
        if symbol not in self.functions or reason:
            raise Unsupported(reason or f"the library has no {symbol}")
        names = ("q", "k", "v", "mask", "o_bar")
        given = dict(zip(names, (*dense.qkv, dense.mask, *further), strict=False))
        inputs = {name: None if x is None else Guarded(name, x) for name, x in given.items()}
        written = [Guarded(name, np.full(shape, np.nan, dtype)) for name, shape in outputs.items()]
        q, k, v, mask, *cotangents = [x and x.address for x in inputs.values()]
        sizes = [ctypes.c_int64(n) for n in dense.sizes]
        addresses = [*cotangents, *(x.address for x in written)]
        status = self.functions[symbol](q, k, v, mask, ctypes.c_double(dense.scale), *sizes, *addresses)
        for guarded in (*filter(None, inputs.values()), *written):
            guarded.check(symbol, changed=guarded in written)
        if status:
            raise Unsupported(f"{symbol} returned {status}")
        return [x.content for x in written]


class Dense:
    """Arguments as the interface has them: equal leading axes, and one mask."""

    def __init__(self, arrays: Arrays, params: Params) -> None:
        self.arrays, self.params = arrays, params
        q, k, v = (arrays[name] for name in "qkv")
        self.groups = q.shape[-3] // k.shape[-3] if params.get("enable_gqa") else 1
        k, v = (np.repeat(x, self.groups, axis=-3) if self.groups > 1 else x for x in (k, v))
        self.before = {"q": q.shape, "k": k.shape, "v": v.shape}  # without the axes that are added
        self.lead = np.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v)))
        self.qkv = [np.broadcast_to(x, (*self.lead, *x.shape[-2:])) for x in (q, k, v)]
        (L, d), (S, e) = q.shape[-2:], v.shape[-2:]
        self.L_e, self.sizes = (L, e), (int(np.prod(self.lead)), L, S, d, e)
        self.scale = option(params, "scale", d**-0.5)

    @functools.cached_property
    def mask(self) -> np.ndarray | None:
        """The visible pairs, if some are not."""
        seen = visible_pairs(self.arrays, self.params)
        L, S = self.sizes[1:3]
        return None if seen is None else np.broadcast_to(seen, (*self.lead, L, S)).astype(np.uint8)

    def reduced(self, name: str, grad: np.ndarray) -> np.ndarray:
        """The gradient of an argument, from that of its copies in all rows and heads."""
        shape, wide = self.before[name], grad.astype(np.float64)
        added = wide.ndim - len(shape)
        axes = [n for n in range(wide.ndim) if n < added or (shape[n - added] == 1 and wide.shape[n] > 1)]
        total: np.ndarray = wide.sum(axis=tuple(axes), keepdims=True).reshape(shape)
        if name != "q" and self.groups > 1:
            total = total.reshape(*shape[:-3], shape[-3] // self.groups, self.groups, *shape[-2:]).sum(axis=-3)
        return total.astype(grad.dtype)


class Guarded:
    """A dense copy of an array between bytes that nobody may write to."""

    def __init__(self, name: str, x: np.ndarray) -> None:
        self.name, self.bytes = name, np.full(x.nbytes + 3 * GUARD, WATCHED, np.uint8)
        self.start = -self.bytes.ctypes.data % GUARD + GUARD
        self.content = np.ndarray(x.shape, x.dtype, self.bytes, self.start)
        self.content[...] = x
        self.before = self.bytes.copy()

    @property
    def address(self) -> ctypes.c_void_p:
        """Where the copy begins."""
        return ctypes.c_void_p(self.bytes.ctypes.data + self.start)

    def check(self, function: str, changed: bool) -> None:
        """RuntimeError if a function wrote to an input, or outside of an output."""
        inside = slice(self.start, self.start + self.content.nbytes)
        same = self.bytes == self.before
        if changed:
            same[inside] = True
        if not np.all(same):
            place = int(np.argmin(same)) - self.start
            raise RuntimeError(f"{function} wrote to byte {place} of {self.name}, which has {self.content.nbytes}")
