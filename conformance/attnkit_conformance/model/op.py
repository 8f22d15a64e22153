"""The row type of the op database: what the judge needs to know about an op."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from attnkit_conformance.model import scoring
from attnkit_conformance.model.binding import FIELDS, PLAIN, Binding
from attnkit_conformance.model.case import DTYPES, INTEGER, Case, ErrorSample, Sample, compute_dtype
from attnkit_conformance.model.grammar import Choice, Level, Row
from attnkit_conformance.model.scene import Scene
from attnkit_conformance.model.types import Params, option
from attnkit_reference._core import Scores
from attnkit_reference.pointwise import SCORE_FUNCTIONS, ScoreFunction

Array = np.ndarray
QKV = ("q", "k", "v")
OPTIONAL = ("mask", "bias", "key_lengths", "query_mask", "dropout_mask", "scale", "length")
STATEFUL = ("initial_state", "return_state", "chunk_size")  # weights and statistics are of calls without a state
FURTHER = ("return_lse", "return_remainder")  # options that ask for outputs beside o
OF_WEIGHTS = ("causal_prefix", "padding_contents")  # what can fail for weights but not for the op
LONGEST = 600  # tokens of which the weights of all pairs are looked at


def always(x: object) -> bool:
    return True


@dataclass(frozen=True)
class Tokens:
    """The axes of queries and keys in each input and output; rows of other outputs are on the last axis.

    Arrays listed under both hold tokens that are queries and keys, with a common validity.
    """

    queries: Mapping[str, int]
    keys: Mapping[str, int]

    @property
    def shared(self) -> bool:
        """Whether queries and keys are the same tokens."""
        return set(self.queries) <= set(self.keys)


ALL_TOKENS = ("rerun", "padding_contents", "key_permutation", "batch_mates", "padding_amount", "visible_nan")
QUERIES_AND_KEYS = Tokens(
    {"q": -2, "o": -2, "w": -2}, {"k": -2, "v": -2, "mask": -1, "bias": -1, "w": -1, "log_forget": -1}
)


@dataclass(frozen=True, eq=False)
class Op:
    """What the judge needs to know about an op; `formula` and `own` also appear in the documentation's table."""

    name: str
    formula: str
    arguments: tuple[str, ...]
    outputs: Callable[[Params], tuple[str, ...]]
    samples: Callable[[Op, str, str], Iterator[Sample]]
    group: str = ""  # of semantics A14
    own: tuple[str, ...] = ()  # its own parameters
    variants: tuple[Params, ...] = ({},)  # settings of its own parameters
    # own factors of its grammar, or replaced levels of a shared factor; with a `row_case` all but the dtype
    levels: Mapping[str, tuple[Level, ...]] = field(default_factory=dict)
    tiles: tuple[Level, ...] = ()  # shapes that cross tiles of kernels, if not those of attention
    sizes: tuple[Row, ...] = ()  # of long and wide calls, with a `row_case`: levels of some factors, also new ones
    row_case: Callable[[Op, str, Row, str, float], Case] | None = None  # by name, row, dtype and size of numbers
    near: Callable[[Case], bool] | None = None  # of such a row: whether rounding decides something, for another draw
    forbidden: tuple[tuple[Choice, ...], ...] = ()  # levels of its grammar that cannot be combined
    equal_lengths: tuple[tuple[Choice, ...], ...] = ()  # levels that together need as many queries as keys
    optional: tuple[str, ...] = ()  # array arguments that may be absent
    differentiable: tuple[str, ...] = ()
    not_differentiable: tuple[str, ...] = ()  # outputs without gradient
    compute_outputs: tuple[str, ...] = ()  # outputs in the compute dtype (A7)
    integer_outputs: tuple[str, ...] = ()  # outputs that are compared exactly
    dtypes: tuple[str, ...] = DTYPES
    binding: Binding = PLAIN
    errors: Callable[[Op], Iterator[ErrorSample]] = lambda op: iter(())
    exponent: Callable[[Params], bool] = lambda params: False  # does it exponentiate the scores
    signed: Callable[[Params], bool] = lambda params: False  # can a weight be negative
    kinks: Callable[[Params], tuple[float, ...]] = lambda params: ()  # where the slope of w(s + shift) jumps
    settings: scoring.Settings | None = None  # its own parameters as those of point-wise attention
    vjp: bool = True
    weights: bool = False  # has an `<op>_weights`
    statistics: bool = False  # supported by row_statistics
    dropout: bool = True
    bias_inf: bool = False  # a bias of -inf is legal
    subjects: tuple[Op, ...] = ()  # the ops over which a statistics function runs
    growth: Callable[[Case], float] | None = None  # D: where it is larger than that of the exponent
    outside: tuple[str, ...] = ()  # arguments that affect only the output, beside v and dropout
    joined: bool = False  # the output has its heads joined, (..., L, H·e)
    steep: Callable[[Params], bool] = lambda params: False  # is a small weight a difference: exact scores for entropy
    # D: results by exponents that are sums of numbers, which two functions round alike: their G counts twice
    alike: tuple[str, ...] = ()
    # D: slopes of weights by scores where what rows are divided by stays, the scores, and the gradient of Σ w v; None
    # where the probe sees all
    resummed: Callable[[Case], tuple[np.ndarray, Scores, np.ndarray] | None] | None = None
    falling: bool = False  # its weights fall by decades along a row: none is judged by the size of others
    ties: bool = True  # weights that are equal on paper are equal bit by bit
    extra: tuple[tuple[Scene, Params], ...] = ()  # scenes with variants beyond those that all ops share
    of_statistics: tuple[tuple[Scene, Params], ...] = ()  # likewise of its statistics alone, in every profile
    complete: Callable[[Case], Case | None] | None = None  # adds arrays of the op's own to a draw; None: another draw
    adapt: Callable[[Scene, Params], Scene | None] | None = None  # a scene without what the op does not take
    shapes: Callable[[Op, Case], Mapping[str, tuple[int, ...]]] | None = None  # of outputs beside o, w and rows
    zeros: Callable[[Case], tuple[Mapping[str, Array], Mapping[str, Array]]] | None = None  # A5, A6: exact zeros
    tokens: Tokens = QUERIES_AND_KEYS
    invariances: tuple[str, ...] = ()  # properties that hold by definition, beside those of the groups a, b and c
    of_weights: tuple[str, ...] = ()  # properties that its weights alone have
    others: Mapping[str, Callable[[Array], Array]] = field(default_factory=dict)  # legal numbers in place of others
    declines: tuple[str, ...] = ()  # properties of its group that it lacks, as key_permutation if keys have an order
    scene_case: Callable[[Op, Scene, Params, str, str], Case] | None = None  # of a scene; None: `attention_case`
    converged: Params = field(default_factory=dict)  # with which an implicit gradient is a derivative
    telling: Callable[[Case], bool] = always  # whether a case that a search draws tells anything
    kind: Any = None  # what the samples of its family know of it, and nobody else reads

    def adapted(self, scene: Scene, params: Params) -> Scene | None:
        """The scene reduced to what this op supports with these parameters; None if nothing is left, or where rounding
        decides which of equal keys has the largest weight.
        """
        if self.subjects and not self.subject(params).ties and "integers" in scene.options:
            return None
        adapt = self.subject(params).adapt
        return scene if adapt is None else adapt(scene, params)

    def subject(self, params: Params) -> Op:
        """The op whose statistics are computed; for any other op itself."""
        return next((op for op in self.subjects if op.name == params.get("op")), self)

    def output_dtype(self, name: str, dtype: str) -> str:
        """The dtype of output `name` for inputs of `dtype`."""
        if name in self.integer_outputs:
            return INTEGER
        return compute_dtype(dtype) if name in self.compute_outputs else dtype

    def serves(self, options: tuple[str, ...]) -> bool:
        """Whether a scene with these options is legal for the op."""
        return self.bias_inf or "bias_inf" not in options

    def statistics_variant(self, variant: Params, left_out: tuple[str, ...] = ()) -> Params:
        """`variant` as parameters of the statistics functions: with entropy only if weights cannot be negative."""
        params = without_parameters(variant, (*FURTHER, *STATEFUL, *left_out))
        without_entropy = tuple(name for name in FIELDS if name != "entropy")
        return {**params, "fields": without_entropy} if self.signed(variant) else params

    def outputs_entropy(self, params: Params) -> bool:
        """Whether the entropy of rows is among the outputs."""
        return "entropy" in self.outputs(params)


