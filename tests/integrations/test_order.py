"""Whichever way a model calls an op, a causal call sees no later token and another sees them, or is refused by name."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

import attnkit
from attnkit.integrations import _ops
from attnkit.integrations import transformers as integration
from attnkit.integrations.flax import attention_fn
from attnkit.integrations.jax import dot_product_attention
from attnkit.integrations.torch import MultiheadAttention, scaled_dot_product_attention
from attnkit.integrations.torch.vit import SwappedAttention
from tests.integrations.test_transformers import bert, llama, padded
from tests.library.arrays import assert_close, normal
from tests.library.test_consumers import HEADS, LOW_RANK, TOKENS, WIDTH, arguments

X = normal((2, TOKENS, HEADS * WIDTH), seed=4)[0]
CHANGED = np.concatenate((X[:, :-1], 3 * X[:, :1]), axis=1)  # in the last token alone
LATER = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
ITSELF = ("stick_breaking_attention", "forgetting_attention")
OPS = [getattr(attnkit, name) for name in _ops._SERVED]

Op = Callable[..., Any]
Layer = Callable[[np.ndarray], np.ndarray]


def options_of(op: Op) -> dict[str, Any]:
    given = arguments(op, ("q", "k", "v"))
    return {name: torch.as_tensor(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}


def as_jax(options: dict[str, Any]) -> dict[str, Any]:
    return {name: jnp.asarray(x) if isinstance(x, Tensor) else x for name, x in options.items()}


def layer_of(attend: Callable[[Tensor], Tensor]) -> Layer:
    """`attend` of heads (B, H, L, d), for tokens."""

    def layer(x: np.ndarray) -> np.ndarray:
        heads = torch.as_tensor(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        return attend(heads).numpy()

    return layer


def sdpa(op: Op, causal: bool) -> Layer:
    options = options_of(op)
    return layer_of(lambda x: scaled_dot_product_attention(x, x, x, is_causal=causal, op=op, **options))


def sdpa_by_bias(op: Op, causal: bool) -> Layer:
    mask, options = causal_lower_right(TOKENS, TOKENS) if causal else None, options_of(op)
    return layer_of(lambda x: scaled_dot_product_attention(x, x, x, mask, op=op, **options))


def multihead(op: Op, causal: bool) -> Layer:
    torch.manual_seed(0)
    made = MultiheadAttention(HEADS * WIDTH, HEADS, op=op, batch_first=True, **options_of(op)).double()
    masks = {"attn_mask": LATER, "is_causal": True} if causal else {}
    return lambda x: made(*[torch.as_tensor(x)] * 3, need_weights=False, **masks)[0].detach().numpy()


def timm(op: Op, causal: bool) -> Layer:
    torch.manual_seed(0)
    size = HEADS * WIDTH
    stock = SimpleNamespace(num_heads=HEADS, qkv=nn.Linear(size, 3 * size), proj=nn.Linear(size, size), training=False)
    made = SwappedAttention(stock, op, options_of(op)).double()
    return lambda x: made(torch.as_tensor(x), is_causal=causal).detach().numpy()


def transformers(op: Op, causal: bool) -> Layer:
    attend = integration.attention_function("own", op, **options_of(op))
    return layer_of(lambda x: attend(SimpleNamespace(is_causal=causal), x, x, x, None)[0].transpose(1, 2))


def transformers_by_mask(op: Op, causal: bool) -> Layer:
    """A causal model gives the mask of pairs, another that of keys."""
    attend = integration.attention_function("own", op, **options_of(op))
    mask = ~LATER[None, None] if causal else torch.ones(2, 1, 1, TOKENS, dtype=torch.bool)
    return layer_of(lambda x: attend(SimpleNamespace(is_causal=causal), x, x, x, mask)[0].transpose(1, 2))


def jax(op: Op, causal: bool) -> Layer:
    options = as_jax(options_of(op))

    def layer(x: np.ndarray) -> np.ndarray:
        heads = x.reshape(2, TOKENS, HEADS, WIDTH)
        return np.asarray(dot_product_attention(heads, heads, heads, is_causal=causal, op=op, **options))

    return layer


def flax(op: Op, causal: bool) -> Layer:
    attend = attention_fn(op, **as_jax(options_of(op)))

    def layer(x: np.ndarray) -> np.ndarray:
        heads = jnp.asarray(x.reshape(2, TOKENS, HEADS, WIDTH))
        return np.asarray(attend(heads, heads, heads, is_causal=causal))

    return layer


WAYS = (sdpa, sdpa_by_bias, multihead, timm, transformers, transformers_by_mask, jax, flax)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_a_call_has_the_order_of_its_model_or_is_refused(op: Op, way: Callable[[Op, bool], Layer], causal: bool):
    refused = LOW_RANK if causal else ITSELF
    if way is transformers_by_mask:  # efficient attention takes no mask of pairs, SimA wants one of queries beside
        refused += ("efficient_attention",) if causal else ("sima_attention",)
    layer = way(op, causal)
    if op.__name__ in refused:
        with pytest.raises((NotImplementedError, ValueError), match=op.__name__):
            layer(X)
        return
    o, other = layer(X), layer(CHANGED)
    tokens = next(axis for axis in (1, 2) if o.shape[axis] == TOKENS)
    before, after = (np.moveaxis(x, tokens, 0)[:-1] for x in (o, other))
    if causal:
        assert_close(after, before)
    else:
        assert np.abs(after - before).max() > np.abs(before).max() / 1000


# ---------------------------------------------------------------------------------- ops that are causal themselves

Q, K, V = normal((2, HEADS, TOKENS - 2, WIDTH), *[(2, HEADS, TOKENS, WIDTH)] * 2, seed=5)


STICKS = attnkit.stick_breaking_attention


def from_the_first_key_in_torch() -> None:
    scaled_dot_product_attention(*map(torch.as_tensor, (Q, K, V)), is_causal=True, op=STICKS)


def from_the_first_key_in_jax() -> None:
    dot_product_attention(*(np.swapaxes(x, 1, 2) for x in (Q, K, V)), is_causal=True, op=STICKS)


def from_the_first_key_in_flax() -> None:
    attention_fn(STICKS)(*(jnp.asarray(np.swapaxes(x, 1, 2)) for x in (Q, K, V)), is_causal=True)


def with_a_key_added_behind_all() -> None:
    x = torch.as_tensor(X)
    made = MultiheadAttention(HEADS * WIDTH, HEADS, add_zero_attn=True, op=STICKS, batch_first=True).double()
    made(x, x, x, attn_mask=LATER, is_causal=True)


@pytest.mark.parametrize(
    "call",
    [
        from_the_first_key_in_torch,
        from_the_first_key_in_jax,
        from_the_first_key_in_flax,
        with_a_key_added_behind_all,
    ],
)
def test_queries_that_are_not_the_last_keys_are_refused(call: Callable[[], None]):
    with pytest.raises(NotImplementedError, match=r"stick_breaking_attention is at the last key; .* and \d+ keys"):
        call()


def test_steps_of_a_cache_are_those_of_the_whole_and_keys_to_come_are_refused():
    attend = integration.attention_function("own", STICKS)
    q, k, v = map(torch.as_tensor, (K, K, V))
    model = SimpleNamespace(is_causal=True)
    whole = attend(model, q, k, v, None)[0]
    there = torch.ones(2, 1, 1, TOKENS, dtype=torch.bool)
    for mask in (None, there):
        assert_close(attend(model, q[:, :, -1:], k, v, mask)[0], whole[:, -1:])
    there[..., -1] = False
    for mask in (there, torch.zeros(there.shape).masked_fill(~there, torch.finfo(torch.float32).min)):
        with pytest.raises(NotImplementedError, match=r"own: stick_breaking_attention needs a cache of the keys that"):
            attend(model, q[:, :, -1:], k, v, mask)


def test_a_decoder_is_served_with_and_without_a_mask_and_an_encoder_refused():
    integration.register_variant("own", "stick_breaking")
    given = padded(left=False)
    with torch.no_grad():
        masked = llama("own")(**given).logits[0]
        plain = llama("own")(input_ids=given["input_ids"][:1]).logits[0]
    assert_close(masked, plain)
    with pytest.raises(NotImplementedError, match="own: stick_breaking_attention hides later keys from every query"):
        bert("own")(input_ids=given["input_ids"])
