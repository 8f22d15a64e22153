"""Who watches a call on torch tensors: traces, modes and batches get right answers or refusals by name."""

import io
from collections.abc import Callable

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import attnkit
from attnkit._core import dispatch
from attnkit.backends.torch.softmax import LEAST_KEYS
from attnkit.nn import MultiHeadAttention

from .arrays import close, normal

CALLS = {
    "softmax_attention": ("native", "blocked", "sdpa"),
    "pointwise_attention": ("native", "blocked"),
    "entmax_attention": ("native", "blocked"),
    "gaussian_attention": ("native", "blocked"),
    "linear_attention": ("native", "recomputed"),
}
PAIRS = [(op, impl) for op, impls in CALLS.items() for impl in impls]
KERNELS = [(op, impl) for op, impl in PAIRS if impl != "sdpa"]
traced = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")  # torch.jit.trace


def inputs(seed: int = 0, dtype: str = "float64") -> list[torch.Tensor]:
    return [torch.from_numpy(x) for x in normal(*[(1, 2, LEAST_KEYS, 4)] * 4, seed=seed, dtype=dtype)]


def called(op: str, impl: str = "auto", **options: object):
    return lambda q, k, v: getattr(attnkit, op)(q, k, v, impl=impl, **options)


def leaves(seed: int = 0) -> list[torch.Tensor]:
    return [x.requires_grad_() for x in inputs(seed)[:3]]


def gradients(op: str, do: torch.Tensor, impl: str = "generic") -> tuple[torch.Tensor, ...]:
    x = leaves()
    return torch.autograd.grad(called(op, impl)(*x), x, do)


# ---------------------------------------------------------------------------------------------- traces


@traced
@pytest.mark.parametrize("op", CALLS)
def test_a_traced_call_answers_for_other_inputs(op):
    function = called(op)
    module = torch.jit.trace(function, tuple(inputs()[:3]), check_trace=False)
    x, y = leaves(1), leaves(1)
    close(module(*x), function(*y))
    for a, b in zip(*(torch.autograd.grad(f(*z).sum(), z) for f, z in ((module, x), (function, y))), strict=True):
        close(a, b)


@traced
def test_a_traced_layer_answers_for_other_inputs():
    layer = MultiHeadAttention(8, 2, op=attnkit.pointwise_attention).eval()
    first, second = torch.randn(2, 1, 5, 8)
    close(torch.jit.trace(layer, (first,), check_trace=False)(second), layer(second))


@traced
@pytest.mark.parametrize(("op", "impl"), KERNELS)
def test_kernels_that_a_trace_does_not_see_are_refused(op, impl):
    with pytest.raises(NotImplementedError, match=f"{op}.*{impl}.*generic"):
        torch.jit.trace(called(op, impl), tuple(inputs()[:3]), check_trace=False)


@traced
@pytest.mark.parametrize("op", [*CALLS, "sparsemax_attention", "sigmoid_attention"])
def test_an_onnx_file_of_a_trace_computes_the_op(op):
    runtime = pytest.importorskip("onnxruntime")

    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return called(op, causal=True)(q, k, v)

    file = io.BytesIO()
    torch.onnx.export(Layer(), tuple(inputs(dtype="float32")[:3]), file, dynamo=False, input_names=["q", "k", "v"])
    other = inputs(1, "float32")[:3]
    feed = {name: x.numpy() for name, x in zip("qkv", other, strict=True)}
    (got,) = runtime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"]).run(None, feed)
    close(got, Layer()(*other))


# ---------------------------------------------------------------------------------------------- batches of cotangents


@pytest.mark.parametrize(("op", "impl"), PAIRS)
def test_batched_cotangents(op, impl):
    x = leaves()
    batch = torch.stack([inputs(seed)[3] for seed in (1, 2, 3)])
    rows = torch.autograd.grad(called(op, impl)(*x), x, batch, is_grads_batched=True)
    for i, do in enumerate(batch):
        for row, expected in zip(rows, gradients(op, do), strict=True):
            close(row[i], expected)


@pytest.mark.parametrize(("op", "impl"), [("pointwise_attention", "native"), ("linear_attention", "recomputed")])
def test_batches_inside_batches(op, impl):
    from torch._vmap_internals import _vmap

    x = leaves()
    o = called(op, impl)(*x)
    batch = torch.stack([torch.stack([inputs(seed)[3], -inputs(seed)[3]]) for seed in (1, 2, 3)])
    pull = _vmap(_vmap(lambda do: torch.autograd.grad(o, x, do, retain_graph=True)))
    for row, expected in zip(pull(batch), gradients(op, batch[2, 1]), strict=True):
        close(row[2, 1], expected)


@pytest.mark.parametrize(("op", "impl"), PAIRS)
def test_vectorized_jacobian_and_hessian(op, impl):
    keys = LEAST_KEYS if impl == "sdpa" else 2
    q, k, v = (y[:, :1, :, :2] for y in inputs()[:3])
    x = (q[..., :2, :].contiguous(), k[..., :keys, :].contiguous(), v[..., :keys, :].contiguous())

    def loss(*y):
        return called(op, impl)(*y).square().sum()

    def generic(*y):
        return called(op, "generic")(*y).square().sum()

    jacobian, hessian = torch.autograd.functional.jacobian, torch.autograd.functional.hessian
    for got, expected in zip(
        jacobian(called(op, impl), x, vectorize=True), jacobian(called(op, "generic"), x), strict=True
    ):
        close(got, expected)
    if impl in ("native", "generic"):
        for got, expected in zip(hessian(loss, x, vectorize=True), hessian(generic, x), strict=True):
            close(torch.cat(got, -1), torch.cat(expected, -1))
    else:
        with pytest.raises(NotImplementedError, match="generic"):
            hessian(loss, x, vectorize=True)


