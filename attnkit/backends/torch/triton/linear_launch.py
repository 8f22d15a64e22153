"""Linear attention on torch tensors: memory and launches of the Triton kernels.

Any layout is read through views (items, heads, tokens, features): broadcast axes have stride 0. Backward recomputes the
states, then computes 1/den and do·num of every query, then dq in order and dk, dv from the end. A returned state has
sums of its own: it includes keys that no query sees, and is float32 whatever the inputs are.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnkit.backends.torch.triton import launch
from attnkit.backends.torch.triton.launch import Launch, View
from attnkit.kernels.plan import Layout, Linear, blocks_of, layout, linear_plan

PROGRAMS = 512  # per launch: heads are divided into segments until there are as many
ENOUGH = 200  # causal heads in one pass: an A100 runs 216 programs at once, an H100 264; another costs a third
FEWEST = 4  # chunks per segment
SUMS = ("key_sums", "query_sums")
ELEMENTS = 1024  # of a state per program of `running`
NO_ROWS = (None, None, 0, 0)
"""The tuple `rows` of `attnkit.kernels.triton.linear` without a denominator."""
State = tuple[Tensor, Tensor]


# ---------------------------------------------------------------------------------------------- a call


class Setting(NamedTuple):
    """A call as the kernels take it: its plan, and the tensors of masks and lengths."""

    plan: Linear
    feature_map: str
    key_mask: Tensor | None  # (..., S)
    firsts: Tensor | None  # (...): visible keys lie in firsts <= j < stops
    stops: Tensor | None
    query_mask: Tensor | None  # (..., L)
    valid_stops: Tensor | None  # stops of the keys in a state, visible or not
    stateful: bool  # there is an initial state
    packed: tuple[Tensor, Tensor, Tensor, int, int | None] | None  # of `attnkit.kernels.triton.linear`
    floor: bool = False  # the sum of a row counts as at least 0 in the denominator
    levels: Tensor | None = None  # (..., S) of features that fade, which never fall; for causal calls
    exact: bool = False  # products in full float32 precision

    @property
    def a(self) -> Layout:
        return self.plan.layout

    def of_valid_keys(self) -> "Setting":
        """The same for gradients of keys that no query sees, which are in a state."""
        return self._replace(plan=self.plan._replace(stop=self.plan.valid), stops=self.valid_stops)

    def of_keys_alone(self, leading: tuple[int, ...]) -> "Setting":
        """The sums over valid keys for a state with these leading axes."""
        a, alone = self.a, self.of_valid_keys()
        a = layout((*leading, 0, a.d), (*leading, a.keys, a.d), (*leading, a.keys, a.e), sequences=a.sequences)
        plan = alone.plan._replace(layout=a, causal=False, shift=0, members=1)
        return alone._replace(plan=plan, query_mask=None, stateful=False, exact=True)

    def masks(self) -> tuple[Any, ...]:
        """The tuple `masks` of `attnkit.kernels.triton.linear`."""
        leading = self.a.leading
        return (
            launch.view_of(self.key_mask, leading, self.a.keys),
            launch.view_of(self.firsts, leading),
            launch.view_of(self.stops, leading),
            launch.view_of(self.query_mask, leading, self.a.queries),
            1 if self.stateful else None,
            self.view_of_levels,
        )

    @property
    def view_of_levels(self) -> View:
        return launch.view_of(self.levels, self.a.shared, self.a.keys)

    @property
    def limits(self) -> tuple[int, ...]:
        return self.a.queries, self.a.keys, self.plan.stop, self.plan.shift

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.a.heads, self.a.groups, self.plan.members


def setting(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str = "elu_plus_one",
    mask: Tensor | None = None,
    key_lengths: Any = None,
    query_mask: Tensor | None = None,
    initial_S: Tensor | None = None,
    edges_q: Tensor | None = None,
    edges_k: Tensor | None = None,
    floor: bool = False,
    levels: Tensor | None = None,
    **others: Any,
) -> Setting:
    """The options of linear_attention, `floor` and `levels`; with edges sequences are packed, and causality counts
    within each."""
    packed = None
    if edges_q is not None and edges_k is not None:
        packed = _packed(edges_q, edges_k, others.get("causal") is True)
    seeing = {"mask": mask, "key_lengths": key_lengths, "query_mask": query_mask}
    plan = linear_plan(q, k, v, {**others, **seeing, "feature_map": feature_map}, packed[3] if packed else None)
    a, valid = plan.layout, key_lengths if isinstance(key_lengths, Tensor) else None
    key_mask, stops = mask.squeeze(-2) if mask is not None and mask.ndim > 1 else mask, valid
    firsts = None if key_mask is None else first_true(key_mask, a.keys)
    if query_mask is not None:
        end = a.queries - first_true(query_mask.flip(-1), a.queries)  # after the last unmasked query
        end = end + plan.shift if plan.causal else torch.where(end > 0, a.keys, 0)
        stops = end if valid is None else torch.minimum(valid, end)
    stateful = initial_S is not None
    return Setting(
        plan, feature_map, key_mask, firsts, stops, query_mask, valid, stateful, packed, floor, levels=levels
    )


def _packed(edges_q: Tensor, edges_k: Tensor, shifted: bool) -> tuple[Tensor, Tensor, Tensor, int, int | None]:
    """The tuple `packed` of `attnkit.kernels.triton.linear`."""
    reach = torch.maximum(edges_q.diff(), edges_k.diff()).cumsum(0)
    reach = torch.cat([reach.new_zeros(1), reach])
    return edges_q, edges_k, reach, edges_q.shape[0] - 1, 1 if shifted else None


def first_true(x: Tensor, n: int) -> Tensor:
    """The index of the first True along the last axis, n if there is none."""
    x = x.expand(*x.shape[:-1], n)
    if not n:
        return x.new_zeros(x.shape[:-1], dtype=torch.int64)
    return torch.where(x.any(-1), x.to(torch.uint8).argmax(-1), n)


# ---------------------------------------------------------------------------------------------- launches


class Span(NamedTuple):
    """Segments of `size` positions from `start` to `end`; packed sequences have separate segments."""

    segments: int
    size: int
    start: int
    end: int
    packed: tuple[Tensor, Tensor, Tensor, int, int | None] | None

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The tuple `span` of `attnkit.kernels.triton.linear`."""
        return *self[:4], *(self.packed or (None,) * 5)


