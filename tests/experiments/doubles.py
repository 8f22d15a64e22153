"""Training in float64, in which a run that adds up in another order is told from one that does something else, and a
model that is half as deep as the smallest.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from attnkit_experiments.data.images import augment
from attnkit_experiments.images.model import SIZES

SHALLOW = "d32"
SIZES[SHALLOW] = (32, 2, 64, 2)  # half of the layers of the smallest model, which no test of a whole training needs


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
