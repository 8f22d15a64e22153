"""Mutants of sources that a compiler or an interpreter reads: each is one change in a copy of attnkit, which is built
and judged in a process of its own.

    python -m attnkit_conformance.studies.mutation.copies ADAPTER EXPRESSION

judges an adapter on the quick profile until a verdict fails, and prints its id.
"""

from __future__ import annotations

import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from attnkit_conformance.judge import judge
from attnkit_conformance.judge.selection import find
from attnkit_conformance.model import store
from attnkit_conformance.model.case import judged_dtypes
from attnkit_conformance.studies.mutation import operators, texts
from attnkit_conformance.studies.mutation.operators import Mutant
from attnkit_conformance.studies.mutation.trials import Verdict

SECONDS = 1800.0  # a mutant that is not through with its cases then never ends
PASSED, FAILED, ENDLESS = "nothing failed", "failed: ", "does not end"
Process = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Judge:
    """How a copy is built and judged. `build` is a Python program, in whose environment OBJECTS is a folder that all
    mutants share. By the stem of a file, `concerns` has what its mutants can change, and `adapters` who is judged in
    place of `adapter`. `tests` are run where no case fails, in a checkout that has them; without an adapter they alone
    judge.
    """

    adapter: str = ""
    build: str = ""
    cases: str = ""
    tests: tuple[Path, ...] = ()
    concerns: Mapping[str, str] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)

    def judged(self, file: Path | None) -> str:
        """The adapter that reads a file."""
        return self.adapters.get(file.stem, self.adapter) if file else self.adapter

    def expression(self, file: Path | None, own: str | None) -> str:
        """What is judged for a mutant of a file; without one, plain cases."""
        of_file = self.concerns.get(file.stem, "") if file else "plain"
        return " and ".join(f"({part})" for part in (self.cases, of_file, own or "") if part)


def mutants_of(file: Path) -> list[Mutant]:
    return operators.mutants(file) if file.suffix == ".py" else texts.mutants(file)


def changed(mutant: Mutant) -> str:
    """The text of the file of a mutant."""
    return ast.unparse(operators.changed(mutant)) if mutant.file.suffix == ".py" else texts.changed(mutant)


class Copies:
    """The mutants of some files of a package."""

    unexecuted = 0  # what cases reach in them is not known

    def __init__(self, package: Path, files: Sequence[Path], how: Judge, expression: str | None) -> None:
        self.package, self.how, self.own = package, how, expression
        self.of_mutant = [mutant for file in files for mutant in mutants_of(file)]

    def verdicts(self, count: int, seed: int, workers: int) -> Iterator[Verdict]:
        """The verdicts on `count` mutants that compile, as they arrive. ValueError where the copy alone fails."""
        if not self.how.adapter and not any(test.exists() for test in self.how.tests):
            raise ValueError("these mutants are for the tests of a checkout, which are not here")
        order = random.Random(seed).sample(self.of_mutant, len(self.of_mutant))
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
            copies = SimpleQueue[Path]()
            for n in range(workers):
                copies.put(self.copy_into(Path(folder) / str(n)))
            first = self.judged(copies, Path(folder), None)
            if first is None or first.by is not None:
                judge = self.how.adapter or "tests"
                raise ValueError(f"{judge} without any change: {'no build' if first is None else first.by}")
            told = 0
            for n in range(0, len(order), workers):
                for verdict in pool.map(partial(self.judged, copies, Path(folder)), order[n : n + workers]):
                    if verdict is not None and told < count:
                        told += 1
                        yield verdict
                if told == count:
                    return

    def copy_into(self, folder: Path) -> Path:
        """A copy of the package, and the folder in which it lies."""
        shutil.copytree(self.package, folder / self.package.name, ignore=shutil.ignore_patterns("__pycache__"))
        return folder

    def judged(self, copies: SimpleQueue[Path], shared: Path, mutant: Mutant | None) -> Verdict | None:
        """The verdict on a mutant, or on the copy as it is; None where it cannot be built."""
        folder, started = copies.get(), time.perf_counter()
        place = folder / self.package.name / mutant.file.relative_to(self.package) if mutant else None
        original = place.read_text() if place else ""
        if place and mutant:
            place.write_text(changed(mutant))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
            store.FOLDER: os.environ.get(store.FOLDER, str(shared / "goldens")),
            "OBJECTS": str(shared),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        try:
            build = (sys.executable, "-c", self.how.build)
            if subprocess.run(build, cwd=folder, env=environment, capture_output=True, check=False).returncode:
                return None
            by = self.failing_case(mutant.file if mutant else None, folder, environment)
            by = by or failing_test([test for test in self.how.tests if test.exists()], folder, environment)
            nothing = mutant or Mutant(self.package, "", 0, "", "", "", 0, 0)
            return Verdict(nothing, by, time.perf_counter() - started)
        finally:
            if place:
                place.write_text(original)
            copies.put(folder)

    def failing_case(self, file: Path | None, folder: Path, environment: Mapping[str, str]) -> str | None:
        """The first case that fails on a copy in which a file is changed, if an adapter is judged."""
        judged = self.how.judged(file), self.how.expression(file, self.own)
        return fate((sys.executable, "-m", __name__, *judged), folder, environment) if judged[0] else None


def ended(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Process | None:
    """A process in the folder of a copy, where Python looks for packages first; None if it does not end."""
    run = partial(subprocess.run, capture_output=True, text=True, check=False)
    try:
        return run(command, cwd=folder, env=environment, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return None


def fate(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str | None:
    """What a process that judges says."""
    done = ended(command, folder, environment)
    if done is None:
        return ENDLESS
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if last == PASSED:
        return None
    return last.removeprefix(FAILED) if last.startswith(FAILED) else "the process ended"


def failing_test(tests: Sequence[Path], folder: Path, environment: Mapping[str, str]) -> str | None:
    """The first of some tests of a checkout that fails on a copy of the package."""
    if not tests:
        return None
    checkout = next(parent for parent in tests[0].parents if (parent / "tests").is_dir())
    paths = os.pathsep.join([environment["PYTHONPATH"], str(checkout)])  # its tests, but the package of the copy
    options = ("-x", "-q", "-rfE", "--import-mode=importlib", "-p", "no:cacheprovider")
    command = (sys.executable, "-m", "pytest", *options, *map(str, tests))
    done = ended(command, folder, {**environment, "PYTHONPATH": paths})
    if done is None:
        return ENDLESS
    failed = (line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR")))
    return next(failed, "the tests ended") if done.returncode else None


def main(adapter: str, expression: str) -> None:
    """Judge until something fails. That everything is refused is a failure as well."""
    passed, failure = 0, ""
    for verdict in judge(find([adapter]), "quick", expression or None, judged_dtypes()):
        passed += verdict.status == "pass"
        if verdict.status == "fail":
            failure = verdict.id
            break
    print(PASSED if passed and not failure else f"{FAILED}{failure or 'everything is refused'}", flush=True)
    os._exit(0)  # the workers of adapters with it


if __name__ == "__main__":
    main(*sys.argv[1:])
