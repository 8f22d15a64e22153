"""Semantics A11 and the exact rules of A6, A8, A9, A12 as named checks of any adapter and op they apply to."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attnkit_conformance import core, tolerance
from attnkit_conformance.adapter import Adapter, Unsupported
from attnkit_conformance.binding import STATISTICS
from attnkit_conformance.case import Case, compute_dtype, rounded
from attnkit_conformance.core import CaseResult, Findings
from attnkit_conformance.errors import ErrorSample
from attnkit_conformance.golden import compute
from attnkit_conformance.op import STATEFUL, Op
from attnkit_conformance.opdb import BY_NAME, OPDB
from attnkit_conformance.samples import CAUSAL, LENGTH_ARRAY, Scene, attention_case, variant_label

Arrays = Mapping[str, np.ndarray]
L, S, SHORT = 17, 33, 20  # SHORT: valid keys where there is padding
STEPS = 7
QUICK_WITH_STATES = ("causal_prefix", "padding_contents", "step_by_step")
ROWS = ("a", "b", "c")  # groups of ops whose queries have rows of weights
STATES = ("S", "z", "c", "m")  # parts of a state
PLAIN = Scene("property", L, S)
LAST_CAUSAL = Scene("property-causal", L, S, params=CAUSAL)
PADDED = Scene("property-padded", L, S, options=("query_mask",))
BIASED = Scene("property-bias", L, S, options=("mask", "bias"))


@dataclass(frozen=True)
class Property:
    """`run(adapter, make)` yields what is wrong, `make(scene)` being a case of the op under judgement."""

    name: str
    applies: Callable[[Op, Mapping[str, Any]], bool]
    run: Callable[[Adapter, Callable[[Scene], Case]], Iterator[str]]


def both(adapter: Adapter, case: Case) -> dict[str, np.ndarray]:
    """Outputs and gradients (as d<name>) of an adapter; gradients are left out where they are not served."""
    found = core.outputs(adapter, case)
    if BY_NAME[case.op].vjp:
        try:
            found |= {f"d{name}": x for name, x in core.gradients(adapter, case).items()}
        except Unsupported:
            return found
    return found


def differing(first: Arrays, second: Arrays, what: str) -> Iterator[str]:
    """Names under which two results are not the same bits."""
    for name, x in first.items():
        if x.tobytes() != second[name].tobytes():
            yield f"{name} {what}"


def changed(case: Case, **arrays: np.ndarray) -> Case:
    """The case with other arrays, rounded to their dtype."""
    held = {n: rounded(x, case.dtype_of(n)) if x.dtype.kind == "f" else x for n, x in arrays.items()}
    return replace(case, arrays={**case.arrays, **held})


def rerun(adapter: Adapter, make: Callable[[Scene], Case]) -> Iterator[str]:
    """The same call twice gives the same bits."""
    case = make(BIASED)
    yield from differing(both(adapter, case), both(adapter, case), "differs between two runs")


def causal_prefix(adapter: Adapter, make: Callable[[Scene], Case]) -> Iterator[str]:
    """Other finite values in the future change no bit before it."""
    case, past = make(LAST_CAUSAL), L // 2
    first_hidden = past + S - L  # the first key that queries before `past` cannot see
    keys = {name: case.arrays[name].copy() for name in ("k", "v") if name in case.arrays}
    for x in keys.values():
        x[..., first_hidden:, :] = 3 - 2 * x[..., first_hidden:, :]
    q = case.arrays["q"].copy()
    q[..., past:, :] *= -2
    other = core.outputs(adapter, changed(case, q=q, **keys))
    rows = {name: x for name, x in core.outputs(adapter, case).items() if name not in STATES}
    for name, x in rows.items():
        axis = -2 if name in ("o", "w") else -1
        before, after = (np.take(y, range(past), axis) for y in (x, other[name]))
        if before.tobytes() != after.tobytes():
            yield f"{name} before query {past} depends on what comes after it"


def padding_contents(adapter: Adapter, make: Callable[[Scene], Case]) -> Iterator[str]:
    """Whatever padding holds, NaN included, no bit of outputs and gradients changes."""
    case = make(PADDED)
    case = changed(case, mask=np.arange(S) < SHORT)
    hidden = {"k": np.arange(S) >= SHORT, "v": np.arange(S) >= SHORT, "q": ~case.arrays["query_mask"]}
    results = []
    for content in (0.0, 1e4, np.nan):
        filled = {}
        for name in ("q", "k", "v"):
            if name in case.arrays:
                x = case.arrays[name]
                filled[name] = np.where(np.broadcast_to(hidden[name], x.shape[:-1])[..., None], content, x)
        results.append(both(adapter, changed(case, **filled)))
    for other, text in zip(results[1:], ("1e4", "NaN"), strict=True):
        yield from differing(results[0], other, f"changes when padding holds {text} instead of 0")


def judged(adapter: Adapter, case: Case, of: Case, back: Callable[[str, np.ndarray], np.ndarray]) -> Iterator[str]:
    """The adapter's result on `case`, brought back by `back`, is the golden one of `of` within the bounds of D."""
    truth = compute(of)
    limits = {**truth.outputs, **{f"d{name}": limit for name, limit in truth.gradients.items()}}
    for name, x in both(adapter, case).items():
        measured = tolerance.measure(name, back(name, x.astype(np.float64)), limits[name])
        yield from (text for _, text in measured.failures)


