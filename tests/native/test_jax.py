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


def assert_second_derivatives(energy_of):
    """Those by q and k of a function of q, k and v that an implementation makes, beside those of generic."""

    def second(impl):
        slope = jax.grad(energy_of(impl), (0, 1))
        return jax.jit(jax.grad(lambda q, k: sum((x**2).sum() for x in slope(q, k, V)), (0, 1)))(Q, K)

    found, golden = second("native"), second("generic")
    size = max(float(jnp.abs(x).max()) for x in golden)
    assert all(float(jnp.abs(a - b).max()) <= BOUND * max(1.0, size) for a, b in zip(found, golden, strict=True))


def assert_mapped(function, axes):
    """vmap over three items is one call after the other."""
    stacked = [normal(3, *x.shape) if axis == 0 else x for x, axis in zip((Q[0], K[0], V[0]), axes, strict=True)]
    single = [function(*(x[i] if a == 0 else x for x, a in zip(stacked, axes, strict=True))) for i in range(3)]
    assert near(jax.vmap(function, axes)(*stacked), jax.tree.map(lambda *x: jnp.stack(x), *single))


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
    options = {"dropout": (0.3, seed), "bias": normal(5, 1), **GQA}
    assert_mapped(lambda q, k, v: attnkit.softmax_attention(q, k, v, impl="native", **options), axes)
    assert_mapped(jax.grad(energy(attnkit.softmax_attention, "native", **options), (0, 1, 2)), axes)


def test_vmap_twice_and_with_a_seed_for_every_element():
    def function(q, seed):
        return attnkit.pointwise_attention(q, K[0], V[0], impl="native", dropout=(0.3, seed), **GQA)

    q, seeds = normal(2, 3, *Q[0].shape), jnp.arange(6).reshape(2, 3)
    found = jax.vmap(jax.vmap(function))(q, seeds)
    assert near(found, jnp.stack([jnp.stack([function(q[i, j], seeds[i, j]) for j in range(3)]) for i in range(2)]))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_second_derivatives(op):
    assert_second_derivatives(lambda impl: energy(op, impl, dropout=(0.3, 5), **GQA))


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


def test_a_cotangent_of_another_dtype():
    do, dlse = normal(*Q.shape), normal(*Q.shape[:-1]).astype("bfloat16")
    assert near(*(attnkit.softmax_attention_vjp(Q, Q, Q, do, dlse, impl=impl) for impl in ("native", "generic")))


def test_forward_mode_is_refused_by_name():
    with pytest.raises(NotImplementedError, match=r"native: forward mode"):
        jax.jvp(lambda q: attnkit.softmax_attention(q, Q, Q, impl="native"), (Q,), (Q,))


def test_an_older_jax_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 7, 2))
    with pytest.raises(NotImplementedError, match=r"native: needs JAX 0\.8\.2"):
        attnkit.softmax_attention(Q, Q, Q, impl="native")


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


def test_forward_mode_of_a_part_of_a_state_is_seen():
    x, state = Q[0], (normal(4, 8, 8), jnp.abs(normal(4, 8)))

    def function(impl):
        return lambda s: attnkit.linear_attention(x, x, x, initial_state=(s, state[1]), impl=impl)

    def forward_mode(s, impl):
        return jax.jvp(function(impl), (s,), (s,))

    assert near(*(jax.jit(forward_mode, static_argnums=1)(state[0], impl) for impl in ("auto", "generic")))
    with pytest.raises(NotImplementedError, match=r"native: forward mode"):
        jax.jvp(function("native"), state[:1], state[:1])


# ---------------------------------------------------------------------------------------------- statistics of rows

STATISTICS = {
    "softmax": (attnkit.softmax_attention, {"dropout": (0.3, 5)}),
    "causal": (attnkit.reluformer_attention, {"causal": True}),
    "signed": (attnkit.pointwise_attention, {"activation": "gelu", "fields": ("total", "maximum", "visible")}),
    "mask": (attnkit.sparsemax_attention, OPTIONS["mask"]),
    "lengths": (attnkit.entmax_attention, {"alpha": 1.2, **OPTIONS["key_lengths"]}),
    "bias": (attnkit.gaussian_attention, OPTIONS["bias"]),
}
BY_KIND = pytest.mark.parametrize("kind", STATISTICS)


def statistics(kind, impl):
    """A function of q, k and v: o, statistics beside it and statistics alone."""
    op, chosen = STATISTICS[kind]
    options = {**chosen, **GQA, "impl": impl}
    alone = {name: x for name, x in options.items() if name != "dropout"}

    def function(q, k, v):
        return (
            *attnkit.attention_with_statistics(op, q, k, v, **options),
            attnkit.row_statistics(op, q, k, **alone),
        )

    return function


def energy_of(function):
    return lambda *arrays: sum((i + 1) * jnp.sin(x).mean() for i, x in enumerate(jax.tree.leaves(function(*arrays))))


@BY_KIND
def test_statistics_and_their_gradients(kind):
    for make in (lambda f: f, lambda f: jax.grad(energy_of(f), (0, 1, 2))):
        assert near(*(jax.jit(make(statistics(kind, impl)))(Q, K, V) for impl in ("native", "generic")))


@BY_KIND
def test_explicit_gradients_of_statistics(kind):
    op, chosen = STATISTICS[kind]
    _, rows, alone = jax.jit(statistics(kind, "generic"))(Q, K, V)
    cotangents = {"do": normal(2, 4, 5, 6), "dstats": jax.tree.map(jnp.cos, rows)}
    without = {name: x for name, x in chosen.items() if name != "dropout"}

    def gradients(impl):
        return (
            attnkit.attention_with_statistics_vjp(op, Q, K, V, **cotangents, impl=impl, **GQA, **chosen),
            attnkit.row_statistics_vjp(op, Q, K, jax.tree.map(jnp.cos, alone), impl=impl, **GQA, **without),
        )

    assert near(gradients("native"), jax.jit(lambda: gradients("generic"))())


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, 0), (None, None, 0), (0, 0, 0)])
def test_statistics_mapped(axes):
    function = statistics("softmax", "native")
    assert_mapped(function, axes)
    assert_mapped(jax.grad(energy_of(function), (0, 1, 2)), axes)


@pytest.mark.parametrize(
    "kind", [kind if kind == "signed" else pytest.param(kind, marks=pytest.mark.referee) for kind in STATISTICS]
)
def test_statistics_differentiated_twice(kind):
    assert_second_derivatives(lambda impl: energy_of(statistics(kind, impl)))


def test_counts_alone_have_no_gradient():
    def counted(q):
        return attnkit.row_statistics(attnkit.sparsemax_attention, q, K, fields=("nonzero",), impl="native", **GQA)[4]

    assert float(counted(Q).max()) > 1
    assert not jax.grad(lambda q: counted(q).sum())(Q).any()
    twice = jax.grad(lambda q: (jax.grad(lambda q: counted(q).sum())(q) ** 2).sum())
    assert not jax.jit(twice)(Q).any()


def test_forward_mode_of_statistics_is_refused_by_name():
    with pytest.raises(NotImplementedError, match=r"row_statistics: .*native: forward mode"):
        jax.jvp(lambda q: attnkit.row_statistics(attnkit.softmax_attention, q, K, impl="native", **GQA), (Q,), (Q,))
