"""Rules that every low-rank op obeys: padding, magnitudes, and what a person reads who calls one wrongly."""

import re
from typing import Any

import numpy as np
import pytest

import attnkit_reference as reference
from attnkit_reference.lowrank import landmarks as samplers

UNITS = 64 * np.finfo(np.float64).eps
B, H, N, M = 2, 4, 7, 3
LENGTHS = np.array([[5], [0]])
TOKENS = np.array([[[1, 1, 0, 1, 0, 1, 1]], [[0, 1, 1, 1, 1, 1, 0]]], dtype=bool)
OPS: dict[str, dict[str, Any]] = {
    "soft_attention": {},
    "soft_attention-unrolled": {"inverse_grad": "unrolled", "newton_steps": 5, "ridge": 0.1},
    "nystrom_attention": {"num_landmarks": M},
    "nystrom_attention-batch": {"num_landmarks": M, "init": "batch_max", "enable_gqa": True},
    "linformer_attention": {"enable_gqa": True},
}
PADDING: dict[str, dict[str, Any]] = {
    "key_lengths": {"key_lengths": LENGTHS},
    "query_mask": {"query_mask": TOKENS},
    "mask": {"mask": TOKENS[:, :, None]},
    "all": {"key_lengths": LENGTHS + 1, "query_mask": TOKENS, "mask": np.arange(N) != 3},
}


