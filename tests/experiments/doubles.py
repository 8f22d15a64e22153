"""Training in float64, in which a run that adds up in another order is told from one that does something else."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from attnkit_experiments.data.images import augment


@contextmanager
def in_float64() -> Iterator[None]:
    """Models are made in float64 inside, and images come in float64."""
    normalise = augment.normalise
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(augment, "normalise", lambda images: normalise(images).double())
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)
