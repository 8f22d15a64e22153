"""The three distributions of this repository, and what their pyproject.toml say."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDERS = {"attnkit": ROOT, "attnkit-conformance": ROOT / "conformance", "attnkit-experiments": ROOT / "experiments"}
PROJECTS: dict[str, dict[str, Any]] = {
    name: tomllib.loads((folder / "pyproject.toml").read_text())["project"] for name, folder in FOLDERS.items()
}
EXTRAS: dict[str, dict[str, list[str]]] = {
    name: project.get("optional-dependencies", {}) for name, project in PROJECTS.items()
}
INSTALLED: dict[str, tuple[str, list[str]]] = {
    **{extra: (name, needs) for name, extras in EXTRAS.items() for extra, needs in extras.items()},
    "experiments": ("attnkit-experiments", PROJECTS["attnkit-experiments"]["dependencies"]),
}
"""The distribution and the requirements of each extra, and of the experiments, which have none."""


def build(folder: Path, target: Path, kind: str = "wheel", level: str | None = None) -> Path:
    """A distribution of the project in a folder, its CPU kernels of this level if one is named."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)]
    environment = os.environ | ({} if level is None else {"ATTNKIT_CPU_LEVEL": level})
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return next(target.iterdir())
