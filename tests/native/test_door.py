"""The door between Python and the library: what it proves of arrays, that every output is written, and Ctrl-C."""

import contextlib
import os
import signal
import threading
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnkit
from attnkit.backends.jax import custom_call
from attnkit.backends.native import abi, lower
from attnkit.backends.numpy.native import address
from attnkit.backends.torch.softmax import LEAST_KEYS
from attnkit.ops.forgetting import FORGETTING
from attnkit.ops.softmax import SOFTMAX
from attnkit.ops.vjps import VJPS

pytestmark = pytest.mark.usefixtures("library")
QUADRATIC = (*VJPS, "sparsemax_attention", "sigmoid_attention", "reluformer_attention")
WHOLE = (2, 3, 70, 8)
EXPANDED = [(2, 1, 70, 8), (1, 3, 70, 8), (1, 1, 70, 8), (2, 3, 1, 8), (2, 3, 70, 1), (3, 70, 8)]
SHAPE = (2, 3, 5, 8)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


# ---------------------------------------------------------------------------------------------- outputs


@pytest.mark.parametrize("names", ["k", "v", "kv", "qkv", "do"])
@pytest.mark.parametrize("op", QUADRATIC)
def test_gradients_of_expanded_arrays_are_whole(op, names):
    """k.expand(...) of one head is the usual way to write multi-query attention."""
    for shape in EXPANDED:
        bases = {name: normal(*WHOLE) for name in ("q", "k", "v", "do")}
        bases |= {name: normal(*shape) for name in ([names] if names == "do" else names)}
        arrays = [np.broadcast_to(x, WHOLE) for x in bases.values()]
        gates = -np.abs(normal(*WHOLE[:-1]))
        *qkv, do = arrays
        vjp, options = getattr(attnkit, f"{op}_vjp"), {"log_forget": gates} if op == FORGETTING.name else {}
        expected, found = (vjp(*qkv, do=do, **options, impl=impl) for impl in ("generic", "native"))
        *leaves, do = (torch.from_numpy(x).expand(WHOLE) for x in bases.values())
        leaves = [x.requires_grad_() for x in leaves]
        options = {name: torch.from_numpy(x) for name, x in options.items()}
        of_torch = torch.autograd.grad(getattr(attnkit, op)(*leaves, **options, impl="native"), leaves, do)
        # of equal keys some are 0, and where softpick divides by near 0 dq is what is left of terms as large as dk
        bound = 1e-12 * max(1.0, *(np.abs(expected[name]).max() for name in "qkv"))
        for name, of_tensor in zip("qkv", of_torch, strict=True):
            assert np.abs(found[name] - expected[name]).max() <= bound, shape
            assert np.abs(of_tensor.numpy() - expected[name]).max() <= bound, shape


@pytest.fixture
def unwritten(monkeypatch):
    """Plans by which the library writes dk of one head alone."""
    real = lower._view

    def view(operand, *others):
        made = real(operand, *others)
        return (*made[:2], *[0] * abi.AXES, *made[-2:]) if operand.name == "dk" else made

    caches = (lower.prepare, custom_call.program)
    monkeypatch.setattr(lower, "_view", view)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_what_a_binding_does_not_write_is_seen(unwritten):
    """Tests and the kit fill outputs with NaN first."""
    q, k, v, do = (normal(*SHAPE) for _ in range(4))
    of_numpy = attnkit.softmax_attention_vjp(q, k, v, do, impl="native")["k"]
    leaf = torch.from_numpy(k).requires_grad_()
    attnkit.softmax_attention(torch.from_numpy(q), leaf, torch.from_numpy(v), impl="native").sum().backward()
    of_jax = jax.grad(lambda k: attnkit.softmax_attention(*map(jnp.asarray, (q, k, v)), impl="native").sum())(
        jnp.asarray(k)
    )
    for grad in (of_numpy, leaf.grad.numpy(), np.asarray(of_jax)):
        assert np.isfinite(grad[0, 0]).all()
        assert np.isnan(grad.reshape(6, -1)[1:]).all()


def test_an_output_without_elements_takes_no_time():
    """However many items it has."""
    none, k = np.zeros((1 << 29, 0, 4), np.float32), np.zeros((1, 3, 4), np.float32)
    call = lambda: attnkit.softmax_attention(none, k, k, impl="native")  # noqa: E731
    assert call().shape == none.shape
    began = time.perf_counter()
    call()
    assert time.perf_counter() - began < 0.1  # a loop over the items takes a minute