def o_only(params: Params) -> tuple[str, ...]:
    return ("o",)


def o_and_remainder(params: Params) -> tuple[str, ...]:
    return ("o", "r") if params.get("return_remainder") else ("o",)


def o_and_lse(params: Params) -> tuple[str, ...]:
    return ("o", "lse") if params.get("return_lse") else ("o",)


def w_only(params: Params) -> tuple[str, ...]:
    return ("w",)


def statistics_fields(params: Params) -> tuple[str, ...]:
    fields = params.get("fields")
    return tuple(map(str, fields)) if isinstance(fields, tuple) and fields else FIELDS


def o_and_statistics(params: Params) -> tuple[str, ...]:
    return ("o", *statistics_fields(params))


def score_function(params: Params) -> ScoreFunction:
    """The reference's record of the activation."""
    return SCORE_FUNCTIONS[option(params, "activation", "relu")]


def exponentiates(params: Params) -> bool:
    return score_function(params).growth is not None


def has_signed_weights(params: Params) -> bool:
    learned = isinstance(params.get("gain"), str)
    return score_function(params).signed or learned or option(params, "gain", 1.0) < 0


def has_kinks(params: Params) -> tuple[float, ...]:
    return score_function(params).kinks


def without_parameters(variant: Params, left_out: tuple[str, ...]) -> Params:
    return {name: value for name, value in variant.items() if name not in left_out}


def weights_of(op: Op) -> Op:
    """The row of `<op>_weights`: no v, no dropout, no gradient of its own."""
    outside = ("v", "proj_v", *FURTHER, "dropout_mask", *op.outside)
    variants = tuple(without_parameters(variant, outside) for variant in op.variants)
    return replace(
        op,
        name=f"{op.name}_weights",
        arguments=tuple(name for name in op.arguments if name not in outside),
        outputs=w_only,
        own=tuple(name for name in op.own if name not in op.outside),
        levels={name: levels for name, levels in op.levels.items() if name not in (*outside, "dropout")},
        sizes=tuple(size for size in op.sizes if max(map(int, re.findall(r"\d+", str(size["shape"])))) <= LONGEST),
        variants=tuple(v for n, v in enumerate(variants) if v not in variants[:n]),
        optional=tuple(name for name in op.optional if name not in outside),
        differentiable=(),
        not_differentiable=("w",),
        compute_outputs=(),
        vjp=False,
        weights=False,
        statistics=False,
        dropout=False,
        joined=False,
        invariances=(*(name for name in op.invariances if name in OF_WEIGHTS), *op.of_weights),
        extra=tuple((scene, without_parameters(variant, outside)) for scene, variant in op.extra),
    )
