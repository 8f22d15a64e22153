"""Argument checks, done once before an implementation is chosen; every error message is built here.

A message names the op and the argument, the value received and the value expected. Wrong shapes and values raise
ValueError; wrong libraries, dtypes and devices raise TypeError. The contents of arrays are not validated, because
reading them would synchronise a GPU or stop a tracer: `length` arrays must be positive and biases finite, but nothing
checks it.
"""

import difflib
import math
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple, NoReturn, TypeGuard

from attnkit._core.activations import ACTIVATIONS
from attnkit._core.integers import in_library, in_range
from attnkit._core.library import PLACELESS, beside, library, peculiar
from attnkit._core.special import is_key
from attnkit._core.typing import LEARNED, Array, Arrays, DType, Keywords, OfLibrary

# A7: these may have a different dtype
FREE_DTYPE = frozenset(
    (
        *("dlse", "dr", "q_weight", "k_weight", "proj_k", "proj_v", "kernel", "norm_weight", "projection"),
        *("log_gate", "log_gate_t", "beta", "beta_t"),
        *("rotations", "w_z", "w_u", "w_v", "w_o", "gamma_q", "beta_q", "gamma_k", "beta_k"),
    )
)
INTEGER_ARGUMENTS = ("cu_seqlens_q", "cu_seqlens_k")  # the op's context checks them
FLOATS = ("float16", "bfloat16", "float32", "float64")
SERVED = "NumPy, torch, JAX, CuPy or array_api_strict"
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

Shape = tuple[int, ...]


class Context(NamedTuple):
    """What the check of an option needs to know about the call."""

    op: str
    first: Array  # q (..., L, d), or what the op has in its place
    leading: Shape
    queries: int
    keys: int
    options: Keywords
    first_name: str = "q"


def dtype_name(x: Array) -> str:
    """The dtype as "float32", "bfloat16", ...: by name, since some libraries have no finfo or isdtype for bfloat16."""
    dtype = x.dtype
    return spelt(dtype) if hasattr(dtype, "kind") else str(dtype).rpartition(".")[2]


@cache
def spelt(dtype: DType) -> str:
    """The same, of a dtype of NumPy or JAX: NumPy spells it anew each time, for which it takes as long as a plan. Not
    for torch.compile, which warns about caches."""
    return str(dtype).rpartition(".")[2]


def is_array(x: object) -> TypeGuard[Array]:
    # numbers first: torch.compile(dynamic=True) turns them into symbols without attributes
    return not isinstance(x, (int, float)) and hasattr(x, "shape") and hasattr(x, "dtype")


def device_of(x: Array) -> object:
    """The device where it matters and can be read; JAX places its arrays itself."""
    return beside(x).get("device")


# ---------------------------------------------------------------------------------------------- error texts


def _hint(value: object, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def refuse_name(op: str, argument: str, value: object, known: Iterable[str], where: str = "") -> NoReturn:
    """Raise ValueError for an unknown name and suggest the closest known one."""
    known = tuple(known)
    where = f" {where}" if where else ""
    names = ", ".join(map(repr, known))
    raise ValueError(f"{op}: {argument} must be one of {names}{where}; got {value!r}{_hint(value, known)}")


def _refuse_option(op: str, name: str, accepted: tuple[str, ...]) -> NoReturn:
    names = ", ".join(accepted)
    raise ValueError(f"{op}: unexpected argument {name!r}; expected some of {names}{_hint(name, accepted)}")


def known_options(op: str, options: Iterable[str], accepted: tuple[str, ...]) -> None:
    for name in options:
        if name not in accepted:
            _refuse_option(op, name, accepted)


def shown(value: object) -> str:
    """The value as a message shows it; Python does not print an integer of thousands of digits."""
    try:
        text = repr(value)
    except ValueError:
        return f"{type(value).__name__} with more digits than Python prints"
    return text if len(text) <= 80 else f"{text[:40]}… of {len(text)} characters"


def wrong_shape(op: str, name: str, x: Array, expected: str) -> NoReturn:
    raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}; expected {expected}")


def wrong_dtype(op: str, name: str, x: Array, expected: str) -> NoReturn:
    dtype = dtype_name(x)
    order = ", in the byte order of other machines" if dtype[0] in "<>" else ""
    raise TypeError(f"{op}: {name} has dtype {dtype}{order}; expected {expected}")


