"""Rooms of experiments have the files of their kind; files of one name have one role and define the same names."""

import ast
import re
from pathlib import Path

import pytest

BASE = Path(__file__).parents[2] / "experiments/attnkit_experiments"
DOMAINS = ("images", "soft", "language", "sequences", "translation")
# Files whose name is in several rooms, as a pattern -> patterns of names that each of them defines or imports.
ROLES = {
    "__init__": "",
    "domain": r"DOMAIN \w+Study \w+Domain Result",
    "model": r"\w+Config Tensor nn",
    "task": r"\w+Task",
    "methods": "METHODS",
    "inspection": "inspect",
    "page": "sections",
    "plots": "STYLE svg",
    "dataset": r"\w+Data",
    "presets": "SMOKE CPU SMALL SCALES DEVIATIONS",
    r"(fig|table)\d\w*": "RECIPE|MEASUREMENT",
}


def names(source: str) -> set[str]:
    """What a module defines or imports at its top level."""
    defined = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {alias.asname or alias.name for alias in node.names}
    return defined


def lacking(source: str, role: str) -> list[str]:
    """The patterns of a role that no name of a module has."""
    defined = names(source)
    return [pattern for pattern in role.split() if not any(re.fullmatch(pattern, name) for name in defined)]


def repeated() -> dict[str, list[Path]]:
    """The names of files that several rooms have, with their files."""
    files: dict[str, list[Path]] = {}
    for path in sorted(BASE.rglob("*.py")):
        files.setdefault(path.stem, []).append(path)
    return {name: paths for name, paths in files.items() if len(paths) > 1}


def test_a_name_in_several_rooms_has_a_role():
    for name, paths in repeated().items():
        rooms = [str(path.parent.relative_to(BASE)) for path in paths]
        assert any(re.fullmatch(pattern, name) for pattern in ROLES), f"{name}.py is in {', '.join(rooms)}"
    for pattern in ROLES:
        assert any(re.fullmatch(pattern, name) for name in repeated()), f"{pattern}: no name in several rooms"


@pytest.mark.parametrize("pattern", ROLES)
def test_files_of_one_name_define_what_their_role_says(pattern):
    for path in BASE.rglob("*.py"):
        if re.fullmatch(pattern, path.stem):
            assert not lacking(path.read_text(), ROLES[pattern]), path.relative_to(BASE)


@pytest.mark.parametrize("room", DOMAINS)
def test_a_domain_has_its_five_files(room):
    assert {"domain", "model", "task", "inspection", "page"} <= {path.stem for path in (BASE / room).glob("*.py")}


def test_a_file_of_another_role_would_be_noticed():
    assert lacking("def sections(study, show_samples): ...", ROLES["page"]) == []
    assert lacking("def render(study): ...", ROLES["page"]) == ["sections"]
    assert lacking("RECIPE_OF = 1\nclass Study: ...", ROLES[r"(fig|table)\d\w*"]) == ["RECIPE|MEASUREMENT"]
