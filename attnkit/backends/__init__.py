"""Faster implementations, by library: `KERNELS` of each subpackage maps an op to its kernels."""

from collections.abc import Mapping

from attnkit._core.dispatch import Kernel


def kernels(library: str) -> Mapping[str, tuple[Kernel, ...]]:
    """The kernels of a library by op. Imports are plain because torch.compile cannot trace importlib."""
    if library == "torch":
        from attnkit.backends import torch

        return torch.KERNELS
    if library == "numpy":
        from attnkit.backends import numpy

        return numpy.KERNELS
    if library == "jax":
        from attnkit.backends import jax

        return jax.KERNELS
    if library == "cupy":
        from attnkit.backends import cupy

        return cupy.KERNELS
    return {}
