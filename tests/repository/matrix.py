"""The quick kit, the tests of the library, and whether Triton kernels lower, on the oldest and the newest versions of
what attnkit works with.

    python -m tests.repository.matrix [oldest] [newest]     both by default

Each is a new virtual environment with NumPy, SciPy, array-api-compat, torch, Triton and JAX: the floors that
pyproject.toml names, or what is newest. From PyPI torch brings CUDA, about 6 GB each; an index of CPU builds
(PIP_EXTRA_INDEX_URL) makes it 1 GB. attnkit is read from the checkout. Exit status 1 if a step fails.
"""

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
SIDES = ("oldest", "newest")
PATHS = os.pathsep.join(str(ROOT / name) for name in ("", "reference", "conformance"))
STEPS = (
    ("-m", "attnkit_conformance", "run", "numpy", "torch", "jax", "-k", "not (jax and (property or /pair.))"),
    ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/library", "-W", "ignore::DeprecationWarning"),
    ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/test_triton_lowers.py"),
)


def libraries(side: str) -> list[str]:
    """What pip is asked for: each library at its floor, or without a version, and what the tests need."""
    named = [
        Requirement(text) for text in (*PROJECT["dependencies"], *EXTRAS["torch"], *EXTRAS["triton"], *EXTRAS["jax"])
    ]
    if side == "newest":
        return [each.name for each in named] + EXTRAS["conformance"]
    return [f"{each.name}=={floor(each)}" for each in named] + EXTRAS["conformance"]


def floor(requirement: Requirement) -> str:
    """The oldest version that a requirement allows."""
    (version,) = (each.version for each in requirement.specifier if each.operator == ">=")
    return version


def check(side: str, folder: Path) -> bool:
    """Install and judge one side, in the order of STEPS; whether all of them passed."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", *libraries(side)]
    environment = os.environ | {"PYTHONPATH": PATHS, "JAX_PLATFORMS": "cpu"}
    for step in (pip, *STEPS):
        print(f"{side}: python {' '.join(step)}", flush=True)
        if subprocess.run([python, *step], cwd=ROOT, env=environment, check=False).returncode:
            print(f"{side}: FAILED", flush=True)
            return False
    return True


def main(sides: list[str]) -> int:
    """Check the sides named, or both."""
    if unknown := [side for side in sides if side not in SIDES]:
        print(f"error: expected {' or '.join(SIDES)}; got {', '.join(unknown)}", file=sys.stderr)
        return 2
    passed = []
    for side in sides or SIDES:
        with tempfile.TemporaryDirectory() as folder:
            passed.append(check(side, Path(folder) / "venv"))
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
