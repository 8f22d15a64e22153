"""Landmark samplers of SOFT: how m landmarks are made from n tokens (Lu et al. 2021 §3.2, §4.4).

Tokens (..., n, d) of an image are in row-major order: token y width + x is the pixel in row y and column x. With
query_mask (..., n), True = a token, a sampler also returns a landmark_mask (..., m), False = an invalid landmark.
"""

import math
from typing import cast

import numpy as np

from attnkit_reference._check import Array, as_float, boolean, broadcast, cotangent, integers, tokens
from attnkit_reference._op import refuse_others
from attnkit_reference.lowrank.newton import whole

Landmarks = Array | tuple[Array, Array]


def _tokens(op: str, q: Array, query_mask: Array | None) -> tuple[Array, Array]:
    """q in float64 with 0 at invalid tokens, and the valid tokens (..., n)."""
    wide = tokens(op, "q", q)
    valid = np.ones(wide.shape[:-1], dtype=bool)
    if query_mask is not None:
        valid = broadcast(op, "query_mask", boolean(op, "query_mask", query_mask), wide.shape[:-1])
    return np.where(valid[..., None], wide, 0.0), valid


def _answer(landmarks: Array, landmark_mask: Array, query_mask: Array | None) -> Landmarks:
    return landmarks if query_mask is None else (landmarks, landmark_mask)


def _windows(op: str, n: int, height: object, width: object, r: object) -> Array:
    """The tokens (m, r²) of every window, row by row; windows that would cross the border are dropped."""
    height, width, r = (whole(op, *x, 1) for x in (("height", height), ("width", width), ("r", r)))
    if height * width != n:
        raise ValueError(f"{op}: height and width; expected height * width = {n} tokens, got {height} * {width}")
    if r > min(height, width):
        raise ValueError(f"{op}: r; expected at most height = {height} and width = {width}, got {r}")
    token = np.arange(n).reshape(height, width)
    windows = [
        token[y : y + r, x : x + r].reshape(-1) for y in range(0, height - r + 1, r) for x in range(0, width - r + 1, r)
    ]
    return np.stack(windows)


def _rows(op: str, indices: object, shape: tuple[int, ...]) -> Array:
    """indices broadcast to (..., m)."""
    index = integers(op, "indices", indices)
    if index.ndim == 0 or np.any((index < 0) | (index >= shape[-2])):
        raise ValueError(f"{op}: indices; expected (..., m) integers in [0, {shape[-2]}), got {indices!r}")
    return broadcast(op, "indices", index, (*shape[:-2], index.shape[-1]))


def _pooling(op: str, q: Array, height: int, width: int, r: int, query_mask: Array | None) -> tuple[Array, Array]:
    """q cleaned, and the matrix (..., m, n) whose rows average the valid tokens of a window."""
    clean, valid = _tokens(op, q, query_mask)
    windows = _windows(op, q.shape[-2], height, width, r)
    inside = np.zeros((len(windows), q.shape[-2]), dtype=bool)
    np.put_along_axis(inside, windows, True, axis=1)
    window = inside & valid[..., None, :]
    return clean, window / np.maximum(window.sum(axis=-1, keepdims=True), 1)


@refuse_others
def average_pool(q: Array, height: int, width: int, r: int, *, query_mask: Array | None = None) -> Landmarks:
    """Means of the valid tokens of r×r windows with stride r.

    q (..., height width, d) -> landmarks (..., m, d), m = floor(height/r) floor(width/r), or (landmarks,
    landmark_mask) if query_mask is given; a window without a valid token is an invalid landmark, and 0.
    """
    clean, pool = _pooling("average_pool", q, height, width, r, query_mask)
    return _answer(pool @ clean, cast(Array, pool.any(axis=-1)), query_mask)


@refuse_others
def average_pool_vjp(
    q: Array, dlandmarks: Array, height: int, width: int, r: int, *, query_mask: Array | None = None
) -> dict[str, Array]:
    """Gradient {"q"} of `average_pool`: a valid token gets its share 1/count of the cotangent of its window."""
    clean, pool = _pooling("average_pool_vjp", q, height, width, r, query_mask)
    dlandmarks = cotangent("average_pool_vjp", "dlandmarks", dlandmarks, (*pool.shape[:-1], clean.shape[-1]))
    return {"q": np.swapaxes(pool, -1, -2) @ dlandmarks}