def key_permutation(adapter: Adapter, make: Callable[[Scene], Case]) -> Iterator[str]:
    """Keys in another order give the same result."""
    case = make(BIASED)
    order = np.random.default_rng(0).permutation(S)
    axes = {"k": -2, "v": -2, "mask": -1, "bias": -1, "w": -1, "dk": -2, "dv": -2, "dbias": -1}
    moved = {n: np.take(x, order, axes[n]) for n, x in case.arrays.items() if n in axes}

    def back(name: str, x: np.ndarray) -> np.ndarray:
        return np.take(x, np.argsort(order), axes[name]) if name in axes else x

    yield from judged(adapter, replace(case, arrays={**case.arrays, **moved}), case, back)


def batch_mates(adapter: Adapter, make: Callable[[Scene], Case]) -> Iterator[str]:
    """A batch item alone gives what it gives beside others."""
    case = make(PLAIN)
    one = replace(case, arrays={name: x[:1] if x.ndim > 2 else x for name, x in case.arrays.items()})
    one = replace(one, cotangents={name: x[:1] for name, x in case.cotangents.items()})
    company = both(adapter, case)
    truth = compute(one)
    limits = {**truth.outputs, **{f"d{name}": limit for name, limit in truth.gradients.items()}}
    summed = {f"d{name}" for name, x in case.arrays.items() if x.ndim <= 2}  # over the batch
    for name, alone in both(adapter, one).items():
        for x in (alone,) if name in summed else (alone, company[name][:1]):
            yield from (text for _, text in tolerance.measure(name, x.astype(np.float64), limits[name]).failures)


def padding_amount(adapter: Adapter, make: Callable[[Scene], Case]) -> Iterator[str]:
    """More padding gives the same result."""
    long = make(PLAIN)
    short = {name: x[..., :SHORT, :] if name in ("k", "v") else x for name, x in long.arrays.items()}
    axis = {"dk": -2, "dv": -2, "w": -1}

    def back(name: str, x: np.ndarray) -> np.ndarray:
        return np.take(x, range(SHORT), axis[name]) if name in axis else x

    padded = replace(long, arrays={**long.arrays, "key_lengths": np.asarray(SHORT)})
    yield from judged(adapter, padded, replace(long, arrays=short), back)


def dropout_bits(adapter: Adapter, make: Callable[[Scene], Case]) -> Iterator[str]:
    """dropout=(p, seed) drops exactly the pairs that the reference drops: seen with v = identity."""
    case = make(Scene("property-dropout", L, S, e=S, lead=((2, 3, 2),) * 3, params={"dropout": (0.4, 2**40 + 3)}))
    case = changed(case, v=np.broadcast_to(np.eye(S), case.arrays["v"].shape))
    golden = compute(case).outputs["o"].golden
    told = (golden == 0) | (np.abs(golden) > tolerance.smallest_normal(case.dtype))  # others may vanish in a half type
    kept = (core.outputs(adapter, case)["o"] != 0) & told
    expected = (golden != 0) & told
    if kept.shape != expected.shape or np.any(kept != expected):
        yield f"other pairs are dropped than in the reference, which keeps {expected.mean():.3f}; got {kept.mean():.3f}"


