"""Commands that the documentation shows exist, and understand what they are given there; templates are valid."""

import argparse
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import tyro
import yaml

import attnkit
import attnkit_experiments.__main__ as experimenting
import benchmarks.__main__ as benchmarking
from attnkit_conformance import pytest as plugin
from attnkit_conformance.__main__ import parser as conformance_parser
from attnkit_experiments.recipes import RECIPES

ROOT = Path(__file__).parents[2]
SHOWN = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
FENCE = re.compile(r"^```(?:sh|bash)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MODULE = re.compile(r"python3? -m (attnkit_conformance|experiments|benchmarks|pytest)\b(.*)")
KNOWN = re.compile(r"(?:\.venv/bin/)?python3? |torchrun |make\b")


def commands(text: str) -> list[str]:
    """The lines of shell blocks that call something of this repository, comments and continuations taken away."""
    lines = [line for block in FENCE.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    return [re.sub(r"\s+#.*", "", line.strip()) for line in lines if KNOWN.match(line.strip())]


class Options:
    """Stands for pytest's parser: the options of the kit's plug-in as those of a command."""

    def __init__(self) -> None:
        self.parser = argparse.ArgumentParser(exit_on_error=False)
        self.addoption = self.parser.add_argument
        for option in ("-p", "-k"):
            self.addoption(option)

    def getgroup(self, *names: str) -> "Options":
        return self

    def addini(self, *names: str, **kinds: object) -> None:
        pass


def understand_plugin(given: list[str]) -> None:
    """SystemExit, ArgumentError or AssertionError for arguments of pytest that do not go with the kit's plug-in."""
    options = Options()
    plugin.pytest_addoption(options)
    assert options.parser.parse_args(given).p == plugin.__name__


def understand(command: str) -> None:
    """SystemExit or AssertionError if a command of the documentation could not be given."""
    words = shlex.split(command)
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert [word for word in words[1:] if "=" not in word and word not in targets] == [], command
        return
    if "-m" not in words:
        assert (ROOT / words[1]).exists(), command
        return
    module, given = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
    if module == "pytest" and plugin.__name__ in given:
        understand_plugin(given)
    elif module == "pytest":
        assert all((ROOT / word).exists() for word in given if not word.startswith("-")), command
    elif module == "attnkit_conformance":
        conformance_parser().parse_args(given)
    elif module == "benchmarks":
        benchmarking.parser().parse_args(given)
    else:
        assert module == "experiments", command
        config = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes)
        asked = tyro.cli(experimenting.Command, args=given, config=config)
        if isinstance(asked, experimenting.Run):
            assert asked.preset in RECIPES[asked.recipe].presets, command


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.name)
def test_commands_of_the_pages_are_understood(page):
    for command in commands(page.read_text()):
        understand(command)


def test_commands_are_found():
    assert len([command for page in SHOWN for command in commands(page.read_text())]) > 20


@pytest.mark.parametrize(
    "command",
    [
        "make nothing",
        ".venv/bin/python docs/nothing.py",
        "python -m attnkit_conformance run numpy --profil full --nothing",
        "python -m experiments run 000-fig2 --preset gigantic --out x",
        "python -m experiments run 000-fig2 --no-such-option",
        "torchrun --nproc-per-node 8 -m experiments run 999-fig9 --preset cpu --out x",
    ],
)
def test_a_wrong_command_is_noticed(command):
    with pytest.raises((SystemExit, AssertionError, KeyError)):
        understand(command)


def test_the_citation_and_the_templates_are_valid():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == attnkit.__version__
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, repository = pyproject["project"], pyproject["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    assert citation["license"] == project["license"]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in project["authors"]]
    assert {*citation["keywords"]} <= {*project["keywords"]}
    assert citation.get("repository-code", "") == repository
    templates = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in templates}
    assert forms.keys() == {"config", "wrong-number", "kernel-disagreement", "new-variant"}
    for name, form in forms.items():
        if name != "config":
            assert {"name", "description", "body"} <= form.keys()
            ids = [part["id"] for part in form["body"]]
            assert len(ids) == len(set(ids)) > 2
