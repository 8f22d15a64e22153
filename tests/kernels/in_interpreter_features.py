"""What the kit does not ask of the features of linear attention. Run by test_triton_interpreted.py with
TRITON_INTERPRET=1."""

from functools import partial
from typing import Any

import pytest
import torch

import attnkit
from attnkit.backends.torch.triton import linear, linear_features
from attnkit.kernels import linear_calls

from .in_interpreter_linear import D, E, agree, draw, inputs

OMEGA = torch.from_numpy(attnkit.orthogonal_features(6, D, 0)).float()
RECORDS = {record.name: record for record, _ in linear_features.SERVED}
ARRAYS = {"performer_attention": (OMEGA,)}
HALF = torch.arange(9) % 2 == 0
LENGTHS = torch.tensor([[9], [4]])
CALLS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "cosine": ("cosine_attention", (2, 4, 9), (2, 2, 9), {"enable_gqa": True, "causal": True, "query_mask": HALF}),
    "cosine, broadcast keys": ("cosine_attention", (2, 2, 9), (1, 9), {"key_lengths": LENGTHS}),
    "cosine, segments": ("cosine_attention", (130,), (130,), {"causal": True}),
    "relu": ("performer_attention", (2, 9), (2, 12), {"kernel": "relu", "causal": True}),
    "relu, no eps": ("performer_attention", (2, 9), (2, 12), {"kernel": "relu", "eps": 0.0, "key_lengths": 5}),
    "exponentials": ("performer_attention", (2, 4, 9), (2, 2, 9), {"enable_gqa": True, "key_lengths": LENGTHS}),
    "exponentials, causal": (
        "performer_attention",
        (2, 4, 9),
        (2, 2, 12),
        {"enable_gqa": True, "causal": True, "query_mask": HALF},
    ),
    "exponentials, upper left": ("performer_attention", (12,), (9,), {"causal": "upper_left", "key_lengths": 7}),
    "exponentials, more queries": ("performer_attention", (2, 12), (2, 9), {"causal": True}),
    "exponentials, masked": (
        "performer_attention",
        (2, 2, 130),
        (1, 130),
        {"causal": True, "mask": draw(5, 2, 1, 1, 130) > 0},
    ),
    "efficient": ("efficient_attention", (2, 4, 9), (2, 2, 9), {"enable_gqa": True, "key_lengths": LENGTHS}),
    "efficient, keys of all items": ("efficient_attention", (2, 2, 9), (9,), {"mask": draw(4, 2, 1, 1, 9) > 0}),
    "efficient, no query": ("efficient_attention", (2, 9), (2, 9), {"query_mask": torch.zeros(2, 9).bool()}),
    "no keys": ("efficient_attention", (2, 5), (2, 0), {}),
    "no queries": ("cosine_attention", (2, 0), (2, 5), {"causal": True}),
}


def functions(op: str) -> tuple[Any, Any]:
    """The kernels of an op and of its explicit gradients."""
    return partial(linear_features.attend, RECORDS[op]), partial(linear_features.pull, RECORDS[op])


@pytest.mark.parametrize("name", CALLS)
def test_both_kinds_of_gradients_are_those_of_the_generic_body(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_calls, "FEWEST", 1)
    op, of_q, of_k, options = CALLS[name]
    q, k, v = inputs(of_q, of_k)
    arrays, (attend, pull) = ARRAYS.get(op, ()), functions(op)
    o = getattr(attnkit, op)(q, k, v, *arrays, **options, impl="generic")
    do = draw(6, *o.shape)
    expected = getattr(attnkit, f"{op}_vjp")(q, k, v, *arrays, do, **options, impl="generic")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found = attend(*leaves, *arrays, **options)
    agree(found, o)
    found.backward(do)
    for part, grad in pull(*(x.detach() for x in leaves), *arrays, do, **options).items():
        agree(grad, expected[part])
    for part, x in zip("qkv", leaves, strict=True):
        agree(x.grad, expected[part])


@pytest.mark.parametrize(
    ("op", "f", "own"), [("cosine_attention", D + 1, {}), ("performer_attention", 6, {"kernel": "relu"})]
)
@pytest.mark.parametrize("causal", [False, True])
def test_states_in_and_out(op: str, f: int, own: dict[str, Any], causal: bool) -> None:
    q, k, v = inputs((2, 9), (2, 9))
    options = {**own, "causal": causal, "key_lengths": 7, "query_mask": HALF}
    options["initial_state"] = (draw(7, 2, f, E), draw(8, 2, f).abs() + 4.0)
    arrays, (attend, pull) = ARRAYS.get(op, ()), functions(op)
    o, kept = getattr(attnkit, op)(q, k, v, *arrays, **options, return_state=True, impl="generic")
    agree(attend(q, k, v, *arrays, **options, return_state=True), (o, kept))
    agree(attend(q, k, v, *arrays, **options), o)
    cotangents = draw(6, *o.shape), tuple(draw(9, *x.shape) for x in kept)
    given = {**options, "dstate": cotangents[1]}
    expected = getattr(attnkit, f"{op}_vjp")(q, k, v, *arrays, cotangents[0], **given, impl="generic")
    for part, grad in pull(q, k, v, *arrays, cotangents[0], **given).items():
        agree(grad, expected[part])


