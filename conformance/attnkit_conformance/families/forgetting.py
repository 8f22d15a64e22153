"""Row of the op database: forgetting attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from attnkit_conformance.families.linear.decays import log_gates
from attnkit_conformance.families.recurrent.samples import GATES
from attnkit_conformance.families.stick_breaking import adapt_scene
from attnkit_conformance.model import errors, scoring, tolerance
from attnkit_conformance.model.case import Case, ErrorSample, compute_dtype, finfo, generator, rounded
from attnkit_conformance.model.errors import L, S, wrong
from attnkit_conformance.model.op import OPTIONAL, QKV, Op, always, o_and_lse
from attnkit_conformance.model.scene import Scene
from attnkit_conformance.model.types import Params
from attnkit_conformance.scenes import attention
from attnkit_reference._core import Scores, scores
from attnkit_reference.forgetting import forgetting_rows

NAME = "log_forget"
SHARED = "shared"
"""A level of the gates: usual ones, which all heads and items share. The others have the leading axes of q and k."""
LONG = Scene("long", 3, 4096, d=4, e=3, lead=((1,),) * 3)
"""4,096 gates, of which large ones lie before small ones: differences of running sums that are much larger."""
STEPS = Scene("steps", 65, 65, options=("key_lengths", "key_mask", "poison"))


def to_current(scene: Scene, params: Params) -> Scene:
    """The scene without causality, which is no option: keys up to the query's own position."""
    return adapt_scene(scene, {"attend_current": True})


def complete(case: Case) -> Case:
    """The case with gates in the place of the parameter that says of which kind; mixed ones are float32 at least."""
    kind = str(case.params.get(NAME, "usual"))
    options = {name: x for name, x in scoring.options(case).items() if name == "enable_gqa"}
    leading = scores("sample", case.arrays["q"], case.arrays["k"], **options).leading
    shape = (*(() if kind == SHARED else leading), case.arrays["k"].shape[-2], 1)
    rng = generator(f"{case.id.split('/', 2)[2]}/{NAME}")
    gates = log_gates("usual" if kind == SHARED else kind, shape, rng)[..., 0]
    dtype = compute_dtype(case.dtype) if kind == "mixed" else case.dtype
    params = {name: x for name, x in case.params.items() if name != NAME}
    arrays = {**case.arrays, NAME: rounded(gates, dtype)}
    return replace(case, arrays=arrays, params=params, dtypes={**case.dtypes, NAME: dtype})


def growth(case: Case) -> float:
    """D: 1 + max|x|/16, x the scores and what they fade by, as far as their weights do not vanish."""
    rows = forgetting_rows("sample", case.arrays["q"], case.arrays["k"], **scoring.options(case, (NAME,)))
    sc = rows.scores
    plain = scores("sample", case.arrays["q"], case.arrays["k"], **scoring.options(case))
    vanishing = float(finfo(compute_dtype(case.dtype)).smallest_subnormal)
    with np.errstate(invalid="ignore"):
        exponents = np.abs(plain.s) + np.abs(sc.s - plain.s)
    counts = sc.visible & (rows.w >= vanishing) & np.isfinite(exponents)
    return tolerance.growth_of_exponent(float(np.max(exponents, initial=0.0, where=counts)))


def resummed(case: Case) -> tuple[np.ndarray, Scores, np.ndarray]:
    """dw/ds = w where the sum of a row stays."""
    rows = forgetting_rows("sample", case.arrays["q"], case.arrays["k"], **scoring.options(case, (NAME,)))
    return rows.w, rows.scores, case.cotangents["o"]


def forgetting_errors(op: Op) -> Iterator[ErrorSample]:
    """The errors of group a, but causality is no option; gates that do not fit."""
    yield from (sample for sample in errors.attention_errors(op) if sample.name != "causal-unknown")
    yield wrong(op, "causal-not-taken", ValueError, "unexpected argument 'causal'", {"causal": True})
    yield wrong(op, "sink-not-taken", ValueError, "unexpected argument 'sink'", {"sink": 0.0})
    for name, shape in (("tokens", (S + 1,)), ("one", (1,)), ("heads", (3, S)), ("enlarges", (7, 2, 2, S))):
        yield wrong(op, f"{NAME}-{name}", ValueError, NAME, log_forget=np.zeros(shape, np.float32))
    yield wrong(op, f"{NAME}-pairs", ValueError, NAME, log_forget=np.zeros((2, 2, L, S), np.float32))
    yield wrong(op, f"{NAME}-integer", TypeError, NAME, log_forget=np.zeros(S, np.int32))


OPS = (
    Op(
        name="forgetting_attention",
        formula="w = exp(t - m) / Σ exp(t - m), t_ij = s_ij + c_i - c_j, c the running sum of log_forget",
        arguments=(*QKV, NAME),
        outputs=o_and_lse,
        samples=attention.attention_samples,
        group="a",
        own=("return_lse", NAME),
        variants=({}, {"return_lse": True}, {NAME: "mixed"}),
        levels={"return_lse": (None, True), NAME: (*GATES, SHARED), "causal": ("none",)},
        extra=(
            (LONG, {NAME: "mixed", "return_lse": True}),
            *((STEPS, {NAME: kind}) for kind in GATES),
        ),
        optional=tuple(name for name in OPTIONAL if name != "length"),
        differentiable=(*QKV, NAME, "bias", "scale"),
        compute_outputs=("lse",),
        errors=forgetting_errors,
        exponent=always,
        growth=growth,
        resummed=resummed,
        complete=complete,
        adapt=to_current,
        others={NAME: lambda x: 2 * x - 1},
        falling=True,
        ties=False,
        invariances=("causal_prefix",),
        declines=("key_permutation", "padding_amount"),  # keys have an order, and positions are aligned at the last
        weights=True,
        statistics=True,
        bias_inf=True,
    ),
)
