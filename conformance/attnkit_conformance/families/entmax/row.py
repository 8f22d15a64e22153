"""Rows of the op database: sparsemax, α-entmax, ReLA and SimA."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from attnkit_conformance.families.entmax import samples as sparse_samples
from attnkit_conformance.model import errors, tolerance
from attnkit_conformance.model.case import ErrorSample
from attnkit_conformance.model.errors import GOOD, E, L, S, wrong, zeros
from attnkit_conformance.model.op import ALL_TOKENS, OPTIONAL, QKV, Op, o_only
from attnkit_conformance.scenes.attention import LENGTH_ARRAY, attention_samples
from attnkit_conformance.scenes.rows import SMALL, TILED
from attnkit_conformance.scenes.sizes import SHAPES

MASKS = tuple(name for name in OPTIONAL if name != "length")
HIDDEN = GOOD["q"].shape[1] * E


def entmax_errors(op: Op) -> Iterator[ErrorSample]:
    """The errors of group a, and α that is not 1 or in [1.01, 2]."""
    yield from errors.attention_errors(op)
    for alpha in (0.5, 1.005, 2.5, float("nan")):
        yield wrong(op, f"alpha-{alpha}", ValueError, "alpha", {"alpha": alpha})
    yield wrong(op, "alpha-boolean", TypeError, "alpha", {"alpha": True})
    yield wrong(op, "alpha-shape", ValueError, "alpha", alpha=np.full(L, 1.5, np.float32))
    yield wrong(op, "alpha-integer", TypeError, "alpha", alpha=np.full((L, 1), 2))


def rela_errors(op: Op) -> Iterator[ErrorSample]:
    """The errors of group a, and weights, axes and eps that do not fit."""
    extra: Mapping[str, np.ndarray] = {} if op.name.endswith("_weights") else {"norm_weight": zeros(HIDDEN)}
    plain = replace(op, arguments=tuple(name for name in op.arguments if name in GOOD))
    for sample in errors.attention_errors(plain):
        yield replace(sample, arrays={**extra, **sample.arrays})
    if not extra:
        yield wrong(plain, "norm-axis-not-taken", ValueError, "unexpected argument 'norm_axis'", {"norm_axis": "head"})
        return
    for name, arrays, params, exception, pattern in (
        ("norm-weight-of-one-head", {"norm_weight": zeros(E)}, {}, ValueError, "norm_weight"),
        ("norm-weight-of-all-heads", {}, {"norm_axis": "head"}, ValueError, "norm_weight"),
        ("norm-weight-integer", {"norm_weight": zeros(HIDDEN, dtype=np.int32)}, {}, TypeError, "norm_weight"),
        ("gate-weight-shape", {"gate_weight": zeros(HIDDEN + 1)}, {}, ValueError, "gate_weight"),
        ("gate-weight-boolean", {"gate_weight": zeros(HIDDEN, dtype=bool)}, {}, TypeError, "gate_weight"),
        ("norm-axis-unknown", {}, {"norm_axis": "token"}, ValueError, "norm_axis.*hidden"),
        ("eps-zero", {}, {"eps": 0.0}, ValueError, "eps"),
        ("length-not-taken", {}, {"length": "all"}, ValueError, "unexpected argument 'length'"),
    ):
        yield wrong(plain, name, exception, pattern, params, **{**extra, **arrays})


def sima_errors(op: Op) -> Iterator[ErrorSample]:
    """Masks of pairs, arguments of other groups, and padded keys without padded queries."""
    same = {"q": zeros(2, 2, S, GOOD["k"].shape[-1])}
    for name, arrays, params, exception, pattern in (
        ("mask-of-pairs", {"mask": zeros(L, S, dtype=bool)}, {}, ValueError, "mask.*key mask"),
        ("mask-float", {"mask": zeros(1, S)}, {}, TypeError, "mask"),
        ("causal", {}, {"causal": True}, ValueError, "unexpected argument 'causal'"),
        ("bias", {"bias": zeros(L, S)}, {}, ValueError, "unexpected argument 'bias'"),
        ("scale", {}, {"scale": 1.0}, ValueError, "unexpected argument 'scale'"),
        ("dropout", {}, {"dropout": (0.5, 0)}, ValueError, "unexpected argument 'dropout'"),
        ("eps-zero", {}, {"eps": 0.0}, ValueError, "eps"),
        ("eps-nan", {}, {"eps": float("nan")}, ValueError, "eps"),
        ("features-differ", {"k": zeros(2, 2, S, 3)}, {}, ValueError, r"\bk\b"),
        ("key-mask-of-self-attention", {**same, "mask": zeros(1, S, dtype=bool)}, {}, ValueError, "query_mask"),
        ("key-lengths-of-self-attention", same, {"key_lengths": 2}, ValueError, "query_mask"),
    ):
        yield wrong(op, name, exception, pattern, params, **arrays)


# A3: as many queries as keys are the same tokens, of which no mask may hide the keys alone
SAME = tuple(x for x in (*SMALL, *TILED, *SHAPES) if len(set(str(x).split("x"))) == 1)
SELF_ATTENTION = tuple(
    (("shape", shape), hidden)
    for shape in SAME
    for hidden in (("mask", "keys"), ("mask", "1d"), *(("key_lengths", name) for name in ("some", "zero", "number")))
)

NOT_ZERO = ("normal", "tiny", "large", "equal_keys")  # a channel of zeros among integers has a norm of eps

OPS: tuple[Op, ...] = (
    Op(
        name="sparsemax_attention",
        formula="w = [s - τ]₊, Σw = 1",
        arguments=QKV,
        outputs=o_only,
        samples=sparse_samples.entmax_samples,
        group="a",
        optional=MASKS,
        differentiable=(*QKV, "bias", "scale"),
        errors=errors.attention_errors,
        complete=partial(sparse_samples.entmax_complete, alpha=2.0),
        steep=lambda params: True,
        growth=partial(sparse_samples.entmax_growth, alpha=2.0),
        weights=True,
        statistics=True,
        bias_inf=True,
    ),
    Op(
        name="entmax_attention",
        formula="w = [(alpha-1)s - τ]₊^(1/(alpha-1)), Σw = 1",
        arguments=QKV,
        outputs=o_only,
        samples=sparse_samples.entmax_samples,
        group="a",
        own=("alpha",),
        variants=({}, {"alpha": 1.25}, {"alpha": LENGTH_ARRAY}, {"alpha": 2.0}, {"alpha": 1.0}),
        levels={"alpha": (None, 1.25, LENGTH_ARRAY, 2.0, 1.0)},
        extra=((sparse_samples.ONE_QUERY, {"alpha": 1.25}),),
        optional=(*MASKS, "alpha"),
        differentiable=(*QKV, "bias", "scale", "alpha"),
        errors=entmax_errors,
        complete=sparse_samples.entmax_complete,
        steep=sparse_samples.steep,
        growth=sparse_samples.entmax_growth,
        weights=True,
        statistics=True,
        bias_inf=True,
    ),
    Op(
        name="rela_attention",
        formula="RMSNorm of relu(s) v over the joined heads, gated",
        arguments=(*QKV, "norm_weight"),
        outputs=o_only,
        samples=attention_samples,
        group="a",
        own=("gate_weight", "norm_axis", "eps"),
        variants=(
            {},
            {"norm_axis": "head", "eps": 1e-2},
            {"gate_weight": LENGTH_ARRAY},
            {"norm_axis": "head", "gate_weight": LENGTH_ARRAY, "eps": 1e-2},
        ),
        levels={
            "norm_axis": (None, "head"),
            "gate_weight": (None, LENGTH_ARRAY),
            "eps": (None, 1e-2),
            "width": (
                "12x20",
                "17x5",
                "1x4",
                "8x8",
            ),  # the norm of a single feature magnifies the rounding of sums near 0
        },
        outside=("norm_weight", "gate_weight", "norm_axis", "eps"),
        optional=(*MASKS, "gate_weight"),
        differentiable=(*QKV, "bias", "scale", "norm_weight", "gate_weight"),
        errors=rela_errors,
        kinks=lambda params: (0.0,),
        complete=sparse_samples.rela_complete,
        extra=(
            (sparse_samples.SINGLE, {"norm_axis": "head", "eps": 100.0}),
            (sparse_samples.SINGLE, {"norm_axis": "head", "gate_weight": LENGTH_ARRAY, "eps": 1.0}),
            (sparse_samples.NO_VALUES, {"eps": 1e-2}),
            (sparse_samples.NO_VALUES, {"norm_axis": "head", "gate_weight": LENGTH_ARRAY, "eps": 1e-2}),
        ),
        growth=sparse_samples.rela_growth,
        resummed=sparse_samples.rela_resummed,
        zeros=sparse_samples.rela_zeros,
        joined=True,
        weights=True,
        statistics=True,
    ),
    Op(
        name="sima_attention",
        formula="o = q̂ (k̂ᵀ v), x̂ = x / max(Σ_t abs(x), eps) over the tokens",
        arguments=QKV,
        outputs=o_only,
        samples=sparse_samples.sima_samples,
        group="d",
        own=("eps",),
        levels={"shape": ("7x13", "13x7", "9x9", "1x11"), "eps": (None, 0.5), "values": NOT_ZERO},
        tiles=("65x100", "100x65", "64x64", "33x257"),
        forbidden=SELF_ATTENTION,
        optional=("mask", "key_lengths", "query_mask"),
        differentiable=QKV,
        errors=sima_errors,
        signed=lambda params: True,
        adapt=sparse_samples.sima_adapt,
        growth=tolerance.growth_of_equal_keys,
        zeros=sparse_samples.sima_zeros,
        invariances=ALL_TOKENS,  # there is no causal form
        weights=True,
        dropout=False,
    ),
)
