"""Low-rank ops where conformance does not look: errors, derivatives and precision of the inverse, and memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnkit
from attnkit import landmarks
from attnkit.ops.lowrank.products import gaussian

from .arrays import assert_agrees, close, normal, traced_memory

PICTURE = normal((2, 15, 3))[0]
SAMPLER_ERRORS = [
    (landmarks.average_pool, (PICTURE, 4, 5, 2), ValueError, "average_pool: height·width must be the 15 tokens of q"),
    (landmarks.average_pool, (PICTURE, 3, 5, 4), ValueError, "average_pool: r must not exceed height 3 and width 5"),
    (landmarks.average_pool, (PICTURE, 3, 5, 0), ValueError, "average_pool: r must be at least 1; got 0"),
    (landmarks.convolution, (PICTURE, np.ones((2, 2, 2, 2)), 3, 5, 2), ValueError, "convolution: kernel has shape"),
    (landmarks.random, (PICTURE, np.ones(3)), TypeError, "random: indices has dtype float64"),
    (landmarks.random, (PICTURE, np.ones((3, 2), int)), ValueError, r"random: indices has shape \(3, 2\)"),
    (landmarks.biased, (PICTURE, 16), ValueError, "biased: m must not exceed the 15 tokens of q; got 16"),
    (landmarks.random_indices, (3, 4, 0), ValueError, "random_indices: m must not exceed n = 3; got 4"),
]


@pytest.mark.parametrize("index", range(len(SAMPLER_ERRORS)))
def test_errors_of_samplers(index):
    sampler, arguments, error, text = SAMPLER_ERRORS[index]
    with pytest.raises(error, match=f"^{text}"):
        sampler(*arguments)


def test_a_mask_of_a_sampler_is_boolean():
    with pytest.raises(TypeError, match=r"^average_pool: query_mask has dtype float64"):
        landmarks.average_pool(PICTURE, 3, 5, 2, query_mask=np.ones(15))


# ----------------------------------------------------------------------------------------- second derivatives


@pytest.mark.referee
def test_second_derivatives_of_an_unrolled_inverse_are_the_same_under_jit():
    """XLA must not double rounding errors in each step."""
    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        x, along, c, d = (jnp.asarray(random.standard_normal(shape)) for shape in ((4, 3), (4, 3), (3, 1), (3, 1)))

        def total(x):
            a = jnp.where(jnp.eye(4, dtype=bool), 1.5, 0.05 * jnp.tanh(x @ x.mT))
            inverse = attnkit.newton_inverse(a, newton_steps=30, inverse_grad="unrolled", impl="generic")
            return ((inverse @ (x @ c)) * (x @ d)).sum()

        def derivative(x):
            return jax.jvp(jax.grad(total), (x,), (along,))[1]

        with jax.disable_jit():
            expected = derivative(x)
        assert_agrees(jax.jit(derivative)(x), expected)


def test_no_iteration_depends_on_the_data():
    """The same program for every input: nothing stops early."""
    one = jax.make_jaxpr(lambda a: attnkit.newton_inverse(a))(jnp.eye(4))
    two = jax.make_jaxpr(lambda a: attnkit.newton_inverse(a))(jnp.zeros((4, 4)))
    assert str(one) == str(two)
    assert "while" not in str(one)


# ------------------------------------------------------------------------------------------ precision, memory


@pytest.mark.parametrize("std", [1.0, 0.2])
def test_converged_output_is_that_of_the_pseudo_inverse(std):
    """Held against numpy.linalg.pinv, 49 landmarks of 32 features as in the paper's models, in float32."""
    q, v, marks = normal((2, 196, 32), (2, 196, 32), (2, 49, 32), seed=1)
    q, marks = std * q, std * marks

    def kernel(x, y):
        return np.exp(-np.sum((x[:, :, None] - y[:, None]) ** 2, axis=-1) / (2 * np.sqrt(32)))

    a, p = kernel(marks, marks), kernel(marks, q)
    expected = p.transpose(0, 2, 1) @ np.linalg.pinv(a) @ p @ v
    found = attnkit.soft_attention(*(x.astype("float32") for x in (q, v, marks)), newton_steps=30)
    size = np.max(np.abs(expected))
    assert np.max(np.abs(found - expected)) <= np.finfo("float32").eps * np.max(np.linalg.cond(a)) * 16 * size


def test_a_common_offset_does_not_hurt():
    q, v, marks = normal((1, 30, 8), (1, 30, 4), (1, 5, 8), dtype="float32")
    q, marks = np.round(q * 64) / 64, np.round(marks * 64) / 64  # exact after the shift, too
    for mask in (None, np.array([True, False, True, True, False])):
        shifted = attnkit.soft_attention(q + np.float32(100), v, marks + np.float32(100), landmark_mask=mask)
        close(shifted, attnkit.soft_attention(q, v, marks, landmark_mask=mask))


def test_no_kernel_exceeds_1():
    """Expanded squares of far and nearly equal vectors round below 0, where they are clamped."""
    x = 300 * normal((40, 8), dtype="float32")[0]
    x[1::2] = x[::2] * (1 + np.finfo(np.float32).eps)
    squares = np.sum(x * x, -1)[:, None] + np.sum(x * x, -1) - 2 * x @ x.T
    assert squares.min() < 0
    assert gaussian(np, x, x, 0.5).max() == 1


def test_residuals_of_float32_reach_rounding():
    x = normal((4, 49, 32), seed=2)[0]
    a = np.exp(-np.sum((x[:, :, None] - x[:, None]) ** 2, axis=-1) / (2 * np.sqrt(32)))
    residuals = attnkit.newton_inverse(a.astype("float32"), return_residuals=True)[1]
    assert residuals.shape == (4, 21)
    assert np.max(residuals[:, -1]) <= 64 * np.finfo("float32").eps
    assert np.min(residuals[:, 0]) > 0.1


@pytest.mark.parametrize("op", ["soft_attention", "nystrom_attention", "linformer_attention"])
def test_memory_is_linear_in_the_number_of_tokens(op):
    """No (n, n) array, masks included: 16384 tokens would need a gigabyte of float32 for one."""
    n, m = 16384, 8
    q, v, marks, proj = normal((n, 8), (n, 8), (m, 8), (m, n), dtype="float32")
    mask = np.arange(n) % 5 > 0
    arrays = {
        "soft_attention": (q, v, marks),
        "nystrom_attention": (q, q, v),
        "linformer_attention": (q, q, v, proj, proj),
    }
    own = {"num_landmarks": m} if op == "nystrom_attention" else {}
    with traced_memory() as memory:
        getattr(attnkit, op)(*arrays[op], mask=mask, **own)
        getattr(attnkit, f"{op}_vjp")(*arrays[op], v, mask=mask, **own)
    assert memory.peak < 40 * n * m * 4
