"""The plan of a checked call: everything that kernels derive from shapes and plain options.

`signature` is what a plan depends on; `plan` derives sizes and heads, the keys that a query sees, the numbers of its
weights, and the shapes of gradients. No array is read, so a plan can be cached by its signature. Views of arrays, which
also depend on strides, are in `attnkit.kernels.strides`.
"""

import math
from functools import lru_cache
from numbers import Number
from typing import NamedTuple, TypeGuard

from attnkit._core.check import broadcast
from attnkit._core.dropout import last_kept
from attnkit._core.mask import raise_to
from attnkit._core.quadratic import leading_shape
from attnkit._core.typing import Array, Bindings, Causal, OfLibrary

Shape = tuple[int, ...]
Window = tuple[int | None, int | None]
ROW_OPTIONS = ("mask", "query_mask", "key_lengths", "length")
"""Options that, as arrays, make n_i differ between items or heads."""
UNALIGNED = "an array is not aligned to its elements"
"""Why kernels, which load whole elements, refuse a call."""


class Signature(NamedTuple):
    """What the plan of a call depends on. Hashable, unless a size is a symbol while torch traces."""

    q: Shape
    k: Shape
    v: Shape | None = None  # None for statistics without an output
    bias: Shape | None = None
    arrays: tuple[str, ...] = ()  # the options in `ROW_OPTIONS` that are arrays
    causal: Causal = False
    window: Window | None = None
    key_lengths: int | None = None
    enable_gqa: bool = False
    scale: float | None = None
    alpha: float = 1.0
    gain: float = 1.0
    length: str | float = "visible"
    shift: float | str = 0.0
    dropout: float = 0.0  # the probability p
    sequences: int | None = None  # number of packed sequences, None if the call is not packed


OF_KEYS = ("k", "v", "columns")
"""Arrays with the heads of k and v."""


