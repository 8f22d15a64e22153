"""Linear attention on torch tensors: memory and launches of the Triton kernels.

Any layout is read through views (items, heads, tokens, features): broadcast axes have stride 0. Backward recomputes the
states, then computes 1/den and δ = do·o of every query, then dq in order and dk, dv from the end; two sweeps do that
where products have a half type. A returned state has sums of its own: it includes keys that no query sees, and is
float32 whatever the inputs are.
"""

import torch
from torch import Tensor

from attnkit._core.check import dtype_name
from attnkit._core.dispatch import namespace
from attnkit._core.typing import Keywords, Option
from attnkit.backends.torch.triton import launch, linear_decay
from attnkit.backends.torch.triton.launch import Group, Launch, View
from attnkit.kernels import linear_calls
from attnkit.kernels.linear_calls import Packed, Setting, span
from attnkit.kernels.plan import blocks_of

NO_ROWS = (None, None, 0, 0)
"""The tuple `rows` of `attnkit.kernels.triton.linear` without a denominator."""
State = tuple[Tensor, Tensor]
Sums = tuple[Tensor, int]
"""The initial sums of segments, and how many there are."""


# ---------------------------------------------------------------------------------------------- a call


def setting(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    edges_q: Tensor | None = None,
    edges_k: Tensor | None = None,
    levels: Tensor | None = None,
    log_decay: Tensor | float | None = None,
    **options: Option,
) -> Setting:
    """The options of `attnkit.kernels.linear_calls.setting`, levels of features (..., S) and a decay; with edges
    sequences are packed."""
    packed = None
    if edges_q is not None and edges_k is not None:
        packed = _packed(edges_q, edges_k, options.get("causal") is True)
    s = linear_calls.setting(namespace(q), q, k, v, packed=packed, **options)
    if levels is not None:
        return s._replace(levels=(levels, None))
    if log_decay is not None:
        return s._replace(levels=linear_decay.levels(log_decay, s, q, linear_decay.decaying_tokens(q, s, options)))
    return s


def _packed(edges_q: Tensor, edges_k: Tensor, shifted: bool) -> Packed:
    """The tuple `packed` of `attnkit.kernels.triton.linear`."""
    reach = torch.maximum(edges_q.diff(), edges_k.diff()).cumsum(0)
    reach = torch.cat([reach.new_zeros(1), reach])
    return edges_q, edges_k, reach, edges_q.shape[0] - 1, 1 if shifted else None


def levels_of(s: Setting) -> Group | None:
    """The view `levels` of `attnkit.kernels.triton.linear`: query heads of a group that see keys apart have a state
    each."""
    if s.levels is None:
        return None
    levels = s.levels
    if s.plan.members < s.a.groups:
        levels = [None if x is None else linear_decay.of_query_heads(x, s.a) for x in levels]
    high, low = (launch.view_of(x, s.plan.state_leading, s.a.keys) for x in levels)
    assert high is not None
    return high if low is None else (*high, low[0])


def masks_of(s: Setting) -> Group:
    """The tuple `masks` of `attnkit.kernels.triton.linear`."""
    leading = s.a.leading
    return (
        launch.view_of(s.key_mask, leading, s.a.keys),
        launch.view_of(s.firsts, leading),
        launch.view_of(s.stops, leading),
        launch.view_of(s.query_mask, leading, s.a.queries),
        1 if s.stateful else None,
        levels_of(s),
    )


# ---------------------------------------------------------------------------------------------- launches


