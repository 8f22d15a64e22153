"""The common form of all linear attention: sums over keys of features times values.

Queries and keys get f features φ(q), φ(k). With s_ij = scale φ(q_i)·φ(k_j) on visible pairs and an initial state (S, z)
of keys that came before,

    num_i = Σ_j s_ij v_j + scale φ(q_i)·S,    raw_i = Σ_j s_ij + scale φ(q_i)·z,    o_i = num_i/den(raw_i).

Here all pairs are formed; exchanging the sums is left to faster implementations. Where φ is exponential
(levels, see `linear_states`), row i is divided by exp(c_i), c_i the largest level that it sees, which cancels from o.
With a decay, s_ij is multiplied by what is left of key j for query i, and (S, z) likewise.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Literal, Protocol, TypeVar, Unpack, cast

import numpy as np

from attnkit_reference._check import Array, as_float, cotangent
from attnkit_reference._core import CausalTokens, Rows, Scores, contract, reduce_to, scores, transposed
from attnkit_reference._op import Function, derived_gradients, refuse_others
from attnkit_reference.linear.decay import Decay, decay_of
from attnkit_reference.linear.states import (
    Features,
    FinalState,
    Initial,
    State,
    finite_level,
    initial_gradients,
    initial_state_of,
    spread,
    state_cotangents,
    valid_keys,
)
from attnkit_reference.lowrank.newton import whole

Outputs = Array | tuple[Array, State]
FeatureMap = Callable[[Array], Features]
Gradients = dict[str, Array | State]
Denominator = Callable[[Array], tuple[Array, Array, Array]]  # raw -> den, its slope, where it gives an output

TOKENS = ("mask", "causal", "key_lengths", "query_mask", "enable_gqa")
SCALED = ("mask", "causal", "key_lengths", "query_mask", "scale", "enable_gqa")
STATE: tuple[Literal["chunk_size", "initial_state", "return_state"], ...] = (
    "chunk_size",
    "initial_state",
    "return_state",
)


class Resumed(CausalTokens, total=False):
    """The keyword arguments of an op with a state."""

    chunk_size: int
    initial_state: State | None
    return_state: bool


def visibility_of(options: Resumed) -> CausalTokens:
    """The options but those of STATE."""
    visibility = options.copy()
    for name in STATE:
        visibility.pop(name, None)
    return visibility


def _stateful(*, chunk_size: int = 64, initial_state: State | None = None, return_state: bool = False) -> None:
    """The keyword arguments of an op that can be resumed."""


def keywords(own: Callable[..., object], *names: str) -> Callable[[Function], Function]:
    """Give a public function the keyword arguments of `own`, then those of `_stateful` and `scores` that are named; a
    default of `own` wins."""
    parameters = {**inspect.signature(scores).parameters, **inspect.signature(_stateful).parameters}
    mine = {p.name: p for p in inspect.signature(own).parameters.values() if p.kind is p.KEYWORD_ONLY}
    first = [p for name, p in mine.items() if name not in parameters]
    return lambda function: refuse_others(function, [*first, *({**parameters, **mine}[name] for name in names)])


@dataclass(frozen=True)
class FeatureRows(Rows):
    """`through(ds, absolute)` gives dq and dk, which come through the features."""

    through: Callable[[Array, bool], dict[str, Array]] | None = None

    def to_inputs(self, ds: Array, do: Array | None, absolute: bool = False) -> dict[str, Array]:
        assert self.through is not None
        grads = self.through(ds, absolute)
        return grads if do is None else {**grads, "v": contract(self, ds, do, absolute)["v"]}


@dataclass(frozen=True)
class Sums:
    """One call: everything between the arguments and num, raw."""

    sc: Scores
    queries: Features  # 0 in rows that see neither a key nor a state
    keys: Features  # with the heads of k
    v: Array | None  # (..., S, e) with the heads of k, 0 where no query sees the key
    scale: float
    live: Array  # (..., L): rows that see a key or a state
    fade: Array  # (..., L, S): exp(level_j - c_i), or what decay leaves of key j
    before: Array  # (..., L, 1): exp(c - c_i) for the c of the initial state, or what decay leaves of it
    initial: Initial | None
    decay: Decay | None = None

    def spread(self, x: Array) -> Array:
        return spread(x, self.sc.groups)

    def s(self) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            dots = self.queries.values @ transposed(self.spread(self.keys.values))
        return np.where(self.sc.visible, self.scale * self.fade * dots, 0.0)

    def initial_terms(self) -> tuple[Array, Array, Array]:
        """scale·before·φ(q), and S and z (as a column) of the initial state for the heads of q."""
        initial = cast(Initial, self.initial)
        x = self.scale * self.before * self.queries.values
        return x, self.spread(initial.S), self.spread(initial.z[..., None])

    def num_raw(self) -> tuple[Array, Array]:
        s = self.s()
        num, raw = s @ self.spread(cast(Array, self.v)), s.sum(axis=-1)
        if self.initial is not None:
            x, S, z = self.initial_terms()
            num, raw = num + x @ S, raw + (x @ z)[..., 0]
        return num, raw

    def absolute(self) -> "Sums":
        """The same sums over absolute values."""
        queries, keys = (replace(x, values=np.abs(x.values)) for x in (self.queries, self.keys))
        v = None if self.v is None else np.abs(self.v)
        initial = None if self.initial is None else self.initial.absolute()
        return replace(self, queries=queries, keys=keys, v=v, scale=abs(self.scale), initial=initial)

    def to_features(self, ds: Array) -> dict[str, Array]:
        """Gradients of φ(q) and φ(k) for ds, that of s on visible pairs."""
        dots = np.where(self.sc.visible, self.scale * self.fade * ds, 0.0)
        dx, dy = dots @ self.spread(self.keys.values), transposed(dots) @ self.queries.values
        return {"x": dx, "y": reduce_to(dy, self.keys.values.shape, self.sc.groups)}

    def backward(self, ds: Array, dn: Array, draw: Array) -> dict[str, Array]:
        """Gradients of φ(q), φ(k), v and the initial S, z for those of num and raw; ds is dn v^T + draw, or for
        `absolute` sums the size of that."""
        grads = self.to_features(ds)
        if self.initial is not None:
            x, S, z = self.initial_terms()
            dx = dn @ transposed(S) + draw[..., None] * transposed(z)
            grads["x"] = grads["x"] + self.scale * self.before * dx
            leading = self.initial.z.shape[:-1]
            groups = self.sc.groups if leading and leading[-1] > 1 else 1
            grads["S"] = reduce_to(transposed(x) @ dn, self.initial.S.shape, groups)
            dz = reduce_to(transposed(x) @ draw[..., None], (*self.initial.z.shape, 1), groups)
            grads["z"] = dz[..., 0]
        grads["x"] = reduce_to(grads["x"], self.queries.values.shape)
        v = cast(Array, self.v)
        grads["v"] = reduce_to(transposed(self.s()) @ dn, v.shape, self.sc.groups)
        if self.decay is not None:
            grads["log_decay"] = self._of_decay(self.decay, ds, dn, draw)
        return grads

    def _of_decay(self, decay: Decay, ds: Array, dn: Array, draw: Array) -> Array:
        """The gradient of the logarithms (..., S), with the heads of q."""
        dg = decay.of_pairs(ds * self.s())
        if self.initial is None:
            return dg
        x, S, z = self.initial_terms()
        return dg + decay.of_rows(np.sum((x @ S) * dn, axis=-1) + (x @ z)[..., 0] * draw)


def rows_where(x: Array, part: Array, groups: int = 1) -> Array:
    """Rows of x that are used anywhere, (..., n, 1), for part (..., n) over the leading axes of a call."""
    part = part.reshape((1,) * (x.ndim - 1 - part.ndim) + part.shape)
    return reduce_to(part[..., None], (*x.shape[:-1], 1), groups, np.logical_or)


def sums(
    op: str,
    q: Array,
    k: Array,
    v: Array | None,
    maps: tuple[FeatureMap, FeatureMap],
    scale: float = 1.0,
    initial_state: State | None = None,
    keep: Array | None = None,
    log_decay: float | Array | None = None,
    **options: Unpack[CausalTokens],
) -> Sums:
    """Arguments that are checked, widened and free of padding, mapped to features; `keep` (..., S) are keys that
    stay although no query sees them, because they go into a state."""
    sc = scores(op, q, k, v, scale=1.0, **options)
    live, seen_keys = sc.n > 0, np.logical_or.reduce(sc.visible, axis=-2)
    query_mask = options.get("query_mask")
    if initial_state is not None:
        live = np.broadcast_to(np.asarray(True) if query_mask is None else query_mask, live.shape)
    visible = rows_where(k, seen_keys, sc.groups)
    rows = visible if keep is None else visible | rows_where(k, keep)
    x, y = np.where(rows_where(q, live), as_float(op, "q", q), 0.0), np.where(rows, as_float(op, "k", k), 0.0)
    queries, keys = maps[0](x), maps[1](y)
    queries = replace(queries, values=np.where(rows_where(q, live), queries.values, 0.0))
    keys = replace(keys, values=np.where(rows, keys.values, 0.0))
    wide = None if v is None else np.where(rows_where(v, seen_keys, sc.groups), as_float(op, "v", v), 0.0)
    initial = None
    if initial_state is not None and wide is not None:
        f = keys.values.shape[-1]
        widths = {"S": (f, wide.shape[-1]), "z": (f,)} | ({} if keys.levels is None else {"c": ()})
        initial = initial_state_of(op, initial_state, sc, widths, options.get("causal", False))
    decay = None if log_decay is None else decay_of(op, log_decay, sc, **options)
    fades = _fades(sc, keys, initial) if decay is None else decay.fades()
    return Sums(sc, queries, keys, wide, scale, live, *fades, initial, decay)


def _fades(sc: Scores, keys: Features, initial: Initial | None) -> tuple[Array, Array]:
    """exp(level_j - c_i) on visible pairs and exp(c - c_i) for the c of the initial state."""
    if keys.levels is None:
        return np.ones((1, 1)), np.ones((1, 1))
    levels = keys.levels[..., None, :]
    levels = np.repeat(levels, sc.groups, axis=-3) if sc.groups > 1 else levels
    top = np.max(np.broadcast_to(levels, sc.visible.shape), axis=-1, initial=-np.inf, where=sc.visible)
    c = np.full(1, -np.inf)
    if initial is not None and initial.c is not None:
        c = initial.c
        c = np.repeat(c, sc.groups, axis=-1) if sc.groups > 1 and c.ndim and c.shape[-1] > 1 else c
        c = c[..., None]
    top = finite_level(np.maximum(top, c))[..., None]
    return np.exp(np.where(sc.visible, levels - top, -np.inf)), np.exp(c[..., None] - top)


class Summary(Protocol):
    """A state after all valid keys."""

    def parts(self) -> State: ...
    def sizes(self) -> State: ...


M = TypeVar("M")  # the sums of a call
Final = TypeVar("Final", bound=Summary)


@dataclass(frozen=True)
class Resumable(Generic[M, Final]):
    """One call of an op with a state: its arguments. The op defines the sums."""

    op: str
    q: Array
    k: Array
    v: Array | None
    options: Resumed

    def forward(self) -> Outputs:
        """o, or (o, state) if `return_state`."""
        m, state = self._call(self.options.get("return_state", False))
        return self.output(m) if state is None else (self.output(m), state.parts())

    def gradients(self, do: Array | None, dstate: State | None, absolute: bool) -> Gradients:
        """{"q", "k", "v"} and "initial_state" if given; with `absolute` magnitudes, "o" and with dstate "state" too."""
        m, state = self._call(dstate is not None)
        grads = self.backward(m, state, do, dstate, absolute)
        if not absolute:
            return grads
        sizes = {} if state is None else {"state": state.sizes()}
        return {"o": self.output(m, absolute=True), **sizes, **grads}

    def _call(self, stateful: bool) -> tuple[M, Final | None]:
        whole(self.op, "chunk_size", self.options.get("chunk_size", 1), 1)
        visibility = visibility_of(self.options)
        return self.sums(valid_keys(self.op, self.q, self.k, **visibility) if stateful else None, visibility)

    def sums(self, keep: Array | None, visibility: CausalTokens) -> tuple[M, Final | None]:
        """The sums for the output and its gradients; the state of the keys `keep` (..., S), or None."""
        raise NotImplementedError

    def output(self, m: M, absolute: bool = False) -> Array:
        raise NotImplementedError

    def backward(self, m: M, state: Final | None, do: Array | None, dstate: State | None, absolute: bool) -> Gradients:
        raise NotImplementedError


@dataclass(frozen=True)
class Attention(Resumable[Sums, FinalState]):
    """One call of an op of sums: the features of its queries and keys, and the denominator that it divides by."""

    maps: tuple[FeatureMap, FeatureMap]
    denominator: Denominator
    scale: float = 1.0
    signed: bool = False  # can a weight be negative
    log_decay: float | Array | None = None

    def sums(self, keep: Array | None, visibility: CausalTokens) -> tuple[Sums, FinalState | None]:
        initial_state = self.options.get("initial_state")
        own = (self.maps, self.scale, initial_state, keep, self.log_decay)
        m = sums(self.op, self.q, self.k, self.v, *own, **visibility)
        if keep is None:
            return m, None
        y, values = (np.where(keep[..., None], x, 0.0) for x in (m.keys.values, as_float(self.op, "v", self.v)))
        levels = None if m.keys.levels is None else np.where(keep, m.keys.levels, -np.inf)
        g = None if m.decay is None else m.decay.kept(keep)
        return m, FinalState(keep, y, values, levels, m.initial, g)

    def output(self, m: Sums, absolute: bool = False) -> Array:
        num, raw = m.num_raw()
        den, _, gives = self.denominator(raw)
        gives = gives & m.live
        den = np.where(gives, den, 1.0)
        if absolute:
            num, den = m.absolute().num_raw()[0], np.abs(den)
        return np.where(gives[..., None], num / den[..., None], 0.0)

    def backward(
        self, m: Sums, state: FinalState | None, do: Array | None, dstate: State | None, absolute: bool
    ) -> Gradients:
        num, raw = m.num_raw()
        den, slope, gives = self.denominator(raw)
        gives = gives & m.live
        den = np.where(gives, den, 1.0)
        do = cotangent(self.op, "do", do, num.shape)
        dn = np.where(gives[..., None], do / den[..., None], 0.0)
        draw = -slope * np.sum(dn * num, axis=-1) / den
        with np.errstate(over="ignore", invalid="ignore"):
            through_v = np.where(m.sc.visible, dn @ transposed(m.spread(cast(Array, m.v))), 0.0)
        if absolute:
            m, through_v, dn, draw = m.absolute(), np.abs(through_v), np.abs(dn), np.abs(draw)
        of_sums = m.backward(through_v + draw[..., None], dn, draw)
        of_state = {} if state is None else state.backward(state_cotangents(self.op, dstate, state.parts()), absolute)
        of_decay = of_state.pop("log_decay", None)
        for name, g in of_state.items():
            of_sums[name] = of_sums.get(name, 0.0) + reduce_to(g, _shape_of(name, m))
        grads: Gradients = {
            "q": m.queries.pull(of_sums["x"], absolute),
            "k": m.keys.pull(of_sums["y"], absolute),
            "v": of_sums["v"],
        }
        if m.decay is not None and m.decay.shape is not None:
            grads["log_decay"] = m.decay.to_argument(of_sums["log_decay"], of_decay)
        if m.initial is not None:
            grads["initial_state"] = initial_gradients(m.initial, of_sums["S"], of_sums["z"], of_sums.get("c"))
        return grads

    def rows(self) -> FeatureRows:
        """The weights w = s/den."""
        m = sums(
            self.op,
            self.q,
            self.k,
            self.v,
            self.maps,
            self.scale,
            log_decay=self.log_decay,
            **visibility_of(self.options),
        )
        s = m.s()
        den, slope, gives = (x[..., None] for x in self.denominator(s.sum(axis=-1)))
        gives = gives & m.live[..., None]
        den = np.where(gives, den, 1.0)
        w = np.where(gives, s / den, 0.0)

        def pull(dw: Array, size: Array) -> tuple[Array, Array]:
            inner = slope * np.sum(w * dw, axis=-1, keepdims=True)
            ds = np.where(gives, (dw - inner) / den, 0.0)
            return ds, np.where(gives, (size + np.abs(inner)) / np.abs(den), 0.0)

        def through(ds: Array, absolute: bool) -> dict[str, Array]:
            a = m.absolute() if absolute else m
            of_features = a.to_features(ds)
            dx = reduce_to(of_features["x"], m.queries.values.shape)
            grads = {"q": m.queries.pull(dx, absolute), "k": m.keys.pull(of_features["y"], absolute)}
            if a.decay is None or a.decay.shape is None:
                return grads
            return {**grads, "log_decay": a.decay.to_argument(a.decay.of_pairs(ds * a.s()))}

        return FeatureRows(m.sc, w, gives[..., 0], pull, self.signed, through=through)

    def weights_size(self) -> dict[str, Array]:
        """{"w": |scale| |φ(q)|·|φ(k)|/den}: a weight has the digits of its summands, and 1 + cos may cancel."""
        m = sums(self.op, self.q, self.k, self.v, self.maps, self.scale, **visibility_of(self.options))
        den, _, gives = (x[..., None] for x in self.denominator(m.s().sum(axis=-1)))
        return {"w": np.where(gives, m.absolute().s() / np.where(gives, np.abs(den), 1.0), 0.0)}


def pull(
    call: Resumable[M, Final], do: Array | None, *, dstate: State | None = None, absolute: bool = False
) -> Gradients:
    """The gradients of a call, or magnitudes."""
    return call.gradients(do, dstate, absolute)


def _step_of(prepare: Callable[..., Resumable[M, Final]]) -> Callable[..., Resumable[M, Final]]:
    """The call for one more token: that of `prepare` on sequences of length 1."""

    def one(op: str, state: object, q_t: Array, k_t: Array, v_t: Array, **arguments: object) -> Resumable[M, Final]:
        q, k, v = one_token(op, q_t=q_t, k_t=k_t, v_t=v_t)
        return prepare(op, q, k, v, initial_state=state, **arguments)

    return one


def step(
    prepare: Callable[..., Resumable[M, Final]], op: str, *arrays: object, **options: object
) -> tuple[Array, State]:
    """(o_t, state) of one more token: arrays are (state, q_t, k_t, v_t, ...)."""
    call = _step_of(prepare)(op, *arrays, return_state=True, **options)
    o, state = cast(tuple[Array, State], call.forward())
    return o[..., 0, :], state


def step_gradients(
    forward: Callable[..., object],
    prepare: Callable[..., Resumable[M, Final]],
    vjp: str = 'Gradients {"q_t", "k_t", "v_t"} and "state" if there was one.',
    magnitudes: str = 'Magnitudes of "o_t", "next_state" and the gradients.',
) -> tuple[Callable[..., Gradients], Callable[..., Gradients]]:
    """`<op>_step_vjp` and `<op>_step_magnitudes` of a step `forward`."""
    return derived_gradients(forward, _step_of(prepare), vjp, magnitudes, _pull_step)


def _pull_step(
    call: Resumable[M, Final], do_t: Array | None, *, dstate: State | None = None, absolute: bool = False
) -> Gradients:
    """`pull` under the names of a step: {"q_t", "k_t", "v_t"} and "state"; of magnitudes "o_t" and "next_state" too."""
    do = None if do_t is None else one_token(call.op, do_t=do_t)[0]
    grads = call.gradients(do, dstate, absolute)
    renamed: Gradients = {}
    for name, x in grads.items():
        if isinstance(x, tuple):
            renamed[{"initial_state": "state", "state": "next_state"}[name]] = x
        elif name == "log_decay":
            renamed["log_decay_t"] = x[..., 0] if x.ndim else x
        else:
            renamed[f"{name}_t"] = x[..., 0, :]
    return renamed


def one_token(op: str, **arrays: Array) -> list[Array]:
    """Arrays of one token as sequences of length 1."""
    for name, x in arrays.items():
        if np.ndim(x) < 1:
            raise ValueError(f"{op}: {name} needs an axis of features; expected (..., d), got {np.shape(x)}")
    return [np.asarray(x)[..., None, :] for x in arrays.values()]


def _shape_of(name: str, m: Sums) -> tuple[int, ...]:
    if name in ("y", "v"):
        return m.keys.values.shape if name == "y" else cast(Array, m.v).shape
    initial = cast(Initial, m.initial)
    return {"S": initial.S.shape, "z": initial.z.shape, "c": initial.z.shape[:-1]}[name]