# ---------------------------------------------------------------------------------------------- the arrays


def array(op: str, name: str, x: object) -> None:
    """x must be an array of a supported library, with a number at every place and nothing besides."""
    _plain(op, _home(op, name, x), [(name, x)])


def _home(op: str, name: str, x: object) -> str:
    """The library of which x must be an array."""
    home = library(x)
    if home is None:
        kind = type(x)
        came = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        raise TypeError(f"{op}: {name} must be an array of {SERVED}; got {'None' if x is None else came}")
    return home


def _plain(op: str, home: str, arrays: Sequence[tuple[str, object]]) -> None:
    """These arrays of a library must have a number at every place and nothing besides."""
    if (found := peculiar(arrays, home)) is not None:
        name, why = found
        raise TypeError(f"{op}: {name} is {why}")


def same_home(op: str, first_name: str, first: Array, name: str, x: Array) -> None:
    """x must live in the same library and on the same device as the first array."""
    array(op, name, x)
    if type(x) is not type(first) and library(x) != library(first):
        pair = f"{library(x)} {name} with {library(first)} {first_name}"
        raise TypeError(f"{op}: all arrays must come from one library; got {pair}")
    if device_of(x) != device_of(first):
        pair = f"{name} on {device_of(x)} with {first_name} on {device_of(first)}"
        raise TypeError(f"{op}: all arrays must be on one device; got {pair}")


def float_array(op: str, name: str, x: Array) -> None:
    array(op, name, x)
    _of_floats(op, name, x)


def _of_floats(op: str, name: str, x: Array) -> None:
    if dtype_name(x) not in FLOATS:
        wrong_dtype(op, name, x, f"one of {', '.join(FLOATS)}")


def fits(own: Shape, shape: Shape) -> bool:
    """Whether a shape broadcasts to another without enlarging it. torch.compile finds no symbol `in` a tuple."""
    own_axes = shape[len(shape) - len(own) :]
    return len(own) <= len(shape) and all(a == 1 or a == b for a, b in zip(own, own_axes, strict=True))


def boolean_array(op: str, name: str, x: Array, like_name: str, like: Array, shape: Shape, axes: str) -> None:
    """A boolean array of the library and device of `like` that broadcasts to `shape` without enlarging it."""
    same_home(op, like_name, like, name, x)
    if dtype_name(x) != "bool":
        wrong_dtype(op, name, x, "bool")
    if not fits(tuple(x.shape), shape):
        wrong_shape(op, name, x, f"a shape that broadcasts to {axes} = {shape}")


def one_home(op: str, names: Iterable[str], arrays: Iterable[Array], optional: Collection[str] = ()) -> None:
    """All are float arrays of one library and device, and of one dtype, except those in `FREE_DTYPE`.

    Arrays in `optional` may be None, except the first.
    """
    (first_name, first), *rest = zip(names, arrays, strict=False)
    home = _home(op, first_name, first)
    _of_floats(op, first_name, first)
    alike, placed = [(first_name, first)], home not in PLACELESS
    for name, x in rest:
        if (x is None and name in optional) or name in INTEGER_ARGUMENTS:
            continue
        if type(x) is type(first) and x.dtype == first.dtype and (not placed or x.device == first.device):
            alike.append((name, x))  # which may be sparse: such a tensor has the type of a dense one
            continue
        float_array(op, name, x)
        same_home(op, first_name, first, name, x)
        if x.dtype != first.dtype and name not in FREE_DTYPE:
            got = f"{first_name} {dtype_name(first)}, {name} {dtype_name(x)}"
            raise TypeError(f"{op}: {first_name} and {name} must share one dtype; got {got}")
    _plain(op, home, alike)


def broadcast(op: str, what: str, *shapes: Shape) -> Shape:
    """The broadcast of several shapes, or ValueError naming them."""
    if all(shape == shapes[0] for shape in shapes):
        return shapes[0]
    width = max(map(len, shapes))
    padded = [(1,) * (width - len(shape)) + shape for shape in shapes]
    result = []
    for sizes in zip(*padded, strict=True):
        wide = [size for size in sizes if size != 1]
        if any(size != wide[0] for size in wide):
            raise ValueError(f"{op}: {what} do not broadcast; got {' and '.join(map(str, shapes))}")
        result.append(wide[0] if wide else 1)
    return tuple(result)


