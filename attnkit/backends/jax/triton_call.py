"""Launches of Triton kernels from JAX, by jax-triton. Its import clears a setting of Triton's, which is put back."""

import os
from typing import Any, NamedTuple

import jax
from jax import Array

CACHE = "TRITON_CACHE_DIR"


class Launch(NamedTuple):
    """A kernel, how many programs of it run, its arrays, shapes and dtypes of its outputs, and all the rest by name."""

    kernel: Any
    programs: int
    arrays: tuple[Array, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    constants: dict[str, Any]


def jax_triton() -> Any:
    """The module jax-triton, with Triton's cache where it was."""
    before = os.environ.get(CACHE)
    try:
        import jax_triton as found
    finally:
        if before is None:
            os.environ.pop(CACHE, None)
        else:
            os.environ[CACHE] = before
    return found


def missing() -> str | None:
    """Why there is no jax-triton, or None."""
    try:
        jax_triton()
    except ImportError as error:
        return f"needs jax-triton and a JAX with CUDA ({error})"
    return None


def call(launch: Launch, compute_capability: int | None = None) -> tuple[Array, ...]:
    """Run a launch on the GPU that JAX has, or compile it for one of this capability, such as 90."""
    found = jax_triton().triton_call(
        *launch.arrays,
        kernel=launch.kernel,
        out_shape=launch.outputs,
        grid=(launch.programs,),
        compute_capability=compute_capability,
        **launch.constants,
    )
    return tuple(found)
