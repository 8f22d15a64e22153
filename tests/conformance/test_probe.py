"""The probe of semantics D: what the last digits of the inputs cost every entry."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attnkit_conformance.families.entmax.samples import near_threshold
from attnkit_conformance.golden import Golden, draw_case, golden
from attnkit_conformance.model import tolerance
from attnkit_conformance.model.case import Case, NoDraw
from attnkit_conformance.model.op import has_kinks
from attnkit_conformance.model.probe import FLOOR, STEP, explicit, floor_entries, may_be_on_kinks, probes, shaken
from attnkit_conformance.opdb import BY_NAME, OPDB
from attnkit_conformance.scenes.attention import KINKS, Scene, scene_sample


def case_of(op: str, scene: Scene, **variant: Any) -> Any:
    return draw_case(scene_sample(BY_NAME[op], scene, variant, "float64"))


def test_it_is_how_far_results_move() -> None:
    op, case = BY_NAME["softmax_attention"], case_of("softmax_attention", Scene("large", 9, 17, size=4.0))
    truth = explicit(op, case)
    moved = explicit(op, shaken(op, case, np.random.default_rng(1)))
    for probe, results, before in zip(probes(op, case, truth), moved, truth, strict=True):
        for name, x in results.items():
            gaps = np.abs(x - before[name]) / STEP / probe[name]
            assert 0.1 < np.median(gaps) < 1.5, name
            assert np.max(gaps) < 6, name


def test_small_numbers_have_one_too() -> None:
    """Their squares vanish; beside larger ones they have a share of the row."""
    x = np.array([[1e-300, 1e-300], [3.0, 0.0]])
    assert floor_entries(x).tolist() == [[1e-300, 1e-300], [3.0, pytest.approx(FLOOR * 3 / np.sqrt(2))]]


@pytest.mark.parametrize("op", ["pointwise_attention", "sparsemax_attention"])
def test_a_case_stays_on_its_kinks(op: str) -> None:
    case = case_of(op, KINKS)
    outputs, gradients = probes(BY_NAME[op], case, explicit(BY_NAME[op], case))
    assert max(np.max(x) for x in (*outputs.values(), *gradients.values())) < 1e4
    free = replace(case, tags=frozenset())
    _, jumping = probes(BY_NAME[op], free, explicit(BY_NAME[op], free))
    assert np.max(jumping["q"]) > 1e5


def test_a_small_weight_beside_an_exact_threshold_costs_the_rounding_of_the_threshold() -> None:
    """Of scores 15/16 and 0 sparsemax leaves weights 31/32 and 1/32, and dropout the second alone."""
    case = case_of("sparsemax_attention", Scene("plain", 1, 2, d=1, e=1))
    arrays = {"q": np.ones((1, 1)), "k": np.array([[0.9375], [0.0]]), "v": np.array([[0.0], [1.0]])}
    case = replace(case, arrays=arrays, params={"scale": 1.0}, tags=frozenset({"integers"}))
    op, cotangents = BY_NAME["sparsemax_attention"], {"o": np.ones((1, 1))}
    case = replace(case, cotangents=cotangents)
    outputs, gradients = probes(op, case, explicit(op, case))
    assert outputs["o"] == pytest.approx(np.hypot(1 / 32, 15 / 32), rel=0.2)
    assert gradients["v"].max() < 1.5


@pytest.mark.parametrize(("length", "moves"), [("all", True), ("visible", False)])
def test_scores_beside_a_kink_that_log_n_put_there_move(length: str, moves: bool) -> None:
    """log 65 is close to a multiple of 1/32: of both so little is left in relu that the rounding of log n matters."""
    case = case_of("pointwise_attention", KINKS, shift="-log_length", length=length)
    moved = shaken(BY_NAME["pointwise_attention"], case, np.random.default_rng(0))
    assert bool(np.any(moved.arrays["q"] != case.arrays["q"])) is moves


@pytest.mark.parametrize(
    ("shift", "moves"), [(0.3, True), (-1.0, False), (0.125, False), (np.array(0.3), True), (np.array(0.5), False)]
)
def test_scores_beside_a_kink_that_a_number_put_there_move(shift: Any, moves: bool) -> None:
    """Of -0.296875 + 0.3 relu leaves so little that the rounding of 0.3 matters."""
    case = case_of("pointwise_attention", KINKS)
    own = {"shift": shift}
    learned = isinstance(shift, np.ndarray)
    case = replace(case, arrays={**case.arrays, **own}) if learned else replace(case, params=own)
    op = BY_NAME["pointwise_attention"]
    moved = shaken(op, case, np.random.default_rng(0))
    assert bool(np.any(moved.arrays["q"] != case.arrays["q"])) is moves
    outputs, _ = probes(op, case, explicit(op, case))
    assert np.any(outputs["o"] > 0)


@pytest.mark.parametrize(("allowed", "told"), [(1e-6, True), (np.inf, False)])
def test_nothing_is_told_where_any_error_is_allowed(allowed: float, told: bool) -> None:
    """As where Performer's features vanish: what is small beside its summands made such a case look judged."""
    o = tolerance.Limit(np.full(3, 0.1), "bfloat16", np.full(3, allowed), 2.0)
    assert Golden({"o": o}, {}, {}, {}, ()).tells() is told


