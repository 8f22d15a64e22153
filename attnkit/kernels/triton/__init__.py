"""Triton sources. Importing them needs triton; `attnkit.backends` does so when a kernel is launched."""

import importlib.metadata
import importlib.util

if importlib.util.find_spec("triton") and importlib.metadata.version("triton").startswith("3.6."):
    from attnkit.kernels.triton import triton36

    triton36.keep_constants_of_tuples()
