"""The few functions that the array API lacks: the library's own where it has one, else a float64-accurate form."""

import contextlib
import math
from typing import Any

import array_api_compat

from attnkit._typing import Array, Namespace

_SERIES_TERMS = 120  # enough for |x| <= 6, where 1 - erf(x) < 3e-17


def erf(xp: Namespace, x: Array) -> Array:
    """The error function 2/√π ∫₀ˣ exp(-t²) dt."""
    if array_api_compat.is_torch_array(x):
        import torch

        return torch.special.erf(x)
    if array_api_compat.is_jax_array(x):
        import jax

        return jax.scipy.special.erf(x)
    if array_api_compat.is_cupy_array(x):
        import cupyx.scipy.special

        return cupyx.scipy.special.erf(x)
    if array_api_compat.is_numpy_array(x):
        import scipy.special

        return scipy.special.erf(x)
    return _erf_series(xp, x)


def _erf_series(xp: Namespace, x: Array) -> Array:
    """erf(x) = 2/√π · exp(-x²) · Σ 2^m x^(2m+1)/(2m+1)!!, all terms of one sign, so nothing cancels (DLMF 7.6.2)."""
    bounded = xp.where(x > 6.0, 6.0, xp.where(x < -6.0, -6.0, x))
    term = bounded
    total = bounded
    for m in range(1, _SERIES_TERMS):
        term = term * (2.0 * bounded * bounded / (2 * m + 1))
        total = total + term
    return (2.0 / math.sqrt(math.pi)) * xp.exp(-bounded * bounded) * total


def stop_gradient(x: Array) -> Array:
    """x as a constant to automatic differentiation, for maxima that cancel from the result."""
    if array_api_compat.is_torch_array(x):
        return x.detach()
    if array_api_compat.is_jax_array(x):
        import jax

        return jax.lax.stop_gradient(x)
    return x


def magnitude(xp: Namespace, x: Array) -> Array:
    """|x| with derivative 0 at 0 (semantics A8), where JAX's own has 1."""
    return xp.where(x == 0, 0.0, xp.abs(x))


def generator(seed: int) -> Any:
    """NumPy's random generator, so that what is drawn beforehand is the same for every library (semantics A9)."""
    import numpy

    return numpy.random.default_rng(seed)


def without_autocast(x: Array) -> Any:
    """A context in which torch's autocast does not round scores to a half type behind the op's back (semantics A7)."""
    if array_api_compat.is_torch_array(x):
        import torch

        if torch.is_autocast_enabled(x.device.type):
            return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()


def readable(x: Array) -> bool:
    """Whether the values of x can be looked at: not while JAX or torch trace a program."""
    if array_api_compat.is_jax_array(x):
        import jax

        return not isinstance(x, jax.core.Tracer)
    if array_api_compat.is_torch_array(x):
        import torch

        return not torch.compiler.is_compiling()
    return True


def floats(x: Array) -> list[float]:
    """The entries of a vector as Python floats."""
    if hasattr(x, "tolist"):
        return [float(value) for value in x.tolist()]
    return [float(x[i]) for i in range(x.shape[0])]


def double_precision(x: Array) -> Any:
    """A context in which float64 exists on x's library: JAX has it only on request."""
    if array_api_compat.is_jax_array(x):
        import jax

        return jax.enable_x64(True)
    return contextlib.nullcontext()


def singular_values(xp: Namespace, x: Array, op: str) -> Array:
    """Singular values of (..., m, n), descending; NotImplementedError on a library without linear algebra."""
    if not hasattr(xp, "linalg"):
        raise NotImplementedError(f"{op}: needs singular values, and {xp.__name__} has no extension linalg")
    return xp.linalg.svdvals(x)


def quadrature(points: int) -> tuple[Any, Array, Array]:
    """NumPy, and nodes and weights of Gauss and Legendre on (-1, 1)."""
    import numpy

    return numpy, *numpy.polynomial.legendre.leggauss(points)


def unstack(xp: Namespace, x: Array, axis: int) -> tuple[Array, ...]:
    """xp.unstack: slices along an axis whose gradient is one stack; in torch without `moveaxis`, which vmap refuses."""
    return tuple(xp.unbind(x, dim=axis)) if array_api_compat.is_torch_array(x) else tuple(xp.unstack(x, axis=axis))
