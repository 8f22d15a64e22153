"""What `impl="auto"` takes on JAX where its device is a GPU, with one that passes for it, and what it passes over."""

import re
import sys
import warnings
from functools import partial
from typing import Any

import pytest

pytest.importorskip("jax", reason="jax is not installed")

import jax
import jax.numpy as jnp

import attnkit
from attnkit.backends.jax import gpu
from attnkit.backends.jax.triton import launch
from attnkit.kernels import verdicts

ABSENT = launch.missing
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


def test_without_jax_triton_explain_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "missing", ABSENT)
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    install = r"needs jax-triton .*pip install 'attnkit\[jax-triton\]'.*import of jax_triton halted"
    for op in OPS:
        told = explained(16_384, op=op)
        assert re.match(install, str(told["triton"])), op
        assert first(told) == "generic"
    x = jnp.ones((1, 8, 16, 64))
    with pytest.raises(NotImplementedError, match=install):
        attnkit.pointwise_attention(x, x, x, impl="triton")


def test_pallas_is_no_implementation_and_the_others_are_named() -> None:
    """It was one before 0.1.0, which is the first release."""
    x = jnp.ones((1, 8, 16, 64))
    named = r"impl must be one of 'auto', 'generic', 'triton', .*; got 'pallas'"
    for impl in ("pallas", ("pallas", "generic")):
        with pytest.raises(ValueError, match=f"pointwise_attention: {named}"):
            attnkit.pointwise_attention(x, x, x, impl=impl)
    with pytest.raises(ValueError, match=named):
        attnkit.pointwise_attention_vjp(x, x, x, x, impl="pallas")


@pytest.mark.parametrize(("capability", "reason"), [("7.5", "needs compute capability 8.0"), ("", "NVIDIA only")])
def test_other_devices_are_refused(capability: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "capability", lambda: capability)
    told = explained(16_384)
    assert first(told) == "generic"
    assert reason in str(told["triton"])


def test_kernels_run_on_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    x, reason = jnp.zeros((2, 3, 4)), "Triton kernels run on GPUs; the default device of JAX is a cpu"
    assert attnkit.explain(attnkit.pointwise_attention, x, x, x)["triton"] == reason
    for call in (attnkit.pointwise_attention, partial(attnkit.pointwise_attention_vjp, x)):
        with pytest.raises(NotImplementedError, match=reason):
            call(x, x, x, impl="triton")


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
