"""attnkit on every backend found here, judged in the quick profile.

JAX compiles every case anew: here the generic bodies of every third op are judged in double precision, without the ops
that give weights, and the blocks of every second one in single precision. JAX, explicit gradients of torch, torch's
blocks, arrays that cannot be written to, kernels that have no device here, array-api-strict and float16, whose pairs
differ from those of bfloat16 in how arguments and results are rounded, are judged on the scenes written by hand, not on
all pairs of options, and without the properties of A11; torch's explicit gradients and blocks, which other dtypes do
not change, in float32 and bfloat16. Surroundings have a test of their own. `make conformance` judges everything.
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from attnkit_conformance.adapters.base import implementations
from attnkit_conformance.adapters.families import DEFAULT, IN_DOUBLE, adapters_of, in_double, is_installed
from attnkit_conformance.core import CaseResult
from attnkit_conformance.judge import judge, selection
from attnkit_conformance.model.case import DTYPES
from attnkit_conformance.opdb import BY_NAME, OPDB

COMPILED = "not property and not /pair. and not empty and not surrounding."
ON_SCENES = "(numpy_readonly or strict or torch-blocked or explicit or torch-triton or cupy or /float16/)"
IN_TWO_DTYPES = "(torch-blocked or explicit) and (/float64/ or /float16/)"
GROUPS: dict[str, tuple[tuple[str, ...], str | None, str]] = {  # families judged together: the reference answers once
    "arrays": (
        tuple(name for name in DEFAULT if not name.startswith("jax")),
        None,
        f"not ({ON_SCENES} and (property or /pair.) or {IN_TWO_DTYPES} or freed or surrounding.)",
    ),
    "jax-blocked": (("jax-blocked",), "float32", COMPILED),
    "jax_x64": (
        ("jax_x64",),
        "float64",
        # calls without options are among those with options
        f"(statistics or not /cross) and {COMPILED}",
    ),
}
BLOCKED = implementations("jax")["blocked"] if importlib.util.find_spec("jax") else ()
LEFT_OUT = {
    "jax-blocked": {op.name for op in OPDB} - {*(BLOCKED or ())},
    "jax_x64": {op.name for op in OPDB if op.name.endswith("_weights")},
}
CASES = [(group, op.name) for group in GROUPS for op in OPDB if op.name not in LEFT_OUT.get(group, ())]
HERE = {"jax_x64": 3, "jax-blocked": 2}  # of so many ops one; make conformance judges all
IN_FULL = [
    case
    for group, step in HERE.items()
    for n, case in enumerate(case for case in CASES if case[0] == group)
    if n % step
]


@pytest.fixture(scope="session")
def families() -> Iterator[dict[str, list[Any]]]:
    """Adapters by family, each made once: workers and compiled functions live as long as the session."""
    made: dict[str, list[Any]] = {}
    yield made
    for adapter in (adapter for held in made.values() for adapter in held):
        if hasattr(adapter, "close"):
            adapter.close()


def failures(results: Sequence[CaseResult]) -> list[str]:
    """What failed, and why."""
    return [f"{result.adapter}::{result.id}\n{result.message}" for result in results if result.status == "fail"]


def members(name: str) -> list[Any]:
    """Those of a family; of JAX in double precision `auto` alone, as each is a process: test_transforms.py has the
    derivatives of the others."""
    return in_double([name]) if name == "jax_x64" and is_installed("jax") else list(selection.find([name]))


@pytest.mark.parametrize(
    ("group", "op"), [pytest.param(*case, marks=pytest.mark.referee) if case in IN_FULL else case for case in CASES]
)
def test_conforms(group: str, op: str, families: dict[str, list[Any]]) -> None:
    names, dtype, expression = GROUPS[group]
    for name in names:
        if name not in families:
            families[name] = members(name)
    dtypes = (dtype,) if dtype in BY_NAME[op].dtypes else DTYPES
    chosen = [adapter for name in names for adapter in families[name]]
    results = list(judge(chosen, "small", expression, dtypes, ops=(op,)))
    assert not failures(results), "\n".join(failures(results))
    if all(result.status == "unsupported" for result in results):
        pytest.skip(results[0].reason if results else f"{group} is not installed")


def test_adapters_of_jax_in_double_precision_have_their_names() -> None:
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        made = {name: getattr(adapters_of("jax"), target)() for name, target in IN_DOUBLE.items()}
    assert [adapter.name for adapter in made.values()] == [*made]
    assert [adapter.impl for adapter in made.values()] == ["auto", "native", "blocked"]


LARGE = ("softmax_attention", "linear_attention")  # the others: make conformance


@pytest.mark.parametrize("op", [LARGE[0], pytest.param(LARGE[1], marks=pytest.mark.referee)])
def test_long_and_wide_calls_conform(op: str, families: dict[str, list[Any]]) -> None:
    adapters = [adapter for name in ("numpy", "torch") for adapter in families.get(name) or selection.find([name])]
    results = list(judge(adapters, "quick", "/size. and not explicit", ("float32", "bfloat16"), ops=(op,)))
    assert not failures(results), "\n".join(failures(results))
    judged = {result.adapter for result in results if result.status == "pass"}
    assert {"numpy-generic", "numpy-native", "torch-generic"} <= judged


@pytest.mark.referee
def test_jax_conforms_as_xla_compiles_by_itself() -> None:
    """The kit's JAX adapter and the tests have XLA compile in little time; users have it optimise."""
    jax = pytest.importorskip("attnkit_conformance.adapters.jax")
    ops = ("pointwise_attention",)
    usual = {"xla_backend_optimization_level": 3, "xla_cpu_use_fusion_emitters": True}
    usual = {name: value for name, value in usual.items() if name in jax.light()}
    assert usual
    results = list(judge(jax.adapters(options=usual), "small", COMPILED, ("float32",), ops=ops))
    assert results
    assert not failures(results), "\n".join(failures(results))


def test_a_tensor_without_storage_is_an_error_of_the_cpu_library() -> None:
    """In a process of its own: reading what is not there may end it."""
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "attnkit_conformance", "run", "torch-native", "--workers", "1", "-k", "freed"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stdout + process.stderr
    assert re.search(r"^[1-9]\d* pass, 0 fail", process.stdout, re.MULTILINE), process.stdout


def test_what_is_hidden_raises_no_warning_in_products_of_numpy() -> None:
    """Elsewhere warnings of products are not heard, as OpenBLAS's products for AVX-512 give them for no reason."""
    judged = "(softmax or relu or linear or linformer or packed) and poison and float32 and not property"
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "attnkit_conformance", "run"]
    command += ["numpy-generic", "numpy-blocked", "--workers", "1", "-k", judged]
    process = subprocess.run(
        command, env=os.environ | {"OPENBLAS_CORETYPE": "Haswell"}, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert re.search(r"^[1-9]\d* pass, 0 fail", process.stdout, re.MULTILINE), process.stdout
