"""The op database: one row per public op. Adding an op is one row here and, if its inputs are new, its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from attnkit_conformance import errors, lowprecision, plain_samples, samples
from attnkit_conformance.binding import FIELDS, PLAIN, REGULARISER, STATISTICS, Binding
from attnkit_conformance.case import DTYPES, Case, compute_dtype
from attnkit_conformance.errors import ErrorSample
from attnkit_conformance.samples import LENGTH_ARRAY

Params = Mapping[str, Any]

QKV = ("q", "k", "v")
OPTIONAL = ("mask", "bias", "key_lengths", "query_mask", "dropout_mask", "length")
SIGNED_ACTIVATIONS = ("identity", "gelu", "gelu_tanh", "silu")
EXPONENTIATING_ACTIVATIONS = ("gelu", "gelu_tanh", "softplus", "sigmoid", "silu")


@dataclass(frozen=True)
class Op:
    """What the judge has to know about an op; `formula` and `own` also feed the table in the documentation."""

    name: str
    formula: str
    arguments: tuple[str, ...]
    outputs: Callable[[Params], tuple[str, ...]]
    samples: Callable[[Op, str, str], Iterator[Case]]
    group: str = ""  # of semantics A14
    own: tuple[str, ...] = ()  # its own parameters
    variants: tuple[Params, ...] = ({},)  # settings of its own parameters
    optional: tuple[str, ...] = ()  # array arguments that may be absent
    differentiable: tuple[str, ...] = ()
    not_differentiable: tuple[str, ...] = ()  # outputs without gradient
    compute_outputs: tuple[str, ...] = ()  # outputs in the compute dtype (A7)
    dtypes: tuple[str, ...] = DTYPES
    binding: Binding = PLAIN
    errors: Callable[[Op], Iterator[ErrorSample]] = errors.none
    exponent: Callable[[Params], bool] = lambda params: False  # does it exponentiate the scores
    signed: Callable[[Params], bool] = lambda params: False  # can a weight be negative
    kinks: Callable[[Params], tuple[float, ...]] = lambda params: ()  # where the slope of w(s + shift) jumps
    naive: lowprecision.Formula | None = None  # the formula evaluated operation by operation
    vjp: bool = True
    weights: bool = False  # has an `<op>_weights`
    statistics: bool = False  # row_statistics serves it
    dropout: bool = True
    bias_inf: bool = False  # a bias of -inf is legal

    def output_dtype(self, name: str, dtype: str) -> str:
        """The dtype of output `name` for inputs of `dtype`."""
        return compute_dtype(dtype) if name in self.compute_outputs else dtype

    def serves(self, options: tuple[str, ...]) -> bool:
        """Whether a scene with these options is legal for the op."""
        return self.bias_inf or "bias_inf" not in options

    def subjects(self) -> tuple[Op, ...]:
        """The ops over which the statistics functions run."""
        return tuple(op for op in ATTENTION if op.statistics)

    def statistics_variant(self, variant: Params) -> Params:
        """`variant` as parameters of the statistics functions: entropy only where weights cannot be negative."""
        kept = {name: value for name, value in variant.items() if name != "return_lse"}
        without_entropy = tuple(name for name in FIELDS if name != "entropy")
        return {**kept, "fields": without_entropy} if self.signed(variant) else kept

    def outputs_entropy(self, params: Params) -> bool:
        """Whether the entropy of rows is among the outputs."""
        return "entropy" in self.outputs(params)


def o_only(params: Params) -> tuple[str, ...]:
    return ("o",)


def o_and_lse(params: Params) -> tuple[str, ...]:
    return ("o", "lse") if params.get("return_lse") else ("o",)


def w_only(params: Params) -> tuple[str, ...]:
    return ("w",)


def statistics_fields(params: Params) -> tuple[str, ...]:
    return params.get("fields") or FIELDS


def o_and_statistics(params: Params) -> tuple[str, ...]:
    return ("o", *statistics_fields(params))


def exponentiates(params: Params) -> bool:
    return params.get("activation", "relu") in EXPONENTIATING_ACTIVATIONS


def has_signed_weights(params: Params) -> bool:
    return params.get("activation", "relu") in SIGNED_ACTIVATIONS or params.get("gain", 1.0) < 0


def has_kinks(params: Params) -> tuple[float, ...]:
    return {"relu": (0.0,), "relu_squared": (0.0,), "relu6": (0.0, 6.0)}.get(params.get("activation", "relu"), ())


def always(params: Params) -> bool:
    return True


def of_subject(predicate: str) -> Callable[[Params], Any]:
    """A predicate of the op named by the parameter `op`, in place of that of the statistics function."""
    return lambda params: getattr(BY_NAME[params["op"]], predicate)(params)


POINTWISE_VARIANTS: tuple[Params, ...] = (
    {},
    {"activation": "softplus", "alpha": 0.0},
    {"activation": "relu6", "alpha": 0.5},
    {"activation": "gelu", "alpha": 0.5, "shift": 0.3},
    {"activation": "sigmoid", "shift": "-log_length"},
    {"activation": "silu", "gain": -0.7, "length": 50.0},
    {"activation": "relu_squared", "alpha": 0.5},
    {"activation": "gelu_tanh", "length": "all"},
    {"activation": "identity", "length": LENGTH_ARRAY},
    {"activation": "softplus", "shift": "-log_length", "length": LENGTH_ARRAY},
    {"activation": "relu", "alpha": 0.5, "gain": 1.7, "shift": -0.4},
)

ATTENTION = (
    Op(
        name="softmax_attention",
        formula="w = exp(s - m) / Σ exp(s - m)",
        arguments=QKV,
        outputs=o_and_lse,
        samples=samples.attention_samples,
        group="a",
        own=("return_lse",),
        variants=({}, {"return_lse": True}),
        optional=tuple(name for name in OPTIONAL if name != "length"),
        differentiable=(*QKV, "bias"),
        compute_outputs=("lse",),
        errors=errors.attention_errors,
        exponent=always,
        naive=lowprecision.attention,
        weights=True,
        statistics=True,
        bias_inf=True,
    ),
    Op(
        name="pointwise_attention",
        formula="w = gain · n^-alpha · h(s + shift)",
        arguments=QKV,
        outputs=o_only,
        samples=samples.attention_samples,
        group="a",
        own=("activation", "alpha", "gain", "length", "shift"),
        variants=POINTWISE_VARIANTS,
        optional=OPTIONAL,
        differentiable=(*QKV, "bias"),
        errors=errors.pointwise_errors,
        exponent=exponentiates,
        signed=has_signed_weights,
        kinks=has_kinks,
        naive=lowprecision.attention,
        weights=True,
        statistics=True,
    ),
    Op(
        name="reluformer_attention",
        formula="w = relu(s) / (gamma · √(n/2))",
        arguments=QKV,
        outputs=o_only,
        samples=samples.attention_samples,
        group="a",
        own=("gamma", "length"),
        variants=({}, {"gamma": 0.6, "length": "all"}, {"length": LENGTH_ARRAY}),
        optional=OPTIONAL,
        differentiable=(*QKV, "bias"),
        errors=errors.reluformer_errors,
        kinks=lambda params: (0.0,),
        naive=lowprecision.attention,
        weights=True,
        statistics=True,
    ),
    Op(
        name="sigmoid_attention",
        formula="w = sigmoid(s - log n)",
        arguments=QKV,
        outputs=o_only,
        samples=samples.attention_samples,
        group="a",
        own=("length",),
        variants=({}, {"length": "all"}, {"length": 20.0}),
        optional=OPTIONAL,
        differentiable=(*QKV, "bias"),
        errors=errors.length_errors,
        exponent=always,
        naive=lowprecision.attention,
        weights=True,
        statistics=True,
        bias_inf=True,
    ),
)


def weights_of(op: Op) -> Op:
    """The row of `<op>_weights`: no v, no dropout, no gradient of its own."""
    variants = tuple({k: v for k, v in variant.items() if k != "return_lse"} for variant in op.variants)
    return replace(
        op,
        name=f"{op.name}_weights",
        arguments=op.arguments[:-1],
        outputs=w_only,
        variants=tuple(v for n, v in enumerate(variants) if v not in variants[:n]),
        optional=tuple(name for name in op.optional if name != "dropout_mask"),
        differentiable=(),
        not_differentiable=("w",),
        compute_outputs=(),
        vjp=False,
        weights=False,
        statistics=False,
        dropout=False,
    )


OTHERS = (
    Op(
        name="qk_layernorm",
        formula="(x - mean) / √(var + eps) · weight over the head axis of q and of k",
        arguments=("q", "k", "q_weight", "k_weight"),
        outputs=lambda params: ("q_normed", "k_normed"),
        samples=plain_samples.layernorm_samples,
        own=("eps",),
        differentiable=("q", "k", "q_weight", "k_weight"),
        errors=errors.layernorm_errors,
        naive=lowprecision.layernorm,
        dropout=False,
    ),
    Op(
        name="attention_regulariser",
        formula="sum_weight · mean abs(log Z) + entropy_weight · mean max(H - entropy_cap · log n, 0)",
        arguments=("total", "entropy", "visible"),
        outputs=lambda params: ("loss", "sum_term", "entropy_term"),
        samples=plain_samples.regulariser_samples,
        own=("entropy_cap", "sum_weight", "entropy_weight"),
        optional=("query_mask",),
        differentiable=("total", "entropy"),
        dtypes=("float64", "float32"),
        binding=REGULARISER,
        dropout=False,
    ),
    Op(
        name="row_statistics",
        formula="Σw, entropy, Σw², max, count of w ≠ 0 and n of each query, without an (L, S) array",
        arguments=("q", "k"),
        outputs=statistics_fields,
        samples=samples.statistics_samples,
        own=("op", "fields"),
        optional=tuple(name for name in OPTIONAL if name != "dropout_mask"),
        differentiable=("q", "k", "bias"),
        not_differentiable=("nonzero", "visible"),
        compute_outputs=FIELDS,
        binding=STATISTICS,
        errors=errors.statistics_errors,
        exponent=of_subject("exponent"),
        kinks=of_subject("kinks"),
        dropout=False,
    ),
    Op(
        name="attention_with_statistics",
        formula="output and row statistics in one pass",
        arguments=QKV,
        outputs=o_and_statistics,
        samples=samples.statistics_samples,
        own=("op", "fields"),
        optional=OPTIONAL,
        differentiable=(*QKV, "bias"),
        not_differentiable=("nonzero", "visible"),
        compute_outputs=FIELDS,
        binding=STATISTICS,
        errors=errors.statistics_errors,
        exponent=of_subject("exponent"),
        kinks=of_subject("kinks"),
        naive=lowprecision.attention,
    ),
)

PUBLIC = (*ATTENTION, *OTHERS)  # ops with a row in the documentation
OPDB = (*(row for op in ATTENTION for row in ((op, weights_of(op)) if op.weights else (op,))), *OTHERS)
BY_NAME = {op.name: op for op in OPDB}
