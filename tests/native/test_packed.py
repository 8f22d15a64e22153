"""Packed sequences: the library serves each on the rows between its boundaries."""

import warnings

import numpy as np
import pytest

import attnkit
from attnkit.backends.native.lower import EDGES as EDGES_OF_PLANS
from attnkit.backends.native.packed import OPS
from attnkit.ops import packed
from attnkit_conformance.model import tolerance

pytestmark = pytest.mark.usefixtures("library")
RNG = np.random.default_rng(0)
# the second sequence has no queries, the third no keys, and the last is more than a thread's share
LENGTHS = {"q": (5, 0, 3, 1, 70), "k": (7, 4, 0, 2, 150)}
EDGES = {name: (0, *(int(x) for x in np.cumsum(n))) for name, n in LENGTHS.items()}
TUPLES = (EDGES["q"], EDGES["k"])
GQA = {"enable_gqa": True}
CASES = {
    "softmax": ("softmax", GQA),
    "softmax causal": ("softmax", {"causal": True, **GQA}),
    "softmax window": ("softmax", {"causal": "upper_left", "window": (3, None), "scale": 0.2, **GQA}),
    "softmax lse": ("softmax", {"return_lse": True, "window": (20, 30), **GQA}),
    "pointwise": ("pointwise", {"window": (2, 1), **GQA}),
    "pointwise all": ("pointwise", {"length": "all", "alpha": 0.5, "causal": True, **GQA}),
    "pointwise length": ("pointwise", {"length": RNG.uniform(1, 9, EDGES["q"][-1:]), "activation": "softplus", **GQA}),
    "pointwise log": ("pointwise", {"shift": "-log_length", "activation": "sigmoid", "alpha": 0.0, **GQA}),
    "linear": ("linear", GQA),
    "linear causal": ("linear", {"causal": True, "feature_map": "relu", "eps": 0.1, "chunk_size": 3, **GQA}),
    "linear upper left": ("linear", {"causal": "upper_left", "normalize": False, **GQA}),
}
FEW = ("softmax lse", "pointwise length", "linear causal")  # that XLA compiles in every run of the tests
BY_NAME = pytest.mark.parametrize("name", CASES)
IN_ARRAYS = pytest.mark.parametrize("in_arrays", [False, True], ids=["tuples", "arrays"])


def call(name, array=np.asarray, in_arrays=False):
    """The op and its gradients, the arrays, the boundaries, cotangents and options."""
    kind, options = CASES[name]
    forward, vjp = (getattr(packed, f"{kind}_attention_packed{end}") for end in ("", "_vjp"))
    rng = np.random.default_rng(1)
    total = {name: edges[-1] for name, edges in EDGES.items()}
    shapes = {"q": (total["q"], 4, 8), "k": (total["k"], 2, 8), "v": (total["k"], 2, 6)}
    arrays = [array(rng.normal(size=shape)) for shape in shapes.values()]
    cotangents = [array(rng.normal(size=(total["q"], 4, *end))) for end in ((6,), ())[: 1 + ("lse" in name)]]
    edges = tuple(array(np.array(edges)) for edges in TUPLES) if in_arrays else TUPLES
    given = {option: array(x) if hasattr(x, "shape") else x for option, x in options.items()}
    return forward, vjp, arrays, edges, cotangents, given


def parts(found):
    """The arrays of an answer."""
    if isinstance(found, dict):
        return list(found.values())
    return list(found) if isinstance(found, tuple) else [found]


def near(found, golden, bound):
    """An lse without keys is -inf on both sides."""
    for a, b in zip(parts(found), parts(golden), strict=True):
        size = np.abs(b, where=np.isfinite(b), out=np.ones(b.shape)).max()
        np.testing.assert_allclose(a, b, rtol=0, atol=bound * max(1.0, float(size)))


@IN_ARRAYS
@BY_NAME
def test_numpy(name, in_arrays):
    forward, vjp, arrays, edges, cotangents, options = call(name, in_arrays=in_arrays)
    assert next(iter(attnkit.explain(forward, *arrays, *edges, **options).items())) == ("native", None)
    golden = forward(*arrays, *TUPLES, impl="generic", **options)
    for impl in ("native", "auto"):
        near(forward(*arrays, *edges, impl=impl, **options), golden, 1e-12)
    options.pop("return_lse", None)
    golden = vjp(*arrays, *TUPLES, *cotangents, impl="generic", **options)
    near(vjp(*arrays, *edges, *cotangents, impl="native", **options), golden, 1e-12)


