"""Scale, gain, alpha, shift and gamma as arrays (semantics A15). Values and gradients are judged by the kit."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnkit
from attnkit._core.family import RECORDS
from attnkit._core.typing import LEARNED
from attnkit.ops.recurrent.record import RECURRENT

from .arrays import assert_agrees, assert_close, qkv

Q, K, V = qkv()
PLAIN = {  # ops that take these options as plain numbers
    **dict.fromkeys(("linear_attention", "linear_attention_step", "nystrom_attention", "linformer_attention"), "scale"),
    **{end: "scale" for name in RECURRENT for end in (name, f"{name}_step")},
    "gated_attention_unit": "alpha",
}


def test_every_op_with_such_an_option_has_its_gradient_or_refuses_the_array():
    """Beside packed forms, which test_errors has."""
    operands = {
        "log_forget": -np.ones(K.shape[-2]),
        "norm_weight": np.ones(18),
        "proj_k": np.ones((2, 7)),
        "proj_v": np.ones((2, 7)),
        "num_landmarks": 2,
    }
    for name in attnkit.__all__:
        op = getattr(attnkit, name)
        options = [] if inspect.isclass(op) or not callable(op) else {*LEARNED} & {*inspect.signature(op).parameters}
        if name.endswith(("_weights", "_vjp", "_packed")) or not options or name in PLAIN:
            continue
        assert name in RECORDS, name
        for option in options:
            if option == "alpha" and name == "entmax_attention":
                continue  # an array of its own, (..., L, 1)
            more = {x: y for x, y in operands.items() if x in inspect.signature(op).parameters}
            do = np.ones_like(op(Q, K, V, **more))
            number = np.full((3,), 0.5)
            assert getattr(attnkit, f"{name}_vjp")(Q, K, V, do=do, **more, **{option: number})[option].shape == (3,)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_traced_number_is_one(shape):
    q, k, v = (jnp.asarray(x, jnp.float32) for x in (Q, K, V))
    numbers = {"scale": 0.3, "gain": 1.5, "shift": 0.1, "alpha": 0.5}

    def loss(numbers: dict[str, Any]) -> Any:
        return (attnkit.pointwise_attention(q, k, v, activation="gelu", causal=True, **numbers) ** 2).sum() / 2

    value, grads = jax.jit(jax.value_and_grad(loss))({name: jnp.full(shape, x) for name, x in numbers.items()})
    assert_close(value, loss(numbers))
    exact = {"activation": "gelu", "causal": True, **{name: np.full(shape, x) for name, x in numbers.items()}}
    o = attnkit.pointwise_attention(Q, K, V, **exact)
    expected = attnkit.pointwise_attention_vjp(Q, K, V, o, **exact)
    for name, grad in grads.items():
        assert_agrees(grad, expected[name])


def test_what_padding_holds_does_not_reach_the_gradient_of_a_number():
    q, mask = torch.tensor(Q), torch.arange(5) < 3
    q[..., 3:, :] = torch.tensor([float("nan"), float("inf")] * 4)
    scale = torch.full((3,), 0.4, dtype=torch.float64, requires_grad=True)
    k, v = torch.tensor(K), torch.tensor(V)
    for impl in ("auto", "generic", "blocked"):
        o = attnkit.softmax_attention(q, k, v, scale=scale, query_mask=mask, impl=impl)
        (grad,) = torch.autograd.grad(o.sum(), scale)
        assert grad.isfinite().all(), impl
        assert grad.all(), impl


def test_numpys_scalars_are_plain_numbers():
    grads = attnkit.softmax_attention_vjp(Q, K, V, V[:, :, :5], scale=np.float32(0.5))
    assert {*grads} == {"q", "k", "v"}
    assert attnkit.softmax_attention_vjp(Q, K, V, V[:, :, :5], scale=np.array(0.5))["scale"].shape == ()


def test_a_gradient_has_the_dtype_of_its_number():
    half = [torch.tensor(x).bfloat16() for x in (Q, K, V)]
    scale = torch.full((3,), 0.4, requires_grad=True)
    attnkit.softmax_attention(*half, scale=scale).sum().backward()
    assert scale.grad.dtype == torch.float32
    assert attnkit.softmax_attention_vjp(*half, half[2][:, :, :5], scale=scale)["scale"].dtype == torch.float32


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_kernel_serves_a_learned_scale_of_products(shape):
    q, k, v = (torch.tensor(x) for x in (Q, K, V))
    scale = torch.rand(shape, dtype=torch.float64, requires_grad=True)
    told = attnkit.explain(attnkit.softmax_attention, q, k, v, scale=scale)
    assert told["native"] is None
    results = [attnkit.softmax_attention(q, k, v, scale=scale, impl=x, return_lse=True) for x in ("native", "generic")]
    grads = [torch.autograd.grad((o * lse[..., None]).sum(), scale)[0] for o, lse in results]
    assert_close(*grads)
    half = [x.bfloat16() for x in (q, k, v)]
    reason = attnkit.explain(attnkit.softmax_attention, *half, scale=scale)["native"]
    assert reason == "scale as an array in half types is served by the generic implementation"
    reason = attnkit.explain(attnkit.gaussian_attention, q, k, v, scale=scale)["native"]
    assert reason == "scale as an array is served by the generic implementation"


def test_a_repeated_call_reads_the_scale_again():
    """What is remembered of a call is its signature."""
    for x in (0.2, 0.7):
        scale = np.full((3,), x)
        assert_close(attnkit.softmax_attention(Q, K, V, scale=scale), attnkit.softmax_attention(Q, K, V, scale=x))


def test_explain_names_the_number_that_a_kernel_lacks():
    told = attnkit.explain(attnkit.pointwise_attention, Q, K, V, alpha=np.array(0.5))
    assert told["generic"] is None
    assert told["blocked"] == "alpha as an array is served by the generic implementation"
    with pytest.raises(NotImplementedError, match="gain as an array is served by the generic implementation"):
        attnkit.pointwise_attention(Q, K, V, gain=np.array(0.5), impl="native")


def test_the_entropy_of_a_learned_gain_is_refused():
    with pytest.raises(ValueError, match="entropy needs weights that are not negative"):
        attnkit.row_statistics("pointwise_attention", Q, K, gain=np.array(0.5))
    assert attnkit.row_statistics("reluformer_attention", Q, K, gamma=np.array(0.5)).entropy.shape == (2, 3, 5)
