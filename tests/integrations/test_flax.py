"""attention_fn in flax.nnx.MultiHeadAttention: beside flax's own softmax, and beside the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attnkit
import attnkit_reference as reference
from attnkit.integrations.flax import attention_fn
from attnkit_conformance.model import tolerance
from tests.library.arrays import LAYER, assert_agrees

B, L, HEADS, D = 2, 5, 4, 8


def softmax_growth(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | float = 0.0) -> float:
    """Of an op that exponentiates these scores."""
    heads = q.shape[-2] // k.shape[-2]
    s = jnp.einsum("bind,bjnd->bnij", q, jnp.repeat(k, heads, -2)) / D**0.5
    return tolerance.growth_of_exponent(float(jnp.max(jnp.abs(s)) + jnp.max(jnp.abs(jnp.asarray(bias)))))


def arrays(heads: int = HEADS, keys: int = L) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    shapes = ((B, L, HEADS, D), (B, keys, heads, D), (B, keys, heads, D))
    return tuple(jnp.asarray(2 * rng.standard_normal(s), jnp.float32) for s in shapes)


def turned(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64).swapaxes(-3, -2)


RNG = np.random.default_rng(1)
MASK = jnp.asarray(RNG.random((B, 1, L, L)) < 0.6).at[..., 0].set(True)
BIAS = jnp.asarray(RNG.standard_normal((1, HEADS, L, L)), jnp.float32)
TOKENS = jnp.asarray(RNG.standard_normal((B, L, 16)), jnp.float32)


@pytest.mark.parametrize(
    "given",
    [{"mask": MASK, "bias": BIAS}, {"mask": nnx.make_causal_mask(jnp.ones((B, L)))}],
    ids=["mask and bias", "mask of numbers"],
)
def test_softmax_is_flaxs(given):
    ours, theirs = (
        jax.jit(lambda q, k, v, fn=fn: fn(q, k, v, **given))(*arrays())
        for fn in (attention_fn(attnkit.softmax_attention), nnx.dot_product_attention)
    )
    assert_agrees(ours, theirs, softmax_growth(*arrays(), given.get("bias", 0.0)))


def test_causality_counts_from_the_upper_left_and_heads_are_grouped():
    ours, theirs = (
        jax.jit(lambda q, k, v, fn=fn: fn(q, k, v, is_causal=True))(*arrays(heads=2, keys=L + 2))
        for fn in (attention_fn(attnkit.softmax_attention), nnx.dot_product_attention)
    )
    assert_agrees(ours, theirs, softmax_growth(*arrays(heads=2, keys=L + 2)))


def test_relu_and_its_gradients_are_the_references():
    do = jnp.asarray(RNG.standard_normal((B, L, HEADS, D)), jnp.float32)
    relu = attention_fn(attnkit.pointwise_attention, alpha=0.5)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        o = relu(q, k, v, mask=MASK, bias=BIAS, is_causal=True)
        return (o * do).sum(), o

    (_, o), found = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*arrays())
    options = {"alpha": 0.5, "mask": np.asarray(MASK), "bias": np.asarray(BIAS), "causal": "upper_left"}
    q, k, v = map(turned, arrays())
    assert_agrees(o, reference.pointwise_attention(q, k, v, **options).swapaxes(-3, -2))
    golden = reference.pointwise_attention_vjp(q, k, v, turned(do), **options)
    for name, gradient in zip("qkv", found, strict=True):
        assert_agrees(gradient, golden[name].swapaxes(-3, -2))


def test_dropout_drops_what_flax_drops():
    both = (attention_fn(attnkit.softmax_attention), nnx.dot_product_attention)
    given = {"dropout_rate": 0.5, "broadcast_dropout": False, "dropout_rng": jax.random.key(7)}
    ours, theirs = jax.jit(lambda q, k, v: [fn(q, k, v, **given) for fn in both])(*arrays())
    assert_agrees(ours, theirs, softmax_growth(*arrays()))
    still = reference.softmax_attention(*map(turned, arrays())).swapaxes(-3, -2)
    assert float(np.abs(np.asarray(ours) - still).max()) > 0.1


@pytest.fixture(scope="module")
def layer() -> nnx.MultiHeadAttention:
    attention = attention_fn(attnkit.pointwise_attention)
    return nnx.MultiHeadAttention(HEADS, 16, attention_fn=attention, decode=False, rngs=nnx.Rngs(0))


def test_decoding_with_flaxs_cache_is_the_causal_layer(layer):
    """Slots that are not filled are masked, and count in no length."""
    whole = nnx.jit(lambda layer, x: layer(x, is_causal=True))(layer, TOKENS)
    layer.init_cache(TOKENS.shape)
    step = nnx.jit(lambda layer, x: layer(x, decode=True))
    assert_agrees(jnp.concatenate([step(layer, TOKENS[:, n : n + 1]) for n in range(L)], 1), whole, LAYER)


def test_weights_are_sown(layer):
    _, seen = nnx.capture(layer, nnx.Intermediate)(TOKENS, sow_weights=True, is_causal=True)
    (sown,) = jax.tree.leaves(seen)
    assert sown.shape == (B, HEADS, L, L)
    q, k = (turned(part(TOKENS)) for part in (layer.query, layer.key))
    assert_agrees(sown, reference.pointwise_attention_weights(q, k, causal=True))


def test_what_is_not_served_is_an_error():
    q, k, v = arrays()
    linear = attention_fn(attnkit.linear_attention)
    with pytest.raises(NotImplementedError, match="attention_fn: linear_attention takes no bias"):
        linear(q, k, v, bias=jnp.zeros((1, 1, L, L)))
    with pytest.raises(NotImplementedError, match="attention_fn: linear_attention takes no dropout"):
        linear(q, k, v, dropout_rate=0.5, dropout_rng=jax.random.key(0))
    with pytest.raises(NotImplementedError, match="attention_fn: linear_attention takes no precision; got 'highest'"):
        linear(q, k, v, precision="highest")
    with pytest.raises(NotImplementedError, match="attention_fn: sima_attention has no option causal"):
        attention_fn(attnkit.sima_attention)(q, k, v, is_causal=True)
    with pytest.raises(ValueError, match=r"dropout_rate=0.5 needs dropout_rng; got None"):
        attention_fn(attnkit.softmax_attention)(q, k, v, dropout_rate=0.5)
    with pytest.raises(ValueError, match=r"attention_fn: op must be one of .*; got 'rela_attention'"):
        attention_fn(attnkit.rela_attention)
    with pytest.raises(ValueError, match=r"attention_fn: entmax_attention takes the options .*; got 'causal'"):
        attention_fn(attnkit.entmax_attention, causal=True)
