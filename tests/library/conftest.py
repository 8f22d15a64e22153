"""Draws of torch are the same in every run, whichever tests run."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
