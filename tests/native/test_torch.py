"""Every way into the library from torch: straight, by autograd, by custom ops, and what is refused."""

import os
import warnings

import numpy as np
import pytest

import attnkit

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("library")
OPS = [attnkit.softmax_attention, attnkit.pointwise_attention, attnkit.sigmoid_attention, attnkit.gaussian_attention]
BY_NAME = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
SEED = 2**63 + 5


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def tokens(*shape, **options):
    return torch.randn(*shape, dtype=torch.float64, **options)


def qkv(**options):
    return tokens(2, 4, 5, 8, **options), tokens(2, 2, 7, 8, **options), tokens(2, 2, 7, 6, **options)


def native(op, **options):
    return lambda q, k, v, **more: op(q, k, v, impl="native", enable_gqa=True, **options, **more)


def generic(op, **options):
    return lambda q, k, v, **more: op(q, k, v, impl="generic", enable_gqa=True, **options, **more)


# ---------------------------------------------------------------------------------------------- values and gradients


@BY_NAME
def test_gradients_and_gradients_of_gradients(op):
    leaves = [x.requires_grad_() for x in (*qkv(), tokens(4, 1, 7))]
    found = []
    for make in (native, generic):
        o = make(op, dropout=(0.3, SEED), causal=True, bias=leaves[3])(*leaves[:3])
        first = torch.autograd.grad((o**2).sum(), leaves, create_graph=True)
        found.append((o, *first, *torch.autograd.grad(sum((x**2).sum() for x in first), leaves)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_explicit_gradients_of_half_types_take_every_cotangent():
    """do in the dtype of o, dlse in the compute dtype, as they come, or rounded."""
    q, k, v = (x.bfloat16() for x in qkv())
    do, dlse = torch.randn(2, 4, 5, 6).bfloat16(), torch.randn(2, 4, 5).bfloat16()
    found = [
        attnkit.softmax_attention_vjp(q, k, v, do, cotangent, impl="native", enable_gqa=True)
        for cotangent in (dlse, dlse.float())
    ]
    assert all(torch.equal(found[0][name], found[1][name]) for name in "qkv")


def test_only_what_needs_a_gradient_has_one():
    q, k, v = qkv()
    o = native(attnkit.softmax_attention)(q, k.requires_grad_(), v)
    o.sum().backward()
    assert q.grad is None
    assert k.grad is not None
    assert not native(attnkit.softmax_attention)(q, k.detach(), v).requires_grad
    with torch.no_grad():
        assert not native(attnkit.softmax_attention)(q, k, v).requires_grad


def test_explicit_gradients_of_one_cotangent_alone():
    q, k, v = qkv()
    for do, dlse in ((tokens(2, 4, 5, 6), None), (None, tokens(2, 4, 5))):
        found, golden = (
            attnkit.softmax_attention_vjp(q, k, v, do, dlse, enable_gqa=True, impl=impl)
            for impl in ("native", "generic")
        )
        torch.testing.assert_close(found, golden)


def test_explicit_gradients_are_not_silently_constants():
    q, k, v, do = (torch.randn(2, 5, 4, requires_grad=name != "do") for name in ("q", "k", "v", "do"))
    dq = attnkit.softmax_attention_vjp(q, k, v, do, impl="native")["q"]
    assert dq.requires_grad
    with pytest.raises(NotImplementedError, match="impl='generic' has"):
        dq.sum().backward()


@pytest.mark.parametrize("seed", [2**63 - 1, 2**63, 2**64 - 1])
def test_seeds_of_64_bits(seed):
    q, k, v = qkv()
    found = native(attnkit.softmax_attention, dropout=(0.3, seed))(q, k, v)
    torch.testing.assert_close(found, generic(attnkit.softmax_attention, dropout=(0.3, seed))(q, k, v))


@pytest.mark.parametrize(("queries", "query_heads", "heads", "weight"), [(16, 2, 2, 32), (1, 8, 8, 32), (1, 8, 2, 64)])
def test_small_calls_of_softmax_are_torchs(queries, query_heads, heads, weight):
    """Smaller ones are ours in decoding."""
    from attnkit.backends.torch.native import SDPA_UNTIL, is_faster

    keys = SDPA_UNTIL // weight
    for count, ours in ((keys - 1, False), (keys, True)):
        q, k = tokens(1, query_heads, queries, 8), tokens(1, heads, count, 8)
        assert is_faster(q, k, k, enable_gqa=heads < query_heads) == ours


def test_strides_of_any_kind():
    q = tokens(2, 5, 4, 8).transpose(1, 2)
    k = tokens(7, 8, 2, 2).permute(2, 3, 0, 1)
    v = tokens(1, 1, 1, 6).expand(2, 2, 7, 6)
    torch.testing.assert_close(native(OPS[0])(q, k, v), generic(OPS[0])(q, k, v))
    negated = torch.complex(tokens(2, 2, 7, 6), tokens(2, 2, 7, 6)).conj().imag
    assert negated.is_neg()
    torch.testing.assert_close(native(OPS[0])(q, k, negated), generic(OPS[0])(q, k, negated))


# ---------------------------------------------------------------------------------------------- who else looks on


@BY_NAME
def test_vmap(op):
    q, k, v = tokens(3, 4, 5, 8), tokens(2, 7, 8), tokens(3, 2, 7, 6)
    options = {"dropout": (0.3, SEED)}
    function = native(op, **options)
    found = torch.func.vmap(function, (0, None, 0))(q, k, v)
    torch.testing.assert_close(found, torch.stack([function(q[i], k, v[i]) for i in range(3)]))


@BY_NAME
def test_derivatives_of_torch_func_pass_the_library_over_or_are_refused(op):
    q, k, v = qkv()
    auto = lambda q: op(q, k, v, enable_gqa=True).pow(2).sum()  # noqa: E731
    golden = torch.func.grad(lambda q: generic(op)(q, k, v).pow(2).sum())(q)
    torch.testing.assert_close(torch.func.grad(auto)(q), golden)
    found = torch.func.vmap(torch.func.grad(auto))(torch.stack([q, q]))
    torch.testing.assert_close(found, torch.stack([golden, golden]))
    for transform in (
        lambda f: torch.func.jvp(f, (q,), (q,)),
        lambda f: torch.func.grad(lambda q: f(q).sum())(q),
    ):
        with pytest.raises(NotImplementedError, match=r"native: derivatives by torch\.func"):
            transform(lambda q: native(op)(q, k, v))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"native: derivatives by"):
        native(op)(torch.autograd.forward_ad.make_dual(q, q), k, v)


def test_a_call_that_is_remembered_keeps_its_tangents():
    q, k, v = torch.randn(3, 2, 5, 8)
    op = attnkit.pointwise_attention
    for _ in range(3):
        op(q, k, v)
    with torch.autograd.forward_ad.dual_level():
        tangent = torch.autograd.forward_ad.unpack_dual(op(torch.autograd.forward_ad.make_dual(q, q), k, v)).tangent
    torch.testing.assert_close(tangent, torch.func.jvp(lambda q: op(q, k, v, impl="generic"), (q,), (q,))[1])


@pytest.mark.parametrize("dynamic", [False, True])
@BY_NAME
def test_compiled_as_one_graph(op, dynamic):
    leaves = [x.requires_grad_() for x in qkv()]
    function = native(op, causal=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        o = compiled(*leaves)
        found = (o, *torch.autograd.grad((o**2).sum(), leaves))
    o = function(*leaves)
    torch.testing.assert_close(found, (o, *torch.autograd.grad((o**2).sum(), leaves)))


def test_exported():
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return native(attnkit.pointwise_attention)(q, k, v)

    program = torch.export.export(Module(), qkv())
    assert "attnkit.native" in str(program.graph)
    arguments = qkv()
    torch.testing.assert_close(program.module()(*arguments), generic(attnkit.pointwise_attention)(*arguments))


def test_outputs_without_data_have_the_dtypes_of_those_with():
    from torch._subclasses import FakeTensorMode

    q, k, v = (x.bfloat16() for x in qkv())
    call = native(attnkit.softmax_attention, return_lse=True)
    with FakeTensorMode() as mode:
        fake = call(*(mode.from_tensor(x) for x in (q, k, v)))
    assert [x.dtype for x in fake] == [x.dtype for x in call(q, k, v)] == [torch.bfloat16, torch.float32]


def test_tensors_without_data_never_reach_the_library():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in qkv()]
        assert native(attnkit.softmax_attention)(*fake).shape == (2, 4, 5, 6)
    meta = [x.to("meta") for x in qkv()]
    assert attnkit.softmax_attention(*meta, enable_gqa=True).shape == (2, 4, 5, 6)
    with pytest.raises(NotImplementedError, match="native: it is for the CPU"):
        native(attnkit.softmax_attention)(*meta)


def test_subclasses_and_dispatch_modes_see_the_operation():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watching() as watching:
        native(attnkit.softmax_attention)(*qkv())
    assert any("attnkit.native" in name for name in watching.seen)

    class Own(torch.Tensor):
        pass

    q, k, v = qkv()
    found = native(attnkit.softmax_attention)(q.as_subclass(Own), k, v)
    assert type(found) is Own
    torch.testing.assert_close(found.as_subclass(torch.Tensor), generic(attnkit.softmax_attention)(q, k, v))


@BY_NAME
def test_opcheck(op):
    q, k, v = (x.requires_grad_() for x in qkv())
    from attnkit.backends.torch import custom, native
    from attnkit.ops.vjps import VJPS

    name = op.__name__ if op.__name__ in VJPS else "pointwise_attention"
    names, tensors, text = custom.encoded(
        {"q": q, "k": k, "v": v, "enable_gqa": True, "dropout": (0.3, 5), "outputs": "o"}
    )
    torch.library.opcheck(native.CUSTOM.forward, (name, tensors, names, text))


def test_numbers_of_numpys_are_written_as_pythons():
    from attnkit.backends.torch import custom

    options = {"window": (np.int64(3), 2), "scale": np.float32(0.5), "causal": True, "length": "all", "bias": None}
    names, tensors, text = custom.encoded({"q": torch.ones(1), **options})
    assert (names, text) == ("q", "window=(3,2,);scale=0.5;causal=True;length='all'")
    again = custom.decoded(tensors, names, text)
    assert again.pop("q") is tensors[0]
    assert again == {name: value for name, value in options.items() if value is not None}


# ---------------------------------------------------------------------------------------------- threads and processes


class Attending(torch.utils.data.Dataset):
    """Every item calls the library, in the process of a worker, with tensors too small for torch's own threads."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        x = torch.full((1, 500, 64), float(index))
        torch.set_num_threads(2)
        return attnkit.pointwise_attention(x, x, x, impl="native"), os.getpid()


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # JAX, where another test has loaded it
@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker:UserWarning")  # on a machine of one core
def test_workers_that_fork_after_the_first_call():
    before = torch.get_num_threads()
    data = Attending()
    golden = [data[i][0] for i in range(4)]
    try:
        loader = torch.utils.data.DataLoader(data, num_workers=2, multiprocessing_context="fork", timeout=60)
        items = list(loader)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(o[0], expected) for (o, _), expected in zip(items, golden, strict=True))
    assert os.getpid() not in {int(pid) for _, pid in items}


# ---------------------------------------------------------------------------------------------- statistics


STATISTICS = [
    (attnkit.softmax_attention, {}),
    (attnkit.reluformer_attention, {"causal": True}),
    (attnkit.sparsemax_attention, {}),
    (attnkit.entmax_attention, {"alpha": 1.2}),
    (attnkit.gaussian_attention, {}),
]


def measured(op, leaves, impl, options, wrapped=lambda f: f):
    def function(*tensors):
        o, rows = attnkit.attention_with_statistics(op, *tensors, enable_gqa=True, impl=impl, **options)
        alone = attnkit.row_statistics(op, *tensors[:2], enable_gqa=True, impl=impl, **options)
        return (o, *rows, *alone)

    outputs = wrapped(function)(*leaves)
    weight = sum((i + 1) * x.sin().sum() for i, x in enumerate(outputs) if x.requires_grad)
    return outputs, torch.autograd.grad(weight, leaves)


@pytest.mark.parametrize(("op", "options"), STATISTICS, ids=lambda x: getattr(x, "__name__", ""))
def test_statistics_beside_the_output_and_alone(op, options):
    leaves = [x.requires_grad_() for x in qkv()]
    golden = measured(op, leaves, "generic", options)
    torch.testing.assert_close(measured(op, leaves, "native", options), golden)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = measured(
            op, leaves, "native", options, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")
        )
    torch.testing.assert_close(compiled, golden)


def test_second_derivatives_of_statistics():
    leaves = [x.requires_grad_() for x in qkv()]
    found = []
    for impl in ("native", "generic"):
        o, rows = attnkit.attention_with_statistics(attnkit.softmax_attention, *leaves, enable_gqa=True, impl=impl)
        first = torch.autograd.grad((o**2).sum() + rows.entropy.sin().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum((x**2).sum() for x in first), leaves))
    torch.testing.assert_close(*found)