def test_tensors_that_are_expanded_to_nothing():
    x = torch.ones(1, 3, 5, 8).expand(0, 3, 5, 8).requires_grad_()
    o = attnkit.softmax_attention(x, x, x, impl="native")
    (grad,) = torch.autograd.grad(o.sum(), x)
    assert o.shape == grad.shape == x.shape


# ---------------------------------------------------------------------------------------------- pointers


def plan_of(shape: tuple[int, ...] = SHAPE) -> lower.PlacedPlan:
    operands = tuple((name, shape, lower.contiguous(shape), "float64") for name in "qkv")
    return lower.prepare(SOFTMAX.name, False, operands, (), ("o",))


@pytest.mark.parametrize("absent", range(4))
def test_null_is_for_arrays_without_elements(absent):
    arrays = [normal(*SHAPE) for _ in range(4)]
    pointers = [address(x) for x in arrays]
    pointers[absent] = 0
    with pytest.raises(RuntimeError, match="softmax_attention: an array is missing"):
        with_no_poison(plan_of(), pointers)
    none = (2, 3, 0, 8)
    lower.run(plan_of(none), [0] * 4, 1)


def with_no_poison(plan: lower.PlacedPlan, pointers: list[int]) -> None:
    """A call whose outputs are not filled before, for one of them is NULL."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lower, "POISONS", False)
        lower.run(plan, pointers, 1)


def test_an_output_whose_elements_lie_on_each_other_is_refused(monkeypatch):
    plan, arrays = plan_of(), [normal(*SHAPE) for _ in range(4)]
    monkeypatch.setattr(plan.plan.arrays[abi.INDEX["o"]], "row", 0)
    with pytest.raises(RuntimeError, match="overlaps itself"):
        lower.run(plan, [address(x) for x in arrays], 1)


def unaligned(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    memory = bytearray(torch.Size(shape).numel() * dtype.itemsize + 1)
    x = torch.frombuffer(memory, dtype=dtype, offset=1).view(shape)
    return x.copy_(torch.from_numpy(normal(*shape)))


@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
def test_tensors_that_are_not_aligned_are_served_by_the_next_implementation(name):
    made = {n: torch.from_numpy(normal(*SHAPE)).float() for n in ("q", "k", "v", "do")}
    *arrays, do = made.values()
    expected, grads = attnkit.softmax_attention(*arrays), attnkit.softmax_attention_vjp(*arrays, do)
    made[name] = unaligned(SHAPE)
    *arrays, do = made.values()
    torch.testing.assert_close(attnkit.softmax_attention(*arrays), expected)
    torch.testing.assert_close(attnkit.softmax_attention_vjp(*arrays, do), grads)
    reason = attnkit.explain(attnkit.softmax_attention_vjp, *arrays, do)["native"]
    assert reason == "an array is not aligned to its elements"


@pytest.mark.parametrize("op", ["softmax_attention", "cosine_attention"])
def test_the_gradient_of_a_cotangent_that_is_not_aligned_is_that_of_the_generic_body(op):
    q, k, v = (torch.from_numpy(normal(*SHAPE)).float().requires_grad_() for _ in range(3))
    do = unaligned(SHAPE)
    expected = torch.autograd.grad(getattr(attnkit, op)(q, k, v, impl="generic"), (q, k, v), do)
    found = torch.autograd.grad(getattr(attnkit, op)(q, k, v, impl="native"), (q, k, v), do)
    torch.testing.assert_close(found, expected)
    assert not any(x.requires_grad for x in found)


def test_kernels_of_a_gpu_refuse_what_is_not_aligned():
    """Options and parts of states are loaded as well."""
    x, off = torch.from_numpy(normal(*SHAPE)).float(), unaligned(SHAPE)
    bias, state = unaligned((SHAPE[-2], SHAPE[-2])), (unaligned((*SHAPE[:-2], SHAPE[-1], SHAPE[-1])), x[..., 0, :])
    for call in (
        partial(attnkit.explain, attnkit.pointwise_attention, x, x, off),
        partial(attnkit.explain, attnkit.softmax_attention, x, x, x, bias=bias),
        partial(attnkit.explain, attnkit.softmax_attention_vjp, x, x, x, off),
        partial(attnkit.explain, attnkit.linear_attention, x, x, x, initial_state=state),
    ):
        assert call()["triton"] == "an array is not aligned to its elements"
    assert "CUDA" in attnkit.explain(attnkit.softmax_attention, x, x, x)["triton"]


def test_boundaries_that_are_not_aligned_go_to_the_next_implementation():
    x = torch.from_numpy(normal(3, 2, 8))
    boundaries = torch.frombuffer(bytearray(17), dtype=torch.int64, offset=1).copy_(torch.tensor([0, 3]))
    expected = attnkit.softmax_attention_packed(x, x, x, (0, 3), (0, 3))
    torch.testing.assert_close(attnkit.softmax_attention_packed(x, x, x, boundaries, boundaries), expected)


IMPLS = ["auto", "generic", "native", "blocked", "sdpa"]


@pytest.mark.parametrize(("impl", "bytes_left"), [*((impl, 0) for impl in IMPLS), ("native", 400)])
@pytest.mark.parametrize("part", [0, 1], ids=["from the start", "a part"])
def test_a_tensor_whose_storage_was_freed_is_refused(impl, part, bytes_left):
    """FSDP and others resize a storage while tensors of it live."""
    wide = torch.randn(2, 2, 3, LEAST_KEYS, 8)
    q, k = torch.randn(SHAPE), wide[part]
    needed = (1 + part) * k.nbytes
    if bytes_left == 0 or impl == "native":
        attnkit.softmax_attention(q, k, k, impl=impl)  # a signature that is remembered
    wide.untyped_storage().resize_(bytes_left)
    text = f"softmax_attention: k is a tensor with a storage of {bytes_left} bytes, of which it needs {needed}"
    try:
        attnkit.softmax_attention(q, k, k, impl=impl)
    except TypeError as error:
        said = str(error)
    del q, k, wide  # pytest reads what it prints
    assert said.startswith(text)


# ---------------------------------------------------------------------------------------------- surroundings


@contextlib.contextmanager
def default_device(device: str):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


CALLS = {
    "attention": lambda x: attnkit.softmax_attention(x, x, x, impl="native"),
    "dropout": lambda x: attnkit.pointwise_attention(x, x, x, dropout=(0.25, 7), impl="native"),
    "state": lambda x: attnkit.linear_attention(x, x, x, return_state=True, impl="native")[0],
    "statistics": lambda x: attnkit.row_statistics("softmax_attention", x, x, impl="native").entropy,
    "packed": lambda x: attnkit.softmax_attention_packed(x[0], x[0], x[0], (0, 1, 3), (0, 1, 3), impl="native"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "surrounding", [lambda: torch.device("meta"), lambda: default_device("meta")], ids=["with", "set"]
)
def test_another_default_device_changes_nothing(call, surrounding):
    x = torch.randn(SHAPE, device="cpu", requires_grad=True)
    expected = CALLS[call](x)
    grad = torch.autograd.grad(expected.sum(), x)[0]
    with surrounding():
        found = CALLS[call](x)
        again = torch.autograd.grad(found.sum(), x)[0]
    assert torch.equal(found, expected)
    assert torch.equal(again, grad)


# ---------------------------------------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize("of_library", [np.asarray, torch.from_numpy])  # on threads of ours, and of torch
def test_ctrl_c_ends_a_long_call(of_library):
    x = of_library(np.random.default_rng(0).standard_normal((1, 60000, 64), np.float32))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    press = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    began = time.perf_counter()
    press.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            attnkit.pointwise_attention(x, x, x, activation="gelu", impl="native")  # half a minute of one core
    finally:
        press.cancel()
        signal.signal(signal.SIGINT, before)
    assert time.perf_counter() - began < 5.0


@pytest.mark.parametrize("of_library", [np.asarray, torch.from_numpy])
def test_a_call_goes_on_where_the_handler_of_the_signal_returns(of_library):
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    x = of_library(np.random.default_rng(0).standard_normal((1, 6000, 64)).astype(np.float32))
    expected = attnkit.softmax_attention(x, x, x, impl="native")
    press = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
    press.start()
    try:
        found = attnkit.softmax_attention(x, x, x, impl="native")
        press.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert np.array_equal(found, expected)
    assert pressed == [signal.SIGINT]
