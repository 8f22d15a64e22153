"""Which op ran, and how often."""

import functools
from typing import Any

import pytest

import attnkit


class Calls(list[str]):
    """The names of the ops that ran, in order."""


def count(monkeypatch: pytest.MonkeyPatch, *names: str) -> Calls:
    """Count the calls of these ops by whoever asks attnkit for them from now on."""
    calls = Calls()
    for name in names:
        monkeypatch.setattr(attnkit, name, _counted(name, calls))
    return calls


def _counted(name: str, calls: Calls) -> Any:
    op = getattr(attnkit, name)

    @functools.wraps(op)
    def run(*arrays: Any, **options: Any) -> Any:
        calls.append(name)
        return op(*arrays, **options)

    return run