@pytest.mark.parametrize("kind", ["softmax", "pointwise", "linear"])
def test_sequences_do_not_see_one_another(kind):
    forward, _, arrays, edges, _, options = call(kind, in_arrays=True)
    golden = forward(*arrays, *edges, impl="native", **options)
    for x, bounds in zip(arrays, (EDGES["q"], EDGES["k"], EDGES["k"]), strict=True):
        x[bounds[4] :] = np.nan
    found = forward(*arrays, *edges, impl="native", **options)
    last = EDGES["q"][4]
    assert np.array_equal(found[:last], golden[:last])
    assert np.isnan(found[last:]).all()


def test_strides_of_any_kind_and_half_types():
    q, k, v = (RNG.normal(size=(4, 8, n)).astype(np.float16).transpose(2, 0, 1) for n in (9, 13, 13))
    edges = ((0, 4, 9), (0, 6, 13))
    found, golden = (
        attnkit.softmax_attention_packed(q[:, ::-1], k, v[..., ::2], *edges, impl=impl)
        for impl in ("native", "generic")
    )
    assert found.dtype == np.float16
    assert found.flags.c_contiguous
    assert not tolerance.measure("o", found, tolerance.limit(golden.astype(float), "float16")).failures


def test_nothing():
    empty = np.zeros((0, 4, 8))
    for edges in ((0,), (0, 0, 0)):
        assert attnkit.softmax_attention_packed(empty, empty, empty, edges, edges, impl="native").shape == (0, 4, 8)


@pytest.mark.parametrize("edges", [(0, 5, 3, 9), (1, 5, 9, 9), (0, 5, 9, 8), (0, 5, 9, 10), (0, -1, 9, 9)])
def test_boundaries_in_arrays_are_checked(edges):
    x, right, wrong = RNG.normal(size=(9, 2, 4)), np.array((0, 5, 7, 9)), np.array(edges)
    for pair in ((wrong, right), (right, wrong)):
        with pytest.raises(ValueError, match="linear_attention_packed: cu_seqlens_q and cu_seqlens_k must rise"):
            attnkit.linear_attention_packed(x, x, x, *pair, impl="native")


def test_what_is_refused_is_named():
    x, edges = RNG.normal(size=(9, 2, 4)), (0, 4, 9)
    reason = attnkit.explain(attnkit.linear_attention_packed, x, x, x, edges, edges, feature_map=np.exp)["native"]
    assert reason.startswith("a feature map of your own")
    with pytest.raises(NotImplementedError, match=r"linear_attention_packed: .*native: a feature map of your own"):
        attnkit.linear_attention_packed(x, x, x, edges, edges, feature_map=np.exp, impl="native")


def test_a_cotangent_that_is_not_aligned_is_named():
    x, edges = RNG.normal(size=(9, 2, 4)), (0, 4, 9)
    do = np.frombuffer(bytes(x.nbytes + 1), x.dtype, x.size, offset=1).reshape(x.shape)
    reason = attnkit.explain(attnkit.softmax_attention_packed_vjp, x, x, x, edges, edges, do)["native"]
    assert reason == "an array is not aligned to its elements"


# ---------------------------------------------------------------------------------------------- torch


@IN_ARRAYS
@BY_NAME
def test_torch_once_and_twice_differentiated(name, in_arrays):
    torch = pytest.importorskip("torch")
    forward, _, arrays, edges, _, options = call(name, torch.tensor, in_arrays)
    leaves, found = [x.requires_grad_() for x in arrays], []
    for impl in ("native", "generic"):
        outputs = parts(forward(*leaves, *edges, impl=impl, **options))
        energy = sum(torch.where(x > -1e3, x, 0).square().sum() for x in outputs)
        first = torch.autograd.grad(energy, leaves, create_graph=True)
        found.append((*outputs, *first, *torch.autograd.grad(sum(x.square().sum() for x in first), leaves)))
    torch.testing.assert_close(*found)


