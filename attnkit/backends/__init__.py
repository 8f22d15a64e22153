"""Faster implementations, by library: `KERNELS` of each subpackage maps an op to its kernels."""

import re
import sys
import warnings
from collections.abc import Mapping
from functools import partial

from attnkit._core.dispatch import Kernel
from attnkit._core.loading import when_loaded
from attnkit.backends.native import OLDEST_JAX

OLDEST_TORCH = (2, 6, 0)
"""The oldest that the extra of this name allows."""


def kernels(library: str) -> Mapping[str, tuple[Kernel, ...]]:
    """The kernels of a library by op. Imports are plain because torch.compile cannot trace importlib."""
    if library == "torch":
        import attnkit.backends.torch as torch

        return torch.KERNELS
    if library == "numpy":
        import attnkit.backends.numpy as numpy

        return numpy.KERNELS
    if library == "jax":
        import attnkit.backends.jax as jax

        return jax.KERNELS
    if library == "cupy":
        import attnkit.backends.cupy as cupy

        return cupy.KERNELS
    return {}


def register() -> None:
    """Make the ops known to torch and to JAX as soon as these are loaded: programs that are read from a file call them
    by name, before any op of attnkit is called."""
    when_loaded("torch", partial(_register, "torch", OLDEST_TORCH))
    when_loaded("jax", partial(_register, "jax", OLDEST_JAX))


def _register(library: str, oldest: tuple[int, ...]) -> None:
    """Load the kernels of a library that is loaded, unless it is they that are loading it. One that is too old, or
    broken, is nobody's trouble before it is used with attnkit."""
    if f"{__name__}.{library}" in sys.modules:
        return
    version = re.match(r"(\d+)\.(\d+)\.(\d+)", getattr(sys.modules[library], "__version__", ""))
    if version is None or tuple(map(int, version.groups())) < oldest:
        return
    try:
        kernels(library)
    except Exception as error:
        text = f"attnkit: programs of {library} that call its ops cannot be loaded: {type(error).__name__}: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
