"""Error samples: inputs that every implementation of a public function must refuse, with the expected type and text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from attnkit_conformance.model.case import ErrorSample
from attnkit_conformance.model.op import Op
from attnkit_conformance.model.types import Option, Params

L, S, D, E = 3, 5, 4, 6
GOOD: Mapping[str, np.ndarray] = {
    "q": np.ones((2, 2, L, D), np.float32),
    "k": np.ones((2, 2, S, D), np.float32),
    "v": np.ones((2, 2, S, E), np.float32),
    "log_forget": -np.ones((2, 2, S), np.float32),
}
Wrong: TypeAlias = tuple[str, Option | np.ndarray, type[Exception], str]
"""One array or parameter: its name, its value, and the error with a pattern of its text."""


def wrong(
    op: Op, name: str, exception: type[Exception], pattern: str, params: Params | None = None, **arrays: np.ndarray
) -> ErrorSample:
    """A call that is valid except for these arrays and params."""
    good = {n: GOOD[n] for n in op.arguments}
    return ErrorSample(name, {**good, **arrays}, params or {}, exception, pattern)


def calls(op: Op, good: Mapping[str, np.ndarray], params: Params, *wrong: Wrong) -> Iterator[ErrorSample]:
    """Calls that are valid except for one array or parameter."""
    arguments = {name: x for name, x in good.items() if name in op.arguments}
    for n, (name, value, exception, pattern) in enumerate(wrong):
        arrays, own = dict(arguments), dict(params)
        if isinstance(value, np.ndarray):
            arrays[name] = value
        else:
            own[name] = value
        yield ErrorSample(f"{name}-{n}", arrays, own, exception, pattern)


def zeros(*shape: int, dtype: DTypeLike = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def attention_errors(op: Op) -> Iterator[ErrorSample]:
    """The errors of group a: shapes and values (ValueError), dtypes (TypeError), unknown names."""
    yield wrong(op, "features-differ", ValueError, r"\bk\b", k=zeros(2, 2, S, D + 1))
    if "v" in op.arguments:
        yield wrong(op, "tokens-differ", ValueError, r"\bv\b", v=zeros(2, 2, S + 1, E))
        yield wrong(op, "gqa-heads-of-v", ValueError, "heads", {"enable_gqa": True}, v=zeros(2, 1, S, E))
    yield wrong(op, "one-axis", ValueError, r"\bq\b", q=zeros(D))
    yield wrong(op, "batch-differs", ValueError, "leading", k=zeros(3, 2, S, D))
    yield wrong(op, "heads-differ", ValueError, "enable_gqa", q=zeros(2, 4, L, D))
    yield wrong(op, "gqa-not-divisible", ValueError, "heads", {"enable_gqa": True}, q=zeros(2, 3, L, D))
    yield wrong(op, "gqa-number", TypeError, "enable_gqa", {"enable_gqa": 1})
    yield wrong(op, "mask-float", TypeError, r"mask.*bias|bias.*mask", mask=zeros(L, S))
    yield wrong(op, "mask-shape", ValueError, "mask", mask=zeros(L, S + 1, dtype=bool))
    yield wrong(op, "mask-enlarges", ValueError, "mask", mask=zeros(7, 2, 2, L, S, dtype=bool))
    yield wrong(op, "key-mask-without-query-axis", ValueError, "mask", mask=zeros(4, S, dtype=bool))
    yield wrong(op, "q-integer", TypeError, r"\bq\b", q=zeros(2, 2, L, D, dtype=np.int32))
    for dtype in ("float16", "float64"):
        yield wrong(op, f"dtypes-differ-{dtype}", TypeError, r"\bk\b", k=zeros(2, 2, S, D, dtype=dtype))
    yield wrong(op, "bias-shape", ValueError, "bias", bias=zeros(L + 1, S))
    yield wrong(op, "bias-boolean", TypeError, "bias", bias=zeros(L, S, dtype=bool))
    yield wrong(op, "key-lengths-float", TypeError, "key_lengths", key_lengths=zeros(2, 2))
    yield wrong(op, "key-lengths-shape", ValueError, "key_lengths", key_lengths=zeros(3, dtype=np.int64))
    yield wrong(op, "query-mask-float", TypeError, "query_mask", query_mask=zeros(2, 2, L))
    yield wrong(op, "query-mask-shape", ValueError, "query_mask", query_mask=zeros(L + 1, dtype=bool))
    yield wrong(op, "causal-unknown", ValueError, "causal.*upper_left", {"causal": "lower"})
    yield wrong(op, "window-negative", ValueError, "window", {"window": (-1, 0)})
    yield wrong(op, "window-half", ValueError, "window", {"window": (0.5, 0)})
    yield wrong(op, "window-of-three", ValueError, "window", {"window": (1, 1, 1)})
    yield wrong(op, "window-number", ValueError, "window", {"window": 3})
    yield wrong(op, "scale-nan", ValueError, "scale", {"scale": float("nan")})
    yield wrong(op, "unexpected-argument", ValueError, "unexpected argument 'is_causal'", {"is_causal": True})
    yield wrong(op, "impl-unknown", ValueError, "impl.*generic", {"impl": "no-such-kernel"})
    if op.dropout:
        yield wrong(op, "dropout-p", ValueError, "dropout", {"dropout": (1.0, 0)})
        yield wrong(op, "dropout-seed", ValueError, "dropout.*seed", {"dropout": (0.5, 2**64)})
        yield wrong(op, "dropout-mask-boolean", TypeError, "dropout_mask", dropout_mask=zeros(L, S, dtype=bool))
    else:
        yield wrong(op, "no-dropout", ValueError, "unexpected argument 'dropout'", {"dropout": (0.5, 0)})


def length_errors(op: Op) -> Iterator[ErrorSample]:
    """The same for ops that take a length."""
    yield from attention_errors(op)
    yield wrong(op, "length-zero", ValueError, "length", {"length": 0.0})
    yield wrong(op, "length-infinite", ValueError, "length", {"length": float("inf")})
    yield wrong(op, "length-unknown", ValueError, "length.*visible", {"length": "padded"})
    yield wrong(op, "length-shape", ValueError, "length", length=np.ones(L + 1, np.float32))


def pointwise_errors(op: Op) -> Iterator[ErrorSample]:
    """The same with the parameters of pointwise_attention."""
    yield from length_errors(op)
    yield wrong(op, "activation-unknown", ValueError, "activation.*relu_squared", {"activation": "swish"})
    for name in ("alpha", "gain", "shift"):
        yield wrong(op, f"{name}-nan", ValueError, name, {name: float("nan")})
    yield wrong(op, "shift-unknown", ValueError, "shift.*-log_length", {"shift": "log_length"})


def reluformer_errors(op: Op) -> Iterator[ErrorSample]:
    """The same with gamma; further options of pointwise_attention are refused."""
    yield from length_errors(op)
    for name, gamma in (("zero", 0.0), ("negative", -1.0), ("nan", float("nan"))):
        yield wrong(op, f"gamma-{name}", ValueError, "gamma", {"gamma": gamma})
    yield wrong(op, "alpha-not-taken", ValueError, "unexpected argument 'alpha'", {"alpha": 1.0})


def layernorm_errors(op: Op) -> Iterator[ErrorSample]:
    """Weights of the wrong size and inputs of the wrong dtype."""
    good = {"q": GOOD["q"], "k": GOOD["k"], "q_weight": zeros(D), "k_weight": zeros(D)}
    for name, arrays, exception, pattern in (
        ("weight-shape", {"q_weight": zeros(D + 1)}, ValueError, "q_weight"),
        ("q-integer", {"q": zeros(2, 2, L, D, dtype=np.int64)}, TypeError, r"\bq\b"),
        ("dtypes-differ-float16", {"k": zeros(2, 2, S, D, dtype=np.float16)}, TypeError, r"\bk\b"),
        ("dtypes-differ-float64", {"k": zeros(2, 2, S, D, dtype=np.float64)}, TypeError, r"\bk\b"),
    ):
        yield ErrorSample(name, {**good, **arrays}, {}, exception, pattern)
    yield ErrorSample("eps-nan", good, {"eps": float("nan")}, ValueError, "eps")
