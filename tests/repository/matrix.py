"""The quick kit, the tests of the library, and whether Triton kernels lower, on the oldest and the newest versions of
what attnkit works with.

    python -m tests.repository.matrix [oldest] [compiled] [newest]     all by default

Each is a new virtual environment with NumPy, SciPy, array-api-compat, torch, Triton and JAX. `oldest` has the floors
that pyproject.toml names, and the Triton of that torch, whose kernels attnkit refuses; `compiled` has the oldest Triton
whose kernels it serves, and the oldest torch that compiles its functions as a whole; `newest` what is newest. From PyPI
torch brings CUDA, about 6 GB each; an index of CPU builds (PIP_EXTRA_INDEX_URL) makes it 1 GB. attnkit is read from the
checkout. Exit status 1 if a step fails.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement

from tests.repository import projects

ROOT = Path(__file__).parents[2]
PROJECT, KIT_ALONE = projects.PROJECTS["attnkit"], projects.PROJECTS["attnkit-conformance"]
EXTRAS = PROJECT["optional-dependencies"]
OF_KIT = [*KIT_ALONE["dependencies"], *KIT_ALONE["optional-dependencies"]["full"]]
PATHS = os.pathsep.join(str(ROOT / name) for name in ("", "reference", "conformance"))
Step = tuple[str, ...]
KIT: Step = ("-m", "attnkit_conformance", "run", "numpy", "torch", "jax", "-k", "not (jax and (property or /pair.))")
PYTEST: Step = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
LIBRARY: Step = (*PYTEST, "tests/library", "-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning")
OLD_GLOO = "--ignore=tests/library/test_context_parallel.py"  # torch 2.6 may wait forever where a process group ends
LOWERS: Step = (*PYTEST, "-m", "emulated or not emulated", "tests/kernels/test_triton_lowers.py")
STEPS: dict[str, tuple[Step, ...]] = {
    "oldest": (KIT, (*LIBRARY, OLD_GLOO, "-k", "not compil and not a_trace_does")),
    "compiled": (KIT, LIBRARY, LOWERS),
    "newest": (KIT, LIBRARY, LOWERS),
}
TESTED_WITH = ("entmax", "mpmath", "expecttest")  # by tests of the library


def libraries(side: str) -> list[str]:
    """What pip is asked for: each library at its floor, or without a version, and what the tests need."""
    torch = {"oldest": EXTRAS["torch"], "compiled": EXTRAS["transformers"][:1], "newest": EXTRAS["torch"]}[side]
    triton = [] if side == "oldest" else EXTRAS["triton"]
    named = [Requirement(text) for text in (*PROJECT["dependencies"], *torch, *triton, *EXTRAS["jax"])]
    if side == "newest":
        return [each.name for each in named] + OF_KIT + [*TESTED_WITH]
    return [f"{each.name}=={floor(each)}" for each in named] + OF_KIT + [*TESTED_WITH]


def floor(requirement: Requirement) -> str:
    """The oldest version that a requirement allows."""
    (version,) = (each.version for each in requirement.specifier if each.operator == ">=")
    return version


def check(side: str, folder: Path) -> bool:
    """Install and judge one side, in the order of its steps; whether all of them passed."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", *libraries(side)]
    environment = os.environ | {"PYTHONPATH": PATHS, "JAX_PLATFORMS": "cpu"}
    for step in (pip, *STEPS[side]):
        print(f"{side}: python {' '.join(step)}", flush=True)
        if subprocess.run([python, *step], cwd=ROOT, env=environment, check=False).returncode:
            print(f"{side}: FAILED", flush=True)
            return False
    return True


def main(sides: list[str]) -> int:
    """Check the sides named, or all."""
    if unknown := [side for side in sides if side not in STEPS]:
        print(f"error: expected some of {', '.join(STEPS)}; got {', '.join(unknown)}", file=sys.stderr)
        return 2
    passed = []
    for side in sides or STEPS:
        with tempfile.TemporaryDirectory() as folder:
            passed.append(check(side, Path(folder) / "venv"))
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
