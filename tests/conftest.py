"""Shared by all tests: one thread per worker, so that timings of the suite and bitwise tests do not depend on cores."""

import gc
import importlib.metadata
import importlib.util
import os
import tempfile
from collections.abc import Iterator

import pytest

GOLDENS = "ATTNKIT_GOLDENS"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ATTNKIT_POISON", "1")  # outputs hold NaN before they are written
# torch's compiler else starts processes, which serve Triton alone, outlive the test and take cores from the others
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def quick_to_compile() -> str:
    """Flags with which XLA compiles for a CPU in half of the time. It ends the process at a flag that it lacks."""
    flags = "--xla_backend_optimization_level=0"
    if not importlib.util.find_spec("jaxlib"):
        return flags
    major, minor = (int(part) for part in importlib.metadata.version("jaxlib").split(".")[:2])
    return flags if (major, minor) >= (0, 11) else f"{flags} --xla_cpu_use_fusion_emitters=false"


# Compiling is most of the time of hundreds of tests. That what XLA makes by itself conforms is a test of its own.
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault("XLA_FLAGS", quick_to_compile())

# Objects between collections of garbage, which take a sixteenth of the time: what JAX and torch trace mostly stays.
gc.set_threshold(200_000)


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Iterator[None]:
    """Goldens are kept until the suite ends, by all workers in one folder: the reference answers once."""
    if GOLDENS in os.environ:
        return (yield)
    with tempfile.TemporaryDirectory(prefix="attnkit-goldens-", ignore_cleanup_errors=True) as folder:
        os.environ[GOLDENS] = folder
        try:
            return (yield)
        finally:
            del os.environ[GOLDENS]
