"""What JAX has beside arrays of its own: keys as seeds of dropout, NumPy's masks and lengths as constants."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnkit

from .arrays import assert_close, qkv

IMPLS = ("generic", "native", "blocked")
KEY = jax.random.key(7)
MASK = np.random.default_rng(1).random((5, 7)) < 0.7
Q, K, V = (jnp.asarray(x) for x in qkv(dtype="float32"))


def dropping(impl: str) -> Callable[[Any, Any], Any]:
    return lambda q, seed: attnkit.softmax_attention(q, K, V, dropout=(0.4, seed), impl=impl)


def test_a_key_drops_the_pairs_of_its_seed_everywhere() -> None:
    expected = attnkit.softmax_attention(*map(np.asarray, (Q, K, V)), dropout=(0.4, 7))
    for impl in IMPLS:
        attend = dropping(impl)
        assert_close(attend(Q, KEY), expected)
        assert (jax.jit(attend)(Q, KEY) == jax.jit(lambda q, attend=attend: attend(q, 7))(Q)).all(), impl


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_of_any_order_drop_the_same_pairs(impl: str) -> None:
    def loss(q: Any, seed: Any) -> Any:
        return (dropping(impl)(q, seed) ** 2).sum()

    def second(q: Any, seed: Any) -> Any:
        return jax.grad(lambda q: (jax.grad(loss)(q, seed) ** 2).sum())(q)

    for gradient in (jax.grad(loss), second):
        of_key, of_number = (jax.jit(lambda q, s=s, of=gradient: of(q, s))(Q) for s in (KEY, 7))
        assert (of_key == of_number).all()
    grads = [attnkit.softmax_attention_vjp(Q, K, V, V[:, :, :5], dropout=(0.4, s), impl=impl) for s in (KEY, 7)]
    assert all((grads[0][name] == grads[1][name]).all() for name in "qkv")


@pytest.mark.parametrize("impl", IMPLS)
def test_vmap_over_keys(impl: str) -> None:
    keys = jax.random.split(KEY, 3)
    together = jax.vmap(dropping(impl), (None, 0))(Q, keys)
    assert_close(together, jnp.stack([dropping(impl)(Q, key) for key in keys]))
    assert not np.allclose(together[0], together[1])


@pytest.mark.parametrize(
    "seed", [jax.random.key(1, impl="rbg"), jax.random.split(KEY, 2), jax.random.PRNGKey(1)], ids=["rbg", "two", "raw"]
)
def test_other_keys_are_refused(seed: Any) -> None:
    with pytest.raises(
        TypeError, match=r"dropout seed array must be an integer of shape \(\), or a key of jax.random.key"
    ):
        dropping("auto")(Q, seed)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["mask", "query_mask", "key_lengths"])
def test_numpys_masks_and_lengths(name: str, impl: str) -> None:
    given = {"mask": MASK, "query_mask": MASK[:, 0], "key_lengths": np.array([[3], [5]])}[name]
    for op in (attnkit.pointwise_attention, attnkit.gaussian_attention):
        own = op(Q, K, V, **{name: jnp.asarray(given)}, impl=impl)
        assert (op(Q, K, V, **{name: given}, impl=impl) == own).all()
        traced = jax.jit(lambda q, op=op: op(q, K, V, **{name: given}, impl=impl))(Q)
        assert_close(traced, own)


def test_statistics_take_them_too_and_other_arrays_are_refused() -> None:
    ours = attnkit.row_statistics("softmax_attention", Q, K, mask=MASK).entropy
    assert (ours == attnkit.row_statistics("softmax_attention", Q, K, mask=jnp.asarray(MASK)).entropy).all()
    for name, given in (("bias", np.zeros((5, 7), np.float32)), ("mask", np.zeros((5, 7)))):
        with pytest.raises(TypeError, match=f"one library; got numpy {name} with jax q"):
            attnkit.softmax_attention(Q, K, V, **{name: given})
