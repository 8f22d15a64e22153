"""Integers of any dtype and any size: lengths, windows and numbers mean the same in every implementation."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnkit
from attnkit._core import check, integers

from .arrays import assert_agrees, qkv

Q, K, V = qkv(5, 7, dtype="float32")
OPS = (attnkit.pointwise_attention, attnkit.softmax_attention, attnkit.entmax_attention)
LIBRARIES: dict[str, Callable[[Any], Any]] = {"numpy": np.asarray, "torch": torch.tensor, "jax": jnp.asarray}
IMPLS = [(library, impl) for library in LIBRARIES for impl in ("generic", "native", "blocked")]
HUGE = 10**400


def exact(op: Callable[..., Any], **options: Any) -> np.ndarray:
    """By the generic body, in float64, with small integers."""
    return np.asarray(op(*(x.astype("float64") for x in (Q, K, V)), **options, impl="generic"))


def same(library: str, impl: str, given: Any, meant: dict[str, Any], name: str, **more: Any) -> None:
    """An option means the same as others do in every op, once and when the call is repeated."""
    arrays = [LIBRARIES[library](x) for x in (Q, K, V)]
    traced = library == "jax"  # every call anew, which takes long
    for op in OPS[: 1 if traced else None]:
        expected = exact(op, **meant, **more)
        for _ in range(1 if traced else 2):
            assert_agrees(op(*arrays, **{name: given}, **more, impl=impl), expected, dtype="float32")


@pytest.mark.parametrize(("library", "impl"), IMPLS)
def test_windows_of_any_size(library: str, impl: str) -> None:
    for size in (2**31 - 1, 2**63 - 1) if library == "jax" else (2**30, 2**31 - 1, 2**63 - 1, 2**70, np.int64(2**62)):
        same(library, impl, (size, size), {"window": (12, 12)}, "window")
    same(library, impl, (2**70, 0), {"window": (12, 0)}, "window", causal="upper_left")
    same(library, impl, (np.uint8(2), np.int8(1)), {"window": (2, 1)}, "window")


@pytest.mark.parametrize("dtype", check.INTEGERS)
@pytest.mark.parametrize(("library", "impl"), IMPLS[:-1])
def test_lengths_of_any_dtype(library: str, impl: str, dtype: str) -> None:
    """The largest integer of the dtype means all keys; the least one, where it is negative, none."""
    limits = np.iinfo(dtype)
    given = np.array([[3], [limits.max]], dtype)
    arrays = [given] if library == "jax" else []  # NumPy's beside JAX's
    arrays += [] if library == "jax" and dtype.endswith("64") else [LIBRARIES[library](given)]
    for lengths in arrays:
        same(library, impl, lengths, {"key_lengths": np.array([[3], [7]])}, "key_lengths")
    if limits.min < 0:
        none = np.array([[3], [limits.min + 4]], dtype)  # in the lower 32 bits, 4
        lengths = none if library == "jax" else LIBRARIES[library](none)
        same(library, impl, lengths, {"key_lengths": np.array([[3], [0]])}, "key_lengths")


@pytest.mark.parametrize("dtype", ["int64", "uint32", "uint64"])
def test_lengths_of_jax_with_integers_of_64_bits(dtype: str) -> None:
    with jax.enable_x64(True):
        for impl in ("generic", "native"):
            given = jnp.asarray(np.array([[3], [np.iinfo(dtype).max]], dtype))
            same("jax", impl, given, {"key_lengths": np.array([[3], [7]])}, "key_lengths")


@pytest.mark.parametrize(("library", "impl"), IMPLS)
def test_lengths_that_are_numbers(library: str, impl: str) -> None:
    for length in (2**31, 2**64, HUGE, np.uint64(2**63))[3 * (library == "jax") :]:
        same(library, impl, length, {}, "key_lengths")
    same(library, impl, np.uint8(3), {"key_lengths": 3}, "key_lengths")


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
@pytest.mark.parametrize("op", ["linear_attention", "cosine_attention", "sima_attention", "linformer_attention"])
def test_lengths_of_ops_of_tokens(op: str, dtype: str) -> None:
    """Those without pairs too, in the library that cannot compare these."""
    more = {"sima_attention": {"query_mask": torch.ones(5, dtype=torch.bool)}}.get(op, {})
    arrays = [torch.tensor(x) for x in (Q, K, V)]
    arrays += [torch.ones(4, 7), torch.ones(4, 7)] if op == "linformer_attention" else []
    attend = getattr(attnkit, op)
    lengths = torch.tensor(np.array([[3], [np.iinfo(dtype).max]], dtype))
    for impl in ("auto", "generic"):
        o = attend(*arrays, key_lengths=lengths, **more, impl=impl)
        assert torch.equal(o, attend(*arrays, key_lengths=torch.tensor([[3], [7]]), **more, impl=impl))


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_gradients_and_statistics_with_lengths(dtype: str) -> None:
    q, k, v = (torch.tensor(x, requires_grad=True) for x in (Q, K, V))
    lengths = torch.tensor(np.array([[3], [np.iinfo(dtype).max]], dtype))
    meant = torch.tensor([[3], [7]])
    for impl in ("auto", "generic", "native"):
        found, expected = (
            torch.autograd.grad(attnkit.softmax_attention(q, k, v, key_lengths=n, impl=impl).sum(), (q, k, v))
            for n in (lengths, meant)
        )
        assert all(map(torch.equal, found, expected))
        rows = [attnkit.row_statistics("softmax_attention", q, k, key_lengths=n, impl=impl) for n in (lengths, meant)]
        assert torch.equal(rows[0].visible, rows[1].visible)


@pytest.mark.parametrize("dtype", check.INTEGERS)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_seeds_of_any_dtype(library: str, dtype: str) -> None:
    """Their bits count: 64, or 32 of a narrower dtype."""
    for value in (np.iinfo(dtype).min, np.iinfo(dtype).max):
        seed = np.array(value, dtype)
        meant = int(value) & (2**64 - 1 if seed.itemsize == 8 else 2**32 - 1)
        for impl in ("generic", "native", "blocked"):
            arrays = [LIBRARIES[library](x) for x in (Q, K, V)]
            o = attnkit.softmax_attention(*arrays, dropout=(0.4, LIBRARIES[library](seed)), impl=impl)
            assert_agrees(o, exact(attnkit.softmax_attention, dropout=(0.4, meant)), dtype="float32")


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_program_takes_them(dynamic: bool) -> None:
    lengths = torch.tensor(np.array([[3], [2**32 - 1]], np.uint32))
    arrays = [torch.tensor(x) for x in (Q, K, V)]
    torch._dynamo.reset()
    for impl in ("generic", "native", ["native", "auto"]):
        attend = torch.compile(
            lambda *x, impl=impl: attnkit.softmax_attention(
                *x[:3], key_lengths=x[3], window=(2**63 - 1, 2**31 - 1), scale=2**40, impl=impl
            ),
            fullgraph=True,
            dynamic=dynamic,
            backend="eager",
        )
        expected = exact(attnkit.softmax_attention, key_lengths=np.array([[3], [7]]), scale=2.0**40)
        assert_agrees(attend(*arrays, lengths), expected, dtype="float32")


@pytest.mark.parametrize("library", LIBRARIES)
def test_numbers_that_are_not_pythons_floats(library: str) -> None:
    arrays = [LIBRARIES[library](x) for x in (Q, K, V)]
    for impl in ("generic", "native"):
        for gain in (2**31, 2**64, 10**30, np.uint8(3), np.float16(1.5), Fraction(1, 3)):
            o = attnkit.pointwise_attention(*arrays, gain=gain, length=gain, alpha=1, impl=impl)
            assert_agrees(o, exact(attnkit.pointwise_attention, gain=float(gain), length=float(gain), alpha=1.0))
    with np.errstate(over="ignore"):
        assert np.isinf(np.asarray(attnkit.pointwise_attention(*arrays, alpha=-400.0, impl="generic"))).any()


NUMBERS = [
    *(("softmax_attention", name) for name in ("scale", "dropout")),
    *(("pointwise_attention", name) for name in ("alpha", "gain", "shift", "length")),
    *(("reluformer_attention", "gamma"), ("entmax_attention", "alpha"), ("linear_attention", "eps")),
    *(("linear_attention", "scale"), ("nystrom_attention", "scale"), ("sima_attention", "eps")),
]


@pytest.mark.parametrize(("op", "name"), NUMBERS)
def test_numbers_beyond_every_float(op: str, name: str) -> None:
    for value in (HUGE, -HUGE, 10**5000, Fraction(HUGE, 3), np.longdouble("1e4000")):
        options: dict[str, Any] = {name: (value, 1) if name == "dropout" else value}
        options |= {"num_landmarks": 2} if op == "nystrom_attention" else {}
        text = rf"{op}: .*{name}.* must be finite and within the range of a float; got"
        with pytest.raises(ValueError, match=text) as error:
            getattr(attnkit, op)(Q, Q, Q, **options)
        assert len(str(error.value)) < 200


def test_errors_of_huge_integers_can_be_read() -> None:
    for options in ({"key_lengths": -(10**5000)}, {"window": (0, -(10**5000))}, {"dropout": (0.5, 10**5000)}):
        with pytest.raises(ValueError, match="with more digits than Python prints"):
            attnkit.softmax_attention(Q, K, V, **options)
    with pytest.raises(ValueError, match=r"got -10{38}… of 402 characters"):
        attnkit.softmax_attention(Q, K, V, key_lengths=-HUGE)


def test_calls_that_are_in_range_are_not_touched() -> None:
    """A repeated call is not changed before its kernel runs; only one that need not be is remembered."""
    lengths = torch.tensor([[3], [7]])
    for options in ({}, {"scale": 2, "window": (3, None), "key_lengths": lengths}, {"key_lengths": 5, "length": "all"}):
        assert integers.in_range(options, 5, 7) is options
    beyond = {"window": (2**40, 3), "key_lengths": 2**40}
    assert integers.in_range(beyond, 5, 7) == {"window": (None, 3), "key_lengths": None}
    assert integers.in_range(beyond, 5, 2**41) is not beyond
    assert integers.in_range(beyond, 5, 2**41) == beyond


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_call_beyond_the_native_library_goes_on(library: str) -> None:
    """A size of 2^31 or more is a reason against it, for an output too."""
    size = 2**31 + 5
    one = np.zeros((1, 1), np.float32)
    long, wide = np.broadcast_to(one, (size, 1)), np.broadcast_to(one, (1, size))
    if library == "torch":
        one, long, wide = (torch.zeros(1, 1).expand(x.shape) for x in (one, long, wide))
    for q, k, v in ((one, long, long), (long, one, one), (wide, wide, one), (one, one, wide)):
        for op in (attnkit.softmax_attention, attnkit.linear_attention, attnkit.rela_attention):
            more = (wide[0],) if op is attnkit.rela_attention else ()
            if more and v is not wide:
                continue
            reasons = attnkit.explain(op, q, k, v, *more)
            assert "2^31" in reasons["native"]
            assert reasons["generic"] is None
        with pytest.raises(NotImplementedError, match=r"native: an axis of 2\^31 or more"):
            attnkit.softmax_attention(q, k, v, impl="native")
