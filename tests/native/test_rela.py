"""ReLA on the three libraries: relu attention by the CPU library, followed by the norm."""

import numpy as np
import pytest

import attnkit

from .test_lowrank import near

pytestmark = pytest.mark.usefixtures("library")
RNG = np.random.default_rng(0)
Q, K, V, DO = (RNG.normal(size=shape) for shape in ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6), (2, 5, 24)))
HIDDEN, HEAD = (24,), (6,)
OPTIONS = {
    "plain": (HIDDEN, {}),
    "gate": (HIDDEN, {"gate_weight": RNG.normal(size=HIDDEN), "eps": 1e-3}),
    "head": (HEAD, {"norm_axis": "head", "gate_weight": RNG.normal(size=HEAD)}),
    "causal": (HIDDEN, {"causal": True, "window": (3, None), "scale": 0.2}),
    "masks": (HIDDEN, {"mask": RNG.random((5, 7)) > 0.4, "key_lengths": np.array([[0], [6]], np.int32)}),
    "bias": (HIDDEN, {"bias": RNG.normal(size=(4, 1, 7)), "dropout": (0.3, 5)}),
}
BY_NAME = pytest.mark.parametrize("option", OPTIONS)


def call(option, array=np.asarray):
    """The four arrays, and the options."""
    shape, options = OPTIONS[option]
    arrays = [array(x) for x in (Q, K, V, 1 + 0.1 * np.arange(shape[0]))]
    return arrays, {"enable_gqa": True} | {n: array(x) if hasattr(x, "shape") else x for n, x in options.items()}


def differentiated(options):
    """Names of the options with a gradient."""
    return [name for name in ("gate_weight", "bias") if name in options]


@pytest.mark.parametrize(
    "option", [name if name in ("gate", "masks") else pytest.param(name, marks=pytest.mark.referee) for name in OPTIONS]
)
def test_jax_under_jit_and_differentiated_twice(option):
    jax = pytest.importorskip("jax")
    arrays, options = call(option, lambda x: jax.numpy.asarray(x, "float32" if x.dtype == float else x.dtype))
    moved = dict(zip(("q", "k", "v", "norm_weight"), arrays, strict=True))
    moved |= {name: options.pop(name) for name in differentiated(options)}

    cotangent = jax.numpy.asarray(DO, "float32")

    def energy(impl):
        return lambda given: (attnkit.rela_attention(**given, impl=impl, **options) * cotangent).sum()

    def twice(impl):
        slope = jax.grad(energy(impl))
        return jax.jit(jax.grad(lambda given: sum((x**2).sum() for x in slope(given).values())))

    for function in (lambda impl: jax.jit(jax.grad(energy(impl))), twice):
        near(function("native")(moved), function("generic")(moved), 1e-3)


def test_jax_mapped_and_in_forward_mode():
    jax = pytest.importorskip("jax")
    (q, *others), options = call("gate", lambda x: jax.numpy.asarray(x, "float32"))
    mapped = jax.vmap(lambda q: attnkit.rela_attention(q, *others, impl="native", **options))(jax.numpy.stack([q, -q]))
    for x, found in zip((q, -q), mapped, strict=True):
        near({"o": found}, {"o": attnkit.rela_attention(x, *others, impl="generic", **options)}, 1e-5)
    with pytest.raises(NotImplementedError, match=r"rela_attention: .*native: forward mode"):
        jax.jvp(lambda q: attnkit.rela_attention(q, *others, impl="native", **options), (q,), (q,))
