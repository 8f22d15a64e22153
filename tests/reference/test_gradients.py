"""Every hand-written gradient of an attention op against central differences, in every kind of call."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import attnkit_reference as reference
from attnkit_reference._core import Scores, scores
from attnkit_reference.pointwise import SCORE_FUNCTIONS

from .cases import CASES as COMMON
from .cases import OF_ROWS, Arrays, Case, case, draw, some
from .conftest import FIELDS

KINKS = {name: h.kinks for name, h in SCORE_FUNCTIONS.items() if h.kinks}
KINKS |= {"reluformer": (0.0,), "softpick": (0.0,)}
MARGIN = 0.05  # of scores from kinks, and between the two largest weights of a row
OPS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax_attention", {}),
    "sink": ("softmax_attention", {"sink": 0.4}),
    "reluformer": ("reluformer_attention", {"gamma": 0.7}),
    "sigmoid": ("sigmoid_attention", {}),
    "softpick": ("softpick_attention", {"eps": 0.3}),
    "ssmax": ("ssmax_attention", {"slope": 0.6, "intercept": 0.3}),
    **{
        name: ("pointwise_attention", {"activation": name, "alpha": 0.6, "gain": 1.3}) for name in reference.ACTIVATIONS
    },
}
SIGNED = ("gelu", "gelu_tanh", "identity", "silu")


CASES: dict[str, Case] = COMMON | {
    "masked": OF_ROWS["masked"],
    "bias": case((2, 3, 3), (2, 4, 3), (2, 4, 2), {"scale": -0.7}, bias=(2, 1, 4)),
    "broadcast": case((2, 1, 2, 3), (3, 4, 3), (1, 4, 2), {"mask": np.arange(4) > 0}, bias=(2, 1, 1, 4)),
    "grouped": case((2, 4, 2, 3), (1, 2, 3, 3), (2, 2, 3, 2), {"enable_gqa": True, "mask": some(0.7, 4, 1, 3)},
                    bias=(4, 1, 1)),
    "one_scale": case((2, 3, 3), (2, 4, 3), (2, 4, 2), {"mask": some(0.7, 2, 3, 4)}, scale=()),
    "scale_per_head": case((2, 1, 4, 2, 3), (1, 2, 3, 3), (3, 2, 3, 2),
                           {"enable_gqa": True, "mask": some(0.7, 4, 1, 3)}, bias=(4, 1, 1), scale=(4,)),
    "window": case((4, 3), (5, 3), (5, 2), {"window": (1, 0)}),
    "dropout_mask": case((2, 3, 3), (2, 4, 3), (2, 4, 2), {"dropout_mask": some(0.5, 2, 3, 4) / 0.5, "causal": True}),
    "dropout": case((2, 2, 3, 3), (2, 1, 4, 3), (2, 1, 4, 2), {"dropout": (0.4, 2**63 + 5), "enable_gqa": True}),
}  # fmt: skip


def case_scores(arrays: Arrays, params: Arrays) -> Scores:
    own = ("gamma", "length", "activation", "alpha", "gain", "shift", "eps", "slope", "intercept", "sink")
    common = {name: x for name, x in {**arrays, **params}.items() if name not in own}
    sc = scores("sample", **common)
    shift = np.asarray(arrays.get("shift", params.get("shift", 0.0)))
    sc.s[...] += shift[..., None, None] if shift.ndim else shift
    return sc


def sample(case: str, op: str, **more: Any) -> tuple[Arrays, Arrays]:
    """The first draw of a case whose visible scores keep MARGIN from the kinks of the op."""
    for seed in range(1000):
        arrays, params = draw(np.random.default_rng(seed), CASES[case])
        params = {**OPS[op][1], **params, **more}
        sc = case_scores(arrays, params)
        kinks = KINKS.get(op, ())
        if all(np.all(np.abs(sc.s[sc.visible] - kink) > MARGIN) for kink in kinks) and separated(sc):
            return arrays, params
    raise AssertionError("no draw keeps the margin")


def separated(sc: Scores) -> bool:
    """No two visible scores of a row are close: the maximum is not at a kink either."""
    ordered = np.sort(np.where(sc.visible, sc.s, -1e3 * np.arange(1, 1 + sc.s.shape[-1])), axis=-1)
    return bool(np.all(np.diff(ordered, axis=-1) > MARGIN))


def cotangents_of(outputs: Arrays, seed: int = 7) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=np.shape(x)) for name, x in outputs.items()}


def with_lse(**arguments: Any) -> Arrays:
    return dict(zip(("o", "lse"), reference.softmax_attention(**arguments, return_lse=True), strict=True))


def check_op(check_vjp: Any, op: str, arrays: Arrays, params: Arrays, beyond: float = 0.0) -> None:
    check_vjp(OPS[op][0], arrays, params, with_lse if op in ("softmax", "sink") else None, beyond)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("op", OPS)
def test_output(check_vjp: Any, op: str, case: str) -> None:
    beyond = 2.0 if case == "bias" and op != "sink" else 0.0  # the lse of a sink is hardly less than its summands
    check_op(check_vjp, op, *sample(case, op), beyond)


@pytest.mark.parametrize("op", [op for op in OPS if op not in ("softmax", "sink", "softpick")])
@pytest.mark.parametrize("length", ["all", 2.5, "array"])
def test_lengths(check_vjp: Any, op: str, length: Any) -> None:
    given = np.array([1.5, 2.0, 7.0]) if length == "array" else length
    check_op(check_vjp, op, *sample("causal", op, length=given))


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("own", [{"shift": 0.4, "gain": -2.0}, {"alpha": 0.0}, {"alpha": 1.5, "length": "all"}])
def test_pointwise_parameters(check_vjp: Any, activation: str, own: Arrays) -> None:
    check_op(check_vjp, activation, *sample("masked", activation, **own))


@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_learned_numbers(check_vjp: Any, activation: str, shape: tuple[int, ...]) -> None:
    learned = {"gain": -1.3, "alpha": 0.6, "shift": 0.4}
    numbers = {name: np.linspace(x, x + 0.1, 2)[: int(np.prod(shape))].reshape(shape) for name, x in learned.items()}
    arrays, params = sample("causal", activation, shift=0.45)
    params = {name: x for name, x in params.items() if name not in learned}
    check_op(check_vjp, activation, {**arrays, **numbers}, params)
    check_op(check_vjp, activation, {**arrays, "gain": np.zeros(shape)}, params)


@pytest.mark.parametrize("shape", [(), (2,)])
def test_learned_gamma(check_vjp: Any, shape: tuple[int, ...]) -> None:
    arrays, params = sample("lengths", "reluformer")
    gamma = np.linspace(0.7, 1.6, 2)[: int(np.prod(shape))].reshape(shape)
    del params["gamma"]
    check_op(check_vjp, "reluformer", {**arrays, "gamma": gamma}, params)


@pytest.mark.parametrize("activation", ["gelu", "sigmoid", "softplus", "silu"])
def test_shift_by_length(check_vjp: Any, activation: str) -> None:
    arrays, params = sample("causal", activation)
    check_op(check_vjp, activation, arrays, {**params, "shift": "-log_length"})


def test_relu6_where_it_saturates(check_vjp: Any) -> None:
    arrays, params = sample("plain", "relu6", scale=5.0)
    s = case_scores(arrays, params).s
    assert s.min() < 0 < s.max() - 6
    check_op(check_vjp, "relu6", arrays, params)


@pytest.mark.parametrize("op", ["softmax", "sigmoid"])
def test_bias_of_minus_infinity(check_vjp: Any, op: str) -> None:
    arrays, params = sample("masked", op)
    arrays["bias"][0, 2] = -np.inf
    arrays["bias"][2, 1] = -np.inf
    check_op(check_vjp, op, arrays, params)


def wanted_fields(op: str, case: str = "") -> Iterator[tuple[str, ...]]:
    """All fields with a gradient, and in some cases each alone."""
    nonnegative = () if op in SIGNED else ("entropy",)
    yield ("total", *nonnegative, "sum_squares", "maximum")
    if case in ("bias", "masked", "grouped"):
        yield from ((name,) for name in FIELDS if name != "entropy" or nonnegative)


@pytest.mark.parametrize(
    "case", ["bias", "masked", "broadcast", "grouped", "scale_per_head", "causal_with_null_rows", "lengths"]
)
@pytest.mark.parametrize("op", OPS)
def test_row_statistics(check_statistics: Any, op: str, case: str) -> None:
    arrays, params = sample(case, op)
    del arrays["v"]
    for wanted in wanted_fields(op, case):
        check_statistics(OPS[op][0], arrays, params, wanted)


@pytest.mark.parametrize("case", ["masked", "grouped", "scale_per_head", "causal", "dropout_mask", "dropout"])
@pytest.mark.parametrize("op", OPS)
def test_attention_with_statistics(check_statistics: Any, op: str, case: str) -> None:
    check_statistics(OPS[op][0], *sample(case, op), next(wanted_fields(op)))


@pytest.mark.parametrize("shape", [(), (2,)])
def test_statistics_with_a_learned_sink(check_statistics: Any, shape: tuple[int, ...]) -> None:
    arrays, params = sample("bias", "softmax")
    arrays |= {"sink": np.resize([0.4, -1.1], shape)}
    check_statistics("softmax_attention", arrays, params)


def test_qk_layernorm(check_gradients: Any) -> None:
    rng = np.random.default_rng(0)
    arrays = {"q": (2, 3, 4), "k": (1, 5, 4), "q_weight": (4,), "k_weight": (4,)}
    inputs: Arrays = {name: rng.normal(size=shape) for name, shape in arrays.items()}

    def call(**args: Any) -> Arrays:
        return dict(zip(("q_normed", "k_normed"), reference.qk_layernorm(**args, eps=0.01), strict=True))

    cotangents = cotangents_of(call(**inputs))
    gradients = reference.qk_layernorm_vjp(*inputs.values(), *cotangents.values(), eps=0.01)
    only_k = reference.qk_layernorm_vjp(*inputs.values(), None, cotangents["k_normed"], eps=0.01)
    check_gradients(call, inputs, (cotangents, gradients), ({"k_normed": cotangents["k_normed"]}, only_k))


@pytest.mark.parametrize("own", [{}, {"entropy_cap": 0.3, "sum_weight": 0.2, "entropy_weight": 3.0}])
def test_attention_regulariser(check_gradients: Any, own: Arrays) -> None:
    visible = np.array([[2.0, 4.0, 0.0, 8.0, 5.0], [3.0, 4.0, 2.0, 6.0, 3.0]])
    arrays = {
        "total": np.array([[0.5, 2.0, 0.7, 3.0, 0.25], [0.6, 1.2, 4.0, 0.9, 1.5]]),
        "entropy": np.array([[0.3, 1.3, 0.2, 2.0, 0.1], [0.1, 1.2, 0.1, 0.8, 1.0]]),
    }
    mask = np.array([True, True, True, True, False])

    def call(total: Any, entropy: Any) -> Arrays:
        stats = reference.RowStatistics(total=total, entropy=entropy, visible=visible)
        values = reference.attention_regulariser(stats, query_mask=mask, **own)
        return dict(zip(("loss", "sum_term", "entropy_term"), values, strict=True))

    stats = reference.RowStatistics(**arrays, visible=visible)
    for cotangents in ({"loss": 1.3}, {"sum_term": 0.7}, {"entropy_term": -0.4}, {"loss": 2.0, "sum_term": 1.0}):
        given = [cotangents.get(name) for name in ("loss", "sum_term", "entropy_term")]
        gradients = reference.attention_regulariser_vjp(stats, *given, query_mask=mask, **own)
        check_gradients(call, arrays, (cotangents, gradients))


@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize("length", ["visible", "all"])
def test_learned_numbers_of_rows(check_vjp: Any, shape: tuple[int, ...], length: str) -> None:
    arrays, params = sample("causal", "ssmax", length=length)
    numbers = {"slope": np.resize([0.6, -0.4], shape), "intercept": np.resize([0.2, 1.1], shape)}
    params = {name: x for name, x in params.items() if name not in numbers}
    check_op(check_vjp, "ssmax", {**arrays, **numbers, "scale": np.resize([0.7, -0.3], shape)}, params)


@pytest.mark.parametrize("level", [0.4, "array", "heads", "lowest", "above all scores"])
@pytest.mark.parametrize("case", ["bias", "grouped", "lengths", "dropout"])
def test_learned_sink(check_vjp: Any, case: str, level: Any) -> None:
    arrays, params = sample(case, "softmax")
    heads = np.linspace(0.4, -1.1, arrays["q"].shape[-3])
    levels = {"array": heads[:1].reshape(()), "heads": heads, "lowest": heads, "above all scores": heads + 9.0}
    if level == "lowest":
        heads[0] = -np.inf  # moved, it stays
    check_op(check_vjp, "sink", {**arrays, "sink": np.asarray(levels.get(level, level))}, params)


@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize("op", ["gaussian", "sparsemax", "entmax", "rela", "softpick", "ssmax"])
def test_learned_scale_of_other_ops(check_vjp: Any, op: str, shape: tuple[int, ...]) -> None:
    given = case((3, 2, 3, 3), (1, 2, 4, 3), (3, 2, 4, 2), {"mask": np.arange(4) < 3}, scale=shape)
    arrays, params = draw(np.random.default_rng(3), given)
    arrays |= {"norm_weight": np.array([0.5, 1.0, 1.5, 2.0])} if op == "rela" else {}
    check_vjp(f"{op}_attention", arrays, params)
