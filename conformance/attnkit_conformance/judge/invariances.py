"""Semantics A11 and the exact rules of A6, A8, A9, as generators of violations: messages, or errors beyond bounds.

Each has the arguments (adapter, make), `make(scene)` being a case of the op under judgement.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from attnkit_conformance import core
from attnkit_conformance.adapter import Adapter, Unsupported
from attnkit_conformance.golden import golden
from attnkit_conformance.model import scoring, tolerance
from attnkit_conformance.model.case import Case, compute_dtype, rounded
from attnkit_conformance.model.op import STATEFUL, Tokens
from attnkit_conformance.model.scene import Scene
from attnkit_conformance.model.tolerance import Limit, Measured
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.scenes.attention import CAUSAL

Arrays = Mapping[str, np.ndarray]
Violation = str | Measured
L, S, SHORT = 17, 33, 20  # SHORT: valid keys with padding
STEPS = 7
STATES = ("S", "z", "c", "m")  # parts of a state
RECURRENT = "f"  # the group of ops that have no other order than the causal one
PLAIN = Scene("property", L, S)
LAST_CAUSAL = Scene("property-causal", L, S, params=CAUSAL)
FEW = Scene("property-few-keys", 3, 3, params=CAUSAL)  # less than a vector of any kernel
OF_FEW = ", of three keys"
PADDED = Scene("property-padded", L, S, options=("query_mask",))
BIASED = Scene("property-bias", L, S, options=("mask", "bias"))


def tokens_of(case: Case) -> Tokens:
    return BY_NAME[case.op].tokens


def tokens_first(axes: Mapping[str, int], arrays: Arrays) -> dict[str, np.ndarray]:
    """Views of the arrays with `axes`, with tokens on the first axis."""
    return {name: np.moveaxis(arrays[name], axis, 0) for name, axis in axes.items() if name in arrays}


def along(axes: Mapping[str, int], index: int | np.ndarray | Sequence[int], arrays: Arrays) -> dict[str, np.ndarray]:
    """Arrays (or gradients of them, as d<name>) with the tokens `index` of those with `axes`."""
    names = {name: name.removeprefix("d") for name in arrays}
    return {n: np.take(x, index, axes[names[n]]) if names[n] in axes else x for n, x in arrays.items()}


def both(adapter: Adapter, case: Case) -> dict[str, np.ndarray]:
    """Outputs and gradients (as d<name>) of an adapter; gradients are left out if unsupported."""
    results = core.outputs(adapter, case)
    if BY_NAME[case.op].vjp:
        try:
            results |= {f"d{name}": x for name, x in core.gradients(adapter, case).items()}
        except Unsupported:
            return results
    return results


def differing(first: Arrays, second: Arrays, what: str) -> Iterator[str]:
    """The names of results that are not bitwise equal."""
    for name, x in first.items():
        if x.tobytes() != second[name].tobytes():
            yield f"{name} {what}"


def change_arrays(case: Case, **arrays: np.ndarray) -> Case:
    """The case with other arrays, rounded to their dtype."""
    inputs = {n: rounded(x, case.dtype_of(n)) if x.dtype.kind == "f" else x for n, x in arrays.items()}
    return replace(case, arrays={**case.arrays, **inputs})


def rerun(adapter: Adapter, make: Callable[[Scene], Case]) -> Iterator[str]:
    """The same call twice gives the same bits."""
    case = make(BIASED)
    yield from differing(both(adapter, case), both(adapter, case), "differs between two runs")


def causal_prefix(adapter: Adapter, make: Callable[[Scene], Case]) -> Iterator[str]:
    """Changing finite values in the future changes no bit before it."""
    case = make(LAST_CAUSAL)
    rows = {name: x for name, x in core.outputs(adapter, case).items() if name not in STATES}
    for past in (1, L // 2):
        other = core.outputs(adapter, with_another_future(case, past))
        for name, x in rows.items():
            before, after = (np.take(y, range(past), tokens_of(case).queries.get(name, -1)) for y in (x, other[name]))
            if before.tobytes() != after.tobytes():
                yield f"{name} before query {past} depends on what comes after it"


def with_another_future(case: Case, past: int) -> Case:
    """The case with other finite values in the queries from `past` and in the keys that those before cannot see."""
    tokens, variant = tokens_of(case), {name: x.copy(order="K") for name, x in case.arrays.items()}
    queries, keys = (tokens_first(axes, variant) for axes in (tokens.queries, tokens.keys))
    n_queries, n_keys = (len(next(iter(arrays.values()))) for arrays in (queries, keys))
    hidden = past + n_keys - n_queries
    others = BY_NAME[case.op].others
    for name, x in keys.items():
        x[hidden:] = others[name](x[hidden:]) if name in others else 3 - 2 * x[hidden:]
    for name in queries.keys() - keys.keys():
        queries[name][past:] *= -2
    return change_arrays(case, **variant)


def padding_contents(
    adapter: Adapter, make: Callable[[Scene], Case], contents: tuple[float, ...] = (1e4, np.nan)
) -> Iterator[str]:
    """The contents of padding, including NaN, change no bit of outputs and gradients."""
    case, valid = make(PADDED), np.arange(S) < SHORT
    tokens = tokens_of(case)
    masks = {"mask": valid}
    if tokens.shared and "query_mask" in case.arrays:
        masks["query_mask"] = valid
    case = change_arrays(case, **masks)
    hidden = {}
    if "query_mask" in case.arrays:
        hidden = {name: ~case.arrays["query_mask"] for name in tokens.queries if name not in tokens.keys}
    hidden |= {name: ~valid for name, axis in tokens.keys.items() if axis == -2}
    results = []
    for content in (0.0, *contents):
        filled = {}
        for name in hidden.keys() & case.arrays.keys():
            x = case.arrays[name]
            filled[name] = np.where(np.broadcast_to(hidden[name], x.shape[:-1])[..., None], content, x)
        results.append(both(adapter, change_arrays(case, **filled)))
    for other, content in zip(results[1:], contents, strict=True):
        text = "NaN" if np.isnan(content) else "1e4"
        yield from differing(results[0], other, f"changes when padding holds {text} instead of 0")


def finite_padding(adapter: Adapter, make: Callable[[Scene], Case]) -> Iterator[str]:
    """The same for finite contents alone."""
    yield from padding_contents(adapter, make, (1e4,))


def limits_of(adapter: Adapter, case: Case) -> Mapping[str, Limit]:
    """The limits of outputs and gradients (as d<name>) of an adapter."""
    truth = golden(case)
    gradients = {f"d{name}": limit for name, limit in truth.gradients.items()}
    return core.limits_for(adapter, case, {**truth.outputs, **gradients})


def beyond(limits: Mapping[str, Limit], results: Arrays) -> Iterator[Measured]:
    """The results that are not within their limits."""
    every = (tolerance.measure(name, x, limits[name]) for name, x in results.items())
    return (measured for measured in every if measured.failures)


def judge_same(
    adapter: Adapter, case: Case, of: Case, back: Callable[[str, np.ndarray], np.ndarray]
) -> Iterator[Measured]:
    """The adapter's result on `case`, mapped by `back`, equals the golden one of `of` within the bounds of D."""
    results = both(adapter, case)
    return beyond(limits_of(adapter, of), {name: back(name, x) for name, x in results.items()})


