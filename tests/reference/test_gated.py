"""Gated attention unit: token by token as Hua et al. write it, gradients, padding, magnitudes, errors."""

from typing import Any

import numpy as np
import pytest

import attnkit_reference as reference

Arrays = dict[str, Any]
WEIGHTS = ("w_z", "w_u", "w_v", "w_o", "gamma_q", "beta_q", "gamma_k", "beta_k")


def draw(seed: int, lead: tuple[int, ...] = (), tokens: int = 5) -> Arrays:
    """3 features of x, 2 of q and k, 4 of u and v, 3 of o."""
    rng = np.random.default_rng(seed)
    shapes: list[tuple[int, ...]] = [(3, 2), (3, 4), (3, 4), (4, 3), (2,), (2,), (2,), (2,)]
    return {"x": rng.normal(size=(*lead, tokens, 3))} | {
        name: rng.normal(size=shape) for name, shape in zip(WEIGHTS, shapes, strict=True)
    }


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def by_tokens(a: Arrays, alpha: float, causal: bool) -> Any:
    x = a["x"]
    z, u, v = (silu(x @ a[f"w_{name}"]) for name in "zuv")
    q, k = z * a["gamma_q"] + a["beta_q"], z * a["gamma_k"] + a["beta_k"]
    rows = []
    for i in range(len(x)):
        n = i + 1 if causal else len(x)
        seen = sum(max(q[i] @ k[j], 0.0) ** 2 * v[j] for j in range(n))
        rows.append((u[i] * seen / n**alpha) @ a["w_o"])
    return np.array(rows)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.0])
def test_by_tokens(alpha: float, causal: bool) -> None:
    a = draw(0)
    found, expected = reference.gated_attention_unit(**a, alpha=alpha, causal=causal), by_tokens(a, alpha, causal)
    assert np.max(np.abs(found - expected)) <= 64 * np.finfo(np.float64).eps * np.max(np.abs(expected))


def test_the_default_divides_the_score_by_the_length_inside_the_square() -> None:
    """relu²(q·k/n): alpha = 2, Hua et al.'s."""
    a = draw(1)
    scaled = {**a, "gamma_q": a["gamma_q"] / 5, "beta_q": a["beta_q"] / 5}
    found, expected = reference.gated_attention_unit(**a), reference.gated_attention_unit(**scaled, alpha=0.0)
    assert np.max(np.abs(found - expected)) <= 64 * np.finfo(np.float64).eps * np.max(np.abs(expected))


PARAMS: dict[str, tuple[Arrays, Arrays]] = {
    "plain": (draw(0), {}),
    "batch": (draw(1, (2,)), {"alpha": 1.0}),
    "causal bias": (draw(2, (2,)), {"causal": True, "bias": np.random.default_rng(0).normal(size=(1, 5, 5))}),
    "masks": (
        draw(3, (2,)),
        {
            "mask": np.random.default_rng(1).random((2, 5, 5)) < 0.6,
            "query_mask": np.array([[True] * 4 + [False], [False] * 5]),
            "bias": np.random.default_rng(2).normal(size=(5,)),
        },
    ),
    "lengths": (draw(4, (3,)), {"key_lengths": np.array([5, 2, 0]), "window": (1, 1), "length": "all"}),
    "dropout": (draw(5, (2,)), {"dropout": (0.4, 3), "length": 7.0}),
    "dropout mask": (draw(6, (2,)), {"dropout_mask": np.random.default_rng(3).random((2, 5, 5)) * 2}),
}


@pytest.mark.parametrize("case", PARAMS)
def test_gradients_and_magnitudes(check_vjp: Any, case: str) -> None:
    arrays, params = PARAMS[case]
    named = {**arrays, **({"bias": params["bias"]} if "bias" in params else {})}
    rest = {name: value for name, value in params.items() if name != "bias"}
    check_vjp("gated_attention_unit", named, rest, beyond=1.001 if case == "plain" else 0.0)


def test_padding_reaches_nothing(near: Any) -> None:
    arrays, results = draw(7, (2,)), []
    there = np.array([[True, True, True, False, False], [True, False, True, True, True]])
    params = {"mask": there[:, None, :], "query_mask": there}
    for content in (0.0, 1e30, np.nan, np.inf):
        given = {**arrays, "x": np.where(there[..., None], arrays["x"], content)}
        o = reference.gated_attention_unit(**given, **params)
        grads = reference.gated_attention_unit_vjp(**given, do=np.ones((2, 5, 3)), **params)
        results.append({"o": o, **grads})
    for other in results[1:]:
        for name, x in results[0].items():
            np.testing.assert_array_equal(x, other[name])
    assert np.all(results[0]["o"][~there] == 0)
    assert np.all(results[0]["x"][~there] == 0)
    # and as if the padding were not there
    alone = reference.gated_attention_unit(**{**arrays, "x": arrays["x"][0, :3]})
    near(results[0]["o"][0, :3], alone)
