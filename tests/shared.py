"""What the workers of a session share: the first to need it makes it, the others wait."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that `make` has filled, in one worker."""
    of_session = factory.getbasetemp()
    folder = (of_session.parent if "PYTEST_XDIST_WORKER" in os.environ else of_session) / name
    folder.mkdir(exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".made").exists():
            make(folder)
            (folder / ".made").touch()
    return folder
