"""Gradients of the low-rank ops and of the landmark samplers against central differences and against their formulas."""

from typing import Any

import numpy as np
import pytest

import attnkit_reference as reference
from attnkit_reference.lowrank import landmarks

from .cases import Arrays, Case, Shape, case, draw, some

CONVERGED = 1e-10  # of ‖A X A - A‖/‖A‖, below which both gradients of the inverse must agree to the same share


def normal(seed: int, **shapes: Shape) -> Arrays:
    return draw(np.random.default_rng(seed), (shapes, {}))[0]


# ------------------------------------------------------------------------------------------------------- SOFT


def soft(q: Shape, v: Shape, landmarks: Shape, **params: Any) -> Case:
    return {"q": q, "v": v, "landmarks": landmarks}, params


SOFT: dict[str, Case] = {
    "plain": soft((5, 3), (5, 2), (3, 3)),
    "ridge": soft((2, 5, 3), (2, 5, 2), (2, 3, 3), ridge=0.1),
    "broadcast": soft((2, 1, 4, 3), (3, 4, 2), (1, 1, 3, 3)),
    "landmark_mask": soft((2, 5, 3), (2, 5, 2), (2, 3, 3), landmark_mask=np.array([[True, False, True], [False] * 3])),
    "tokens": soft((2, 2, 6, 3), (2, 1, 6, 2), (2, 2, 3, 3),
                   mask=some(0.7, 2, 1, 1, 6), key_lengths=np.array([[5], [0]])),
    "query_mask": soft((2, 2, 6, 3), (2, 2, 6, 2), (1, 2, 3, 3),
                       query_mask=some(0.6, 2, 1, 6), landmark_mask=np.arange(3) < 2),
    "init_scale": soft((2, 2, 4, 3), (2, 2, 4, 2), (2, 1, 3, 3)),
    "halvings": soft((2, 2, 4, 3), (2, 2, 4, 2), (2, 1, 3, 3), halvings=10),
}  # fmt: skip


def sample(case: str) -> tuple[Arrays, Arrays]:
    rng = np.random.default_rng(len(case))
    arrays, params = draw(rng, SOFT[case])
    if case in ("init_scale", "halvings"):
        arrays["init_scale"] = rng.uniform(0.3, 0.9, size=(2, 1))
    if case == "halvings":  # starts that are halved differently often, and one that is not
        arrays["landmarks"] *= np.array([0.3, 2.0])[:, None, None, None]
    return arrays, params


@pytest.mark.parametrize("newton_steps", [0, 1, 4, 20])
@pytest.mark.parametrize("case", SOFT)
def test_soft_unrolled(check_vjp: Any, case: str, newton_steps: int) -> None:
    arrays, params = sample(case)
    own = {"inverse_grad": "unrolled", "newton_steps": newton_steps}
    check_vjp("soft_attention", arrays, {**params, **own}, beyond=1.5 if case == "query_mask" and newton_steps else 0.0)


@pytest.mark.parametrize("newton_steps", [1, 5, 20])
def test_soft_implicit_is_the_derivative_of_its_surrogate(check_vjp: Any, newton_steps: int) -> None:
    """X(A) replaced by X - X (A - A_0) X, the linear function whose derivative "implicit" stands for."""
    arrays = normal(14, q=(6, 3), v=(6, 2), landmarks=(4, 3))
    ridge = 0.05

    def kernel(x: Any, y: Any) -> Any:
        return np.exp(-np.sum((x[:, None] - y) ** 2, axis=-1) / (2 * np.sqrt(3)))

    start = kernel(arrays["landmarks"], arrays["landmarks"]) + ridge * np.eye(4)
    x = reference.newton_inverse(start, newton_steps=newton_steps)

    def surrogate(q: Any, v: Any, landmarks: Any, **params: Any) -> Arrays:
        a, p = kernel(landmarks, landmarks) + ridge * np.eye(4), kernel(landmarks, q)
        return {"o": p.T @ (x - x @ (a - start) @ x) @ p @ v}

    check_vjp("soft_attention", arrays, {"newton_steps": newton_steps, "ridge": ridge}, surrogate, beyond=1.5)


