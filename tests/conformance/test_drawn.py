"""attnkit on what a search finds: cases that it once got wrong, and five hundred that nobody has chosen."""

from pathlib import Path

import pytest

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.judge.selection import find
from attnkit_conformance.model.case import judged_dtypes
from attnkit_conformance.search import Search, recipe, replay

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.json"))
SEEDS, CASES = range(2), 250  # about four seconds each


@pytest.fixture(scope="module")
def adapters() -> list[Adapter]:
    return find(["auto", "numpy", "torch"])


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_what_failed_once_passes(path: Path, adapters: list[Adapter]) -> None:
    results = replay(adapters, [path], judged_dtypes())
    assert [f"{x.adapter}: {x.message}" for x in results if x.status == "fail"] == []
    assert any(x.status == "pass" for x in results), "it tells nothing any more"


@pytest.mark.parametrize("seed", SEEDS)
def test_no_drawn_case_fails(seed: int, adapters: list[Adapter], tmp_path: Path) -> None:
    search = Search(adapters, 0.0, seed, tmp_path, judged_dtypes(), lambda text: True)
    for n in range(CASES):
        search.look(recipe.drawn(seed, n), n)
        for found in search.findings:
            pytest.fail(f"{found.result.adapter}: {found.result.message}\n{found.result.program}\nkept in {found.path}")
    assert search.examples.total() > 0.9 * CASES
