"""Linear attention on torch tensors: memory, launches and registration of the Triton kernels.

Any layout is served as views of (items, heads, tokens, features): broadcast axes have stride 0. A backward call makes
the states again, then 1/den and do·num of every query, then dq in order and dk, dv from the end.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnkit._dispatch import Kernel
from attnkit.backends.torch import triton_launch, triton_pointwise
from attnkit.backends.torch.custom import Given, register
from attnkit.backends.torch.triton_launch import Launch, Layout, View

PROGRAMS = 512  # that a launch should have: heads are divided into segments until there are as many
FEWEST = 4  # chunks of a segment
SUMS = ("key_sums", "query_sums")
ELEMENTS = 1024  # of a state that a program of `running` adds up


# ---------------------------------------------------------------------------------------------- a call


class Setting(NamedTuple):
    """A call as the kernels take it."""

    a: Layout
    feature_map: str
    normalize: bool
    eps: float
    scale: float
    causal: bool
    shift: int  # query i sees the keys j <= i + shift
    stop: int  # keys from here on are seen by no query
    members: int  # query heads that share a state: all of a group, unless each has masks of its own
    key_mask: Tensor | None  # (..., S)
    firsts: Tensor | None  # (...): the keys that are seen are among firsts <= j < stops
    stops: Tensor | None
    query_mask: Tensor | None  # (..., L)

    def masks(self) -> tuple[View, ...]:
        """masks of `attnkit.kernels.triton.linear`."""
        leading = self.a.leading
        return (
            triton_launch.view_of(self.key_mask, leading, self.a.keys),
            triton_launch.view_of(self.firsts, leading),
            triton_launch.view_of(self.stops, leading),
            triton_launch.view_of(self.query_mask, leading, self.a.queries),
        )

    @property
    def limits(self) -> tuple[int, int, int, int]:
        return self.a.queries, self.a.keys, self.stop, self.shift

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.a.heads, self.a.groups, self.members

    @property
    def held(self) -> int:
        """How many states an item has, one for each head of k or of q."""
        return self.a.heads // self.members

    @property
    def held_leading(self) -> tuple[int, ...]:
        return (*self.a.leading[:-1], self.held) if self.a.leading else ()


def setting(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str = "elu_plus_one",
    normalize: bool | None = None,
    eps: float = 1e-6,
    scale: float | None = None,
    causal: Any = False,
    mask: Tensor | None = None,
    key_lengths: Any = None,
    query_mask: Tensor | None = None,
    enable_gqa: bool = False,
    **others: Any,
) -> Setting:
    """The options of linear_attention."""
    a = triton_launch.layout_of(q, k, v, enable_gqa)
    shift = a.keys - a.queries if causal is True else 0
    stop = min(a.keys, a.queries + shift) if causal else a.keys if a.queries else 0
    if key_lengths is not None and not isinstance(key_lengths, Tensor):
        stop, key_lengths = min(stop, int(key_lengths)), None
    key_mask = mask.squeeze(-2) if mask is not None and mask.ndim > 1 else mask
    own = [key_mask is not None and key_mask.ndim > 1 and key_mask.shape[-2] > 1]
    own += [key_lengths is not None and key_lengths.ndim > 0 and key_lengths.shape[-1] > 1]
    own += [query_mask is not None and query_mask.ndim > 1 and query_mask.shape[-2] > 1]
    firsts = None if key_mask is None else first_true(key_mask, a.keys)
    if query_mask is not None:
        reached = a.queries - first_true(query_mask.flip(-1), a.queries)  # behind the last query that takes part
        reached = reached + shift if causal else torch.where(reached > 0, a.keys, 0)
        key_lengths = reached if key_lengths is None else torch.minimum(key_lengths, reached)
    divides = feature_map != "identity" if normalize is None else normalize
    members = 1 if any(own) else a.groups
    factor = 1.0 if scale is None else float(scale)
    return Setting(
        a, feature_map, divides, float(eps), factor, bool(causal), shift, stop, members,
        key_mask, firsts, key_lengths, query_mask,
    )  # fmt: skip


def first_true(x: Tensor, n: int) -> Tensor:
    """The index of the first True of n along the last axis, n if there is none."""
    x = x.expand(*x.shape[:-1], n)
    if not n:
        return x.new_zeros(x.shape[:-1], dtype=torch.int64)
    return torch.where(x.any(-1), x.to(torch.uint8).argmax(-1), n)


# ---------------------------------------------------------------------------------------------- launches


class Span(NamedTuple):
    """Segments of `size` positions from `start` to `end`."""

    segments: int
    size: int
    start: int
    end: int


def blocks(n: int, size: int) -> int:
    """How many blocks of a size hold n."""
    return -(-n // size)


def span(s: Setting, tokens: int) -> Span:
    """Positions (`tokens` of them where there is no order) divided so that all heads together keep a GPU busy."""
    from attnkit.kernels.triton.linear_blocks import UNIT

    start = min(0, s.shift)
    end = max(s.a.keys, s.a.queries + s.shift) if s.causal else tokens
    units = blocks(end - start, UNIT)
    segments = max(1, min(blocks(PROGRAMS, s.a.items * s.held), units // FEWEST))
    size = blocks(units, segments)
    return Span(blocks(units, size), size * UNIT, start, end)


def constants(kernel: Any, q: Tensor, s: Setting, by_values: bool) -> dict[str, Any]:
    """The compile-time arguments that a kernel has; `by_values`: it produces columns like those of v."""
    from attnkit.kernels.triton.blocks import padded
    from attnkit.kernels.triton.features import FEATURE_MAPS
    from attnkit.kernels.triton.linear_blocks import PRODUCTS, tile

    D, E = padded(s.a.d), padded(s.a.e)
    phi, slope = FEATURE_MAPS[s.feature_map]
    found = {"PHI": phi, "SLOPE": slope, "CAUSAL": s.causal, "NORMALIZE": s.normalize}
    found |= {"d": s.a.d, "e": s.a.e, "D": D, "E": E}
    dtype = str(q.dtype).removeprefix("torch.")
    found |= dict(zip(("OPERAND", "PRECISION"), PRODUCTS[dtype], strict=True))
    kind = "sums" if kernel.__name__ in SUMS else "sweep"
    capability = triton_launch.capability(q.device)
    chosen = tile(kind, dtype, capability, *((D, E) if by_values else (E, D)))
    found |= {"CHUNK": chosen.CHUNK, "BLOCK": chosen.BLOCK}
    found = {name: value for name, value in found.items() if name in kernel.arg_names}
    return found | {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}


class Call:
    """The launches of a call, as lists: the inputs, and memory for what stands between kernels."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, s: Setting) -> None:
        self.s, self.like = s, q
        self.q = triton_launch.view_of(q, s.a.leading, s.a.queries, s.a.d)
        self.k = triton_launch.view_of(k, s.a.shared, s.a.keys, s.a.d)
        self.v = triton_launch.view_of(v, s.a.shared, s.a.keys, s.a.e)

    def room(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.like.device)

    def launch(self, name: str, steps: Span, by_values: bool, by_states: bool, *arguments: Any) -> Launch:
        """A kernel with a program per block of columns, segment, head and item.

        `by_values`: the columns are those of v, else those of k. `by_states`: heads are those that have a state.
        """
        from attnkit.kernels.triton import linear

        kernel, s = getattr(linear, name), self.s
        chosen = constants(kernel, self.like, s, by_values)
        parts = blocks(s.a.e if by_values else s.a.d, chosen["BLOCK"])
        programs = parts * steps.segments * (s.held if by_states else s.a.heads) * s.a.items
        return Launch(kernel, programs, (*arguments, s.heads, tuple(steps), parts), chosen)

    def states(self, name: str, tokens: int, *inputs: Any) -> tuple[tuple[Tensor, int] | None, list[Launch]]:
        """The sums of `key_sums` or `query_sums` with which segments start; None where there is one, in order."""
        from attnkit.kernels.triton import linear

        s, steps = self.s, span(self.s, tokens)
        if s.causal and steps.segments == 1:
            return None, []
        size, numbers = s.a.d * s.a.e + s.a.d, s.a.items * s.held
        states = (self.room(numbers, steps.segments, size), steps.segments)
        settings = (s.masks(), s.limits) if name == "key_sums" else (s.masks(), s.limits, s.scale)
        made = [self.launch(name, steps, True, True, *inputs, states, *settings)]
        if steps.segments > 1:
            parts = blocks(size, ELEMENTS)
            flags = {"CAUSAL": s.causal, "REVERSE": name == "query_sums", "BLOCK": ELEMENTS}
            made.append(Launch(linear.running, parts * numbers, (states, size, parts), flags))
        return states, made

    def outputs(self, o: View, do: View, rows: Any, states: Any) -> Launch:
        s = self.s
        arguments = (self.q, self.k, self.v, o, do, rows, states, s.masks(), s.limits, s.scale, s.eps)
        return self.launch("outputs", span(s, s.a.queries), True, False, *arguments)

    def forward(self, o: Tensor) -> list[Launch]:
        """What computes o."""
        states, made = self.states("key_sums", self.s.a.keys, self.k, self.v)
        view = triton_launch.view_of(o, self.s.a.leading, self.s.a.queries, self.s.a.e)
        return [*made, self.outputs(view, None, None, states)]

    def rows(self, do: View, states: Any) -> tuple[tuple[Any, ...], list[Launch]]:
        """1/den and do·num, and what computes them."""
        from attnkit.kernels.triton import linear

        a = self.s.a
        if not self.s.normalize:
            return (None, None, 0, 0), []
        parts = blocks(a.e, constants(linear.outputs, self.like, self.s, True)["BLOCK"])
        inverses, dots = self.room(a.items, a.heads, a.queries), self.room(parts * a.items, a.heads, a.queries)
        rows = ((inverses, *inverses.stride()), (dots, *dots.stride()), a.items, parts)
        return rows, [self.outputs(None, do, rows, states)]

    def backward(self, do: Tensor, grads: dict[str, Tensor]) -> list[Launch]:
        """What computes those of dq, dk and dv that are in `grads`."""
        s, a = self.s, self.s.a
        settings = (s.masks(), s.limits, s.scale)
        pulled = triton_launch.view_of(do, a.leading, a.queries, a.e)
        keyed, made = self.states("key_sums", a.keys, self.k, self.v)
        rows, more = self.rows(pulled, keyed)
        made += more
        if "q" in grads:
            dq = triton_launch.view_of(grads["q"], a.leading, a.queries, a.d)
            arguments: tuple[Any, ...] = (self.q, self.k, self.v, pulled, dq, rows, keyed, *settings)
            made.append(self.launch("gradient_queries", span(s, a.queries), False, False, *arguments))
        queried, more = self.states("query_sums", a.queries, self.q, pulled, rows)
        made += more
        if "k" in grads:
            dk = triton_launch.view_of(grads["k"], s.held_leading, a.keys, a.d)
            arguments = (self.q, self.k, self.v, pulled, dk, rows, queried, *settings)
            made.append(self.launch("gradient_keys", span(s, a.keys), False, True, *arguments))
        if "v" in grads:
            dv = triton_launch.view_of(grads["v"], s.held_leading, a.keys, a.e)
            arguments = (self.q, self.k, pulled, dv, rows, queried, *settings)
            made.append(self.launch("gradient_values", span(s, a.keys), True, True, *arguments))
        return made


