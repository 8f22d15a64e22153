"""Linear attention (Katharopoulos et al. 2020) by CUDA kernels: lowers a call to launches on NumPy-like arrays.
Formulas are in linear.cuh.

Forward computes the sums of all segments, their running sums, then every output tile independently. The gradient
recomputes them, then computes 1/den and γ of every query, dq, the sums of queries from the end, dk and dv. Without
causality there is one sum. A returned state has sums of its own, because it includes keys that no query sees. Packed
sequences, which options `edges_q` and `edges_k` bound, have segments of their own.
"""

import ctypes
import math

import array_api_compat

from attnkit._core.activations import lacking
from attnkit._core.typing import Causal, Keywords, Option
from attnkit.backends.cupy import pointwise
from attnkit.backends.cupy.launch import FEATURE_MAPS, NUMBERS, OPEN, Launch, Tiles, View, fitting, tiles_of, width_of
from attnkit.backends.cupy.pointwise import Array, Device, gradients_of, layout_of, reduced_to, zeros
from attnkit.backends.cupy.views import Views
from attnkit.kernels.plan import Layout, blocks_of, is_array, linear_plan, state_axes
from attnkit.ops.linear.attention import LINEAR

SOURCE = "linear_kernels.cuh"
SHORTEST = 64  # positions per segment
NUMBERS_OF_A_BLOCK = 256  # of a state per block, for running sums
VIEWS = (
    "q", "k", "v", "o", "dq", "dk", "dv", "key_mask", "query_mask", "firsts", "stops", "inverses", "slopes", "keyed",
    "queried", "initial_S", "initial_z", "final_S", "final_z",
)  # fmt: skip
State = tuple[Array, Array]


class Linear(ctypes.Structure):
    """The argument of every kernel of linear attention: `Linear` of linear.cuh."""

    _fields_ = (
        *((name, View) for name in VIEWS),
        *((name, ctypes.c_double) for name in ("scale", "eps")),
        *((name, ctypes.c_int) for name in ("heads", "groups", "members", "queries", "keys", "d", "e")),
        *((name, ctypes.c_int) for name in ("stop", "shift", "start", "segment", "query_positions", "key_positions")),
        *((name, ctypes.c_int) for name in ("causal", "normalize", "stateful")),
        *((name, ctypes.c_void_p) for name in ("edges_q", "edges_k", "reach")),
        *((name, ctypes.c_int) for name in ("sequences", "aligned")),
    )


def unsupported_options(q: Array, k: Array, v: Array, **options: Option) -> str | None:
    """Why a call is not supported on any device."""
    mask = options.get("mask")
    if options.get("log_decay") is not None:
        return "log_decay is served by the generic implementation"
    if callable(options.get("feature_map")):
        return "a feature map of your own is served by the generic implementation"
    lacks = lacking("cuda", FEATURE_MAPS, options.get("feature_map", "elu_plus_one"), "feature map")
    if lacks is not None:
        return lacks
    if mask is not None and mask.ndim > 1 and mask.shape[-2] != 1:
        return "a mask of pairs is served by the generic implementation"
    if not (q.shape[-1] and v.shape[-1]):
        return "tokens without features are served by the generic implementation"
    return pointwise.unsupported_options(q, k, v)


