"""Numbers with a spread in hand-written prose are those of committed reports."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROSE = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TABLE = re.compile(r"<!-- facts of \S+ -->\n.*?<!-- end -->", re.DOTALL)
SPREAD = re.compile(r"(\d+(?:\.\d+)?)\s±\s(\d+(?:\.\d+)?)(?![\d.⁻])")
REPORT = re.compile(r"reports/([\w-]+)/")


def spreads(text: str) -> list[tuple[str, str]]:
    return SPREAD.findall(re.sub(r"<[^>]*>", "", text))


@cache
def published(report: str) -> list[tuple[str, str]]:
    return spreads((ROOT / "docs" / "reports" / report / "summary.md").read_text())


@cache
def claimed() -> list[tuple[str, str]]:
    return [pair for page in (ROOT / "docs" / "results").glob("*.md") for pair in spreads(page.read_text())]


def rounds_to(exact: str, written: str) -> bool:
    unit = 10.0 ** -len(written.partition(".")[2])
    return abs(float(exact) - float(written)) < 0.5001 * unit


def strangers(text: str) -> list[str]:
    """The numbers that neither a report linked in their paragraph nor a page of results has."""
    unknown = []
    for paragraph in re.split(r"\n\n|\n- ", TABLE.sub("", text)):
        known = claimed() + [pair for report in set(REPORT.findall(paragraph)) for pair in published(report)]
        unknown += [
            f"{mean} ± {width}"
            for mean, width in SPREAD.findall(paragraph)
            if not any(rounds_to(pair[0], mean) and rounds_to(pair[1], width) for pair in known)
        ]
    return unknown


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_a_spread_in_prose_stands_in_a_report(page):
    assert not strangers(page.read_text())


def test_a_wrong_spread_is_found():
    linked = "[summary](docs/reports/000-fig2-cpu/summary.md) relu is {} points above softmax"
    assert strangers(linked.format("4.7 ± 3.8")) == []
    assert strangers(linked.format("4.7 ± 2.8")) == ["4.7 ± 2.8"]
