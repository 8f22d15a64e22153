"""What the kit does not ask of the kernels that share out keys. Run by test_triton_interpreted.py with
TRITON_INTERPRET=1."""

import itertools
from typing import Any

import pytest
import torch

import attnkit
from attnkit.backends.torch.triton import decoding, launch, pointwise, rows
from attnkit.kernels.triton import sizes

from .in_interpreter import agree, draw

SOFTMAX = "softmax_attention"
LENGTHS = torch.tensor([[60], [100]])
WINDOWS = (None, (20, 3))
HEADS, GROUPS, QUERIES, KEYS = 4, 2, 3, 100


def inputs(grouped: bool = True, d: int = 8, e: int = 5) -> list[torch.Tensor]:
    heads = HEADS // GROUPS if grouped else HEADS
    return [draw(0, 2, HEADS, QUERIES, d), draw(1, 2, heads, KEYS, d), draw(2, 2, heads, KEYS, e)]


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that has every call served in so many parts."""

    def share(parts: int) -> None:
        monkeypatch.setattr(sizes, "decoding", lambda *of: sizes.Tile(16, 16, 4, 1))
        monkeypatch.setattr(sizes, "parts", lambda *of: parts)

    return share


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("grouped", [False, True])
def test_parts_of_what_queries_see(parts: int, grouped: bool, in_parts: Any) -> None:
    """A share may be empty, and some of the queries that see nothing."""
    in_parts(parts)
    q, k, v = inputs(grouped)
    for n, (window, causal) in enumerate(itertools.product(WINDOWS, (False, True, "upper_left"))):
        options = {"causal": causal, "window": window, "enable_gqa": grouped}
        options |= ({}, {"key_lengths": LENGTHS}, {"key_lengths": 77})[n % 3]
        expected = attnkit.pointwise_attention(q, k, v, activation="softplus", **options)
        agree(pointwise.attend(q, k, v, activation="softplus", **options), expected)
        o, lse = attnkit.softmax_attention(q, k, v, return_lse=True, impl="generic", **options)
        found, found_lse = rows.attend(SOFTMAX, q, k, v, return_lse=True, **options)
        agree(found, o)
        seen = lse > -torch.inf
        assert torch.equal(found_lse > -torch.inf, seen)
        agree(torch.where(seen, found_lse, 0.0), torch.where(seen, lse, 0.0))


@pytest.mark.parametrize("parts", [1, 3])
def test_arrays_that_differ_between_the_heads_of_a_group(parts: int, in_parts: Any) -> None:
    in_parts(parts)
    q, k, v = inputs()
    of_heads = {
        "bias": draw(5, HEADS, QUERIES, KEYS),
        "mask": draw(6, 2, HEADS, QUERIES, KEYS) > -0.5,
        "key_lengths": torch.tensor([[20, 100, 7, 50], [0, 99, 64, 65]]),
        "query_mask": draw(7, 2, HEADS, QUERIES) > -1.0,
        "dropout": (0.3, 11),
    }
    for names in (("bias", "dropout"), ("mask",), ("key_lengths",), ("query_mask", "bias"), tuple(of_heads)):
        options = {name: of_heads[name] for name in names} | {"enable_gqa": True}
        own = {"activation": "sigmoid", "shift": "-log_length", "alpha": 0.5}
        agree(pointwise.attend(q, k, v, **options, **own), attnkit.pointwise_attention(q, k, v, **options, **own))
        agree(rows.attend(SOFTMAX, q, k, v, **options), attnkit.softmax_attention(q, k, v, **options, impl="generic"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [-40.0, -0.3, 0.0, 40.0])
def test_any_scale_and_gradients_from_the_numbers_of_parts(scale: float, dtype: torch.dtype, in_parts: Any) -> None:
    in_parts(3)
    q, k, v = (x.to(dtype) for x in inputs())
    do, allowed = draw(3, 2, HEADS, QUERIES, 5).to(dtype), 2e-3 if dtype == torch.float16 else 4e-5
    options = {"scale": scale, "causal": True, "enable_gqa": True}
    exact = attnkit.softmax_attention(*(x.double() for x in (q, k, v)), impl="generic", **options)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = rows.attend(SOFTMAX, *leaves, **options)
    assert (o - exact).abs().max() <= allowed * exact.abs().max()
    of = attnkit.softmax_attention_vjp(*(x.detach().double() for x in (q, k, v, do)), impl="generic", **options)
    for name, grad in zip("qkv", torch.autograd.grad(o, leaves, do), strict=True):
        assert (grad - of[name]).abs().max() <= allowed * max(of[name].abs().max(), 1e-6), name


def test_a_key_of_nan_stays_with_the_queries_that_see_it(in_parts: Any) -> None:
    in_parts(3)
    q, k, v = inputs()
    options: dict[str, Any] = {"causal": True, "enable_gqa": True}
    for attend in (pointwise.attend, lambda *arrays, **o: rows.attend(SOFTMAX, *arrays, **o)):
        broken = k.clone()
        broken[:, :, KEYS - 2] = torch.nan
        before, after = attend(q, k, v, **options), attend(q, broken, v, **options)
        assert torch.equal(after[..., 0, :], before[..., 0, :])
        assert after[..., 1:, :].isnan().all()


def test_any_strides_give_the_same_bits(in_parts: Any) -> None:
    in_parts(3)
    q, k, v = inputs()
    inside = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    columns = [x.mT.contiguous().mT for x in (q, k, v)]
    for attend in (pointwise.attend, lambda *arrays, **o: rows.attend(SOFTMAX, *arrays, **o)):
        expected = attend(q, k, v, enable_gqa=True)
        for views in (inside, columns):
            assert torch.equal(attend(*views, enable_gqa=True), expected)


def test_more_parts_than_are_read_at_a_time(in_parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "AT_A_TIME", 2)
    in_parts(7)
    q, k, v = inputs()
    agree(pointwise.attend(q, k, v, enable_gqa=True), attnkit.pointwise_attention(q, k, v, enable_gqa=True))
    expected = attnkit.softmax_attention(q, k, v, enable_gqa=True, impl="generic")
    agree(rows.attend(SOFTMAX, q, k, v, enable_gqa=True), expected)


def test_more_rows_in_a_group_than_a_tile_has(in_parts: Any) -> None:
    in_parts(2)
    q, k, v = draw(0, 1, 10, 5, 8), draw(1, 1, 1, 40, 8), draw(2, 1, 1, 40, 5)
    options: dict[str, Any] = {"causal": True, "enable_gqa": True}
    agree(pointwise.attend(q, k, v, **options), attnkit.pointwise_attention(q, k, v, **options))
    agree(rows.attend(SOFTMAX, q, k, v, **options), attnkit.softmax_attention(q, k, v, **options, impl="generic"))


def test_a_call_as_it_comes_is_served_in_parts() -> None:
    q, k, v = draw(0, 1, 2, 1, 64), draw(1, 1, 1, 700, 64), draw(2, 1, 1, 700, 64)
    shared = decoding.shares(q, launch.call_of(q, k, v, enable_gqa=True))
    assert shared is not None
    assert shared.parts > 1
    agree(pointwise.attend(q, k, v, enable_gqa=True), attnkit.pointwise_attention(q, k, v, enable_gqa=True))
    expected = attnkit.softmax_attention(q, k, v, enable_gqa=True, impl="generic")
    agree(rows.attend(SOFTMAX, q, k, v, enable_gqa=True), expected)
