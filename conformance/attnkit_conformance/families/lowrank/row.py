"""Rows of the op database: SOFT, its Newton inverse and landmark samplers, Nyström and Linformer attention."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

import numpy as np

from attnkit_conformance.families.lowrank import rows, samples, softmax_samples
from attnkit_conformance.model.binding import Binding, Signature, arguments_by_kind
from attnkit_conformance.model.case import ErrorSample
from attnkit_conformance.model.errors import GOOD, calls, zeros
from attnkit_conformance.model.op import ALL_TOKENS, QUERIES_AND_KEYS, Op, Tokens, o_only
from attnkit_conformance.model.types import Arrays, Foreign, Params, Results

SELF = {"q": GOOD["k"], "k": GOOD["k"], "v": GOOD["v"]}  # q and k are the same tokens: 5 of 4 features
TOKENS = ("mask", "key_lengths", "query_mask")
OF_TOKENS = {"mask": -1, "query_mask": -1, "o": -2}  # where queries and keys are the same tokens
INVERSE = ("newton_steps", "init_scale", "halvings", "inverse_grad")


def soft_errors(op: Op) -> Iterator[ErrorSample]:
    """Masks of pairs, arguments of other groups, and the parameters of the inverse."""
    good = {**SELF, "landmarks": zeros(2, 2, 3, 4)}
    yield from calls(
        op, good, {},
        ("mask", zeros(5, 5, dtype=bool), ValueError, "mask.*key mask"),
        ("causal", True, ValueError, "unexpected argument 'causal'"),
        ("scale", 1.0, ValueError, "unexpected argument 'scale'"),
        ("landmarks", zeros(2, 2, 3, 5), ValueError, "landmarks"),
        ("landmarks", zeros(2, 2, 3, 4, dtype=np.float16), TypeError, "landmarks must share|share.*landmarks"),
        ("landmark_mask", zeros(4, dtype=bool), ValueError, "landmark_mask"),
        ("landmark_mask", zeros(3), TypeError, "landmark_mask dtype|landmark_mask"),
        ("newton_steps", -1, ValueError, "newton_steps"),
        ("init_scale", 0.0, ValueError, "init_scale"),
        ("halvings", -1, ValueError, "halvings"),
        ("halvings", 0.5, TypeError, "halvings"),
        ("ridge", -0.5, ValueError, "ridge"),
        ("inverse_grad", "exact", ValueError, "inverse_grad.*unrolled"),
    )  # fmt: skip


def nystrom_errors(op: Op) -> Iterator[ErrorSample]:
    """Masks of pairs, causality, other numbers of queries than of keys, and its own parameters."""
    yield from calls(
        op, SELF, {"num_landmarks": 2},
        ("mask", zeros(5, 5, dtype=bool), ValueError, "mask.*key mask"),
        ("causal", True, ValueError, "unexpected argument 'causal'"),
        ("bias", zeros(5, 5), ValueError, "unexpected argument 'bias'"),
        ("q", GOOD["q"], ValueError, "k has|k must|tokens"),
        ("num_landmarks", 0, ValueError, "num_landmarks"),
        ("inverse_steps", -1, ValueError, "inverse_steps"),
        ("init", "original", ValueError, "init.*batch_max"),
        ("scale", float("nan"), ValueError, "scale"),
    )  # fmt: skip


def linformer_errors(op: Op) -> Iterator[ErrorSample]:
    """Masks of pairs, causality, and projections that do not fit."""
    good = {**GOOD, "proj_k": zeros(3, 6), "proj_v": zeros(3, 6)}
    both = () if op.name.endswith("_weights") else (
        ("proj_v", zeros(4, 6), ValueError, "proj_v.*slots"),
        ("dropout_mask", zeros(3, 5), ValueError, "dropout_mask"),
    )  # fmt: skip
    yield from calls(
        op, good, {},
        ("mask", zeros(3, 5, dtype=bool), ValueError, "mask.*key mask"),
        ("causal", True, ValueError, "unexpected argument 'causal'"),
        ("dropout", (0.5, 0), ValueError, "unexpected argument 'dropout'"),
        ("proj_k", zeros(3, 4), ValueError, "proj_k.*S_max"),
        *both,
    )  # fmt: skip


# ------------------------------------------------------------------------------- calls that are not plain


def product(a: Foreign, b: Foreign) -> Foreign:
    """a @ b of small matrices of any library, column by row: torch's autocast rounds the factors of `@`."""
    m = a.shape[-1]
    return sum(a[..., :, j, None] * b[..., j, None, :] for j in range(m)) if m else a


