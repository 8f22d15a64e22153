"""Blocks of JAX arrays: what the conformance kit does not ask of them, several blocks and segments in small calls."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnkit
from attnkit.backends.jax import blocked
from attnkit_conformance.adapters.jax import light
from attnkit_conformance.judge import judge
from attnkit_conformance.judge.selection import find

from .arrays import OPTIONS, assert_close, qkv

TRIED = {"pointwise": ("causal", "upper-left", "keys", "lengths", "dropout"), "gaussian": ("bias",)}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few queries, and a last one that is smaller."""
    for name, value in (("QUERIES", 4), ("CAUSAL_QUERIES", 2), ("SEGMENTS", 2), ("LEAST", 1)):
        monkeypatch.setattr(blocked, name, value)


def arrays() -> list[jax.Array]:
    return [jnp.asarray(x) for x in qkv(9, 11, "float32")]


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Options with JAX's arrays in place of NumPy's."""
    cast = {
        name: x.astype(np.float32) if x.dtype == np.float64 else x for name, x in options.items() if hasattr(x, "dtype")
    }
    return options | {name: jnp.asarray(x) for name, x in cast.items()}


def gradients(op: str, impl: str, options: dict[str, Any]) -> Callable[..., Any]:
    """o and the gradients of Σ sin o, for q, k, v and a bias."""
    bias = {name: x for name, x in options.items() if name == "bias"}
    rest = {name: x for name, x in options.items() if name != "bias"}

    def total(leaves: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        *tokens, bias = leaves
        o = getattr(attnkit, op)(*tokens, impl=impl, **bias, **rest)
        return jnp.sum(jnp.sin(o)), o

    return lambda q, k, v: jax.value_and_grad(total, has_aux=True)((q, k, v, bias))


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(function, compiler_options=light())


@pytest.mark.parametrize(
    ("op", "name"),
    [
        pytest.param(f"{op}_attention", name, marks=pytest.mark.referee if name in ("upper-left", "keys") else ())
        for op, names in TRIED.items()
        for name in names
    ],
)
def test_several_blocks_agree_with_the_whole(op: str, name: str, small: None) -> None:
    calls = [compiled(gradients(op, impl, given(OPTIONS[name]))) for impl in ("blocked", "generic")]
    for got, want in zip(*(jax.tree.leaves(call(*arrays())) for call in calls), strict=True):
        if got.ndim:
            assert_close(got, want)


def test_explicit_gradients_are_the_automatic_ones(small: None) -> None:
    q, k, v = arrays()
    o, pull = compiled(lambda *x: jax.vjp(partial(attnkit.pointwise_attention, causal=True, impl="blocked"), *x))(
        q, k, v
    )
    explicit = compiled(partial(attnkit.pointwise_attention_vjp, causal=True, impl="blocked"))(q, k, v, jnp.cos(o))
    for name, gradient in zip("qkv", pull(jnp.cos(o)), strict=True):
        assert_close(explicit[name], gradient)


def judged(op: str, expression: str = "cross or padded or gqa") -> set[str]:
    """The verdicts of the kit on an op in blocks."""
    results = judge(find(["jax-blocked"]), "small", expression, ("float32",), ops=(op,))
    return {result.status for result in results}


@pytest.mark.referee
@pytest.mark.parametrize("op", ["pointwise_attention", "softmax_attention"])
def test_the_kit_judges_several_blocks(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "QUERIES", 24)
    monkeypatch.setattr(blocked, "CAUSAL_QUERIES", 24)
    assert judged(op) <= {"pass", "unsupported"}


def first_block(c: Any, name: str, x: Any, index: Any, start: Any) -> Any:
    return RIGHT_PLACE(c, name, x, index, 0)


def one_key_less(c: Any) -> Any:
    for segment in RIGHT_SEGMENTS(c):
        yield segment._replace(keys=segment.keys - 1)


def last_alone(c: Any, name: str, total: Any, grad: Any, *at: Any) -> Any:
    return RIGHT_SUM(c, name, total * 0, grad, *at)


RIGHT_PLACE, RIGHT_SEGMENTS, RIGHT_SUM = blocked.place, blocked.segments, blocked.add_slice


@pytest.mark.parametrize(
    ("name", "wrong"), [("place", first_block), ("segments", one_key_less), ("add_slice", last_alone)]
)
def test_the_kit_finds_a_planted_bug(name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "QUERIES", 24)
    monkeypatch.setattr(blocked, name, wrong)
    assert "fail" in judged("pointwise_attention", "cross")


def test_mapped_and_differentiated_twice(small: None) -> None:
    q, k, v = arrays()

    def found(impl: str) -> list[jax.Array]:
        def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.sum(attnkit.sigmoid_attention(q, k, v, causal="upper_left", impl=impl) ** 2)

        def twice(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jax.grad(lambda q: jnp.sum(jax.grad(total)(q, k, v) ** 2))(q)

        mapped = compiled(jax.vmap(jax.value_and_grad(total, (0, 1)), (0, None, 0)))(q, k[0], v)
        return [*jax.tree.leaves(mapped), compiled(twice)(q[0, 0], k[0, 0], v[0, 0])]

    for got, want in zip(found("blocked"), found("generic"), strict=True):
        assert_close(got, want)


def test_forward_mode_is_refused_by_name() -> None:
    q, k, v = arrays()
    with pytest.raises(NotImplementedError, match=r"blocked: forward mode .* is served by the generic implementation"):
        jax.jvp(lambda q: attnkit.pointwise_attention(q, k, v, impl="blocked"), (q,), (q,))


def test_a_seed_may_be_traced(small: None) -> None:
    call = partial(attnkit.pointwise_attention, impl="blocked")
    traced = compiled(lambda seed: call(*arrays(), dropout=(0.3, seed)))(jnp.uint32(11))
    assert_close(traced, compiled(lambda: call(*arrays(), dropout=(0.3, 11)))())


SHARDED = """
import attnkit, jax, jax.numpy as jnp, numpy as np
from functools import partial
from jax.sharding import Mesh, PartitionSpec
from attnkit.backends.jax import blocked
blocked.CAUSAL_QUERIES = 16
assert len(jax.devices()) == 4
q, k, v = (jax.random.normal(jax.random.key(i), (2, 4, 40, 8)) for i in range(3))
where = PartitionSpec("items", "heads")
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("items", "heads"))
blocked, generic = (partial(attnkit.pointwise_attention, causal=True, impl=impl) for impl in ("blocked", "generic"))
sharded = jax.shard_map(blocked, mesh=mesh, in_specs=where, out_specs=where)
both = lambda f: jax.jit(jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(f(*x))), (0, 1, 2)))(q, k, v)
for got, want in zip(jax.tree.leaves(both(sharded)), jax.tree.leaves(both(generic))):
    assert jnp.max(jnp.abs(got - want)) <= 64 * 2.0**-23 * jnp.max(jnp.abs(want))
