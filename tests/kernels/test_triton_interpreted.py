"""Tests of the Triton kernels that are run in their interpreter: what the kit does not ask."""

from pathlib import Path

import pytest

from .interpreted import pass_interpreted

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.emulated
@pytest.mark.parametrize("name", sorted(path.stem for path in Path(__file__).parent.glob("in_interpreter*.py")))
def test_what_the_kit_does_not_ask(name: str) -> None:
    pass_interpreted(name)
