"""What tests share: folders that the first worker to need them makes, and watching the functions that a call enters."""

import contextlib
import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


@contextlib.contextmanager
def watched(note: Callable[[Any, str, Any], None]) -> Iterator[None]:
    """`note` hears (frame, event, argument) of every call meanwhile, as of `sys.setprofile`."""
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