@refuse_others
def average_pool_magnitudes(
    q: Array, dlandmarks: Array, height: int, width: int, r: int, *, query_mask: Array | None = None
) -> dict[str, Array]:
    """The sums of `average_pool` and its gradient over absolute values."""
    clean, pool = _pooling("average_pool_magnitudes", q, height, width, r, query_mask)
    return {"landmarks": pool @ np.abs(clean), "q": np.swapaxes(pool, -1, -2) @ np.abs(dlandmarks)}


def _convolved(
    op: str, q: Array, kernel: Array, height: int, width: int, r: int, query_mask: Array | None
) -> tuple[Array, Array, Array, Array]:
    """The windows (m, r²), their tokens (..., m, r² d), the kernel as (r² d, d_out), and which windows hold a token."""
    clean, valid = _tokens(op, q, query_mask)
    wide = as_float(op, "kernel", kernel)
    windows = _windows(op, q.shape[-2], height, width, r)
    if wide.ndim != 4 or wide.shape[1:] != (q.shape[-1], r, r):
        raise ValueError(f"{op}: kernel; expected (d_out, {q.shape[-1]}, {r}, {r}), got {wide.shape}")
    numbers = r * r * q.shape[-1]
    patches = clean[..., windows, :].reshape(*clean.shape[:-2], len(windows), numbers)
    matrix = np.moveaxis(wide, (0, 1), (3, 2)).reshape(numbers, wide.shape[0])
    return windows, patches, matrix, cast(Array, valid[..., windows].any(axis=-1))


@refuse_others
def convolution(
    q: Array, kernel: Array, height: int, width: int, r: int, *, query_mask: Array | None = None
) -> Landmarks:
    """landmark_o at window (y, x) = Σ_{c, a, b} kernel[o, c, a, b] q[(r y + a) width + r x + b, c]; no bias.

    q (..., height width, d), kernel (d_out, d, r, r), shared by all leading axes and not flipped -> landmarks
    (..., m, d_out), m = floor(height/r) floor(width/r), or (landmarks, landmark_mask) if query_mask is given: invalid
    tokens are read as 0, and a window of nothing else is an invalid landmark.
    """
    _, patches, matrix, landmark_mask = _convolved("convolution", q, kernel, height, width, r, query_mask)
    return _answer(patches @ matrix, landmark_mask, query_mask)


def _convolution_pull(
    op: str,
    q: Array,
    kernel: Array,
    dlandmarks: Array,
    size: tuple[int, int, int],
    query_mask: Array | None,
    absolute: bool,
) -> dict[str, Array]:
    windows, patches, matrix, _ = _convolved(op, q, kernel, *size, query_mask)
    grad = cotangent(op, "dlandmarks", dlandmarks, (*patches.shape[:-1], matrix.shape[-1]))
    if absolute:
        grad, patches, matrix = np.abs(grad), np.abs(patches), np.abs(matrix)
    d, r = q.shape[-1], size[-1]
    dq = np.zeros(q.shape)
    dq[..., windows, :] = (grad @ matrix.T).reshape(*grad.shape[:-1], r * r, d)
    rows = math.prod(grad.shape[:-1])
    dmatrix = patches.reshape(rows, r * r * d).T @ grad.reshape(rows, matrix.shape[-1])
    dkernel = np.moveaxis(dmatrix.reshape(r, r, d, matrix.shape[-1]), (3, 2), (0, 1))
    valid = _tokens(op, q, query_mask)[1]
    return {"q": np.where(valid[..., None], dq, 0.0), "kernel": dkernel}


@refuse_others
def convolution_vjp(
    q: Array, kernel: Array, dlandmarks: Array, height: int, width: int, r: int, *, query_mask: Array | None = None
) -> dict[str, Array]:
    """Gradients {"q", "kernel"} of `convolution`; tokens outside every window and invalid ones get 0."""
    return _convolution_pull("convolution_vjp", q, kernel, dlandmarks, (height, width, r), query_mask, False)


