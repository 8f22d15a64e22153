"""Which kernels a GPU has judged: classes of devices, and the sources that the judged kernels were compiled from.

A kernel that changed since is as little judged as a new one. What a kernel is compiled from are the files that its op
names below and all that these import or include, without comments and docstrings. Tiles (`sizes.py`) are no part of it:
a sweep on a GPU writes those that returned there what the judged ones return. Nor are the host's files, which plan and
launch: what they compute is tested without a GPU.
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
from typing import Any, NotRequired, TypedDict

FOLDER = Path(__file__).parent
RECORD = FOLDER / "judged.json"
"""{compute capability: {key: Judged}}, written by `python -m benchmarks gpu --read`."""


class Judged(TypedDict):
    """Kernels that were right in every case that a GPU judged."""

    sources: str  # digest of what they were compiled from
    cases: dict[str, int]  # by dtype
    left: NotRequired[int]  # cases that its time did not suffice for


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
def record() -> dict[str, dict[str, Judged]]:
    """What is committed, by compute capability."""
    found: dict[str, dict[str, Judged]] = json.loads(RECORD.read_text())
    return found


def as_they_are(key: str) -> dict[str, Judged]:
    """By compute capability, what is committed of the kernels of a key as they are now."""
    found = {capability: of[key] for capability, of in record().items() if key in of}
    return {capability: one for capability, one in found.items() if one["sources"] == digest(key)}


def unjudged(kernels: str, op: str, dtype: str = "", capability: str = "") -> str | None:
    """What is to be said of kernels of an op that no GPU has found right as they are, in a dtype and on devices of a
    compute capability where these are known; None for all others.
    """
    key = key_of(kernels, op)
    if kernels not in SOURCES or key not in all_keys():
        return None
    found = as_they_are(key)
    if not found:
        changed = any(key in of for of in record().values())
        return "no GPU has judged these kernels" + (" since they changed" if changed else "")
    if capability and capability not in found:
        return f"judged on {', '.join(found)} only"
    judges = [found[capability]] if capability else found.values()
    dtypes = dict.fromkeys(name for one in judges for name in one["cases"])
    return f"judged in {', '.join(dtypes)} only" if dtype and dtype not in dtypes else None


def unjudged_for(kernels: str, op: str, x: Any) -> str | None:
    """The same for calls whose first array is `x`."""
    return unjudged(kernels, op, str(getattr(x, "dtype", "")).rpartition(".")[2], capability_of(x))


def capability_of(x: Any) -> str:
    """The compute capability of an array's device, or "" where it has none or cannot be asked yet."""
    device = getattr(x, "device", None)
    if getattr(device, "type", "") == "cuda":
        cuda = sys.modules["torch"].cuda
        return ".".join(map(str, cuda.get_device_capability(device))) if cuda.is_available() else ""
    found = str(getattr(device, "compute_capability", ""))  # of JAX "9.0", of CuPy "90"
    return found if "." in found or not found else f"{found[:-1]}.{found[-1]}"


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
