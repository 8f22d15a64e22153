"""What the tests of the CUDA kernels share. Without a C++ compiler, importing it skips them with the reason."""

from collections.abc import Set
from typing import Any

import numpy as np
import pytest

from attnkit_conformance import core
from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.adapters.cuda_cpu import CudaOnCpu, build
from attnkit_conformance.model.case import Case, numpy_dtype

if build.missing_compiler():
    pytest.skip(str(build.missing_compiler()), allow_module_level=True)


class Forward(CudaOnCpu):
    """Without gradients, whose kernels would have to be compiled as well."""

    def vjp(self, *arguments: Any) -> dict[str, np.ndarray]:
        raise Unsupported("gradients are left out")


def draw(seed: int, *shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(numpy_dtype(dtype))


def assert_found(edited: CudaOnCpu, case: Case, checks: Set[str]) -> None:
    """One of the checks fails for edited kernels; if they end with an exception, it says what a kernel did wrong."""
    failed = core.check(edited, case)
    assert failed.checks & checks, f"{failed.id}: {failed.message}"
    assert all("KernelFault" in text for check, text in failed.failures if check == "exception"), failed.message
