"""Which ops stand in for softmax in somebody else's model, and what the model's scaling of scores means to them."""

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import attnkit
from attnkit._core.family import joins_heads, scales_scores

Op = Callable[..., Any]


def taken_by(op: Op) -> frozenset[str]:
    """The names of all arguments of an op."""
    return frozenset(inspect.signature(op).parameters)


def check(caller: str, op: Op, options: Iterable[str], decided: frozenset[str]) -> None:
    """ValueError unless `op` is an attention op over q, k, v with heads apart that takes `options`, none `decided`."""
    known = [n for n in attnkit.__all__ if n.endswith("_attention") and _keeps_heads(getattr(attnkit, n))]
    name = getattr(op, "__name__", repr(op))
    if name not in known or getattr(attnkit, name) is not op:
        raise ValueError(f"{caller}: op must be one of {', '.join(known)}; got {name!r}")
    legal = sorted(taken_by(op) - decided - {"q", "k", "v", "return_lse", "return_state", "initial_state"})
    for option in options:
        if option not in legal:
            raise ValueError(f"{caller}: {name} takes the options {', '.join(legal)}; got {option!r}")


def _keeps_heads(op: Op) -> bool:
    return list(inspect.signature(op).parameters)[:3] == ["q", "k", "v"] and not joins_heads(op)


def needs_only_heads(op: Op) -> bool:
    """Whether an op does with q, k and v."""
    parameters = inspect.signature(op).parameters.values()
    return [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == ["q", "k", "v"]


def scale_of(caller: str, op: Op, scaling: float | None, d: int) -> dict[str, Any]:
    """The model's scaling as the op's scale. An op without scores q·k has none, and serves models of the usual 1/√d."""
    if scaling is None:
        return {}
    if scales_scores(op):
        return {"scale": scaling}
    if math.isclose(scaling, d**-0.5, rel_tol=1e-6):
        return {}
    raise NotImplementedError(
        f"{caller}: {op.__name__} has no scores that could be scaled; expected 1/√d; got {scaling}"
    )
