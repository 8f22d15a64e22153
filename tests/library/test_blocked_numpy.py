"""Blocks of NumPy arrays: what the conformance kit does not ask of them."""

import tracemalloc
import warnings
from typing import Any

import numpy as np
import pytest

import attnkit
from attnkit._core.activations import ACTIVATIONS, NAMES
from attnkit.backends import in_place
from attnkit.backends.numpy import blocked, softmax, workspace
from attnkit_conformance.judge import judge
from attnkit_conformance.selection import find

from .arrays import OPTIONS, assert_close, normal, qkv


def sized(monkeypatch: pytest.MonkeyPatch, scores: int, queries: int) -> None:
    for name, value in (("SCORES", scores), ("QUERIES", queries), ("CAUSAL_QUERIES", queries)):
        monkeypatch.setattr(in_place, name, value)


def both(op: str, impl: str, do: np.ndarray, *arrays: np.ndarray, **options: Any) -> list[np.ndarray]:
    """The output and its gradients, by name."""
    o = getattr(attnkit, op)(*arrays, impl=impl, **options)
    return [o, *by_name(getattr(attnkit, f"{op}_vjp")(*arrays, do, impl=impl, **options))]


def by_name(gradients: dict[str, np.ndarray]) -> list[np.ndarray]:
    return [gradients[name] for name in sorted(gradients)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("activation", "dtype"), [*((name, "float64") for name in NAMES), ("relu", "float16")])
def test_every_activation_and_option_in_small_blocks(
    activation: str, options: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays, do = qkv(9, 11, dtype), normal((2, 3, 9, 6), seed=1, dtype=dtype)[0]
    given = {**options, "activation": activation, "shift": "-log_length" if activation == "sigmoid" else 0.3}
    if "bias" in given:
        given["bias"] = given["bias"].astype(dtype)
    want = both("pointwise_attention", "generic", do, *arrays, **given)
    for scores, queries in ((1, 1), (100, 4)):
        sized(monkeypatch, scores, queries)
        got = both("pointwise_attention", "blocked", do, *arrays, **given)
        for one, other in zip(got, want, strict=True):
            assert_close(one, other)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_softmax_with_lse_and_its_cotangent(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, (do, dlse) = qkv(9, 11), normal((2, 3, 9, 6), (2, 3, 9), seed=1)
    for scores, queries in ((1, 1), (100, 4), (1 << 20, 512)):
        sized(monkeypatch, scores, queries)
        for cotangents in ((do, dlse), (do,), (None, dlse)):
            calls = [
                (
                    *attnkit.softmax_attention(*arrays, return_lse=True, impl=impl, **options),
                    *by_name(attnkit.softmax_attention_vjp(*arrays, *cotangents, impl=impl, **options)),
                )
                for impl in ("blocked", "generic")
            ]
            for got, want in zip(*calls, strict=True):
                finite = np.isfinite(want)
                assert (np.isfinite(got) == finite).all()
                assert_close(np.where(finite, got, 0.0), np.where(finite, want, 0.0))


@pytest.mark.parametrize(("dtype", "largest"), [("float32", 88.0), ("float64", 708.0)])
def test_non_linearities_keep_their_digits_far_out(dtype: str, largest: float) -> None:
    """Each value that is a normal number, to a few eps of itself and of its exponent, and without a warning."""
    s = np.concatenate([np.linspace(-largest, largest, 4001), np.linspace(-1e-3, 1e-3, 401)]).astype(dtype)
    tiny, eps = np.finfo(dtype).tiny, np.finfo(dtype).eps
    for name, overwrite in workspace.OVERWRITE.items():
        want = ACTIVATIONS[name].h(np, s.astype(np.float64)) if dtype == "float32" else ACTIVATIONS[name].h(np, s)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = overwrite(s.copy())
        normal_ones = np.abs(want) >= tiny * (1 + np.abs(s))  # σ in s·σ(s) must be a normal number as well
        exponent = 2 * np.abs(s) + 0.08 * np.abs(s) ** 3 if name == "gelu_tanh" else np.abs(s)
        allowed = eps * (8 + 2 * exponent) * np.abs(want)
        assert got.dtype == s.dtype
        assert (np.abs(got - want) <= allowed)[normal_ones].all(), name


def test_zeros_are_put_over_anything() -> None:
    x = np.array([[np.nan, 1.0, -np.inf], [-0.0, 5.0, np.inf]])
    for dtype in (np.float32, np.float64):
        got = workspace.cleared(x.astype(dtype), np.array([[True, False, True], [True, False, True]]))
        assert np.array_equal(got, np.array([[0.0, 1.0, 0.0], [0.0, 5.0, 0.0]]))
        assert not np.signbit(got).any()


@pytest.mark.parametrize(
    ("op", "module", "name", "wrong"),
    [
        ("pointwise_attention", in_place.Prepared, "hide", lambda self, xp, x: x),
        ("softmax_attention", softmax, "forbidden", lambda p, s: s),
        ("softmax_attention", softmax.Row, "inverse", property(lambda self: np.ones_like(self.z))),
    ],
)
def test_the_kit_finds_a_planted_bug(
    op: str, module: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = find(["numpy-blocked"])
    verdicts = {result.status for result in judge(adapters, "quick", "causal-padded", ("float32",), ops=(op,))}
    assert verdicts == {"pass"}
    monkeypatch.setattr(module, name, wrong)
    assert "fail" in {result.status for result in judge(adapters, "quick", "causal-padded", ("float32",), ops=(op,))}


def test_auto_takes_blocks_where_there_are_many_scores() -> None:
    few, many = (np.zeros((1, 2, length, 8), np.float32) for length in (20, 1200))
    for op, blocks in ((attnkit.pointwise_attention, many), (attnkit.sigmoid_attention, many)):
        assert [name for name in attnkit.explain(op, few, few, few) if name != "native"] == ["generic", "blocked"]
        told = attnkit.explain(op, blocks, blocks, blocks)
        assert [name for name in told if name != "native"] == ["blocked", "generic"]


@pytest.mark.parametrize("op", blocked.OPS)
def test_memory_is_that_of_a_block(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The array of all scores would have 64 MiB."""
    sized(monkeypatch, 1 << 17, 64)
    q, k, v = normal((1, 1, 2048, 8), (1, 1, 2048, 8), (1, 1, 2048, 8), dtype="float32")
    tracemalloc.start()
    both(op, "blocked", v, q, k, v, causal=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2048 * 2048 * 4 * 0.6
