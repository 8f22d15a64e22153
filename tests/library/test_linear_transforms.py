"""The linear family under the transformations of torch and JAX: gradients to and from states, compile, jit, vmap."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnkit

from .arrays import close, normal

N = 6
PROJECTION = attnkit.orthogonal_features(5, 4, seed=1).astype("float32")
FAMILIES = {
    "linear_attention": {},
    "cosine_attention": {},
    "performer_attention": {"projection": PROJECTION},
    "efficient_attention": {},
}
OPS = {
    **FAMILIES,
    "linear_attention-identity": {"feature_map": "identity", "scale": -0.3},
    "performer_attention-relu": {"projection": PROJECTION, "kernel": "relu"},
}
MASKS = {"mask": np.array([True, True, False, True, True, True]), "query_mask": np.arange(N) != 4}


def of(name, suffix=""):
    return getattr(attnkit, name.partition("-")[0] + suffix)


def sample(name):
    """q, k, v with NaN where masks hide them, a state that other keys left, and cotangents of o and of the state."""
    q, k, v, *earlier = normal(*((2, 2, N, 4), (2, 2, N, 4), (2, 2, N, 3)) * 2, dtype="float32")
    state = of(name)(*earlier, return_state=True, **OPS[name])[1]
    hidden = ~MASKS["mask"]
    k[..., hidden, :], v[..., hidden, :], q[..., ~MASKS["query_mask"], :] = np.nan, np.nan, np.nan
    shapes = [(2, 2, N, 3), *(x.shape for x in state)]
    return [q, k, v, *state], normal(*shapes, dtype="float32", seed=2)


def call_of(name, convert, causal):
    """function(q, k, v, *state) -> (o, *state) in a library, and the explicit gradients of NumPy."""
    options = {key: convert(x) if isinstance(x, np.ndarray) else x for key, x in {**OPS[name], **MASKS}.items()}

    def function(q, k, v, *state):
        found = of(name)(q, k, v, initial_state=state, return_state=True, causal=causal, chunk_size=4, **options)
        return found[0], *found[1]

    return function


def explicit(name, arrays, cotangents, causal):
    q, k, v, *state = arrays
    options = {**OPS[name], **MASKS, "causal": causal, "initial_state": tuple(state)}
    found = of(name, "_vjp")(q, k, v, do=cotangents[0], dstate=tuple(cotangents[1:]), **options)
    return [found["q"], found["k"], found["v"], *found["initial_state"]]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_autograd_of_torch_is_the_explicit_gradient(name, causal):
    arrays, cotangents = sample(name)
    leaves = [torch.tensor(x, requires_grad=True) for x in arrays]
    outputs = call_of(name, torch.tensor, causal)(*leaves)
    torch.autograd.backward(outputs, [torch.tensor(x) for x in cotangents])
    for leaf, expected in zip(leaves, explicit(name, arrays, cotangents, causal), strict=True):
        assert np.all(np.isfinite(expected))
        close(leaf.grad, expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_autograd_of_jax_under_jit_is_the_explicit_gradient(name):
    arrays, cotangents = sample(name)
    function = call_of(name, jnp.asarray, True)
    pull = jax.jit(lambda given, ct: jax.vjp(function, *given)[1](ct))
    found = pull(tuple(jnp.asarray(x) for x in arrays), tuple(jnp.asarray(x) for x in cotangents))
    for a, expected in zip(found, explicit(name, arrays, cotangents, True), strict=True):
        close(a, expected)


@pytest.mark.parametrize("name", OPS)
def test_gradients_through_steps_are_those_of_the_whole(name):
    """Backpropagation through time, state by state."""
    (q, k, v, *_), (do, *_) = (normal(*((2, 2, N, 4), (2, 2, N, 4), (2, 2, N, 3)), dtype="float32"), sample(name)[1])
    own = {key: torch.tensor(x) if isinstance(x, np.ndarray) else x for key, x in OPS[name].items()}
    leaves = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    state, outputs = None, []
    for t in range(N):
        o, state = of(name, "_step")(state, *(x[..., t, :] for x in leaves), **own)
        outputs.append(o)
    torch.stack(outputs, -2).backward(torch.tensor(do))
    expected = of(name, "_vjp")(q, k, v, do=do, causal=True, **OPS[name])
    for leaf, x in zip(leaves, "qkv", strict=True):
        close(leaf.grad, expected[x])


@pytest.mark.parametrize("name", ["performer_attention", "efficient_attention"])  # all that has levels, and so the rest
def test_torch_compile_in_one_graph(name):
    arrays, _ = sample(name)
    function = call_of(name, torch.tensor, True)
    given = [torch.tensor(x) for x in arrays]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(*given), function(*given), strict=True):
        close(a, b)


@pytest.mark.parametrize("name", FAMILIES)
def test_vmap_is_a_loop(name):
    q, k, v = (torch.tensor(x) for x in normal((2, N, 4), (2, N, 4), (2, N, 3), dtype="float32"))
    own = {key: torch.tensor(x) if isinstance(x, np.ndarray) else x for key, x in OPS[name].items()}
    mapped = torch.func.vmap(lambda *x: of(name)(*x, causal=True, **own))(q, k, v)
    close(mapped, of(name)(q, k, v, causal=True, **own))


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
