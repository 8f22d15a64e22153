"""Whatever padding holds, NaN or infinity, results are bitwise those of padding with zeros, and NumPy stays silent."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import attnkit_reference as reference
from attnkit_reference.pointwise import SCORE_FUNCTIONS

OPS: dict[str, dict[str, Any]] = {
    "softmax_attention": {},
    "reluformer_attention": {},
    "sigmoid_attention": {},
    **{f"pointwise_attention-{name}": {"activation": name} for name in reference.ACTIVATIONS},
}
L, S = 5, 6
B, H = 2, 4

MASK = np.ones((B, 1, L, S), dtype=bool)
MASK[0, 0, :, 4:] = False
MASK[1, 0, :, 0] = False
MASK[1, 0, 2, :] = False

PADDING: dict[str, dict[str, Any]] = {
    "mask": {"mask": MASK},
    "key_lengths": {"key_lengths": np.array([[4], [0]])},
    "query_mask": {"query_mask": np.array([[[True, True, True, True, False]], [[False, True, False, True, True]]])},
    "window": {"window": (0, 0), "query_mask": np.arange(L) < 3},
    "causal": {"causal": "upper_left"},
    "null rows": {"causal": True, "key_lengths": 2, "query_mask": np.arange(L) > 0},
}


def visible_pairs(padding: str) -> Any:
    ones_q, ones_k = np.ones((B, H, L, 1)), np.ones((B, H, S, 1))
    return reference.sigmoid_attention_weights(ones_q, ones_k, **PADDING[padding]) > 0


def inputs(padding: str, hole: float, fill: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Arrays whose padding holds `hole`: rows that take no part, and bias and dropout_mask at invisible pairs."""
    rng = np.random.default_rng(0)
    visible = visible_pairs(padding)
    q, do = rng.normal(size=(B, H, L, 3)), rng.normal(size=(B, H, L, 2))
    k, v = rng.normal(size=(B, 2, S, 3)), rng.normal(size=(B, 2, S, 2))
    bias, dropout_mask = rng.normal(size=(B, H, L, S)), rng.normal(size=(B, H, L, S))
    null = ~visible.any(-1)
    unseen = ~visible.any(-2).reshape(B, 2, 2, S).any(2)
    for x, hidden in ((q, null), (do, null), (k, unseen), (v, unseen), (bias, ~visible), (dropout_mask, ~visible)):
        x[hidden] = fill(x[hidden], hole)
    return {"q": q, "k": k, "v": v, "do": do, "bias": bias, "dropout_mask": dropout_mask}


def constant(x: Any, hole: float) -> Any:
    return np.full_like(x, hole)


def mixed(x: Any, hole: float) -> Any:
    return np.resize([hole, -hole, np.nan, 1e308, -1e308], x.shape)


