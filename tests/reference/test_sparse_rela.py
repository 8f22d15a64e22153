"""ReLA: gradients of norm and gate by central differences, the layout of heads, rows without weights, errors."""

from typing import Any

import numpy as np
import pytest

from attnkit_reference import rela
from attnkit_reference.pointwise import pointwise_attention

MARGIN = 0.05  # of scores from the kink of relu
MASK = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]], dtype=bool)
PARAMS: dict[str, dict[str, Any]] = {
    "no heads": {"lead": ((), ()), "mask": MASK},
    "heads": {"lead": ((2, 3), (2, 3)), "causal": True, "dropout": (0.3, 5)},
    "grouped": {"lead": ((2, 4), (1, 2)), "enable_gqa": True, "mask": MASK, "scale": -0.8},
    "heads of the mask": {"lead": ((2,), (2,)), "mask": np.stack([MASK, MASK[::-1, ::-1]])},
}


def sample(case: str, norm_axis: str, gated: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    params = dict(PARAMS[case])
    q_lead, k_lead = params.pop("lead")
    features = 2 * (q_lead[-1] if q_lead and norm_axis == "hidden" else 1)
    for seed in range(2000):
        rng = np.random.default_rng(seed)
        shapes = {"q": (*q_lead, 3, 3), "k": (*k_lead, 4, 3), "v": (*k_lead, 4, 2), "norm_weight": (features,)}
        shapes |= {"gate_weight": (features,)} if gated else {"bias": (3, 4)}
        arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        common = {name: x for name, x in params.items() if name != "dropout"}
        rows = rela.rela_rows("sample", arrays["q"], arrays["k"], bias=arrays.get("bias"), **common)
        if np.all(np.abs(rows.scores.s[rows.scores.visible]) > MARGIN):
            return arrays, {**params, "norm_axis": norm_axis, "eps": 0.01}
    raise AssertionError("no draw keeps the margin")


@pytest.mark.parametrize("case", PARAMS)
@pytest.mark.parametrize("norm_axis", rela.NORM_AXES)
@pytest.mark.parametrize("gated", [False, True])
def test_gradients(check_vjp: Any, case: str, norm_axis: str, gated: bool) -> None:
    check_vjp("rela_attention", *sample(case, norm_axis, gated))


def test_values_by_hand(same: Any) -> None:
    # scores 3, -2, 1 of one query in each of two heads; values ±: x = 3 v_0 + v_2
    q, k = np.array([[[3.0, -2.0, 1.0]]] * 2), np.eye(3)
    v = np.array([[[1.0], [9.0], [1.0]], [[2.0], [9.0], [-3.0]]])
    x = np.array([[4.0, 3.0]])
    weight, gate = np.array([2.0, -1.0]), np.array([0.5, 0.25])
    params = {"scale": 1.0, "eps": 0.25}
    hidden = x / np.sqrt(12.75)
    same(rela.rela_attention(q, k, v, weight, **params), hidden * weight)
    opening = 1 / (1 + np.exp(-gate * x))
    same(rela.rela_attention(q, k, v, weight, gate_weight=gate, **params), hidden * weight * opening)
    head = x / np.sqrt(x * x + 0.25)
    same(rela.rela_attention(q, k, v, weight[:1], norm_axis="head", **params), head * 2)
    same(rela.rela_attention_weights(q, k, scale=1.0), np.array([[[3.0, 0.0, 1.0]]] * 2))


def test_heads_are_joined_in_order(near: Any) -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(2, 4, 3, 5)), rng.normal(size=(2, 2, 6, 5)), rng.normal(size=(2, 2, 6, 7))
    o = rela.rela_attention(q, k, v, np.ones(28), enable_gqa=True)
    assert o.shape == (2, 3, 28)
    x = pointwise_attention(q, k, v, alpha=0.0, enable_gqa=True)
    rms = np.sqrt(np.mean(x**2, axis=(1, 3)) + 1e-8)
    for head in range(4):
        near(o[..., 7 * head : 7 * head + 7], x[:, head] / rms[..., None])


def test_the_scale_of_the_values_cancels() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(2, 3, 5)), rng.normal(size=(2, 6, 5)), rng.normal(size=(2, 6, 4))
    o = rela.rela_attention(q, k, v, np.ones(8), eps=1e-300)
    np.testing.assert_array_equal(o, rela.rela_attention(q, k, 1024 * v, np.ones(8), eps=1e-300))


def test_rows_without_weights_give_zero_and_pass_nothing() -> None:
    q, k, v = np.array([[1.0], [-1.0], [1.0]]), np.array([[1.0], [2.0]]), np.array([[1.0, 2.0], [3.0, 4.0]])
    common = {"query_mask": np.array([True, True, False]), "gate_weight": np.ones(2)}
    o = rela.rela_attention(q, k, v, np.ones(2), **common)
    assert o[0].all()
    assert not o[1:].any()
    do = np.array([[0.0, 0.0], [1.0, 2.0], [np.nan, np.inf]])
    for gradient in rela.rela_attention_vjp(q, k, v, np.ones(2), do, **common).values():
        assert not gradient.any()
