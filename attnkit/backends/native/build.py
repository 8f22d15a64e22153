"""Compile the CPU kernels: as a build hook of hatchling, and as `python -m attnkit.backends.native.build`.

Nothing but the standard library and a C++ compiler is needed, and without a compiler installation succeeds: the library
is optional, and `attnkit.native_status()` says why it is not there. A wheel holds a library for every level of the
instruction set, an editable installation this machine's alone.

Environment:
    CXX: the compiler, with options; default c++, g++ or clang++, the first that is found.
    ATTNKIT_CPU_LEVEL: compile this level only (a name of `levels()`), or "none".
"""

import ctypes
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:
    BuildHookInterface = object  # type: ignore[assignment,misc]

HERE = Path(__file__).parent
LIBRARIES = HERE / "lib"
SOURCES = HERE.parents[1] / "kernels" / "cpu"
REASON = "reason.txt"
"""Beside the libraries, or in their place: why nothing was compiled."""
FAILURES = (LookupError, RuntimeError, OSError)
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"),
    # none of these changes a result: errno and traps are not looked at, and every target has fused products
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)
X86 = {
    "x86-64": (1, ()),
    "x86-64-v3": (3, ("-march=x86-64-v3",)),
    "x86-64-v4": (4, ("-march=x86-64-v4",)),
    "x86-64-v4-bf16": (5, ("-march=x86-64-v4", "-mavx512bf16")),
    "x86-64-v4-amx": (6, ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16")),
}
DETECTOR = "detect"
RECORD = "record.json"
"""Beside the libraries: the digest of each, and the fingerprint of what they were compiled from."""
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
REBUILD = "run python -m attnkit.backends.native.build"


def levels() -> dict[str, tuple[int, tuple[str, ...]]]:
    """By name, the levels that this kind of machine may have: their number (`attnkit_level`) and compiler flags."""
    machine = platform.machine().lower()
    return X86 if machine in ("x86_64", "amd64") else {machine or "unknown": (1, ())}


def library(name: str, folder: Path = LIBRARIES) -> Path:
    """Where the library of a level lies."""
    return folder / f"attnkit-{name}.so"


def source_files() -> list[Path]:
    return sorted(path for path in SOURCES.rglob("*") if path.suffix in (".cpp", ".h"))


def fingerprint() -> str:
    """A hash of the sources and of the compiler's flags."""
    digest = hashlib.sha256(repr((FLAGS, levels())).encode())
    for path in source_files():
        digest.update(path.relative_to(SOURCES).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def write_record(folder: Path) -> None:
    """Record the libraries of a folder, just compiled from the sources as they are."""
    libraries = {file.name: digest(file) for file in sorted(folder.glob("*.so"))}
    (folder / RECORD).write_text(json.dumps({"sources": fingerprint(), "libraries": libraries}, indent=1))


def misfit(name: str, folder: Path = LIBRARIES) -> str | None:
    """Why a library that is there is not to be loaded: it is not what was compiled, or was from other sources."""
    try:
        record = json.loads((folder / RECORD).read_text())
        sources, libraries = record["sources"], record["libraries"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"there is no record of its build; {REBUILD}"
    if sources != fingerprint():
        return f"it was compiled from other C++ sources than those there; {REBUILD}"
    file = library(name, folder)
    if libraries.get(file.name) != digest(file):
        return f"{file.name} is not the file that was compiled; {REBUILD}"
    return None


def machine_level(folder: Path = LIBRARIES) -> int:
    """The level of this machine, asked of the detector, which must have been compiled."""
    level: int = ctypes.CDLL(str(library(DETECTOR, folder))).attnkit_machine_level()
    return level


def compiler() -> list[str]:
    named = os.environ.get("CXX")
    for command in [shlex.split(named)] if named else [["c++"], ["g++"], ["clang++"]]:
        if command and shutil.which(command[0]):
            return command
    raise LookupError(f"CXX={named} is not there" if named else "no C++ compiler was found (c++, g++, clang++)")


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        error = next((line for line in lines if "error" in line), lines[-1])
        raise RuntimeError(f"{command[0]} failed: {error}")


def targets(machine: int | None = None) -> dict[str, tuple[str, ...]]:
    """Names and flags of the levels to compile: all of them, or the one of a machine with that number."""
    known, forced = levels(), os.environ.get("ATTNKIT_CPU_LEVEL")
    if forced == "none":
        raise LookupError("ATTNKIT_CPU_LEVEL=none")
    if forced and forced not in known:
        raise LookupError(f"ATTNKIT_CPU_LEVEL={forced} is none of {', '.join(known)}")
    names = [forced] if forced else [name for name, (number, _) in known.items() if machine in (None, number)]
    return {name: known[name][1] for name in names}


def includes(source: Path) -> set[Path]:
    """A source and the headers of attnkit that it includes, directly or through others."""
    reached, waiting = set[Path](), [source]
    while waiting:
        file = waiting.pop()
        if file.exists() and file not in reached:
            reached.add(file)
            waiting += (file.parent / name for name in INCLUDE.findall(file.read_text()))
    return reached


def compiled(source: Path, command: Sequence[str], objects: Path) -> Path:
    """The object of a source, named by its command and by what it includes: one that is there is taken."""
    content = hashlib.sha256(repr(command).encode())
    for file in sorted(includes(source)):
        content.update(file.read_bytes())
    output = objects / f"{source.stem}-{content.hexdigest()[:32]}.o"
    if not output.exists():
        _run([*command, "-c", str(source), "-o", str(output)])
    return output


def compile_into(folder: Path, every_level: bool, objects: Path) -> None:
    """Compile the detector and every level, or this machine's alone."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:

        def link(level: str, own: Sequence[str], sources: list[Path]) -> None:
            command = [*compiler(), *FLAGS, *own]
            files = pool.map(lambda source: str(compiled(source, command, objects)), sources)
            _run([*command, "-shared", *files, "-o", str(library(level, folder))])

        detector = SOURCES / "detect.cpp"
        link(DETECTOR, (), [detector])
        named = every_level or "ATTNKIT_CPU_LEVEL" in os.environ
        machine = None if named else machine_level(folder)
        for level, own in targets(machine).items():
            link(level, own, [path for path in source_files() if path.suffix == ".cpp" and path != detector])


def fill(folder: Path, every_level: bool, objects: Path | None = None) -> str | None:
    """`compile_into` an empty folder, or leave there and answer with why it failed."""
    try:
        with tempfile.TemporaryDirectory() as passing:
            compile_into(folder, every_level, objects or Path(passing))
        write_record(folder)
    except FAILURES as error:
        for unfinished in folder.iterdir():
            unfinished.unlink()
        (folder / REASON).write_text(str(error))
        return str(error)
    return None


def rebuild(objects: Path | None = None) -> str | None:
    """Compile this machine's level into the checkout; the answer is None, or why there is no library now. A folder of
    objects is for who compiles often: what is there is not compiled again.

    Files are moved to their place when they are whole: another process may have the old ones open.
    """
    with tempfile.TemporaryDirectory(dir=HERE, prefix="lib-") as temporary:
        reason = fill(Path(temporary), every_level=False, objects=objects)
        LIBRARIES.mkdir(exist_ok=True)
        for old in LIBRARIES.iterdir():
            old.unlink()
        for file in Path(temporary).iterdir():
            file.replace(LIBRARIES / file.name)
    return reason


def is_current(name: str) -> bool:
    """Whether the library of a level is there, as it was compiled from the sources as they are now."""
    return library(name).exists() and misfit(name) is None


class Hook(BuildHookInterface):
    """With libraries the wheel is this platform's, without them it is anybody's.

    What goes into a wheel is compiled beside the checkout, whose own library stays.
    """

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            self._warn(rebuild())
            return
        self.folder = tempfile.TemporaryDirectory()
        folder = Path(self.folder.name)
        reason = fill(folder, every_level=True)
        if reason is None:
            platform_name = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data |= {"pure_python": False, "tag": f"py3-none-{platform_name}"}
        for path in folder.iterdir():
            build_data["force_include"][str(path)] = (LIBRARIES / path.name).relative_to(HERE.parents[2]).as_posix()
        self._warn(reason)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self.folder.cleanup()

    def _warn(self, reason: str | None) -> None:
        if reason is not None:
            self.app.display_warning(f"attnkit: without its compiled CPU kernels: {reason}")


def main(*arguments: str) -> int:
    """Bring this machine's library up to date; nothing happens where it is. `--levels` names those that it has."""
    if arguments == ("--levels",):
        print(*(name for name, (number, _) in levels().items() if number <= machine_level()))
        return 0
    if is_current(DETECTOR):
        try:
            current = all(is_current(name) for name in targets(machine_level()))
        except FAILURES:
            current = False
        if current:
            return 0
    reason = rebuild()
    print(f"attnkit: no CPU kernels: {reason}" if reason else f"attnkit: CPU kernels compiled into {LIBRARIES}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
