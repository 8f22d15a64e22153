"""Adapters whose kernels are run on the CPU, one per test module."""

from collections.abc import Iterator

import pytest

from attnkit_conformance.adapters.cuda_cpu import CudaOnCpu
from attnkit_conformance.adapters.worker import WorkerAdapter
from tests.kernels.interpreted import MODE, TARGET


@pytest.fixture(scope="module")
def kernels() -> CudaOnCpu:
    """The CUDA kernels in the emulation of a GPU."""
    return CudaOnCpu()


@pytest.fixture(scope="module")
def interpreted() -> Iterator[WorkerAdapter]:
    """The Triton kernels in Triton's interpreter."""
    adapter = WorkerAdapter("triton_interpreted", TARGET, MODE)
    yield adapter
    adapter.close()