def _leading(op: str, q: Array, k: Array, v: Array | None, enable_gqa: bool) -> Shape:
    """The leading axes of the output: those of q, k and v broadcast; with the heads of q under GQA."""
    whole = [tuple(x.shape) for x in (q, k, v) if x is not None]
    if not enable_gqa:
        try:
            return broadcast(op, "the leading axes of q, k and v", *[shape[:-2] for shape in whole])
        except ValueError as error:
            hint = ""
            if q.ndim >= 3 and k.ndim >= 3 and q.shape[-3] != k.shape[-3]:
                hint = "; pass enable_gqa=True if several query heads share a key/value head"
            raise ValueError(f"{error}{hint}") from None
    if q.ndim < 3 or k.ndim < 3 or (v is not None and v.ndim < 3):
        raise ValueError(
            f"{op}: enable_gqa=True needs a head axis (-3) on q, k and v; got {', '.join(map(str, whole))}"
        )
    heads, shared = q.shape[-3], k.shape[-3]
    if v is not None and v.shape[-3] != shared:
        raise ValueError(f"{op}: k and v must have the same number of heads; got {shared} and {v.shape[-3]}")
    if shared == 0 or heads % shared:
        raise ValueError(f"{op}: enable_gqa=True needs heads of q divisible by heads of k; got {heads} and {shared}")
    return (*broadcast(op, "the leading axes of q, k and v", *(shape[:-3] for shape in whole)), heads)


