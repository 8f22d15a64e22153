"""Rows of the op database: gated linear attention and the delta rule, whole and step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from attnkit_conformance.families.linear.row import LINEAR, STEP
from attnkit_conformance.families.linear.samples import INITIAL
from attnkit_conformance.families.recurrent import samples
from attnkit_conformance.families.recurrent.samples import Kind
from attnkit_conformance.model.case import Case, ErrorSample
from attnkit_conformance.model.errors import Wrong, calls, zeros
from attnkit_conformance.model.grammar import Row
from attnkit_conformance.model.op import QKV, STATEFUL, Op, Tokens
from attnkit_conformance.model.types import Keyword
from attnkit_conformance.scenes.attention import LENGTH_ARRAY

Array = np.ndarray
T, D, E = 5, 4, 6
CHUNK = 64
INVARIANCES = ("rerun", "causal_prefix", "padding_contents", "batch_mates", "resumed", "chunked", "step_by_step")
GATE = {"log_gate": lambda x: 2 * x - 1}
OUTSIDE = ("v", *STATEFUL, f"{INITIAL}S")  # what weights do not depend on


def of_gated(row: Row) -> Mapping[str, bool]:
    return {"log_gate": False}


def of_delta(row: Row) -> Mapping[str, bool]:
    decay = row.get("decay", "none")
    return {"beta": True} | ({} if decay == "none" else {"log_decay": decay == "number"})


def rescale(k: Array, size: float) -> Array:
    """Keys of any length."""
    return size * k


def unit(k: Array, size: float) -> Array:
    """Keys of norm 1 at most, which no β makes a state grow by. Those of one feature are shorter than 1: β = 1 would
    leave exactly nothing of a state, where chunks leave what rounding does, which no summand of a result tells."""
    norm = np.linalg.norm(k, axis=-1, keepdims=True)
    keys: Array = min(1.0, size) * k / (norm if k.shape[-1] > 1 else 1 + norm)
    return keys


GATED = Kind(of_gated, rescale)
DELTA = Kind(of_delta, unit, {"decay": "features"})


# ---------------------------------------------------------------------------------------------- errors


def errors(op: Op) -> Iterator[ErrorSample]:
    """Shapes of gates and states, other orders than that of a recurrence, arguments of other groups."""
    good = {"q": zeros(2, 2, T, D), "k": zeros(2, 2, T, D), "v": zeros(2, 2, T, E),
            "log_gate": zeros(2, 2, T, D), "beta": zeros(2, 2, T)}  # fmt: skip
    gate = op.arguments[-1]
    wrong: tuple[Wrong, ...] = (
        ("k", zeros(2, 2, T + 1, D), ValueError, r"\b[kv]\b"),
        ("q", zeros(2, 2, T - 1, D), ValueError, r"\bk\b.*tokens"),
        ("k", zeros(2, 2, T, D + 1), ValueError, r"\bk\b"),
        ("q", zeros(D), ValueError, r"\bq\b"),
        ("k", zeros(3, 2, T, D), ValueError, "leading"),
        ("v", zeros(2, 2, T, E, dtype=np.float16), TypeError, r"\bv\b"),
        ("q", zeros(2, 2, T, D, dtype=np.int32), TypeError, r"\bq\b"),
        (gate, zeros(*good[gate].shape[:2], T + 1, *good[gate].shape[3:]), ValueError, gate),
        (gate, zeros(3, *good[gate].shape[1:]), ValueError, "leading"),
        (gate, zeros(*good[gate].shape, dtype=np.int32), TypeError, gate),
        ("mask", zeros(T, T, dtype=bool), ValueError, "mask.*key mask"),
        ("mask", zeros(1, T), TypeError, "mask"),
        ("mask", zeros(T + 1, dtype=bool), ValueError, "mask"),
        ("key_lengths", zeros(2, 2), TypeError, "key_lengths"),
        ("key_lengths", zeros(3, dtype=np.int64), ValueError, "key_lengths"),
        ("causal", False, ValueError, "causal.*True"),
        ("causal", "upper_left", ValueError, "causal.*True"),
        ("chunk_size", 0, ValueError, "chunk_size"),
        ("chunk_size", 0.5, TypeError, "chunk_size"),
        ("scale", float("nan"), ValueError, "scale"),
        ("return_state", 1, TypeError, "return_state"),
        (f"{INITIAL}S", zeros(2, 2, D, E + 1), ValueError, "initial_state"),
        (f"{INITIAL}S", zeros(3, 2, D, E), ValueError, "initial_state"),
        (f"{INITIAL}S", zeros(2, 2, D, E, dtype=np.int32), TypeError, "initial_state"),
        ("bias", zeros(T, T), ValueError, "unexpected argument 'bias'"),
        ("query_mask", zeros(T, dtype=bool), ValueError, "unexpected argument 'query_mask'"),
        ("enable_gqa", True, ValueError, "unexpected argument 'enable_gqa'"),
        ("window", (1, 0), ValueError, "unexpected argument 'window'"),
        ("impl", "no-such-kernel", ValueError, "impl.*generic"),
    )  # fmt: skip
    of_weights = op.name.endswith("_weights")
    yield from calls(op, good, {}, *(x for x in wrong if not (of_weights and x[0] in OUTSIDE)))


def delta_errors(op: Op) -> Iterator[ErrorSample]:
    """The same, and decays that do not fit."""
    yield from errors(op)
    good = {"q": zeros(2, 2, T, D), "k": zeros(2, 2, T, D), "v": zeros(2, 2, T, E), "beta": zeros(2, 2, T)}
    good = {name: x for name, x in good.items() if name in op.arguments}
    for n, (x, exception) in enumerate((
        (zeros(2, 2, T + 1), ValueError), (zeros(2, 2, T, D + 1), ValueError),
        (zeros(2, 2, T, dtype=np.int32), TypeError),
    )):  # fmt: skip
        yield ErrorSample(f"log_decay-{n}", {**good, "log_decay": x}, {}, exception, "log_decay")


# ---------------------------------------------------------------------------------------------- rows


def delta_growth(case: Case) -> float:
    """A chunk of some 64 tokens adds up corrections of as many keys, though they have d directions alone: what cancels
    is √(64/d) times as large as in the recurrence."""
    k = case.arrays["k"]
    return max(1.0, math.sqrt(min(CHUNK, k.shape[-2]) / k.shape[-1]))


def row(name: str, formula: str, kind: Kind, gates: tuple[str, ...], **own: Keyword) -> Op:
    """An op of whole sequences; the first of its gates is an argument."""
    fields = {"levels": samples.LEVELS, "errors": errors, "invariances": INVARIANCES, **own}
    of_tokens = dict.fromkeys(gates, -2) | ({"beta": -1} if "beta" in gates else {})
    return Op(
        name=name,
        formula=formula,
        arguments=(*QKV, gates[0]),
        outputs=lambda params: ("o", "S") if params.get("return_state") else ("o",),
        samples=samples.samples,
        group="f",
        own=samples.OWN,
        variants=({}, {"initial_state": LENGTH_ARRAY, "return_state": True}),
        sizes=samples.LONG,
        row_case=samples.row_case,
        optional=("mask", "key_lengths", f"{INITIAL}S", *gates[1:]),
        differentiable=(*QKV, *gates, f"{INITIAL}S"),
        compute_outputs=("S",),
        binding=LINEAR,
        zeros=samples.zeros,
        tokens=Tokens({"q": -2, "o": -2, "w": -2}, {"k": -2, "v": -2, **of_tokens, "mask": -1, "w": -1}),
        weights=True,
        outside=OUTSIDE[1:],
        scene_case=samples.property_case,
        kind=kind,
        dropout=False,
        **fields,
    )


def step_of(op: Op) -> Op:
    """The row of `<op>_step`."""
    gates = tuple(name for name in op.differentiable if name not in (*QKV, f"{INITIAL}S"))
    own_levels = {name: op.levels[name] for name in op.levels if name not in samples.LEVELS}
    return Op(
        name=f"{op.name}_step",
        formula=f"one more token of `{op.name}`: (state, q_t, k_t, v_t, {op.arguments[-1]}_t) → (o_t, state)",
        arguments=tuple(f"{name}_t" for name in op.arguments),
        outputs=lambda params: ("o_t", "S"),
        samples=samples.step_samples,
        own=("scale",),
        levels={**samples.STEPS, **own_levels},
        sizes=samples.LONG_STEPS,
        row_case=samples.step_row,
        optional=tuple(f"{name}_t" for name in gates[1:]),
        differentiable=(*(f"{name}_t" for name in (*QKV, *gates)), f"{INITIAL}S"),
        compute_outputs=("S",),
        binding=STEP,
        kind=op.kind,
        dropout=False,
    )


GATED_LINEAR = row(
    "gated_linear_attention",
    "o_t = scale S_tᵀ q_t, S_t = diag(exp(g_t)) S_(t-1) + k_t v_tᵀ",
    GATED,
    ("log_gate",),
    falling=True,
    invariances=(*INVARIANCES, "visible_nan"),
    others=GATE,
)
DELTA_RULE = row(
    "delta_attention",
    "o_t = scale S_tᵀ q_t, S_t = P + β_t k_t (v_t - Pᵀ k_t)ᵀ, P = diag(exp(g_t)) S_(t-1)",
    DELTA,
    ("beta", "log_decay"),
    levels={**samples.LEVELS, "beta": ("usual", "ends"), "decay": ("none", "number", "features")},
    errors=delta_errors,
    growth=delta_growth,
    others={"k": lambda x: -x, "beta": lambda x: 2 - x, "log_decay": lambda x: 2 * x - 1},
)
OPS: tuple[Op, ...] = tuple(member for op in (GATED_LINEAR, DELTA_RULE) for member in (op, step_of(op)))