# ---------------------------------------------------------------------------------------------- the custom ops


def _forward(op: str, given: Given) -> Tensor:
    q, k, v = (given.pop(name) for name in "qkv")
    s = setting(q, k, v, **given)
    o = q.new_empty((*s.a.leading, s.a.queries, s.a.e))
    if not s.a.keys:
        return o.zero_()
    if o.numel():
        with torch.cuda.device_of(q):
            for launch in Call(q, k, v, s).forward(o):
                launch()
    return o


def _backward(op: str, given: Given, do: Tensor, wanted: tuple[str, ...]) -> dict[str, Tensor]:
    like = {name: given.pop(name) for name in DIFFERENTIABLE}
    q, k, v = like.values()
    s = setting(q, k, v, **given)
    if not do.numel() or not s.a.keys:
        return {name: like[name].new_zeros(like[name].shape) for name in wanted}
    shapes = {
        "q": (*s.a.leading, s.a.queries, s.a.d),
        "k": (*s.held_leading, s.a.keys, s.a.d),
        "v": (*s.held_leading, s.a.keys, s.a.e),
    }
    grads = {name: triton_launch.room_for(like[name], shapes[name], False) for name in wanted}
    with torch.cuda.device_of(q):
        for launch in Call(q, k, v, s).backward(do, grads):
            launch()
    return {name: _reduced(grads[name], s, name, like[name]) for name in wanted}


