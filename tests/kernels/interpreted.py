"""What the tests of the Triton kernels in Triton's interpreter share: the adapter and the mode of its process."""

from typing import Any

import pytest

TARGET = "attnkit_conformance.adapters.triton_interpreted:Interpreted"
MODE = {"TRITON_INTERPRET": "1"}


def later(*values: Any) -> Any:
    """Parameters that `make emulated` runs and `make test`, which has 15 minutes, leaves out."""
    return pytest.param(*values, marks=pytest.mark.emulated)