def key_permutation(adapter: Adapter, make: Callable[[Scene], Case]) -> Iterator[Measured]:
    """Keys in another order, packed ones within their sequences, give the same result, or the same in that order."""
    case, rng = make(BIASED), np.random.default_rng(0)
    keys, ends = tokens_of(case).keys, case.arrays.get("cu_seqlens_k", (0, S))
    order = np.concatenate([rng.permutation(np.arange(a, b)) for a, b in itertools.pairwise(ends)])
    permuted = replace(case, arrays=along(keys, order, case.arrays), cotangents=along(keys, order, case.cotangents))
    yield from judge_same(adapter, permuted, case, lambda name, x: along(keys, np.argsort(order), {name: x})[name])


def first_item(case: Case, arrays: Arrays) -> dict[str, np.ndarray]:
    """The part of arrays, outputs or gradients for the first batch item or packed sequence."""
    if "cu_seqlens_q" not in case.arrays:
        return {name: x[:1] if x.ndim > 2 else x for name, x in arrays.items()}
    tokens, edges = tokens_of(case), {name: x[:2] for name, x in arrays.items() if name.startswith("cu_seqlens")}
    of_queries = along(tokens.queries, range(case.arrays["cu_seqlens_q"][1]), arrays)
    return along(tokens.keys, range(case.arrays["cu_seqlens_k"][1]), of_queries) | edges


def batch_mates(adapter: Adapter, make: Callable[[Scene], Case]) -> Iterator[Measured]:
    """A batch item, or a packed sequence, alone gives the same result as beside others."""
    case = make(PLAIN)
    one = replace(case, arrays=first_item(case, case.arrays), cotangents=first_item(case, case.cotangents))
    company = first_item(case, both(adapter, case))
    summed = {f"d{name}" for name, x in case.arrays.items() if x.ndim <= 2}  # over the batch
    for results in (both(adapter, one), {name: x for name, x in company.items() if name not in summed}):
        yield from beyond(limits_of(adapter, one), results)


