"""The custom calls of XLA: under jit, vmap, checkpoint, and differentiated once and twice."""

import numpy as np
import pytest

import attnkit

jax = pytest.importorskip("jax")
jnp = jax.numpy
pytestmark = pytest.mark.usefixtures("library")
RNG = np.random.default_rng(0)
BOUND = 2e-4


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


Q, K, V = normal(2, 4, 5, 8), normal(2, 2, 7, 8), normal(2, 2, 7, 6)
GQA = {"enable_gqa": True}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "number as seed": {"dropout": (0.3, 2**63 + 5)},
    "array as seed": {"dropout": (0.3, jnp.int32(7))},
    "mask": {"mask": jnp.asarray(RNG.random((5, 7)) > 0.3)},
    "bias": {"bias": normal(4, 1, 7)},
    "key_lengths": {"key_lengths": jnp.asarray([[3], [6]])},
}
OPS = [attnkit.softmax_attention, attnkit.pointwise_attention, attnkit.sigmoid_attention, attnkit.gaussian_attention]


def near(found, golden):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(golden), strict=True)
    return all(float(jnp.abs(a - b).max()) <= BOUND for a, b in pairs)


def energy(op, impl, **options):
    """A function of q, k and v whose second derivatives are not those of its output alone."""
    return lambda q, k, v: (op(q, k, v, impl=impl, **options) ** 2).sum()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_value_and_gradient_under_jit(op, options):
    chosen = OPTIONS[options] | GQA
    found, golden = (
        jax.jit(jax.value_and_grad(energy(op, impl, **chosen), (0, 1, 2)))(Q, K, V) for impl in ("native", "generic")
    )
    assert near(found, golden)


@pytest.mark.parametrize("seed", [5, jnp.int32(5)], ids=["number", "array"])
@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, 0), (0, 0, 0)])
def test_vmap_is_one_call_after_the_other(axes, seed):
    stacked = [normal(3, *x.shape) if axis == 0 else x for x, axis in zip((Q[0], K[0], V[0]), axes, strict=True)]
    options = {"dropout": (0.3, seed), "bias": normal(5, 1), **GQA}
    for function in (
        lambda q, k, v: attnkit.softmax_attention(q, k, v, impl="native", **options),
        jax.grad(energy(attnkit.softmax_attention, "native", **options), (0, 1, 2)),
    ):
        single = [function(*(x[i] if a == 0 else x for x, a in zip(stacked, axes, strict=True))) for i in range(3)]
        golden = jax.tree.map(lambda *x: jnp.stack(x), *single)
        assert near(jax.vmap(function, axes)(*stacked), golden)


def test_vmap_twice_and_with_a_seed_for_every_element():
    def function(q, seed):
        return attnkit.pointwise_attention(q, K[0], V[0], impl="native", dropout=(0.3, seed), **GQA)

    q, seeds = normal(2, 3, *Q[0].shape), jnp.arange(6).reshape(2, 3)
    found = jax.vmap(jax.vmap(function))(q, seeds)
    assert near(found, jnp.stack([jnp.stack([function(q[i, j], seeds[i, j]) for j in range(3)]) for i in range(2)]))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_second_derivatives(op):
    def second(impl):
        slope = jax.grad(energy(op, impl, dropout=(0.3, 5), **GQA), (0, 1))
        return jax.jit(jax.grad(lambda q, k: sum((x**2).sum() for x in slope(q, k, V)), (0, 1)))(Q, K)

    found, golden = second("native"), second("generic")
    size = max(float(jnp.abs(x).max()) for x in golden)
    assert all(float(jnp.abs(a - b).max()) <= BOUND * max(1.0, size) for a, b in zip(found, golden, strict=True))


def test_checkpoint_and_scan():
    def function(impl):
        def step(q, _):
            return attnkit.softmax_attention(q, K, V[..., :1].repeat(8, -1), impl=impl, **GQA), None

        return jax.jit(jax.grad(lambda q: (jax.lax.scan(jax.checkpoint(step), q, length=3)[0] ** 2).sum()))(Q)

    assert near(function("native"), function("generic"))


def test_the_log_of_the_sum_and_its_gradient():
    def both(impl):
        o, lse = attnkit.softmax_attention(Q, Q, Q, return_lse=True, impl=impl)
        return o, lse, jax.grad(lambda q: attnkit.softmax_attention(q, Q, Q, return_lse=True, impl=impl)[1].sum())(Q)

    assert near(both("native"), both("generic"))


def test_forward_mode_is_refused_by_name():
    with pytest.raises(NotImplementedError, match=r"native: forward mode"):
        jax.jvp(lambda q: attnkit.softmax_attention(q, Q, Q, impl="native"), (Q,), (Q,))


def test_under_shard_map():
    """On a mesh of one device: a program as any other."""
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("x",))
    spec = jax.sharding.PartitionSpec("x")
    sharded = jax.shard_map(
        lambda q, k, v: attnkit.pointwise_attention(q, k, v, impl="native", **GQA),
        mesh=mesh,
        in_specs=(spec, spec, spec),
        out_specs=spec,
        check_vma=False,
    )
    assert near(sharded(Q, K, V), attnkit.pointwise_attention(Q, K, V, impl="generic", **GQA))


def test_without_queries_or_keys():
    assert attnkit.softmax_attention(Q[:, :, :0], Q, Q, impl="native").shape == (2, 4, 0, 8)
    assert not attnkit.softmax_attention(Q, Q[:, :, :0], Q[:, :, :0], impl="native").any()
