"""Linear, cosine, performer and efficient attention: every gradient by central differences, states included."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

from attnkit_reference.linear import attention, cosine, efficient, performer

from .cases import CASES as COMMON
from .cases import MASK, Arrays, Case, Rng, case, draw, some

PROJECTION = performer.orthogonal_features(5, 3, seed=1)


class Squares:
    """A feature map with more features than its argument has, and its gradient: [x², x₀ + 2]."""

    def __call__(self, x: Any) -> Any:
        return np.concatenate([x * x, x[..., :1] + 2.0], axis=-1)

    def vjp(self, x: Any, d: Any) -> Any:
        dx = 2.0 * x * d[..., :-1]
        dx[..., :1] += d[..., -1:]
        return dx


class Op(NamedTuple):
    """How an op is called, and the features f of its states."""

    module: ModuleType
    name: str
    features: int
    own: Arrays
    arrays: Arrays
    levels: str = ""  # the name of the state's last part: "c" (...), "m" (..., f), or none
    pairs: bool = True  # whether a mask of pairs is legal

    def function(self, suffix: str = "") -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(self.module, self.name + suffix)
        return found


OPS = {
    "elu_plus_one": Op(attention, "linear_attention", 3, {"scale": 0.7, "eps": 0.1}, {}),
    "relu": Op(attention, "linear_attention", 3, {"feature_map": "relu", "eps": 0.5}, {}),
    "identity": Op(attention, "linear_attention", 3, {"feature_map": "identity", "scale": -1.3}, {}),
    "unnormalised": Op(attention, "linear_attention", 3, {"normalize": False}, {}),
    "callable": Op(attention, "linear_attention", 4, {"feature_map": Squares()}, {}),
    "cosine": Op(cosine, "cosine_attention", 4, {}, {}),
    "performer": Op(performer, "performer_attention", 5, {}, {"projection": PROJECTION}, "c"),
    "performer_relu": Op(performer, "performer_attention", 5, {"kernel": "relu"}, {"projection": PROJECTION}),
    "efficient": Op(efficient, "efficient_attention", 3, {}, {}, "m", pairs=False),
}


SQUARE = {"query_mask": np.array([[1, 0, 1, 1], [1, 1, 1, 0]], dtype=bool), "mask": MASK[::2, None], "causal": True}
CASES: dict[str, Case] = COMMON | {
    "key_mask": case((2, 2, 3, 3), (2, 2, 4, 3), (2, 2, 4, 2), {"mask": MASK[:2, None, None]}),
    "broadcast": case((2, 1, 2, 3), (3, 4, 3), (1, 4, 2), {"mask": np.arange(4) > 0}),
    "grouped": case((2, 4, 2, 3), (1, 2, 3, 3), (2, 2, 3, 2), {"enable_gqa": True, "mask": some(0.7, 2, 1, 1, 3)}),
    "shared": case((2, 2, 2, 3), (2, 1, 2, 3), (2, 1, 2, 2), {"enable_gqa": True, "causal": True}),
    "causal_square": case((2, 4, 3), (2, 4, 3), (2, 4, 2), SQUARE),
    "pairs": case((3, 3), (4, 3), (4, 2), {"mask": MASK}),
}
STATEFUL = ("plain", "key_mask", "lengths", "broadcast", "grouped", "shared", "causal_square", "pairs")


def state_names(op: Op) -> tuple[str, ...]:
    return ("S", "z", op.levels) if op.levels else ("S", "z")


def initial_state(rng: Rng, op: Op, arrays: Arrays) -> Arrays:
    """A state with the leading axes of k and v: z positive and, for cosine, of a vector shorter than its count; levels
    on both sides of those of the keys."""
    leading = np.broadcast_shapes(arrays["k"].shape[:-2], arrays["v"].shape[:-2])
    found = {"S": rng.normal(size=(*leading, op.features, 2)), "z": 1 + rng.random((*leading, op.features))}
    found["z"][..., 0] += 4
    if op.levels:
        found[op.levels] = rng.normal(size=(*leading, *((op.features,) if op.levels == "m" else ())))
    return {f"initial_{name}": x for name, x in found.items()}


def sample(op: Op, case: str, state: bool) -> tuple[Arrays, Arrays]:
    rng = np.random.default_rng([len(case), state])
    arrays, params = draw(rng, CASES[case])
    if state:
        arrays |= initial_state(rng, op, arrays)
    return arrays, {**op.own, **op.arrays, **params}


def cotangents_of(outputs: Arrays) -> Arrays:
    rng = np.random.default_rng(7)
    return {name: rng.normal(size=x.shape) for name, x in outputs.items()}


def combinations(cases: Any) -> list[tuple[str, str]]:
    """Every op in every case that it takes."""
    return [(name, case) for name, op in OPS.items() for case in cases if op.pairs or case != "pairs"]


@pytest.mark.parametrize(("name", "case"), combinations(CASES))
def test_gradients(check_vjp: Any, name: str, case: str) -> None:
    check_vjp(OPS[name].name, *sample(OPS[name], case, state=False), state=state_names(OPS[name]))


@pytest.mark.parametrize(("name", "case"), combinations(STATEFUL))
def test_gradients_with_a_state(check_vjp: Any, name: str, case: str) -> None:
    check_vjp(OPS[name].name, *sample(OPS[name], case, state=True), state=state_names(OPS[name]))


@pytest.mark.parametrize("name", OPS)
def test_gradients_where_heads_of_a_group_see_different_keys(check_vjp: Any, name: str) -> None:
    """Without a state, which has one head for the group."""
    op, own = OPS[name], {"enable_gqa": True, "mask": some(0.6, 4, 1, 3)}
    given = case((2, 4, 2, 3), (1, 2, 3, 3), (2, 2, 3, 2), {**op.own, **op.arrays, **own})
    check_vjp(op.name, *draw(np.random.default_rng(3), given))


@pytest.mark.parametrize(
    ("name", "case"), combinations(("key_mask", "lengths", "broadcast", "grouped", "causal", "pairs"))
)
def test_gradients_of_weights(covers: Any, check_gradients: Any, name: str, case: str) -> None:
    op = OPS[name]
    arrays, params = sample(op, case, False)
    del arrays["v"]

    def call(q: Any, k: Any) -> Arrays:
        return {"w": op.function("_weights")(q, k, **params)}

    cotangents = cotangents_of(call(**arrays))
    rows_of = getattr(op.module, op.name.removesuffix("_attention") + "_rows")
    rows = rows_of("rows", *arrays.values(), **params)
    ds, size = rows.pull(cotangents["w"], np.abs(cotangents["w"]))
    check_gradients(call, arrays, cotangents, rows.to_inputs(ds, None))
    for gradient, bound in zip(
        *(rows.to_inputs(x, None, a).values() for x, a in ((ds, False), (size, True))), strict=True
    ):
        covers(bound, gradient)


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_gradients_of_a_step(check_vjp: Any, name: str, state: bool) -> None:
    op, rng = OPS[name], np.random.default_rng(5)
    arrays = {"q_t": rng.normal(size=(2, 4, 3)), "k_t": rng.normal(size=(2, 2, 3)), "v_t": rng.normal(size=(2, 2, 2))}
    arrays |= initial_state(rng, op, {"k": np.ones((2, 2, 1, 3)), "v": np.ones((2, 2, 1, 2))}) if state else {}
    check_vjp(f"{op.name}_step", arrays, {**op.own, **op.arrays, "enable_gqa": True}, state=state_names(op))


def test_no_gradient_at_the_kink_of_relu_and_at_the_origin_of_cosine(same: Any) -> None:
    x, v = np.zeros((2, 3)), np.ones((2, 2))
    for name in ("relu", "cosine", "performer_relu"):
        op = OPS[name]
        found = op.function("_vjp")(x, x, v, *op.arrays.values(), v, **op.own)
        assert not np.any(found["q"])
        assert not np.any(found["k"])
    one = attention.linear_attention_vjp(x, x, np.array([[1.0], [-1.0]]), np.ones((2, 1)), eps=0.0)
    # φ'(0) = 1: dφ(k_j) = Σ_i φ(q_i) (v_j - o)/den with φ = 1, o = 0, den = 6
    same(one["k"], np.array([[1.0], [-1.0]]) * np.full((1, 3), 2 / 6))


def test_gradients_where_a_denominator_is_0_or_at_its_floor() -> None:
    # relu with eps = 0: orthogonal supports, so that nothing is left to divide by
    q, k = np.array([[1.0, -1.0]]), np.array([[-1.0, 1.0]])
    assert attention.linear_attention(q, k, np.ones((1, 1)), feature_map="relu", eps=0.0) == 0
    zero = attention.linear_attention_vjp(q, k, np.ones((1, 1)), np.ones((1, 1)), feature_map="relu", eps=0.0)
    assert all(not np.any(x) for x in zero.values())
    # the only key points away: max(1 - 1, 0) + 1e-6, and what is left of 1 + cos is rounding
    o = cosine.cosine_attention(np.array([[1.0, 0.0]]), np.array([[-2.0, 0.0]]), np.ones((1, 1)))
    assert np.all(np.isfinite(o))
    floored = cosine.cosine_attention_vjp(
        np.array([[1.0, 0.0]]), np.array([[-2.0, 0.0]]), np.ones((1, 1)), np.ones((1, 1))
    )
    assert all(np.all(np.isfinite(x)) for x in floored.values())


def test_the_size_of_a_cosine_weight_is_that_of_what_cancels_in_it() -> None:
    q, k = np.array([[1.0, 0.0]]), np.array([[-1.0, 1e-4], [1.0, 0.0]])
    size_of = cosine.cosine_attention_weights_magnitudes
    assert cosine.cosine_attention_weights(q, k)[0, 0] < 1e-8
    np.testing.assert_allclose(size_of(q, k)["w"], 1.0, rtol=1e-5)
    assert size_of(q, k, mask=np.array([False, True]))["w"][0, 0] == 0