def padding_amount(adapter: Adapter, make: Callable[[Scene], Case]) -> Iterator[Measured]:
    """More padding gives the same result."""
    long = make(PLAIN)
    tokens = tokens_of(long)
    masks = {"key_lengths": np.asarray(SHORT)}
    if tokens.shared and "query_mask" in BY_NAME[long.op].optional:
        masks["query_mask"] = np.arange(S) < SHORT

    def cut(arrays: Arrays) -> dict[str, np.ndarray]:
        return along(tokens.keys, range(SHORT), arrays)

    short = replace(long, arrays=cut(long.arrays), cotangents=cut(long.cotangents))
    padded = replace(long, arrays={**long.arrays, **masks})
    yield from judge_same(adapter, padded, short, lambda name, x: cut({name: x})[name])


def dropout_bits(adapter: Adapter, make: Callable[[Scene], Case]) -> Iterator[str]:
    """dropout=(p, seed) drops exactly the pairs that the reference drops, tested with v = identity."""
    case = make(Scene("property-dropout", L, S, e=S, lead=((2, 3, 2),) * 3, params={"dropout": (0.4, 2**40 + 3)}))
    case = change_arrays(case, v=np.broadcast_to(np.eye(S), case.arrays["v"].shape))
    exact = golden(case).outputs["o"].golden
    clear = (exact == 0) | (np.abs(exact) > tolerance.smallest_normal(case.dtype))  # others may vanish in a half type
    keep = (core.outputs(adapter, case)["o"] != 0) & clear
    expected = (exact != 0) & clear
    if keep.shape != expected.shape or np.any(keep != expected):
        yield f"other pairs are dropped than in the reference, which keeps {expected.mean():.3f}; got {keep.mean():.3f}"


def kink_gradients(adapter: Adapter, make: Callable[[Scene], Case]) -> Iterator[str]:
    """Where every score is exactly at a kink, every gradient is exactly 0."""
    case = make(Scene("property-kink", L, S, d=2, params={"scale": 1.0}))
    for kink in BY_NAME[str(case.params.get("op", case.op))].kinks(case.params):
        q = np.broadcast_to([2.0, 0.0], case.arrays["q"].shape)
        k = np.broadcast_to([kink / 2, 1.0], case.arrays["k"].shape)
        grads = core.gradients(adapter, change_arrays(case, q=q, k=k))
        yield from (f"d{n} is not exactly 0 at s = {kink:g}" for n in ("q", "k") if np.any(grads[n] != 0))


def with_a_nan(case: Case, key: int = S - 3) -> Case:
    """The case with NaN in a key, by default the third from the end."""
    tokens = tokens_of(case)
    source = next(iter(tokens.keys))
    copies = {source: case.arrays[source].copy()}
    tokens_first(tokens.keys, copies)[source][key] = np.nan
    return change_arrays(case, **copies)


def visible_nan(adapter: Adapter, make: Callable[[Scene], Case]) -> Iterator[str]:
    """A NaN in a visible key reaches the output of every query that sees it: all, or the last three if causal.

    It reaches no other, unless keys are values too: a NaN in v is multiplied by weights of 0 in all rows. Of three keys
    it is the first: the scores of the first query are then nothing but NaN, if causal.
    """
    case = make(LAST_CAUSAL)
    yield from nan_in_rows(adapter, case, with_a_nan(case))
    if BY_NAME[case.op].group == "a" and not getattr(adapter, "compiles", False):
        few = make(FEW)
        with contextlib.suppress(Unsupported):  # not every kernel takes so few
            yield from (f"{text}{OF_FEW}" for text in nan_in_rows(adapter, few, with_a_nan(few, 0)))


def nan_in_rows(adapter: Adapter, case: Case, given: Case) -> Iterator[str]:
    """What a NaN in the third key from the end, as in `given`, does wrong."""
    tokens = tokens_of(case)
    for name, x in core.outputs(adapter, given).items():
        if name not in ("o", "w", "total"):
            continue
        nans = np.moveaxis(np.isnan(x.astype(np.float64)), tokens.queries.get(name, -1), -1)
        rows = nans if name == "total" else nans.any(-2)
        n = rows.shape[-1]
        first = n - 3 if case.params.get("causal") else 0
        if scoring.subject(case) in scoring.OWN_ORDER:
            first = n - 3 if case.params.get("attend_current", "log_forget" in case.arrays) else n - 2
        expected = np.broadcast_to(np.arange(n) >= first, rows.shape)
        if np.any(expected & ~rows if tokens.shared else rows != expected):
            yield f"{name}: NaN in {int(rows.sum())} rows; expected in the {int(expected.sum())} that see it"


