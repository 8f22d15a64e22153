"""The plan of trainings: its commands are recipes' settings, and the documentation's table has them all."""

import itertools
import re
import shlex
from pathlib import Path

import pytest

from attnkit_experiments.recipes import RECIPES
from attnkit_experiments.study.overrides import override

ROOT = Path(__file__).parents[2]
PLAN = (ROOT / "experiments/plan.sh").read_text().replace("\\\n", "").splitlines()
STUDIES = [shlex.split(line)[1:] for line in PLAN if line.startswith("study ")]
TABLE = dict(re.findall(r"^\| (\S+-cpu) \| (\d+) \| \d+\.\d \|", (ROOT / "docs/experiments.md").read_text(), re.M))


@pytest.mark.parametrize(("name", "recipe", "options"), [(each[0], each[1], each[2:]) for each in STUDIES])
def test_a_study_of_the_plan_has_the_cells_that_are_documented(name, recipe, options):
    settings = [value for flag, value in itertools.pairwise(options) if flag == "--set"]
    study = override(RECIPES[recipe].presets["cpu"].study, settings)
    seeds = options[options.index("--seeds") + 1 :] if "--seeds" in options else study.seeds
    assert len(RECIPES[recipe].variants(study)) * len(seeds) == int(TABLE[name])
    assert name.startswith(recipe)


def test_the_table_has_nothing_else():
    assert list(TABLE) == [name for name, *_ in STUDIES]