@pytest.mark.parametrize(("least", "near"), [(2e-37, False), (1e-37, True)])
def test_a_weight_that_may_become_0_is_near_the_threshold(least: float, near: bool) -> None:
    """α = 1 in an array counts weights that are not 0, and so rounding decides how many there are."""
    case = case_of("entmax_attention_weights", Scene("plain", 1, 2, d=1))
    arrays = {"q": np.ones((1, 1)), "k": np.array([[-np.log(least)], [0.0]])}
    weights = replace(case, dtype="float32", arrays=arrays, params={"scale": 1.0}, dtypes={})
    counted = replace(weights, params={"op": "entmax_attention", "scale": 1.0})
    assert near_threshold(counted, np.ones((1, 1))).tolist() == [near]
    assert not near_threshold(counted, 1.0).any()
    assert not near_threshold(weights, np.ones((1, 1))).any()


@pytest.mark.parametrize("name", [op.name for op in OPDB if op.kinks is has_kinks])
def test_exact_scores_move_where_the_activation_has_no_kink(name: str) -> None:
    """Else the bound would leave out what the rounding of a slope near its own zero costs."""
    op = BY_NAME[name]
    case = replace(draw_case(next(iter(op.samples(op, "float64", "quick")))), tags=frozenset({"integers"}))
    smooth, kinked = (replace(case, params={**case.params, "activation": x}) for x in ("silu", "relu"))
    assert not may_be_on_kinks(op, smooth)
    assert may_be_on_kinks(op, kinked)


@pytest.mark.parametrize(
    ("name", "kinks"),
    [("linear_attention_packed", False), ("softmax_attention_packed", False), ("pointwise_attention_packed", True)],
)
def test_packed_sequences_have_the_kinks_of_their_op(name: str, kinks: bool) -> None:
    """Features have none but at 0 of an input, which no factor crosses."""
    op = BY_NAME[name]
    case = draw_case(next(iter(op.samples(op, "float64", "quick"))))
    assert may_be_on_kinks(op, replace(case, tags=frozenset({"grid"}))) is kinks


def test_equal_calls_share_golden_values() -> None:
    case = case_of("softmax_attention", Scene("plain", 5, 7))
    assert golden(replace(case, id="other")) is golden(case)
    assert golden(replace(case, params={"scale": 0.5})) is not golden(case)
    moved = replace(case, arrays={**case.arrays, "v": 2 * case.arrays["v"]})
    assert golden(moved) is not golden(case)


def test_what_underflows_may_be_multiplied_by_scores() -> None:
    """XLA makes a weight below the normal range 0, and the gradient of α multiplies it by squares of exponents."""
    smallest = float(np.finfo(np.float32).smallest_normal)
    for growth in (1.0, 8.0):
        allowed = tolerance.limit(np.zeros(1), "float32", growth=growth).allowed
        assert allowed == tolerance.BOUND["float32"] * growth * growth * smallest


def test_a_case_with_results_beyond_its_dtype_is_not_judged() -> None:
    """Whoever is judged on it would be wrong: numbers that halve to weights of exp(20) leave none in float16."""
    sample = scene_sample(BY_NAME["gaussian_attention"], Scene("plain", 3, 4, params={"scale": -1.0}), {}, "float16")
    case = sample.draw(0)
    apart = {"q": np.full_like(case.arrays["q"], 0.9), "k": np.full_like(case.arrays["k"], -0.9)}
    beyond = replace(case, arrays={**case.arrays, **apart})
    assert not golden(beyond).fits()
    with pytest.raises(NoDraw, match="plain: no draw in 8 has results that float16 has"):
        draw_case(replace(sample, draw=lambda *_: beyond))
    assert golden(draw_case(sample)).fits()


