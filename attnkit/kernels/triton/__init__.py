"""Triton sources. Importing them needs triton; `attnkit.backends` does so when a kernel is launched."""

import importlib.metadata


def _is_36() -> bool:
    """Whether Triton 3.6 is installed; nightly builds have another name and are newer."""
    try:
        return importlib.metadata.version("triton").startswith("3.6.")
    except importlib.metadata.PackageNotFoundError:
        return False


if _is_36():
    from attnkit.kernels.triton import triton36

    triton36.keep_constants_of_tuples()
