"""Triton is as it was after a kernel was compiled, whatever the version."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from triton.compiler import code_generator
from triton.language import core
from triton.language.semantic import TritonSemantic

from attnkit.kernels.triton import triton36
from benchmarks.sass.compiling import compiled

from .test_triton_compile import launches


def parts() -> tuple[object, ...]:
    return TritonSemantic.to_tensor, core.tuple.__init__, code_generator.set_iterable_path


def test_compiling_leaves_triton_as_it_was() -> None:
    before = parts()
    launch = launches(torch.empty(1, 2, 64, 64, dtype=torch.bfloat16), causal=True)["forward"]
    assert compiled(launch, 90).stack == 0
    assert parts() == before
    with triton36.installed():
        assert not {*parts()} & {*before}
    assert parts() == before