def newton_forward(module: Foreign, op: Signature, arrays: Arrays, params: Params) -> Results:
    """A X A and the residuals: X itself is not determined by A (semantics B)."""
    args, keywords = arguments_by_kind(op, arrays, params)
    x, residuals = module.newton_inverse(*args, **keywords)
    return {"axa": product(product(args[0], x), args[0]), "residuals": residuals}


def newton_backward(
    module: Foreign, op: Signature, arrays: Arrays, params: Params, cotangents: Arrays, suffix: str
) -> Results:
    """Through A X A: dX = A^T W A^T, and A is a factor on both sides."""
    args, keywords = arguments_by_kind(op, arrays, params)
    del keywords["return_residuals"]
    a, w = args[0], cotangents["axa"]
    x = module.newton_inverse(a, **{n: value for n, value in keywords.items() if n != "impl"})
    grads = dict(getattr(module, f"newton_inverse{suffix}")(a, a.mT @ w @ a.mT, **keywords))
    if suffix == "_magnitudes":
        size, inner = abs(a), abs(x @ a)
        sides = abs(w) @ inner.mT + abs(a @ x).mT @ abs(w)
        before = {"a_before": grads["a_before"] + sides}
        return {"axa": size @ inner, "residuals": grads["residuals"], **grads, "a": grads["a"] + sides, **before}
    return {**grads, "a": grads["a"] + w @ (x @ a).mT + (a @ x).mT @ w}


def sampler_forward(module: object, op: Signature, arrays: Arrays, params: Params) -> Results:
    """`landmarks.<sampler>(...)`, without its mask."""
    args, keywords = arguments_by_kind(op, arrays, {n: value for n, value in params.items() if n != "impl"})
    answer = attrgetter(op.name)(module)(*args, **keywords)
    return {"landmarks": answer[0] if isinstance(answer, tuple) else answer}


def sampler_backward(
    module: object, op: Signature, arrays: Arrays, params: Params, cotangents: Arrays, suffix: str
) -> Results:
    args, keywords = arguments_by_kind(op, arrays, {n: value for n, value in params.items() if n != "impl"})
    return dict(attrgetter(op.name + suffix)(module)(*args, cotangents["landmarks"], **keywords))


NEWTON = Binding(newton_forward, newton_backward)
SAMPLER = Binding(sampler_forward, sampler_backward)


def landmarks_only(params: Params) -> tuple[str, ...]:
    return ("landmarks",)


