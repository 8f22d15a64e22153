"""The smallest input on which something still fails: `shrink(case, fails)`.

Greedy and deterministic. Options are removed first, then leading axes, tokens and features, then values move towards 0,
1 and short decimals; a step is kept if `fails` still holds, and the passes repeat until none is. Each candidate has its
own id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from attnkit_conformance.model.case import Case, rounded
from attnkit_conformance.opdb import BY_NAME

Fails = Callable[[Case], bool]
Arrays = Mapping[str, np.ndarray]
EVALUATIONS = 2000  # of `fails` at most
FEW = 64  # entries of an array tried one by one
LENGTHS = (1, 2, 3, 4, 6, 8, 16, 32)  # lengths of an axis that are tried
# The meaning of an array's last axes: Queries, Keys, Landmarks, features of q and k, of v, slots of a hash.
AXES: Mapping[str, tuple[str, ...]] = {
    "q": ("L", "d"), "k": ("S", "d"), "v": ("S", "e"), "o": ("L", "e"), "w": ("L", "S"), "qk": ("L", "d"),
    "mask": ("L", "S"), "bias": ("L", "S"), "dropout_mask": ("L", "S"), "query_mask": ("L",), "lse": ("L",),
    "alpha": ("L", "one"), "length": ("L",), "landmarks": ("m", "d"), "landmark_mask": ("m",),
    "rotations": ("d", "rounds", "slots"), "initial_S": ("features", "e"), "initial_z": ("features",),
    "S": ("features", "e"), "z": ("features",), "r": ("L",), "log_forget": ("S",), "log_gate": ("S", "d"),
    "beta": ("S",), "log_decay": ("S",),
}  # fmt: skip
STATES = ("initial_S", "initial_z", "S", "z")


def shrink(case: Case, fails: Fails, evaluations: int = EVALUATIONS) -> Case:
    """A case that `fails`, as `case` does, and none of whose simplifications does.

    ValueError unless `fails(case)`. After `evaluations` calls of `fails` the smallest case so far is returned.
    """
    if not fails(case):
        raise ValueError(f"shrink: {case.id} does not fail")
    origin, tried, progress = case.id, 0, True
    while progress:
        progress = False
        for moves in PASSES:
            accepted = True
            while accepted:
                accepted = False
                for candidate in (moved.laid(moved.layouts) for moved in moves(case)):
                    if tried >= evaluations:
                        return case
                    if candidate.digest == case.digest:  # its layouts hold no other values
                        continue
                    tried += 1
                    candidate = replace(candidate, id=f"{origin}~{tried}")
                    if fails(candidate):
                        case, accepted, progress = candidate, True, True
                        break
    return case


def size(case: Case) -> int:
    """Entries of all arrays."""
    return sum(x.size for x in case.arrays.values())


def without_options(case: Case) -> Iterator[Case]:
    """The case without its memory layouts, one optional array, one parameter, or the layout of one array."""
    op = BY_NAME[case.op]
    if case.layouts:
        yield replace(case, layouts={})
    for name in case.arrays:
        if name not in op.arguments:
            yield replace(case, arrays={n: x for n, x in case.arrays.items() if n != name})
    for name in case.params:
        params = {n: x for n, x in case.params.items() if n != name}
        heads = {case.arrays[n].shape[-3:-2] for n in ("q", "k", "v") if n in case.arrays}
        if name not in ("op", "num_landmarks") and (name != "enable_gqa" or len(heads) == 1):
            yield replace(case, params=params)
    for name in case.layouts:
        yield replace(case, layouts={n: layout for n, layout in case.layouts.items() if n != name})


def counted(case: Case, name: str, x: np.ndarray) -> tuple[str, ...]:
    """The letters of an array's last axes; if queries and keys are the same tokens, keys count as queries."""
    per_head = name in ("alpha", "log_decay") and x.ndim == 1  # others have axes of queries, or of keys
    names = AXES.get(name, ())[-x.ndim :] if x.ndim and not per_head else ()
    if name == "log_decay" and x.ndim > case.arrays.get("beta", x).ndim:
        names = AXES["log_gate"]
    if name in STATES and "projection" not in case.arrays and has_features_of_q(case, x, names):
        names = tuple("d" if letter == "features" else letter for letter in names)
    same = "qk" in case.arrays or {"q", "k"} <= {*BY_NAME[case.op].tokens.keys}
    return tuple("L" if same and letter == "S" else letter for letter in names)


def has_features_of_q(case: Case, x: np.ndarray, names: tuple[str, ...]) -> bool:
    """Whether a state has a row for each feature of q; those of random projections or with a constant have others."""
    features = dict(zip(names, x.shape[-len(names) :], strict=True)).get("features")
    q = case.arrays["q" if "q" in case.arrays else "q_t"]
    return features is not None and features == q.shape[-1]


def take(case: Case, letter: str, index: list[int], length: int) -> Case:
    """The case with entries `index` of every axis that counts `letter`; key_lengths no longer than the keys."""

    def cut(arrays: Arrays) -> dict[str, np.ndarray]:
        parts = {}
        for name, x in arrays.items():
            letters = counted(case, name, x)
            for axis, own in enumerate(letters, x.ndim - len(letters)):
                if own == letter and x.shape[axis] == length:
                    x = np.take(x, index, axis)
            parts[name] = x
        return parts

    arrays = cut(case.arrays)
    keys = {counted(case, name, case.arrays[name])[-2] for name in ("k", "qk") if name in case.arrays}
    if letter in keys and "key_lengths" in arrays:
        inside = [np.sum(np.asarray(index) < n) for n in arrays["key_lengths"].ravel()]
        arrays["key_lengths"] = np.asarray(inside, np.int64).reshape(arrays["key_lengths"].shape)
    return replace(case, arrays=arrays, cotangents=cut(case.cotangents))


