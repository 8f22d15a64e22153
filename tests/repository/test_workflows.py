"""The workflows for GitHub and the hooks for commits: what they call exists, and versions are those of the pins."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from attnkit.backends.native import build
from attnkit_conformance.__main__ import parser
from tests.repository.projects import EXTRAS, FOLDERS, PROJECTS

ROOT = Path(__file__).parents[2]
TARGETS = {*re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)}
WORKFLOWS = {path.stem: path.read_text() for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
PUBLISH = "pypa/gh-action-pypi-publish@release/v1"
WHEELS = re.compile(r"pypa/cibuildwheel@v\d+\.\d+\.\d+")
MACHINES = ["ubuntu-latest", "ubuntu-24.04-arm"]
CIBUILDWHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)


def understand(command: str) -> None:
    """AssertionError for a command that could not be given in a checkout."""
    words = shlex.split(command)
    if words[0] == "make":
        assert [word for word in words[1:] if "=" not in word and word not in TARGETS] == [], command
        return
    if words[:2] == ["python", "-c"]:
        compile(words[2], command, "exec")
        return
    assert words[:2] == ["python", "-m"], command
    if words[2] == "pip":
        extras_of = {folder: EXTRAS[name] for name, folder in FOLDERS.items()}
        for word in (word for word in words if word[0] == "."):
            place, _, extras = word.rstrip("]").partition("[")
            assert {*filter(None, extras.split(","))} <= extras_of[(ROOT / place).resolve()].keys(), command
        assert "-c" not in words or words[words.index("-c") + 1] == "constraints.txt", command
    elif words[2] == "attnkit_conformance":
        parser().parse_args(words[3:])
    else:
        assert words[2] == "pytest", command
        assert [word for word in words[3:] if word[0] != "-" and not (ROOT / word).exists()] == [], command


def check(text: str) -> None:
    """AssertionError, KeyError or SystemExit for a workflow that could not run."""
    assert "secrets." not in text
    jobs: dict[str, Any] = yaml.safe_load(text)["jobs"]
    for job in jobs.values():
        assert job["timeout-minutes"] > 0
        for step in job["steps"]:
            assert (ROOT / step.get("working-directory", ".")).is_dir()
            if "run" in step:
                understand(step["run"])
            else:
                kept = "checkout" in step["uses"] and step.get("with", {}).get("persist-credentials", True)
                assert not kept, "the rights of the job lie in the checkout"
                ours = step["uses"] == PUBLISH or WHEELS.fullmatch(step["uses"])
                assert ours or re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]), step["uses"]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_calls_what_there_is(name: str) -> None:
    check(WORKFLOWS[name])


def test_there_is_a_workflow_for_each_concern_and_each_python() -> None:
    assert {*WORKFLOWS} == {"lint", "tests", "wheels", "docs", "release"}
    pythons = yaml.safe_load(WORKFLOWS["tests"])["jobs"]["tests"]["strategy"]["matrix"]["python"]
    assert pythons == ["3.11", "3.12", "3.13", "3.14"]
    assert {project["requires-python"] for project in PROJECTS.values()} == {f">={pythons[0]}"}


def test_the_wheel_with_kernels_is_built_for_both_machines_and_judged_on_each_python() -> None:
    """Before a release as in one; what it asks the kit on each level is what the kit understands."""
    built = [yaml.safe_load(WORKFLOWS[name])["jobs"]["linux"] for name in ("wheels", "release")]
    assert [job["strategy"]["matrix"]["machine"] for job in built] == [MACHINES] * 2
    (action,) = {step["uses"] for job in built for step in job["steps"] if WHEELS.fullmatch(step["uses"])}
    wanted = CIBUILDWHEEL["build"]
    pythons = yaml.safe_load(WORKFLOWS["tests"])["jobs"]["tests"]["strategy"]["matrix"]["python"]
    assert wanted == [f"cp{python.replace('.', '')}-*" for python in (*pythons, f"{pythons[-1]}t")], action
    assert CIBUILDWHEEL["environment"] == {build.FORCED: build.ALL}
    command = CIBUILDWHEEL["test-command"].replace("{project}/", "./")
    for part in re.findall(r"python -(?:m pip|c|m attnkit_conformance) (?:'[^']*'|\"[^\"]*\"|[^&|;'\"])*", command):
        understand(part)
    assert build.__name__ in command


def test_wheels_are_judged_on_each_system() -> None:
    """The one without kernels on those that have no other, and there it says so."""
    jobs = yaml.safe_load(WORKFLOWS["wheels"])["jobs"]
    assert jobs["elsewhere"]["strategy"]["matrix"]["machine"] == ["macos-latest", "windows-latest"]
    assert jobs["elsewhere"]["env"] == {build.FORCED: build.PORTABLE}
    says = [
        text for step in jobs["elsewhere"]["steps"] for text in re.findall("'(.*)' in attnkit", step.get("run", ""))
    ]
    assert len(says) == 1
    assert says[0] in build.WITHOUT


def test_a_tag_publishes_what_was_built_without_a_token() -> None:
    """By the job alone that has the right to; what other jobs upload is what it takes."""
    jobs = yaml.safe_load(WORKFLOWS["release"])["jobs"]
    allowed = {name: job["permissions"] for name, job in jobs.items() if "permissions" in job}
    assert allowed == {"publish": {"id-token": "write"}}
    assert jobs["publish"]["steps"][-1] == {"uses": PUBLISH}
    uploads = [
        step["with"] for job in jobs.values() for step in job["steps"] if "upload-artifact" in step.get("uses", "")
    ]
    assert {*jobs["publish"]["needs"]} == {*jobs} - {"publish"}
    assert all(upload["name"].startswith("of-") for upload in uploads)
    places = {path.rpartition("/")[0] for upload in uploads for path in upload["path"].split()}
    assert places == {"wheelhouse", "out/portable", "out/sdist"}
    assert "$(OUT)/portable" in (ROOT / "Makefile").read_text()
    assert "$(OUT)/sdist" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("lint", "make lint", "make linted"),
        ("docs", "checkout@v4", "checkout@main"),
        ("tests", "[torch,dev]", "[pytorch,dev]"),
        ("tests", "tests/library", "tests/libraries"),
        ("wheels", "vars.", "secrets."),
        ("wheels", "conformance[full]", "conformance[all]"),
        ("wheels", "--profile quick", "--profile quickest"),
        ("wheels", "cibuildwheel@v", "cibuildwheel@main-v"),
        ("wheels", "working-directory: docs", "working-directory: doc"),
        ("lint", "persist-credentials: false", "persist-credentials: true"),
    ],
)
def test_a_workflow_that_has_gone_stale_is_noticed(name: str, before: str, after: str) -> None:
    text = WORKFLOWS[name].replace(before, after)
    assert text != WORKFLOWS[name]
    with pytest.raises((AssertionError, KeyError, SystemExit)):
        check(text)


def test_hooks_have_the_versions_of_the_pins() -> None:
    """mypy is that of `make install`, which has them."""
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {hook["id"]: hook for hook in repository["hooks"]}
    assert {*hooks} == {"ruff-check", "ruff-format", "mypy"}
    needs = [need for hook in hooks.values() for need in hook.get("additional_dependencies", [])]
    assert needs == [f"ruff=={PINNED['ruff']}"] * 2
    assert hooks["mypy"]["entry"] == ".venv/bin/mypy"
