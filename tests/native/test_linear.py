"""Linear attention by the library: every option, states, gradients, and every way in from NumPy, torch and JAX."""

import numpy as np
import pytest

import attnkit
from attnkit.backends.native import linear

pytestmark = pytest.mark.usefixtures("library")
BY_NAME = pytest.mark.parametrize("name", [name for name in linear.OPS if name not in linear.RECURRENT])
SIZES = [
    (5, 7, 8, 6),
    (1, 300, 16, 16),
    (130, 100, 20, 17),
    (70, 140, 16, 32),
    (140, 140, 33, 24),
    (0, 5, 4, 4),
    (5, 0, 4, 4),
    (6, 6, 8, 0),
]
"""Queries, keys, features and values: segments that both have, that one has, and neither."""
BATCH, HEADS = 2, 4
OPTIONS = ("plain", "mask", "key_lengths", "query_mask", "masks and states", "states", "groups", "broadcast")


def leaves(x):
    """The arrays of an answer, in order."""
    if isinstance(x, dict):
        x = tuple(x.values())
    return [y for part in x for y in leaves(part)] if isinstance(x, tuple) else [x]


PROJECTED = 12
PROJECTION = {"performer_attention": lambda d: (attnkit.orthogonal_features(PROJECTED, d, 0),)}
FEATURES = {"cosine_attention": lambda d: d + 1, "performer_attention": lambda d: PROJECTED}
LEVELS = {"performer_attention": lambda f: (), "efficient_attention": lambda f: (f,)}
"""By op: the projection, how many features there are, and the shape of the level of a state."""