def sigmoid_tail(adapter: Adapter, make: Callable[[Scene], Case]) -> Iterator[str]:
    """Semantics B: each weight has relative error <= eps·(4 + (|x| + log n)/2), on exact scores, far into the tail."""
    case = make(Scene("property-tail", L, S, d=1, params={"scale": 1.0}))
    q = np.broadcast_to(np.linspace(-80, 16, L).round()[:, None], case.arrays["q"].shape)
    k = np.broadcast_to(np.ones((S, 1)), case.arrays["k"].shape)
    case = change_arrays(case, q=q, k=k)
    got = core.outputs(adapter, case)["w"].astype(np.float64)
    exact = golden(case).outputs["w"].golden
    compute_eps = tolerance.eps(compute_dtype(case.dtype))
    allowed = compute_eps * (4 + (np.abs(q - np.log(S)) + np.log(S)) / 2)
    if case.dtype != compute_dtype(case.dtype):
        allowed = allowed + tolerance.eps(case.dtype) / 2
    normal = exact > tolerance.smallest_normal(case.dtype)
    off = np.where(normal, np.abs(got - exact) / np.where(normal, exact, 1) / allowed, 0.0)
    if off.max() > 1:
        row = int(np.argmax(off.max(axis=(0, 1, 3))))
        yield f"relative error is {off.max():.3g} times the bound at s = {q[0, 0, row, 0]:g}"


def whole_is(adapter: Adapter, case: Case, other: Arrays) -> Iterator[Measured]:
    """Outputs assembled from other calls equal the golden ones of `case` within the bounds of D."""
    return beyond(limits_of(adapter, case), {name: other[name] for name in golden(case).outputs})


def part_of(case: Case, rows: slice, keys: slice, state: Mapping[str, np.ndarray]) -> Case:
    """Some queries and keys of a case, after `state`."""
    tokens, arrays = tokens_of(case), dict(case.arrays)
    for axes, part in ((tokens.queries, rows), (tokens.keys, keys)):
        for name in axes.keys() & arrays.keys():
            arrays[name] = np.take(arrays[name], range(arrays[name].shape[axes[name]])[part], axes[name])
    initial = {f"initial_{n}": x.astype(np.float64) for n, x in state.items() if n in STATES}
    dtypes = {**case.dtypes, **dict.fromkeys(initial, compute_dtype(case.dtype))}
    return replace(case, arrays={**arrays, **initial}, dtypes=dtypes)


def judge_resumption(adapter: Adapter, make: Callable[[Scene], Case]) -> Iterator[Measured]:
    """A sequence split in two, the second part starting from the state of the first, gives the same as the whole."""
    for causal in (True,) if BY_NAME[make(PLAIN).op].group == RECURRENT else (True, False):
        case = make(Scene("property-resumed", S, S, params={"causal": causal, "return_state": True}))
        rows = slice(0, SHORT) if causal else slice(None)
        first = core.outputs(adapter, part_of(case, rows, slice(0, SHORT), {}))
        after = slice(SHORT, None) if causal else slice(None)
        second = core.outputs(adapter, part_of(case, after, slice(SHORT, None), first))
        o = np.concatenate([first["o"], second["o"]], axis=-2) if causal else second["o"]
        yield from whole_is(adapter, case, {**second, "o": o})


def judge_chunks(adapter: Adapter, make: Callable[[Scene], Case]) -> Iterator[Measured]:
    """Chunks of one token, of a few, and one of everything give the same outputs and gradients."""
    case = make(LAST_CAUSAL)
    for size in (1, 5, 1000):
        yield from judge_same(
            adapter, replace(case, params={**case.params, "chunk_size": size}), case, lambda name, x: x
        )


def step_by_step(adapter: Adapter, make: Callable[[Scene], Case]) -> Iterator[Measured]:
    """The recurrence, token by token from no state, gives the same as the causal form."""
    if not core.covers(adapter, f"{make(PLAIN).op}_step"):
        raise Unsupported("has no step of its own")
    case = make(Scene("property-steps", STEPS, STEPS, params={**CAUSAL, "return_state": True}))
    params = {n: x for n, x in case.params.items() if n not in (*CAUSAL, *STATEFUL)}
    outputs: list[np.ndarray] = []
    state: dict[str, np.ndarray] = {}
    for t in range(STEPS):
        axes = {**tokens_of(case).queries, **tokens_of(case).keys}
        arrays = {f"{n}_t": np.take(x, t, axes[n]) for n, x in case.arrays.items() if n in axes}
        arrays |= {n: x for n, x in case.arrays.items() if n not in axes}
        arrays |= {f"initial_{n}": x.astype(np.float64) for n, x in state.items()}
        dtypes = {n: compute_dtype(case.dtype) for n in arrays if not n.endswith("_t")}
        step = core.outputs(adapter, replace(case, op=f"{case.op}_step", arrays=arrays, params=params, dtypes=dtypes))
        state = {n: x for n, x in step.items() if n in STATES}
        outputs.append(step["o_t"])
    yield from whole_is(adapter, case, {**state, "o": np.stack(outputs, axis=-2)})