class Call:
    """The launches of a call: its inputs, and lists of launches with memory for intermediate results."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, s: Setting) -> None:
        self.s, self.like, self.tensors = s, q, (q, k, v)
        self.q, self.k, self.v = (launch.view(s.a, name, x) for name, x in zip("qkv", (q, k, v), strict=True))

    def room(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.like.device)

    def constants(self, name: str, by_values: bool) -> Keywords:
        """The compile-time arguments of a kernel."""
        capability = launch.capability(self.like.device)
        return linear_calls.constants(name, self.s, dtype_name(self.like), by_values, capability)

    def launch(self, name: str, tokens: int, by_values: bool, by_states: bool, *arguments: object) -> Launch:
        """A launch with the programs of `attnkit.kernels.linear_calls.parts`."""
        values = self.constants(name, by_values)
        parts = linear_calls.parts(self.s, tokens, values.get("BLOCK"), by_values, by_states)
        arguments = (*arguments, self.s.heads, parts.span.numbers, parts.blocks)
        return Launch(linear_calls.kernel_of(name), parts.programs, arguments, values)

    def states(
        self, name: str, tokens: int, inputs: Group, initial: State | None, final: State | None = None
    ) -> tuple[Sums | None, list[Launch]]:
        """The initial sums of segments, by `key_sums` or `query_sums`; None for one ordered segment that starts from 0.

        They start from `initial`; `final` gets the whole sum.
        """
        from attnkit.kernels.triton import linear

        s, steps = self.s, span(self.s, tokens)
        passes = linear_calls.passes(s, steps, initial is not None, final is not None)
        if not any(passes):
            return None, []
        size, numbers = s.a.d * s.a.e + s.a.d, s.a.items * s.plan.num_states
        states = (self.room(numbers, steps.segments, size), steps.segments)
        settings = (masks_of(s), s.limits) if name == "key_sums" else (masks_of(s), s.limits, s.plan.scale)
        launches = []
        if passes.sums:
            launches.append(self.launch(name, tokens, True, True, *inputs, states, *settings))
        else:
            states[0].zero_()
        if passes.running:
            flags, blocks, programs = linear_calls.running(s, steps, name == "query_sums")
            fading = (levels_of(s), s.a.keys)
            arguments = (states, self.parts(initial), final, *fading, s.heads, steps.numbers, blocks)
            launches.append(Launch(linear.running, programs, arguments, flags))
        return states, launches

    def parts(self, state: State | None) -> tuple[View, View] | None:
        """A state for each head of k, as kernels take it."""
        if state is None:
            return None
        a, (S, z) = self.s.a, state
        return self.view(S, a.shared, a.d, a.e), self.view(z, a.shared, a.d)

    def view(self, x: Tensor, leading: tuple[int, ...], *rest: int) -> View:
        return launch.by_sequence(self.s.a, launch.view_of(x, leading, *rest))

    def outputs(self, o: View, do: View, rows: Group, states: Sums | None) -> Launch:
        s = self.s
        arguments = (self.q, self.k, self.v, o, do, rows, states, masks_of(s), s.limits, s.plan.scale, s.plan.eps)
        return self.launch("outputs", s.a.queries, True, False, *arguments)

    def forward(self, o: Tensor, initial: State | None, final: State | None = None) -> list[Launch]:
        """The launches for o, and for the returned state where its sums serve both (`Setting.sums_state`)."""
        of_state = self if final is None else Call(*self.tensors, self.s._replace(products="float32"))
        states, launches = of_state.states("key_sums", self.s.a.keys, (self.k, self.v), initial, final)
        return [*launches, self.outputs(launch.view(self.s.a, "o", o), None, NO_ROWS, states)]

    def final_state(self, initial: State | None, final: State) -> list[Launch]:
        """The launches for the returned state; the setting is one of keys alone."""
        return self.states("key_sums", self.s.a.keys, (self.k, self.v), initial, final)[1]

    def rows(self, parts: int) -> Group:
        """Memory for 1/den and for δ in parts."""
        a = self.s.a
        if not self.s.plan.normalize:
            return NO_ROWS
        views = (
            self.view(self.room(a.items, n, a.queries), (a.items, n), a.queries) for n in (a.heads, parts * a.heads)
        )
        return (*views, a.heads, parts)

    def backward(
        self, do: Tensor, grads: dict[str, Tensor], initial: State | None, dstate: State | None
    ) -> list[Launch]:
        """The launches for dq, dk, dv and the gradients of the initial state and of the gates of a decay, which go to
        `grads`; the setting is one of gradients."""
        s, a = self.s, self.s.a
        do_view, dq = launch.view(a, "o", do), launch.view(a, "q", grads["q"])
        dk, dv = (self.view(grads[name], s.plan.state_leading, a.keys, n) for name, n in (("k", a.d), ("v", a.e)))
        of_queries, of_keys = self.gradients_of_queries, self.gradients_of_keys
        if s.sweeps:
            of_queries, of_keys = self.sweep_queries, self.sweep_keys
        states, sums = self.states("key_sums", a.keys, (self.k, self.v), initial)
        rows, launches = of_queries(do_view, dq, states)
        final = None if initial is None else (grads["initial_S"], grads["initial_z"])
        states, more = self.states("query_sums", a.queries, (self.q, do_view, rows), dstate, final)
        launches = [*sums, *launches, *more, *of_keys(do_view, dk, dv, rows, states)]
        if "log_decay" in grads:
            dg = self.view(grads["log_decay"], s.plan.state_leading, a.keys)
            launches += Call(*self.tensors, s.of_gates()).gradient_of_gates(do_view, dg, rows, initial, dstate)
        return launches

    def gradient_of_gates(
        self, do: View, dg: View, rows: Group, initial: State | None, dstate: State | None
    ) -> list[Launch]:
        """The launches for the gradients of the gates of every state."""
        a = self.s.a
        before, sums = self.states("key_sums", a.keys, (self.k, self.v), initial)
        after, more = self.states("query_sums", a.queries, (self.q, do, rows), dstate)
        arguments = (self.q, self.k, self.v, do, dg, rows, before, after, *self.settings)
        return [*sums, *more, self.launch(linear_calls.GATES, a.keys, True, True, *arguments)]

    @property
    def settings(self) -> Group:
        return masks_of(self.s), self.s.limits, self.s.plan.scale

    def gradients_of_queries(self, do: View, dq: View, states: Sums | None) -> tuple[Group, list[Launch]]:
        """1/den and δ, and the launches for them and for dq."""
        a = self.s.a
        parts = blocks_of(a.e, self.constants("outputs", True)["BLOCK"])
        rows, launches = self.rows(parts), []
        if self.s.plan.normalize:
            launches.append(self.outputs(None, do, rows, states))
        arguments = (self.q, self.k, self.v, do, dq, rows, states, *self.settings)
        return rows, [*launches, self.launch("gradient_queries", a.queries, False, False, *arguments)]

    def gradients_of_keys(self, do: View, dk: View, dv: View, rows: Group, states: Sums | None) -> list[Launch]:
        """The launches for dk and dv."""
        of_k: Group = (self.q, self.k, self.v, do, dk, rows, states, *self.settings)
        of_v: Group = (self.q, self.k, do, dv, rows, states, *self.settings)
        return [
            self.launch("gradient_keys", self.s.a.keys, False, True, *of_k),
            self.launch("gradient_values", self.s.a.keys, True, True, *of_v),
        ]

    def sweep_queries(self, do: View, dq: View, states: Sums | None) -> tuple[Group, list[Launch]]:
        """The same in one launch."""
        rows = self.rows(1)
        arguments = (self.q, self.k, self.v, do, dq, rows, states, *self.settings, self.s.plan.eps)
        return rows, [self.launch("sweep_queries", self.s.a.queries, True, False, *arguments)]

    def sweep_keys(self, do: View, dk: View, dv: View, rows: Group, states: Sums | None) -> list[Launch]:
        """The same in one launch."""
        arguments = (self.q, self.k, self.v, do, dk, dv, rows, states, *self.settings)
        return [self.launch("sweep_keys", self.s.a.keys, True, True, *arguments)]