@pytest.mark.parametrize("op", RECORDS)
def test_half_types_keep_features_in_float32(op: str) -> None:
    """The output and gradients are rounded once: within two roundings of those of the generic body."""
    q, k, v = (x.half() for x in inputs((2, 30), (2, 30)))
    arrays, (attend, pull) = ARRAYS.get(op, ()), functions(op)
    do = torch.ones_like(v)
    expected = getattr(attnkit, f"{op}_vjp")(q, k, v, *arrays, do, impl="generic")
    expected["o"] = getattr(attnkit, op)(q, k, v, *arrays, impl="generic")
    for part, grad in (pull(q, k, v, *arrays, do) | {"o": attend(q, k, v, *arrays)}).items():
        assert grad.dtype == torch.float16
        assert (grad - expected[part]).abs().max() <= 2.0**-10 * expected[part].abs().max()


def test_padding_that_holds_nan_reaches_no_feature() -> None:
    q, k, v = inputs((2, 9), (2, 9))
    for op in RECORDS:
        arrays, (attend, pull) = ARRAYS.get(op, ()), functions(op)
        expected = attend(q, k, v, *arrays, key_lengths=5, query_mask=HALF)
        bad = [x.clone() for x in (q, k, v)]
        bad[0][:, ~HALF], bad[1][:, 5:], bad[2][:, 5:] = torch.nan, torch.nan, torch.nan
        agree(attend(*bad, *arrays, key_lengths=5, query_mask=HALF), expected)
        grads = pull(*bad, *arrays, torch.ones_like(v), key_lengths=5, query_mask=HALF)
        assert all(torch.isfinite(grad).all() for grad in grads.values())


GROWTH = {
    "falling": lambda n: torch.linspace(1, 30, n),
    "rising": lambda n: torch.linspace(30, 1, n),
    "jumps between segments": lambda n: 4.0 - 0.8 * (torch.arange(n) // 64),
}
"""The lengths of keys: the exponents of long ones are far below 0."""


@pytest.mark.parametrize("growth", GROWTH)
@pytest.mark.parametrize("tokens", [30, 200])
def test_no_exponential_overflows_or_is_lost(tokens: int, growth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exponents that rise, or fall, by hundreds, whose roundings are those of features: earlier queries see nothing of
    later keys."""
    monkeypatch.setattr(linear_calls, "FEWEST", 1)
    attend, pull = functions("performer_attention")
    q, k, v = inputs((tokens,), (tokens,))
    k = torch.nn.functional.normalize(k[:1] + 0.1 * k) * GROWTH[growth](tokens)[:, None]
    wide, do = [x.double() for x in (q, k, v, OMEGA)], draw(6, tokens, E)
    exact = attnkit.performer_attention(*wide, causal=True, impl="generic")
    expected = attnkit.performer_attention_vjp(*wide, do.double(), causal=True, impl="generic")
    assert (attend(q, k, v, OMEGA, causal=True) - exact).abs().max() < 1e-4
    for part, grad in pull(q, k, v, OMEGA, do, causal=True).items():
        assert (grad - expected[part]).abs().max() < 3e-4 * expected[part].abs().max(), part


def test_a_floor_under_the_denominator_has_no_slope() -> None:
    """Keys that point away from a query: Σ (1 + cos) is 0 up to rounding, or below."""
    q, v = torch.tensor([[1.0, 0.0, 0.0, 0.0]]), draw(3, 2, E)
    k = torch.tensor([[-1.0, 0.0, 0.0, 0.0], [-2.0, 0.0, 0.0, 0.0]])
    attend, pull = functions("cosine_attention")
    do = torch.ones(1, E)
    expected = attnkit.cosine_attention_vjp(q, k, v, do, impl="generic")
    assert torch.equal(attend(q, k, v), torch.zeros(1, E))
    for part, grad in pull(q, k, v, do).items():
        agree(grad, expected[part])


def test_the_custom_op_takes_levels_and_a_floor() -> None:
    q, k, v = (x.requires_grad_() for x in inputs((2, 9), (2, 9)))
    text = "feature_map='identity';normalize=True;causal=True;floor=True;eps=0.5"
    arrays = [q, k, v, torch.linspace(0, 1, 9)]
    torch.library.opcheck(linear.CUSTOM.forward, ("performer_attention", arrays, "q,k,v,levels", text))
