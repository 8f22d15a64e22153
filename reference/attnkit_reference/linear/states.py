"""States of linear attention: a summary of the past tokens of fixed size, which can be saved, resumed and
differentiated.

A state is (S, z): S (..., f, e) = Σ φ(k) v^T and z (..., f) = Σ φ(k) over keys, with f features φ and the heads of k.
Features that are exponentials come as φ = values·exp(level), one level per token: then a state is (S, z, c), with S and
z divided by exp(c), c (...) the largest level among its keys; -inf if it has none.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from attnkit_reference._check import Array, as_float, boolean, integers, tokens
from attnkit_reference._core import Scores, reduce_to, transposed

State = tuple[Array, ...]


@dataclass(frozen=True)
class Features:
    """φ of tokens: values (..., n, f), the way back pull(dvalues, absolute) -> dx, and levels (..., n) or None.

    Where there are levels, the largest value of a token does not depend on it.
    """

    values: Array
    pull: Callable[[Array, bool], Array]
    levels: Array | None = None


@dataclass(frozen=True)
class Initial:
    """An initial state in float64, its parts broadcast against each other; `shapes` are those of the arguments."""

    S: Array
    z: Array
    c: Array | None
    shapes: tuple[tuple[int, ...], ...]

    def absolute(self) -> "Initial":
        return replace(self, S=np.abs(self.S), z=np.abs(self.z))


def spread(x: Array, groups: int) -> Array:
    """x (..., heads of k, ., .) for the heads of q."""
    return np.repeat(x, groups, axis=-3) if groups > 1 and x.ndim > 2 and x.shape[-3] > 1 else x


def finite_level(c: Array) -> Array:
    """c with 0 in place of -inf, before the first token."""
    return np.where(c == -np.inf, 0.0, c)


def sums_after(g: Array) -> Array:
    """The sum of all after each, on the last axis."""
    return sums_before(g[..., ::-1])[..., ::-1]


def sums_before(g: Array) -> Array:
    """The sum of all before each, on the last axis."""
    first = np.zeros((*g.shape[:-1], 1))
    return np.concatenate([first, np.cumsum(g, axis=-1)], axis=-1)[..., : g.shape[-1]]


def state_leading(sc: Scores) -> tuple[int, ...]:
    """The leading axes of a call with the heads of k: the largest that a state may have."""
    leading = sc.n.shape[:-1]
    return (*leading[:-1], leading[-1] // sc.groups) if sc.groups > 1 else leading


def initial_state_of(op: str, state: object, sc: Scores, widths: dict[str, tuple[int, ...]], causal: object) -> Initial:
    """The parts of an initial state, checked: `widths` are their names and last axes; leading axes broadcast."""
    L, S = sc.visible.shape[-2:]
    if causal is not False and L != S:
        raise ValueError(f"{op}: initial_state with causal; expected as many queries as keys, got {L} and {S}")
    if not isinstance(state, tuple | list) or len(state) != len(widths):
        raise ValueError(f"{op}: initial_state; expected a tuple ({', '.join(widths)}), got {_described(state)}")
    leading, parts = state_leading(sc), []
    for (part, width), x in zip(widths.items(), state, strict=True):
        wide = as_float(op, f"initial_state's {part}", x)
        at = wide.ndim - len(width)
        own = wide.shape[: max(at, 0)]
        fits = at >= 0 and wide.shape[at:] == width and len(own) <= len(leading)
        if not fits or any(a not in (1, b) for a, b in zip(reversed(own), reversed(leading), strict=False)):
            text = f"expected a shape that broadcasts to {(*leading, *width)}, got {wide.shape}"
            raise ValueError(f"{op}: initial_state's {part} does not fit; {text}")
        parts.append((wide, own))
    common = np.broadcast_shapes(*(own for _, own in parts))
    spread = [np.broadcast_to(x, (*common, *x.shape[len(own) :])) for x, own in parts]
    return Initial(spread[0], spread[1], spread[2] if len(spread) > 2 else None, tuple(x.shape for x, _ in parts))


def _described(state: object) -> str:
    return f"{len(state)} parts" if isinstance(state, tuple | list) else type(state).__name__


def valid_keys(
    op: str,
    q: Array,
    k: Array,
    *,
    mask: Array | None = None,
    key_lengths: int | Array | None = None,
    enable_gqa: bool = False,
    **others: object,
) -> Array:
    """Keys (..., S) that go into a state: allowed by key_lengths and, for some query, by mask. causal and query_mask
    do not matter: later queries may see all of them."""
    valid: Array = np.ones(tokens(op, "k", k).shape[-2:-1], dtype=bool)
    if mask is not None:
        mask = boolean(op, "mask", mask)
        valid = valid & (mask.any(axis=-2) if mask.ndim > 1 else mask)
    if key_lengths is not None:
        valid = valid & (np.arange(k.shape[-2]) < integers(op, "key_lengths", key_lengths)[..., None])
    heads = valid.shape[-2:-1]
    if enable_gqa and heads not in ((), (1,), k.shape[-3:-2]):
        text = "expected one head, for the query heads of a group share their state"
        raise ValueError(f"{op}: mask or key_lengths with a state and enable_gqa; {text}, got {heads[0]}")
    return valid


@dataclass(frozen=True)
class FinalState:
    """The state after all valid keys, initial + Σ φ(k) v^T; its leading axes are those of k and v, broadcast with
    those of mask, key_lengths and the initial state."""

    valid: Array  # (..., S)
    y: Array  # values of φ(k), 0 at keys that are not valid
    v: Array  # likewise
    levels: Array | None  # -inf at keys that are not valid
    initial: Initial | None
    g: Array | None = None  # (..., S): by which tokens multiply what came before them, in logarithms

    @property
    def c(self) -> Array:
        """The largest level: among the keys or that of the initial state."""
        if self.levels is None:
            return np.zeros(())
        initial = -np.inf if self.initial is None or self.initial.c is None else self.initial.c
        level: Array = np.maximum(np.max(self.levels, axis=-1, initial=-np.inf), initial)
        return level

    def fades(self) -> tuple[Array, Array]:
        """exp(level - c) of the keys (..., S, 1) and exp(c_initial - c) (...), or what decay leaves of them."""
        if self.g is not None:
            return np.exp(sums_after(self.g))[..., None], np.exp(self.g.sum(axis=-1))
        if self.levels is None:
            return np.ones((1, 1)), np.ones(())
        c = finite_level(self.c)
        initial = np.asarray(0.0 if self.initial is None or self.initial.c is None else self.initial.c)
        return np.exp(self.levels - c[..., None])[..., None], np.exp(initial - c)

    def parts(self) -> State:
        """(S, z), or (S, z, c)."""
        fade, before = self.fades()
        y = fade * self.y
        S, z = transposed(y) @ self.v, y.sum(axis=-2)
        if self.initial is not None:
            S = S + before[..., None, None] * self.initial.S
            z = z + before[..., None] * self.initial.z
        leading = np.broadcast_shapes(S.shape[:-2], z.shape[:-1], self.c.shape)
        state = (np.broadcast_to(S, (*leading, *S.shape[-2:])), np.broadcast_to(z, (*leading, z.shape[-1])))
        return state if self.levels is None else (*state, np.broadcast_to(self.c, leading))

    def absolute(self) -> "FinalState":
        initial = None if self.initial is None else self.initial.absolute()
        return replace(self, y=np.abs(self.y), v=np.abs(self.v), initial=initial)

    def sizes(self) -> State:
        """`parts` with summands in absolute value."""
        state = self.absolute().parts()
        return (*state[:2], *(np.abs(finite_level(c)) for c in state[2:]))

    def backward(self, dstate: State, absolute: bool = False) -> dict[str, Array]:
        """Gradients of φ(k), v and, with an initial state, of its S, z and c, not yet summed to any shape, for a
        cotangent of each part; with `absolute`, their summands in absolute value."""
        size = np.abs if absolute else np.asarray
        m = self.absolute() if absolute else self
        fade, before = self.fades()
        dS, dz = size(dstate[0]), size(dstate[1])
        dy = np.where(self.valid[..., None], fade * (m.v @ transposed(dS) + dz[..., None, :]), 0.0)
        grads = {"y": dy, "v": (fade * m.y) @ dS}
        if self.initial is not None:
            grads |= {"S": before[..., None, None] * dS, "z": before[..., None] * dz}
        if self.g is not None:
            grads["log_decay"] = self._of_decay(m, dy, dS, dz)
        if self.levels is None:
            return grads
        S, z, _ = m.parts()
        through = np.sum(S * dS, axis=(-1, -2)) + np.sum(z * dz, axis=-1)
        dc = np.where(self.c == -np.inf, 0.0, size(dstate[2]) + (through if absolute else -through))
        largest = np.max(self.levels, axis=-1, initial=-np.inf)
        from_initial = np.zeros(largest.shape, dtype=bool)
        if self.initial is not None and self.initial.c is not None:
            from_initial = self.initial.c >= largest
            grads["c"] = np.where(from_initial, dc, 0.0)
        grads["y"] = grads["y"] + self._largest_value() * np.where(from_initial, 0.0, dc)[..., None, None]
        return grads

    def _of_decay(self, m: "FinalState", dy: Array, dS: Array, dz: Array) -> Array:
        """The gradient of g: of what is left of all tokens before each, and of the initial state."""
        dg = sums_before(np.sum(m.y * dy, axis=-1))
        if m.initial is not None:
            of_first = np.sum(m.initial.S * dS, axis=(-1, -2)) + np.sum(m.initial.z * dz, axis=-1)
            dg = dg + (self.fades()[1] * of_first)[..., None]
        return np.where(self.valid, dg, 0.0)

    def _largest_value(self) -> Array:
        """1/value at the first largest feature of the first key with the largest level: moving it moves the level."""
        assert self.levels is not None
        largest = np.max(self.levels, axis=-1, keepdims=True, initial=-np.inf)
        keys = (self.levels == largest) & (self.levels != -np.inf)
        value = np.max(self.y, axis=-1, keepdims=True)
        features = self.y == value
        first_key, first_feature = np.cumsum(keys, axis=-1) == 1, np.cumsum(features, axis=-1) == 1
        place = (keys & first_key)[..., None] & features & first_feature
        return np.where(place, 1.0 / np.where(place, value, 1.0), 0.0)


def state_cotangents(op: str, dstate: object, parts: State) -> State:
    """dstate in float64, a cotangent for each of `parts`, None = 0."""
    if not isinstance(dstate, tuple | list) or len(dstate) != len(parts):
        raise ValueError(f"{op}: dstate; expected a tuple of {len(parts)} parts, got {_described(dstate)}")
    cotangents = []
    for x, part in zip(dstate, parts, strict=True):
        wide = np.zeros(part.shape) if x is None else as_float(op, "dstate", x)
        if wide.shape != part.shape:
            text = f"expected {part.shape}, got {wide.shape}"
            raise ValueError(f"{op}: dstate has another shape than the state; {text}")
        cotangents.append(wide)
    return tuple(cotangents)


def initial_gradients(initial: Initial, S: Array, z: Array, c: Array | None) -> State:
    """Gradients of the parts of an initial state in the shapes of the arguments.

    S, z, c are the gradients apart from the scale of S and z: these stand for S exp(c) and z exp(c), so c also gets <S,
    dS> + <z, dz>.
    """
    grads = [reduce_to(S, initial.shapes[0]), reduce_to(z, initial.shapes[1])]
    if initial.c is not None:
        scaled = np.sum(initial.S * S, axis=(-1, -2)) + np.sum(initial.z * z, axis=-1)
        grads.append(reduce_to(scaled if c is None else scaled + c, initial.shapes[2]))
    return tuple(grads)
