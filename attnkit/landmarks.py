"""Landmark samplers for `soft_attention`: how m landmarks are made from n tokens (Lu et al. 2021 §3.2, §4.4).

Tokens (..., n, d) of a picture lie row by row: token y·width + x is the pixel in row y and column x. A sampler that is
given `query_mask` (..., n), True = a token, also returns a `landmark_mask` (..., m), False = an invalid landmark:

>>> import numpy as np, attnkit
>>> q, v = np.random.default_rng(0).standard_normal((2, 3, 36, 8)).astype("float32"), np.ones((2, 3, 36, 4), "float32")
>>> attnkit.soft_attention(q, v, attnkit.landmarks.average_pool(q, 6, 6, 2)).shape
(2, 3, 36, 4)

Samplers take arrays of any library, compute in float32 (float64 for float64) and return landmarks in the dtype of q.
Each has an explicit gradient `<sampler>_vjp` and is differentiable. ValueError for shapes and values, TypeError for
dtypes.
"""

import math

from attnkit._core import check
from attnkit._core.autograd import keep_autocast_out
from attnkit._core.dispatch import namespace
from attnkit._core.mask import positions
from attnkit._core.quadratic import cast, compute_dtype
from attnkit._core.special import as_index, generator, take_along, without_autocast
from attnkit._core.tokens import chosen, cotangent, whole, zeros
from attnkit._core.typing import Array, Namespace, Outputs


def _checked(op: str, q: Array, query_mask: Array | None, **more: Array) -> Namespace:
    """The namespace of q, after checking that q, the mask and other float arrays match."""
    check.one_home(op, ("q", *more), (q, *more.values()))
    if q.ndim < 2:
        check.wrong_shape(op, "q", q, "at least two axes, (..., tokens, features)")
    if query_mask is not None:
        context = check.Context(op, q, tuple(q.shape[:-2]), q.shape[-2], q.shape[-2], {})
        check.OPTIONS["query_mask"](context, "query_mask", query_mask)
    return namespace(q)


def _wide(xp: Namespace, q: Array, query_mask: Array | None) -> Array:
    """q in the compute dtype with 0 at invalid tokens."""
    return chosen(xp, query_mask, cast(xp, q, compute_dtype(xp, q)))


def _product(x: Array, y: Array) -> Array:
    """x y, not rounded by torch's autocast, nor its gradients (semantics A7)."""
    with without_autocast(x):
        product = x @ y
    keep_autocast_out(product, (x, y), {})
    return product


def _every_token(xp: Namespace, query_mask: Array, q: Array) -> Array:
    return xp.broadcast_to(query_mask, q.shape[:-1])


def _grid(op: str, q: Array, height: int, width: int, r: int) -> None:
    for name, value in (("height", height), ("width", width), ("r", r)):
        whole(op, name, value, 1)
    if height * width != q.shape[-2]:
        raise ValueError(f"{op}: height·width must be the {q.shape[-2]} tokens of q; got {height}·{width}")
    if r > min(height, width):
        raise ValueError(f"{op}: r must not exceed height {height} and width {width}; got {r}")


def _windows(xp: Namespace, x: Array, height: int, width: int, r: int) -> Array:
    """(..., height·width, c) as (..., rows, r, columns, r, c): complete windows only."""
    lead, c, rows, columns = x.shape[:-2], x.shape[-1], height // r, width // r
    picture = xp.reshape(x, (*lead, height, width, c))[..., : rows * r, : columns * r, :]
    return xp.reshape(picture, (*lead, rows, r, columns, r, c))


def _picture(xp: Namespace, x: Array, height: int, width: int) -> Array:
    """The reverse of `_windows`, with 0 at tokens outside every window."""
    *lead, rows, r, columns, _, c = x.shape
    x = xp.reshape(x, (*lead, rows * r, columns * r, c))
    if width > columns * r:
        x = xp.concat([x, zeros(xp, x, (*lead, rows * r, width - columns * r, c))], axis=-2)
    if height > rows * r:
        x = xp.concat([x, zeros(xp, x, (*lead, height - rows * r, width, c))], axis=-3)
    return xp.reshape(x, (*lead, height * width, c))


