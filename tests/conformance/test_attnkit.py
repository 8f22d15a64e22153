"""attnkit on every backend found here, judged in the quick profile: the same as `python -m attnkit_conformance run`."""

from collections.abc import Iterator
from typing import Any

import pytest

from attnkit_conformance import adapters
from attnkit_conformance.judge import judge
from attnkit_conformance.opdb import OPDB


@pytest.fixture(scope="session")
def families() -> Iterator[dict[str, list[Any]]]:
    """Adapters by family, each made once: workers and compiled functions live as long as the session."""
    made: dict[str, list[Any]] = {}
    yield made
    for adapter in (adapter for held in made.values() for adapter in held):
        if hasattr(adapter, "close"):
            adapter.close()


@pytest.mark.parametrize("op", [op.name for op in OPDB])
@pytest.mark.parametrize("family", adapters.DEFAULT)
def test_conforms(family: str, op: str, families: dict[str, list[Any]]) -> None:
    if family not in families:
        families[family] = list(adapters.find([family]))
    results = list(judge(families[family], "quick", ops=(op,)))
    failures = [f"{result.adapter}::{result.id}\n{result.message}" for result in results if result.status == "fail"]
    assert not failures, "\n".join(failures)
    if all(result.status == "unsupported" for result in results):
        pytest.skip(results[0].reason if results else f"{family} is not installed")
