"""Nyström attention and SOFT on the three libraries: products by the CPU library's softmax and Gaussian attention."""

import numpy as np
import pytest

import attnkit

pytestmark = pytest.mark.usefixtures("library")
RNG = np.random.default_rng(0)
Q, K, V, DO = (RNG.normal(size=shape) for shape in ((2, 4, 11, 8), (2, 2, 11, 8), (2, 2, 11, 6), (2, 4, 11, 6)))
MARKS = RNG.normal(size=(4, 3, 8))
NYSTROM, SOFT = attnkit.nystrom_attention, attnkit.soft_attention
SEEN = RNG.random((2, 1, 11)) > 0.3
GROUPED = {"num_landmarks": 3, "enable_gqa": True}
CALLS = {
    "nystrom": (NYSTROM, (Q, K, V), GROUPED),
    "nystrom-scale": (NYSTROM, (Q, K, V), GROUPED | {"scale": 0.7, "init": "batch_max"}),
    "nystrom-valid": (NYSTROM, (Q, K, V), GROUPED | {"query_mask": SEEN, "init": "batch_max"}),
    "nystrom-few": (NYSTROM, (Q, K, V), GROUPED | {"key_lengths": np.array([[0], [2]], np.int32)}),
    "nystrom-exact": (NYSTROM, (Q, K, V), GROUPED | {"num_landmarks": 11, "mask": SEEN[:, :, None]}),
    "nystrom-shared": (NYSTROM, (Q, K[0, 0], V[:, :1]), {"num_landmarks": 4, "query_mask": SEEN}),
    "soft": (SOFT, (Q, DO, MARKS), {}),
    "soft-valid": (SOFT, (Q, DO, MARKS), {"query_mask": SEEN, "ridge": 0.01}),
    "soft-marks": (SOFT, (Q, DO, MARKS), {"landmark_mask": RNG.random((4, 3)) > 0.4, "key_lengths": 7}),
    "soft-shared": (SOFT, (Q[0, 0], DO, MARKS[0]), {"inverse_grad": "unrolled", "newton_steps": 3}),
    "soft-start": (SOFT, (Q, DO[:1, :1], MARKS), {"init_scale": 0.5 + 0.4 * RNG.random((2, 4))}),
}
BY_NAME = pytest.mark.parametrize("name", CALLS)


def call(name, array=np.asarray):
    """The op, its arrays and its options."""
    op, arrays, options = CALLS[name]
    converted = {name: array(x) if hasattr(x, "shape") else x for name, x in options.items()}
    return op, [array(x) for x in arrays], converted


def near(found, golden, bound):
    assert found.keys() == golden.keys()
    for name, x in golden.items():
        assert found[name].dtype == x.dtype
        assert found[name].shape == x.shape
        assert float(abs(found[name] - x).max()) <= bound * max(1.0, float(abs(x).max())), name


@BY_NAME
def test_torch_differentiated_twice(name):
    torch = pytest.importorskip("torch")
    op, arrays, options = call(name, torch.tensor)
    leaves = [
        x.requires_grad_() for x in (*arrays, *options.values()) if hasattr(x, "dtype") and x.dtype == torch.float64
    ]
    found = []
    for impl in ("native", "generic"):
        o = op(*arrays, impl=impl, **options)
        grads = torch.autograd.grad((o * torch.tensor(DO)).sum(), leaves, create_graph=True, materialize_grads=True)
        second = torch.autograd.grad(sum((x**2).sum() for x in grads), leaves, materialize_grads=True)
        found.append((o, *grads, *second))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", [pytest.param("nystrom-few", marks=pytest.mark.referee), "soft-valid"])
def test_jax_under_jit_and_differentiated_twice(name):
    jax = pytest.importorskip("jax")
    op, arrays, options = call(name, lambda x: jax.numpy.asarray(x, "float32" if x.dtype == float else x.dtype))
    cotangent = jax.numpy.asarray(DO, "float32")

    def slope(impl):
        def energy(*given):
            return (op(*given, impl=impl, **options) * cotangent).sum()

        return jax.grad(energy, argnums=(0, 1, 2))

    def twice(impl):
        return jax.grad(lambda *given: sum((x**2).sum() for x in slope(impl)(*given)), argnums=(0, 1, 2))

    for function in (slope, twice):
        found, golden = (dict(enumerate(jax.jit(function(impl))(*arrays))) for impl in ("native", "generic"))
        near(found, golden, 2e-3)


@pytest.mark.parametrize("name", ["nystrom-valid", "soft-valid"])
def test_transformations_that_products_refuse(name):
    torch = pytest.importorskip("torch")
    op, (q, *others), options = call(name, torch.tensor)
    mapped = torch.func.vmap(lambda x: op(x, *others, impl="native", **options))(torch.stack([q, -q]))
    golden = torch.stack([op(x, *others, impl="generic", **options) for x in (q, -q)])
    torch.testing.assert_close(mapped, golden)
    with pytest.raises(NotImplementedError, match=rf"{op.__name__}: .*native: derivatives by torch.func"):
        torch.func.grad(lambda x: op(x, *others, impl="native", **options).sum())(q)
    jax = pytest.importorskip("jax")
    op, (q, *others), options = call(name, jax.numpy.asarray)
    with pytest.raises(NotImplementedError, match=rf"{op.__name__}: .*native: forward mode"):
        jax.jvp(lambda x: op(x, *others, impl="native", **options), (q,), (q,))


def test_auto_asks_for_enough_weights():
    few, many = (np.zeros((n, 4), np.float32) for n in (1024, 8192))
    for op, before, own in ((NYSTROM, (few, few, few), {"num_landmarks": 64}), (SOFT, (few, few, few[:64]), {})):
        after = [many if x.shape[0] == 1024 else x for x in before]
        orders = [list(attnkit.explain(op, *arrays, **own)) for arrays in (before, after)]
        assert orders == [["generic", "native"], ["native", "generic"]], op.__name__
