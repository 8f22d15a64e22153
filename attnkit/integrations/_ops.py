"""Which ops can replace softmax in a foreign model, and what the model's scaling of scores means for them."""

import inspect
import math

import attnkit
from attnkit._core.family import hides_later_keys, joins_heads, scales_scores
from attnkit._core.typing import AnyFunction, Bindings, Causal, Keywords
from attnkit.ops.names import with_preset
from attnkit.ops.recurrent.record import RECURRENT

Op = AnyFunction  # a public one


def taken_by(op: Op) -> frozenset[str]:
    """The names of all arguments of an op."""
    return _TAKEN[op.__name__]


def resolve(caller: str, op: str | Op, options: Bindings, decided: frozenset[str]) -> tuple[Op, Keywords]:
    """The op of a name, short or long, or the op itself; and its options, including those implied by the name.

    Raises:
        ValueError: no attention op over q, k, v with heads apart; an option that the op does not take, or that is
            `decided` elsewhere.
    """
    name = said = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if isinstance(op, str):
        name, options = with_preset(caller, op, options)
    if name not in _SERVED or not (isinstance(op, str) or getattr(attnkit, name) is op):
        raise ValueError(f"{caller}: op must be one of {', '.join(_SERVED)}, or short such as 'relu'; got {said!r}")
    function: Op = getattr(attnkit, name)
    legal = sorted(taken_by(function) - decided - _NOT_SET)
    for option in options:
        if option not in legal:
            raise ValueError(f"{caller}: {name} takes the options {', '.join(legal)}; got {option!r}")
    return function, dict(options)


_NOT_SET = frozenset(("q", "k", "v", "return_lse", "return_remainder", "return_state", "initial_state"))


def _keeps_heads(op: Op) -> bool:
    arrays = list(inspect.signature(op).parameters)[:3]
    return arrays == ["q", "k", "v"] and not joins_heads(op) and op.__name__ not in RECURRENT


def needs_only_heads(op: Op) -> bool:
    """Whether an op needs only q, k and v."""
    parameters = inspect.signature(op).parameters.values()
    return [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == ["q", "k", "v"]


def scale_of(caller: str, op: Op, scaling: float | None, d: int) -> Keywords:
    """The model's scaling as the op's scale; an op without scores q·k has none and needs a model with the usual
    1/√d."""
    if scaling is None:
        return {}
    if op.__name__ in _SCALED:
        return {"scale": scaling}
    if math.isclose(scaling, d**-0.5, rel_tol=1e-6):
        return {}
    raise NotImplementedError(
        f"{caller}: {op.__name__} has no scores that could be scaled; expected 1/√d; got {scaling}"
    )


def order_of(caller: str, op: Op, causal: Causal, length: int, keys: int) -> Keywords:
    """The op's option for a call that is causal, aligned at the last key (True) or at the first ("upper_left"), or not.

    Raises:
        NotImplementedError: causality with an op that has none; an op that is causal itself, in a call that is not, or
            whose queries are not the last of its keys.
    """
    name = op.__name__
    if name not in ORDERED:
        if causal and "causal" not in taken_by(op):
            raise NotImplementedError(f"{caller}: {name} has no option causal; got a causal call")
        return {"causal": causal} if causal else {}
    if not causal:
        raise NotImplementedError(
            f"{caller}: {name} hides later keys from every query; expected a causal call; got one that is not"
        )
    if causal == "upper_left" and length != keys:
        raise NotImplementedError(
            f"{caller}: the last query of {name} is at the last key; expected as many queries as keys; got {length} "
            f"queries and {keys} keys, causal from the first"
        )
    return {}


# read once: torch.compile does not trace inspect.signature
_TAKEN = {
    name: frozenset(inspect.signature(getattr(attnkit, name)).parameters)
    for name in attnkit.__all__
    if name.endswith(("_attention", "_attention_weights"))
}
_SERVED = tuple(name for name in _TAKEN if name.endswith("_attention") and _keeps_heads(getattr(attnkit, name)))
ORDERED = frozenset(name for name in _SERVED if hides_later_keys(getattr(attnkit, name)))
"""Ops that are causal themselves."""
_SCALED = frozenset(name for name in _SERVED if scales_scores(getattr(attnkit, name)))
