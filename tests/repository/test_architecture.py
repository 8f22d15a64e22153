"""ARCHITECTURE.md has the rooms that there are, each above what it imports."""

import re
from pathlib import Path

import pytest

from tests.repository.test_imports import EXPERIMENTS, FLOORS, KIT, ROOT, RULES

PAGE = (ROOT / "ARCHITECTURE.md").read_text()
LIBRARY, STUDIES, REFEREE = re.findall(r"\| rooms \|.*?\n\|---\|---\|\n((?:\|.*\n)+)", PAGE)


def floors(table: str) -> dict[str, int]:
    """The rooms of a table with the number of their row."""
    cells = [line.split("|")[1] for line in table.splitlines()]
    named = [(room, row) for row, cell in enumerate(cells) for room in re.findall(r"`(.*?)`", cell)]
    assert len(named) == len({room for room, _ in named}), "a room has two floors"
    return dict(named)


def module(room: str) -> str:
    return room.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def lower(room: str) -> set[str]:
    """The other rooms of attnkit that a room may import; "attnkit" is the public names."""
    names = [name for name in FLOORS[room].split() if name.partition(".")[0] == "attnkit"]
    targets = {
        other
        for other in FLOORS
        for name in names
        if module(other) == name or (name != "attnkit" and module(other).startswith(f"{name}."))
    }
    return targets - {room}


def upward(drawn: dict[str, int], arrows: dict[str, set[str]]) -> list[str]:
    """The arrows that do not go down."""
    return [f"{a} → {b}" for a, targets in arrows.items() for b in targets if drawn[b] < drawn[a]]


@pytest.mark.parametrize(
    ("table", "arrows"),
    [
        (LIBRARY, {room: lower(room) for room in FLOORS}),
        (STUDIES, {room: {*names.split()} for room, names in EXPERIMENTS.items()}),
        (REFEREE, {room: {name + ".py" * (f"{name}.py" in KIT) for name in KIT[room].split()} for room in KIT}),
    ],
    ids=["attnkit", "experiments", "kit"],
)
def test_the_rooms_are_those_that_there_are_and_import_downwards(table: str, arrows: dict[str, set[str]]) -> None:
    drawn = floors(table)
    assert {*drawn} == {*arrows}
    assert upward(drawn, arrows) == []


def test_an_arrow_that_goes_up_would_be_noticed() -> None:
    assert upward({"a": 0, "b": 1}, {"a": {"b"}, "b": {"a"}}) == ["b → a"]


def test_every_folder_with_rules_is_on_the_page_and_every_link_leads_somewhere() -> None:
    folders = {re.sub(r"/(report/pages|peers|pytest\.py)$", "", folder) for folder in RULES}
    assert [folder for folder in folders if f"`{folder}`" not in PAGE] == []
    links = re.findall(r"\]\(([^)#]+)", PAGE)
    assert [link for link in links if not (ROOT / link).exists()] == []
    assert len(links) > 5


def test_paths_of_the_rooms_exist() -> None:
    assert [room for room in floors(LIBRARY) if not (ROOT / room).exists()] == []
    base = Path("experiments/attnkit_experiments")
    assert [room for room in floors(STUDIES) if not (ROOT / base / room).exists()] == []
