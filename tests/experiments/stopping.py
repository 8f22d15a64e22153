"""A training that its user stops, for tests of what goes on from there."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from attnkit_experiments.engine.checkpoint import Checkpoints


@contextmanager
def stopped_after(step: int) -> Iterator[None]:
    """What trains inside is interrupted as soon as the checkpoint of `step` is written; it must come to that."""
    save = Checkpoints.save

    def save_then_stop(self: Checkpoints, *, step: int, seconds: float) -> None:
        save(self, step=step, seconds=seconds)
        if step == last:
            raise KeyboardInterrupt

    last = step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", save_then_stop)
        with pytest.raises(KeyboardInterrupt):
            yield
