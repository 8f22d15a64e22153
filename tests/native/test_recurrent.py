"""Gated linear attention and the delta rule by the library: options, states, gradients, and every way in."""

import numpy as np
import pytest

import attnkit
from tests.library.arrays import assert_close
from tests.native.test_linear import leaves, near

pytestmark = pytest.mark.usefixtures("library")
KINDS = {
    "gated": ("gated_linear_attention", "log_gate", None),
    "delta": ("delta_attention", "beta", None),
    "decay of tokens": ("delta_attention", "beta", "log_decay"),
    "decay of features": ("delta_attention", "beta", "log_decay"),
}
BY_KIND = pytest.mark.parametrize("kind", KINDS)
SIZES = [(1, 4, 3), (33, 16, 16), (70, 33, 20), (100, 8, 130), (0, 4, 4), (6, 8, 0)]
"""Tokens, features and values: less than a segment and several, less than a vector and several panels."""
OPTIONS = ("plain", "mask", "key_lengths", "state", "mask and state", "broadcast")
BATCH, HEADS = 2, 3


def arrays_of(kind, sizes, seed=0, lead=(BATCH, HEADS), lead_k=None):
    """{argument: array}; keys are of norm 1 for the delta rule."""
    tokens, d, e = sizes
    rng = np.random.default_rng(seed)
    lead_k = lead if lead_k is None else lead_k
    q, k = rng.normal(size=(*lead, tokens, d)), rng.normal(size=(*lead_k, tokens, d))
    given = {"q": q, "k": k, "v": rng.normal(size=(*lead, tokens, e))}
    gates = -rng.exponential(size=(*lead_k, tokens, d)) * rng.integers(0, 2, size=(tokens, 1))  # some are exactly 0
    if kind == "gated":
        return given | {"log_gate": gates}
    given["k"] = k / np.linalg.norm(k, axis=-1, keepdims=True)
    given["beta"] = 2 * rng.random((*lead_k, tokens))
    if kind != "delta":
        given["log_decay"] = gates if kind == "decay of features" else gates[..., 0]
    return given