def kink_gradients(adapter: Adapter, make: Callable[[Scene], Case]) -> Iterator[str]:
    """Where every score is exactly at a kink, every gradient is exactly 0."""
    case = make(Scene("property-kink", L, S, d=2, params={"scale": 1.0}))
    for kink in BY_NAME[str(case.params.get("op", case.op))].kinks(case.params):
        q = np.broadcast_to([2.0, 0.0], case.arrays["q"].shape)
        k = np.broadcast_to([kink / 2, 1.0], case.arrays["k"].shape)
        found = core.gradients(adapter, changed(case, q=q, k=k))
        yield from (f"d{n} is not exactly 0 at s = {kink:g}" for n in ("q", "k") if np.any(found[n] != 0))


def visible_nan(adapter: Adapter, make: Callable[[Scene], Case]) -> Iterator[str]:
    """A NaN in a visible key is seen in the output of every query that sees it."""
    case = make(LAST_CAUSAL)
    k = case.arrays["k"].copy()
    k[..., S - 3, :] = np.nan
    for name, x in core.outputs(adapter, changed(case, k=k)).items():
        if name not in ("o", "w", "total"):
            continue
        seen = np.isnan(x.astype(np.float64))
        rows = seen if name == "total" else seen.any(-1)
        expected = np.broadcast_to(np.arange(L) >= L - 3, rows.shape)
        if np.any(rows != expected):
            yield f"{name}: NaN in {int(rows.sum())} rows; expected in the {int(expected.sum())} that see it"


def sigmoid_tail(adapter: Adapter, make: Callable[[Scene], Case]) -> Iterator[str]:
    """Semantics B: each weight has relative error <= eps·(4 + (|x| + log n)/2), on exact scores, far into the tail."""
    case = make(Scene("property-tail", L, S, d=1, params={"scale": 1.0}))
    q = np.broadcast_to(np.linspace(-80, 16, L).round()[:, None], case.arrays["q"].shape)
    k = np.broadcast_to(np.ones((S, 1)), case.arrays["k"].shape)
    case = changed(case, q=q, k=k)
    got = core.outputs(adapter, case)["w"].astype(np.float64)
    exact = compute(case).outputs["w"].golden
    compute_eps = tolerance.eps(compute_dtype(case.dtype))
    allowed = compute_eps * (4 + (np.abs(q - np.log(S)) + np.log(S)) / 2)
    if case.dtype != compute_dtype(case.dtype):
        allowed = allowed + tolerance.eps(case.dtype) / 2
    normal = exact > tolerance.smallest_normal(case.dtype)
    off = np.where(normal, np.abs(got - exact) / np.where(normal, exact, 1) / allowed, 0.0)
    if off.max() > 1:
        row = int(np.argmax(off.max(axis=(0, 1, 3))))
        yield f"relative error is {off.max():.3g} times the bound at s = {q[0, 0, row, 0]:g}"


