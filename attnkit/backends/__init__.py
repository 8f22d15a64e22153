"""Faster implementations, by library: `KERNELS` of each subpackage maps an op to its kernels."""

import sys
from collections.abc import Mapping

from attnkit._core.dispatch import Kernel
from attnkit.backends.native import OLDEST_JAX


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
    """Make the CPU library known to JAX if that is loaded: compiled programs that are read from a file call it by name,
    before any op is called."""
    if getattr(sys.modules.get("jax"), "__version_info__", ()) >= OLDEST_JAX:
        from attnkit.backends import jax as jax
