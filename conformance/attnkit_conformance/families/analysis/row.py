"""Rows of the op database: the analyses that take arrays. They have no gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter

import numpy as np

from attnkit_conformance.families.analysis import samples
from attnkit_conformance.model.binding import Binding, Signature, arguments_by_kind, name_outputs
from attnkit_conformance.model.case import Case, ErrorSample, Sample
from attnkit_conformance.model.errors import Wrong, calls, zeros
from attnkit_conformance.model.grammar import Choice, Level, Row
from attnkit_conformance.model.op import Op
from attnkit_conformance.model.types import Arrays, Params, Results
from attnkit_conformance.scenes.layouts import apart

Samples = Callable[[Op, str, str], Iterator[Sample]]
RowCase = Callable[[Op, str, Row, str, float], Case]
NEEDS_LINALG = ("analysis.condition_number", "analysis.effective_rank")  # the standard's extension


def analysis_forward(module: object, op: Signature, arrays: Arrays, params: Params) -> Results:
    """`analysis.<name>(...)`."""
    args, keywords = arguments_by_kind(op, arrays, params)
    return name_outputs(op, params, attrgetter(op.name)(module)(*args, **keywords))


def analysis_magnitudes(
    module: object, op: Signature, arrays: Arrays, params: Params, cotangents: Arrays, suffix: str
) -> Results:
    """`analysis.<name>_magnitudes(...)`, of the outputs."""
    args, keywords = arguments_by_kind(op, arrays, params)
    return dict(attrgetter(op.name + suffix)(module)(*args, **keywords))


ANALYSIS = Binding(analysis_forward, analysis_magnitudes)


def analysis_errors(op: Op) -> Iterator[ErrorSample]:
    """Dtypes and shapes of the arrays, and the parameter of each."""
    good = {
        "weights": zeros(2, 3, 5), "x": zeros(2, 3, 5), "branch": zeros(2, 3, 5), "residual": zeros(2, 3, 5),
        "a": zeros(2, 3, 3),
    }  # fmt: skip
    first = op.arguments[0]
    wrong: list[Wrong] = [(first, zeros(2, 3, 3, dtype=np.int32), TypeError, f"{first}.*int32")]
    for mask in op.optional:
        wrong.append((mask, zeros(2, 1, 1), TypeError, f"{mask}.*float32|{mask}.*boolean"))
        wrong.append((mask, zeros(7, dtype=bool), ValueError, mask))
    own: dict[str, list[Wrong]] = {
        "percent": [("percent", 0, ValueError, "percent"), ("percent", 101.0, ValueError, "percent")],
        "percents": [("percents", (1.0, -2.0), ValueError, "percent"), ("percents", ("1",), TypeError, "percent")],
        "rank": [("rank", 0, ValueError, "rank"), ("rank", 1.5, TypeError, "rank")],
        "newton_steps": [("newton_steps", -1, ValueError, "newton_steps"), ("a", zeros(2, 3), ValueError, r"\ba\b")],
        "init_scale": [("init_scale", 0.0, ValueError, "init_scale")],
        "pooled": [("residual", zeros(2, 3, 4), ValueError, "residual")],
    }
    wrong += [sample for name in op.own for sample in own.get(name, [])]
    if op.name in NEEDS_LINALG:
        wrong.append(("a", zeros(3, 0), ValueError, r"\ba\b"))
    yield from calls(op, good, op.variants[0], *wrong)


OF_HIDING = {"visible": ("pairs", "heads", "keys"), "mask": ("masked", "1d")}
HIDING: tuple[Choice, ...] = tuple((name, level) for name, levels in OF_HIDING.items() for level in levels)
"""What is hidden holds NaN."""
FRACTIONAL: Mapping[str, tuple[Level, ...]] = {"fractional": (None, True)}
GRAMMARS: Mapping[Samples, tuple[Mapping[str, tuple[Level, ...]], RowCase, tuple[Row, ...]]] = {
    samples.weights_samples: (samples.WEIGHTS, samples.weights_row, samples.LONG_WEIGHTS),
    samples.anisotropy_samples: (samples.VECTORS, samples.vectors_row, samples.LONG_VECTORS),
    samples.ratio_samples: (samples.RATIO, samples.ratio_row, samples.LONG_VECTORS),
    samples.spectra_samples: (samples.SPECTRA, samples.spectra_row, samples.LARGE_SPECTRA),
}


def row(
    name: str,
    formula: str,
    arguments: tuple[str, ...],
    outputs: tuple[str, ...],
    samples: Samples,
    own: tuple[str, ...] = (),
    optional: tuple[str, ...] = (),
    growth: Callable[[Case], float] | None = None,
    variants: tuple[Params, ...] = ({},),
    levels: Mapping[str, tuple[Level, ...]] | None = None,
) -> Op:
    """An analysis; its grammar is that of its samples, with `levels`."""

    def names(params: Params) -> tuple[str, ...]:
        return outputs

    return Op(
        name=f"analysis.{name}",
        formula=formula,
        arguments=arguments,
        outputs=names,
        samples=samples,
        own=own,
        levels={**GRAMMARS[samples][0], **(levels or {})},
        row_case=GRAMMARS[samples][1],
        sizes=GRAMMARS[samples][2],
        forbidden=apart(*HIDING),
        variants=variants,
        optional=optional,
        not_differentiable=outputs,
        compute_outputs=outputs,
        binding=ANALYSIS,
        errors=analysis_errors,
        vjp=False,
        dropout=False,
        growth=growth or (lambda case: 1.0),
    )


WEIGHTS, SEEN = ("weights",), ("visible",)
OPS: tuple[Op, ...] = (
    row(
        "concentration", "share of the row sum held by the largest percent of the weights", WEIGHTS, ("share",),
        samples.weights_samples, ("percent", "fractional"), SEEN,
        variants=({"percent": 10.0}, {"percent": 2.5, "fractional": True}, {"percent": 100.0}),
        levels={"percent": (10.0, 2.5, 100.0), **FRACTIONAL},
    ),
    row(
        "concentration_curve", "the same at several percents", WEIGHTS, ("shares",),
        samples.weights_samples, ("percents", "fractional"), SEEN,
        variants=(
            {"percents": (0.2, 10.0, 50.0)},
            {"percents": (1.0, 33.0), "fractional": True},
            {"percents": (100.0, 1.0, 99.9)},
        ),
        levels={"percents": ("0.2+10+50", "1+33", "100+1+99.9"), **FRACTIONAL},
    ),
    row(
        "mass_at_rank", "share of the row sum held by the rank-th largest weight", WEIGHTS, ("share",),
        samples.weights_samples, ("rank",), SEEN, variants=({"rank": 1}, {"rank": 3}, {"rank": 60}),
        levels={"rank": (1, 3, 60)},
    ),
    row(
        "sparsity", "exact zeros among visible pairs, null and dead rows, active keys", WEIGHTS,
        ("zeros", "null", "dead", "active"), samples.weights_samples, (), SEEN,
    ),
    row(
        "anisotropy", "(‖Σû‖² - Σ‖û‖²) / (m(m - 1)), û = x/‖x‖", ("x",), ("value", "used", "excluded"),
        samples.anisotropy_samples, (), ("mask",),
    ),
    row(
        "variance_ratio", "Var(branch) / Var(residual)", ("branch", "residual"), ("ratio",),
        samples.ratio_samples, ("pooled",), ("mask",),
    ),
    row(
        "newton_residuals", "‖A Xₖ A - A‖₂ / ‖A‖₂ in float64", ("a",), ("residuals",),
        samples.spectra_samples, ("newton_steps", "init_scale"), (), samples.residual_growth, levels=samples.NEWTON,
    ),
    row(
        "condition_number", "σ₁ / σ_min in float64", ("a",), ("condition",),
        samples.spectra_samples, (), (), samples.condition_growth, levels=samples.SIDES,
    ),
    row(
        "effective_rank", "exp(-Σ p log p), p = σ/Σσ, in float64", ("a",), ("rank",),
        samples.spectra_samples, levels=samples.SIDES,
    ),
)  # fmt: skip
