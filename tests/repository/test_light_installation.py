"""`pip install -e '.[torch,dev]'` is enough for `pytest tests/library`: what it lacks skips tests, with a reason."""

import ast
import importlib.util

import pytest

from tests.conftest import OPTIONAL, absent
from tests.repository.test_imports import ROOT, STANDARD, imported
from tests.repository.trees import statements

INSTALLED = {"numpy", "scipy", "array_api_compat", "torch", "pytest", "mpmath", "onnxruntime", "packaging"}
OURS = {"attnkit", "attnkit_reference", "attnkit_conformance", "tests", ""}


def test_what_the_tests_import_is_installed_or_known_to_be_optional() -> None:
    for path in sorted((ROOT / "tests" / "library").glob("*.py")):
        tree = ast.parse(path.read_text())
        inside = [node for node in statements(tree) if isinstance(node, ast.ImportFrom) and node.level]
        for node in inside:  # of the same folder
            node.level, node.module = 0, "tests"
        names = {name.partition(".")[0] for name in imported(tree)}
        assert names - STANDARD - INSTALLED - OURS - {*OPTIONAL} == set(), path.name


def test_only_an_optional_library_that_is_not_installed_excuses_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    missing, collected = ModuleNotFoundError(name="jax.numpy"), RuntimeError("collecting")
    collected.__cause__ = missing
    with monkeypatch.context() as without:
        without.setattr(importlib.util, "find_spec", lambda name: None)
        assert absent(missing) == absent(collected) == "jax is not installed"
        assert absent(ModuleNotFoundError(name="attnkit.nothing")) is None
        assert absent(ModuleNotFoundError(name="torch")) is None
        assert absent(AssertionError()) is None
        assert absent(None) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert absent(missing) is None
