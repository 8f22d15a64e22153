"""Which implementation serves a call, and what the caller is told."""

import inspect
import sys

import numpy as np
import pytest
import torch

import attnkit
from attnkit._core import check, dispatch
from attnkit._core.dispatch import Kernel
from attnkit.backends import torch as torch_backend
from attnkit.backends.torch import softmax

from .arrays import assert_close, qkv


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    return [torch.tensor(x) for x in qkv(5, 5)]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A kernel of pointwise_attention that serves only calls without a mask, and a log of what it was asked."""
    log: list[str] = []

    def call(q, k, v, **options):
        log.append("called")
        return attnkit.pointwise_attention(q, k, v, **options, impl="generic") + 1

    def unsupported(q, k, v, **options):
        return "no masks here" if options.get("mask") is not None else None

    row = Kernel("fast", call, unsupported)
    monkeypatch.setitem(torch_backend.KERNELS, "pointwise_attention", (row,))
    return log


def test_auto_takes_the_first_kernel_that_serves(tensors, kernel):
    generic = attnkit.pointwise_attention(*tensors, impl="generic")
    assert kernel == []
    assert torch.equal(attnkit.pointwise_attention(*tensors), generic + 1)
    assert kernel == ["called"]


def test_auto_falls_to_the_generic_body_when_a_kernel_has_a_reason(tensors, kernel):
    mask = torch.ones(5, 5, dtype=torch.bool)
    attnkit.pointwise_attention(*tensors, mask=mask)
    assert kernel == []


def test_a_named_kernel_serves_or_raises_its_reason(tensors, kernel):
    attnkit.pointwise_attention(*tensors, impl="fast")
    mask = torch.ones(5, 5, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match=r"pointwise_attention: .*impl='fast'.*fast: no masks here"):
        attnkit.pointwise_attention(*tensors, mask=mask, impl="fast")
    assert kernel == ["called"]


def test_a_tuple_is_tried_in_order(tensors, kernel):
    mask = torch.ones(5, 5, dtype=torch.bool)
    attnkit.pointwise_attention(*tensors, mask=mask, impl=("fast", "generic"))
    assert kernel == []
    attnkit.pointwise_attention(*tensors, impl=("fast", "generic"))
    assert kernel == ["called"]


def test_special_cases_pass_impl_on(tensors, kernel):
    attnkit.reluformer_attention(*tensors, impl="fast")
    attnkit.sigmoid_attention(*tensors)
    assert kernel == ["called", "called"]


def test_a_repeated_special_case_runs_what_the_kernel_prepared(tensors, monkeypatch):
    signatures = []

    def prepared(arrays, options):
        signatures.append(options)
        return lambda q, k, v, **options: (q, options)

    fast = Kernel("fast", attnkit.pointwise_attention, lambda *arrays, **options: None, prepared=prepared)
    for op in ("pointwise_attention", "sigmoid_attention"):
        monkeypatch.setitem(torch_backend.KERNELS, op, (fast,))
    attnkit.sigmoid_attention(*tensors, length="all", causal=True)
    q, options = attnkit.sigmoid_attention(*tensors, length="all", causal=True)
    assert q is tensors[0]
    assert options == {"length": "all", "causal": True}
    assert signatures[-1]["activation"] == "sigmoid"


def test_explain_names_every_implementation_and_its_reason(tensors, kernel):
    mask = torch.ones(5, 5, dtype=torch.bool)
    assert attnkit.explain(attnkit.pointwise_attention, *tensors) == {"fast": None, "generic": None}
    told = attnkit.explain(attnkit.reluformer_attention, *tensors, mask=mask)
    assert told == {"fast": "no masks here", "generic": None}
    assert kernel == []
    arrays = [x.numpy() for x in tensors]
    told = attnkit.explain(attnkit.pointwise_attention, *arrays)
    assert told == {"native": attnkit.native_status().reason, "generic": None, "blocked": None}


def test_an_unknown_implementation_names_those_there_are(tensors):
    with pytest.raises(
        ValueError, match=r"softmax_attention: impl must be one of 'auto', 'generic', .*'sdpa', .*mean 'sdpa'\?"
    ):
        attnkit.softmax_attention(*tensors, impl="sdp")


def test_a_name_that_the_cpu_library_replaced_warns_and_serves(tensors):
    q, k, _ = tensors
    with pytest.warns(DeprecationWarning, match="linear_attention: impl='chunked' was replaced by impl='native'"):
        o = attnkit.linear_attention(*tensors, impl="chunked")
    assert_close(o, attnkit.linear_attention(*tensors, impl="generic"))
    with pytest.warns(DeprecationWarning, match="row_statistics: impl='blocked' was replaced by impl='native'") as seen:
        rows = attnkit.row_statistics("softmax_attention", q, k, impl="blocked")
    assert seen[0].filename == __file__
    assert_close(rows.total, torch.ones_like(rows.total))
    with pytest.raises(ValueError, match="nystrom_attention: impl must be one of"):
        attnkit.nystrom_attention(*tensors, num_landmarks=2, impl="blocked")


def test_sdpa_serves_what_it_says_and_nothing_else(tensors):
    q, k, v = tensors
    for options in ({}, {"causal": True}, {"scale": 0.5}):
        fused = attnkit.softmax_attention(q, k, v, impl="sdpa", **options)
        generic = attnkit.softmax_attention(q, k, v, impl="generic", **options)
        assert_close(fused, generic)
    refused = {
        "mask": torch.ones(5, 5, dtype=torch.bool),
        "return_lse": True,
        "key_lengths": 3,
        "dropout": (0.1, 1),
        "window": (1, 1),
    }
    for name, value in refused.items():
        with pytest.raises(NotImplementedError, match=name):
            attnkit.softmax_attention(q, k, v, impl="sdpa", **{name: value})
    with pytest.raises(NotImplementedError, match="as many queries as keys"):
        attnkit.softmax_attention(q[:, :, :3], k, v, impl="sdpa", causal=True)
    with pytest.raises(NotImplementedError, match="as many heads"):
        attnkit.softmax_attention(q, k[:, :1], v[:, :1], impl="sdpa")
    for parts in ((q[0], k[0], v[0]), (q, k[:1], v[:1]), (q, k, v[:1])):
        with pytest.raises(NotImplementedError, match=r"shape \(B, H, tokens, features\) with one B"):
            attnkit.softmax_attention(*parts, impl="sdpa")
    for queries, keys in ((0, 5), (5, 0)):
        with pytest.raises(NotImplementedError, match="no queries or no keys"):
            attnkit.softmax_attention(q[:, :, :queries], k[:, :, :keys], v[:, :, :keys], impl="sdpa")


@pytest.mark.parametrize("beside", [lambda o: o, lambda o: o.transpose(-1, -2)[..., :2]], ids=["itself", "below"])
def test_torchs_kernel_is_known_in_the_graph_of_its_output(tensors, beside):
    q, k = (x.requires_grad_() for x in tensors[:2])
    node = softmax._fused(beside(torch.nn.functional.scaled_dot_product_attention(q, k, k)).grad_fn)
    assert node.name().startswith("ScaledDotProduct")
    assert softmax._fused((q @ k.mT).grad_fn) is None


def test_options_reach_a_body_that_is_computed_again():
    q, k, v = (torch.tensor(x) for x in qkv(5, 5))
    options = {"causal": True, "feature_map": "relu", "eps": 0.25}
    first, again = (attnkit.linear_attention(q, k, v, **options, impl=impl) for impl in ("generic", "recomputed"))
    assert torch.equal(first, again)


def test_torchs_layer_norm_needs_features_and_no_tokens():
    for shape, impl in (((2, 0, 3), "fused"), ((2, 3, 0), "generic")):
        x, weight = torch.ones(shape), torch.ones(shape[-1])
        with attnkit.implementations() as ran:
            assert attnkit.qk_layernorm(x, x, weight, weight)[0].shape == shape
        assert ran == {"qk_layernorm": {impl}}


def test_arrays_may_be_given_by_name():
    q, k, v = qkv()
    assert np.array_equal(attnkit.softmax_attention(q, v=v, k=k), attnkit.softmax_attention(q, k, v))


@pytest.mark.parametrize("name", ["linear_attention_vjp", "reluformer_attention_vjp"])
@pytest.mark.parametrize("impl", ["auto", "generic"])
def test_arrays_may_be_given_by_name_again(name, impl):
    """Repeated calls, which are not checked, take arrays to the same places."""
    q, k, v = qkv(5, 5)
    found = [getattr(attnkit, name)(q, k, v=v, do=v, impl=impl)["k"] for _ in range(3)]
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_signatures_show_every_option():
    shown = inspect.signature(attnkit.pointwise_attention).parameters
    for name in ("activation", "mask", "bias", "causal", "window", "key_lengths", "dropout", "impl"):
        assert name in shown
    assert list(shown)[-1] == "impl"
    assert "dropout" not in inspect.signature(attnkit.pointwise_attention_weights).parameters


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_calls_of_one_signature_are_checked_once_and_others_again(library, monkeypatch):
    q, k, v = (torch.tensor(x) if library == "torch" else x for x in qkv(5, 5))
    count = []
    monkeypatch.setattr(check, "call", lambda *a, call=check.call, **o: count.append(1) or call(*a, **o))
    for expected in (1, 1, 1):
        attnkit.gaussian_attention(q, k, v, scale=0.123, causal=True)
        assert len(count) == expected
    attnkit.gaussian_attention(q, k, v, scale=0.124, causal=True)
    attnkit.gaussian_attention(q[..., :4, :], k, v, scale=0.123, causal=True)
    assert len(count) == 3
    for _ in range(2 * (library == "torch")):  # calls with arrays among the options too
        attnkit.gaussian_attention(q, k, v, mask=torch.ones(5, 5, dtype=torch.bool), scale=0.125)
        assert len(count) == 4
    for wrong in ({"causal": 1}, {"scale": "x"}, {"causal": True, "colour": 1}, {"dropout": (0.5, -1)}):
        with pytest.raises((TypeError, ValueError)):
            attnkit.gaussian_attention(q, k, v, **{"scale": 0.123, **wrong})
    with pytest.raises(TypeError, match="share one dtype"):
        attnkit.gaussian_attention(q, k, v[...].astype("float32") if library == "numpy" else v.float(), scale=0.123)
    with pytest.raises(NotImplementedError):
        attnkit.gaussian_attention(q, k, v, scale=0.123, causal=True, impl=())


def test_what_is_remembered_of_a_call_is_forgotten_with_the_kernels(tensors, kernel):
    attnkit.pointwise_attention(*tensors)
    attnkit.pointwise_attention(*tensors)
    assert kernel == ["called", "called"]
    mask = torch.ones(5, 5, dtype=torch.bool)
    attnkit.pointwise_attention(*tensors, mask=mask)
    attnkit.pointwise_attention(*tensors, mask=mask)
    assert kernel == ["called", "called"]


def test_implementations_names_what_ran(tensors, kernel):
    """Calls that are remembered too, by the name of the op that was called; nothing outside the block."""
    mask = torch.ones(5, 5, dtype=torch.bool)
    attnkit.pointwise_attention(*tensors)
    with attnkit.implementations() as ran:
        attnkit.pointwise_attention(*tensors)
        attnkit.pointwise_attention(*tensors, mask=mask)
        attnkit.reluformer_attention(*tensors, impl="generic")
        attnkit.explain(attnkit.sigmoid_attention, *tensors)
        lengths = (0, 5)
        attnkit.pointwise_attention_packed(*(x[0].transpose(0, 1) for x in tensors), lengths, lengths, impl="generic")
    attnkit.gaussian_attention(*tensors)
    assert ran == {
        "pointwise_attention": {"fast", "generic"},
        "reluformer_attention": {"generic"},
        "pointwise_attention_packed": {"generic"},
    }
    assert kernel == ["called", "called"]


def test_choices_are_not_remembered_without_end(tensors, monkeypatch):
    monkeypatch.setattr(dispatch, "MOST_CHOICES", 3)
    dispatch._choices.clear()
    for i in range(10):
        attnkit.gaussian_attention(*tensors, scale=1.0 + i)
        assert len(dispatch._choices) <= 3


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
@pytest.mark.parametrize("impl", ["auto", "generic"])
def test_a_trace_does_not_go_through_all_modules(impl, kind, monkeypatch):
    """The compiler would, and fail if a thread imports something meanwhile."""
    from torch._dynamo.variables.builder import VariableBuilder

    wrap, met = VariableBuilder._wrap, []
    monkeypatch.setattr(VariableBuilder, "_wrap", lambda own, x: met.append(x is sys.modules) or wrap(own, x))
    torch._dynamo.reset()
    x = kind(torch.randn(2, 8, 4))
    torch.compile(lambda x: attnkit.sparsemax_attention(x, x, x, impl=impl), backend="eager", fullgraph=True)(x)
    assert met
    assert not any(met)
