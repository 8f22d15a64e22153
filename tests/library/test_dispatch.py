"""Which implementation serves a call, and what the caller is told."""

import asyncio
import contextlib
import inspect
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import attnkit
from attnkit._core import check, dispatch
from attnkit._core.dispatch import Kernel
from attnkit.backends import torch as torch_backend
from attnkit.backends.torch import softmax
from attnkit_conformance import core
from attnkit_conformance.adapters.base import AttnkitAdapter
from attnkit_conformance.model.case import DTYPES
from attnkit_conformance.opdb import OPDB
from attnkit_conformance.scenes import rows

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


def test_a_named_kernel_serves_or_raises_its_reason(tensors, kernel):
    attnkit.pointwise_attention(*tensors, impl="fast")
    mask = torch.ones(5, 5, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match=r"pointwise_attention: .*impl='fast'.*fast: no masks here"):
        attnkit.pointwise_attention(*tensors, mask=mask, impl="fast")
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
    match = "linear_attention: impl='chunked' was replaced by impl='native'"
    with pytest.warns(DeprecationWarning, match=match) as seen:
        o = attnkit.linear_attention(*tensors, impl="chunked")
    assert seen[0].filename == __file__
    assert_close(o, attnkit.linear_attention(*tensors, impl="generic"))
    with pytest.warns(DeprecationWarning, match="row_statistics: impl='blocked' was replaced by impl='native'") as seen:
        rows = attnkit.row_statistics("softmax_attention", q, k, impl="blocked")
    assert seen[0].filename == __file__
    assert_close(rows.total, torch.ones_like(rows.total))
    with pytest.raises(ValueError, match="nystrom_attention: impl must be one of"):
        attnkit.nystrom_attention(*tensors, num_landmarks=2, impl="blocked")


def test_sdpa_serves_what_it_says_and_nothing_else():
    q, k, v = (torch.tensor(x) for x in qkv(16, 16))
    for options in ({}, {"causal": True}, {"scale": 0.5}):
        fused = attnkit.softmax_attention(q, k, v, impl="sdpa", **options)
        generic = attnkit.softmax_attention(q, k, v, impl="generic", **options)
        assert_close(fused, generic)
    refused = {
        "mask": torch.ones(16, 16, dtype=torch.bool),
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
    for queries, keys in ((0, 16), (16, 0)):
        with pytest.raises(NotImplementedError, match="no queries or no keys"):
            attnkit.softmax_attention(q[:, :, :queries], k[:, :, :keys], v[:, :, :keys], impl="sdpa")


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-50])
def test_scores_that_are_scaled_to_nothing_or_turned_are_no_nan(scale):
    """torch hides keys by -∞ and multiplies then, which gives NaN, or +∞ where they are hidden."""
    q, k, v = (torch.tensor(x) for x in qkv(16, 16))
    o = attnkit.softmax_attention(q, k, v, scale=scale, causal=True)
    assert_close(o, attnkit.softmax_attention(q, k, v, scale=scale, causal=True, impl="generic"))
    with pytest.raises(NotImplementedError, match="-∞ before it multiplies"):
        attnkit.softmax_attention(q, k, v, scale=scale, causal=True, impl="sdpa")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keys", [1, 2, 7, 8, 9, 15, 16, 17, 31, 33])
def test_a_query_of_nan_is_seen_in_its_output(keys, dtype):
    """Torch's kernel drops it below 16 keys, and is refused there; above it is what auto takes, but in float16."""
    q, k, v = (torch.randn(1, 2, keys, 4, generator=torch.Generator().manual_seed(n), dtype=dtype) for n in range(3))
    q[..., 0, 0] = torch.nan
    with attnkit.implementations() as ran:
        for options in ({}, {"causal": True}):
            for rows in (1, keys) if not options else (keys,):
                o = attnkit.softmax_attention(q[..., :rows, :], k, v, **options)
                assert o[..., 0, :].isnan().all()
                assert not o[..., 1:, :].isnan().any()
    assert ran["softmax_attention"] == {"sdpa" if keys >= 16 and dtype != torch.float16 else "native"}


def test_torchs_kernel_is_refused_where_it_drops_a_nan():
    """What the limit is for; when torch has repaired it, it may fall."""
    q, k = torch.full((1, 1, 1, 4), torch.nan), torch.ones(1, 1, 16, 4)
    shown = [
        torch.nn.functional.scaled_dot_product_attention(q, k[:, :, :n], k[:, :, :n]).isnan().all() for n in (7, 16)
    ]
    assert shown == [False, True]
    with pytest.raises(NotImplementedError, match="with fewer than 16 keys torch turns a query that holds NaN into 0"):
        attnkit.softmax_attention(k[:, :, :15], k[:, :, :15], k[:, :, :15], impl="sdpa")


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
    attnkit.gaussian_attention(q, k, v)  # the first of a process loads what serves it
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
    with pytest.raises(ValueError, match="impl must name at least one implementation"):
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