def span(s: Setting, tokens: int) -> Span:
    """Positions (`tokens` of them without causality), divided so that all heads together keep a GPU busy."""
    from attnkit.kernels.triton.sizes import UNIT

    start, end = s.plan.positions
    end = end if s.plan.causal else tokens
    if s.packed is not None:
        end = s.a.queries + s.a.keys  # at most: the edges of sequences are not read
    units = max(1, blocks_of(end - start, UNIT))
    heads = max(1, s.a.items * s.plan.num_states)
    wanted = 1 if s.plan.causal and heads >= ENOUGH else blocks_of(PROGRAMS, heads)
    segments = max(1, min(wanted, units // FEWEST))
    size = blocks_of(units, segments)
    return Span(blocks_of(units, size) + s.a.sequences, size * UNIT, start, end, s.packed)


def constants(kernel: Any, q: Tensor, s: Setting, by_values: bool) -> dict[str, Any]:
    """The compile-time arguments of a kernel; `by_values`: its columns are those of v."""
    from attnkit.kernels.triton import sizes
    from attnkit.kernels.triton.features import FEATURE_MAPS, HALF_FEATURE_MAPS, PRODUCTS

    D, E = sizes.padded(s.a.d), sizes.padded(s.a.e)
    dtype = "float32" if s.exact else str(q.dtype).removeprefix("torch.")
    phi, slope = (FEATURE_MAPS if dtype == "float32" else HALF_FEATURE_MAPS)[s.feature_map]
    values = {"PHI": phi, "SLOPE": slope, "CAUSAL": s.plan.causal, "NORMALIZE": s.plan.normalize, "FLOOR": s.floor}
    values |= {"d": s.a.d, "e": s.a.e, "D": D, "E": E}
    values |= dict(zip(("OPERAND", "PRECISION"), PRODUCTS[dtype], strict=True))
    kind = "sums" if kernel.__name__ in SUMS else "sweep"
    capability = launch.capability(q.device)
    tile = sizes.linear(kind, dtype, capability, *((D, E) if by_values else (E, D)))
    values |= {"CHUNK": tile.CHUNK, "BLOCK": tile.BLOCK}
    values = {name: value for name, value in values.items() if name in kernel.arg_names}
    return values | {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


class Call:
    """The launches of a call: its inputs, and lists of launches with memory for intermediate results."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, s: Setting) -> None:
        self.s, self.like = s, q
        self.q, self.k, self.v = (launch.view(s.a, name, x) for name, x in zip("qkv", (q, k, v), strict=True))

    def room(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.like.device)

    def launch(self, name: str, steps: Span, by_values: bool, by_states: bool, *arguments: Any) -> Launch:
        """A launch with one program per block of columns, segment, head and item.

        `by_values`: the columns are those of v, else those of k. `by_states`: heads are those that have a state.
        """
        from attnkit.kernels.triton import linear

        kernel, s = getattr(linear, name), self.s
        values = constants(kernel, self.like, s, by_values)
        parts = blocks_of(s.a.e if by_values else s.a.d, values["BLOCK"])
        programs = parts * steps.segments * (s.plan.num_states if by_states else s.a.heads) * s.a.items
        return Launch(kernel, programs, (*arguments, s.heads, steps.numbers, parts), values)

    def states(
        self, name: str, tokens: int, inputs: tuple[Any, ...], initial: State | None, final: State | None = None
    ) -> tuple[tuple[Tensor, int] | None, list[Launch]]:
        """The initial sums of segments, by `key_sums` or `query_sums`; None for one ordered segment that starts from 0.

        They start from `initial`; `final` gets the whole sum.
        """
        from attnkit.kernels.triton import linear

        s, steps = self.s, span(self.s, tokens)
        alone, plain = s.plan.causal and steps.segments == 1 and final is None, initial is None and final is None
        if alone and plain:
            return None, []
        size, numbers = s.a.d * s.a.e + s.a.d, s.a.items * s.plan.num_states
        states = (self.room(numbers, steps.segments, size), steps.segments)
        settings = (s.masks(), s.limits) if name == "key_sums" else (s.masks(), s.limits, s.plan.scale)
        launches = []
        if alone:
            states[0].zero_()  # the sums of the only segment are not needed
        else:
            launches.append(self.launch(name, steps, True, True, *inputs, states, *settings))
        if steps.segments > 1 or not plain:
            parts = blocks_of(size, ELEMENTS)
            flags = {
                "CAUSAL": s.plan.causal,
                "REVERSE": name == "query_sums",
                "BLOCK": ELEMENTS,
                "d": s.a.d,
                "e": s.a.e,
            }
            fading = (s.view_of_levels, s.a.keys)
            arguments = (states, self.parts(initial), final, *fading, s.heads, steps.numbers, parts)
            sums = parts * numbers * max(1, s.a.sequences)
            launches.append(Launch(linear.running, sums, arguments, flags))
        return states, launches

    def parts(self, state: State | None) -> tuple[View, View] | None:
        """A state for each head of k, as kernels take it."""
        if state is None:
            return None
        a, (S, z) = self.s.a, state
        return self.view(S, a.shared, a.d, a.e), self.view(z, a.shared, a.d)

    def view(self, x: Tensor, leading: tuple[int, ...], *rest: int) -> View:
        return launch.by_sequence(self.s.a, launch.view_of(x, leading, *rest))

    def outputs(self, o: View, do: View, rows: Any, states: Any) -> Launch:
        s = self.s
        arguments = (self.q, self.k, self.v, o, do, rows, states, s.masks(), s.limits, s.plan.scale, s.plan.eps)
        return self.launch("outputs", span(s, s.a.queries), True, False, *arguments)

    def forward(self, o: Tensor, initial: State | None) -> list[Launch]:
        """The launches for o."""
        states, launches = self.states("key_sums", self.s.a.keys, (self.k, self.v), initial)
        return [*launches, self.outputs(launch.view(self.s.a, "o", o), None, NO_ROWS, states)]

    def final_state(self, initial: State | None, final: State) -> list[Launch]:
        """The launches for the returned state; the setting is one of keys alone."""
        return self.states("key_sums", self.s.a.keys, (self.k, self.v), initial, final)[1]

    def rows(self, do: View, states: Any) -> tuple[tuple[Any, ...], list[Launch]]:
        """1/den and do·num, and the launches that compute them."""
        from attnkit.kernels.triton import linear

        a = self.s.a
        if not self.s.plan.normalize:
            return NO_ROWS, []
        parts = blocks_of(a.e, constants(linear.outputs, self.like, self.s, True)["BLOCK"])
        views = (
            self.view(self.room(a.items, n, a.queries), (a.items, n), a.queries) for n in (a.heads, parts * a.heads)
        )
        rows = (*views, a.heads, parts)
        return rows, [self.outputs(None, do, rows, states)]

    def backward(
        self, do: Tensor, grads: dict[str, Tensor], initial: State | None, dstate: State | None
    ) -> list[Launch]:
        """The launches for those of dq, dk, dv and the gradients of the initial state that are in `grads`."""
        s, a = self.s, self.s.a
        settings = (s.masks(), s.limits, s.plan.scale)
        do_view = launch.view(a, "o", do)
        key_sums, launches = self.states("key_sums", a.keys, (self.k, self.v), initial)
        rows, more = self.rows(do_view, key_sums)
        launches += more
        if "q" in grads:
            dq = launch.view(a, "q", grads["q"])
            arguments: tuple[Any, ...] = (self.q, self.k, self.v, do_view, dq, rows, key_sums, *settings)
            launches.append(self.launch("gradient_queries", span(s, a.queries), False, False, *arguments))
        final = None if initial is None else (grads["initial_S"], grads["initial_z"])
        query_sums, more = self.states("query_sums", a.queries, (self.q, do_view, rows), dstate, final)
        launches += more
        if "k" in grads:
            dk = self.view(grads["k"], s.plan.state_leading, a.keys, a.d)
            arguments = (self.q, self.k, self.v, do_view, dk, rows, query_sums, *settings)
            launches.append(self.launch("gradient_keys", span(s, a.keys), False, True, *arguments))
        if "v" in grads:
            dv = self.view(grads["v"], s.plan.state_leading, a.keys, a.e)
            arguments = (self.q, self.k, do_view, dv, rows, query_sums, *settings)
            launches.append(self.launch("gradient_values", span(s, a.keys), True, True, *arguments))
        return launches
