"""Bugs planted into attnkit: a function with another text for as long as a test runs, whoever has imported it."""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest


def plant(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], old: str, new: str) -> None:
    """Replace the text `old`, which the function holds once, by `new`."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{function.__name__} holds {old!r} {source.count(old)} times"
    namespace = dict(function.__globals__)
    exec(compile(source.replace(old, new), f"<planted in {function.__name__}>", "exec"), namespace)
    monkeypatch.setattr(function, "__code__", namespace[function.__name__].__code__)