def _tokens_per_window(
    xp: Namespace, q: Array, query_mask: Array | None, height: int, width: int, r: int
) -> Array | None:
    """The number of valid tokens of each window, (..., m, 1) in the compute dtype; None where it is always r²."""
    if query_mask is None:
        return None
    ones = xp.astype(_every_token(xp, query_mask, q), compute_dtype(xp, q))[..., None]
    count = xp.sum(_windows(xp, ones, height, width, r), axis=(-4, -2))
    return xp.reshape(count, (*count.shape[:-3], (height // r) * (width // r), 1))


def _divided(xp: Namespace, x: Array, count: Array | None, r: int) -> Array:
    return x * (1.0 / (r * r)) if count is None else x / xp.where(count == 0, 1.0, count)


def average_pool(q: Array, height: int, width: int, r: int, *, query_mask: Array | None = None) -> Outputs:
    """Means over windows of r×r tokens with stride r; incomplete windows are dropped.

    Args:
        q: (..., height·width, d).
        query_mask: boolean (..., height·width). Means run over valid tokens; a window without one is an invalid
            landmark, and 0.

    Returns:
        landmarks (..., m, d), m = ⌊height/r⌋·⌊width/r⌋; with `query_mask` (landmarks, landmark_mask).
    """
    xp = _checked("average_pool", q, query_mask)
    _grid("average_pool", q, height, width, r)
    total = xp.sum(_windows(xp, _wide(xp, q, query_mask), height, width, r), axis=(-4, -2))
    total = xp.reshape(total, (*q.shape[:-2], (height // r) * (width // r), q.shape[-1]))
    count = _tokens_per_window(xp, q, query_mask, height, width, r)
    landmarks = cast(xp, _divided(xp, total, count, r), q.dtype)
    return landmarks if count is None else (landmarks, count[..., 0] > 0)


def average_pool_vjp(
    q: Array, dlandmarks: Array, height: int, width: int, r: int, *, query_mask: Array | None = None
) -> dict[str, Array]:
    """Gradient {"q"} of `average_pool`."""
    op = "average_pool_vjp"
    xp = _checked(op, q, query_mask, dlandmarks=dlandmarks)
    _grid(op, q, height, width, r)
    rows, columns = height // r, width // r
    cotangent(op, "dlandmarks", dlandmarks, (*q.shape[:-2], rows * columns, q.shape[-1]))
    count = _tokens_per_window(xp, q, query_mask, height, width, r)
    share = _divided(xp, cast(xp, dlandmarks, compute_dtype(xp, q)), count, r)
    share = xp.reshape(share, (*q.shape[:-2], rows, 1, columns, 1, q.shape[-1]))
    spread = xp.broadcast_to(share, (*q.shape[:-2], rows, r, columns, r, q.shape[-1]))
    return {"q": cast(xp, chosen(xp, query_mask, _picture(xp, spread, height, width)), q.dtype)}


def _patches(xp: Namespace, q: Array, query_mask: Array | None, height: int, width: int, r: int) -> Array:
    """The tokens of each window side by side, (..., m, r·r·d)."""
    windows = _windows(xp, _wide(xp, q, query_mask), height, width, r)
    lead = windows.ndim - 5
    ordered = xp.permute_dims(windows, (*range(lead), lead, lead + 2, lead + 1, lead + 3, lead + 4))
    return xp.reshape(ordered, (*q.shape[:-2], (height // r) * (width // r), r * r * q.shape[-1]))


def _kernel_matrix(xp: Namespace, op: str, q: Array, kernel: Array, r: int) -> Array:
    """The kernel (d_out, d, r, r) as (r·r·d, d_out) in the compute dtype."""
    d = q.shape[-1]
    if kernel.ndim != 4 or tuple(kernel.shape[1:]) != (d, r, r):
        check.wrong_shape(op, "kernel", kernel, f"(d_out, {d}, {r}, {r})")
    ordered = xp.permute_dims(cast(xp, kernel, compute_dtype(xp, q)), (2, 3, 1, 0))
    return xp.reshape(ordered, (r * r * d, kernel.shape[0]))


def convolution(
    q: Array, kernel: Array, height: int, width: int, r: int, *, query_mask: Array | None = None
) -> Outputs:
    """landmark_o(y, x) = Σ_{c,a,b} kernel[o, c, a, b]·q[(r·y + a)·width + r·x + b, c]: an r×r convolution of stride r.

    It has no bias, does not flip the kernel and drops incomplete windows, as torch's conv2d without padding.

    Args:
        q: (..., height·width, d).
        kernel: (d_out, d, r, r), any real float dtype, shared by all leading axes. Landmarks for `soft_attention` need
            d_out = d.
        query_mask: boolean (..., height·width). Invalid tokens are read as 0; a window of nothing else is an invalid
            landmark.

    Returns:
        landmarks (..., m, d_out), m = ⌊height/r⌋·⌊width/r⌋; with `query_mask` (landmarks, landmark_mask).
    """
    op = "convolution"
    xp = _checked(op, q, query_mask, kernel=kernel)
    _grid(op, q, height, width, r)
    landmarks = _product(_patches(xp, q, query_mask, height, width, r), _kernel_matrix(xp, op, q, kernel, r))
    count = _tokens_per_window(xp, q, query_mask, height, width, r)
    landmarks = cast(xp, landmarks, q.dtype)
    return landmarks if count is None else (landmarks, count[..., 0] > 0)


def convolution_vjp(
    q: Array, kernel: Array, dlandmarks: Array, height: int, width: int, r: int, *, query_mask: Array | None = None
) -> dict[str, Array]:
    """Gradients {"q", "kernel"} of `convolution`."""
    op = "convolution_vjp"
    xp = _checked(op, q, query_mask, kernel=kernel, dlandmarks=dlandmarks)
    _grid(op, q, height, width, r)
    matrix, d = _kernel_matrix(xp, op, q, kernel, r), q.shape[-1]
    rows, columns = height // r, width // r
    cotangent(op, "dlandmarks", dlandmarks, (*q.shape[:-2], rows * columns, kernel.shape[0]))
    g = cast(xp, dlandmarks, matrix.dtype)
    patches = xp.reshape(_product(g, matrix.mT), (*q.shape[:-2], rows, columns, r, r, d))
    lead = patches.ndim - 5
    patches = xp.permute_dims(patches, (*range(lead), lead, lead + 2, lead + 1, lead + 3, lead + 4))
    dq = chosen(xp, query_mask, _picture(xp, patches, height, width))
    windows = math.prod(q.shape[:-2]) * rows * columns
    flat = xp.reshape(_patches(xp, q, query_mask, height, width, r), (windows, r * r * d))
    dmatrix = _product(flat.mT, xp.reshape(g, (windows, kernel.shape[0])))
    dkernel = xp.permute_dims(xp.reshape(dmatrix, (r, r, d, kernel.shape[0])), (3, 2, 0, 1))
    return {"q": cast(xp, dq, q.dtype), "kernel": cast(xp, dkernel, kernel.dtype)}


def _check_indices(op: str, q: Array, indices: Array) -> None:
    if not check.is_array(indices):
        raise TypeError(f"{op}: indices must be an array; got {type(indices).__name__}")
    context = check.Context(op, q, tuple(q.shape[:-2]), q.shape[-2], q.shape[-2], {})
    if indices.ndim == 0:
        check.wrong_shape(op, "indices", indices, "(..., m)")
    shape = (*q.shape[:-2], indices.shape[-1])
    check.option_array(context, "indices", indices, check.INTEGERS, "an integer dtype", shape, "(..., m)")


def _picked(xp: Namespace, x: Array, indices: Array) -> Array:
    """The rows (axis -2) of x at indices (m,) or (..., m)."""
    indices = as_index(indices)
    if indices.ndim == 1:
        return xp.take(x, indices, axis=-2)
    lead = x.shape[:-2]
    spread = xp.broadcast_to(indices[..., None], (*lead, indices.shape[-1], x.shape[-1]))
    return take_along(xp, x, spread, -2)


def random(q: Array, indices: Array, *, query_mask: Array | None = None) -> Outputs:
    """The tokens at `indices`, drawn beforehand, for example by `random_indices`.

    Args:
        q: (..., n, d).
        indices: integers (m,) or (..., m) in [0, n).
        query_mask: boolean (..., n). An index of an invalid token is an invalid landmark, and 0.

    Returns:
        landmarks (..., m, d); with `query_mask` (landmarks, landmark_mask).
    """
    xp = _checked("random", q, query_mask)
    _check_indices("random", q, indices)
    landmarks = cast(xp, _picked(xp, _wide(xp, q, query_mask), indices), q.dtype)
    if query_mask is None:
        return landmarks
    return landmarks, _picked(xp, _every_token(xp, query_mask, q)[..., None], indices)[..., 0]


def random_vjp(q: Array, dlandmarks: Array, indices: Array, *, query_mask: Array | None = None) -> dict[str, Array]:
    """Gradient {"q"} of `random`: a token that was picked several times gets the sum."""
    op = "random_vjp"
    xp = _checked(op, q, query_mask, dlandmarks=dlandmarks)
    _check_indices(op, q, indices)
    cotangent(op, "dlandmarks", dlandmarks, (*q.shape[:-2], indices.shape[-1], q.shape[-1]))
    dtype = compute_dtype(xp, q)
    token = positions(xp, q, 0, q.shape[-2])[:, None]
    here = xp.astype(token == indices[..., None, :], dtype)
    return {"q": cast(xp, chosen(xp, query_mask, _product(here, cast(xp, dlandmarks, dtype))), q.dtype)}


def _check_first(op: str, q: Array, m: int) -> None:
    whole(op, "m", m, 1)
    if m > q.shape[-2]:
        raise ValueError(f"{op}: m must not exceed the {q.shape[-2]} tokens of q; got {m}")


def biased(q: Array, m: int, *, query_mask: Array | None = None) -> Outputs:
    """The first m tokens by position; with padding on the left they may be invalid. Returns as `random`."""
    xp = _checked("biased", q, query_mask)
    _check_first("biased", q, m)
    landmarks = cast(xp, _wide(xp, q, query_mask)[..., :m, :], q.dtype)
    return landmarks if query_mask is None else (landmarks, _every_token(xp, query_mask, q)[..., :m])


def biased_vjp(q: Array, dlandmarks: Array, m: int, *, query_mask: Array | None = None) -> dict[str, Array]:
    """Gradient {"q"} of `biased`: 0 after the first m tokens."""
    op = "biased_vjp"
    xp = _checked(op, q, query_mask, dlandmarks=dlandmarks)
    _check_first(op, q, m)
    cotangent(op, "dlandmarks", dlandmarks, (*q.shape[:-2], m, q.shape[-1]))
    grad = cast(xp, dlandmarks, compute_dtype(xp, q))
    rest = zeros(xp, grad, (*q.shape[:-2], q.shape[-2] - m, q.shape[-1]))
    return {"q": cast(xp, chosen(xp, query_mask, xp.concat([grad, rest], axis=-2)), q.dtype)}


def random_indices(n: int, m: int, seed: int) -> Array:
    """m of n positions without replacement, uniformly, in increasing order: a NumPy array, the same for any library."""
    op = "random_indices"
    for name, value, least in (("n", n, 1), ("m", m, 1), ("seed", seed, 0)):
        whole(op, name, value, least)
    if m > n:
        raise ValueError(f"{op}: m must not exceed n = {n}; got {m}")
    indices = generator(seed).permutation(n)[:m]
    indices.sort()
    return indices
