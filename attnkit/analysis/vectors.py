"""How vectors are spread: their mean cosine, and the variance of a branch relative to its residual."""

import math
from typing import NamedTuple

from attnkit._core import check
from attnkit._core.dispatch import namespace
from attnkit._core.quadratic import cast, compute_dtype
from attnkit._core.special import floats, needs_values, promoted
from attnkit._core.typing import Array, Namespace

# ---------------------------------------------------------------------------------------------- anisotropy


class _Directions(NamedTuple):
    """Per set of vectors: Σû (..., d), Σ‖û‖², the number of vectors used and of zero vectors, (...)."""

    total: Array  # (..., d)
    squares: Array  # (...)
    used: Array  # (...)
    excluded: Array  # (...)


def _directions(op: str, x: Array, mask: Array | None) -> tuple[Namespace, _Directions]:
    """û = x/‖x‖, divided by the largest entry first so that squares do not overflow; 0 for zero and masked vectors."""
    check.float_array(op, "x", x)
    if x.ndim < 2:
        check.wrong_shape(op, "x", x, "at least two axes, (..., m, d)")
    xp = namespace(x)
    wide, there = cast(xp, x, compute_dtype(xp, x)), None
    if mask is not None:
        check.boolean_array(op, "mask", mask, "x", x, tuple(x.shape[:-1]), "(..., m)")
        there = xp.broadcast_to(mask, x.shape[:-1])
        wide = xp.where(there[..., None], wide, 0.0)
    largest = xp.max(xp.abs(wide), axis=-1, keepdims=True) if x.shape[-1] else xp.sum(wide, axis=-1, keepdims=True)
    scaled = wide / xp.where(largest == 0, 1.0, largest)
    norm = xp.sqrt(xp.sum(scaled * scaled, axis=-1, keepdims=True))
    unit = scaled / xp.where(norm == 0, 1.0, norm)
    used = xp.astype(largest[..., 0] != 0, wide.dtype)
    valid = xp.ones_like(used) if there is None else xp.astype(there, wide.dtype)
    return xp, _Directions(
        xp.sum(unit, axis=-2),
        xp.sum(unit * unit, axis=(-2, -1)),
        xp.sum(used, axis=-1),
        xp.sum(valid - used, axis=-1),
    )


@promoted
def anisotropy(x: Array, mask: Array | None = None) -> tuple[Array, Array, Array]:
    """(value, used, excluded): the mean cosine between different vectors of each set, without an (m, m) array.

    value = (‖Σû‖² - Σ‖û‖²)/(m(m-1)) with û = x/‖x‖ over the m vectors that are not 0, which is their mean pairwise
    cosine (Shen et al. 2023 eq 4, after Ethayarajh 2019): 0 for orthogonal vectors, 1 for equal ones; nan if m < 2.

    Args:
        x: (..., m, d): sets of vectors, such as the value slots of a memory or the outputs of a layer.
        mask: boolean, broadcast to (..., m), False = not there.

    Returns:
        value, used = m and excluded = the number of zero vectors, each (...) in the compute dtype.

    Raises:
        ValueError: shapes. TypeError: dtypes, libraries, devices.
    """
    xp, sums = _directions("anisotropy", x, mask)
    several = sums.used >= 2
    pairs = xp.where(several, sums.used * (sums.used - 1.0), 1.0)
    cosines = xp.sum(sums.total * sums.total, axis=-1) - sums.squares
    return xp.where(several, cosines / pairs, math.nan), sums.used, sums.excluded


