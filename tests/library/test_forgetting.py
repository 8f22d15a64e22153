"""Forgetting attention: digits of its running sum, hidden gates, arguments, the module."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnkit
import attnkit_reference
from attnkit._core import blocks
from attnkit._core.family import RECORDS
from attnkit._core.library import namespace
from attnkit.nn import MultiHeadAttention
from attnkit.ops.forgetting import running_sum

from .arrays import assert_close, normal

Q, K, V = normal((2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 6))
GATES = -np.abs(normal((4, 7), seed=3)[0])
GROUPED = {"enable_gqa": True}
LACKING = attnkit.native_status().reason
NATIVE = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))
IMPLS = (pytest.param("native", marks=NATIVE), "generic", "blocked")
LIBRARIES = {"numpy": np.asarray, "torch": torch.from_numpy, "jax": jnp.asarray}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_small_gates_behind_large_ones(library: str, dtype: str) -> None:
    """Sums of -30 leave gates of -10⁻³ their digits: differences are exact to twice those of the sums."""
    gates = np.where(np.arange(4096) % 1024 < 900, -29.7, -1e-3).astype(dtype)
    with jax.enable_x64(True):
        x = LIBRARIES[library](gates)
        high, low = (np.asarray(part, np.float64) for part in running_sum(namespace(x), x))
    assert str(x.dtype).rpartition(".")[2] == dtype
    exact = math.fsum(gates[3997:])
    between = (high[4095] - high[3996]) + (low[4095] - low[3996])
    assert abs(between - exact) < 4 * np.finfo(dtype).eps * 0.1
    plain = np.cumsum(gates)  # what one number keeps
    assert abs(float(plain[4095] - plain[3996]) - between) > 100 * np.finfo(dtype).eps


@pytest.mark.parametrize("impl", IMPLS)
def test_a_block_of_one_query_has_no_key_mask(impl: str) -> None:
    """Blocks of a single query see one row of a mask of pairs, which leaves the gates."""
    mask = normal((5, 7), seed=4)[0] > 0
    expected = attnkit_reference.forgetting_attention(Q, K, V, GATES, mask=mask, **GROUPED)
    for kind in (np.asarray, torch.from_numpy):
        arrays = [kind(x) for x in (Q, K, V, GATES)]
        call = blocks.call(RECORDS["forgetting_attention"].family, *arrays[:3],
                           {"log_forget": arrays[3], "mask": kind(mask), **GROUPED}, 1)  # fmt: skip
        o = blocks.forward(namespace(arrays[0]), call)
        assert_close(np.asarray(o), expected)
        assert_close(attnkit.forgetting_attention(*arrays, mask=kind(mask), **GROUPED, impl=impl), expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_gates_of_hidden_tokens_may_be_nan(impl: str) -> None:
    hidden = {"key_lengths": np.array([[6], [3]]), **GROUPED}
    gates = np.broadcast_to(GATES, (2, 4, 7)).copy()
    do = np.ones((2, 4, 5, 6))
    right = attnkit.forgetting_attention_vjp(Q, K, V, gates, do, **hidden)
    gates[0, :, 6:], gates[1, :, 3:] = np.nan, np.nan
    found = attnkit.forgetting_attention_vjp(Q, K, V, gates, do, **hidden, impl=impl)
    assert all(np.isfinite(x).all() for x in found.values())
    assert_close(found["log_forget"], right["log_forget"])
    assert not found["log_forget"][1, :, 3:].any()


@NATIVE
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_library_keeps_small_gates_behind_large_ones(dtype: str) -> None:
    """Its c_i - c_j are exact to the digits of a small difference: with equal scores lse is that of the gates."""
    gates = np.where(np.arange(4096) % 1024 < 900, -29.7, -1e-3).astype(dtype)
    q, k = np.zeros((1, 1, 1, 4), dtype), np.zeros((1, 1, 4096, 4), dtype)
    lse = attnkit.forgetting_attention(q, k, k, gates, return_lse=True, impl="native")[1].item()
    fade = np.cumsum(gates[:2948:-1].astype(np.float64))[::-1]
    exact = math.log(math.fsum(np.exp(np.append(fade, 0.0))))
    assert abs(lse - exact) < 4 * np.finfo(dtype).eps * exact


@pytest.mark.parametrize("impl", IMPLS)
def test_a_mask_of_pairs_with_equal_rows_leaves_the_gates(impl: str) -> None:
    """Rows that are one in memory are as many rows, where a mask of one row hides tokens."""
    row = normal((7,), seed=4)[0] > -0.5
    assert not row.all()
    results = {}
    for name, mask in {"tokens": row[None], "pairs": np.broadcast_to(row, (5, 7))}.items():
        expected = attnkit_reference.forgetting_attention(Q, K, V, GATES, mask=mask, **GROUPED)
        results[name] = attnkit.forgetting_attention(Q, K, V, GATES, mask=mask, **GROUPED, impl=impl)
        assert_close(results[name], expected)
    assert np.abs(results["tokens"] - results["pairs"]).max() > 1e-3


@pytest.mark.parametrize("impl", IMPLS[:2])
def test_automatic_gradients_add_up_what_belongs_to_a_gate(impl: str) -> None:
    """Far from a gate of -30 lie pairs with large gradients, of whose rounding that of the gate has none."""
    gates = np.where(np.arange(200) == 150, -30.0, -1e-3).astype(np.float32)
    q, k, v = (x.astype(np.float32) for x in normal((1, 200, 4), (1, 200, 4), (1, 200, 4), seed=5))
    right = attnkit_reference.forgetting_attention_vjp(q, k, v, gates, v)["log_forget"]
    g = torch.tensor(gates, requires_grad=True)
    o = attnkit.forgetting_attention(*map(torch.from_numpy, (q, k, v)), g, impl=impl)
    (found,) = torch.autograd.grad(o, g, torch.from_numpy(v))
    assert abs(right[150]) < 1e-9 < 1e-3 < abs(right[100])
    assert abs(found[150].item() - right[150]) < 1e-3 * abs(right[150])


def test_by_position_and_by_name() -> None:
    by_name = attnkit.forgetting_attention(q=Q, k=K, v=V, log_forget=GATES, **GROUPED)
    assert_close(by_name, attnkit.forgetting_attention(Q, K, V, GATES, **GROUPED))
    weights = attnkit.forgetting_attention_weights(Q, K, GATES, **GROUPED)
    assert_close(weights, attnkit.forgetting_attention_weights(Q, K, log_forget=GATES, **GROUPED))
    told = attnkit.explain("forgetting_attention", Q, K, V, GATES, **GROUPED)
    assert told == {"native": LACKING, "generic": None, "blocked": None}


def test_statistics_need_the_gates() -> None:
    with pytest.raises(TypeError, match=r"^row_statistics\(forgetting_attention\): missing argument 'log_forget'"):
        attnkit.row_statistics("forgetting_attention", Q, K, **GROUPED)


def test_the_module_decodes_with_its_cache() -> None:
    torch.manual_seed(0)
    module = MultiHeadAttention(12, 4, op="forgetting", num_kv_heads=2, causal=True).double()
    x = torch.randn(3, 6, 12, dtype=torch.float64)
    there = torch.ones(3, 6, dtype=torch.bool)
    there[0, :2] = False
    whole, cache = module(x, key_mask=there), module.new_cache(3, 8)
    order = torch.tensor([2, 0, 1])
    assert_close(module(x[:, :4], key_mask=there[:, :4], cache=cache), whole[:, :4])
    cache.reorder(order)
    for t in (4, 5):
        step = module(x[order, t : t + 1], key_mask=there[order, t : t + 1], cache=cache)
        assert_close(step, whole[order, t : t + 1])
    whole.sum().backward()
    assert module.gates["log_forget"].proj.weight.grad.abs().max() > 0
