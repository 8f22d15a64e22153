"""The small kit, the tests of the library, and whether Triton kernels lower, on the oldest and the newest versions of
what attnkit works with, and the kit on every Python.

    python -m tests.repository.matrix [SIDE[@PYTHON] ...]     e.g. oldest newest@3.12 light@3.14t

Each is a new virtual environment. `oldest`, `compiled` and `newest` have NumPy, SciPy, array-api-compat, torch, Triton
and JAX. `oldest` has the floors that pyproject.toml names, and the Triton of that torch, whose kernels attnkit refuses;
`compiled` has the oldest Triton whose kernels it serves, and the oldest torch that compiles its functions as a whole;
`newest` what is newest. From PyPI torch brings CUDA, about 6 GB each; an index of CPU builds (PIP_EXTRA_INDEX_URL)
makes it 1 GB. `light` has what attnkit and the kit need, and nothing else: 200 MB. attnkit is read from the checkout.
A Python is a version, of which the command is looked for, or the path of one; without it a side is on this one. By
default all three, and `light` on every other Python that is there. Exit status 1 if a step fails.
"""

import os
import shutil
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
KIT: Step = (
    "-m", "attnkit_conformance", "run", "numpy", "torch", "jax", "--profile", "small",
    "-k", "not (jax and (property or /pair.))",
)  # fmt: skip
PYTEST: Step = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
LIBRARY: Step = (*PYTEST, "tests/library", "-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning")
OLD_GLOO = "--ignore=tests/library/test_context_parallel.py"  # torch 2.6 may wait forever where a process group ends
IN_ONE_GRAPH = ("compil", "a_trace_does", "in_one_graph", "beside_symbols", "autocast_does_not_round")
"""In the names of tests that torch 2.6 cannot pass: it compiles functions in parts, not as a whole."""
LOWERS: Step = (*PYTEST, "-m", "emulated or not emulated", "tests/kernels/test_triton_lowers.py")
STEPS: dict[str, tuple[Step, ...]] = {
    "oldest": (KIT, (*LIBRARY, OLD_GLOO, "-k", " and ".join(f"not {name}" for name in IN_ONE_GRAPH))),
    "compiled": (KIT, LIBRARY, LOWERS),
    "newest": (KIT, LIBRARY, LOWERS),
    "light": (("-m", "attnkit_conformance", "run", "numpy", "--profile", "small", "-k", "not property"),),
}
PYTHONS = ("3.11", "3.12", "3.13", "3.14", "3.14t")
TESTED_WITH = ("entmax", "mpmath", "expecttest", "hypothesis", "flatbuffers")  # by tests of the library; jax.export


def libraries(side: str) -> list[str]:
    """What pip is asked for: each library at its floor, or without a version, and what the tests need."""
    if side == "light":
        return [*PROJECT["dependencies"], *KIT_ALONE["dependencies"]]
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


def interpreter(name: str) -> str | None:
    """The Python of this version or path, if it is there and answers."""
    found = shutil.which(name) or shutil.which(f"python{name}")
    answers = found and not subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode
    return found if answers else None


def everything() -> list[str]:
    """All that this machine has; what it lacks is printed."""
    this = f"{sys.version_info.major}.{sys.version_info.minor}"
    others = [name for name in PYTHONS if name != this]
    missing = [name for name in others if interpreter(name) is None]
    print("".join(f"light@{name}: not run, there is no python{name}\n" for name in missing), end="", flush=True)
    return ["oldest", "compiled", "newest", *(f"light@{name}" for name in others if name not in missing)]


def check(asked: str, python: str, folder: Path) -> bool:
    """Install and judge one side on one Python, in the order of its steps; whether all of them passed."""
    side = asked.partition("@")[0]
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", *libraries(side)]
    environment = os.environ | {"PYTHONPATH": PATHS, "JAX_PLATFORMS": "cpu"}
    for step in (pip, *STEPS[side]):
        print(f"{asked}: python {' '.join(step)}", flush=True)
        if subprocess.run([str(folder / "bin" / "python"), *step], cwd=ROOT, env=environment, check=False).returncode:
            print(f"{asked}: FAILED", flush=True)
            return False
    return True


def main(asked: list[str]) -> int:
    """Check the sides named, or all."""
    if unknown := [each for each in asked if each.partition("@")[0] not in STEPS]:
        print(f"error: expected some of {', '.join(STEPS)}; got {', '.join(unknown)}", file=sys.stderr)
        return 2
    passed = []
    for each in asked or everything():
        name = each.partition("@")[2]
        python = interpreter(name) if name else sys.executable
        if python is None:
            print(f"error: {each}: there is no python{name}", file=sys.stderr)
            return 2
        with tempfile.TemporaryDirectory() as folder:
            passed.append(check(each, python, Path(folder) / "venv"))
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
