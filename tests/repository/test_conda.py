"""The recipe for conda says what the three pyproject.toml say. No conda tool has built it."""

import re
import tomllib
from importlib.util import find_spec
from typing import Any

import pytest
import yaml

import attnkit
from tests.repository.projects import FOLDERS, PROJECTS, ROOT

RECIPE = ROOT / "docs" / "conda" / "recipe.yaml"
NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
"""Packages that have another name in conda-forge."""


def outputs(text: str) -> dict[str, Any]:
    """The packages of a recipe by name, with the values of its context in place of their names."""
    for name, value in yaml.safe_load(text)["context"].items():
        text = text.replace(f"${{{{ {name} }}}}", value)
    return {output["package"]["name"]: output for output in yaml.safe_load(text)["outputs"]}


def in_conda(requirement: str) -> str:
    """A requirement of pyproject.toml as conda spells it."""
    name, version = re.fullmatch(r"([\w-]+)(.*)", requirement).groups()
    return f"{NAMES.get(name, name)} {version}"


def check(text: str) -> None:
    """AssertionError where the recipe and a pyproject.toml differ, or what it names is not there."""
    assert yaml.safe_load(text)["context"]["version"] == attnkit.__version__
    made = outputs(text)
    assert made.keys() == PROJECTS.keys()
    for name, output in made.items():
        project, needs, about = PROJECTS[name], output["requirements"], output["about"]
        script, source = output["build"]["script"], (RECIPE.parent / output["source"]["path"]).resolve()
        (command,) = script["content"] if isinstance(script, dict) else script
        assert (source / command.split()[-1]).resolve() == FOLDERS[name]
        built_by = tomllib.loads((FOLDERS[name] / "pyproject.toml").read_text())["build-system"]["requires"]
        assert {*map(in_conda, built_by)} <= {*needs["host"]}
        assert needs["run"] == [f"python {project['requires-python']}", *map(in_conda, project["dependencies"])]
        assert (about["summary"], about["license"]) == (project["description"], project["license"])
        assert (source / about["license_file"]).exists()
        assert all(
            find_spec(module) for test in output["tests"] for module in test.get("python", {}).get("imports", ())
        )


def test_the_recipe_says_what_the_projects_say():
    check(RECIPE.read_text())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("version: 0.1.0", "version: 0.0.9"),
        ("scipy >=1.13", "scipy >=1.12"),
        ("hatchling ==1.33.0", "hatchling ==1.32.0"),
        ("./conformance", "./experiments"),
        ("pytorch >=2.11", "torch >=2.11"),
        ("attnkit ==$", "attnkit >=$"),
        ("attnkit_reference", "attnkit_references"),
    ],
)
def test_a_recipe_that_has_gone_stale_is_noticed(before, after):
    text = RECIPE.read_text()
    assert before in text
    with pytest.raises(AssertionError):
        check(text.replace(before, after))