def whole_is(case: Case, other: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Outputs put together from other calls are the golden ones of `case` within the bounds of D."""
    for name, limit in compute(case).outputs.items():
        found = tolerance.measure(name, other[name].astype(np.float64), limit)
        yield from (text for _, text in found.failures)


def part_of(case: Case, rows: slice, keys: slice, state: Mapping[str, np.ndarray]) -> Case:
    """Some queries and keys of a case, after `state`."""
    cut = {"q": rows, "k": keys, "v": keys}
    arrays = {n: x[..., cut[n], :] if n in cut else x for n, x in case.arrays.items()}
    held = {f"initial_{n}": x.astype(np.float64) for n, x in state.items() if n in STATES}
    dtypes = {**case.dtypes, **dict.fromkeys(held, compute_dtype(case.dtype))}
    return replace(case, arrays={**arrays, **held}, dtypes=dtypes)


def resumed(adapter: Adapter, make: Callable[[Scene], Case]) -> Iterator[str]:
    """A sequence split in two, the second part after the state of the first, gives what the whole gives."""
    for causal in (True, False):
        case = make(Scene("property-resumed", S, S, params={"causal": causal, "return_state": True}))
        rows = slice(0, SHORT) if causal else slice(None)
        first = core.outputs(adapter, part_of(case, rows, slice(0, SHORT), {}))
        after = slice(SHORT, None) if causal else slice(None)
        second = core.outputs(adapter, part_of(case, after, slice(SHORT, None), first))
        o = np.concatenate([first["o"], second["o"]], axis=-2) if causal else second["o"]
        yield from whole_is(case, {**second, "o": o})


def chunked(adapter: Adapter, make: Callable[[Scene], Case]) -> Iterator[str]:
    """Chunks of one token, of a few, and one of everything give the same outputs and gradients."""
    case = make(LAST_CAUSAL)
    for size in (1, 5, 1000):
        yield from judged(adapter, replace(case, params={**case.params, "chunk_size": size}), case, lambda name, x: x)


def step_by_step(adapter: Adapter, make: Callable[[Scene], Case]) -> Iterator[str]:
    """The recurrence, one token after the other from nothing, gives what the causal form gives."""
    if not core.asked(adapter, f"{make(PLAIN).op}_step"):
        raise Unsupported("has no step of its own")
    case = make(Scene("property-steps", STEPS, STEPS, params={**CAUSAL, "return_state": True}))
    kept = {n: x for n, x in case.params.items() if n not in (*CAUSAL, *STATEFUL)}
    found: list[np.ndarray] = []
    state: dict[str, np.ndarray] = {}
    for t in range(STEPS):
        arrays = {f"{n}_t": case.arrays[n][..., t, :] for n in ("q", "k", "v")}
        arrays |= {n: x for n, x in case.arrays.items() if n not in ("q", "k", "v")}
        arrays |= {f"initial_{n}": x.astype(np.float64) for n, x in state.items()}
        dtypes = {n: compute_dtype(case.dtype) for n in arrays if not n.endswith("_t")}
        step = core.outputs(adapter, replace(case, op=f"{case.op}_step", arrays=arrays, params=kept, dtypes=dtypes))
        state = {n: x for n, x in step.items() if n in STATES}
        found.append(step["o_t"])
    yield from whole_is(case, {**state, "o": np.stack(found, axis=-2)})


def with_states(op: Op, params: Mapping[str, Any]) -> bool:
    """Ops that can be resumed."""
    return op.group in ROWS and op.vjp and "return_state" in op.own


def attention_like(op: Op, params: Mapping[str, Any]) -> bool:
    """Attention ops and statistics over them; weights functions only where they say something of their own."""
    return (op.group in ROWS and op.vjp) or "op" in params


def with_weights(op: Op, params: Mapping[str, Any]) -> bool:
    """The same and the weights functions."""
    return op.group in ROWS or "op" in params


def has_kink(op: Op, params: Mapping[str, Any]) -> bool:
    """Attention ops whose slope jumps."""
    return op.group == "a" and op.vjp and bool(op.kinks(params))


def free_length(op: Op, params: Mapping[str, Any]) -> bool:
    """Ops whose result may not depend on the amount of padding."""
    return attention_like(op, params) and params.get("length") != "all"


PROPERTIES = (
    Property("rerun", attention_like, rerun),
    Property("causal_prefix", with_weights, causal_prefix),
    Property("padding_contents", with_weights, padding_contents),
    Property("key_permutation", attention_like, key_permutation),
    Property("batch_mates", attention_like, batch_mates),
    Property("padding_amount", free_length, padding_amount),
    Property("dropout_bits", lambda op, params: op.group == "a" and op.dropout, dropout_bits),
    Property("kink_gradients", has_kink, kink_gradients),
    Property("visible_nan", attention_like, visible_nan),
    Property("resumed", with_states, resumed),
    Property("chunked", with_states, chunked),
    Property("step_by_step", with_states, step_by_step),
    Property("sigmoid_tail", lambda op, params: op.name == "sigmoid_attention_weights", sigmoid_tail),
)


def subjects(op: Op, profile: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(label, params) under which the properties of an op are checked."""
    if op.binding is STATISTICS:
        ops = op.subjects() if profile == "full" else op.subjects()[1:2]
        yield from ((f".{subject.name}", {"op": subject.name}) for subject in ops)
        return
    for variant in op.variants[: 4 if profile == "full" else 1]:
        if LENGTH_ARRAY not in variant.values():
            yield f".{variant_label(variant)}" if variant else "", variant


def in_profile(item: Property, op: Op, profile: str) -> bool:
    """The quick profile leaves most of the ops with states to the full one: their graphs are long to compile."""
    return profile == "full" or op.group not in ("b", "c") or (op.vjp and item.name in QUICK_WITH_STATES)


def check_property(
    adapter: Adapter, op: Op, item: Property, label: str, params: Mapping[str, Any], dtype: str
) -> CaseResult:
    """Judge one property of one op."""
    started, found, reason = time.perf_counter(), Findings(), ""

    def make(scene: Scene) -> Case:
        return attention_case(op, scene, params, label.strip("."), dtype)

    try:
        for text in item.run(adapter, make):
            found.fail(item.name, text)
    except Unsupported as refusal:
        reason = str(refusal)
    except Exception as error:  # an adapter may raise anything, and the run goes on
        found.fail("exception", f"{item.name}: {type(error).__name__}: {error}")
    status = "fail" if found.failures else "unsupported" if reason else "pass"
    seconds = time.perf_counter() - started
    identity = property_id(op, dtype, item, label)
    return CaseResult(identity, adapter.name, op.name, dtype, status, (), tuple(found.failures), reason, seconds)


def check_error(adapter: Adapter, op: Op, sample: ErrorSample) -> CaseResult:
    """A wrong call raises the right exception, with a text that names the op and what is wrong (A12)."""
    found = Findings()
    arrays = {name: adapter.array(x, x.dtype.name) for name, x in sample.arrays.items()}
    expected = f"{sample.exception.__name__} matching {sample.pattern!r}"
    try:
        adapter.call(op.name, arrays, sample.params)
        found.fail("error", f"nothing was raised; expected {expected}")
    except Exception as error:
        text = str(error)
        if not isinstance(error, sample.exception):
            found.fail("error", f"{type(error).__name__}: {text}; expected {expected}")
        elif not text.startswith(op.name.rpartition(".")[2]):
            found.fail("error", f"the text does not begin with the name of the function, {op.name}: {text}")
        elif not re.search(sample.pattern, text, re.DOTALL):
            found.fail("error", f"{text!r}; expected {expected}")
    status = "fail" if found.failures else "pass"
    return CaseResult(error_id(op, sample), adapter.name, op.name, "float32", status, (), tuple(found.failures))


def property_id(op: Op, dtype: str, item: Property, label: str) -> str:
    return f"{op.name}/{dtype}/property.{item.name}{label}"


def error_id(op: Op, sample: ErrorSample) -> str:
    return f"{op.name}/float32/error.{sample.name}"


def check_all(
    adapter: Adapter, op: Op, profile: str, dtypes: tuple[str, ...], keep: Callable[[str], bool] = lambda identity: True
) -> Iterator[CaseResult]:
    """Every property of an op on an adapter, in float32 or its first dtype (full: in all), and the errors."""
    served = [dtype for dtype in dtypes if dtype in op.dtypes]
    preferred = ["float32"] if "float32" in served else served[:1]
    for dtype in served if profile == "full" else preferred:
        for label, params in subjects(op, profile):
            for item in PROPERTIES:
                asked = in_profile(item, op, profile) and item.applies(op, params)
                if asked and keep(property_id(op, dtype, item, label)):
                    yield check_property(adapter, op, item, label, params, dtype)
    for sample in op.errors(op) if getattr(adapter, "errors", False) and "float32" in dtypes else ():
        if sample.fits(adapter.dtypes) and keep(error_id(op, sample)):
            yield check_error(adapter, op, sample)


def identities(profile: str) -> Iterator[str]:
    """Ids of everything that `check_all` may yield."""
    for op in OPDB:
        for dtype in op.dtypes:
            for label, params in subjects(op, profile):
                items = [item for item in PROPERTIES if in_profile(item, op, profile) and item.applies(op, params)]
                yield from (property_id(op, dtype, item, label) for item in items)
        yield from (error_id(op, sample) for sample in op.errors(op))
