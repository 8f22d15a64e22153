"""What is asked of a GPU, by what matters most: is it right, how fast is it, does it stay in its memory?"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.studies import EVIDENCE, GENERATED, PAIRS

KIT = ("-m", "attnkit_conformance")
MEASURE = ("-m", "benchmarks")
SECONDS = 400.0  # of judging: what is left is said
LIMIT = 480.0  # of a job, compiling included

# Of the quick profile what compiles few kernels: cases by hand with one or two options
FEW = "/cross or /plain or /gqa or /blocks or /empty or /causal"
# in what is trained in, and ops whose cases are called otherwise
FIRST = f"({FEW} or ::linear_attention_step/) and /bfloat16/ or ::newton_inverse/float32/"
OPS = {
    "softmax": 3.0, "relu": 3.0, "linear": 2.6, "sigmoid": 1.4, "gelu": 1.4, "sparsemax": 1.4, "entmax15": 1.4,
    "gaussian": 1.4, "statistics": 1.0,
}  # fmt: skip
"""What is timed, and expected minutes."""
# of docs/predicted.md: what has changed since it was timed, beside torch's softmax and flash-linear-attention
GOALS = (
    "not softmax and d=64 and bfloat16 and (full and (n=197 or n=4096) or linear and causal and (n=4096 or n=16384))"
)
UNRIVALLED = ("naive", "sdpa math", "flex", "generic")
"""Contenders that nobody chooses on a GPU, or that `crossover` times."""
ROUNDS = 5
COUNTED = "relu and full and n=4096 and d=64 and bfloat16"


PREDICTED = json.loads((Path(__file__).parents[1] / "results" / "evidence.json").read_text())["jobs"]
"""Of the jobs that train: see `benchmarks.gpu.predict`."""
VERDICTS, AIMS, TILES, TIMES, TRAINING, REST, STUDIES = range(7)
"""What a job is worth: the least first."""


class Job(NamedTuple):
    """Arguments of Python, or of the program that runs it; "{out}" is the job's folder and "{workers}" the number of
    processes. `needs` are modules and programs without which there is nothing to ask. What it says holds for the
    kernels whose keys in `attnkit.kernels.verdicts` begin with one of `about`, as they were; without any, for its
    arguments. `data` are files of the folder that is carried. A job that `resumes` finds in its folder what it left.
    What it `says` is a JSON file of that name, whose `left` is how much it has not done.
    """

    name: str
    question: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...] = ("torch",)
    under: tuple[str, ...] = ()
    worth: int = REST
    about: tuple[str, ...] = ("",)
    minutes: float = 8.0  # expected, compiling included
    data: tuple[str, ...] = ()
    resumes: bool = False
    says: str = ""

    @property
    def judges(self) -> bool:
        """Whether it is a run of the kit, which can leave out cases and ops."""
        return self.arguments[:3] == (*KIT, "run")


def judged(*adapters: str, **options: str) -> tuple[str, ...]:
    """A run of the kit for `SECONDS`."""
    chosen = (word for name, value in options.items() for word in (f"-{'-' * (len(name) > 1)}{name}", value))
    reports = ("--json", "{out}/verdicts.json", "--html", "{out}/verdicts.html")
    return (*KIT, "run", *adapters, *chosen, "--seconds", f"{SECONDS:g}", *reports)


def quick(*adapters: str, **options: str) -> tuple[str, ...]:
    return judged(*adapters, profile="quick", workers="{workers}", **options)


def timed(expression: str, *more: str) -> tuple[str, ...]:
    """Ops beside torch's softmax and other packages."""
    without = (word for name in UNRIVALLED for word in ("--without", name))
    cells = ("--profile", "full", "--device", "cuda", "-k", expression, *without, *more)
    return (*MEASURE, "run", *cells, "--resume", "--out", "{out}/times.json")


def sanitized(tool: str, *adapters: str, needs: tuple[str, ...] = ("torch",), **options: str) -> Job:
    """A run of the kit under a tool of compute-sanitizer."""
    under = ("compute-sanitizer", "--tool", tool, "--target-processes", "all", "--error-exitcode", "1")
    arguments = judged(*adapters, profile="quick", workers="1", **options)
    library = adapters[0].partition("-")[0].partition("_")[0]
    question = f"does {tool} complain?"
    return Job(f"{tool}-{library}", question, arguments, (*needs, under[0]), under, resumes=True, says="verdicts")


def of_kit(
    name: str, question: str, arguments: tuple[str, ...], needs: tuple[str, ...] = ("torch",), **more: Any
) -> Job:
    """A run of the kit as a job."""
    return Job(name, question, arguments, needs, resumes=True, says="verdicts", **more)


