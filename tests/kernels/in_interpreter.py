"""What the kit does not ask of the Triton kernels. Run by test_triton_interpreted.py with TRITON_INTERPRET=1."""

import itertools
import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from array_api_compat import array_namespace as namespace
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

import attnkit
from attnkit._core.activations import ACTIVATIONS
from attnkit.backends.torch.triton import pointwise, statistics
from attnkit.kernels.triton import activations, sizes
from tests.library import tails

EPS = torch.finfo(torch.float32).eps


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(queries: int, keys: int, d: int = 8, e: int = 5) -> list[torch.Tensor]:
    return [draw(n, 2, 2, *shape) for n, shape in enumerate(((queries, d), (keys, d), (keys, e), (queries, e)))]


def agree(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Within a few roundings of the largest element of sums of tens of terms."""
    assert got.shape == expected.shape
    assert torch.all((got - expected).abs() <= 32 * EPS * expected.abs().amax()), (got - expected).abs().max()


def test_a_launch_replaces_the_language_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of its functions do not, which took half of the time; and behind it the language is what it was."""
    replaced, replace = [], interpreter._patch_builtin
    monkeypatch.setattr(
        interpreter, "_patch_builtin", lambda part, *rest: (replaced.append(part), replace(part, *rest))
    )
    for count in (1, 2):
        pointwise.attend(*inputs(5, 6)[:3])
        assert replaced.count(tl.math) == count
        assert tl.core.is_builtin(tl.load)


@triton.jit
def multiply(x, y):
    tl.store(y, tl.load(x) * tl.load(x + 1))


@pytest.mark.parametrize("factors", [(2**16, 2**15), (-(2**16), 2**15), (2**16, -(2**15) - 1)])
def test_integers_that_overflow_are_refused(factors: tuple[int, int]) -> None:
    """Which the interpreter looks for, and keeps to itself."""
    x, y = torch.tensor(factors, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    if -(2**31) <= math.prod(factors) < 2**31:
        multiply[1,](x, y)
        assert y == math.prod(factors)
    else:
        with pytest.raises(InterpreterError, match="int32 of operation mul"):
            multiply[1,](x, y)


SIZES = ((33, 70), (70, 33))
WINDOWS = (None, (5, None), (20, 3))


@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_blocks_that_are_seen_whole_in_part_or_not_at_all(
    queries: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "pointwise", lambda *of: sizes.Tile(16, 16, 4, 1))
    q, k, v, do = (x[:1, :1] for x in inputs(queries, keys))
    lengths = torch.tensor([[keys * 2 // 3]])
    chosen = list(enumerate(itertools.product(WINDOWS, (False, True, "upper_left"))))
    for n, (window, causal) in chosen[queries > keys :: 2]:
        options = {"causal": causal, "window": window, "activation": "softplus"}
        options |= {"key_lengths": lengths} if n % 2 else {}
        agree(pointwise.attend(q, k, v, **options), attnkit.pointwise_attention(q, k, v, **options))
        expected = attnkit.pointwise_attention_vjp(q, k, v, do, impl="generic", **options)
        for name, grad in pointwise.pull(q, k, v, do, **options).items():
            agree(grad, expected[name])


MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "bias": draw(6, 40, 70)},
    "window": {"window": (40, 8), "key_lengths": torch.tensor([[60]])},
    "dropout": {"dropout": (0.2, 3)},
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_in_blocks_whose_hidden_tokens_are_nan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks between the edges are not asked which tokens they see unless something is NaN."""
    monkeypatch.setattr(sizes, "pointwise", lambda *of: sizes.Tile(16, 16, 4, 1))
    q, k, v, do = (x[:1, :1] for x in inputs(40, 70))
    keys, queries = torch.arange(70) % 5 != 2, torch.arange(40) % 7 != 3
    pairs = (draw(7, 40, 70) > -1) & keys
    for mask, query_mask in ((pairs, None), (pairs, queries), (None, queries)):
        options = MASKS[name] | {"activation": "silu", "mask": mask, "query_mask": query_mask}
        expected = attnkit.pointwise_attention(q, k, v, impl="generic", **options)
        grads = attnkit.pointwise_attention_vjp(q, k, v, do, impl="generic", **options)
        shown = torch.ones(70) > 0 if mask is None else keys
        asked = torch.ones(40) > 0 if query_mask is None else queries
        holes = [x.masked_fill(~of[:, None], torch.nan) for x, of in ((q, asked), (k, shown), (v, shown), (do, asked))]
        for arrays in ((q, k, v, do), holes):
            agree(pointwise.attend(*arrays[:3], **options), expected)
            for of, grad in pointwise.pull(*arrays, **options).items():
                agree(grad, grads[of])


def test_distances_in_blocks_of_which_the_first_queries_see_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "pointwise", lambda *of: sizes.Tile(16, 16, 4, 1))
    q, k, v, do = (x[:1] for x in inputs(40, 20))
    q, k, v = q + 30.0, k[:, :1] + 30.0, v[:, :1]
    for options in ({"causal": True}, {"query_mask": torch.arange(40) > 30}, {"mask": draw(5, 2, 40, 20) > 0.5}):
        options |= {"enable_gqa": True, "bias": draw(6, 40, 20)}
        agree(pointwise.attend_to_distances(q, k, v, **options), attnkit.gaussian_attention(q, k, v, **options))
        expected = attnkit.gaussian_attention_vjp(q, k, v, do, impl="generic", **options)
        for name, grad in pointwise.pull_from_distances(q, k, v, do, **options).items():
            agree(grad, expected[name])


def test_half_types_whose_distances_are_beyond_their_range() -> None:
    q, k, v, _ = (x[0, 0] for x in inputs(5, 6))
    q, k, v = 6e4 + 100 * q.sign(), -6e4 + 100 * k.sign(), v.half()
    options = {"scale": 1e-11}
    expected = attnkit.gaussian_attention(q.double(), k.double(), v.double(), **options)
    found = pointwise.attend_to_distances(q.half(), k.half(), v, **options)
    assert (found - expected).abs().max() <= 2.0**-9 * expected.abs().max()


STATISTICS: list[tuple[str, dict[str, Any]]] = [
    ("pointwise_attention", {"activation": "softplus", "window": (20, 3), "dropout": (0.3, 4)}),
    ("pointwise_attention", {"activation": "silu", "gain": -0.6, "causal": True, "mask": draw(5, 20, 40) > 0}),
    ("gaussian_attention", {"bias": draw(6, 20, 40), "key_lengths": torch.tensor([[2**32 + 3], [3 - 2**32]])}),
]


@pytest.mark.parametrize(("op", "options"), STATISTICS, ids=["softplus", "silu", "distances"])
@pytest.mark.parametrize("with_output", [True, False], ids=["output", "rows"])
def test_statistics_in_blocks(
    op: str, options: dict[str, Any], with_output: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "pointwise", lambda *of: sizes.Tile(16, 16, 4, 1))
    q, k, v, do = (x[:, :1] for x in inputs(20, 40))
    fields = tuple(name for name in statistics.FIELDS if name != "entropy" or options.get("gain", 1) > 0)
    given = options if with_output else {name: x for name, x in options.items() if name != "dropout"}
    found = statistics.attend(q, k, v if with_output else None, op=op, fields=fields, **given)
    cotangents = {name: draw(n, 2, 1, 20) for n, name in enumerate(fields) if name in statistics.WITH_GRADIENT}
    dstats = attnkit.RowStatistics(**cotangents)
    if with_output:
        o, rows = attnkit.attention_with_statistics(op, q, k, v, fields=fields, **given)
        agree(found["o"], o)
        expected = attnkit.attention_with_statistics_vjp(op, q, k, v, do, dstats, fields=fields, **given)
        grads = statistics.pull(q, k, v, do, cotangents, op=op, **given)
    else:
        rows = attnkit.row_statistics(op, q, k, fields=fields, **given)
        expected = attnkit.row_statistics_vjp(op, q, k, dstats, fields=fields, **given)
        grads = statistics.pull(q, k, None, None, cotangents, op=op, **given)
    for name in fields:
        agree(found[name], getattr(rows, name))
    assert {*grads} == {*expected}
    for name, grad in grads.items():
        agree(grad, expected[name])


def test_only_the_fields_asked_for_and_no_gradient_of_counts() -> None:
    q, k, _, _ = (x.requires_grad_() for x in inputs(5, 6))
    found = statistics.attend(q, k, None, op="pointwise_attention", fields=("entropy", "nonzero"))
    assert {name: x.requires_grad for name, x in found.items()} == {"entropy": True, "nonzero": False}
    rows = attnkit.row_statistics("pointwise_attention", q, k, impl="generic")
    for name in statistics.FIELDS:
        alone = statistics.attend(q, k, None, op="pointwise_attention", fields=(name,))
        assert {*alone} == {name}
        agree(alone[name], getattr(rows, name))


def test_rows_whose_weights_are_all_zero_pass_no_gradient() -> None:
    q, k = torch.zeros(3, 4, requires_grad=True), torch.ones(5, 4)
    options = {"op": "pointwise_attention", "activation": "identity", "fields": ("total", "maximum")}
    found = statistics.attend(q, k, None, **options)
    (found["total"] + found["maximum"]).sum().backward()
    assert not q.grad.any()


@pytest.mark.parametrize("activation", activations.ACTIVATIONS)
def test_h_and_its_slope_to_rounding(activation: str) -> None:
    """q = 0, scores from the bias alone and v = 1: the output is h and the gradient of the bias its slope."""
    x = torch.tensor(tails.GRID)[:, None]
    q, one = torch.zeros(len(x), 1), torch.ones(1, 1)
    options = {"activation": activation, "alpha": 0.0, "bias": x}
    tails.assert_tails(activation, False, pointwise.attend(q, one, one, **options)[:, 0])
    slope = pointwise.pull(q, one, one, torch.ones(len(x), 1), **options)["bias"]
    tails.assert_tails(activation, True, slope[:, 0])


@triton.jit
def applied(x, y, F: tl.constexpr):
    at = tl.arange(0, 16)[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(y + at, F(tl.load(x + at) * activations.unit_of(F)))


@pytest.mark.parametrize("activation", activations.HALF_ACTIVATIONS)
@pytest.mark.parametrize("which", ["h", "h beside its slope", "slope"])
def test_functions_for_half_types_to_their_precision(activation: str, which: str) -> None:
    """Relative to h, tails included; a slope may change its sign, and there relative to |h| + |h'| nearby."""
    x = torch.cat([torch.linspace(-80, 80, 512), torch.linspace(-6, 6, 512)]).reshape(16, 64)
    if activation == "exp":
        x = x.clamp(max=0.0)
    y = torch.empty_like(x)
    derivative = which == "slope"
    applied[(1,)](x, y, F=activations.functions(activation, True, which != "h")[derivative])
    exact = torch.exp(x.double()) if activation == "exp" else None
    if exact is None:
        _, h, slope = ACTIVATIONS[activation][:3]
        exact = (slope if derivative else h)(namespace(x), x.double())
    size = exact.abs() + (0.1 * (x.abs() < 2) if derivative else 0.0)
    assert ((y - exact).abs() <= 2.0**-11.5 * size + 2.0**-126 * (1 + x.abs())).all()


def test_nan_does_not_spread_to_queries_that_do_not_see_it() -> None:
    q, k, v, _ = (x[0, 0].half() for x in inputs(20, 20))
    expected = pointwise.attend(q, k, v, activation="sigmoid", causal=True)
    k[7] = torch.nan
    found = pointwise.attend(q, k, v, activation="sigmoid", causal=True)
    assert torch.equal(found[:7], expected[:7])
    assert found[7:].isnan().all()


def test_gradients_of_broadcast_arguments_are_summed() -> None:
    q, k, v, do = inputs(9, 11)
    q, k, bias = q[:, :1], k[:1], draw(9, 2, 1, 1, 11)
    expected = attnkit.pointwise_attention_vjp(q, k, v, do, impl="generic", bias=bias, activation="silu")
    for name, grad in pointwise.pull(q, k, v, do, bias=bias, activation="silu").items():
        agree(grad, expected[name])
