"""Every case of the quick profile as a test: `pytest test_mine.py`, `pytest test_mine.py -k "mask and not float64"`."""

import pytest
from mine import ADAPTER

from attnkit_conformance.pytest import cases


@pytest.mark.parametrize("case", cases(ADAPTER, "quick"))
def test_attention(case):
    case.hold()
