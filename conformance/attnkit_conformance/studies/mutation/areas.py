"""What is changed, and what has to see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import attnkit
import attnkit_reference
from attnkit_conformance.judge import matcher
from attnkit_conformance.studies.mutation import units
from attnkit_conformance.studies.mutation.copies import Copies, Judge
from attnkit_conformance.studies.mutation.trials import Trials

T = TypeVar("T")
ATTNKIT, REFERENCE = (Path(package.__file__ or "").parent for package in (attnkit, attnkit_reference))
CHECKOUT = ATTNKIT.parent
# Objects are shared by all mutants; with -O1 the compiler takes a third of the time. A level that fails has no other.
BUILD = """
import os, pathlib
from attnkit.backends.native import build
own = build.fingerprint()
build.fingerprint = lambda: own
build.FLAGS = tuple(flag.replace("-O3", "-O1") for flag in build.FLAGS)
attempts = build.attempts
build.attempts = lambda machine: attempts(machine)[:1]
raise SystemExit(build.rebuild(pathlib.Path(os.environ["OBJECTS"])))
"""
LINEAR, SPARSE = "linear or cosine or performer or efficient", "sparsemax or entmax"
OF_CPU = {  # what the files of one family can change
    **dict.fromkeys(("linear", "feature_map", "recurrence"), LINEAR),
    **dict.fromkeys(("entmax", "entmax_of_halves", "sparsemax", "threshold"), SPARSE),
    **{"efficient": "efficient", "gaussian": "gaussian or soft", "statistics": "statistics", "packed": "packed"},
    **{"softmax": "softmax or nystrom", "pointwise": "pointwise", "philox": "dropout=seed"},
}
OF_TRITON = {
    **dict.fromkeys(("linear", "linear_tokens", "features"), LINEAR),
    **{"flat_linear": attnkit.linear_attention.__name__},
    **dict.fromkeys(("rows", "rows_gradients", "flat_rows", "normalisers"), f"softmax or {SPARSE}"),
    **dict.fromkeys(("statistics", "rows_statistics"), "statistics"),
    **{"newton": "newton or soft", "distances": "gaussian or soft"},
    **{"decoding": "pointwise_attention or softmax_attention", "linear_step": attnkit.linear_attention_step.__name__},
    **dict.fromkeys(("pointwise", "activations", "special"), "pointwise or reluformer or sigmoid or rela"),
    **dict.fromkeys(("tiles", "sizes"), "pointwise_attention or softmax_attention or gaussian or linear_attention"),
}
OF_CUDA = {
    **dict.fromkeys(("linear", "linear_kernels"), LINEAR),
    **dict.fromkeys(("rows", "rows_gradients", "rows_of_tiles", "normalisers"), f"softmax or {SPARSE}"),
    **{"newton": "newton", "statistics": "statistics", "tensor_tiles": "float16", "plain_tiles": "float32"},
    **{"distance_tiles": "gaussian", "packed": "packed"},
    **dict.fromkeys(("pointwise", "pointwise_gradients", "activations"), "pointwise or reluformer or sigmoid"),
}


@dataclass(frozen=True)
class Area:
    """Files that are changed; an adapter that the quick profile then judges, also of a copy of attnkit, and tests that
    run in a checkout, of those that match `expression`.
    """

    about: str
    paths: tuple[Path, ...]
    adapter: str = ""
    keeps_golden: bool = True
    tests: tuple[str, ...] = ()
    expression: str = ""
    copied: Judge | None = None
    endings: tuple[str, ...] = (".py",)
    left: tuple[str, ...] = ()  # files that decide how fast a result is there, never what it is
    count: int = 60  # of mutants that are drawn

    def files(self) -> list[Path]:
        every = (file for path in self.paths for file in (path.rglob("*") if path.is_dir() else (path,)))
        return sorted(file for file in every if file.suffix in self.endings and file.name not in self.left)

    def within(self, names: Sequence[str]) -> Area:
        """The area of those of its files that have these names; ValueError for a name that none has."""
        files = self.files()
        if missing := [name for name in names if name not in {file.name for file in files}]:
            raise ValueError(f"mutants of {self.about}: no file is called {', '.join(missing)}")
        return replace(self, paths=tuple(file for file in files if file.name in names))

    def with_trials(self, expression: str | None, use: Callable[[Trials | Copies], T]) -> T:
        """`use` on the mutants, judged by cases or tests whose id matches an expression."""
        if self.copied:
            return use(Copies(ATTNKIT, self.files(), self.copied, expression))
        cases = units.cases(self.adapter, matcher(expression), self.keeps_golden) if self.adapter else []
        tests = [str(test) for test in (CHECKOUT / name for name in self.tests) if test.exists()]
        if not self.adapter and not tests:
            raise ValueError(f"mutants of {self.about} are for the tests of a checkout, which are not here")
        if not tests:
            return use(Trials(cases, self.files()))
        both = " and ".join(f"({part})" for part in (self.expression, expression) if part)
        return units.with_tests(tests, both, lambda several: use(Trials([*cases, *several], self.files())))


AREAS = {
    "generic": Area("the generic bodies", (ATTNKIT / "_core", ATTNKIT / "ops"), adapter="numpy-generic", count=240),
    "reference": Area(
        "the reference", (REFERENCE,), adapter="numpy-generic", keeps_golden=False, tests=("tests/reference",)
    ),
    "torch": Area(
        "torch's rules of gradients",
        (
            *((ATTNKIT / "backends" / "torch").glob("*.py")),
            ATTNKIT / "backends" / "native",
        ),
        tests=(
            *(
                f"tests/native/test_{name}.py"
                for name in ("torch", "rows", "linear", "lower", "packed", "lowrank", "load")
            ),
            *(f"tests/library/test_{name}.py" for name in ("blocked", "dispatch", "transforms", "gradchecks")),
            "tests/integrations/test_torch_sdpa.py",
        ),
        # it forks, and fails in a fork in which many others have run, with any change and without
        expression="not workers_that_fork",
    ),
    "native": Area(
        "the kernels for CPUs",
        (ATTNKIT / "kernels" / "cpu",),
        copied=Judge("numpy-native", BUILD, tests=(CHECKOUT / "tests" / "native",), concerns=OF_CPU),
        endings=(".cpp", ".h"),
        left=("detect.cpp",),  # chooses a level, each of which `make native` judges
    ),
    "triton": Area(
        "the Triton kernels",
        (ATTNKIT / "kernels" / "triton",),
        copied=Judge(
            "triton_interpreted",
            cases="not property",
            tests=(CHECKOUT / "tests" / "kernels",),
            concerns=OF_TRITON,
            adapters={
                **dict.fromkeys(("flat", "flat_rows", "flat_linear"), "jax_triton_interpreted"),
                "decoding": "triton_interpreted-split",
            },
        ),
    ),
    "cuda": Area(
        "the CUDA kernels",
        (ATTNKIT / "kernels" / "cuda",),
        copied=Judge("cuda_cpu", cases="not property and (float32 or float16)", concerns=OF_CUDA),
        endings=(".cuh",),
    ),
    "nn": Area(
        "attnkit.nn",
        tuple((ATTNKIT / "nn").glob("*.py")),
        tests=(
            *(f"tests/library/test_nn{name}.py" for name in ("", "_modules", "_operands", "_shared", "_tokens")),
            *(f"tests/library/test_{name}.py" for name in ("gates", "capture")),
            *(f"tests/integrations/test_{name}.py" for name in ("records", "torch_multihead", "timm", "transformers")),
        ),
    ),
    "context_parallel": Area(  # its processes are not forks
        "attention over processes",
        (ATTNKIT / "nn" / "context_parallel",),
        copied=Judge(tests=(CHECKOUT / "tests" / "library" / "test_context_parallel.py",)),
        count=30,
    ),
    "experiments": Area("the experiments", (CHECKOUT / "experiments",), tests=("tests/experiments",)),
}
