"""Triton sources. Importing them needs triton; `attnkit.backends` does so when a kernel is launched."""

import importlib.metadata
from contextlib import AbstractContextManager, nullcontext
from functools import cache


@cache
def _is_36() -> bool:
    """Whether kernels are compiled by Triton 3.6; nightly builds have another name and are newer."""
    from triton import knobs

    try:
        return importlib.metadata.version("triton").startswith("3.6.") and not knobs.runtime.interpret
    except importlib.metadata.PackageNotFoundError:
        return False


def compilation() -> AbstractContextManager[None]:
    """The context that kernels are compiled in, which a first launch does."""
    if not _is_36():
        return nullcontext()
    from attnkit.kernels.triton import triton36

    return triton36.installed()


@cache
def compile_later() -> None:
    """Let kernels be compiled outside of `compilation` too."""
    if _is_36():
        from attnkit.kernels.triton import triton36

        triton36.install()
