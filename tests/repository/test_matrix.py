"""Which sides `make matrix` has on which Python."""

import sys

import pytest
import yaml

from tests.repository import matrix
from tests.repository.projects import ROOT


def test_every_python_of_the_workflows_has_a_side(monkeypatch, capsys):
    """Those that are there; of the others it is said that they are not run."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    free = jobs["free-threaded"]["steps"][1]["with"]["python-version"]
    assert (*jobs["tests"]["strategy"]["matrix"]["python"], free) == matrix.PYTHONS
    monkeypatch.setattr(matrix, "interpreter", lambda name: None if name == free else name)
    this = f"{sys.version_info.major}.{sys.version_info.minor}"
    others = [f"light@{name}" for name in matrix.PYTHONS if name not in (this, free)]
    assert matrix.everything() == ["oldest", "compiled", "newest", *others]
    assert capsys.readouterr().out == f"light@{free}: not run, there is no python{free}\n"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [("newest@2.9", "newest@2.9: there is no python2.9"), ("new", "expected some of oldest, compiled, newest, light")],
)
def test_what_is_not_there_is_not_run(asked, reason, capsys):
    assert matrix.main([asked]) == 2
    assert reason in capsys.readouterr().err


def test_a_python_is_a_version_or_a_path():
    assert matrix.interpreter(sys.executable) == sys.executable
    assert matrix.interpreter("2.9") is None