def softmax_alone(there, back, v, do):
    return np.exp(back - there) * do


def softpick_alone(there, back, v, do):
    weight = np.maximum(np.expm1(back), 0.0) / (np.abs(np.expm1(there)) + 1e-6 * np.exp(np.maximum(there, 0.0)))
    return weight * do


def rela_alone(there, back, v, do):
    x = np.maximum(there, 0.0) * v
    inverse = 1.0 / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-8)
    across = do - x * inverse * np.mean(do * x * inverse, axis=-1, keepdims=True)
    return np.maximum(back, 0.0) * inverse * across


@pytest.mark.parametrize("d", [16, 64, 256])
@pytest.mark.parametrize(
    ("op", "dv"),
    [("softmax_attention", softmax_alone), ("softpick_attention", softpick_alone), ("rela_attention", rela_alone)],
)
def test_scores_that_are_summed_up_twice_are_within_bounds(op, dv, d):
    """In float32, forwards for what a row is divided by and backwards for weights: where one key is seen its weight is
    beside 1."""
    rng = np.random.default_rng(0)
    for n in range(120):
        size = (0.5, 2.0, 4.0, 8.0)[n % 4]
        q, k = (np.float32(size * rng.standard_normal((2, 1, d))) for _ in range(2))
        v, do = (np.float32(rng.standard_normal((2, 1, 4))) for _ in range(2))
        products = q * k / np.float32(np.sqrt(d))
        there, back = (np.cumsum(p, axis=-1)[..., -1:].astype(float) for p in (products, products[..., ::-1]))
        arrays = {name: x.astype(float) for name, x in {"q": q, "k": k, "v": v}.items()}
        params, of_output = {}, do
        if op == "rela_attention":  # whose heads are joined
            arrays, params = {**arrays, "norm_weight": np.ones(4)}, {"norm_axis": "head"}
            of_output = np.moveaxis(do, 0, 1).reshape(1, 8)
        limit = golden(Case(f"x{n}", op, "float32", arrays, params, {"o": of_output.astype(float)})).gradients["v"]
        assert np.all(np.abs(dv(there, back, v, do) - limit.golden) <= limit.allowed), n


def test_sums_of_numbers_that_are_rounded_alike_are_within_bounds() -> None:
    """Equal scores: each softplus of a remainder may be off by one and a half roundings of its own, all one way."""
    for n in (8, 63, 120):
        arrays = {"q": np.zeros((1, 1)), "k": np.zeros((n, 1)), "v": np.ones((n, 1))}
        params = {"attend_current": True, "return_remainder": True}
        case = Case(
            f"x{n}", "stick_breaking_attention", "float32", arrays, params, {"o": np.ones((1, 1)), "r": np.ones(1)}
        )
        limit, taken = golden(case).outputs["r"], n * np.log(2.0)
        for way in (-1.5, 1.5):
            off = np.exp(-taken * (1 + way * np.finfo(np.float32).eps))
            assert abs(off - limit.golden[0]) <= limit.allowed[0]


@pytest.mark.parametrize(("name", "by", "token"), [("k", "v", 0), ("v", "k", 0), ("q", "do", 1), ("o", "q", 1)])
def test_entries_of_a_fading_state_may_become_0(name: str, by: str, token: int) -> None:
    """XLA makes what is left of a state below the normal range 0, and a row or a column of it is multiplied: here eight
    entries just below it, by numbers of 3. Only the second query asks, and only the first key has a value.
    """
    left = 0.99 * float(np.finfo(np.float32).smallest_normal)
    sizes = {"q": [1.0, 1.0], "k": [1.0, 1.0], "v": [1.0, 0.0], "do": [0.0, 1.0]}
    given = {n: (3.0 if n == by else 1.0) * np.outer(x, np.ones(8)) for n, x in sizes.items()}
    cotangents = {"o": given.pop("do")}
    params = {"feature_map": "identity", "causal": True, "scale": 1.0}
    arrays = given | {"log_decay": np.array([0.0, np.log(left)])}
    limits = golden(Case(f"x{name}", "linear_attention", "float32", arrays, params, cotangents))
    limit = limits.outputs["o"] if name == "o" else limits.gradients[name]
    assert np.all(limit.allowed[token] >= 8 * 3 * left)
