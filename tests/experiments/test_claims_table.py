"""The table of the papers' claims in docs/experiments.md names every recipe, and no other."""

import re
from pathlib import Path

from attnkit_experiments.recipes import MEASUREMENTS, RECIPES

PAGE = Path(__file__).parents[2] / "docs" / "experiments.md"
MAKEFILE = PAGE.parents[1] / "Makefile"
REGISTERED = {**RECIPES, **MEASUREMENTS}


def rows():
    section = PAGE.read_text().split("## What the papers show, and its recipe\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_names_the_registered_recipes():
    assert {name for row in rows() for name in re.findall(r"`(\d{3}-\w+)`", row[2])} == set(REGISTERED)


def test_a_row_has_a_recipe_or_says_why_not():
    for place, _, recipe in rows():
        assert re.search(r"`\d{3}-\w+`|none[:a-zA-Z ()]*: |as for 000", recipe), place


def test_recipes_have_the_presets_that_the_table_says():
    for name, recipe in REGISTERED.items():
        (said, *_) = (row[2] for row in rows() if f"`{name}`" in row[2])
        only = re.findall(r"`([a-z]+)`", said) if "alone" in said else ()
        assert {*recipe.presets} == {*only} if only else {"smoke", "paper"} <= {*recipe.presets}, name


def test_smoke_runs_every_recipe():
    lists = re.findall(r"^[A-Z]+ := ((?:\d{3}-\w+ ?)+)$", MAKEFILE.read_text(), re.MULTILINE)
    assert sorted(" ".join(lists).split()) == sorted(REGISTERED)
