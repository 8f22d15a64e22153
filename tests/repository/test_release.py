"""Whether a release may be made, asked of a scratch repository."""

import subprocess
from pathlib import Path

import pytest

from tests.repository import release

FILES = {
    "attnkit/__init__.py": '__version__ = "0.2.0"\n',
    "conformance/attnkit_conformance/__init__.py": '__version__ = "0.2.0"\n',
    "experiments/attnkit_experiments/__init__.py": '__version__ = "0.2.0"\n',
    "experiments/pyproject.toml": 'dependencies = ["attnkit==0.2.0", "torch"]\n',
    "CITATION.cff": "cff-version: 1.2.0\nversion: 0.2.0\n",
    "docs/conda/recipe.yaml": "context:\n  version: 0.2.0\nrecipe:\n  version: ${{ version }}\n",
    "CHANGELOG.md": "# Changelog\n\n## 0.2.0 (2026-12-01)\n\n- An op.\n\n## 0.1.0 (2026-11-30)\n\n- All ops.\n",
}


def git(root: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false")
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A repository of which 0.2.0 may be released."""
    git(tmp_path, "init")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "all")
    return tmp_path


def test_a_release_may_be_made(scratch: Path) -> None:
    assert release.against("0.2.0", scratch) == []


@pytest.mark.parametrize(
    ("name", "before", "after", "reason"),
    [
        ("attnkit/__init__.py", "0.2.0", "0.2.1", "has version 0.2.1; expected 0.2.0"),
        ("attnkit/__init__.py", "__version__", "version", "has version none; expected 0.2.0"),
        ("experiments/pyproject.toml", "==0.2.0", "==0.1.0", "has version 0.1.0; expected 0.2.0"),
        ("CITATION.cff", "version: 0.2.0", "version: 0.1.0", "has version 0.1.0; expected 0.2.0"),
        ("CHANGELOG.md", "0.2.0", "0.3.0", "has no section '## 0.2.0 (YYYY-MM-DD)'"),
        ("CHANGELOG.md", "2026-12-01", "unreleased", "dates 0.2.0 'unreleased'; expected YYYY-MM-DD"),
        ("CHANGELOG.md", "- An op.", "", "says nothing of 0.2.0"),
    ],
)
def test_what_is_not_of_the_version_is_named(scratch: Path, name: str, before: str, after: str, reason: str) -> None:
    (scratch / name).write_text(FILES[name].replace(before, after))
    git(scratch, "commit", "-a", "-m", "changed")
    assert release.against("0.2.0", scratch) == [f"{name} {reason}"]


def test_the_tree_is_clean_and_the_tag_is_new(scratch: Path) -> None:
    (scratch / "new.py").write_text("")
    assert release.against("0.2.0", scratch) == ["the tree is not clean: new.py"]
    (scratch / "new.py").unlink()
    git(scratch, "tag", "-a", "v0.2.0", "-m", "0.2.0")
    assert release.against("0.2.0", scratch) == ["there is a tag v0.2.0"]


@pytest.mark.parametrize(
    ("version", "reason"), [("next", "expected a version such as 0.1.0"), ("v0.2.0", "its usual spelling is '0.2.0'")]
)
def test_a_version_is_spelt_as_usual(scratch: Path, version: str, reason: str) -> None:
    (found,) = release.against(version, scratch)
    assert reason in found


def test_the_version_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main([""]) == 2
    assert "make release VERSION=0.1.0" in capsys.readouterr().err
