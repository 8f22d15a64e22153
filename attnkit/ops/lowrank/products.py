"""Products of values with weights W (..., L, S) between tokens, and their gradients: softmax, or a Gaussian kernel.

W is a matrix, or an attention op makes the products without it. Tokens that are not valid have the weights 0. Gradients
have the shapes of their arguments.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Self, TypeVar

from attnkit._core.dispatch import namespace
from attnkit._core.quadratic import sum_to
from attnkit._core.special import stop_gradient
from attnkit._core.tokens import both, softmax, softmax_gradient
from attnkit._core.typing import AnyFunction, Array, Keywords, Namespace

W = TypeVar("W")
V = TypeVar("V", Array, None)  # values, which there are none of for weights
Weigh = Callable[[Array, Array, Array | None, Array | None, float], W]
"""W from q, k, the valid queries (..., L) and keys (..., S), None = all, and the scale."""


def _pairs(queries: Array | None, keys: Array | None) -> Array | None:
    """Pairs of valid tokens (..., L, S)."""
    rows = None if queries is None else queries[..., :, None]
    return both(rows, None if keys is None else keys[..., None, :])


# ---------------------------------------------------------------------------------------------- matrices


class _Matrix(NamedTuple):
    """W between tokens q and k; `drop` (..., L, S) multiplies the weights of softmax, None = 1."""

    q: Array  # (..., L, d)
    k: Array  # (..., S, d)
    w: Array  # (..., L, S)
    scale: float
    drop: Array | None = None  # broadcasts to (..., L, S)

    def times(self, v: Array) -> Array:
        return self.dropped(self.w) @ v

    def dropped(self, w: Array) -> Array:
        return w if self.drop is None else w * self.drop


class Softmax(_Matrix):
    """softmax(scale·q kᵀ)."""

    @classmethod
    def of(cls, q: Array, k: Array, queries: Array | None, keys: Array | None, scale: float) -> Self:
        xp = namespace(q)
        s = (q * scale) @ xp.matrix_transpose(k)
        return cls(q, k, softmax(xp, s, _pairs(queries, keys)), scale)

    def pull(self, v: Array, do: Array) -> tuple[Array, Array, Array]:
        """Gradients of q, k and v for the cotangent of W v."""
        dq, dk = self.pull_weights(self.dropped(do @ v.mT))
        return dq, dk, sum_to(namespace(v), self.dropped(self.w).mT @ do, tuple(v.shape))

    def pull_weights(self, dw: Array) -> tuple[Array, Array]:
        """Gradients of q and k for the cotangent of W, which knows of no dropout."""
        xp = namespace(dw)
        ds = softmax_gradient(xp, self.w, dw) * self.scale
        return sum_to(xp, ds @ self.k, tuple(self.q.shape)), sum_to(xp, ds.mT @ self.q, tuple(self.k.shape))


class Gaussian(_Matrix):
    """exp(-scale/2·‖q_i - k_j‖²)."""

    @classmethod
    def of(cls, q: Array, k: Array, queries: Array | None, keys: Array | None, scale: float) -> Self:
        xp, pairs = namespace(q), _pairs(queries, keys)
        w = gaussian(xp, q, k, 0.5 * scale)
        return cls(q, k, w if pairs is None else xp.where(pairs, w, 0.0), scale)

    @property
    def mT(self) -> Self:
        return self._replace(q=self.k, k=self.q, w=namespace(self.w).matrix_transpose(self.w))

    def pull_both(self, v: Array, du: Array, y: Array, do: Array) -> tuple[Array, Array, Array]:
        """Gradients of q, k and v for the cotangents du of W v and do of Wᵀ y."""
        dq, dk = self.pull_exponents((du @ v.mT + y @ do.mT) * self.w)
        return dq, dk, sum_to(namespace(v), self.w.mT @ du, tuple(v.shape))

    def pull_exponents(self, ds: Array) -> tuple[Array, Array]:
        """Gradients of q and k for the cotangent of the exponents, dW ⊙ W."""
        xp = namespace(ds)
        dq, dk = _towards(xp, ds, self.q, self.k) * -self.scale, _towards(xp, ds.mT, self.k, self.q) * -self.scale
        return sum_to(xp, dq, tuple(self.q.shape)), sum_to(xp, dk, tuple(self.k.shape))


def gaussian(xp: Namespace, x: Array, y: Array, half_scale: float) -> Array:
    """exp(-half_scale ‖x_i - y_j‖²), (..., i, j). x and y must lie about a common origin.

    The expanded square can fall below 0 by rounding: it then counts as 0, but still has a gradient.
    """
    size_x = xp.sum(x * x, axis=-1, keepdims=True)
    size_y = xp.sum(y * y, axis=-1, keepdims=True)
    square = size_x + xp.matrix_transpose(size_y) - 2.0 * (x @ xp.matrix_transpose(y))
    square = square - stop_gradient(xp.where(square < 0, square, 0.0))
    return xp.exp(square * -half_scale)


def _towards(xp: Namespace, g: Array, x: Array, y: Array) -> Array:
    """Σ_j g_ij (x_i - y_j)."""
    return xp.sum(g, axis=-1, keepdims=True) * x - g @ y


# ---------------------------------------------------------------------------------------------- attention ops


class Attention(NamedTuple):
    """The products of `Softmax` or of `Gaussian` by an attention op and its gradients."""

    attend: Callable[..., Array]
    vjp: Callable[..., dict[str, Array]]
    q: Array  # (..., L, d)
    k: Array  # (..., S, d)
    queries: Array | None  # (..., L), which are valid
    keys: Array | None  # (..., S), which are valid
    scale: float
    drop: Array | None = None  # broadcasts to (..., L, S)

    @classmethod
    def by(cls, op: AnyFunction, vjp: AnyFunction, impl: str) -> "Weigh[Attention]":
        """W by an implementation of an op."""
        return partial(cls, partial(op, impl=impl), partial(vjp, impl=impl))

    @property
    def mT(self) -> Self:
        return self._replace(q=self.k, k=self.q, queries=self.keys, keys=self.queries)

    def _options(self) -> Keywords:
        mask = None if self.keys is None else self.keys[..., None, :]
        options = {"mask": mask, "query_mask": self.queries, "scale": self.scale}
        return options if self.drop is None else options | {"dropout_mask": self.drop}

    def times(self, v: Array) -> Array:
        return self.attend(self.q, self.k, v, **self._options())

    def pull(self, v: Array, do: Array) -> tuple[Array, Array, Array]:
        grads = self.vjp(self.q, self.k, v, do, **self._options())
        return grads["q"], grads["k"], grads["v"]

    def pull_both(self, v: Array, du: Array, y: Array, do: Array) -> tuple[Array, Array, Array]:
        """By one product, of v and do side by side: dW = du vᵀ + y doᵀ."""
        xp = namespace(v)
        values = xp.concat([xp.broadcast_to(v, do.shape), do], axis=-1)
        dq, dk, dvalues = self.pull(values, xp.concat([du, y], axis=-1))
        return dq, dk, sum_to(xp, dvalues[..., : v.shape[-1]], tuple(v.shape))