class Anisotropy:
    """`anisotropy` of one set of vectors in batches: each is summed on its device, batches in float64 on the host.

    `value` is nan before the second non-zero vector; `used` and `excluded` count vectors.
    """

    def __init__(self) -> None:
        self.used, self.excluded = 0, 0
        self._total: list[float] = []
        self._squares = 0.0

    @promoted
    def update(self, x: Array, mask: Array | None = None) -> None:
        """Add all vectors of x (..., d), whatever its leading axes; mask: boolean, broadcast to (...)."""
        check.float_array("Anisotropy", "x", x)
        if x.ndim < 2:
            check.wrong_shape("Anisotropy", "x", x, "at least two axes, (..., m, d)")
        xp, sums = _directions("Anisotropy", x, mask)
        needs_values("Anisotropy", x)
        axes = tuple(range(x.ndim - 2))
        total, counts = sums.total, [sums.squares, sums.used, sums.excluded]
        if axes:
            total, counts = xp.sum(total, axis=axes), [xp.sum(c) for c in counts]
        squares, used, excluded = floats(xp.stack(counts))
        self._add(floats(total), squares, int(used), int(excluded))

    def merge(self, other: "Anisotropy") -> None:
        """Add the totals of another accumulator."""
        self._add(other._total, other._squares, other.used, other.excluded)

    def _add(self, total: list[float], squares: float, used: int, excluded: int) -> None:
        if self._total and total and len(total) != len(self._total):
            raise ValueError(f"Anisotropy: vectors of {len(total)} features; those before have {len(self._total)}")
        if total:
            self._total = [a + b for a, b in zip(self._total or [0.0] * len(total), total, strict=True)]
        self._squares += squares
        self.used += used
        self.excluded += excluded

    @property
    def value(self) -> float:
        if self.used < 2:
            return math.nan
        return (math.fsum(t * t for t in self._total) - self._squares) / (self.used * (self.used - 1))


# ---------------------------------------------------------------------------------------------- variance ratio


def _checked_pair(
    op: str, branch: Array, residual: Array, mask: Array | None
) -> tuple[Namespace, Array, Array, Array | None]:
    """Both in the compute dtype, 0 at masked tokens, and which tokens are valid, (..., 1)."""
    check.one_home(op, ("branch", "residual"), (branch, residual))
    if branch.ndim < 1 or branch.shape != residual.shape:
        check.wrong_shape(op, "residual", residual, f"{tuple(branch.shape)}, the shape of branch, (..., d)")
    xp = namespace(branch)
    x, r = (cast(xp, y, compute_dtype(xp, y)) for y in (branch, residual))
    if mask is None:
        return xp, x, r, None
    check.boolean_array(op, "mask", mask, "branch", branch, tuple(branch.shape[:-1]), "(...)")
    there = xp.broadcast_to(mask, branch.shape[:-1])[..., None]
    return xp, xp.where(there, x, 0.0), xp.where(there, r, 0.0), there


def _tokens(xp: Namespace, x: Array, there: Array | None) -> int | Array:
    """The number of valid tokens: a number, or a scalar array."""
    return math.prod(x.shape[:-1]) if there is None else xp.sum(xp.astype(there, x.dtype))


def _ratio(xp: Namespace, above: Array, below: Array) -> Array:
    return xp.where(below > 0, above / xp.where(below > 0, below, 1.0), math.nan)


def _center_and_sums(xp: Namespace, x: Array, there: Array | None, count: float | Array) -> tuple[Array, Array, Array]:
    """c ≈ mean, Σ(x - c) and Σ(x - c)² over the valid elements; the second corrects the error of c."""
    center = xp.sum(x) / count
    gap = x - center if there is None else xp.where(there, x - center, 0.0)
    return center, xp.sum(gap), xp.sum(gap * gap)


def _pooled_variance(xp: Namespace, x: Array, there: Array | None, count: float | Array) -> Array:
    _, gap, squares = _center_and_sums(xp, x, there, count)
    return (squares - gap * gap / count) / count


def _token_ratios(xp: Namespace, x: Array, r: Array) -> Array:
    """Var(x)/Var(r) over the features of each token, (..., 1)."""
    above, below = (xp.mean((y - xp.mean(y, axis=-1, keepdims=True)) ** 2, axis=-1, keepdims=True) for y in (x, r))
    return _ratio(xp, above, below)