def call(name, sizes, option, causal, seed=0):
    """q, k, v, the projection if there is one, and do; and options, of which a state may be one."""
    queries, keys, d, e = sizes
    rng = np.random.default_rng(seed)
    groups, broadcast = option == "groups", option == "broadcast"
    shared = HEADS // 2 if groups else HEADS
    k_lead, v_lead = ((1, HEADS), (HEADS,)) if broadcast else ((BATCH, shared),) * 2
    shapes = ((BATCH, HEADS, queries, d), (*k_lead, keys, d), (*v_lead, keys, e), (BATCH, HEADS, queries, e))
    arrays = [rng.normal(size=shape) for shape in shapes]
    arrays[3:3] = PROJECTION.get(name, lambda d: ())(d)
    options = {"causal": causal, "enable_gqa": groups}
    if option.startswith("mask"):
        options["mask"] = rng.random((BATCH, 1, 1, keys)) < 0.7
    if option == "key_lengths":
        options["key_lengths"] = np.array([[keys // 2], [max(keys - 1, 0)]])
    if option in ("query_mask", "masks and states"):
        options["query_mask"] = rng.random((BATCH, 1, queries)) < 0.6
    stateful = option in ("masks and states", "states", "groups", "broadcast")
    if stateful and (not causal or queries == keys):
        f = FEATURES.get(name, lambda d: d)(d)
        state = rng.random((BATCH, shared, f, e)), rng.random((1, shared, f))
        state[1][..., 0] += 3.0
        if name in LEVELS:
            state += (rng.normal(size=(BATCH, shared, *LEVELS[name](f))),)
        options["initial_state"] = state
    return arrays, options, stateful


def errors(found, golden):
    """Relative to the largest entry of each array, 1e-3 at least."""
    for a, b in zip(leaves(found), leaves(golden), strict=True):
        assert a.shape == b.shape
        if b.size:
            assert np.array_equal(a == -np.inf, b == -np.inf)
            a, b = (np.where(x == -np.inf, 0.0, x) for x in (a, b))
            yield float(np.abs(a - b).max()) / max(1e-3, float(np.abs(b).max()))


@pytest.mark.parametrize("causal", [False, True, "upper_left"])
@pytest.mark.parametrize("option", OPTIONS)
@BY_NAME
def test_outputs_states_and_gradients(name, option, causal):
    op, vjp = getattr(attnkit, name), getattr(attnkit, f"{name}_vjp")
    for sizes in SIZES:
        (*arrays, do), options, stateful = call(name, sizes, option, causal)
        found, golden = (op(*arrays, impl=impl, return_state=stateful, **options) for impl in ("native", "generic"))
        assert max(errors(found, golden), default=0) < 1e-12
        if stateful:
            first, *rest = (np.tanh(x) for x in golden[1])
            options["dstate"] = (np.broadcast_to(0.5, first.shape), *rest)
        found, golden = (vjp(*arrays, do, impl=impl, **options) for impl in ("native", "generic"))
        assert max(errors(found, golden), default=0) < 1e-9


@pytest.mark.parametrize(
    "options",
    [
        {"feature_map": "relu"},
        {"feature_map": "relu", "eps": 0.0},
        {"feature_map": "identity", "scale": -0.5},
        {"normalize": False},
        {"scale": 0.25, "eps": 0.5},
    ],
    ids=str,
)
def test_options_of_linear_attention(options):
    (q, k, v, do), common, _ = call("linear_attention", (70, 70, 16, 16), "plain", True)
    for function, arrays in ((attnkit.linear_attention, (q, k, v)), (attnkit.linear_attention_vjp, (q, k, v, do))):
        found, golden = (function(*arrays, impl=impl, **common, **options) for impl in ("native", "generic"))
        assert max(errors(found, golden)) < 1e-12


def test_a_denominator_at_its_floor_has_no_slope():
    (q, k, v, do), options, _ = call("cosine_attention", (70, 70, 8, 6), "plain", True)
    options["initial_state"] = (np.zeros((9, 6)), np.full(9, -90.0))
    found, golden = (
        attnkit.cosine_attention_vjp(q, k, v, do, impl=impl, **options)["q"] for impl in ("native", "generic")
    )
    assert np.abs(found - golden).max() < 1e-9 * np.abs(golden).max()
    assert np.abs(golden).max() > 1e4  # some are at their floor


@pytest.mark.parametrize("causal", [False, True])
def test_a_level_has_the_gradient_of_the_largest_exponent(causal):
    """Of exponents near 0, whose features are all 1 but for rounding."""
    arrays, options, _ = call("performer_attention", (5, 5, 3, 2), "plain", causal)
    q, k, v, projection, do = arrays
    shapes = (PROJECTED, 2), (PROJECTED,)
    dstate = (*(np.zeros((BATCH, HEADS, *shape)) for shape in shapes), np.ones((BATCH, HEADS)))
    ours, golden = (
        attnkit.performer_attention_vjp(
            1e-18 * q, 1e-18 * k, v, projection, 0 * do, dstate=dstate, impl=impl, **options
        )
        for impl in ("native", "generic")
    )
    assert np.abs(golden["k"]).max() > 0.1
    assert max(errors(ours, golden)) < 1e-12


@pytest.mark.parametrize("stateful", [False, True])
@BY_NAME
def test_steps(name, stateful):
    step, vjp = (getattr(attnkit, f"{name}_{end}") for end in ("step", "step_vjp"))
    (*arrays, do), options, _ = call(name, (1, 1, 8, 6), "groups", False)
    state = options.pop("initial_state")
    state = state if stateful else None
    del options["causal"]
    q, k, v, do = (x[..., 0, :] for x in (*arrays[:3], do))
    found, golden = (step(state, q, k, v, *arrays[3:], impl=impl, **options) for impl in ("native", "generic"))
    assert max(errors(found, golden)) < 1e-12
    options["dstate"] = tuple(np.tanh(x) for x in golden[1])
    found, golden = (vjp(state, q, k, v, *arrays[3:], do, impl=impl, **options) for impl in ("native", "generic"))
    assert found.keys() == golden.keys()
    assert max(errors(found, golden)) < 1e-11


def test_a_state_alone_is_differentiated_along_cotangents_of_any_strides_and_twice():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    q, k, v = torch.randn(3, 2, 5, 4, dtype=torch.float64).requires_grad_()
    cotangent = torch.randn(4, 4, dtype=torch.float64).expand(2, 4, 4)
    found = []
    for impl, given in (("native", cotangent), ("native", cotangent.contiguous()), ("generic", cotangent)):
        _, (state, _) = attnkit.linear_attention(q, k, v, causal=True, return_state=True, impl=impl)
        (once,) = torch.autograd.grad(state, k, given, retain_graph=True)
        (dk,) = torch.autograd.grad(state, k, given, create_graph=True)
        found.append((once, *torch.autograd.grad(dk.square().sum(), (k, v))))
    torch.testing.assert_close(found[:2], [found[2]] * 2)


@BY_NAME
def test_calls_that_are_remembered(name):
    names = ("q", "k", "v", "projection")
    for seed in range(3):
        (*arrays, _), options, _ = call(name, (9, 9, 8, 6), "mask", True, seed)
        golden = getattr(attnkit, name)(*arrays, impl="generic", **options)
        for n in (1, 3, 4):
            given = dict(zip(names[n:], arrays[n:], strict=False))
            for _ in range(2):
                found = getattr(attnkit, name)(*arrays[:n], impl="native", **given, **options)
                assert max(errors(found, golden)) < 1e-12


def test_rounding_errors_do_not_grow_with_the_number_of_tokens():
    n, one = 1 << 17, np.float32(0.1)
    v = np.full((n, 1), one)
    x = np.full((n, 4), np.float32(-0.3))
    for causal in (False, True):
        o = attnkit.linear_attention(x, x, v, causal=causal, eps=0.0, impl="native")
        assert np.abs(o / one - 1).max() < 2e-6


@BY_NAME
def test_the_past_does_not_depend_on_the_future(name):
    op = getattr(attnkit, name)
    (*arrays, _), _, _ = call(name, (150, 150, 16, 16), "plain", True)
    before = op(*arrays, causal=True, impl="native")
    for x in arrays[:3]:
        x[..., 100:, :] = 7.0
    after = op(*arrays, causal=True, impl="native")
    assert np.array_equal(before[..., :100, :], after[..., :100, :])
    assert not np.array_equal(before, after)


def test_what_is_refused_is_named():
    (q, k, v, _), _, _ = call("linear_attention", (5, 7, 8, 6), "plain", False)
    for options, reason in (
        ({"mask": np.ones((5, 7), bool)}, "a mask of pairs"),
        ({"feature_map": np.exp}, "a feature map of your own"),
    ):
        told = attnkit.explain(attnkit.linear_attention, q, k, v, **options)["native"]
        assert told.startswith(reason)
        with pytest.raises(NotImplementedError, match=f"native: {reason}"):
            attnkit.linear_attention(q, k, v, impl="native", **options)
        attnkit.linear_attention(q, k, v, **options)


def test_a_refused_step_is_named():
    (q, k, v, _), _, _ = call("linear_attention", (1, 1, 8, 6), "plain", False)
    state = np.zeros((BATCH, HEADS, 8, 6)), np.zeros((BATCH, HEADS, 8))
    step = attnkit.linear_attention_step, state, *(x[..., 0, :] for x in (q, k, v))
    assert attnkit.explain(*step)["native"] is None
    assert attnkit.explain(*step, feature_map=np.exp)["native"].startswith("a feature map of your own")


def test_states_of_one_head_without_an_axis_for_it():
    q, k, v = np.random.default_rng(0).normal(size=(3, 9, 6))
    whole = attnkit.linear_attention(q, k, v, causal=True, impl="generic")
    _, state = attnkit.linear_attention(q[:4], k[:4], v[:4], causal=True, return_state=True, impl="native")
    rest = attnkit.linear_attention(q[4:], k[4:], v[4:], causal=True, initial_state=state, impl="native")
    np.testing.assert_allclose(rest, whole[4:])


def test_states_of_no_items_are_refused():
    (q, k, v, _), _, _ = call("linear_attention", (5, 7, 8, 6), "plain", False)
    with pytest.raises(NotImplementedError, match="native: states of calls without heads or items"):
        attnkit.linear_attention(q[:0], k[:0], v[:0], return_state=True, impl="native")
    assert attnkit.linear_attention(q[:0], k[:0], v[:0], return_state=True)[1][0].shape == (0, HEADS, 8, 6)


def test_a_wrong_state_names_the_function():
    (q, k, v, do), _, _ = call("linear_attention", (5, 7, 8, 6), "plain", False)
    state = np.zeros((BATCH, HEADS, 7, 6)), np.zeros((BATCH, HEADS, 8))
    for function, arrays in ((attnkit.linear_attention, ()), (attnkit.linear_attention_vjp, (do,))):
        with pytest.raises(ValueError, match=f"^{function.__name__}: initial_state's S"):
            function(q, k, v, *arrays, initial_state=state, impl="native")


# ---------------------------------------------------------------------------------------------- torch


def masked_by_heads_of_queries(name, array):
    """q, k and v with half of the heads, and the op with a mask of all of them, which a state could not have."""
    (q, k, v, *projection, _), *_ = call(name, (5, 9, 8, 6), "plain", True)
    mask = array(np.random.default_rng(1).random((BATCH, HEADS, 1, 9)) < 0.7)
    projection = [array(x) for x in projection]

    def function(impl):
        options = {"causal": True, "enable_gqa": True, "mask": mask, "impl": impl}
        return lambda q, k, v: getattr(attnkit, name)(q, k, v, *projection, **options)

    return [array(x) for x in (q, k[:, ::2], v[:, ::2])], function


@BY_NAME
def test_torch_compiled_with_masks_of_the_heads_of_queries(name):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    given, function = masked_by_heads_of_queries(name, torch.tensor)
    given = [x.requires_grad_() for x in given]
    found = torch.compile(function("native"), fullgraph=True, backend="aot_eager")(*given)
    golden = function("generic")(*given)
    torch.testing.assert_close(found, golden)
    torch.testing.assert_close(*(torch.autograd.grad(o.square().sum(), given) for o in (found, golden)))


@pytest.mark.parametrize("name", ["linear_attention"])  # the others have the same rules
def test_jax_mapped_with_masks_of_the_heads_of_queries(name):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    given, function = masked_by_heads_of_queries(
        name, lambda x: jax.numpy.asarray(x, x.dtype if x.dtype == bool else "f4")
    )
    several = jax.numpy.stack([given[0], -given[0]])

    def pull(impl):
        return jax.jit(jax.vmap(jax.grad(lambda q: (function(impl)(q, *given[1:]) ** 2).sum())))(several)

    near([pull("native")], [pull("generic")])


# ---------------------------------------------------------------------------------------------- JAX


def in_jax(name):
    """JAX, arguments of (9, 9, 8, 6), and the op and its energy as functions of them."""
    jax = pytest.importorskip("jax", reason="jax is not installed")
    (*arrays, _), options, _ = call(name, (9, 9, 8, 6), "groups", True)
    given = [jax.numpy.asarray(x, "float32") for x in (*arrays[:3], *options.pop("initial_state"))]
    projection = [jax.numpy.asarray(x, "float32") for x in arrays[3:]]

    def op(impl):
        def run(q, k, v, *state):
            states = {"initial_state": state, "return_state": True}
            o, final = getattr(attnkit, name)(q, k, v, *projection, impl=impl, **states, **options)
            return (o, *final)

        return run

    def energy(impl):
        return lambda *given: sum((x**2).sum() for x in op(impl)(*given))

    return jax, given, op, energy


def near(found, golden, bound=1e-4):
    for a, b in zip(found, golden, strict=True):
        assert a.shape == b.shape
        assert float(abs(a - b).max()) <= bound * max(1.0, float(abs(b).max()))


@BY_NAME
def test_jax_under_jit_and_vmap(name):
    jax, given, op, energy = in_jax(name)
    pull = jax.jit(jax.value_and_grad(energy("native"), tuple(range(len(given)))))
    (*arrays, _), options, _ = call(name, (9, 9, 8, 6), "groups", True)
    o, state = getattr(attnkit, name)(*arrays, return_state=True, impl="generic", **options)
    cotangents = {"do": 2 * o, "dstate": tuple(2 * x for x in state)}
    golden = getattr(attnkit, f"{name}_vjp")(*arrays, **cotangents, impl="generic", **options)
    near(op("native")(*given), (o, *state))
    near(pull(*given)[1], leaves(golden))
    constants = tuple(jax.numpy.asarray(np.tanh(x), "float32") for x in (o, *state))

    def of_constants(*given):
        return jax.vjp(op("native"), *given)[1](constants)

    for mapped in (0, 1):  # the state of keys that are not mapped is one for all
        stacked = [jax.numpy.stack([x, -x]) if i == mapped else x for i, x in enumerate(given)]
        axes = tuple(0 if i == mapped else None for i in range(len(given)))
        for function in (op("native"), lambda *given: pull(*given)[1], of_constants):
            each = [function(*(x[i] if n == mapped else x for n, x in enumerate(stacked))) for i in range(2)]
            golden = [jax.numpy.stack(pair) for pair in zip(*each, strict=True)]
            near(jax.vmap(function, axes)(*stacked), golden)


def test_jax_differentiated_twice():
    jax, given, _, energy = in_jax("linear_attention")

    def twice(impl):
        pull = jax.grad(energy(impl), (0, 1, 2, 3, 4))
        return jax.jit(jax.grad(lambda *given: sum((x**2).sum() for x in pull(*given)), (0, 1, 2, 3, 4)))

    near(twice("native")(*given), twice("generic")(*given), 1e-3)
