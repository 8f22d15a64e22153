"""What stands against a release of this checkout; `make release` and `make release-check` ask.

    python -m tests.repository.release VERSION

A release is of a clean tree whose version, that of its three distributions, of CITATION.cff and of the recipe for
conda, is the one asked for; CHANGELOG.md has a section of that version with its date, and no tag has its name. Exit
status 1 if something stands against it.
"""

import re
import subprocess
import sys
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parents[2]
PACKAGE = r'^__version__ = "(.*)"$'
PLACES = {
    "attnkit/__init__.py": PACKAGE, "conformance/attnkit_conformance/__init__.py": PACKAGE,
    "experiments/attnkit_experiments/__init__.py": PACKAGE, "experiments/pyproject.toml": r'"attnkit==([^"]*)"',
    "CITATION.cff": r"^version: (.*)$", "docs/conda/recipe.yaml": r"^  version: (\d.*)$",
}  # fmt: skip
SECTION = r"^## {version} \(([^)\n]*)\)\n(.*?)(?=^## |\Z)"


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


def against(version: str, root: Path = ROOT) -> list[str]:
    """The reasons, in the order in which they are mended; none if a release may be made."""
    try:
        if str(Version(version)) != version:
            return [f"VERSION is {version!r}; its usual spelling is {str(Version(version))!r}"]
    except InvalidVersion:
        return [f"VERSION is {version!r}; expected a version such as 0.1.0"]
    found = []
    for name, pattern in PLACES.items():
        has = re.findall(pattern, (root / name).read_text(), flags=re.MULTILINE)
        if has != [version]:
            found.append(f"{name} has version {', '.join(has) or 'none'}; expected {version}")
    found += of_changelog(version, (root / "CHANGELOG.md").read_text())
    if changed := git(root, "status", "--porcelain").splitlines():
        found.append(f"the tree is not clean: {', '.join(line[3:] for line in changed[:3])}{' …' * (len(changed) > 3)}")
    if git(root, "tag", "--list", f"v{version}"):
        found.append(f"there is a tag v{version}")
    return found


def of_changelog(version: str, text: str) -> list[str]:
    """What is wrong with the section of a version."""
    section = re.search(SECTION.format(version=re.escape(version)), text, flags=re.MULTILINE | re.DOTALL)
    if section is None:
        return [f"CHANGELOG.md has no section '## {version} (YYYY-MM-DD)'"]
    date, lines = section.groups()
    found = (
        []
        if re.fullmatch(r"\d{4}-\d{2}-\d{2}", date)
        else [f"CHANGELOG.md dates {version} {date!r}; expected YYYY-MM-DD"]
    )
    return found if lines.strip() else [*found, f"CHANGELOG.md says nothing of {version}"]


def main(arguments: list[str]) -> int:
    """Print what stands against a release."""
    if len(arguments) != 1 or not arguments[0]:
        print("error: which version? make release VERSION=0.1.0", file=sys.stderr)
        return 2
    found = against(arguments[0])
    for reason in found:
        print(f"error: {reason}", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
