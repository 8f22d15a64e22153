"""Calls of linear attention by Triton kernels, on arrays of any library: masks and lengths, segments, and tiles.

Memory, views and launches are those of a backend.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from attnkit._core.activations import lacking
from attnkit._core.typing import Array, Keywords, Namespace, OfLibrary, OfTriton, Option
from attnkit.kernels.plan import Layout, Linear, blocks_of, is_array, layout, linear_plan

PROGRAMS = 512  # per launch: heads are divided into segments until there are as many
ENOUGH = 200  # causal heads in one pass: an A100 runs 216 programs at once, an H100 264; another costs a third
FEWEST = 4  # chunks per segment
DEFAULT_MAP = "elu_plus_one"
SUMS = ("key_sums", "query_sums")
SWEEPS = ("sweep_queries", "sweep_keys")
GATES = "gradient_gates"
ELEMENTS = 1024  # of a state per program of `running`
Packed = tuple[OfLibrary, OfLibrary, OfLibrary, int, int | None] | None
"""The tuple `packed` of `attnkit.kernels.triton.linear`."""


# ---------------------------------------------------------------------------------------------- a call


class Setting(NamedTuple):
    """A call as the kernels take it: its plan, and the arrays of masks and lengths."""

    plan: Linear
    feature_map: str
    key_mask: OfLibrary  # (..., S)
    firsts: OfLibrary  # (...): visible keys lie in firsts <= j < stops
    stops: OfLibrary  # (...)
    query_mask: OfLibrary  # (..., L)
    valid_stops: OfLibrary  # (...): stops of the keys in a state, visible or not
    stateful: bool  # there is an initial state
    packed: Packed = None
    floor: bool = False  # the sum of a row counts as at least 0 in the denominator
    # of what fades, for causal calls: (high, low), which never fall, low None if it is 0
    levels: Sequence[OfLibrary] | None = None  # (..., S)
    products: str = ""  # the dtype whose products are used, that of q and k if it is not given
    apart: bool = False  # segments are as short as they can be

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
        return alone._replace(plan=plan, query_mask=None, stateful=False, products="float32")

    def sums_state(self, leading: tuple[int, ...]) -> bool:
        """Whether every query sees all keys of a state with these leading axes, so that its sums serve both."""
        own = self.a.items * self.plan.num_states
        return not self.plan.causal and self.query_mask is None and self.packed is None and math.prod(leading) == own

    def of_gates(self) -> "Setting":
        """The same for gradients of the gates of a decay, which need the states beside every chunk in float32."""
        return self._replace(products="float32", apart=True)

    def of_gradients(self, values: str) -> "Setting":
        """The same for gradients, where v and do have the dtype `values`.

        Products of half types have operands in bfloat16 or, of float16, in TF32 where sweeps serve the call. With an
        initial state and a floor the gradient of z was 1.05 bounds off in bfloat16 where all keys point away from a
        query (0.38 in float32).
        """
        from attnkit.kernels.triton import sizes

        fits = max(self.a.d, self.a.e) <= sizes.WIDEST_SWEEP
        served = values != "float32" and fits and not (self.stateful and self.floor)
        return self._replace(products=values if served else "float32")

    @property
    def sweeps(self) -> bool:
        """Whether gradients are those of `attnkit.kernels.triton.linear_sweeps`."""
        return self.products not in ("", "float32")

    @property
    def limits(self) -> tuple[int, ...]:
        return self.a.queries, self.a.keys, self.plan.stop, self.plan.shift

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.a.heads, self.a.groups, self.plan.members


def setting(
    xp: Namespace,
    q: Array,
    k: Array,
    v: Array,
    *,
    feature_map: str = DEFAULT_MAP,
    mask: OfLibrary = None,
    key_lengths: OfLibrary = None,
    query_mask: OfLibrary = None,
    initial_S: Array | None = None,
    floor: bool = False,
    packed: Packed = None,
    **others: Option,
) -> Setting:
    """The options of linear_attention but its decay, and `floor`; in packed sequences causality counts within each."""
    seeing = {"mask": mask, "key_lengths": key_lengths, "query_mask": query_mask}
    plan = linear_plan(q, k, v, {**others, **seeing, "feature_map": feature_map}, packed[3] if packed else None)
    a, valid = plan.layout, key_lengths if is_array(key_lengths) else None
    key_mask, stops = mask[..., 0, :] if mask is not None and mask.ndim > 1 else mask, valid
    firsts = None if key_mask is None else first_true(xp, key_mask, a.keys)
    if query_mask is not None:
        end = a.queries - first_true(xp, xp.flip(query_mask, axis=-1), a.queries)  # after the last unmasked query
        end = xp.where(end > 0, end + plan.shift if plan.causal else a.keys, 0)
        stops = end if valid is None else xp.minimum(valid, end)
    stateful = initial_S is not None
    return Setting(plan, feature_map, key_mask, firsts, stops, query_mask, valid, stateful, packed, floor)


def first_true(xp: Namespace, x: Array, n: int) -> Array:
    """The index of the first True along the last axis, which is broadcast to n; n if there is none."""
    x = xp.astype(xp.broadcast_to(x, (*x.shape[:-1], n)), xp.int32)
    if not n:
        return xp.sum(x, axis=-1)
    return xp.where(xp.max(x, axis=-1) > 0, xp.argmax(x, axis=-1), n)


# ---------------------------------------------------------------------------------------------- launches


class Span(NamedTuple):
    """Segments of `size` positions from `start` to `end`; packed sequences have separate segments."""

    segments: int
    size: int
    start: int
    end: int
    packed: Packed

    @property
    def numbers(self) -> tuple[object, ...]:
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
    segments = units if s.apart else max(1, min(wanted, units // FEWEST))
    size = blocks_of(units, segments)
    return Span(blocks_of(units, size) + s.a.sequences, size * UNIT, start, end, s.packed)


def constants(name: str, s: Setting, dtype: str, by_values: bool, capability: int) -> Keywords:
    """The compile-time arguments of a kernel of that name; `by_values`: its columns are those of v."""
    from attnkit.kernels.triton import sizes
    from attnkit.kernels.triton.features import FEATURE_MAPS, HALF_FEATURE_MAPS, PRODUCTS, SLOPES_OF_FEATURES

    D, E = sizes.padded(s.a.d), sizes.padded(s.a.e)
    dtype = s.products or dtype
    phi, slope = (FEATURE_MAPS if dtype == "float32" else HALF_FEATURE_MAPS)[s.feature_map]
    values = {"PHI": phi, "SLOPE": slope, "CAUSAL": s.plan.causal, "NORMALIZE": s.plan.normalize, "FLOOR": s.floor}
    values |= {"d": s.a.d, "e": s.a.e, "D": D, "E": E}
    values |= {"SLOPE_OF": SLOPES_OF_FEATURES[s.feature_map], "TWICE": s.sweeps}
    values |= dict(zip(("OPERAND", "PRECISION"), PRODUCTS[dtype], strict=True))
    kind = "sums" if name in SUMS else name if name in (*SWEEPS, GATES) else "columns"
    if name == "query_sums" and s.sweeps and s.stateful:
        kind = "exact_sums"
        values["PRECISION"] = PRODUCTS["float32"][1]  # of operands in bfloat16 the kernel has three
    contracted, produced = (max(D, E) if name in SWEEPS else D, E) if by_values else (E, D)
    tile = sizes.linear(kind, dtype, capability, contracted, produced)
    values |= {"CHUNK": tile.CHUNK, "BLOCK": tile.BLOCK, "FEATURES": tile.BLOCK}
    values = {key: value for key, value in values.items() if key in kernel_of(name).arg_names}
    return values | {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def kernel_of(name: str) -> OfTriton:
    """The kernel of that name."""
    from attnkit.kernels.triton import linear, linear_sweeps

    return getattr(linear_sweeps if name in SWEEPS else linear, name)


class Parts(NamedTuple):
    """How the programs of a launch are divided: its segments, and blocks of columns per head."""

    span: Span
    blocks: int
    programs: int


def parts(s: Setting, tokens: int, block: int | None, by_values: bool, by_states: bool) -> Parts:
    """One program per block of columns, segment, head and item.

    `by_values`: the columns are those of v, else those of k; all are one block without its size. `by_states`: heads
    are those that have a state.
    """
    steps = span(s, tokens)
    blocks = 1 if block is None else blocks_of(s.a.e if by_values else s.a.d, block)
    heads = s.plan.num_states if by_states else s.a.heads
    return Parts(steps, blocks, blocks * steps.segments * heads * s.a.items)


class Passes(NamedTuple):
    """Whether the states of segments are summed, and whether their running sums follow; neither for one ordered
    segment that starts from 0."""

    sums: bool
    running: bool


def passes(s: Setting, steps: Span, initial: bool, final: bool) -> Passes:
    """`initial`: the sums start from a state; `final`: the whole sum is wanted."""
    alone = s.plan.causal and steps.segments == 1 and not final  # the sums of the only segment are not needed
    return Passes(not alone, steps.segments > 1 or initial or final)


def running(s: Setting, steps: Span, reverse: bool) -> tuple[Keywords, int, int]:
    """Compile-time arguments of the kernel of that name, its blocks of a state, and its programs."""
    size = s.a.d * s.a.e + s.a.d
    blocks = blocks_of(size, ELEMENTS)
    flags = {"CAUSAL": s.plan.causal, "REVERSE": reverse, "BLOCK": ELEMENTS, "d": s.a.d, "e": s.a.e}
    return flags, blocks, blocks * s.a.items * s.plan.num_states * max(1, s.a.sequences)


# ---------------------------------------------------------------------------------------------- what is supported


def unsupported_map(feature_map: str) -> str | None:
    """Why the kernels do not have a feature map, or None."""
    from attnkit.kernels.triton.features import FEATURE_MAPS  # needs triton

    return lacking("triton", FEATURE_MAPS, feature_map, "feature map")


# what the table has does not change while torch.compile traces
unsupported_map._dynamo_marked_constant = True  # type: ignore[attr-defined]


def unsupported_options(q: Array, k: Array, v: Array, *rest: object, **options: Option) -> str | None:
    """Why the kernels do not support a call on any device."""
    mask = options.get("mask")
    if callable(options.get("feature_map")):
        return "a feature map of your own is served by the generic implementation"
    if mask is not None and mask.ndim > 1 and mask.shape[-2] != 1:
        return "a mask of pairs is served by the generic implementation"
    if not v.shape[-1]:
        return "values without features are served by the generic implementation"
    return unsupported_map(options.get("feature_map", DEFAULT_MAP))


def units(q: Array, k: Array) -> int:
    """Tokens of all heads."""
    return max(math.prod(q.shape[:-1]), math.prod(k.shape[:-1]))


def kind(op: str, options: Keywords) -> str:
    """Of the calls that are predicted: causal ones of linear attention apart."""
    return f"{op}, causal" if op == "linear" and options.get("causal") else op
