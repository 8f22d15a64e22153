"""Which invariances and exact rules hold for which op, and the checks of them and of errors (A12)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from attnkit_conformance.adapter import Adapter, IllFormed, Unsupported
from attnkit_conformance.core import CaseResult, Findings, declined_by, typed_arrays
from attnkit_conformance.judge import invariances
from attnkit_conformance.judge.invariances import Violation
from attnkit_conformance.model import policies
from attnkit_conformance.model.binding import STATISTICS
from attnkit_conformance.model.case import Case, ErrorSample
from attnkit_conformance.model.op import Op
from attnkit_conformance.model.scene import Scene
from attnkit_conformance.model.tolerance import Measured
from attnkit_conformance.model.types import Params
from attnkit_conformance.scenes import rows
from attnkit_conformance.scenes.attention import LENGTH_ARRAY, scene_case, variant_label

QUICK_WITH_STATES = ("causal_prefix", "padding_contents", "step_by_step")
ROWS = ("a", "b", "c")  # groups of ops whose queries have rows of weights
Check = Callable[[Adapter, Callable[[Scene], Case]], Iterator[Violation]]


@dataclass(frozen=True)
class Property:
    """`run(adapter, make)` yields violations, `make(scene)` being a case of the op under judgement."""

    name: str
    holds: Callable[[Op, Params], bool]  # for ops that do not list it in their invariances
    run: Check
    policy: str = ""  # for which it asks
    plain: Check | None = None  # what is left of it without that, if anything

    def applies(self, op: Op, params: Params) -> bool:
        declines = {*op.declines, *op.subject(params).declines}
        return self.name not in declines and (self.name in op.invariances or self.holds(op, params))

    def asked(self, adapter: Adapter) -> Check | None:
        """What an adapter is asked: without what it declines; None if nothing is left."""
        declines = declined_by(adapter)
        return None if self.name in declines else self.plain if self.policy in declines else self.run


def with_states(op: Op, params: Params) -> bool:
    """Ops that can be resumed."""
    return op.group in ROWS and op.vjp and "return_state" in op.own


def attention_like(op: Op, params: Params) -> bool:
    """Attention ops and statistics over them; weights functions only if they can fail on their own."""
    return (op.group in ROWS and op.vjp) or "op" in params


def with_weights(op: Op, params: Params) -> bool:
    """The same and the weights functions."""
    return op.group in ROWS or "op" in params


def has_kink(op: Op, params: Params) -> bool:
    """Attention ops whose slope jumps."""
    return op.group == "a" and op.vjp and bool(op.kinks(params))


def free_length(op: Op, params: Params) -> bool:
    """Ops whose result may not depend on the amount of padding."""
    return attention_like(op, params) and params.get("length") != "all"


PROPERTIES = (
    Property("rerun", attention_like, invariances.rerun),
    Property("causal_prefix", with_weights, invariances.causal_prefix),
    Property(
        "padding_contents",
        with_weights,
        invariances.padding_contents,
        policies.POISONED_PADDING,
        invariances.finite_padding,
    ),
    Property("key_permutation", attention_like, invariances.key_permutation),
    Property("batch_mates", attention_like, invariances.batch_mates),
    Property("padding_amount", free_length, invariances.padding_amount),
    Property("dropout_bits", lambda op, params: op.group == "a" and op.dropout, invariances.dropout_bits),
    Property("kink_gradients", has_kink, invariances.kink_gradients),
    Property("visible_nan", attention_like, invariances.visible_nan, policies.VISIBLE_NAN),
    Property("resumed", with_states, invariances.judge_resumption),
    Property("chunked", with_states, invariances.judge_chunks),
    Property("step_by_step", with_states, invariances.step_by_step),
    Property("sigmoid_tail", lambda op, params: False, invariances.sigmoid_tail, policies.TAILS),
)
DECLINABLE = (*policies.POLICIES, *(item.name for item in PROPERTIES if item.name not in policies.POLICIES))
"""What an adapter may declare not to promise."""


def subjects(op: Op, profile: str) -> Iterator[tuple[str, Params]]:
    """(label, params) under which the properties of an op are checked."""
    if op.binding is STATISTICS:
        ops = op.subjects if profile == "full" else op.subjects[1:2]
        yield from ((f".{subject.name}", {"op": subject.name}) for subject in ops)
        return
    for variant in op.variants[: 4 if profile == "full" else 1]:
        if LENGTH_ARRAY not in variant.values():
            yield f".{variant_label(variant)}" if variant else "", variant


def in_profile(item: Property, op: Op, profile: str) -> bool:
    """The quick profile leaves most ops with states to the full one, because their graphs compile slowly."""
    return profile == "full" or op.group not in ("b", "c", "f") or (op.vjp and item.name in QUICK_WITH_STATES)


def check_property(adapter: Adapter, op: Op, item: Property, label: str, params: Params, dtype: str) -> CaseResult:
    """Judge one property of one op; a failure that hangs on a policy names it."""
    run = item.asked(adapter) or item.run
    result = run_check(adapter, op, item, run, label, params, dtype)
    if result.status != "fail" or run is not item.run or item.policy in ("", policies.TAILS):
        return result
    plain = item.plain and run_check(adapter, op, item, item.plain, label, params, dtype)
    return replace(result, policy=item.policy) if plain is None or plain.status == "pass" else result


def run_check(
    adapter: Adapter, op: Op, item: Property, run: Check, label: str, params: Params, dtype: str
) -> CaseResult:
    """The verdict on a property as it is, or on what is left of it."""
    started, findings, reason = time.perf_counter(), Findings(), ""

    def make(scene: Scene) -> Case:
        return scene_case(op, scene, params, label.strip("."), dtype)

    try:
        for violation in run(adapter, make):
            if isinstance(violation, Measured):
                findings.measured.append(violation)
            texts = [text for _, text in violation.failures] if isinstance(violation, Measured) else [violation]
            findings.failures += [(item.name, text) for text in texts]
    except Unsupported as refusal:
        reason = str(refusal)
    except IllFormed:
        raise
    except Exception as error:  # an adapter may raise anything, and the run goes on
        findings.fail("exception", f"{item.name}: {type(error).__name__}: {error}")
    status = "fail" if findings.failures else "unsupported" if reason else "pass"
    seconds = time.perf_counter() - started
    identity = property_id(op, dtype, item, label)
    measured, failures = tuple(findings.measured), tuple(findings.failures)
    return CaseResult(identity, adapter.name, op.name, dtype, status, measured, failures, reason, seconds)


def check_error(adapter: Adapter, op: Op, sample: ErrorSample) -> CaseResult:
    """An invalid call raises the right exception, with a text that names the op and the problem (A12).

    An implementation that does not support the call may say so instead.
    """
    findings, reason = Findings(), ""
    expected = f"{sample.exception.__name__} matching {sample.pattern!r}"
    try:
        arrays = {name: adapter.array(x, x.dtype.name) for name, x in sample.arrays.items()}
        adapter.call(op.name, arrays, sample.params)
        findings.fail("error", f"nothing was raised; expected {expected}")
    except Unsupported as refusal:
        reason = str(refusal)
    except Exception as error:
        text = str(error)
        if not isinstance(error, sample.exception):
            findings.fail("error", f"{type(error).__name__}: {text}; expected {expected}")
        elif not text.startswith(op.name.rpartition(".")[2]):
            findings.fail("error", f"the text does not begin with the name of the function, {op.name}: {text}")
        elif not re.search(sample.pattern, text, re.DOTALL):
            findings.fail("error", f"{text!r}; expected {expected}")
    status = "fail" if findings.failures else "unsupported" if reason else "pass"
    return CaseResult(
        error_id(op, sample), adapter.name, op.name, "float32", status, (), tuple(findings.failures), reason
    )


def check_freed(adapter: Adapter, free: Callable[[object], object], op: Op, name: str) -> CaseResult:
    """A call whose array of this name is let `free` raises an error that names the array and says so. To
    refuse it is not enough: the next implementation would read what is not there.
    """
    findings, case = Findings(), rows.sample_named(op, "float32", "pair.plain").draw(0)
    try:
        arrays = typed_arrays(adapter, case)
        adapter.call(op.name, {**arrays, name: free(arrays[name])}, case.params)
        findings.fail("freed", f"{name} has no storage, and a result was returned; expected an error that says so")
    except Unsupported as refusal:
        findings.fail("freed", f"{name} has no storage: refused ({refusal}); expected an error")
    except Exception as error:
        text = str(error)
        if not (text.startswith(op.name.rpartition(".")[2]) and re.search(rf"\b{name}\b.*storage", text)):
            findings.fail("freed", f"{type(error).__name__}: {text}; expected {op.name}, {name} and its storage")
    identity, status = freed_id(op, name), "fail" if findings.failures else "pass"
    return CaseResult(identity, adapter.name, op.name, "float32", status, (), tuple(findings.failures))


def freed_id(op: Op, name: str) -> str:
    return f"{op.name}/float32/error.freed-{name}"


def property_id(op: Op, dtype: str, item: Property, label: str) -> str:
    return f"{op.name}/{dtype}/property.{item.name}{label}"


def error_id(op: Op, sample: ErrorSample) -> str:
    return f"{op.name}/float32/error.{sample.name}"


def check_all(
    adapter: Adapter, op: Op, profile: str, dtypes: tuple[str, ...], keep: Callable[[str], bool] = lambda identity: True
) -> Iterator[CaseResult]:
    """Every property of an op on an adapter, in float32 or its first dtype (full: in all), and the errors."""
    common = [dtype for dtype in dtypes if dtype in op.dtypes]
    preferred = ["float32"] if "float32" in common else common[:1]
    for dtype in common if profile == "full" else preferred:
        for label, params in subjects(op, profile):
            for item in PROPERTIES:
                applies = in_profile(item, op, profile) and item.applies(op, params)
                if applies and item.asked(adapter) and keep(property_id(op, dtype, item, label)):
                    yield check_property(adapter, op, item, label, params, dtype)
    for sample in op.errors(op) if getattr(adapter, "errors", False) and "float32" in dtypes else ():
        if sample.fits(adapter.dtypes) and keep(error_id(op, sample)):
            yield check_error(adapter, op, sample)
    free: Callable[[object], object] | None = getattr(adapter, "freed", None)
    if free is not None and "float32" in dtypes:
        kept = (name for name in op.arguments if keep(freed_id(op, name)))
        yield from (check_freed(adapter, free, op, name) for name in kept)


def identities(op: Op, profile: str) -> Iterator[str]:
    """Ids of everything that `check_all` may yield."""
    for dtype in op.dtypes:
        for label, params in subjects(op, profile):
            items = [item for item in PROPERTIES if in_profile(item, op, profile) and item.applies(op, params)]
            yield from (property_id(op, dtype, item, label) for item in items)
    yield from (error_id(op, sample) for sample in op.errors(op))
    yield from (freed_id(op, name) for name in op.arguments)
