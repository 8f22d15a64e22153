"""The examples for continuous integration: valid YAML, whose commands are understood."""

import argparse
import copy
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from attnkit_conformance.__main__ import parser
from tests.repository.projects import EXTRAS
from tests.repository.test_commands import understand_plugin

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples" / "ci"
ACTION = yaml.safe_load((EXAMPLES / "action" / "action.yml").read_text())
WORKFLOW = yaml.safe_load((EXAMPLES / "attention.yml").read_text())
HERE = "./.github/actions/judge-attention"
LIKE = "inputs.like && format('--like {0}', inputs.like)"


def understand(command: str) -> None:
    """SystemExit, ArgumentError or AssertionError for a command that could not be given."""
    words = shlex.split(command)
    assert words[:2] == ["python", "-m"], command
    module, given = words[2], words[3:]
    if module == "pip":
        assert given[0] == "install"
        for project, name in re.findall(r"(attnkit[\w-]*)\[(\w+)\]", " ".join(given)):
            assert name in EXTRAS[project], command
    elif module == "pytest":
        understand_plugin(given)
    else:
        assert module == "attnkit_conformance", command
        parser().parse_args(given)


def with_values(command: str, values: dict[str, str]) -> str:
    """The command with values for what the action is given; KeyError for an expression that is not known."""
    known = {f"inputs.{name}": value for name, value in values.items()}
    known[LIKE] = f"--like {values['like']}" if values["like"] else ""
    return re.sub(r"\$\{\{ *(.*?) *\}\}", lambda found: known[found[1]], command)


def check_action(action: dict[str, Any], given: dict[str, str]) -> None:
    """The action with what a workflow gives it."""
    inputs = action["inputs"]
    assert {*given} <= {*inputs}
    assert {name for name, of in inputs.items() if of.get("required")} <= {*given}
    values = {name: given.get(name, of.get("default", "")) for name, of in inputs.items()}
    assert action["runs"]["using"] == "composite"
    for step in action["runs"]["steps"]:
        assert ("run" in step) == ("shell" in step) != ("uses" in step), step
        if "run" in step:
            understand(with_values(step["run"], values))


@pytest.mark.parametrize("like", ["", "sdpa"])
def test_the_action_runs_commands_that_there_are(like: str) -> None:
    check_action(ACTION, {"target": "mine:ADAPTER", **({"like": like} if like else {})})
    text = (EXAMPLES / "action" / "action.yml").read_text()
    assert {name for name in ACTION["inputs"] if f"inputs.{name}" not in text} == set(), "an input that nothing reads"


def test_the_workflow_runs_commands_that_there_are() -> None:
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    for step in steps:
        if "run" in step:
            understand(step["run"])
        elif step["uses"].startswith("."):
            assert step["uses"] == HERE
            check_action(ACTION, step["with"])
    assert sum("run" in step for step in steps) == 5
    assert sum(step.get("uses") == HERE for step in steps) == 1


def test_what_the_page_shows_is_understood() -> None:
    """Steps of a job; of what is given to the action, the names."""
    page = (ROOT / "docs" / "in-your-ci.md").read_text()
    steps = [
        step for block in re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL) for step in yaml.safe_load(block)
    ]
    assert len(steps) == 3
    for step in steps:
        if "run" in step:
            understand(step["run"])
        else:
            check_action(ACTION, step["with"])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("--profile", "--profiles"),
        ("pip install", "pip instal"),
        ("inputs.target", "inputs.aim"),
        ("--json", "--yaml"),
    ],
)
def test_an_action_that_has_gone_stale_is_noticed(before: str, after: str) -> None:
    action = copy.deepcopy(ACTION)
    for step in action["runs"]["steps"]:
        if "run" in step:
            step["run"] = step["run"].replace(before, after)
    assert action != ACTION
    with pytest.raises((SystemExit, AssertionError, KeyError)):
        check_action(action, {"target": "mine:ADAPTER"})


@pytest.mark.parametrize(
    "command",
    [
        "python -m attnkit_conformance run mine:ADAPTER --like nobody",
        "python -m attnkit_conformance validat x.json",
        "python -m pytest -p attnkit_conformance.pytest --attnkit-profile all",
        "python -m pytest -p attnkit_conformance.pytes",
        "python -m pip install attnkit[judge]",
        "attnkit run",
    ],
)
def test_a_stale_command_is_noticed(command: str) -> None:
    with pytest.raises((SystemExit, AssertionError, argparse.ArgumentError)):
        understand(command)