def attention_context(op: str, arrays: Keywords, options: Keywords) -> Context:
    """Check the shapes of q, k, v and the cotangents; the result is what options are checked against."""
    q, k, v = arrays["q"], arrays["k"], arrays.get("v")
    if not isinstance(options.get("enable_gqa", False), bool):
        raise TypeError(f"{op}: enable_gqa must be True or False; got {options['enable_gqa']!r}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is not None and x.ndim < 2:
            wrong_shape(op, name, x, "at least two axes, (..., tokens, features)")
    (queries, features), (keys, of_k) = q.shape[-2:], k.shape[-2:]
    if features == 0:
        wrong_shape(op, "q", q, "at least one feature")
    if features != of_k:
        wrong_shape(op, "k", k, f"(..., S, {features}) as q has {features} features")
    if v is not None and v.shape[-2] != keys:
        wrong_shape(op, "v", v, f"(..., {keys}, e) as k has {keys} tokens")
    leading = _leading(op, q, k, v, options.get("enable_gqa", False))
    context = Context(op, q, leading, queries, keys, options)
    for name in ("do", "dlse", "dr"):
        if arrays.get(name) is None:
            continue
        features = (0 if v is None else v.shape[-1],) if name == "do" else ()
        shape = (*leading, context.queries, *features)
        if tuple(arrays[name].shape) != shape:
            wrong_shape(op, name, arrays[name], f"{shape}, the shape of the output")
    return context


# ---------------------------------------------------------------------------------------------- the options


def option_array(
    c: Context, name: str, x: OfLibrary, dtypes: tuple[str, ...], hint: str, shape: Shape, axes: str
) -> None:
    """An optional array: library, device, dtype, and a shape that broadcasts to `shape` without enlarging it."""
    same_home(c.op, c.first_name, c.first, name, x)
    if dtype_name(x) not in dtypes:
        wrong_dtype(c.op, name, x, hint)
    if not fits(tuple(x.shape), shape):
        wrong_shape(c.op, name, x, f"a shape that broadcasts to {axes} = {shape}")


def _mask(c: Context, name: str, x: object) -> None:
    hint = "bool (True = may attend); pass additive scores as bias"
    option_array(c, name, x, ("bool",), hint, (*c.leading, c.queries, c.keys), "(..., L, S)")


def _pairs_float(c: Context, name: str, x: object) -> None:
    if name == "dropout_mask" and c.options.get("dropout") is not None:
        raise ValueError(f"{c.op}: pass dropout_mask or dropout, not both")
    hint = f"one of {', '.join(FLOATS)}" + ("; a mask of pairs goes to mask" if name == "bias" else "")
    option_array(c, name, x, FLOATS, hint, (*c.leading, c.queries, c.keys), "(..., L, S)")


def _query_mask(c: Context, name: str, x: object) -> None:
    option_array(c, name, x, ("bool",), "bool (True = a token)", (*c.leading, c.queries), "(..., L)")


def _key_lengths(c: Context, name: str, x: object) -> None:
    if isinstance(x, numbers.Integral) and not isinstance(x, bool):
        if int(x) < 0:
            raise ValueError(f"{c.op}: key_lengths must not be negative; got {shown(x)}")
        return
    option_array(c, name, x, INTEGERS, "an integer dtype", c.leading, "the leading axes (...)")


def _causal(c: Context, name: str, value: object) -> None:
    if not (isinstance(value, bool) or value == "upper_left"):
        raise ValueError(f"{c.op}: causal must be False, True (lower right) or 'upper_left'; got {value!r}")


def _window(c: Context, name: str, value: object) -> None:
    ends = value if isinstance(value, tuple) and len(value) == 2 else (-1,)
    if not all(x is None or (isinstance(x, numbers.Integral) and int(x) >= 0) for x in ends):
        raise ValueError(
            f"{c.op}: window must be (left, right), each a non-negative integer or None; got {shown(value)}"
        )


def number(op: str, name: str, value: object) -> float:
    """A finite real Python or NumPy number."""
    if isinstance(value, bool) or (is_array(value) and value.shape) or not isinstance(value, numbers.Real):
        kind = f"an array of shape {tuple(value.shape)}" if is_array(value) else repr(value)
        raise TypeError(f"{op}: {name} must be a number; got {kind}")
    try:
        own = float(value)
    except OverflowError:
        own = math.inf
    # math.isfinite cannot be traced when the number is a symbol of torch.compile
    if not abs(own) < math.inf:
        expected = "finite" if isinstance(value, float) else "finite and within the range of a float"
        raise ValueError(f"{op}: {name} must be {expected}; got {shown(value)}")
    return own


def is_learned(x: object) -> TypeGuard[Array]:
    """Whether a number is an array, which has a gradient (semantics A15); NumPy's scalars are plain numbers."""
    return is_array(x) and not isinstance(x, numbers.Real)


def learned(c: Context, name: str, value: object) -> None:
    """A number, or an array of one number or of one per head, whose values are not read."""
    if not is_learned(value):
        number(c.op, name, value)
        return
    same_home(c.op, c.first_name, c.first, name, value)
    if dtype_name(value) not in FLOATS:
        wrong_dtype(c.op, name, value, "a real float dtype")
    heads = c.leading[-1:]
    if tuple(value.shape) not in ((), heads):
        shapes = f"() or {heads}, a number for each head" if heads else "(), as there is no axis of heads"
        wrong_shape(c.op, name, value, shapes)


def _sink(c: Context, name: str, value: object) -> None:
    lowest = isinstance(value, numbers.Real) and not isinstance(value, bool) and value == -math.inf
    if not lowest:
        learned(c, name, value)


def positive(c: Context, name: str, value: object) -> None:
    if not number(c.op, name, value) > 0:
        raise ValueError(f"{c.op}: {name} must be greater than 0; got {shown(value)}")


def _gamma(c: Context, name: str, value: object) -> None:
    (learned if is_learned(value) else positive)(c, name, value)


def _length(c: Context, name: str, value: object) -> None:
    if isinstance(value, str):
        if value not in ("visible", "all"):
            raise ValueError(f"{c.op}: length must be 'visible', 'all', a number or an array; got {value!r}")
    elif is_learned(value):
        option_array(c, name, value, FLOATS, "a real float dtype", (*c.leading, c.queries), "(..., L)")
    else:
        positive(c, name, value)


def _shift(c: Context, name: str, value: object) -> None:
    if isinstance(value, str):
        if value != "-log_length":
            raise ValueError(f"{c.op}: shift must be a number or '-log_length'; got {value!r}")
    else:
        learned(c, name, value)


def _activation(c: Context, name: str, value: object) -> None:
    if value not in ACTIVATIONS:
        refuse_name(c.op, "activation", value, ACTIVATIONS)


def _dropout(c: Context, name: str, value: object) -> None:
    if not (isinstance(value, tuple) and len(value) == 2):
        raise ValueError(f"{c.op}: dropout must be (p, seed); got {shown(value)}")
    p, seed = value
    if not 0 <= number(c.op, "dropout p", p) < 1:
        raise ValueError(f"{c.op}: dropout p must lie in [0, 1); got {shown(p)}")
    if is_array(seed) and not isinstance(seed, numbers.Integral):
        if not (dtype_name(seed) in INTEGERS or is_key(seed)) or tuple(seed.shape):
            got = f"{dtype_name(seed)} of shape {tuple(seed.shape)}"
            expected = "an integer of shape (), or a key of jax.random.key with two words (threefry2x32)"
            raise TypeError(f"{c.op}: a dropout seed array must be {expected}; got {got}")
        same_home(c.op, c.first_name, c.first, "dropout seed", seed)
    elif isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or not 0 <= int(seed) < 2**64:
        raise ValueError(f"{c.op}: dropout seed must be an integer in [0, 2**64); got {shown(seed)}")


def flag(c: Context, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{c.op}: {name} must be True or False; got {value!r}")


def _log_forget(c: Context, name: str, x: OfLibrary) -> None:
    option_array(c, name, x, FLOATS, "a real float dtype", (*c.leading, c.keys), "(..., S)")
    if tuple(x.shape[-1:]) != (c.keys,):
        wrong_shape(c.op, name, x, f"{c.keys} on its last axis, a number for each key")


OPTIONS: dict[str, Callable[[Context, str, object], None]] = {
    "mask": _mask,
    "bias": _pairs_float,
    "dropout_mask": _pairs_float,
    "dropout": _dropout,
    "query_mask": _query_mask,
    "key_lengths": _key_lengths,
    "causal": _causal,
    "window": _window,
    "scale": learned,
    "enable_gqa": flag,
    "return_lse": flag,
    "return_remainder": flag,
    "attend_current": flag,
    "activation": _activation,
    "alpha": learned,
    "gain": learned,
    "gamma": _gamma,
    "length": _length,
    "shift": _shift,
    "slope": learned,
    "intercept": learned,
    "sink": _sink,
    "log_forget": _log_forget,
    "eps": positive,
}
OPTIONAL = frozenset(
    ("mask", "bias", "dropout_mask", "dropout", "query_mask", "key_lengths", "window", "scale", "sink")
)


def layernorm_context(op: str, arrays: Keywords, options: Keywords) -> Context:
    """Shapes of `qk_layernorm`: weights of one head, cotangents like q and k."""
    for name in ("q", "k"):
        x, weight = arrays[name], arrays[f"{name}_weight"]
        if x.ndim < 1 or tuple(weight.shape) != (x.shape[-1],):
            size = x.shape[-1] if x.ndim else "d"
            wrong_shape(op, f"{name}_weight", weight, f"({size},), the head size of {name}")
        cotangent = arrays.get(f"d{name}_normed")
        if cotangent is not None and cotangent.shape != x.shape:
            wrong_shape(op, f"d{name}_normed", cotangent, f"{tuple(x.shape)}, the shape of {name}")
    return Context(op, arrays["q"], (), 0, 0, options)


def plain_number(c: Context, name: str, value: object) -> None:
    """A number of an op that has no gradient of it."""
    if is_learned(value):
        number(c.op, name, value)
    OPTIONS[name](c, name, value)


PLAIN_NUMBERS: Mapping[str, "OptionCheck"] = dict.fromkeys(LEARNED, plain_number)

ContextOf = Callable[[str, Keywords, Keywords], Context]
OptionCheck = Callable[[Context, str, OfLibrary], None]
# a plain dict: two read-only dict views break the graph of torch.compile
NO_CHECKS: Mapping[str, OptionCheck] = {}


def call(
    op: str,
    names: tuple[str, ...],
    arrays: Arrays,
    options: Keywords,
    accepted: tuple[str, ...],
    context_of: ContextOf = attention_context,
    own: Mapping[str, OptionCheck] = NO_CHECKS,
    optional: Collection[str] = (),
) -> Context:
    """Check a whole call: names of options, library, device and dtype of the arrays, shapes, then each option.

    `context_of` checks the shapes of the arrays; `own` holds the checks of options that only this op has; `optional`
    arrays may be None. The context holds the options as bodies and kernels take them: those that were given, if
    nothing about them had to change.
    """
    known_options(op, options, accepted)
    one_home(op, names, arrays, optional)
    context = context_of(op, dict(zip(names, arrays, strict=False)), options)
    if not options:
        return context
    options = in_library(arrays[0], options, context.keys)
    for name, value in options.items():
        if value is not None or name not in OPTIONAL:
            (own.get(name) or OPTIONS[name])(context, name, value)
    options = in_range(options, context.queries, context.keys)
    return context._replace(options=options)  # torch 2.11 compiles no `is` of dictionaries
