"""SOFT's inverse by Triton kernels: judged in the interpreter, with planted bugs found, and compiled for two GPUs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attnkit_conformance import core
from attnkit_conformance.adapters.worker import WorkerAdapter
from attnkit_conformance.judge import judge

pytest.importorskip("triton", reason="triton is not installed")

import attnkit
from attnkit.backends.torch.triton import launch as triton_launch
from attnkit.backends.torch.triton import newton
from benchmarks.sass.compiling import compiled, device_of

from .interpreted import MODE
from .selection import later
from .spills import assert_no_spills
from .test_triton_compile import MEMORY

OP = "newton_inverse"

CHANGED = """
import triton
import triton.language as tl

from attnkit.kernels.triton import newton
from attnkit_conformance.adapters.triton_interpreted import Interpreted

NAME = newton.NAME


@triton.jit
def tf32(x):
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def one_product(x, y, total, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    found = tl.dot(tf32(x), tf32(y))
    return found if total is None else total + found


@triton.jit
def three_products(x, y, total, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    high, over = tf32(x), tf32(y)
    found = tl.dot(tf32(x - high), over) + tl.dot(high, tf32(y - over)) + tl.dot(high, over)
    return found if total is None else total + found


@triton.jit
def half_step(a, x, PRECISION: tl.constexpr):
    return NAME(a, x * 0.5, PRECISION) * 2.0


@triton.jit
def constant_norm(a, dx, factor, M: tl.constexpr):
    _, norm, safe = newton.column_sums(a)
    twice = 2.0 / (safe * safe)
    return dx * (factor * twice), twice * tl.sum(tl.sum(dx * a, 1), 0)


class Changed(Interpreted):
    def __init__(self):
        super().__init__()
        newton.NAME = OTHER
"""


@pytest.fixture
def with_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """A function (name, other): the kernels with one function of theirs replaced."""
    made = []

    def adapter(name: str, other: str) -> WorkerAdapter:
        (tmp_path / f"newton_{other}.py").write_text(CHANGED.replace("NAME", name).replace("OTHER", other))
        monkeypatch.syspath_prepend(tmp_path)
        made.append(WorkerAdapter("changed", f"newton_{other}:Changed", MODE))
        return made[-1]

    yield adapter
    for adapter_made in made:
        adapter_made.close()


def checked(adapter: WorkerAdapter, name: str) -> Any:
    case = next(case for case in core.cases(OP, "scenes", ("float32",)) if name in case.tags)
    return core.check(adapter, case)


@pytest.mark.parametrize(
    ("op", "expression"), [(OP, "-unrolled and not property"), later(OP, None), later("soft_attention", None)]
)
def test_conforms(op: str, expression: str | None, interpreted: WorkerAdapter) -> None:
    results = list(judge([interpreted], "quick", expression, ("float32",), ops=(op,)))
    assert {result.dtype for result in results} == {"float32"}
    assert [f"{result.id}\n{result.message}" for result in results if result.status != "pass"] == []


@pytest.mark.emulated
def test_three_tf32_products_are_enough(with_other: Any) -> None:
    """Of operands that are rounded as `cvt.rna` does, which the compiler puts before them."""
    result = checked(with_other("product", "three_products"), "not-symmetric")
    assert result.status == "pass", result.message


@pytest.mark.parametrize(
    ("name", "other", "case"),
    [
        later("product", "one_product", "random"),
        later("step", "half_step", "random"),
        later("start_gradient", "constant_norm", "init-scale"),
    ],
)
@pytest.mark.emulated
def test_a_planted_bug_is_found(name: str, other: str, case: str, with_other: Any) -> None:
    result = checked(with_other(name, other), case)
    assert "bound" in result.checks, result.message


def launches(a: torch.Tensor, **options: Any) -> dict[str, triton_launch.Launch]:
    """The launches of a call and of its gradients, by the names of their kernels; those of `inverse` by their use."""
    c = newton.call_of(a, **options)
    factors = torch.empty(c.leading) if isinstance(c.init_scale, torch.Tensor) else None
    again, gradient = c.backward(torch.empty(a.shape), a, factors)
    return {
        "inverse": c.inverse(torch.empty(a.shape), None, keeps=False),
        "again": again,
        gradient.kernel.fn.__name__: gradient,
    }


@pytest.mark.parametrize("capability", [later(80), 90])
@pytest.mark.parametrize(("m", "inverse_grad"), [(49, "implicit"), later(49, "unrolled"), later(30, "unrolled")])
def test_no_spills_enough_memory_and_tensor_cores(m: int, inverse_grad: str, capability: int) -> None:
    a, factors = torch.empty(4, 8, m, m, dtype=torch.bfloat16 if m == 30 else torch.float32), torch.empty(4, 1)
    with device_of(capability):
        made = launches(a, inverse_grad=inverse_grad, init_scale=factors if m == 30 else 0.9)
    assert len(made) == 3
    for name, launch in made.items():
        kernel = compiled(launch, capability)
        assert_no_spills(name, kernel)
        assert kernel.shared <= MEMORY[capability], f"{name} needs {kernel.shared} bytes of shared memory"
        assert kernel.tensor_core_instructions() >= 2, f"{name} multiplies without tensor cores"
        assert "cvt.rna.tf32" in kernel.ptx, f"{name} cuts digits off"


def test_what_is_not_served_says_so() -> None:
    a, q = torch.zeros(2, 3, 3), torch.zeros(2, 9, 4)
    assert "run on CUDA" in str(attnkit.explain(attnkit.newton_inverse, a)["triton"])
    assert "run on CUDA" in str(attnkit.explain(attnkit.soft_attention, q, q, q[:, :3])["triton"])
    with pytest.raises(NotImplementedError, match="run on CUDA"):
        attnkit.soft_attention(q, q, q[:, :3], impl="triton")
    assert "more than 64 rows" in str(newton.too_large(65))
    assert newton.too_large(64) is None