def test_implicit_agrees_with_unrolled_where_the_iteration_has_converged() -> None:
    far, near = normal(9, q=(9, 4), v=(9, 2), landmarks=(3, 4)), normal(9, q=(9, 4), v=(9, 2), landmarks=(3, 4))
    near["landmarks"] *= 0.05
    do = np.random.default_rng(7).normal(size=(9, 2))

    def both(arrays: Arrays) -> tuple[float, float]:
        a = np.exp(-np.sum((arrays["landmarks"][:, None] - arrays["landmarks"]) ** 2, axis=-1) / 4)
        residual = reference.newton_inverse(a, return_residuals=True)[1][-1]
        one, two = (
            reference.soft_attention_vjp(*arrays.values(), do, inverse_grad=kind)["landmarks"]
            for kind in ("implicit", "unrolled")
        )
        return residual, float(np.max(np.abs(one - two)) / np.max(np.abs(two)))

    residual, difference = both(far)
    assert residual < CONVERGED
    assert difference < CONVERGED
    # and where it has not, they are two different gradients
    residual, difference = both(near)
    assert residual > CONVERGED
    assert difference > 1e6 * CONVERGED


def test_init_scale_has_no_implicit_gradient() -> None:
    arrays, params = sample("init_scale")
    do = np.ones((2, 2, 4, 2))
    scale = arrays.pop("init_scale")
    found = reference.soft_attention_vjp(*arrays.values(), do, init_scale=scale, newton_steps=2, **params)
    np.testing.assert_array_equal(found["init_scale"], np.zeros((2, 1)))


@pytest.mark.parametrize("newton_steps", [0, 1, 3])
def test_newton_unrolled_for_any_matrix(check_gradients: Any, newton_steps: int) -> None:
    """Neither symmetric nor positive: column sums are of absolute values."""
    arrays = {"a": normal(0, a=(2, 3, 3))["a"], "init_scale": np.array([0.4, 0.7])}
    dx = np.random.default_rng(7).normal(size=(2, 3, 3))
    params = {"newton_steps": newton_steps, "inverse_grad": "unrolled"}
    gradients = reference.newton_inverse_vjp(arrays["a"], dx, init_scale=arrays["init_scale"], **params)

    def call(a: Any, init_scale: Any) -> Arrays:
        return {"x": reference.newton_inverse(a, init_scale=init_scale, **params)}

    check_gradients(call, arrays, ({"x": dx}, gradients))


def test_a_start_is_halved_until_it_is_near(same: Any) -> None:
    """X_0 by the loop of the authors' code, matrix by matrix: of ones, of the identity, of nearly ones."""
    matrices = np.stack([np.ones((3, 3)), np.eye(3), np.ones((3, 3)) - 0.01 * np.eye(3)])
    for most in (0, 2, 10):
        found = reference.newton_inverse(matrices, newton_steps=0, init_scale=1.0, halvings=most)
        for a, x in zip(matrices, found, strict=True):
            alpha, n = 2.0 / np.linalg.norm(a, 1) ** 2, 0
            while n < most and np.linalg.norm(np.eye(3) - alpha * a @ a, 1) > 1.01:
                alpha, n = alpha / 2, n + 1
            same(x, alpha * a)
            assert n == (0 if a[0, 1] == 0 else min(most, 7)), "where ‖I - αA·A‖₁ = 1 + ⅔·½ⁿ of ones falls to 1.01"


def test_the_norm_passes_its_gradient_to_the_first_column(same: Any) -> None:
    a, dx = np.eye(3), np.arange(9.0).reshape(3, 3)
    found = reference.newton_inverse_vjp(a, dx, newton_steps=0, init_scale=0.5, inverse_grad="unrolled")["a"]
    expected = dx - np.diag([2.0 * np.trace(dx), 0.0, 0.0])
    same(found, expected)


@pytest.mark.parametrize("kind", ["implicit", "unrolled"])
def test_nothing_comes_from_a_matrix_of_zeros(kind: str) -> None:
    a = np.zeros((2, 3, 3))
    x, residuals = reference.newton_inverse(a, return_residuals=True)
    np.testing.assert_array_equal(x, a)
    np.testing.assert_array_equal(residuals, np.zeros((2, 21)))
    found = reference.newton_inverse_vjp(a, np.ones_like(a), inverse_grad=kind)
    np.testing.assert_array_equal(found["a"], a)


# ---------------------------------------------------------------------------------------------------- Nyström


