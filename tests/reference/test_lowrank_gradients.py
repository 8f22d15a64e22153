"""Gradients of the low-rank ops and of the landmark samplers against central differences and against their formulas."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import attnkit_reference as reference
from attnkit_reference.lowrank import landmarks

Rng = np.random.Generator
CONVERGED = 1e-10  # of ‖A X A - A‖/‖A‖, below which both gradients of the inverse must agree to the same share
Arrays = dict[str, Any]


def draw(seed: int, **shapes: tuple[int, ...]) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def check_op(check_gradients: Any, op: str, arrays: Arrays, params: Arrays) -> None:
    """Positional arrays are those that the op requires; init_scale goes by name."""
    function, vjp = getattr(reference, op), getattr(reference, f"{op}_vjp")
    named = {name: x for name, x in arrays.items() if name == "init_scale"}
    given = [x for name, x in arrays.items() if name not in named]
    do = np.random.default_rng(7).normal(size=function(*given, **named, **params).shape)
    gradients = vjp(*given, do, **named, **params)
    assert set(gradients) == set(arrays)
    check_gradients(lambda **changed: {"o": function(**changed, **params)}, arrays, {"o": do}, gradients)


# ------------------------------------------------------------------------------------------------------- SOFT


def soft_plain(rng: Rng) -> tuple[Arrays, Arrays]:
    return draw(0, q=(5, 3), v=(5, 2), landmarks=(3, 3)), {}


def soft_ridge(rng: Rng) -> tuple[Arrays, Arrays]:
    return draw(1, q=(2, 5, 3), v=(2, 5, 2), landmarks=(2, 3, 3)), {"ridge": 0.1}


def soft_broadcast(rng: Rng) -> tuple[Arrays, Arrays]:
    return draw(2, q=(2, 1, 4, 3), v=(3, 4, 2), landmarks=(1, 1, 3, 3)), {}


def soft_landmark_mask(rng: Rng) -> tuple[Arrays, Arrays]:
    mask = np.array([[True, False, True], [False, False, False]])
    return draw(3, q=(2, 5, 3), v=(2, 5, 2), landmarks=(2, 3, 3)), {"landmark_mask": mask}


def soft_tokens(rng: Rng) -> tuple[Arrays, Arrays]:
    params = {"mask": rng.random((2, 1, 1, 6)) < 0.7, "key_lengths": np.array([[5], [0]])}
    return draw(4, q=(2, 2, 6, 3), v=(2, 1, 6, 2), landmarks=(2, 2, 3, 3)), params


def soft_query_mask(rng: Rng) -> tuple[Arrays, Arrays]:
    params = {"query_mask": rng.random((2, 1, 6)) < 0.6, "landmark_mask": np.array([True, True, False])}
    return draw(5, q=(2, 2, 6, 3), v=(2, 2, 6, 2), landmarks=(1, 2, 3, 3)), params


def soft_init_scale(rng: Rng) -> tuple[Arrays, Arrays]:
    arrays = draw(6, q=(2, 2, 4, 3), v=(2, 2, 4, 2), landmarks=(2, 1, 3, 3))
    return {**arrays, "init_scale": rng.uniform(0.3, 0.9, size=(2, 1))}, {}


def soft_halvings(rng: Rng) -> tuple[Arrays, Arrays]:
    """Starts that are halved differently often, and one that is not."""
    arrays, _ = soft_init_scale(rng)
    return {**arrays, "landmarks": arrays["landmarks"] * np.array([[[0.3]], [[2.0]]])[:, None]}, {"halvings": 10}


SOFT: dict[str, Callable[[Rng], tuple[Arrays, Arrays]]] = {
    "plain": soft_plain,
    "ridge": soft_ridge,
    "broadcast": soft_broadcast,
    "landmark_mask": soft_landmark_mask,
    "tokens": soft_tokens,
    "query_mask": soft_query_mask,
    "init_scale": soft_init_scale,
    "halvings": soft_halvings,
}


@pytest.mark.parametrize("newton_steps", [0, 1, 4, 20])
@pytest.mark.parametrize("case", SOFT)
def test_soft_unrolled(check_gradients: Any, case: str, newton_steps: int) -> None:
    arrays, params = SOFT[case](np.random.default_rng(0))
    own = {"inverse_grad": "unrolled", "newton_steps": newton_steps}
    check_op(check_gradients, "soft_attention", arrays, {**params, **own})


@pytest.mark.parametrize("newton_steps", [1, 5, 20])
def test_soft_implicit_is_the_derivative_of_its_surrogate(check_gradients: Any, newton_steps: int) -> None:
    """X(A) replaced by X - X (A - A_0) X, the linear function whose derivative "implicit" stands for."""
    arrays = draw(8, q=(6, 3), v=(6, 2), landmarks=(4, 3))
    ridge = 0.05

    def kernel(x: Any, y: Any) -> Any:
        return np.exp(-np.sum((x[:, None] - y) ** 2, axis=-1) / (2 * np.sqrt(3)))

    start = kernel(arrays["landmarks"], arrays["landmarks"]) + ridge * np.eye(4)
    x = reference.newton_inverse(start, newton_steps=newton_steps)

    def surrogate(q: Any, v: Any, landmarks: Any) -> Arrays:
        a, p = kernel(landmarks, landmarks) + ridge * np.eye(4), kernel(landmarks, q)
        return {"o": p.T @ (x - x @ (a - start) @ x) @ p @ v}

    do = np.random.default_rng(7).normal(size=(6, 2))
    params = {"newton_steps": newton_steps, "ridge": ridge}
    gradients = reference.soft_attention_vjp(*arrays.values(), do, **params)
    check_gradients(surrogate, arrays, {"o": do}, gradients)


def test_implicit_agrees_with_unrolled_where_the_iteration_has_converged() -> None:
    far, near = draw(9, q=(9, 4), v=(9, 2), landmarks=(3, 4)), draw(9, q=(9, 4), v=(9, 2), landmarks=(3, 4))
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
    arrays, params = soft_init_scale(np.random.default_rng(0))
    do = np.ones((2, 2, 4, 2))
    scale = arrays.pop("init_scale")
    found = reference.soft_attention_vjp(*arrays.values(), do, init_scale=scale, newton_steps=2, **params)
    np.testing.assert_array_equal(found["init_scale"], np.zeros((2, 1)))


@pytest.mark.parametrize("newton_steps", [0, 1, 3])
def test_newton_unrolled_for_any_matrix(check_gradients: Any, newton_steps: int) -> None:
    """Neither symmetric nor positive: column sums are of absolute values."""
    arrays = {"a": draw(0, a=(2, 3, 3))["a"], "init_scale": np.array([0.4, 0.7])}
    dx = np.random.default_rng(7).normal(size=(2, 3, 3))
    params = {"newton_steps": newton_steps, "inverse_grad": "unrolled"}
    gradients = reference.newton_inverse_vjp(arrays["a"], dx, init_scale=arrays["init_scale"], **params)

    def call(a: Any, init_scale: Any) -> Arrays:
        return {"x": reference.newton_inverse(a, init_scale=init_scale, **params)}

    check_gradients(call, arrays, {"x": dx}, gradients)


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


def nystrom_plain(rng: Rng) -> tuple[Arrays, Arrays]:
    return draw(0, q=(7, 3), k=(7, 3), v=(7, 2)), {"num_landmarks": 3}


def nystrom_broadcast(rng: Rng) -> tuple[Arrays, Arrays]:
    return draw(1, q=(2, 1, 5, 3), k=(3, 5, 3), v=(2, 1, 5, 2)), {"num_landmarks": 2, "scale": 0.3}


def nystrom_grouped(rng: Rng) -> tuple[Arrays, Arrays]:
    params = {"num_landmarks": 3, "enable_gqa": True, "query_mask": rng.random((1, 4, 6)) < 0.8}
    return draw(2, q=(2, 4, 6, 3), k=(1, 2, 6, 3), v=(2, 2, 6, 2)), params


def nystrom_lengths(rng: Rng) -> tuple[Arrays, Arrays]:
    """Items of 8, 4 (exact softmax), 3 (exact softmax) and no tokens."""
    return draw(3, q=(4, 8, 3), k=(4, 8, 3), v=(4, 8, 2)), {"num_landmarks": 4, "key_lengths": np.array([8, 4, 3, 0])}


def nystrom_masked(rng: Rng) -> tuple[Arrays, Arrays]:
    params = {"num_landmarks": 2, "mask": rng.random((2, 1, 7)) < 0.7, "query_mask": rng.random((2, 7)) < 0.8}
    return draw(4, q=(2, 7, 3), k=(2, 7, 3), v=(2, 7, 2)), params


def nystrom_exact(rng: Rng) -> tuple[Arrays, Arrays]:
    return draw(5, q=(2, 4, 3), k=(2, 4, 3), v=(2, 4, 2)), {"num_landmarks": 4, "mask": np.arange(4) > 0}


NYSTROM: dict[str, Callable[[Rng], tuple[Arrays, Arrays]]] = {
    "plain": nystrom_plain,
    "broadcast": nystrom_broadcast,
    "grouped": nystrom_grouped,
    "lengths": nystrom_lengths,
    "masked": nystrom_masked,
    "exact": nystrom_exact,
}


@pytest.mark.parametrize("inverse_steps", [0, 1, 6])
@pytest.mark.parametrize("init", ["exact", "batch_max"])
@pytest.mark.parametrize("case", NYSTROM)
def test_nystrom(check_gradients: Any, case: str, init: str, inverse_steps: int) -> None:
    arrays, params = NYSTROM[case](np.random.default_rng(0))
    own = {"init": init, "inverse_steps": inverse_steps}
    check_op(check_gradients, "nystrom_attention", arrays, {**params, **own})


# -------------------------------------------------------------------------------------------------- Linformer


def linformer_plain(rng: Rng) -> tuple[Arrays, Arrays]:
    return draw(0, q=(4, 3), k=(5, 3), v=(5, 2), proj_k=(3, 7), proj_v=(3, 5)), {}


def linformer_per_head(rng: Rng) -> tuple[Arrays, Arrays]:
    shapes = {"q": (2, 2, 3, 3), "k": (2, 2, 4, 3), "v": (1, 2, 4, 2), "proj_k": (2, 3, 6), "proj_v": (1, 3, 4)}
    return draw(1, **shapes), {"scale": -0.7, "key_lengths": np.array([[3], [0]])}


def linformer_grouped(rng: Rng) -> tuple[Arrays, Arrays]:
    shapes = {"q": (2, 4, 3, 3), "k": (1, 2, 4, 3), "v": (2, 2, 4, 2), "proj_k": (2, 3, 4), "proj_v": (3, 5)}
    params = {"enable_gqa": True, "mask": rng.random((2, 4, 1, 4)) < 0.7, "query_mask": rng.random((4, 3)) < 0.6}
    return draw(2, **shapes), params


def linformer_dropout_mask(rng: Rng) -> tuple[Arrays, Arrays]:
    shapes = {"q": (2, 3, 3), "k": (2, 4, 3), "v": (2, 4, 2), "proj_k": (3, 4), "proj_v": (2, 3, 4)}
    params = {"dropout_mask": (rng.random((2, 3, 3)) < 0.6) / 0.6, "query_mask": np.array([True, False, True])}
    return draw(3, **shapes), params


LINFORMER: dict[str, Callable[[Rng], tuple[Arrays, Arrays]]] = {
    "plain": linformer_plain,
    "per_head": linformer_per_head,
    "grouped": linformer_grouped,
    "dropout_mask": linformer_dropout_mask,
}


@pytest.mark.parametrize("case", LINFORMER)
def test_linformer(check_gradients: Any, case: str) -> None:
    check_op(check_gradients, "linformer_attention", *LINFORMER[case](np.random.default_rng(0)))


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
    arrays = draw(0, q=(2, 15, 3), **({"kernel": (4, 3, 2, 2)} if name == "convolution" else {}))
    params = {**SAMPLERS[name], **({"query_mask": np.arange(15) % 3 > 0} if masked else {})}

    def call(**changed: Any) -> Arrays:
        answer = getattr(landmarks, name)(**changed, **params)
        return {"landmarks": answer[0] if masked else answer}

    cotangent = np.random.default_rng(7).normal(size=call(**arrays)["landmarks"].shape)
    gradients = getattr(landmarks, f"{name}_vjp")(*arrays.values(), cotangent, **params)
    assert set(gradients) == set(arrays)
    check_gradients(call, arrays, {"landmarks": cotangent}, gradients)