def test_implementations_within_implementations(tensors):
    """What runs inside is noted in both, what runs after in the outer one alone."""
    with attnkit.implementations() as outer:
        attnkit.pointwise_attention(*tensors, impl="native")
        with attnkit.implementations() as inner:
            attnkit.pointwise_attention(*tensors, impl="generic")
        with contextlib.suppress(NotImplementedError), attnkit.implementations():
            attnkit.pointwise_attention(*tensors, impl="triton")
        attnkit.gaussian_attention(*tensors, impl="generic")
    attnkit.entmax_attention(*tensors)
    assert inner == {"pointwise_attention": {"generic"}}
    assert outer == {"pointwise_attention": {"generic", "native"}, "gaussian_attention": {"generic"}}


def test_threads_and_tasks_note_what_runs_in_them(tensors):
    async def task(impl, first, second):
        with attnkit.implementations() as ran:
            first.set()
            await second.wait()
            attnkit.pointwise_attention(*tensors, impl=impl)
        return ran

    async def both():
        events = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(task("generic", *events), task("native", *events[::-1]))

    assert asyncio.run(both()) == [{"pointwise_attention": {impl}} for impl in ("generic", "native")]
    with attnkit.implementations() as ran, ThreadPoolExecutor(1) as pool:
        pool.submit(attnkit.pointwise_attention, *tensors).result()
    assert ran == {}


def test_explain_takes_names(tensors):
    for name in ("softmax_attention", "sigmoid_attention_vjp", "linear_attention_packed"):
        more = {"sigmoid_attention_vjp": tensors[:1], "linear_attention_packed": [(0, 5), (0, 5)]}.get(name, [])
        arrays = [x[0].transpose(0, 1) for x in tensors] if more and len(more) == 2 else tensors
        arrays = [arrays[0]] * 3
        assert attnkit.explain(name, *arrays, *more) == attnkit.explain(getattr(attnkit, name), *arrays, *more)
    for name in ("row_statistics", attnkit.row_statistics):
        assert attnkit.explain(name, "softmax_attention", *tensors[:2])["generic"] is None
    with pytest.raises(ValueError, match=r"explain: op must be one of .*; did you mean 'softmax_attention'\?"):
        attnkit.explain("softmax_atention", *tensors)


def test_names_of_implementations_may_be_a_list(tensors, kernel):
    mask = torch.ones(5, 5, dtype=torch.bool)
    for op in (attnkit.pointwise_attention, attnkit.sigmoid_attention):
        for _ in range(2):
            expected = op(*tensors, mask=mask, impl=("fast", "generic"))
            assert torch.equal(op(*tensors, mask=mask, impl=["fast", "generic"]), expected)
            assert torch.equal(op(*tensors, mask=mask, impl=["fast", "auto"]), expected)
    assert kernel == []
    attnkit.pointwise_attention(*tensors, impl=["fast", "generic"])
    assert kernel == ["called"]
    packed = [*(x[0].transpose(0, 1) for x in tensors), (0, 5), (0, 5)]
    o = attnkit.pointwise_attention_packed(*packed, impl=["auto"])
    assert torch.equal(o, attnkit.pointwise_attention_packed(*packed))


@pytest.mark.parametrize(
    ("impl", "error", "text"),
    [
        (None, TypeError, "impl must be the name of an implementation, or a tuple or list of names; got None"),
        (1, TypeError, "got 1"),
        ([None], TypeError, r"got \[None\]"),
        ((["generic"],), TypeError, r"got \(\['generic'\],\)"),
        ({"generic"}, TypeError, r"got \{'generic'\}"),
        ([], ValueError, r"impl must name at least one implementation; got \[\]"),
        ((), ValueError, r"impl must name at least one implementation; got \(\)"),
        ("", ValueError, "impl must be one of 'auto', 'generic', .*; got ''"),
        (["generc"], ValueError, r"got 'generc'; did you mean 'generic'\?"),
    ],
)
def test_what_names_no_implementation(tensors, impl, error, text):
    q, k, _ = tensors
    with pytest.raises(error, match=f"^row_statistics: .*{text}"):
        attnkit.row_statistics("softmax_attention", q, k, impl=impl)
    for name in ("pointwise_attention", "sigmoid_attention"):
        with pytest.raises(error, match=f"^{name}: .*{text}"):
            getattr(attnkit, name)(*tensors, impl=impl)
    packed = [x[0].transpose(0, 1) for x in tensors]
    with pytest.raises(error, match=f"^softmax_attention_packed: .*{text}"):
        attnkit.softmax_attention_packed(*packed, (0, 5), (0, 5), impl=impl)


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


@pytest.mark.parametrize("op", OPDB, ids=lambda op: op.name)
def test_what_generic_calls_is_generic_too(op):
    adapter = AttnkitAdapter("generic", DTYPES, "generic")
    names = ["plain", *(f"op={subject.name}" for subject in op.subjects[1:])]
    for case in (rows.sample_named(op, "float32", f"pair.{name}").draw(0) for name in names):
        with attnkit.implementations() as ran:
            arrays = core.typed_arrays(adapter, case)
            adapter.call(op.name, arrays, case.params)
            if op.vjp:
                adapter.vjp(op.name, arrays, case.params, core.typed_cotangents(adapter, case))
        assert {name for names in ran.values() for name in names} <= {"generic"}, case.id