def blocks_of(tokens: int, size: int) -> int:
    return -(-tokens // size)


class Layout(NamedTuple):
    """Sizes: every array is read as (items, heads, tokens, features)."""

    leading: Shape  # leading axes of the output
    shared: Shape  # of k and v, with their own heads
    items: int
    heads: int
    groups: int  # query heads that share a head of k and v
    queries: int
    keys: int
    d: int
    e: int
    sequences: int  # number of packed sequences, 0 if the call is not packed

    @property
    def kv_heads(self) -> int:
        return self.heads // self.groups

    def shape_of(self, what: str) -> Shape:
        """The shape of q, k, v or o, of "pairs" (..., L, S), "rows" (..., L), "columns" (..., S) or "heads" (...) once
        nothing is broadcast."""
        tail = {
            "q": (self.queries, self.d),
            "k": (self.keys, self.d),
            "v": (self.keys, self.e),
            "o": (self.queries, self.e),
            "pairs": (self.queries, self.keys),
            "rows": (self.queries,),
            "columns": (self.keys,),
            "heads": (),
        }[what]
        return (*(self.shared if what in OF_KEYS else self.leading), *tail)

    def blocks(self, tokens: int, size: int) -> int:
        """The number of blocks for the tokens of a head; a packed sequence may need one more than its share."""
        return blocks_of(tokens, size) + self.sequences

    def bias_shape(self, bias: Shape) -> Shape:
        """(items, heads, L, S) of the gradient of a bias as kernels write it: 1 for shared axes."""
        items = 1 if all(size == 1 for size in bias[:-3]) else self.items
        heads = 1 if len(bias) < 3 or bias[-3] == 1 else self.heads
        return items, heads, self.queries, self.keys


class Limits(NamedTuple):
    """Query i sees the keys j < keys with i - left <= j <= i + right; None = no bound.

    `before` and `after` are such bounds too, for packed sequences aligned at their last tokens.
    """

    left: int | None
    right: int | None
    keys: int
    before: int | None = None
    after: int | None = None


class Numbers(NamedTuple):
    """w = gain·n^-alpha·h(scale·q·k + bias + shift), with log n subtracted from the argument if `log_length`.

    What is the same for all queries is folded into gain and shift: alpha is then 0 and log_length False.
    """

    scale: float
    shift: float
    gain: float  # includes 1/(1 - p) of dropout
    alpha: float
    log_length: bool
    drops: bool  # by counter
    last_kept: int  # the largest word of the counter that keeps a pair; 0 without dropout

    @property
    def rows(self) -> tuple[bool, bool]:
        """Whether n^-alpha and log n are needed per query."""
        return self.alpha != 0.0, self.log_length


class Plan(NamedTuple):
    layout: Layout
    limits: Limits
    numbers: Numbers
    dbias: Shape | None  # `Layout.bias_shape` of the bias
    by_position: bool  # n_i depends only on the position of a query, not on its item or head


# ---------------------------------------------------------------------------------------------- from a call to a plan


def signature(q: Array, k: Array, v: Array | None, options: Bindings, sequences: int | None = None) -> Signature:
    """The signature of a call with the options of pointwise_attention."""
    arguments = {name: x for name, x in options.items() if x is not None}
    arrays = tuple(name for name in ROW_OPTIONS if is_array(arguments.get(name)))
    plain = {name: arguments[name] for name in PLAIN if name in arguments and name not in arrays}
    of_v, of_bias = (None if x is None else tuple(x.shape) for x in (v, arguments.get("bias")))
    p = arguments.get("dropout", (0.0, None))[0]
    return Signature(tuple(q.shape), tuple(k.shape), of_v, of_bias, arrays, **plain, dropout=p, sequences=sequences)


PLAIN = tuple(name for name in Signature._fields[5:] if name not in ("dropout", "sequences"))


def is_array(x: object) -> TypeGuard[OfLibrary]:
    """Whether an option is an array; NumPy's scalars are numbers."""
    return hasattr(x, "shape") and not isinstance(x, Number)


def plan(s: Signature) -> Plan:
    a = layout(s.q, s.k, s.v, s.enable_gqa, s.sequences or 0)
    packed = s.sequences is not None
    visible = limits(a.queries, a.keys, s.causal, s.window, s.key_lengths, packed)
    dbias = None if s.bias is None else a.bias_shape(s.bias)
    return Plan(a, visible, numbers(s, a, visible), dbias, not s.arrays)


cached_plan = lru_cache(maxsize=4096)(plan)
"""`plan`, for calls that are not traced."""


def layout(q: Shape, k: Shape, v: Shape | None, enable_gqa: bool = False, sequences: int = 0) -> Layout:
    """Heads are the last of the leading axes."""
    leading = leading_shape(q, k, v, enable_gqa)
    heads = leading[-1] if leading else 1
    groups = max(1, heads // max(1, k[-3])) if enable_gqa else 1
    shared = (*leading[:-1], heads // groups) if leading else ()
    sizes = (q[-2], k[-2], q[-1], (q if v is None else v)[-1])
    return Layout(leading, shared, math.prod(leading[:-1]), heads, groups, *sizes, sequences)


def limits(
    queries: int,
    keys: int,
    causal: Causal = False,
    window: Window | None = None,
    key_lengths: int | None = None,
    packed: bool = False,
) -> Limits:
    """Causality, windows and lengths that are the same for all items."""
    if packed:
        before, after = bounds(0, causal is True, window)
        return Limits(None, 0 if causal == "upper_left" else None, keys, before, after)
    left, right = bounds(keys - queries, causal, window)
    return Limits(left, right, keys if key_lengths is None else min(keys, int(key_lengths)))


def bounds(offset: int, causal: Causal, window: Window | None) -> Window:
    """left and right of `Limits`; offset = S - L aligns the last query with the last key."""
    if window is None and causal is False:
        return None, None
    before, after = window or (None, None)
    left = None if before is None else int(before) - offset
    reaches = [offset] if causal is True else [0] if causal == "upper_left" else []
    reaches += [] if after is None else [offset + int(after)]
    return left, min(reaches, default=None)


def numbers(s: Signature, a: Layout, visible: Limits) -> Numbers:
    """Scale, gain, alpha and shift, and the counter of dropout."""
    gain, alpha, shift = s.gain, s.alpha, s.shift
    n = same_length(s, a, visible)
    if n is not None:
        gain, alpha = gain * raise_to(n, -alpha), 0.0
        shift = -math.log(n) if isinstance(shift, str) else shift
    gain = gain / (1.0 - s.dropout)
    scale = 1.0 / math.sqrt(a.d) if s.scale is None else float(s.scale)
    offset = 0.0 if isinstance(shift, str) else float(shift)
    drops = s.dropout > 0
    word = last_kept(s.dropout) if drops else 0
    return Numbers(scale, offset, float(gain), float(alpha), isinstance(shift, str), drops, word)


def same_length(s: Signature, a: Layout, visible: Limits) -> float | None:
    """The divisor n if it is known and the same for all queries, else None."""
    if "length" in s.arrays:
        return None
    if not isinstance(s.length, str):
        return float(s.length)
    if s.sequences is not None:
        return None
    if s.length == "all":
        return max(a.keys, 1)
    alike = visible.left is None and visible.right is None and not s.arrays
    return max(visible.keys, 1) if alike else None


def summed_axes(grad: Shape, like: Shape) -> tuple[int, ...]:
    """The axes of a gradient along which its argument was broadcast; after the sum they have size 1 or are dropped."""
    padded = (1,) * (len(grad) - len(like)) + tuple(like)
    return tuple(n for n, (have, want) in enumerate(zip(grad, padded, strict=True)) if have != want)


# ---------------------------------------------------------------------------------------------- weights that sum to 1

EXACT = {1.0: "softmax", 1.5: "entmax15", 2.0: "sparsemax"}


class Normaliser(NamedTuple):
    """How a row of scores becomes weights that sum to 1."""

    name: str
    above: float | None  # α - 1, None for softmax

    def numbers(self, n: Numbers) -> tuple[float | None, ...]:
        """The tuple `numbers` of `attnkit.kernels.triton.rows`."""
        return n.scale, n.gain, self.above, None if self.above is None else 1.0 / self.above


def normaliser(alpha: float) -> Normaliser:
    """That of entmax with this α, softmax for α = 1."""
    return Normaliser(EXACT.get(alpha, "entmax"), None if alpha == 1.0 else alpha - 1.0)


def newton_steps(keys: int) -> int:
    """A sufficient number of steps to the threshold of a row."""
    return 12 + max(keys, 1).bit_length()


# ---------------------------------------------------------------------------------------------- linear attention


class Linear(NamedTuple):
    """A call of linear attention: some query sees the keys j < stop, query i those of them with j <= i + shift if it is
    causal. States are of the keys j < valid, seen or not.
    """

    layout: Layout
    causal: bool
    shift: int
    stop: int
    valid: int
    members: int  # query heads that share a state: all of a group, unless each has masks of its own
    normalize: bool
    scale: float
    eps: float

    @property
    def num_states(self) -> int:
        """The number of states per item."""
        return self.layout.heads // self.members

    @property
    def state_leading(self) -> Shape:
        """Leading axes of states."""
        return (*self.layout.leading[:-1], self.num_states) if self.layout.leading else ()

    @property
    def positions(self) -> tuple[int, int]:
        """The range of positions: keys are at j, queries at i + shift."""
        return min(0, self.shift), max(self.layout.keys, self.layout.queries + self.shift)


def linear_plan(q: Array, k: Array, v: Array, options: Bindings, sequences: int | None = None) -> Linear:
    """The plan of a call of linear_attention."""
    arguments = {name: x for name, x in options.items() if x is not None}
    groups = bool(arguments.get("enable_gqa", False))
    a = layout(tuple(q.shape), tuple(k.shape), tuple(v.shape), groups, sequences or 0)
    causal, lengths = arguments.get("causal", False), arguments.get("key_lengths")
    shift = a.keys - a.queries if causal is True and sequences is None else 0
    valid = a.keys if lengths is None or is_array(lengths) else min(a.keys, int(lengths))
    stop = min(valid, a.queries + shift if causal else valid if a.queries else 0)
    own = any(len(shape) > 0 and shape[-1] > 1 for shape in _leading_of_masks(arguments))
    divides = arguments.get("normalize", arguments.get("feature_map") != "identity")
    scale, eps = float(arguments.get("scale", 1.0)), float(arguments.get("eps", 1e-6))
    return Linear(a, bool(causal), shift, stop, valid, 1 if own else a.groups, divides, scale, eps)


def _leading_of_masks(arguments: Bindings) -> list[Shape]:
    axes = (("mask", 2), ("key_lengths", 0), ("query_mask", 1))
    arrays = ((arguments[name], tail) for name, tail in axes if is_array(arguments.get(name)))
    return [tuple(x.shape[: max(0, x.ndim - tail)]) for x, tail in arrays]


def state_axes(op: str, k: Array, v: Array, initial: tuple[Array, Array] | None, options: Bindings) -> Shape:
    """The leading axes of the state that a call of `op`, a linear one, returns."""
    masks = {name: options.get(name) for name in ("mask", "key_lengths")}
    shapes = [x.shape[:-2] for x in (k, v)] + _leading_of_masks(masks)
    shapes += [] if initial is None else [initial[0].shape[:-2], initial[1].shape[:-1]]
    return broadcast(op, "leading axes of states", *map(tuple, shapes))