print(both(sharded)[1][0].sharding.spec)
"""


@pytest.mark.referee  # in a process of its own
def test_items_and_heads_on_several_devices() -> None:
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SHARDED]
    done = subprocess.run(command, env={**os.environ, **flags}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "'items', 'heads'" in done.stdout


@pytest.mark.parametrize("op", ["pointwise_attention", "softmax_attention"])
def test_memory_is_that_of_a_block(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporaries of the compiled program, where the array of all scores would have 64 MiB."""
    monkeypatch.setattr(blocked, "SCORES", 1 << 17)
    x = jax.ShapeDtypeStruct((2, 2, 2048, 8), jnp.float32)
    program = jax.jit(gradients(op, "blocked", {"causal": True})).lower(x, x, x).compile(light())
    assert program.memory_analysis().temp_size_in_bytes < 8 << 20


def test_auto_takes_blocks_where_there_are_many_scores() -> None:
    few, many = (jax.ShapeDtypeStruct((1, 8, n, 64), jnp.float32) for n in (100, 1000))
    rows = {kernel.name: kernel for kernel in blocked.KERNELS.values()}
    assert not blocked.is_faster("pointwise_attention", few, few, few)
    assert blocked.is_faster("pointwise_attention", many, many, many)
    assert list(rows) == ["blocked"]
    x = jnp.zeros((1, 1, 8, 4))
    told = attnkit.explain(attnkit.softmax_attention, x, x, x, return_lse=True)
    assert told["blocked"] == "lse is served by the generic implementation"


def test_dropout_has_all_digits_in_double_precision() -> None:
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(x) for x in qkv(9, 11, "float64"))
        outputs = [attnkit.pointwise_attention(q, k, v, impl=impl, dropout=(0.1, 5)) for impl in ("blocked", "generic")]
        assert_close(*outputs)
