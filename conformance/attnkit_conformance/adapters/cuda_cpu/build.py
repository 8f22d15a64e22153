"""Kernels compiled for the CPU: a shared library for each template instance, cached by its sources."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from attnkit.backends.cupy.launch import ACTIVATIONS, FEATURE_MAPS, OF_DISTANCES, Launch
from attnkit.backends.cupy.rows import NORMALISERS
from attnkit.kernels.cuda import SOURCES
from attnkit_conformance.model.types import Foreign

HERE = Path(__file__).parent
COMPILER = "g++"
BOUNDS = ("-fsanitize=bounds", "-fno-sanitize-recover=bounds", "-Wl,--as-needed")  # fibers.h has the handler
FLAGS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-U_FORTIFY_SOURCE", *BOUNDS)
QUOTED = re.compile(r'"([^"\n]+)"')
SHIM = ("fibers.h", "intrinsics_on_host.h")
Edits = Mapping[str, tuple[str, str]]  # by file: a text and its replacement

UNIT = """
#define ATTNKIT_HOST "intrinsics_on_host.h"
#include "{source}"

namespace attnkit {{
inline int chosen;
struct Chosen {{  // the structure that a launch names among several, so that kernels are compiled once for all of them
{functions}
}};
}}

extern "C" void run(const void* arguments, int size, int grid, int block, int shared, int descending, int choice,
                    fibers::Answer* answer) {{
  attnkit::chosen = choice;
  const auto kernel = [](const void* a) {{ attnkit::{kernel}<{template}>(*(const attnkit::{arguments}*)a); }};
  fibers::run({{kernel, arguments, grid, block, shared, descending != 0}}, answer);
  if (size != (int)sizeof(attnkit::{arguments})) {{
    answer->failed = 1;
    snprintf(answer->message, sizeof answer->message, "arguments of %d bytes; expected %d", size,
             (int)sizeof(attnkit::{arguments}));
  }}
}}
"""


FUNCTION = """  template <class C>
  [[gnu::noinline]] static C {name}({declared}) {{ switch (chosen) {{ {cases} }} return 0; }}"""

CHOICES: tuple[tuple[tuple[str, ...], dict[str, tuple[str, ...]]], ...] = (
    (
        tuple(dict.fromkeys(x for names in (ACTIVATIONS, FEATURE_MAPS, OF_DISTANCES) for x in names.values())),
        {"value": ("s",), "slope": ("s",)},
    ),
    (
        NORMALISERS,
        {
            "relative": ("s", "top", "tau", "c", "above"),
            "weigh": ("x", "power"),
            "slope": ("x", "power"),
            "tilt": ("p", "above"),
        },
    ),
)
"""Structures selected at run time, and their functions with argument names."""


class Answer(ctypes.Structure):
    """The outcome of a launch."""

    _fields_ = (("failed", ctypes.c_int), ("address", ctypes.c_void_p), ("message", ctypes.c_char * 2048))


def missing_compiler() -> str | None:
    """Why compilation is not possible here, or None."""
    return None if shutil.which(COMPILER) else f"{COMPILER} is not installed"


def cache() -> Path:
    """The folder of libraries in the user's cache."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "attnkit" / "cuda_cpu"


def sources(edits: Edits) -> dict[str, str]:
    """All headers by name, with edits applied; ValueError for an edit whose text is not found."""
    files = {path.name: path.read_text() for path in sorted(SOURCES.glob("*.cuh"))}
    files |= {name: (HERE / name).read_text() for name in SHIM}
    for name, (before, after) in edits.items():
        if files[name].count(before) == 0:
            raise ValueError(f"{name}: nothing to edit, there is no {before!r}")
        files[name] = files[name].replace(before, after)
    return files


def choice_of(launch: Launch) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]], int]:
    """Structures, functions and the position of the one that a launch names; empty if it names none."""
    for structures, functions in CHOICES:
        for part in launch.template:
            if part.removeprefix("attnkit::") in structures:
                return structures, functions, structures.index(part.removeprefix("attnkit::"))
    return (), {}, 0


def unit(launch: Launch) -> str:
    """The source of the library of a launch."""
    structures, functions, _ = choice_of(launch)
    written = []
    for name, arguments in functions.items():
        declared, passed = ", ".join(f"C {x}" for x in arguments), ", ".join(arguments)
        cases = " ".join(f"case {n}: return {it}::{name}({passed});" for n, it in enumerate(structures))
        written.append(FUNCTION.format(name=name, declared=declared, cases=cases))
    names = {f"attnkit::{name}" for name in structures}
    template = ", ".join("attnkit::Chosen" if part in names else part for part in launch.template)
    return UNIT.format(
        source=launch.source,
        functions="\n".join(written),
        kernel=launch.kernel,
        template=template,
        arguments=type(launch.arguments).__name__,
    )


class Library:
    """Compiled kernels by source unit. `edits` plants bugs in the sources."""

    def __init__(self, edits: Edits | None = None) -> None:
        self.files = sources(edits or {})
        self.loaded: dict[str, ctypes.PyDLL] = {}

    def function(self, launch: Launch) -> Foreign:
        """The function that runs the kernel of a launch; compiled on first use."""
        text = unit(launch)
        if text not in self.loaded:
            self.loaded[text] = ctypes.PyDLL(str(compile_unit(text, headers_of(text, self.files))))
        return self.loaded[text].run

    def run(self, launch: Launch, descending: bool) -> Answer:
        """All blocks of a launch, one after the other."""
        answer = Answer()
        a = launch.arguments
        self.function(launch)(
            ctypes.byref(a), ctypes.sizeof(a), launch.blocks, launch.threads, launch.shared_bytes, int(descending),
            choice_of(launch)[2], ctypes.byref(answer),
        )  # fmt: skip
        return answer


def headers_of(text: str, files: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """The headers that a unit includes, directly or indirectly, with their texts."""
    headers: dict[str, str] = {}
    texts = [text]
    while texts:
        new = {name for name in QUOTED.findall(texts.pop()) if name in files} - headers.keys()
        headers |= {name: files[name] for name in new}
        texts += [files[name] for name in new]
    return tuple(sorted(headers.items()))


@functools.cache
def compile_unit(text: str, files: tuple[tuple[str, str], ...]) -> Path:
    """The path of the shared library of a unit."""
    digest = hashlib.sha256(repr((text, files, FLAGS, compiler_version())).encode()).hexdigest()[:32]
    path = cache() / f"{digest}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        folder = Path(name)
        for file, content in files:
            (folder / file).write_text(content)
        (folder / "unit.cpp").write_text(text)
        command = [COMPILER, *FLAGS, "unit.cpp", "-o", "unit.so"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{COMPILER} refuses the kernels:\n{done.stderr[:4000]}")
        os.replace(folder / "unit.so", path)
    return path


@functools.cache
def compiler_version() -> str:
    """The compiler's version."""
    return subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout
