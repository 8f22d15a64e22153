"""What is changed, and what has to see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import attnkit
import attnkit_reference
from attnkit_conformance.adapters.mutation import units
from attnkit_conformance.adapters.mutation.units import Unit
from attnkit_conformance.judge import matcher

T = TypeVar("T")
ATTNKIT, REFERENCE = (Path(package.__file__ or "").parent for package in (attnkit, attnkit_reference))
CHECKOUT = ATTNKIT.parent


@dataclass(frozen=True)
class Area:
    """Files that are changed; an adapter that the quick profile then judges, or tests of a checkout that then run."""

    about: str
    paths: tuple[Path, ...]
    adapter: str = ""
    keeps_golden: bool = True
    tests: tuple[str, ...] = ()
    count: int = 60  # of mutants that are drawn

    def files(self) -> list[Path]:
        return sorted(file for path in self.paths for file in (path.rglob("*.py") if path.is_dir() else (path,)))

    def with_units(self, expression: str | None, use: Callable[[Sequence[Unit]], T]) -> T:
        """`use` on the units whose id matches an expression."""
        if self.adapter:
            return use(units.cases(self.adapter, matcher(expression), self.keeps_golden))
        if not (CHECKOUT / "tests").exists():
            raise ValueError(f"mutants of {self.about} are for the tests of a checkout, which are not here")
        return units.with_tests([str(CHECKOUT / test) for test in self.tests], expression, use)


AREAS = {
    "generic": Area("the generic bodies", (ATTNKIT / "_core", ATTNKIT / "ops"), adapter="numpy-generic", count=240),
    "reference": Area("the reference", (REFERENCE,), adapter="numpy-generic", keeps_golden=False),
    "torch": Area(
        "torch's rules of gradients",
        (
            *((ATTNKIT / "backends" / "torch").glob("*.py")),
            ATTNKIT / "backends" / "native",
        ),
        tests=("tests/native", "tests/library"),
    ),
    "nn": Area("attnkit.nn", (ATTNKIT / "nn",), tests=("tests/library", "tests/integrations")),
    "experiments": Area("the experiments", (CHECKOUT / "experiments",), tests=("tests/experiments",)),
}
