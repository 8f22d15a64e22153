"""Linear, cosine, Performer and efficient attention where conformance does not look: feature maps, ranges, memory."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnkit
import attnkit_reference

from .arrays import assert_agrees, assert_close, close, normal, to_numpy, traced_memory

PROJECTION = attnkit.orthogonal_features(5, 4, seed=1)
OPS = {
    "linear_attention": {},
    "linear_attention-relu": {"feature_map": "relu", "eps": 0.1},
    "linear_attention-identity": {"feature_map": "identity"},
    "cosine_attention": {},
    "performer_attention": {"projection": PROJECTION},
    "performer_attention-relu": {"projection": PROJECTION, "kernel": "relu"},
    "efficient_attention": {},
}
N = 19


def of(name, suffix=""):
    return getattr(attnkit, name.partition("-")[0] + suffix)


def own_of(name, convert=lambda x: x):
    return {key: convert(x) if isinstance(x, np.ndarray) else x for key, x in OPS[name].items()}


def inputs(dtype="float32", n=N, seed=0):
    return normal((2, 4, n, 4), (2, 2, n, 4), (2, 2, n, 3), dtype=dtype, seed=seed)


# ---------------------------------------------------------------------------------------------- forms


@pytest.mark.parametrize("name", OPS)
def test_a_state_of_one_head_serves_all(name):
    q, k, v = inputs()
    own = own_of(name)
    state = of(name)(q[:1, :1], k[:1, :1], v[:1, :1], return_state=True, **own)[1]
    wide = tuple(np.broadcast_to(x, (2, 2, *x.shape[2:])) for x in state)
    for causal in (False, True):
        common = {"causal": causal, "enable_gqa": True, **own}
        close(of(name)(q, k, v, initial_state=state, **common), of(name)(q, k, v, initial_state=wide, **common))
        do = np.ones((2, 4, N, 3), np.float32)
        narrow = of(name, "_vjp")(q, k, v, do=do, initial_state=state, **common)["initial_state"]
        full = of(name, "_vjp")(q, k, v, do=do, initial_state=wide, **common)["initial_state"]
        for a, b, part in zip(narrow, full, state, strict=True):
            assert a.shape == part.shape
            if np.any(b):  # a level has no gradient but through the parts it scales, which cancel
                size = np.sum(np.abs(b))
                assert np.max(np.abs(a - b.sum((0, 1), keepdims=True))) <= 64 * np.finfo(np.float32).eps * size


# ---------------------------------------------------------------------------------------------- feature maps


class Squares:
    """[x², x₀ + 2] and its gradient: more features than x has."""

    def __call__(self, x):
        if isinstance(x, torch.Tensor):
            return torch.cat([x * x, x[..., :1] + 2.0], dim=-1)
        return np.concatenate([x * x, x[..., :1] + 2.0], axis=-1)

    def vjp(self, x, d):
        return 2 * x * d[..., :-1] + np.concatenate([d[..., -1:], np.zeros_like(x[..., 1:])], axis=-1)


def test_a_callable_feature_map_and_its_gradients():
    q, k, v = inputs("float64")
    options = {"feature_map": Squares(), "causal": True, "enable_gqa": True, "mask": np.arange(N) != 3}
    k[..., 3, :] = np.nan
    do = normal((2, 4, N, 3), seed=5)[0]
    found = attnkit.linear_attention_vjp(q, k, v, do, **options)
    expected = attnkit_reference.linear_attention_vjp(q, k, v, do, **options)
    leaves = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    o = attnkit.linear_attention(*leaves, **{**options, "mask": torch.tensor(options["mask"])})
    o.backward(torch.tensor(do))
    assert_close(to_numpy(o), attnkit_reference.linear_attention(q, k, v, **options))
    for name, leaf in zip("qkv", leaves, strict=True):
        assert_close(found[name], expected[name])
        assert_close(to_numpy(leaf.grad), expected[name])


def test_what_a_feature_map_must_be():
    q, k, v = inputs()
    with pytest.raises(ValueError, match=r"^linear_attention: feature_map must map .*\(2, 4, 19, f\); got \(2, 4, 4\)"):
        attnkit.linear_attention(q, k, v, enable_gqa=True, feature_map=lambda x: x.sum(-2))
    with pytest.raises(ValueError, match=r"feature_map must map .* got float"):
        attnkit.linear_attention(q, k, v, enable_gqa=True, feature_map=lambda x: 1.0)
    with pytest.raises(NotImplementedError, match="linear_attention_vjp: explicit gradients need a feature_map"):
        attnkit.linear_attention_vjp(q, k, v, np.ones_like(q[..., :3]), enable_gqa=True, feature_map=lambda x: x)


def test_orthogonal_features_are_those_of_the_reference():
    for m, d, seed in ((5, 4, 1), (3, 7, 2**40), (8, 8, 0), (1, 1, 3)):
        found = attnkit.orthogonal_features(m, d, seed)
        assert np.array_equal(found, attnkit_reference.orthogonal_features(m, d, seed))
    with pytest.raises(ValueError, match="orthogonal_features: m must be at least 1"):
        attnkit.orthogonal_features(0, 4, seed=0)


# ---------------------------------------------------------------------------------------------- dtypes, layouts


def test_sums_may_exceed_what_float16_holds():
    q, k, v = (np.full((2000, 4), x, np.float16) for x in (1.0, 100.0, 3.0))
    o, (S, z) = attnkit.linear_attention(q, k, v, return_state=True)
    assert np.min(z) > np.finfo(np.float16).max
    assert np.all(np.isfinite(S))
    assert np.all(o == 3)


def test_gradients_of_sums_whose_squares_underflow():
    """The sums are about 1e-25: JAX's own derivative of a quotient would divide by 0."""
    q, k = np.array([[28.5], [28.0]], np.float32), np.array([[-28.5], [-28.25], [-28.0]], np.float32)
    (v, do), omega = normal((3, 2), (2, 2), dtype="float32"), np.array([[1.0], [-1.0]], np.float32)
    explicit = attnkit.performer_attention_vjp(q, k, v, omega, do)

    def attend(*arrays):
        return attnkit.performer_attention(*arrays, projection=jnp.asarray(omega), impl="generic")

    pull = jax.vjp(attend, *map(jnp.asarray, (q, k, v)))[1]
    for name, x in zip("qkv", pull(jnp.asarray(do)), strict=True):
        assert_agrees(x, explicit[name], magnitude=q)  # gradients of features, about 1, times q cancel


