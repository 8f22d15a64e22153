"""Images with SOFT's models as a Task of the training loop."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from attnkit_experiments.engine.sampler import seeded
from attnkit_experiments.images.task import ImageTask
from attnkit_experiments.soft.model import cost


class SoftImageTask(ImageTask):
    """An `ImageTask` whose drop_path is drawn from (seed, step, first sample of the share), the same after a resume.

    Batch normalisation uses the statistics of a share, so the loss depends on how a batch is split.
    """

    divisible = False

    def loss(self, ids: np.ndarray, step: int, own: slice) -> Tensor:
        first = range(len(ids))[own].start
        with seeded(self.seed, step, f"drop_path/{first}", self.device):
            return super().loss(ids, step, own)

    def flops(self, ids: np.ndarray) -> int:
        return len(ids) * 2 * cost(self.config)[1]