def arrays_of(op: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    heads = 2 if OPS[op].get("enable_gqa") else H
    shapes = {"q": (B, H, N, 3), "k": (B, heads, N, 3), "v": (B, heads, N, 2)}
    if op.startswith("soft"):
        shapes = {"q": shapes["q"], "v": shapes["v"], "landmarks": (B, H, M, 3)}
    if op.startswith("linformer"):
        shapes |= {"proj_k": (heads, M, N + 2), "proj_v": (M, N)}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def visible(op: str, padding: str) -> tuple[Any, Any]:
    """Which queries and which keys take part, (B, 1, N) each."""
    given = PADDING[padding]
    keys = np.arange(N) < given.get("key_lengths", np.full((B, 1), N))[..., None]
    if "mask" in given:
        keys = keys & np.broadcast_to(given["mask"], (B, 1, 1, N))[:, :, 0]
    queries = given.get("query_mask", np.ones((B, 1, N), dtype=bool))
    if op.startswith("linformer"):
        return queries & keys.any(-1, keepdims=True), keys & queries.any(-1, keepdims=True)
    return queries & keys, queries & keys


def everything(op: str, padding: str, hole: float) -> dict[str, Any]:
    name, arrays = op.split("-")[0], arrays_of(op)
    queries, keys = visible(op, padding)
    do = np.random.default_rng(1).normal(size=(B, H, N, 2))
    for array, there in ((arrays["q"], queries), (arrays.get("k"), keys), (arrays["v"], keys), (do, queries)):
        if array is not None:
            array[~np.broadcast_to(there, array.shape[:-1])] = hole
    params = {**OPS[op], **PADDING[padding]}
    if op.startswith("soft"):
        arrays["landmarks"][:, :, 1] = hole
        params["landmark_mask"] = np.arange(M) != 1
    matrix = {n: x for n, x in arrays.items() if n not in ("v", "proj_v")}
    found = {
        "o": getattr(reference, name)(*arrays.values(), **params),
        "w": getattr(reference, f"{name}_weights")(*matrix.values(), **params),
    }
    for kind in ("vjp", "magnitudes"):
        answer = getattr(reference, f"{name}_{kind}")(*arrays.values(), do, **params)
        found |= {f"{kind} {n}": x for n, x in answer.items()}
    assert not found["o"][~np.broadcast_to(queries, (B, H, N))].any()
    assert not found["vjp q"][~np.broadcast_to(queries, (B, H, N))].any()
    assert not found["vjp v"][~np.broadcast_to(keys, arrays["v"].shape[:-1])].any()
    return found


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("op", OPS)
def test_poison_is_the_same_as_zeros(op: str, padding: str) -> None:
    clean = everything(op, padding, 0.0)
    assert clean["o"].any()
    for hole in (np.nan, np.inf, 1e308):
        poisoned = everything(op, padding, hole)
        for name, expected in clean.items():
            assert np.all(np.isfinite(expected)), name
            np.testing.assert_array_equal(poisoned[name], expected, err_msg=name)


@pytest.mark.parametrize("op", OPS)
def test_a_visible_nan_is_seen(op: str) -> None:
    arrays = arrays_of(op)
    arrays["v"][0, 0, 2] = np.nan
    assert np.isnan(getattr(reference, op.split("-")[0])(*arrays.values(), **OPS[op])[0, 0]).all()


@pytest.mark.parametrize("op", OPS)
def test_batch_mates_do_not_matter_unless_batch_max(near: Any, op: str) -> None:
    arrays, name = arrays_of(op), op.split("-")[0]
    arrays["q"][1] *= 3
    together = getattr(reference, name)(*arrays.values(), **OPS[op])[:1]
    alone = {n: x if x.ndim < 4 else x[:1] for n, x in arrays.items()}
    found = getattr(reference, name)(*alone.values(), **OPS[op])
    if op == "nystrom_attention-batch":
        assert np.max(np.abs(found - together)) > UNITS * 1e6
    else:
        near(found, together)


@pytest.mark.parametrize("kind", ["implicit", "unrolled"])
def test_magnitudes_of_the_inverse(covers: Any, kind: str) -> None:
    x = np.random.default_rng(0).normal(size=(2, 5, 3))
    a = np.exp(-np.sum((x[:, :, None] - x[:, None]) ** 2, axis=-1) / 2)
    dx, own = np.random.default_rng(1).normal(size=a.shape), {"newton_steps": 6, "inverse_grad": kind}
    golden = dict(zip(("x", "residuals"), reference.newton_inverse(a, return_residuals=True, **own), strict=True))
    golden |= reference.newton_inverse_vjp(a, dx, **own)
    found = reference.newton_inverse_magnitudes(a, dx, **own)
    assert {n.removesuffix("_before") for n in found} == set(golden)
    for n, value in golden.items():
        covers(found[n], value, n)
    assert np.all(found["a_before"] >= found["a"])
    assert np.any(found["a_before"] > 1.1 * found["a"])


@pytest.mark.parametrize("name", ["average_pool", "convolution", "random", "biased"])
def test_magnitudes_of_samplers(same: Any, name: str) -> None:
    rng = np.random.default_rng(0)
    arrays = {"q": rng.normal(size=(2, 12, 3))}
    if name == "convolution":
        arrays["kernel"] = rng.normal(size=(2, 3, 2, 2))
    own: dict[str, Any] = {"random": {"indices": np.array([2, 2, 0])}, "biased": {"m": 3}}.get(
        name, {"height": 4, "width": 3, "r": 2}
    )
    sampler, vjp = getattr(samplers, name), getattr(samplers, f"{name}_vjp")
    positive = {n: np.abs(x) for n, x in arrays.items()}
    cotangent = rng.normal(size=sampler(**arrays, **own).shape)
    found = getattr(samplers, f"{name}_magnitudes")(*arrays.values(), cotangent, **own)
    same(found.pop("landmarks"), sampler(**positive, **own))
    expected = vjp(*positive.values(), np.abs(cotangent), **own)
    assert set(found) == set(expected)
    for n, value in found.items():
        same(value, expected[n])


# ----------------------------------------------------------------------------------------------------- errors

GRID = {"q": np.ones((15, 2)), "height": 3, "width": 5, "r": 2}
SAMPLER_ERRORS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("average_pool", {**GRID, "height": 4}, ValueError, "height and width; expected height * width = 15 tokens, got 4"),
    ("average_pool", {**GRID, "r": 4}, ValueError, "r; expected at most height = 3 and width = 5, got 4"),
    ("average_pool", {**GRID, "r": 0}, ValueError, "r; expected an integer >= 1, got 0"),
    ("average_pool", {**GRID, "query_mask": np.ones(15)}, TypeError, "query_mask; expected a boolean array"),
    ("average_pool", {**GRID, "mask": np.ones(15, bool)}, ValueError, "unexpected argument 'mask'"),
    ("convolution", {**GRID, "kernel": np.ones((2, 3, 2, 2))}, ValueError, "kernel; expected (d_out, 2, 2, 2), got"),
    (
        "random",
        {"q": GRID["q"], "indices": np.array([15])},
        ValueError,
        "indices; expected (..., m) integers in [0, 15)",
    ),
    (
        "random",
        {"q": GRID["q"], "indices": np.array([-1])},
        ValueError,
        "indices; expected (..., m) integers in [0, 15)",
    ),
    ("random", {"q": GRID["q"], "indices": np.ones(2)}, TypeError, "indices; expected integers"),
    ("biased", {"q": GRID["q"], "m": 16}, ValueError, "m; expected at most the 15 tokens of q, got 16"),
    ("random_indices", {"n": 3, "m": 4, "seed": 0}, ValueError, "m; expected at most n = 3, got 4"),
]


@pytest.mark.parametrize("index", range(len(SAMPLER_ERRORS)))
def test_errors_of_samplers(index: int) -> None:
    name, params, error, text = SAMPLER_ERRORS[index]
    with pytest.raises(error, match=f"^{name}: {re.escape(text)}"):
        getattr(samplers, name)(**params)