# ---------------------------------------------------------------------------------------------- memory, statistics


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_memory_is_linear_in_the_number_of_tokens(name, causal):
    """Not even a boolean (n, n) array is made, masks and gradients included; float32 weights would be 4 times that."""
    n = 16384
    q, k, v = normal((n, 4), (n, 4), (n, 3), dtype="float32")
    options = {"mask": np.arange(n) % 5 > 0, "query_mask": np.arange(n) % 7 > 0, "causal": causal, **own_of(name)}
    with traced_memory() as memory:
        _, state = of(name)(q, k, v, key_lengths=n - 3, return_state=True, **options)
        of(name, "_vjp")(q, k, v, do=v, dstate=state, initial_state=state, **options)
    assert memory.peak < n * n


def test_statistics_are_of_calls_without_a_state():
    q, k, v = (x[:, :2] for x in inputs())
    state = attnkit.linear_attention(q, k, v, return_state=True)[1]
    with pytest.raises(ValueError, match="unexpected argument 'initial_state'"):
        attnkit.attention_with_statistics("linear_attention", q, k, v, initial_state=state)
    with pytest.raises(ValueError, match="entropy needs weights that are not negative"):
        attnkit.row_statistics("linear_attention", q, k, feature_map="identity")
    with pytest.raises(ValueError, match="entropy needs weights that are not negative"):
        attnkit.row_statistics("linear_attention", q, k, scale=-1.0)


# ---------------------------------------------------------------------------------------------- compilers

SHARED_HEADS = """
import attnkit, jax, numpy as np
from attnkit_conformance.model import tolerance
rng = np.random.default_rng(0)
q, k, v, do = (rng.normal(size=(3, 2, *s)).astype("f4") for s in ((4, 33, 12), (2, 257, 12), (2, 257, 20), (4, 33, 20)))
options = {"causal": "upper_left", "enable_gqa": True}
want = attnkit.efficient_attention_vjp(q, k, v, do=do, impl="generic", **options)
call = lambda chunk: jax.jit(lambda *x: jax.vjp(lambda *x: attnkit.efficient_attention(
    *x, chunk_size=chunk, impl="generic", **options), *x)[1](do))
for chunk in (64, 1):
    for name, got in zip("qkv", call(chunk)(q, k, v), strict=True):
        limit = tolerance.limit(want[name].astype(float), "float32", np.max(np.abs(want[name])))
        assert not tolerance.measure(name, np.asarray(got), limit).failures
"""


def test_gradients_of_shared_heads_do_not_end_the_process():
    """They did with jaxlib 0.10.2, on a CPU: XLA's fusions of sums over heads with paddings."""
    done = subprocess.run([sys.executable, "-c", SHARED_HEADS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