NYSTROM: dict[str, Case] = {
    "plain": case((7, 3), (7, 3), (7, 2), {"num_landmarks": 3}),
    "broadcast": case((2, 1, 5, 3), (3, 5, 3), (2, 1, 5, 2), {"num_landmarks": 2, "scale": 0.3}),
    "grouped": case((2, 4, 6, 3), (1, 2, 6, 3), (2, 2, 6, 2),
                    {"num_landmarks": 3, "enable_gqa": True, "query_mask": some(0.8, 1, 4, 6)}),
    # items of 8, 4 (exact softmax), 3 (exact softmax) and no tokens
    "lengths": case((4, 8, 3), (4, 8, 3), (4, 8, 2), {"num_landmarks": 4, "key_lengths": np.array([8, 4, 3, 0])}),
    "masked": case((2, 7, 3), (2, 7, 3), (2, 7, 2),
                   {"num_landmarks": 2, "mask": some(0.7, 2, 1, 7), "query_mask": some(0.8, 2, 7)}),
    "exact": case((2, 4, 3), (2, 4, 3), (2, 4, 2), {"num_landmarks": 4, "mask": np.arange(4) > 0}),
}  # fmt: skip


@pytest.mark.parametrize("inverse_steps", [0, 1, 6])
@pytest.mark.parametrize("init", ["exact", "batch_max"])
@pytest.mark.parametrize("case", NYSTROM)
def test_nystrom(check_vjp: Any, case: str, init: str, inverse_steps: int) -> None:
    arrays, params = draw(np.random.default_rng(0), NYSTROM[case])
    own = {"init": init, "inverse_steps": inverse_steps}
    check_vjp("nystrom_attention", arrays, {**params, **own}, beyond=1.5 if inverse_steps == 6 else 0.0)


# -------------------------------------------------------------------------------------------------- Linformer


LINFORMER: dict[str, Case] = {
    "plain": case((4, 3), (5, 3), (5, 2), proj_k=(3, 7), proj_v=(3, 5)),
    "per_head": case((2, 2, 3, 3), (2, 2, 4, 3), (1, 2, 4, 2), {"scale": -0.7, "key_lengths": np.array([[3], [0]])},
                     proj_k=(2, 3, 6), proj_v=(1, 3, 4)),
    "grouped": case((2, 4, 3, 3), (1, 2, 4, 3), (2, 2, 4, 2),
                    {"enable_gqa": True, "mask": some(0.7, 2, 4, 1, 4), "query_mask": some(0.6, 4, 3)},
                    proj_k=(2, 3, 4), proj_v=(3, 5)),
    "dropout_mask": case((2, 3, 3), (2, 4, 3), (2, 4, 2),
                         {"dropout_mask": some(0.6, 2, 3, 3) / 0.6, "query_mask": np.array([True, False, True])},
                         proj_k=(3, 4), proj_v=(2, 3, 4)),
}  # fmt: skip


@pytest.mark.parametrize("case", LINFORMER)
def test_linformer(check_vjp: Any, case: str) -> None:
    check_vjp("linformer_attention", *draw(np.random.default_rng(0), LINFORMER[case]), beyond=1.5)


# --------------------------------------------------------------------------------------------------- samplers

SAMPLERS: dict[str, dict[str, Any]] = {
    "average_pool": {"height": 3, "width": 5, "r": 2},
    "convolution": {"height": 3, "width": 5, "r": 2},
    "random": {"indices": np.array([[3, 0, 3], [14, 1, 2]])},
    "biased": {"m": 4},
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers(check_gradients: Any, name: str, masked: bool) -> None:
    arrays = normal(0, q=(2, 15, 3), **({"kernel": (4, 3, 2, 2)} if name == "convolution" else {}))
    params = {**SAMPLERS[name], **({"query_mask": np.arange(15) % 3 > 0} if masked else {})}

    def call(**changed: Any) -> Arrays:
        answer = getattr(landmarks, name)(**changed, **params)
        return {"landmarks": answer[0] if masked else answer}

    cotangent = np.random.default_rng(7).normal(size=call(**arrays)["landmarks"].shape)
    gradients = getattr(landmarks, f"{name}_vjp")(*arrays.values(), cotangent, **params)
    assert set(gradients) == set(arrays)
    check_gradients(call, arrays, ({"landmarks": cotangent}, gradients))