def _reduced(grad: Tensor, s: Setting, name: str, like: Tensor) -> Tensor:
    """A gradient summed over the query heads of a group and over broadcast axes, rounded once."""
    if name != "q" and s.members < s.a.groups:
        grad = grad.unflatten(-3, (-1, s.a.groups)).sum(-3)
    return triton_launch.reduced_to(grad, s.a, like)


DIFFERENTIABLE = ("q", "k", "v")
CUSTOM = register("triton_linear", _forward, _backward, DIFFERENTIABLE)


# ---------------------------------------------------------------------------------------------- what the library calls


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """linear_attention."""
    return CUSTOM.attend("linear_attention", q=q, k=k, v=v, **options)


def pull(q: Tensor, k: Tensor, v: Tensor, do: Tensor, **options: Any) -> dict[str, Tensor]:
    """linear_attention_vjp."""
    return CUSTOM.pull("linear_attention", do, q=q, k=k, v=v, **options)


def unserved(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str | None:
    """Why the kernels do not serve a call, whatever the device."""
    if any(options.get(name) for name in ("initial_state", "return_state", "dstate")):
        return "states are served by the generic implementation"
    if callable(options.get("feature_map")):
        return "a feature map of your own is served by the generic implementation"
    mask = options.get("mask")
    if mask is not None and mask.ndim > 1 and mask.shape[-2] != 1:
        return "a mask of pairs is served by the generic implementation"
    return None


def unsupported(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None, **options: Any) -> str | None:
    """Why a call is not served by Triton."""
    return triton_pointwise.unsupported(q, k, v, *rest) or unserved(q, k, v, **options)


KERNELS = {
    "linear_attention": Kernel("triton", attend, unsupported, triton_pointwise.pays),
    "linear_attention_vjp": Kernel("triton", pull, unsupported, triton_pointwise.pays),
}
