"""A score function that only the record knows, wherever it stands there: computed by it, or refused by its name.

Kernels have tables of their own. None may answer with the function that stands where the new one does in another table.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
import torch

import attnkit
from attnkit._core import activations, dispatch
from attnkit._core.special import logistic, softplus
from attnkit.backends.cupy import cuda
from attnkit.backends.cupy import statistics as cupy_statistics
from attnkit.backends.native import lower

from .arrays import assert_agrees, to_numpy

CALL = dict(zip("qkv", np.random.default_rng(5).normal(size=(3, 2, 9, 4)).astype(np.float32), strict=True))
LIBRARIES: dict[str, Callable[..., Any]] = {"numpy": np.asarray, "torch": torch.tensor, "jax": jax.numpy.asarray}
KNOWN = dict(activations.ACTIVATIONS)
PLACES = {"first": 0, "middle": 4, "last": len(KNOWN)}
EDGES = (0, 9)
WITHOUT_KERNEL: dict[str, set[str]] = {"native": set(), "triton": set(), "cuda": set()}
"""Score functions of the record that a table of kernels lacks on purpose: other implementations serve them."""


def tanh_of_softplus(xp: Any, s: Any) -> Any:
    return xp.tanh(softplus(xp, s))


def d_mish(xp: Any, s: Any) -> Any:
    t = tanh_of_softplus(xp, s)
    return t + s * (1.0 - t * t) * logistic(xp, s)


MISH = activations.Activation("mish", lambda xp, s: s * tanh_of_softplus(xp, s), d_mish, signed=True, growth=1)
EXP = activations.Activation("exp", lambda xp, s: xp.exp(s), lambda xp, s: xp.exp(s), growth=1)
"""This name is one that kernels for GPUs use themselves, for Gaussian attention."""


def forget() -> None:
    dispatch._choices.clear()
    lower.prepare.cache_clear()
    lower.refusal.cache_clear()


def plant(monkeypatch: pytest.MonkeyPatch, place: str, *rows: Any) -> None:
    """Put rows into a copy of the record, and the copy in its place in every module that has it."""
    table = list(KNOWN.items())
    table[PLACES[place] : PLACES[place]] = [(row.name, row) for row in rows]
    copy, record, names = dict(table), activations.ACTIVATIONS, activations.NAMES
    for module in [module for name, module in sys.modules.items() if name.split(".")[0] == "attnkit"]:
        for name, value in [*vars(module).items()]:
            if value is record or value is names:
                monkeypatch.setattr(module, name, copy if value is record else tuple(copy))


@pytest.fixture(params=PLACES)
def planted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plant(monkeypatch, request.param, MISH, EXP)
    forget()
    yield
    monkeypatch.undo()
    forget()


def exact(activation: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """o and the gradients for do = v of mish and exp, with alpha = 0, in float64."""
    q, k, v = (x.astype(np.float64) for x in CALL.values())
    s = q @ k.swapaxes(-1, -2) / 2.0
    t = np.tanh(np.logaddexp(s, 0.0))
    h, slope = (s * t, t + s * (1 - t * t) / (1 + np.exp(-s))) if activation == "mish" else (np.exp(s), np.exp(s))
    ds = slope * (v @ v.swapaxes(-1, -2)) / 2.0
    return h @ v, {"q": ds @ k, "k": ds.swapaxes(-1, -2) @ q, "v": h.swapaxes(-1, -2) @ v}


def tokens_first(x: Any) -> Any:
    return x.swapaxes(0, 1)


def calls(library: str, activation: str, **options: Any) -> dict[str, Callable[[], Any]]:
    """By what is computed: o of an op, in the order of `exact`."""
    q, k, v = (LIBRARIES[library](x) for x in CALL.values())
    options |= {"activation": activation, "alpha": 0.0}
    packed = [tokens_first(x) for x in (q, k, v)]
    op = attnkit.pointwise_attention
    return {
        "o": partial(op, q, k, v, **options),
        "grads": partial(attnkit.pointwise_attention_vjp, q, k, v, v, **options),
        "packed": lambda: tokens_first(attnkit.pointwise_attention_packed(*packed, EDGES, EDGES, **options)),
        "beside statistics": lambda: attnkit.attention_with_statistics(
            op.__name__, q, k, v, fields=("total",), **options
        )[0],
    }


@pytest.mark.parametrize("activation", ["mish", "exp"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_it_is_computed_by_the_bodies_that_call_h(library: str, activation: str, planted: None) -> None:
    """Also where `auto` asks the compiled library first."""
    o, grads = exact(activation)
    for impl in ("auto", "generic", "blocked"):
        for what, call in calls(library, activation, impl=impl).items():
            if what == "grads":
                for name, x in call().items():
                    assert_agrees(x, grads[name])
            elif what == "o" or impl != "blocked":  # which serves no others
                assert_agrees(call(), o)


@pytest.mark.parametrize("activation", ["mish", "exp"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_compiled_library_refuses_it_by_name(library: str, activation: str, planted: None) -> None:
    if attnkit.native_status().level is None:
        pytest.skip(str(attnkit.native_status().reason))
    for call in calls(library, activation, impl="native").values():
        with pytest.raises(NotImplementedError, match=f"no kernel of native has the activation '{activation}'"):
            call()


@pytest.fixture(scope="module")
def before() -> dict[tuple[str, str], np.ndarray]:
    """What the compiled library computes of those that it has, with the record as it is."""
    if attnkit.native_status().level is None:
        return {}
    served = [name for name in KNOWN if name not in WITHOUT_KERNEL["native"]]
    return {(x, name): to_numpy(calls(x, name, impl="native")["o"]()) for x in LIBRARIES for name in served}


@pytest.mark.usefixtures("planted")
def test_the_others_are_what_they_were(before: dict[tuple[str, str], np.ndarray]) -> None:
    for (library, name), expected in before.items():
        assert np.array_equal(to_numpy(calls(library, name, impl="native")["o"]()), expected), name


Asked = Iterator[Callable[..., str | None]]


def of_native() -> Asked:
    for x in LIBRARIES:
        q, k, v = (LIBRARIES[x](y) for y in CALL.values())
        yield lambda activation, q=q, k=k, v=v: attnkit.explain(
            attnkit.pointwise_attention, q, k, v, activation=activation
        )["native"]


def of_triton() -> Asked:
    """Of torch and JAX."""
    from attnkit.backends.jax.triton import pointwise as of_jax
    from attnkit.backends.torch.triton import packed, pointwise, statistics

    q, k, v = (torch.tensor(x) for x in CALL.values())
    yield partial(pointwise.unsupported, q, k, v)
    yield partial(packed.unsupported, q, k, v, EDGES, EDGES)
    yield partial(statistics.unsupported, q, k, op=attnkit.pointwise_attention.__name__)
    yield partial(of_jax.unsupported_options, *(jax.numpy.asarray(x) for x in CALL.values()))


def of_cuda() -> Asked:
    q, k, v = CALL.values()
    for op in (attnkit.pointwise_attention, attnkit.pointwise_attention_packed):
        yield partial(cuda.SERVED[op][2], q, k, v)
    yield partial(cupy_statistics.unsupported_options, q, k, op=attnkit.pointwise_attention.__name__)


@pytest.fixture(params=[of_native, of_triton, of_cuda])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Asked]:
    """A name, and what its tables say of a call; on this machine, whatever its devices."""
    name = request.param.__name__.removeprefix("of_")
    if name == "native" and attnkit.native_status().level is None:
        pytest.skip(str(attnkit.native_status().reason))
    if name == "triton":
        pytest.importorskip("triton", minversion="3.6", reason="no Triton that the kernels take")
        from attnkit.backends.torch.triton import pointwise

        monkeypatch.setattr(pointwise, "unsupported_device", lambda q: None)
    return name, request.param()


def test_kernels_have_all_score_functions_but_those_named_here(kernels: tuple[str, Asked]) -> None:
    name, asked = kernels
    for unsupported in asked:
        refused = {activation for activation in KNOWN if unsupported(activation=activation) is not None}
        assert refused == WITHOUT_KERNEL[name]


@pytest.mark.usefixtures("planted")
def test_kernels_are_asked_by_name(kernels: tuple[str, Asked]) -> None:
    name, asked = kernels
    for unsupported in asked:
        for activation in ("mish", "exp"):
            assert unsupported(activation=activation) == f"no kernel of {name} has the activation {activation!r}"
        for activation in KNOWN:
            assert (unsupported(activation=activation) is None) == (activation not in WITHOUT_KERNEL[name])