def call_of(kind, sizes, option, seed=0):
    """The arguments of a call, and whether it has a state."""
    given = arrays_of(kind, sizes, seed, lead_k=(1, HEADS) if option == "broadcast" else None)
    rng = np.random.default_rng(seed + 1)
    tokens = sizes[0]
    if option.startswith("mask"):
        given["mask"] = rng.random((BATCH, 1, 1, tokens)) < 0.7
    if option == "key_lengths":
        given["key_lengths"] = np.array([[tokens // 2], [max(tokens - 1, 0)]])
    stateful = "state" in option
    if stateful:
        given["initial_state"] = (rng.normal(size=(1, HEADS, *sizes[1:])),)
    return given, stateful


@pytest.mark.parametrize("option", OPTIONS)
@BY_KIND
def test_outputs_states_and_gradients(kind, option):
    name = KINDS[kind][0]
    op, vjp = getattr(attnkit, name), getattr(attnkit, f"{name}_vjp")
    for sizes in SIZES:
        given, stateful = call_of(kind, sizes, option)
        found, golden = (op(**given, impl=impl, return_state=stateful) for impl in ("native", "generic"))
        for a, b in zip(leaves(found), leaves(golden), strict=True):
            assert_close(a, b)
        given["do"] = np.cos(golden[0] if stateful else golden)
        if stateful:
            given["dstate"] = (np.sin(golden[1][0]),)
        ours, theirs = (vjp(**given, impl=impl) for impl in ("native", "generic"))
        assert ours.keys() == theirs.keys()
        for a, b in zip(leaves(ours), leaves(theirs), strict=True):
            assert_close(a, b)


@pytest.mark.parametrize("shared", [False, True], ids=["", "gates of all items"])
@pytest.mark.parametrize("stateful", [False, True], ids=["first", "later"])
@BY_KIND
def test_steps(kind, stateful, shared):
    name = KINDS[kind][0]
    step, vjp = getattr(attnkit, f"{name}_step"), getattr(attnkit, f"{name}_step_vjp")
    given = arrays_of(kind, (1, 8, 6))
    wide = {"q", "k", "v", "log_gate", *(["log_decay"] if kind == "decay of features" else [])}
    given = {f"{name}_t": x[..., 0, :] if name in wide else x[..., 0] for name, x in given.items()}
    if shared:  # with an axis less, but for decays of features, which have one more than beta
        of_all = 0 if kind != "decay of features" else slice(1)
        given = {n: x[of_all] if n in ("log_decay_t", "log_gate_t") else x for n, x in given.items()}
    given["state"] = (np.random.default_rng(1).normal(size=(BATCH, HEADS, 8, 6)),) if stateful else None
    found, golden = (step(**given, impl=impl) for impl in ("native", "generic"))
    for a, b in zip(leaves(found), leaves(golden), strict=True):
        assert_close(a, b)
    given |= {"do_t": np.cos(golden[0]), "dstate": (np.sin(golden[1][0]),)}
    ours, theirs = (vjp(**given, impl=impl) for impl in ("native", "generic"))
    assert ours.keys() == theirs.keys()
    for a, b in zip(leaves(ours), leaves(theirs), strict=True):
        assert_close(a, b)


@BY_KIND
def test_calls_that_are_remembered(kind):
    """Arrays by position and by name, in a second call of the same signature."""
    name, gate, decay = KINDS[kind]
    op = getattr(attnkit, name)
    for seed in range(3):
        given = arrays_of(kind, (9, 8, 6), seed)
        golden = op(**given, impl="generic")
        first, rest = [given[x] for x in ("q", "k", "v", gate)], {x: given[x] for x in (decay,) if x}
        for _ in range(2):
            assert_close(op(**given, impl="native"), golden)
            assert_close(op(*first, **rest, impl="native"), golden)


@BY_KIND
def test_the_past_does_not_depend_on_the_future(kind):
    op = getattr(attnkit, KINDS[kind][0])
    given = arrays_of(kind, (150, 16, 16))
    before = op(**given, impl="native")
    for name in ("q", "k", "v"):
        given[name][..., 100:, :] = 7.0
    after = op(**given, impl="native")
    assert np.array_equal(before[..., :100, :], after[..., :100, :])
    assert not np.array_equal(before, after)


def test_gates_that_are_wider_than_tokens_are_refused_by_name():
    for kind, name in (("gated", "log_gate"), ("delta", "beta"), ("decay of features", "log_decay")):
        op = getattr(attnkit, KINDS[kind][0])
        given = arrays_of(kind, (5, 4, 3), lead=())
        given[name] = np.stack([given[name], given[name] / 2])
        with pytest.raises(NotImplementedError, match=f"native: {name} with more leading axes than q, k and v is"):
            op(**given, impl="native")
        assert op(**given).shape == (2, 5, 3)


# ---------------------------------------------------------------------------------------------- torch and JAX


def energy(op, names, **options):
    """Σ o² + Σ S² as a function of arrays."""

    def function(*arrays):
        o, (S,) = op(**dict(zip(names, arrays, strict=True)), return_state=True, **options)
        return (o**2).sum() + (S**2).sum()

    return function


@BY_KIND
def test_torch_compiled_and_differentiated_twice(kind):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    given = {name: torch.tensor(x, requires_grad=True) for name, x in arrays_of(kind, (9, 8, 6)).items()}
    found = []
    for impl, compiled in (("native", True), ("native", False), ("generic", False)):
        of = energy(getattr(attnkit, KINDS[kind][0]), given, impl=impl)
        of = torch.compile(of, fullgraph=True, backend="aot_eager") if compiled else of
        once = torch.autograd.grad(of(*given.values()), given.values(), create_graph=not compiled)
        more = (
            ()
            if compiled
            else torch.autograd.grad(sum(x.square().sum() for x in once), given.values(), materialize_grads=True)
        )
        found.append((*once, *more))
    torch.testing.assert_close(found[0], found[2][: len(given)])
    torch.testing.assert_close(found[1], found[2])


@BY_KIND
def test_jax_under_jit_and_vmap(kind):
    """Whichever array is mapped: the op tells decays of tokens and of features by their axes."""
    jax = pytest.importorskip("jax", reason="jax is not installed")
    given = {n: jax.numpy.asarray(x, "float32") for n, x in arrays_of(kind, (9, 8, 6), lead=(HEADS,)).items()}
    everything = tuple(range(len(given)))
    ours, generic = (
        jax.jit(jax.value_and_grad(energy(getattr(attnkit, KINDS[kind][0]), given, impl=impl), everything))
        for impl in ("native", "generic")
    )
    whole = generic(*given.values())
    near(jax.tree.leaves(ours(*given.values())), jax.tree.leaves(whole))
    for mapped in everything:
        axes = tuple(0 if n == mapped else None for n in everything)
        halved = [x / 2 if n == mapped else x for n, x in enumerate(given.values())]
        several = [jax.numpy.stack([x, halved[n]]) if n == mapped else x for n, x in enumerate(given.values())]
        golden = jax.tree.map(lambda x, y: jax.numpy.stack([x, y]), whole, generic(*halved))
        for of in (ours, generic)[: 1 + (mapped == everything[-1])]:
            near(jax.tree.leaves(jax.vmap(of, axes)(*several)), jax.tree.leaves(golden))
