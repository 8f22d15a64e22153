"""Adapters whose kernels are run on the CPU. To start one takes seconds: all tests of a process share them."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest

from attnkit_conformance.adapters.cuda_cpu import CudaOnCpu, build
from tests.kernels.interpreted import MODE, TARGETS, worker

if MODE.items() <= os.environ.items():  # a process of tests in Triton's interpreter
    from attnkit_conformance.adapters import triton_once

    triton_once.install()

LIBRARIES = {"cuda_cpu": (), "jax_triton_interpreted": ("triton", "jax")}


@pytest.fixture(scope="session")
def adapter_of() -> Iterator[Callable[[str], Any]]:
    """The adapter of a name."""
    with ExitStack() as stack:

        @cache
        def started(name: str) -> Any:
            if name == "cuda_cpu":
                return CudaOnCpu()
            made = worker(TARGETS[name], name)
            stack.callback(made.close)
            return made

        def adapter(name: str) -> Any:
            for library in LIBRARIES.get(name, ("triton",)):
                pytest.importorskip(library, reason=f"{library} is not installed")
            if name == "cuda_cpu" and build.missing_compiler():
                pytest.skip(str(build.missing_compiler()))
            return started(name)

        yield adapter


@pytest.fixture(scope="session")
def kernels(adapter_of: Callable[[str], Any]) -> CudaOnCpu:
    """The CUDA kernels in the emulation of a GPU."""
    made: CudaOnCpu = adapter_of("cuda_cpu")
    return made
