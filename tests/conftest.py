"""Shared by all tests: one thread per worker, so that timings of the suite and bitwise tests do not depend on cores."""

import ctypes
import gc
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator

import pytest

from benchmarks.memory import MEASURED, resident

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

LARGE, ROOM, LARGEST, LEAST_ROOM = 1300, 250, 1750, 60
"""MiB at which a process forgets what was compiled in it, of which imports alone are 940 MB; what it may gain before it
does so again; and from where on it may gain less. What is not freed grows to 1.7 GB in half of the suite, and a test
adds up to 0.2 to what there is: with the room alone a process had 2.13 at most.
"""
limit: float = LARGE


def held() -> float:
    """MiB of memory of this process; 0 where the system does not say."""
    return resident("VmRSS") if MEASURED else 0.0


def trim() -> None:
    """Give back to the system what is free already: the allocator keeps a few hundred MB of what a test has had."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def forget_compiled() -> None:
    """Free what JAX and torch have traced and compiled: another test seldom asks for it again."""
    global limit
    if jax := sys.modules.get("jax"):
        jax.clear_caches()
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    trim()
    kept = held()
    limit = max(LARGE, kept + LEAST_ROOM, min(kept + ROOM, LARGEST))


def pytest_collection_finish() -> None:
    """What was imported stays, and collections of garbage no longer look at it: a full one, for which tests of memory
    ask dozens of times, would take seconds in a process that has done half of the suite.
    """
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """So does what is there between two files."""
    yield
    if held() > limit:
        trim()
    if held() > limit:
        forget_compiled()
    elif nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    """Libraries tell of what is left at the end of a process."""
    gc.unfreeze()


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


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made and put into their places, but not drawn, which is most of the time that a page takes."""
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **how: file.write("<svg></svg>"))


OPTIONAL = (
    "array_api_strict", "cupy", "entmax", "flax", "jax", "jax_triton", "keras", "matplotlib", "ml_dtypes", "onnx",
    "onnxscript", "PIL", "rich", "sacrebleu", "sklearn", "sphinx", "tokenizers", "transformers", "triton", "tyro",
    "webdataset", "yaml",
)  # fmt: skip
"""What `pip install -e '.[torch,dev]'` lacks. Tests that import one of them are skipped where it is not installed."""


def absent(error: BaseException | None) -> str | None:
    """Why an error is none of the test's: it, or what it came from, is an optional library that is not installed."""
    while error is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__
    library = str(error.name).partition(".")[0] if error is not None else ""
    return f"{library} is not installed" if library in OPTIONAL and not importlib.util.find_spec(library) else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[pytest.CollectReport]:
    """A module that imports such a library is skipped as a whole."""
    report = yield
    reason = absent(report.call.excinfo.value) if report.failed and report.call.excinfo else None
    if reason:
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: {reason}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """And so is a test that imports one itself, or calls what does."""
    try:
        return (yield)
    except Exception as error:
        if reason := absent(error):
            pytest.skip(reason)
        raise
