"""dot_product_attention beside jax.nn's, argument by argument, and beside the reference with other ops."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnkit_reference as reference
from attnkit.integrations.jax import dot_product_attention
from attnkit_conformance.model import tolerance
from tests.integrations.counting import count
from tests.library.arrays import assert_agrees

B, T, S, HEADS, D = 2, 5, 7, 4, 8
RNG = np.random.default_rng(0)
MASK = jnp.asarray(RNG.random((B, 1, T, S)) < 0.6).at[..., 0].set(True)
BIAS = jnp.asarray(RNG.standard_normal((1, HEADS, T, S)), jnp.float32)
DIAGONAL = MASK | jnp.eye(T, S, dtype=bool)
LENGTHS = {"query_seq_lengths": jnp.asarray([5, 3]), "key_value_seq_lengths": jnp.asarray([4, 7])}


def arrays(keys: int = S, heads: int = HEADS) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(1)
    shapes = ((B, T, HEADS, D), (B, keys, heads, D), (B, keys, heads, D))
    return tuple(jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes)


def turned(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64).swapaxes(-3, -2)


WINDOW_ALONE = pytest.mark.skipif(
    jax.__version_info__ < (0, 8, 2), reason="jax.nn ignores a window without another mask before 0.8.2"
)


def test_the_arguments_are_jaxs():
    ours, theirs = (inspect.signature(f).parameters for f in (dot_product_attention, jax.nn.dot_product_attention))
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all((ours[name].kind, ours[name].default) == (p.kind, p.default) for name, p in theirs.items())


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        pytest.param({"mask": MASK, "bias": BIAS, "scale": 0.3}, {}, id="mask, bias, scale"),
        pytest.param({"is_causal": True}, {"heads": 2}, id="causal, grouped"),
        pytest.param({"is_causal": True}, {"heads": 1}, id="one head"),
        pytest.param({"local_window_size": (2, 1)}, {}, marks=WINDOW_ALONE, id="window"),
        pytest.param({"local_window_size": 1, "is_causal": True, "mask": DIAGONAL}, {}, id="window, causal"),
        pytest.param({"local_window_size": (2, 0)}, {"keys": T}, marks=WINDOW_ALONE, id="window of itself"),
        pytest.param(LENGTHS, {}, id="lengths"),
        pytest.param(LENGTHS | {"mask": MASK, "is_causal": True}, {}, id="all"),
    ],
)
def test_softmax_is_jaxs(given, shape):
    """Outputs and gradients, under jit."""

    def run(function):
        def loss(*qkv):
            out = function(*qkv, **given)
            return jnp.sin(out).sum(), out

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*arrays(**shape))

    (_, ours), ours_grads = run(dot_product_attention)
    (_, theirs), theirs_grads = run(jax.nn.dot_product_attention)
    q, k, _ = arrays(**shape)
    size = float(jnp.max(jnp.linalg.norm(q, axis=-1)) * jnp.max(jnp.linalg.norm(k, axis=-1))) / D**0.5
    growth = tolerance.growth_of_exponent(size + float(jnp.max(jnp.abs(given.get("bias", jnp.zeros(1))))))
    assert_agrees(ours, theirs, growth)
    for x, y in zip(ours_grads, theirs_grads, strict=True):
        assert_agrees(x, y, 4 * growth, np.abs(np.asarray(y)).max() + 1.0)


@pytest.mark.parametrize("op", ["relu", "linear"])
def test_other_ops_are_the_references(op, monkeypatch):
    name = {"relu": "pointwise_attention", "linear": "linear_attention"}[op]
    calls = count(monkeypatch, name)
    options = {"query_mask": np.arange(T) < np.array([5, 3])[:, None, None], "key_lengths": np.array([[4], [7]])}
    golden = getattr(reference, name)(*map(turned, arrays()), mask=np.asarray(MASK), causal="upper_left", **options)
    found = dot_product_attention(*arrays(), mask=MASK, is_causal=True, **LENGTHS, op=op)
    assert calls == [name]
    assert_agrees(found, golden.swapaxes(-3, -2))


def test_layouts_single_items_and_numpy_arrays():
    golden = dot_product_attention(*arrays(), mask=MASK, op="relu", alpha=0.5)
    heads_first = (np.asarray(x).swapaxes(1, 2) for x in arrays())
    found = dot_product_attention(*heads_first, mask=np.asarray(MASK), op="relu", alpha=0.5, layout="bhld")
    assert_agrees(found, golden.swapaxes(1, 2))
    found = dot_product_attention(*(x[0] for x in arrays()), mask=MASK[0], op="relu", alpha=0.5)
    assert_agrees(found, golden[0])


def test_a_query_that_sees_nothing_gives_0():
    nothing = jnp.zeros((1, 1, T, S), bool)
    assert not np.asarray(dot_product_attention(*arrays(), mask=nothing)).any()
    assert np.asarray(jax.nn.dot_product_attention(*arrays(), mask=nothing)).any()


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (
            {"implementation": "cudnn"},
            NotImplementedError,
            "implementation must be None, attnkit has impl; got 'cudnn'",
        ),
        (
            {"return_residual": True},
            NotImplementedError,
            "return_residual must be False; softmax_attention has return_lse",
        ),
        ({"layout": "bnth"}, ValueError, "layout must be 'blhd' or 'bhld'; got 'bnth'"),
        ({"op": "linear", "bias": BIAS}, NotImplementedError, "linear_attention takes no bias"),
        ({"op": "sima", "is_causal": True}, NotImplementedError, "sima_attention has no option causal"),
        ({"op": "cosine", "scale": 1.0}, NotImplementedError, "cosine_attention has no scores .* got 1.0"),
        ({"query_seq_lengths": jnp.ones(3, int)}, ValueError, r"query_seq_lengths has shape \(3,\); expected \(2,\)"),
        ({"op": "rely"}, ValueError, "op must be one of .*; got 'rely'"),
        ({"op": "relu", "causal": True}, ValueError, "pointwise_attention takes the options .*; got 'causal'"),
    ],
)
def test_what_is_not_served_is_an_error(given, error, text):
    with pytest.raises(error, match=f"dot_product_attention: {text}"):
        dot_product_attention(*arrays(), **given)
    with pytest.raises(ValueError, match=r"query must have three or four axes; got shape \(5, 8\)"):
        dot_product_attention(*(x[0, :, 0] for x in arrays()))