class Call(Views):
    """One call of `linear_attention` or its gradient: the data shared by all of its launches. With `valid`, keys that
    belong to a state are included even if no query sees them."""

    def __init__(self, device: Device, q: Array, k: Array, v: Array, valid: bool = False, **options: Option) -> None:
        edges = options.get("edges_q")
        sequences = None if edges is None else edges.shape[0] - 1
        self.device, self.keepalive, self.plan = device, [], linear_plan(q, k, v, options, sequences)
        p, self.layout = self.plan, self.plan.layout
        a = self.layout
        self.arguments = s = Linear(heads=a.heads, groups=a.groups, queries=a.queries, keys=a.keys, d=a.d, e=a.e)
        self.compute = "float64" if q.dtype.name == "float64" else "float32"
        self.feature_map = options.get("feature_map", "elu_plus_one")
        s.scale, s.eps, s.normalize, s.causal, s.shift = p.scale, p.eps, p.normalize, p.causal, p.shift
        s.members, s.stop = p.members, p.valid if valid else p.stop
        s.segment = max(SHORTEST, width_of(a.d, a.e))
        s.start, end = p.positions
        s.query_positions, s.key_positions = max(a.queries, 1), max(a.keys, 1)
        if s.causal:
            s.query_positions = s.key_positions = max(end, 1) - s.start
        if a.sequences:
            self.pack(**options)
        for name, x in zip("qkv", (q, k, v), strict=True):
            self.view(name, name, x)
        self.see(options, valid)

    def pack(self, edges_q: Array, edges_k: Array, causal: Causal = False, **options: object) -> None:
        """Boundaries of sequences, and of their positions: under causality as many as the more numerous tokens."""
        s, xp = self.arguments, array_api_compat.array_namespace(edges_q)
        s.sequences, s.aligned = self.layout.sequences, causal is True
        s.edges_q, s.edges_k = self.pointer(edges_q), self.pointer(edges_k)
        if causal:
            longer = xp.maximum(edges_q[1:] - edges_q[:-1], edges_k[1:] - edges_k[:-1])
            s.reach = self.pointer(xp.cumulative_sum(longer, include_initial=True))
            most = s.queries if edges_q is edges_k else s.queries + s.keys  # boundaries are not read
            s.query_positions = s.key_positions = max(most, 1)

    def see(self, options: Keywords, valid: bool) -> None:
        """Which tokens take part: the keys of a mask with firsts ≤ j < stops."""
        a, mask, queries = self.layout, options.get("mask"), options.get("query_mask")
        if mask is not None and mask.ndim > 1:
            mask = mask[..., 0, :]
        firsts = None if mask is None else first_true(mask, a.keys)
        lengths = options.get("key_lengths")
        stops = pointwise.lengths_as_read(lengths, a.keys) if is_array(lengths) else None
        if queries is not None and not valid:
            xp = array_api_compat.array_namespace(queries)
            end = a.queries - first_true(queries[..., ::-1], a.queries)  # after the last unmasked query
            end = xp.where(end > 0, end + self.plan.shift if self.plan.causal else a.keys, 0)
            stops = xp.asarray(end if stops is None else xp.minimum(stops, end))  # not a NumPy scalar
        if mask is not None:
            self.view_as("key_mask", mask, a.leading, a.keys)
        for name, what, x in (("query_mask", "rows", queries), ("firsts", "heads", firsts), ("stops", "heads", stops)):
            if x is not None:
                self.view(name, what, x)

    # ------------------------------------------------------------------------------------------ launches

    @property
    def tiles(self) -> Tiles:
        tiles = tiles_of("linear", self.compute, width_of(self.layout.d, self.layout.e))
        return fitting("linear", tuple(x._replace(stages=1) for x in tiles), shared_bytes, self.device.shared_bytes)

    def launch(self, kernel: str, blocks: int, *flags: bool) -> Launch:
        """A kernel on tiles."""
        tiles = self.tiles
        template = (str(tiles), f"attnkit::{FEATURE_MAPS[self.feature_map]}", *(str(flag).lower() for flag in flags))
        template = (*template, *self.packed)
        return Launch(kernel, template, blocks, tiles.threads, shared_bytes(tiles), self.arguments, SOURCE)

    def by_queries(self, kernel: str) -> Launch:
        blocks = self.layout.blocks(self.arguments.query_positions, self.tiles.rows)
        return self.launch(kernel, blocks * self.layout.heads * self.layout.items)

    def by_keys(self, kernel: str) -> Launch:
        blocks = self.layout.blocks(self.arguments.key_positions, self.tiles.rows)
        return self.launch(kernel, blocks * self.layout.kv_heads * self.layout.items)

    def states(self, of_queries: bool, initial: State | None = None, final: State | None = None) -> list[Launch]:
        """The launches for the initial sums of the segments; none for a single ordered segment that starts from 0."""
        a, s = self.layout, self.arguments
        positions = s.query_positions if of_queries else s.key_positions
        segments = a.blocks(positions, s.segment)
        if s.causal and segments == 1 and initial is None and final is None:
            return []
        kv_heads, size = (a.heads if of_queries else a.heads // s.members), a.d * a.e + a.d
        room = self.device.empty((a.items, kv_heads, segments, size), self.compute)
        self.view_as("queried" if of_queries else "keyed", room, (a.items, kv_heads), segments, size)
        across = blocks_of(a.d, self.tiles.rows) * segments
        sums = self.launch("linear_sums", across * kv_heads * a.items, of_queries)
        template = (NUMBERS[self.compute], str(NUMBERS_OF_A_BLOCK), str(of_queries).lower(), *self.packed)
        blocks = a.blocks(positions, OPEN) * blocks_of(size, NUMBERS_OF_A_BLOCK) * kv_heads * a.items
        started = self.with_states(initial, final)
        return [sums, Launch("linear_running", template, blocks, NUMBERS_OF_A_BLOCK, 0, started, SOURCE)]

    def with_states(self, initial: State | None, final: State | None) -> Linear:
        """The arguments with views of the initial and final sums; other launches lack these views."""
        a, plain = self.layout, self.arguments
        self.arguments = Linear.from_buffer_copy(plain)
        if initial is not None:
            self.view_as("initial_S", initial[0], a.shared, a.d, a.e)
            self.view_as("initial_z", initial[1], a.shared, a.d)
        if final is not None:
            self.view_as("final_S", final[0], a.leading, a.d, a.e)
            self.view_as("final_z", final[1], a.leading, a.d)
        arguments, self.arguments = self.arguments, plain
        return arguments

    def rows(self) -> list[Launch]:
        """The launches for 1/den and γ, if there is a denominator."""
        a = self.layout
        if not (self.arguments.normalize and a.queries):
            return []
        for name in ("inverses", "slopes"):
            self.view(name, "rows", self.device.empty(a.shape_of("rows"), self.compute))
        return [self.by_queries("linear_rows")]


def shared_bytes(tiles: Tiles) -> int:
    """The size of `LinearShared<Tiles>` of linear.cuh."""
    numbers = (tiles.rows + 2 * tiles.columns) * (tiles.width + 1) + tiles.rows * (tiles.columns + 1)
    numbers += tiles.rows + tiles.columns
    return -(-numbers * (8 if tiles.number == "double" else 4) // 16) * 16


def first_true(x: Array, n: int) -> Array:
    """The index of the first True along the last axis, n if there is none."""
    xp = array_api_compat.array_namespace(x)
    if not n:
        return xp.zeros(x.shape[:-1], dtype=xp.int64)
    x = xp.broadcast_to(x, (*x.shape[:-1], n))
    return xp.asarray(xp.where(xp.any(x, axis=-1), xp.argmax(xp.astype(x, xp.uint8), axis=-1), n), dtype=xp.int64)


# ---------------------------------------------------------------------------------------------- what a library calls


def forward(
    device: Device, q: Array, k: Array, v: Array, *, initial_state: State | None = None, return_state: bool = False,
    **options: Option,
) -> Array | tuple[Array, State]:  # fmt: skip
    """o (..., L, e), or with `return_state` (o, (S (..., d, e), z (..., d)))."""
    o = device.empty(layout_of(q, k, v, options).shape_of("o"), q.dtype)
    if o.size:
        call = Call(device, q, k, v, **options)
        call.arguments.stateful = initial_state is not None
        call.view("o", "o", o)
        for launch in (*call.states(False, initial_state), call.by_queries("linear_forward")):
            device.run(launch)
    return (o, final_state(device, k, v, initial_state, options)) if return_state else o


def final_state(device: Device, k: Array, v: Array, initial: State | None, options: Keywords) -> State:
    """The state after the initial one and all keys that `mask` and `key_lengths` allow."""
    leading = state_axes(LINEAR.name, k, v, initial, options)
    xp = array_api_compat.array_namespace(k)
    k, v = (xp.broadcast_to(x, (*leading, *x.shape[-2:])) for x in (k, v))
    alone = {name: options.get(name) for name in ("mask", "key_lengths", "feature_map") if name in options}
    call = Call(device, k[..., :0, :], k, v, valid=True, **alone)
    final = tuple(
        device.empty((*leading, *size), call.compute) for size in ((call.layout.d, call.layout.e), (call.layout.d,))
    )
    if final[0].size:
        for launch in call.states(False, initial, (final[0], final[1])):
            device.run(launch)
    return final[0], final[1]


def backward(
    device: Device, q: Array, k: Array, v: Array, do: Array | None,
    dstate: tuple[Array | None, Array | None] | None = None, *, initial_state: State | None = None, **options: object,
) -> Keywords:  # fmt: skip
    """Gradients {"q", "k", "v"} and, if one was passed, "initial_state"; do, dstate and its parts (dS, dz) may be None:
    0.
    """
    like = {"q": q, "k": k, "v": v}
    dstate = None if dstate is None or all(x is None for x in dstate) else dstate
    call = Call(device, q, k, v, valid=dstate is not None, **options)
    a = call.layout
    sizes = (a.d, a.e), (a.d,)
    call.arguments.stateful = initial_state is not None
    call.view("o", "o", zeros(device, a.shape_of("o"), q.dtype) if do is None else do)
    of_state: State | None = None
    if dstate is not None:
        parts = (
            zeros(device, (*a.shared, *size), call.compute) if x is None else x
            for x, size in zip(dstate, sizes, strict=True)
        )
        dS, dz = (placed(x, len(size), a.shared) for x, size in zip(parts, sizes, strict=True))
        of_state = (dS, dz)
    grads = gradients_of(call, like)
    initial_grads: State | None = None
    if initial_state is not None:
        S, z = (device.empty((*a.leading, *size), call.compute) for size in sizes)
        initial_grads = (S, z)
    launches = [*call.states(False, initial_state), *call.rows()]
    launches += [call.by_queries("linear_gradient_of_queries")] if a.queries else []
    launches += call.states(True, of_state, initial_grads)
    if a.keys:
        launches += [call.by_keys("linear_gradient_of_keys"), call.by_keys("linear_gradient_of_values")]
    if math.prod(a.leading):
        for launch in launches:
            device.run(launch)
    result: Keywords = {name: reduced_to(grad, like[name]) for name, grad in grads.items()}
    if initial_state is not None and initial_grads is not None:
        tails = zip(initial_grads, initial_state, (2, 1), strict=True)
        result["initial_state"] = tuple(reduced_to(of_groups(grad, a, tail), x) for grad, x, tail in tails)
    return result


def of_groups(x: Array, a: Layout, tail: int) -> Array:
    """x of query heads summed over those that share a head of k; a state has `tail` axes of its own."""
    if a.groups == 1:
        return x
    lead = x.shape[: x.ndim - tail - 1]
    return x.reshape(*lead, -1, a.groups, *x.shape[x.ndim - tail :]).sum(axis=-1 - tail)


def placed(x: Array, tail: int, leading: tuple[int, ...]) -> Array:
    """x (..., `tail` axes) with these leading axes: at index 0 of the axes that it broadcasts along, 0 elsewhere."""
    xp = array_api_compat.array_namespace(x)
    width, own = x.shape[x.ndim - tail :], tuple(x.shape[: x.ndim - tail])
    own = (1,) * (len(leading) - len(own)) + own
    if own == leading:
        return x.reshape(*leading, *width)
    out = xp.zeros((*leading, *width), dtype=x.dtype)
    out[tuple(slice(0, n) for n in own)] = x.reshape(*own, *width)
    return out