def swept(name: str, expression: str) -> Job:
    """Kernels with other tiles; `python -m benchmarks tiles --write` reads the answer back."""
    arguments = (*MEASURE, "tiles", "-k", expression, "--seconds", f"{SECONDS:g}", "--resume")
    return Job(
        f"tiles-{name}", f"which tiles are fastest, {name}?", (*arguments, "--out", "{out}/tiles.json"),
        ("torch", "triton"), worth=TILES, about=("torch triton",), resumes=True, says="tiles",
    )  # fmt: skip


TRITON = "torch_cuda-triton"
TESTS = ("tests/kernels/test_custom_ops.py", "tests/kernels/test_cupy.py")
PROFILER = ("ncu", "--target-processes", "all", "--launch-skip", "20", "--launch-count", "10", "--csv")
OVERHEAD = ("overhead", "--device", "cuda", "--out", "{out}/overhead.json")
CROSSOVER = ("crossover", "--seconds", f"{SECONDS:g}", "--resume", "--out", "{out}/crossover.json")
STUDY = ("000-fig2", "--preset", "smoke", "--device", "cuda", "--out", "{out}/study", "--overwrite")
TORCH, JAX, CUPY = ("torch triton",), ("jax triton",), ("cupy cuda",)
OF_OPS = {"relu": "pointwise", "gelu": "pointwise", "entmax15": "entmax"}
"""The op of `attnkit.kernels.verdicts` whose kernels are timed; where it is not said, that of the name."""


def times_of(op: str) -> Job:
    cells = timed(f"{op} and n= and not ({GOALS})", "--rounds", f"{ROUNDS}")
    return Job(
        f"times-{op}", f"how fast is {op}?", cells, worth=TIMES, about=(f"torch triton, {OF_OPS.get(op, op)}",),
        minutes=OPS[op], resumes=True, says="times",
    )  # fmt: skip


def trained(name: str) -> Job:
    """Cells of a recipe, trained to their end."""
    study, places = EVIDENCE[name], ("--out", "{out}", "--data", "{data}", "--cache", "{cache}")
    predicted = PREDICTED.get(name, {}).get("minutes", 8.0)
    needs = ("torch", "tyro", "matplotlib", *(("sacremoses",) if study.data == PAIRS else ()))
    data = () if study.data == GENERATED else (study.data,)
    arguments = ("-m", "benchmarks.gpu.train", name, *places)
    return Job(
        name, f"what does {study.name} say?", arguments, needs, worth=STUDIES, about=(), data=data, resumes=True,
        minutes=min(predicted, 8.0),
    )  # fmt: skip


JOBS = (
    Job("verify", "which kernels are to be trusted?", (*KIT, "verify", "--json", "{out}/verdicts.json"),
        worth=VERDICTS, minutes=4, says="verdicts"),
    of_kit("first", "are plain calls of torch right?", quick(TRITON, k=FIRST), worth=VERDICTS, about=TORCH, minutes=4),
    of_kit("cupy", "is CuPy right?", quick("cupy-cuda"), ("cupy",), worth=VERDICTS, about=CUPY),
    of_kit("jax", "is JAX right?", quick("jax-triton", k=FEW), ("jax",), worth=VERDICTS, about=JAX, minutes=4),
    Job("ops", "do custom ops and CuPy's launches do what torch asks?", ("-m", "pytest", "-q", "-rs", *TESTS),
        worth=VERDICTS, minutes=2),
    Job("times-goals", "are the goals met?", timed(GOALS, "--rounds", f"{ROUNDS}"), worth=AIMS, about=TORCH,
        minutes=2.4, resumes=True, says="times"),
    swept("forward", "not gradients and not linear and not features"),
    swept("gradients", "gradients and not linear and not features"),
    swept("linear", "linear or features"),
    *map(times_of, OPS),
    Job("crossover", "from which size on are kernels not slower?", (*MEASURE, *CROSSOVER), ("torch", "triton"),
        worth=TIMES, about=TORCH, resumes=True, says="crossover"),
    Job("overhead", "what does a call cost?", (*MEASURE, *OVERHEAD), worth=TIMES, about=TORCH, minutes=1),
    Job("train", "does a study train?", ("-m", "experiments", "run", *STUDY), ("torch", "tyro", "matplotlib"),
        worth=TRAINING, about=TORCH, minutes=3),
    sanitized("memcheck", TRITON, dtype="float16"),
    sanitized("racecheck", TRITON, dtype="float32", k="causal"),
    sanitized("memcheck", "cupy-cuda", needs=("cupy",)),
    Job("profile", "what do kernels wait for?", timed(COUNTED, "--rounds", "2"), ("torch", PROFILER[0]), PROFILER),
    *(
        of_kit(f"quick-{dtype}", f"is torch right in {dtype}?", quick(TRITON, f"{TRITON}_ordered", dtype=dtype))
        for dtype in ("bfloat16", "float16", "float32")
    ),
    *map(trained, EVIDENCE),
)  # fmt: skip