@IN_ARRAYS
@pytest.mark.parametrize("name", ["softmax lse", "pointwise length", "linear causal"])
def test_torch_compiled_as_one_graph_and_mapped(name, in_arrays):
    torch = pytest.importorskip("torch")
    forward, _, arrays, edges, _, options = call(name, torch.tensor, in_arrays)

    def function(*arrays):
        return tuple(parts(forward(*arrays, *edges, impl="native", **options)))

    golden = function(*arrays)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*(x.requires_grad_() for x in arrays)), golden)
    q, k, v = (x.detach() for x in arrays)
    found = torch.func.vmap(lambda q: function(q, k, v))(torch.stack([q, -q]))
    each = zip(function(q, k, v), function(-q, k, v), strict=True)
    torch.testing.assert_close(found, tuple(torch.stack(pair) for pair in each))


@IN_ARRAYS
@pytest.mark.parametrize("op", OPS)
def test_opcheck(op, in_arrays):
    torch = pytest.importorskip("torch")
    from attnkit.backends.torch import custom, native

    _, _, (q, k, v), edges, _, _ = call("softmax", torch.tensor, in_arrays)
    leaves = {name: x.requires_grad_() for name, x in (("q", q), ("k", k), ("v", v))}
    boundaries = dict(zip(EDGES_OF_PLANS, edges, strict=True))
    names, tensors, text = custom.encoded({**leaves, **boundaries, "enable_gqa": True, "outputs": "o"})
    torch.library.opcheck(native.CUSTOM.forward, (op, tensors, names, text))


# ---------------------------------------------------------------------------------------------- JAX


@pytest.mark.parametrize(
    ("name", "in_arrays"),
    [("softmax", False), ("linear", False)]
    + [pytest.param(name, True, marks=() if name in FEW else pytest.mark.referee) for name in CASES],
)
def test_jax_under_jit_and_vmap(name, in_arrays):
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    def single(x):
        return jnp.asarray(x, "float32" if x.dtype == float else "int32")

    forward, _, arrays, edges, _, options = call(name, single, in_arrays)

    def function(impl):
        if in_arrays:
            return lambda *given: parts(forward(*given, impl=impl, **options))
        return lambda *given: parts(forward(*given, *edges, impl=impl, **options))

    def energy(impl):
        return lambda *given: sum((jnp.where(x > -1e3, x, 0) ** 2).sum() for x in function(impl)(*given))

    given = (*arrays, *edges) if in_arrays else arrays
    for make in (function, lambda impl: jax.grad(energy(impl), (0, 1, 2))):
        found, golden = (tuple(jax.jit(make(impl))(*given)) for impl in ("native", "generic"))
        near(found, golden, 1e-4)
        q, *others = given
        mapped = jax.jit(jax.vmap(make("native"), (0, *(None for _ in others))))(jnp.stack([q, q]), *others)
        near(tuple(x[1] for x in mapped), found, 1e-6)


def test_jax_differentiated_twice_and_boundaries_mapped():
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    forward, _, arrays, edges, _, options = call("softmax causal", lambda x: jnp.asarray(x, "float32"))
    cu = tuple(jnp.asarray(x, "int32") for x in edges)

    def twice(impl):
        pull = jax.grad(lambda *given: (forward(*given, *cu, impl=impl, **options) ** 2).sum(), (0, 1, 2))
        return jax.jit(jax.grad(lambda *given: sum((x**2).sum() for x in pull(*given)), (0, 1, 2)))

    near(twice("native")(*arrays), twice("generic")(*arrays), 1e-4)
    other = tuple(jnp.array([0, *(0 * x for x in e[1:-1]), e[-1]], "int32") for e in cu)
    pairs = [jnp.stack(pair) for pair in zip(cu, other, strict=True)]
    mapped = jax.vmap(lambda a, b: forward(*arrays, a, b, impl="native", **options))(*pairs)
    for found, (a, b) in zip(mapped, (cu, other), strict=True):
        near(found, forward(*arrays, a, b, impl="generic", **options), 1e-5)
    with pytest.raises(NotImplementedError, match=r"softmax_attention_packed: .*native: forward mode"):
        jax.jvp(lambda q: forward(q, *arrays[1:], *cu, impl="native", **options), arrays[:1], arrays[:1])