@refuse_others
def convolution_magnitudes(
    q: Array, kernel: Array, dlandmarks: Array, height: int, width: int, r: int, *, query_mask: Array | None = None
) -> dict[str, Array]:
    """The sums of `convolution` and its gradients over absolute values."""
    op = "convolution_magnitudes"
    _, patches, matrix, _ = _convolved(op, q, kernel, height, width, r, query_mask)
    gradients = _convolution_pull(op, q, kernel, dlandmarks, (height, width, r), query_mask, True)
    return {"landmarks": np.abs(patches) @ np.abs(matrix), **gradients}


def _picked(op: str, q: Array, indices: object, query_mask: Array | None) -> Landmarks:
    clean, valid = _tokens(op, q, query_mask)
    rows = _rows(op, indices, clean.shape)
    landmarks = np.take_along_axis(clean, rows[..., None], axis=-2)
    return _answer(landmarks, np.take_along_axis(valid, rows, axis=-1), query_mask)


def _put_back(op: str, q: Array, dlandmarks: Array, indices: object, query_mask: Array | None) -> dict[str, Array]:
    clean, valid = _tokens(op, q, query_mask)
    rows = _rows(op, indices, clean.shape)
    grad = cotangent(op, "dlandmarks", dlandmarks, (*rows.shape, clean.shape[-1]))
    dq = np.zeros(clean.shape)
    for item in np.ndindex(rows.shape):
        dq[(*item[:-1], rows[item])] += grad[item]
    return {"q": np.where(valid[..., None], dq, 0.0)}


@refuse_others
def random(q: Array, indices: Array, *, query_mask: Array | None = None) -> Landmarks:
    """The tokens at `indices`, integers (m,) or (..., m), for example from `random_indices`.

    q (..., n, d) -> landmarks (..., m, d), or (landmarks, landmark_mask) if query_mask is given: an index of an invalid
    token is an invalid landmark, and 0.
    """
    return _picked("random", q, indices, query_mask)


@refuse_others
def random_vjp(q: Array, dlandmarks: Array, indices: Array, *, query_mask: Array | None = None) -> dict[str, Array]:
    """Gradient {"q"} of `random`: cotangents added up at their tokens."""
    return _put_back("random_vjp", q, dlandmarks, indices, query_mask)


@refuse_others
def random_magnitudes(
    q: Array, dlandmarks: Array, indices: Array, *, query_mask: Array | None = None
) -> dict[str, Array]:
    """The sums of `random` and its gradient over absolute values."""
    clean, _ = _tokens("random_magnitudes", q, query_mask)
    landmarks = np.abs(np.take_along_axis(clean, _rows("random_magnitudes", indices, q.shape)[..., None], axis=-2))
    return {"landmarks": landmarks, **_put_back("random_magnitudes", q, np.abs(dlandmarks), indices, query_mask)}


@refuse_others
def biased(q: Array, m: int, *, query_mask: Array | None = None) -> Landmarks:
    """The first m tokens, by position: with padding on the left they may be invalid. Returns as `random`."""
    return _picked("biased", q, _first("biased", q, m), query_mask)


@refuse_others
def biased_vjp(q: Array, dlandmarks: Array, m: int, *, query_mask: Array | None = None) -> dict[str, Array]:
    """Gradient {"q"} of `biased`."""
    return _put_back("biased_vjp", q, dlandmarks, _first("biased_vjp", q, m), query_mask)


@refuse_others
def biased_magnitudes(q: Array, dlandmarks: Array, m: int, *, query_mask: Array | None = None) -> dict[str, Array]:
    """The sums of `biased` and its gradient over absolute values."""
    return random_magnitudes(q, dlandmarks, _first("biased_magnitudes", q, m), query_mask=query_mask)


def _first(op: str, q: Array, m: int) -> Array:
    n = tokens(op, "q", q).shape[-2]
    if whole(op, "m", m, 1) > n:
        raise ValueError(f"{op}: m; expected at most the {n} tokens of q, got {m}")
    return np.arange(m)


def random_indices(n: int, m: int, seed: int) -> Array:
    """m of n positions without replacement, uniformly, in increasing order: the same ones in every library."""
    op = "random_indices"
    if whole(op, "m", m, 1) > whole(op, "n", n, 1):
        raise ValueError(f"{op}: m; expected at most n = {n}, got {m}")
    return np.sort(np.random.default_rng(whole(op, "seed", seed, 0)).permutation(n)[:m])