def test_gradcheck_of_batches():
    function = called("pointwise_attention", activation="softplus")
    x = tuple(leaves())
    assert torch.autograd.gradcheck(function, x, fast_mode=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, x, fast_mode=True, check_batched_grad=True)


# ---------------------------------------------------------------------------------------------- the backward pass


@pytest.mark.parametrize(("op", "impl"), KERNELS)
def test_a_mode_sees_the_backward_pass(op, impl):
    x, do, seen = leaves(), inputs()[3], []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            seen.append(str(operation))
            return operation(*args, **(kwargs or {}))

    o = called(op, impl)(*x)
    with Names():
        grads = torch.autograd.grad(o, x, do)
    assert f"attnkit.{impl}_vjp.default" in seen
    for got, expected in zip(grads, gradients(op, do), strict=True):
        close(got, expected)


@pytest.mark.parametrize(("op", "impl"), PAIRS)
def test_cotangents_without_memory_of_their_own(op, impl):
    """A view that negates, and a tensor without data."""
    x, do = leaves(), inputs()[3]
    o = called(op, impl)(*x)
    negated = torch.complex(do, do).conj().imag
    assert negated.is_neg()
    for got, expected in zip(torch.autograd.grad(o, x, negated, retain_graph=True), gradients(op, -do), strict=True):
        close(got, expected)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        grads = torch.autograd.grad(o, x, mode.from_tensor(do))
    assert [grad.shape for grad in grads] == [y.shape for y in x]


@pytest.mark.parametrize(("op", "impl"), KERNELS)
def test_a_backward_pass_in_forward_mode(op, impl):
    x, (*_, t, do) = leaves(), inputs()
    o = called(op, impl)(*x)

    def tangent():
        return torch.func.jvp(lambda y: torch.autograd.grad(o, x, y, retain_graph=True)[0], (do,), (t,))[1]

    if impl == "native" and op != "linear_attention":
        close(tangent(), gradients(op, t)[0])
    else:
        with pytest.raises(NotImplementedError, match=f"{op}.*{impl}.*generic"):
            tangent()


# ---------------------------------------------------------------------------------------------- function modes


@pytest.mark.parametrize(("op", "impl"), KERNELS)
def test_function_modes_see_one_operation(op, impl):
    """And none of its memory, which this mode would take away."""
    seen = []

    class Names(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            result = function(*args, **(kwargs or {}))
            return result.to("meta") if function is torch.empty else result

    called(op, impl)(*inputs()[:3])  # what is remembered must not answer below
    with Names():
        grads = gradients(op, inputs()[3], impl)
    assert f"attnkit.{impl}.default" in seen
    for got, expected in zip(grads, gradients(op, inputs()[3]), strict=True):
        close(got, expected)


# ---------------------------------------------------------------------------------------------- torch.compile


def test_values_of_numbers_follow_each_other_in_one_graph():
    """Two layers with different numbers are a graph, and a second value makes torch.compile take it for a symbol."""
    q, k, v, _ = inputs(dtype="float32")

    def model(alpha, left, rate, seed):
        first = attnkit.pointwise_attention(q, k, v, alpha=alpha, window=(left, None), dropout=(rate, seed))
        return attnkit.entmax_attention(first, k, v, alpha=alpha + 1.0)

    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for numbers in ((0.5, 1, 0.1, 1), (0.25, 2, 0.2, 2), (0.75, 3, 0.3, 3)):
        close(compiled(*numbers), model(*numbers))


# ---------------------------------------------------------------------------------------------- the profiler


def names_in_profile(call: Callable[[], object]) -> list[str]:
    """Of what is attnkit's, in the order of the calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return [event.name for event in profile.events() if event.name.startswith("attnkit::")]


def test_the_profiler_of_torch_shows_every_call_by_the_name_of_its_op(monkeypatch):
    """With gradients and without, of every implementation, whether its choice was remembered before or not."""
    monkeypatch.setattr(dispatch, "_choices", {})
    q, k, v, do = inputs()
    learned = leaves()

    def calls() -> None:
        for _ in range(2):
            for impl in ("auto", "generic"):
                attnkit.pointwise_attention(q, k, v, impl=impl)
                attnkit.sigmoid_attention(*learned, impl=impl)
            attnkit.softmax_attention_vjp(q, k, v, do)
            with torch.autocast("cpu", dtype=torch.bfloat16):  # where no choice is remembered
                attnkit.linear_attention(*learned, impl="generic")

    calls()
    ops = (*("pointwise_attention", "sigmoid_attention") * 2, "softmax_attention_vjp", "linear_attention")
    assert names_in_profile(calls) == [f"attnkit::{op}" for op in ops] * 2
    assert names_in_profile(lambda: None) == []