SOFT = Op(
    name="soft_attention",
    formula="o = Pᵀ X P v, P = exp(-‖landmark - q‖² / 2√d), X = newton_inverse(A)",
    arguments=("q", "v", "landmarks"),
    outputs=o_only,
    samples=samples.soft_samples,
    group="d",
    own=("landmark_mask", *INVERSE, "ridge"),
    levels=rows.SOFT,
    tiles=rows.SOFT_TILES,
    sizes=rows.SOFT_SIZES,
    forbidden=rows.SOFT_FORBIDDEN,
    row_case=rows.soft_row,
    optional=(*TOKENS, "landmark_mask", "init_scale"),
    differentiable=("q", "v", "landmarks", "init_scale"),
    errors=soft_errors,
    weights=True,
    dropout=False,
    growth=samples.soft_growth,
    telling=samples.soft_tells,
    zeros=samples.soft_zeros,
    tokens=Tokens({"q": -2, "o": -2}, {"q": -2, "v": -2, **OF_TOKENS}),
    invariances=ALL_TOKENS,  # there is no causal form
    scene_case=samples.soft_property,
    converged={"newton_steps": 40, "ridge": 0.5},  # where no matrix is nearly singular
)
NYSTROM = Op(
    name="nystrom_attention",
    formula="o = K1 Z K3 v, softmaxes through means of segments, Z ≈ K2⁻¹ by cubic steps",
    arguments=("q", "k", "v"),
    outputs=o_only,
    samples=softmax_samples.nystrom_samples,
    group="d",
    own=("num_landmarks", "inverse_steps", "init"),
    levels=rows.NYSTROM,
    tiles=rows.NYSTROM_TILES,
    sizes=rows.NYSTROM_SIZES,
    forbidden=rows.FORBIDDEN,
    row_case=rows.nystrom_row,
    optional=TOKENS,
    differentiable=("q", "k", "v"),
    errors=nystrom_errors,
    weights=True,
    dropout=False,
    growth=softmax_samples.nystrom_growth,
    zeros=softmax_samples.nystrom_zeros,
    tokens=Tokens({"q": -2, "o": -2}, {"k": -2, "q": -2, "v": -2, **OF_TOKENS}),
    # segments depend on token order; init="batch_max" shares a norm with its batch-mates, and has its own name
    invariances=tuple(name for name in ALL_TOKENS if name != "key_permutation"),
    scene_case=softmax_samples.nystrom_property,
)
LINFORMER = Op(
    name="linformer_attention",
    formula="o = softmax(scale q (E k)ᵀ) F v",
    arguments=("q", "k", "v", "proj_k", "proj_v"),
    outputs=o_only,
    samples=softmax_samples.linformer_samples,
    group="d",
    levels=rows.LINFORMER,
    tiles=rows.LINFORMER_TILES,
    sizes=rows.LINFORMER_SIZES,
    forbidden=rows.FORBIDDEN,
    row_case=rows.linformer_row,
    optional=(*TOKENS, "dropout_mask"),
    differentiable=("q", "k", "v", "proj_k", "proj_v"),
    errors=linformer_errors,
    weights=True,
    dropout=False,
    growth=softmax_samples.scores_growth,
    zeros=softmax_samples.linformer_zeros,
    # a key has a column of each projection
    tokens=Tokens(QUERIES_AND_KEYS.queries, {"k": -2, "v": -2, "mask": -1, "proj_k": -1, "proj_v": -1}),
    invariances=ALL_TOKENS,  # there is no causal form
    scene_case=softmax_samples.linformer_property,
)


def sampler(name: str, formula: str, arguments: tuple[str, ...], own: tuple[str, ...]) -> Op:
    return Op(
        name=f"landmarks.{name}",
        formula=formula,
        arguments=arguments,
        outputs=landmarks_only,
        samples=samples.sampler_samples,
        own=own,
        levels=rows.SAMPLERS,
        sizes=rows.SAMPLERS_SIZES,
        forbidden=rows.SAMPLERS_FORBIDDEN,
        row_case=rows.sampler_row,
        optional=("query_mask", *(("indices",) if name == "random" else ())),
        differentiable=arguments,
        binding=SAMPLER,
        dropout=False,
    )


WINDOW = ("height", "width", "r")
OPS: tuple[Op, ...] = (
    SOFT,
    NYSTROM,
    LINFORMER,
    Op(
        name="newton_inverse",
        formula="X ← 2X - XAX from X = init_scale · 2/‖A‖₁² · A; judged on A X A",
        arguments=("a",),
        outputs=lambda params: ("axa", "residuals"),
        samples=samples.newton_samples,
        own=(*INVERSE, "return_residuals"),
        levels=rows.NEWTON,
        sizes=rows.NEWTON_SIZES,
        forbidden=rows.NEWTON_FORBIDDEN,
        row_case=rows.newton_row,
        optional=("init_scale",),
        differentiable=("a", "init_scale"),
        not_differentiable=("residuals",),
        compute_outputs=("axa", "residuals"),
        dtypes=("float64", "float32"),  # X is never rounded to a half type
        binding=NEWTON,
        dropout=False,
        growth=samples.newton_growth,
        telling=samples.newton_tells,
        converged={"newton_steps": 60},
    ),
    sampler("average_pool", "means of the valid tokens of r×r windows", ("q",), WINDOW),
    sampler("convolution", "r×r windows times a kernel, stride r", ("q", "kernel"), WINDOW),
    sampler("random", "the tokens at given indices", ("q",), ("indices",)),
    sampler("biased", "the first m tokens", ("q",), ("m",)),
)
