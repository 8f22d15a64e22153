"""What recurrent ops have in common: tokens without what padding holds, states, and the way through a sequence.

A call is a plain recurrence over T tokens, S_t from S_{t-1} and o_t = scale q_t^T S_t, forward and back. An op gives
one step and the gradients of one step; all else is here.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, TypedDict, TypeVar

import numpy as np

from attnkit_reference._check import (
    Array,
    as_float,
    boolean,
    broadcast,
    cotangent,
    integers,
    leading_axes,
    number,
    short,
)
from attnkit_reference._core import _inputs, reduce_to
from attnkit_reference._op import Function, refuse_others
from attnkit_reference.linear.sums import one_token
from attnkit_reference.lowrank.newton import whole
from attnkit_reference.lowrank.soft import refuse_pair_mask

State = tuple[Array, ...]
Outputs = Array | tuple[Array, State]
Gradients = dict[str, Array | State]
Size = Callable[[float | Array], Array]


class OfToken(TypedDict, total=False):
    """The keyword arguments of every step."""

    scale: float | None


class OfSequence(OfToken, total=False):
    """Those of every recurrent op but chunk_size, of which each has its own default."""

    causal: bool
    initial_state: State | None
    return_state: bool
    mask: Array | None
    key_lengths: int | Array | None


class Options(OfSequence, total=False):
    """Those of every recurrent op."""

    chunk_size: int


def keywords(own: Callable[..., object], *names: str) -> Callable[[Function], Function]:
    """Give a public function those keyword arguments of `own` and then of `recurrence` that are named, or all; of one
    that both have, the default is that of `own`."""
    of_own, of_all = (inspect.signature(f).parameters for f in (own, recurrence))
    parameters = [*(p for name, p in of_own.items() if name not in of_all), *({**of_all, **of_own}[n] for n in of_all)]
    known = [p for p in parameters if p.kind is p.KEYWORD_ONLY and (not names or p.name in names)]
    return lambda function: refuse_others(function, known)


@dataclass(frozen=True)
class Recurrence:
    """One call. Arrays are float64; those of tokens have the leading axes of what hides them, too."""

    op: str
    q: Array  # (..., T, d), 0 in rows that see neither a key nor a state
    k: Array  # (..., T, d), 0 at hidden tokens
    v: Array  # (..., T, e), likewise
    gates: dict[str, Array]  # (..., T, w), likewise; w = 1 for a number per token
    scale: float
    valid: Array  # (..., T): tokens that are not hidden
    live: Array  # (..., T): rows that see something
    first: Array  # (..., d, e): the initial state, or 0
    leading: tuple[int, ...]  # of the output
    shapes: dict[str, tuple[int, ...]]  # of the arguments
    numbers: tuple[str, ...]  # gates whose argument is (..., T)
    returns_state: bool

    additive: ClassVar[bool] = False  # a state is a sum: magnitudes are those of sums of absolute values throughout

    def step(self, S: Array, t: int) -> Array:
        """S_t from S_{t-1}."""
        raise NotImplementedError

    def pull_step(self, R: Array, t: int) -> Array:
        """The gradient of S_{t-1} for R, that of S_t."""
        raise NotImplementedError

    def pull_tokens(self, S: Array, R: Array, size: Size) -> dict[str, Array]:
        """The gradients of what tokens bring, for S, the states before them, and R, the gradients of those behind them,
        both (..., T, d, e).

        `size` is the identity, or the absolute value of the factors of last contractions.
        """
        raise NotImplementedError

    def absolute(self) -> "Recurrence":
        q, k, v, first = (np.abs(x) for x in (self.q, self.k, self.v, self.first))
        return replace(self, q=q, k=k, v=v, first=first, scale=abs(self.scale))

    def states(self) -> Array:
        """S_0 .. S_T (..., T + 1, d, e)."""
        tokens = self.k.shape[-2]
        S = np.empty((*self.first.shape[:-2], tokens + 1, *self.first.shape[-2:]))
        S[..., 0, :, :] = self.first
        for t in range(tokens):
            S[..., t + 1, :, :] = self.step(S[..., t, :, :], t)
        return S

    def output(self, states: Array, size: Size = np.asarray) -> Array:
        """o (..., T, e)."""
        o: Array = (size(self.scale * self.q[..., None, :]) @ size(states[..., 1:, :, :]))[..., 0, :]
        return o

    def forward(self) -> Outputs:
        """o, or (o, state) if `return_state`."""
        states = self.states()
        return (self.output(states), last(states)) if self.returns_state else self.output(states)

    def weights(self) -> Array:
        """The output alone, of a call with `single_values`."""
        return self.output(self.states())

    def gradients(self, do: object, dstate: object, absolute: bool) -> Gradients:
        """{"q", "k", "v"}, the gates and "initial_state" if given; with `absolute` magnitudes, "o" and with dstate
        "state" too."""
        m = self.absolute() if absolute and self.additive else self
        size: Size = np.abs if absolute else np.asarray
        states = m.states()
        before, behind = states[..., :-1, :, :], states[..., 1:, :, :]
        R = self._state_cotangent(dstate, states[..., -1, :, :])
        do = cotangent(self.op, "do", do, (*self.leading, self.q.shape[-2], self.v.shape[-1]))
        do = np.where(self.live[..., None], do, 0.0)
        if absolute and self.additive:
            do, R = np.abs(do), np.abs(R)
        of_outputs = reduce_to(m.scale * m.q[..., None] * do[..., None, :], behind.shape)
        of_states = np.empty(behind.shape)
        for t in reversed(range(behind.shape[-3])):
            of_states[..., t, :, :] = R + of_outputs[..., t, :, :]
            R = m.pull_step(of_states[..., t, :, :], t)
        dq = size(m.scale) * (size(behind) @ size(do[..., None]))[..., 0]
        of_tokens = {"q": dq, **m.pull_tokens(before, of_states, size)}
        grads: Gradients = {name: self._reduce(name, x) for name, x in of_tokens.items()}
        if "initial_state" in self.shapes:
            grads["initial_state"] = (reduce_to(size(R), self.shapes["initial_state"]),)
        if not absolute:
            return grads
        sizes = {} if dstate is None else {"state": (m.state_size(states),)}
        return {"o": m.output(states, size), **sizes, **grads}

    def state_size(self, states: Array) -> Array:
        """The magnitude of the last state."""
        return np.abs(states[..., -1, :, :])

    def _reduce(self, name: str, x: Array) -> Array:
        """The gradient of an argument from those of its tokens, 0 where it is not read."""
        used = self.live if name == "q" else self.valid
        x = np.where(used[..., None], x, 0.0)
        return reduce_to(x[..., 0] if name in self.numbers else x, self.shapes[name])

    def _state_cotangent(self, dstate: object, state: Array) -> Array:
        """dS in float64, 0 for None."""
        if dstate is None:
            return np.zeros(state.shape)
        S = _one_part(self.op, "dstate", dstate)
        wide = np.zeros(state.shape) if S is None else as_float(self.op, "dstate", S)
        if wide.shape != state.shape:
            text = f"expected {state.shape}, got {wide.shape}"
            raise ValueError(f"{self.op}: dstate has another shape than the state; {text}")
        return wide


def last(states: Array) -> State:
    """The state behind all tokens."""
    return (states[..., -1, :, :].copy(),)


def _one_part(op: str, name: str, state: object) -> object:
    """S of a state (S,)."""
    if not isinstance(state, tuple | list) or len(state) != 1:
        got = f"{len(state)} parts" if isinstance(state, tuple | list) else type(state).__name__
        raise ValueError(f"{op}: {name}; expected a tuple (S,), got {got}")
    return state[0]


Kind = TypeVar("Kind", bound=Recurrence)


def recurrence(
    kind: type[Kind],
    op: str,
    q: Array,
    k: Array,
    v: Array,
    gates: dict[str, Array],
    numbers: tuple[str, ...] = (),
    *,
    causal: bool = True,
    chunk_size: int = 64,
    initial_state: State | None = None,
    return_state: bool = False,
    mask: Array | None = None,
    key_lengths: int | Array | None = None,
    scale: float | None = None,
) -> Kind:
    """A call, from arguments that are checked and widened. `gates` are (..., T, d), but those among the `numbers`
    (..., T)."""
    shapes = {name: np.shape(x) for name, x in (("q", q), ("k", k), ("v", v), *gates.items())}
    q, k, wide_v = _inputs(op, q, k, v)
    assert wide_v is not None
    T, d = k.shape[-2:]
    if q.shape[-2] != T:
        raise ValueError(f"{op}: k must have the tokens of q; expected (..., {q.shape[-2]}, d), got {k.shape}")
    of_tokens = {name: _gate(op, name, x, (T,) if name in numbers else (T, d)) for name, x in gates.items()}
    names = ", ".join(("q", "k", "v", *gates))
    leading = leading_axes(op, names, (x.shape[:-2] for x in (q, k, wide_v, *of_tokens.values())))
    if causal is not True:
        raise ValueError(f"{op}: causal; expected True, as a recurrence is causal, got {causal!r}")
    if not isinstance(return_state, bool):
        raise TypeError(f"{op}: return_state; expected True or False, got {return_state!r}")
    whole(op, "chunk_size", chunk_size, 1)
    valid = _valid(op, leading, T, mask, key_lengths)
    live = np.logical_or.accumulate(valid, axis=-1) | (initial_state is not None)
    tokens = {name: np.where(valid[..., None], x, 0.0) for name, x in (("k", k), ("v", wide_v), *of_tokens.items())}
    outer = np.broadcast_shapes(*(x.shape[:-2] for x in tokens.values()))
    first = np.zeros((d, wide_v.shape[-1]))
    if initial_state is not None:
        first = as_float(op, "initial_state's S", _one_part(op, "initial_state", initial_state))
        shapes["initial_state"] = first.shape
        if first.shape[-2:] != (d, wide_v.shape[-1]):
            text = f"expected (..., {d}, {wide_v.shape[-1]}), got {first.shape}"
            raise ValueError(f"{op}: initial_state's S does not fit; {text}")
        broadcast(op, "initial_state's S", first, (*leading, *first.shape[-2:]))
        outer = np.broadcast_shapes(outer, first.shape[:-2])
    return kind(
        op=op,
        q=np.where(live[..., None], q, 0.0),
        k=tokens.pop("k"),
        v=tokens.pop("v"),
        gates=tokens,
        scale=float(1.0 / np.sqrt(d)) if scale is None else number(op, "scale", scale),
        valid=valid,
        live=live,
        first=np.broadcast_to(first, (*outer, *first.shape[-2:])),
        leading=leading,
        shapes=shapes,
        numbers=numbers,
        returns_state=return_state,
    )


def _gate(op: str, name: str, x: object, last: tuple[int, ...]) -> Array:
    """A gate as (..., T, w)."""
    wide = as_float(op, name, x)
    if wide.shape[-len(last) :] != last:
        raise ValueError(f"{op}: {name} must have the tokens of k; expected (..., {str(last)[1:]}, got {wide.shape}")
    return wide if len(last) == 2 else wide[..., None]


def at_most_zero(op: str, name: str, x: Array) -> Array:
    """The logarithm of a gate, in which hidden tokens are 0."""
    if np.any(x > 0):
        raise ValueError(f"{op}: {name}; expected logarithms, at most 0, got {np.max(x)}")
    return x


def _valid(op: str, leading: tuple[int, ...], T: int, mask: object, key_lengths: object) -> Array:
    """Tokens (..., T) that mask, a key mask, and key_lengths allow; leading axes are theirs."""
    refuse_pair_mask(op, mask)
    valid: Array = np.ones(T, dtype=bool)
    if mask is not None:
        mask = boolean(op, "mask", mask)
        broadcast(op, "mask", mask, (*leading, 1, T))
        valid = valid & (mask[..., 0, :] if mask.ndim > 1 else mask)
    if key_lengths is not None:
        lengths = integers(op, "key_lengths", key_lengths)
        broadcast(op, "key_lengths", lengths, leading)
        if np.any(lengths < 0):
            raise ValueError(f"{op}: key_lengths; expected integers >= 0, got {short(key_lengths)}")
        valid = valid & (np.arange(T) < lengths[..., None])
    return valid


# ---------------------------------------------------------------------------------------------- public functions


def single_values(k: Array) -> Array:
    """Values (T, T) of which each is a token of its own: what a recurrence gives for them are its weights."""
    T = np.shape(k)[-2] if np.ndim(k) > 1 else 0
    return np.eye(T).astype(k.dtype)


def pull(call: Recurrence, do: Array | None, *, dstate: State | None = None, absolute: bool = False) -> Gradients:
    """The gradients of a call, or magnitudes."""
    return call.gradients(do, dstate, absolute)


def pull_step(
    call: Recurrence, do_t: Array | None, *, dstate: State | None = None, absolute: bool = False
) -> Gradients:
    """`pull` of one token, under the names of a step: "q_t" and so on, "state"; of magnitudes "o_t", "next_state"."""
    do = None if do_t is None else one_token(call.op, do_t=do_t)[0]
    renamed: Gradients = {}
    for name, x in call.gradients(do, dstate, absolute).items():
        if isinstance(x, tuple):
            renamed[{"initial_state": "state", "state": "next_state"}[name]] = x
        else:
            renamed[f"{name}_t"] = x[..., 0] if name in call.numbers else x[..., 0, :]
    return renamed


def last_token(call: Recurrence) -> tuple[Array, State]:
    """(o_t, state) of a call of one token."""
    states = call.states()
    return call.output(states)[..., 0, :], last(states)
