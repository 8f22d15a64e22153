"""Which kernels a GPU has judged: classes of devices, and the sources that the judged kernels were compiled from.

A kernel that changed since is as little judged as a new one. What a kernel is compiled from are the files that its op
names below and all that these import or include, without comments and docstrings; tiles (`sizes.py`) are no part of it.
"""

import io
import json
import re
import sys
import tokenize
import warnings
from functools import cache
from hashlib import sha256
from pathlib import Path

FOLDER = Path(__file__).parent
RECORD = FOLDER / "judged.json"
"""{compute capability: {key: digest}}, written by `python -m benchmarks gpu --read`."""

POINTWISE = (
    "triton/pointwise.py",
    "triton/activations.py",
    "triton/distances.py",
    "triton/decoding.py",
    "triton/whole_head.py",
)
ROWS = ("triton/rows.py", "triton/rows_gradients.py", "triton/normalisers.py", "triton/decoding.py")
LINEAR = ("triton/linear.py", "triton/linear_sweeps.py", "triton/features.py")
STATISTICS = (*POINTWISE, *ROWS, "triton/rows_statistics.py")
OF_TORCH = {
    **dict.fromkeys(("pointwise", "sigmoid", "reluformer", "rela", "gaussian", "pointwise_packed"), POINTWISE),
    **dict.fromkeys(("softmax", "forgetting", "entmax", "sparsemax", "ssmax", "softmax_packed"), ROWS),
    "softpick": (*ROWS, "triton/softpick.py"),
    **dict.fromkeys(("linear", "cosine", "performer", "efficient", "linear_packed"), LINEAR),
    "linear_step": ("triton/linear_step.py", "triton/features.py"),
    "soft": (*POINTWISE, "triton/newton.py"),
    "newton": ("triton/newton.py",),
    "statistics": STATISTICS,
}
FLAT = ("triton/flat.py", "triton/activations.py")
OF_JAX = {
    **dict.fromkeys(("pointwise", "sigmoid", "reluformer", "gaussian"), (*FLAT, "triton/distances.py")),
    **dict.fromkeys(("softmax", "entmax", "sparsemax", "ssmax"), ("triton/flat_rows.py", "triton/normalisers.py")),
    "linear": ("triton/flat_linear.py", "triton/linear_sweeps.py", "triton/features.py"),
}
CUDA, CUDA_ROWS, CUDA_LINEAR = (
    ("cuda/pointwise_gradients.cuh",),
    ("cuda/rows_gradients.cuh",),
    ("cuda/linear_kernels.cuh",),
)
OF_CUPY = {
    **dict.fromkeys(("pointwise", "sigmoid", "reluformer", "rela", "gaussian", "pointwise_packed"), CUDA),
    **dict.fromkeys(("softmax", "entmax", "sparsemax", "softmax_packed"), CUDA_ROWS),
    **dict.fromkeys(("linear", "linear_packed"), CUDA_LINEAR),
    "soft": (*CUDA, "cuda/newton.cuh"),
    "newton": ("cuda/newton.cuh",),
    "statistics": (*CUDA, *CUDA_ROWS, "cuda/statistics.cuh"),
}
SOURCES: dict[str, dict[str, tuple[str, ...]]] = {
    "torch triton": OF_TORCH,
    "jax triton": OF_JAX,
    "cupy cuda": OF_CUPY,
}
"""By library and implementation, the short name of an op (`key_of`) -> the files of its kernels."""


def key_of(kernels: str, op: str) -> str:
    """The name of an op's kernels in `RECORD`: `torch triton, softmax`; of its gradients, and of all statistics, the
    same.
    """
    name = op.removesuffix("_vjp")
    short = "statistics" if name.endswith("_statistics") else name.replace("_attention", "").removesuffix("_inverse")
    return f"{kernels}, {short}"


def all_keys() -> list[str]:
    return [f"{kernels}, {op}" for kernels, ops in SOURCES.items() for op in ops]


def essence(text: str) -> str:
    """Python without what no compiler sees: comments, docstrings, and where lines are broken."""
    words, begins = list[str](), True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL) or (begins and token.type == tokenize.NEWLINE):
            continue
        if token.type in (tokenize.INDENT, tokenize.DEDENT, tokenize.NEWLINE):
            begins = True
            words.append(tokenize.tok_name[token.type])
        elif not (begins and token.type == tokenize.STRING):
            begins = False
            words.append(token.string)
    return " ".join(words)


def uses(path: Path) -> list[str]:
    """The files of kernels that a file imports or includes."""
    text = path.read_text()
    if path.suffix == ".cuh":
        return [f"cuda/{name}" for name in re.findall(r'#include "(\S+)"', text)]
    whole = re.findall(r"from attnkit\.kernels\.(\w+)\.(\w+) import", text)
    named = re.findall(r"from attnkit\.kernels\.(triton) import (\w+)", text)
    return [f"{folder}/{name}.py" for folder, name in whole + named if name != "sizes"]


@cache
def files_of(key: str) -> tuple[str, ...]:
    """What the kernels of a key are compiled from."""
    kernels, _, op = key.partition(", ")
    found, open_ = set[str](), [*SOURCES[kernels][op]]
    while open_:
        if (name := open_.pop()) not in found:
            found.add(name)
            open_ += uses(FOLDER / name)
    return tuple(sorted(found))


@cache
def _content(name: str) -> str:
    text = (FOLDER / name).read_text()
    if name.endswith(".py"):
        return essence(text)
    return " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL).split())


@cache
def digest(key: str) -> str:
    """Of the sources that the kernels of a key are compiled from."""
    return sha256("\n".join(f"{name} {_content(name)}" for name in files_of(key)).encode()).hexdigest()[:16]


@cache
def record() -> dict[str, dict[str, str]]:
    """What is committed: by compute capability, the digests of the kernels that a GPU found right."""
    found: dict[str, dict[str, str]] = json.loads(RECORD.read_text())
    return found


def unjudged(kernels: str, op: str) -> str | None:
    """What is to be said of kernels of an op that no GPU has found right as they are; None for all others."""
    key = key_of(kernels, op)
    if kernels not in SOURCES or key not in all_keys():
        return None
    verdicts = [digests[key] for digests in record().values() if key in digests]
    if digest(key) in verdicts:
        return None
    return "no GPU has judged these kernels" + (" since they changed" if verdicts else "")


def judged() -> frozenset[str]:
    """Compute capabilities of which verdicts are committed: benchmarks/results/verdicts-*.json."""
    return frozenset(record())


_warned: set[str] = set()


def warn_once(capability: str) -> None:
    """Warn of the first call of a process that `auto` gives to kernels of a class without verdicts."""
    if capability in judged() or capability in _warned:
        return
    _warned.add(capability)
    warnings.warn(
        f"attnkit's GPU kernels have not been judged on compute capability {capability} yet: "
        "`python -m attnkit_conformance verify` judges them on this device in about two minutes, and "
        'impl="generic" does without them',
        UserWarning,
        stacklevel=_levels(),
    )


def _levels() -> int:
    """How many frames up from `warn_once` the first one outside attnkit is."""
    frame, levels = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("attnkit."):
        frame, levels = frame.f_back, levels + 1
    return levels