def fewer_leading(case: Case) -> Iterator[Case]:
    """One entry of a leading axis, with the heads of its group."""
    for axis in (2, 1):  # from the right, before the lettered axes: batch, heads
        sizes = {n: lead(case, n, x)[-axis] for n, x in case.arrays.items() if len(lead(case, n, x)) >= axis}
        most = max(sizes.values(), default=1)
        for i in range(most if most > 1 else 0):
            yield one_of(case, axis, i, most)


def lead(case: Case, name: str, x: np.ndarray) -> tuple[int, ...]:
    return x.shape[: x.ndim - len(counted(case, name, x))]


def one_of(case: Case, axis: int, i: int, most: int) -> Case:
    """Item `i` of `most` along a leading axis."""

    def cut(arrays: Arrays) -> dict[str, np.ndarray]:
        parts = {}
        for name, x in arrays.items():
            leading = lead(case, name, x)
            own = leading[-axis] if len(leading) >= axis else 1
            parts[name] = np.take(x, [i * own // most], len(leading) - axis) if own > 1 else x
        return parts

    params = {n: x for n, x in case.params.items() if n != "enable_gqa" or axis != 1}
    return replace(case, arrays=cut(case.arrays), cotangents=cut(case.cotangents), params=params)


def fewer_of_an_axis(case: Case) -> Iterator[Case]:
    """A few from the front, half, or one less of an axis."""
    sizes: dict[str, int] = {}
    for name, x in case.arrays.items():
        letters = counted(case, name, x)
        for letter, length in zip(letters, x.shape[x.ndim - len(letters) :], strict=True):
            sizes[letter] = max(length, sizes.get(letter, 0))
    for letter, length in sizes.items():
        for n in LENGTHS:
            if n < length:
                yield take(case, letter, [*range(n)], length)
        half = length // 2
        if half:
            yield take(case, letter, [*range(length - half, length)], length)
        for i in range(length if 1 < length <= FEW else 0):
            yield take(case, letter, [j for j in range(length) if j != i], length)


def smaller_parameters(case: Case) -> Iterator[Case]:
    """Integers towards 1, and as few queries as keys, or the reverse."""
    for name, value in case.params.items():
        if type(value) is int and value > 1:
            for smaller in dict.fromkeys((1, 2, value // 2, value - 1)):
                if smaller < value:
                    yield replace(case, params={**case.params, name: smaller})


def fewer_pairs(case: Case) -> Iterator[Case]:
    """As many queries as keys, a few of both, for ops that only support self-attention."""
    if not {"q", "k"} <= {*case.arrays}:
        return
    L, S = case.arrays["q"].shape[-2], case.arrays["k"].shape[-2]
    for n in LENGTHS:
        if n < min(L, S) or (n <= min(L, S) and L != S):
            yield take(take(case, "L", [*range(n)], L), "S", [*range(n)], S)
    for i in range(L if L == S and 1 < L <= FEW else 0):
        keys = [j for j in range(L) if j != i]
        yield take(take(case, "L", keys, L), "S", keys, S)


def simpler_arrays(case: Case) -> Iterator[Case]:
    """An array of zeros, ones, integers or numbers with one decimal."""
    for kind in ("arrays", "cotangents"):
        for name, x in getattr(case, kind).items():
            if x.dtype.kind != "f":
                continue
            dtype = case.dtype_of(name) if kind == "arrays" else case.dtype
            finite = np.where(np.isfinite(x), x, 0.0)
            simpler = (np.zeros_like(x), np.ones_like(x), np.round(finite), rounded(np.round(finite, 1), dtype))
            for value in simpler:
                y = np.where(np.isfinite(x), value, x)
                if complexity(y) < complexity(x):
                    yield with_array(case, kind, name, y)


def simpler_entries(case: Case) -> Iterator[Case]:
    """One entry closer to 0: every entry of small arrays."""
    for kind in ("arrays", "cotangents"):
        for name, x in getattr(case, kind).items():
            if x.size > FEW:
                continue
            for at in np.ndindex(x.shape):
                for value in simpler_values(x[at]):
                    y = x.copy()
                    y[at] = value
                    if complexity(y) < complexity(x):
                        yield with_array(case, kind, name, y)


def simpler_values(value: np.bool | np.integer | np.floating) -> tuple[float | np.integer | np.floating, ...]:
    """The replacements of an entry, simplest first."""
    if isinstance(value, np.bool_):
        return (True,)
    if isinstance(value, np.integer):
        return (0, 1, value // 2)
    if not np.isfinite(value):
        return (0.0, 1.0)
    return (0.0, 1.0, np.round(value), np.round(2 * value) / 2)


def complexity(x: np.ndarray) -> float:
    """The reading effort of an array; hidden pairs and non-finite numbers weigh most."""
    if x.dtype.kind == "b":
        return float(np.sum(~x))
    wide = x.astype(np.float64)
    finite = np.where(np.isfinite(wide), wide, 0.0)
    digits = 4.0 * (finite != np.round(finite)) + 4.0 * (finite * 2 != np.round(finite * 2))
    values = np.abs(finite) / (1 + np.abs(finite)) + (finite != 0) + (finite < 0) + digits
    return float(np.sum(values) + 100 * np.sum(~np.isfinite(wide)))


def with_array(case: Case, kind: str, name: str, x: np.ndarray) -> Case:
    """The case with another array or cotangent."""
    if kind == "arrays":
        return replace(case, arrays={**case.arrays, name: x})
    return replace(case, cotangents={**case.cotangents, name: x})


PASSES = (
    without_options, fewer_leading, fewer_pairs, fewer_of_an_axis, smaller_parameters, simpler_arrays, simpler_entries,
)  # fmt: skip
