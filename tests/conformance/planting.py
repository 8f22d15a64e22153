"""Bugs planted into attnkit, for as long as a test runs and whoever has imported it, and verdicts on properties."""

import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from attnkit_conformance import core
from attnkit_conformance.judge import properties
from attnkit_conformance.opdb import BY_NAME


def plant(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], old: str, new: str) -> None:
    """Replace the text `old`, which the function holds once, by `new`."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{function.__name__} holds {old!r} {source.count(old)} times"
    namespace = dict(function.__globals__)
    exec(compile(source.replace(old, new), f"<planted in {function.__name__}>", "exec"), namespace)
    monkeypatch.setattr(function, "__code__", namespace[function.__name__].__code__)


def verdict(adapter: Any, op: str, dtype: str, name: str, params: Mapping[str, Any] | None = None) -> core.CaseResult:
    """What the kit says of one property of one op."""
    item = next(item for item in properties.PROPERTIES if item.name == name)
    return properties.check_property(adapter, BY_NAME[op], item, "", params or {}, dtype)