def _sum_of_ratios(xp: Namespace, x: Array, r: Array, there: Array | None) -> Array:
    ratios = _token_ratios(xp, x, r)
    return xp.sum(ratios if there is None else xp.where(there, ratios, 0.0))


@promoted
def variance_ratio(branch: Array, residual: Array, mask: Array | None = None, *, pooled: bool = True) -> Array:
    """Var(branch)/Var(residual): a branch's output beside the residual that it is added to (Shen et al. 2023 Table 1).

    Population variances over all elements of valid tokens; with pooled=False over the features of each token, and then
    the mean of the ratios. In x + f(norm(x)) the residual is x; after a post-norm it is the output of that norm.

    Args:
        branch, residual: (..., d), of one shape and dtype.
        mask: boolean, broadcast to (...), True = a token.
        pooled: see above.

    Returns:
        A scalar in the compute dtype; nan where a residual does not vary, and without tokens.

    Raises:
        ValueError: shapes. TypeError: dtypes, libraries, devices.
    """
    xp, x, r, there = _checked_pair("variance_ratio", branch, residual, mask)
    if math.prod(x.shape) == 0:
        return xp.sum(x) + math.nan
    tokens = _tokens(xp, x, there)
    safe = max(tokens, 1) if isinstance(tokens, int) else xp.where(tokens > 0, tokens, 1.0)
    if pooled:
        return _ratio(xp, *(_pooled_variance(xp, y, there, safe * x.shape[-1]) for y in (x, r)))
    mean = _sum_of_ratios(xp, x, r, there) / safe
    return mean if there is None else xp.where(tokens > 0, mean, math.nan)


class _Spread:
    """Count, mean and Σ(x - mean)² in float64, mergeable (Chan, Golub and LeVeque 1979)."""

    def __init__(self, count: float = 0.0, mean: float = 0.0, squares: float = 0.0) -> None:
        self.count, self.mean, self.squares = count, mean, squares

    def add(self, other: "_Spread") -> None:
        count = self.count + other.count
        if count == 0:
            return
        apart = other.mean - self.mean
        self.squares += other.squares + apart * apart * self.count * other.count / count
        self.mean += apart * other.count / count
        self.count = count


class VarianceRatio:
    """`variance_ratio` of data in batches: each is summed on its device, batches are merged in float64 on the host.

    `value` pools all elements, `per_token` is the mean of the ratios of single tokens, both nan before the first token;
    `tokens` counts them.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._branch, self._residual, self._ratios = _Spread(), _Spread(), 0.0

    @promoted
    def update(self, branch: Array, residual: Array, mask: Array | None = None) -> None:
        """Add a batch; arguments as in `variance_ratio`."""
        xp, x, r, there = _checked_pair("VarianceRatio", branch, residual, mask)
        needs_values("VarianceRatio", branch)
        tokens = int(_tokens(xp, x, there))
        if tokens * x.shape[-1] == 0:
            return
        count = tokens * x.shape[-1]
        sums = [s for y in (x, r) for s in _center_and_sums(xp, y, there, count)]
        totals = floats(xp.stack([*sums, _sum_of_ratios(xp, x, r, there)]))
        for spread, (center, gap, squares) in ((self._branch, totals[:3]), (self._residual, totals[3:6])):
            spread.add(_Spread(count, center + gap / count, squares - gap * gap / count))
        self._ratios += totals[6]
        self.tokens += tokens

    def merge(self, other: "VarianceRatio") -> None:
        """Add the totals of another accumulator."""
        self._branch.add(other._branch)
        self._residual.add(other._residual)
        self._ratios += other._ratios
        self.tokens += other.tokens

    @property
    def value(self) -> float:
        return self._branch.squares / self._residual.squares if self._residual.squares > 0 else math.nan

    @property
    def per_token(self) -> float:
        return self._ratios / self.tokens if self.tokens else math.nan
