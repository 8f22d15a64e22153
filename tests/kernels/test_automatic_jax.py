"""What `impl="auto"` takes on JAX where its device is a GPU, with one that passes for it, and what it passes over."""

import warnings
from typing import Any

import pytest

pytest.importorskip("jax", reason="jax is not installed")

import jax
import jax.numpy as jnp

import attnkit
from attnkit.backends.jax import gpu
from attnkit.backends.jax.triton import launch
from attnkit.kernels import verdicts

OPS = (
    attnkit.pointwise_attention,
    attnkit.gaussian_attention,
    attnkit.softmax_attention,
    attnkit.entmax_attention,
    attnkit.linear_attention,
)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's device passes for an H100 beside which jax-triton is installed; nothing runs on it."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(gpu, "capability", lambda: "9.0")
    monkeypatch.setattr(launch, "missing", lambda: None)
    monkeypatch.setattr(verdicts, "_warned", set())
    monkeypatch.setattr(verdicts, "judged", frozenset)


def explained(
    tokens: int, dtype: str = "bfloat16", d: int = 64, op: Any = attnkit.pointwise_attention, **options: object
) -> dict[str, str | None]:
    x = jax.ShapeDtypeStruct((1, 8, tokens, d), dtype)
    told: list[dict[str, str | None]] = []

    def ask(q: jax.Array) -> jax.Array:
        told.append(attnkit.explain(op, q, q, q, **options))
        return q

    jax.eval_shape(ask, x)
    return told[0]


def first(reasons: dict[str, str | None]) -> str:
    return next(name for name, reason in reasons.items() if reason is None)


@pytest.mark.parametrize("op", OPS)
def test_long_sequences_go_to_tritons_kernels_and_small_calls_do_not(op: Any) -> None:
    for dtype in ("bfloat16", "float32"):
        assert first(explained(16_384, dtype, op=op)) == "triton"
        assert first(explained(16, dtype, op=op)) == "generic"


def test_where_calls_go_to_tritons_kernels_depends_on_the_dtype() -> None:
    assert first(explained(1024)) == "triton"
    assert first(explained(1024, "float32")) == "generic"


def test_pallas_is_behind_and_saves_memory_where_there_is_no_jax_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    names = list(explained(16_384))
    assert names.index("triton") < names.index("pallas")
    monkeypatch.setattr(launch, "missing", lambda: "needs jax-triton")
    assert first(explained(16_384)) == "pallas"
    assert first(explained(1024)) == "generic"
    assert first(explained(16_384, dropout=(0.1, 3))) == "generic"


@pytest.mark.parametrize(("capability", "reason"), [("7.5", "needs compute capability 8.0"), ("", "NVIDIA only")])
def test_other_devices_are_refused(capability: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "capability", lambda: capability)
    told = explained(16_384)
    assert first(told) == "generic"
    assert all(reason in str(told[name]) for name in ("triton", "pallas"))


def test_derivatives_that_kernels_lack_are_passed_over_where_they_are_visible() -> None:
    """In forward mode, and where gradients are differentiated; first gradients and vmap are served."""
    taken = []

    def total(x: jax.Array) -> jax.Array:
        taken.append(first(attnkit.explain(attnkit.pointwise_attention, *[jnp.broadcast_to(x, (4, 4096, 64))] * 3)))
        return (x**3).sum()

    x = jnp.ones(64, jnp.bfloat16)
    jax.grad(total)(x)
    jax.vmap(jax.grad(total))(x[None])
    jax.grad(lambda x: jax.grad(total)(x).sum())(x)
    jax.jvp(total, (x,), (x,))
    jax.hessian(total)(x)
    assert taken == ["triton", "triton", "generic", "generic", "generic"]


def test_the_warning_needs_a_call_that_runs() -> None:
    x = jnp.ones((1, 8, 16, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(lambda q: gpu.taken(q) or q, x)
        attnkit.explain(attnkit.pointwise_attention, x, x, x)
    with pytest.warns(UserWarning, match=r"compute capability 9\.0 "):
        gpu.taken(x)