def everything(op: str, padding: str, arrays: dict[str, Any]) -> dict[str, Any]:
    """All results of an op on these arrays, by name."""
    name, own = op.split("-")[0], OPS[op]
    q, k, v, do = (arrays[x] for x in ("q", "k", "v", "do"))
    common = {**own, **PADDING[padding], "bias": arrays["bias"], "enable_gqa": True}
    dropping = {**common, "dropout_mask": arrays["dropout_mask"]}
    entropy = () if SCORE_FUNCTIONS[own.get("activation", "relu")].signed else ("entropy",)
    fields = ("total", "sum_squares", "maximum", "nonzero", "visible", *entropy)
    rows = do[..., 0]
    dstats = reference.RowStatistics(
        total=rows, sum_squares=rows, maximum=rows, entropy=rows if entropy else None, visible=rows
    )
    o, stats = reference.attention_with_statistics(name, q, k, v, fields=fields, **dropping)
    results = {"o": getattr(reference, name)(q, k, v, **dropping), "o beside statistics": o}
    results["w"] = getattr(reference, f"{name}_weights")(q, k, **common)
    results.update({field: getattr(stats, field) for field in fields})
    extra = {"dlse": rows} if name == "softmax_attention" else {}
    vjps = {
        "op": getattr(reference, f"{name}_vjp")(q, k, v, do, **extra, **dropping),
        "magnitudes": getattr(reference, f"{name}_magnitudes")(q, k, v, do, **extra, **dropping),
        "statistics": reference.row_statistics_vjp(name, q, k, dstats, fields=fields, **common),
        "both": reference.attention_with_statistics_vjp(name, q, k, v, do, dstats, fields=fields, **dropping),
    }
    for kind, found in vjps.items():
        results.update({f"{kind} {x}": gradient for x, gradient in found.items()})
    if name == "softmax_attention":
        results["lse"] = reference.softmax_attention(q, k, v, return_lse=True, **dropping)[1]
    return results


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("op", OPS)
def test_poison_is_the_same_as_zeros(op: str, padding: str) -> None:
    clean = everything(op, padding, inputs(padding, 0.0, constant))
    for hole, fill in ((np.nan, constant), (np.inf, constant), (-np.inf, constant), (np.inf, mixed)):
        poisoned = everything(op, padding, inputs(padding, hole, fill))
        assert poisoned.keys() == clean.keys()
        for name, expected in clean.items():
            np.testing.assert_array_equal(poisoned[name], expected, err_msg=name)
            assert name == "lse" or np.all(np.isfinite(expected)), name


@pytest.mark.parametrize("op", OPS)
def test_padding_in_the_samples_is_real(op: str) -> None:
    for padding in PADDING:
        visible = visible_pairs(padding)
        assert not np.all(visible)
        assert np.any(visible)
        o = everything(op, padding, inputs(padding, 0.0, constant))["o"]
        assert np.any(o)


@pytest.mark.parametrize("op", OPS)
def test_a_huge_invisible_score_reaches_nothing(op: str) -> None:
    # query 0 and key 1 both take part, but not with each other: only their common score overflows
    name, own = op.split("-")[0], OPS[op]
    q, k, v = np.array([[1e200, 0.0], [0.0, 1.0]]), np.array([[0.0, 1.0], [1e200, 1.0]]), np.ones((2, 1))
    mask = np.array([[True, False], [True, True]])
    for gradient in getattr(reference, f"{name}_vjp")(q, k, v, np.ones((2, 1)), mask=mask, **own).values():
        assert np.all(np.isfinite(gradient))


@pytest.mark.parametrize("op", OPS)
def test_the_future_reaches_nothing_before_it(op: str) -> None:
    name, own = op.split("-")[0], OPS[op]
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.normal(size=(6, size)) for size in (3, 3, 2, 2))
    other = [np.concatenate([x[:4], rng.normal(size=(2, x.shape[1]))]) for x in (q, k, v)]
    before = getattr(reference, name)(q, k, v, causal=True, **own)[:4]
    np.testing.assert_array_equal(before, getattr(reference, name)(*other, causal=True, **own)[:4])
    do[4:] = 0
    gradients = getattr(reference, f"{name}_vjp")(q, k, v, do, causal=True, **own)
    changed = getattr(reference, f"{name}_vjp")(*other, do, causal=True, **own)
    for x, gradient in gradients.items():
        np.testing.assert_array_equal(gradient[:4], changed[x][:4])
        assert not np.any(gradient[4:])


@pytest.mark.parametrize("op", OPS)
def test_the_amount_of_padding_does_not_matter(near: Any, op: str) -> None:
    name, own = op.split("-")[0], OPS[op]
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 4)), rng.normal(size=(5, 4)), rng.normal(size=(5, 2))
    short = getattr(reference, name)(q, k, v, **own)
    padded = [np.concatenate([x, np.full((7, x.shape[1]), np.nan)]) for x in (k, v)]
    near(getattr(reference, name)(q, *padded, key_lengths=5, **own), short)
