"""A training that its user stops, for tests of what goes on from there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from attnkit_experiments.engine import checkpoint


@contextmanager
def stopped_after(step: int) -> Iterator[None]:
    """What trains inside is interrupted as soon as the checkpoint of `step` is written; it must come to that."""
    save = checkpoint.save

    def save_then_stop(folder: Any, *, step: int, **state: Any) -> None:
        save(folder, step=step, **state)
        if step == last:
            raise KeyboardInterrupt

    last = step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", save_then_stop)
        with pytest.raises(KeyboardInterrupt):
            yield
