"""Compile the CPU kernels: as a build hook of hatchling, and as `python -m attnkit.backends.native.build`.

Nothing but the standard library and a C++ compiler is needed, and without a compiler installation succeeds: the library
is optional, and `attnkit.native_status()` says why it is not there. An installation holds a library for this machine's
level of the instruction set, a wheel that is given to others one for every level (ATTNKIT_CPU_LEVEL=all). A level that
the compiler cannot compile is left out, by name; then the next lower one of this machine is compiled.

Environment:
    CXX: the compiler, with options; default c++, g++ or clang++, the first that is found.
    ATTNKIT_CPU_LEVEL: compile this level only (a name of `levels()`), "all", "none", or "portable": none, in a wheel
        for machines that have no other.
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
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or "hatchling" in sys.modules:  # which calls the hook; programs that load the library need none
    from hatchling.builders.config import BuilderConfig
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    Interface = BuildHookInterface[BuilderConfig]
else:
    Interface = object

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
"""Beside the libraries: the digest of each, the fingerprint of what they were compiled from, and why levels failed."""
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
REBUILD = "run python -m attnkit.backends.native.build"
FORCED, ALL, NONE, PORTABLE = "ATTNKIT_CPU_LEVEL", "all", "none", "portable"
WITHOUT = "this wheel, which is for every machine, holds none"


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


def write_record(folder: Path, failed: dict[str, str] | None = None) -> None:
    """Record the libraries of a folder, just compiled from the sources as they are, and why other levels failed, with
    the digest of the compiler that did."""
    libraries = {file.name: digest(file) for file in sorted(folder.glob("*.so"))}
    record: dict[str, object] = {"sources": fingerprint(), "libraries": libraries}
    if failed:
        record |= {"failed": failed, "compiler": compiler_digest()}
    (folder / RECORD).write_text(json.dumps(record, indent=1))


def failures(folder: Path = LIBRARIES) -> dict[str, str]:
    """Why levels failed with the compiler that is there."""
    try:
        record = json.loads((folder / RECORD).read_text())
        return record["failed"] if record["compiler"] == compiler_digest() else {}
    except (OSError, ValueError, KeyError, LookupError):
        return {}


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


def compiler_digest() -> str:
    """Another one after the compiler was installed anew, or was given other options."""
    program, *options = compiler()
    return hashlib.sha256(Path(str(shutil.which(program))).read_bytes() + repr(options).encode()).hexdigest()[:32]


def say(text: str) -> None:
    """A line of progress, at once: `pip -v` shows it."""
    print(f"attnkit: {text}", file=sys.stderr, flush=True)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        error = next((line for line in lines if "error" in line), lines[-1])
        raise RuntimeError(f"{command[0]} failed: {error}")


def refuse_unwanted() -> None:
    """LookupError where no library is asked for, whether or not there is a compiler."""
    forced = os.environ.get(FORCED)
    if forced in (NONE, PORTABLE):
        raise LookupError(WITHOUT if forced == PORTABLE else f"{FORCED}={NONE}")


def attempts(machine: Callable[[], int]) -> list[list[str]]:
    """Names of the levels to compile: those of the first attempt that has a success. Where none is named, the number of
    this machine's is asked for.
    """
    known, forced = levels(), os.environ.get(FORCED)
    if forced == ALL:
        return [[*known]]
    if forced and forced not in known:
        raise LookupError(f"{FORCED}={forced} is none of {', '.join(known)}")
    if forced:
        return [[forced]]
    fitting = [name for name, (number, _) in known.items() if number <= machine()]
    return [[name] for name in sorted(fitting, key=lambda name: known[name][0], reverse=True)]


def includes(source: Path) -> set[Path]:
    """A source and the headers of attnkit that it includes, directly or through others."""
    reached, waiting = set[Path](), [source]
    while waiting:
        file = waiting.pop()
        if file.exists() and file not in reached:
            reached.add(file)
            waiting += (file.parent / name for name in INCLUDE.findall(file.read_text()))
    return reached


def reach(source: Path) -> int:
    """Bytes that a source includes, which say how long it takes to compile: the engine is a template."""
    return sum(file.stat().st_size for file in includes(source))


def compiled(source: Path, command: Sequence[str], objects: Path) -> Path:
    """The object of a source, named by its command and by what it includes: one that is there is taken."""
    content = hashlib.sha256(repr(command).encode())
    for file in sorted(includes(source)):
        content.update(file.read_bytes())
    output = objects / f"{source.stem}-{content.hexdigest()[:32]}.o"
    if not output.exists():
        _run([*command, "-c", str(source), "-o", str(output)])
    return output


def _compile(level: str, source: Path, command: Sequence[str], objects: Path) -> str:
    before = time.monotonic()
    output = compiled(source, command, objects)
    say(f"{level}: {source.name}, {time.monotonic() - before:.0f} s")
    return str(output)


def link(
    pool: ThreadPoolExecutor, targets: dict[str, tuple[str, ...]], sources: list[Path], folder: Path, objects: Path
) -> dict[str, str]:
    """Compile libraries with their own flags, all at once, and link each; the answer is why some failed, by name."""
    started, failed = {}, {}
    say(f"compiling {', '.join(targets)}: {len(targets) * len(sources)} files, {cores()} at once")
    for name, own in targets.items():
        command = [*compiler(), *FLAGS, *own]
        started[name] = command, [pool.submit(_compile, name, source, command, objects) for source in sources]
    for name, (command, jobs) in started.items():
        try:
            _run([*command, "-shared", *[job.result() for job in jobs], "-o", str(library(name, folder))])
        except FAILURES as error:
            for job in jobs:
                job.cancel()
            failed[name] = str(error)
            say(f"CPU kernels for {name} are left out: {error}")
    return failed


def compile_into(folder: Path, objects: Path) -> dict[str, str]:
    """Compile the detector and what `attempts` names; the answer is why some levels failed. RuntimeError: all did."""
    refuse_unwanted()
    detector = SOURCES / "detect.cpp"
    sources = [path for path in source_files() if path.suffix == ".cpp" and path != detector]
    sources.sort(key=reach, reverse=True)  # what takes long begins first, so that no core waits for one at the end
    with ThreadPoolExecutor(cores()) as pool:
        failed = link(pool, {DETECTOR: ()}, [detector], folder, objects)
        if failed:
            raise RuntimeError(failed[DETECTOR])
        known = levels()
        for names in attempts(lambda: machine_level(folder)):
            failed |= link(pool, {name: known[name][1] for name in names}, sources, folder, objects)
            if not failed.keys() >= {*names}:
                return failed
    raise RuntimeError("; ".join(f"{name}: {reason}" for name, reason in failed.items()))


def fill(folder: Path, objects: Path | None = None) -> str | None:
    """`compile_into` an empty folder, or leave there and answer with why it failed."""
    try:
        with tempfile.TemporaryDirectory() as passing:
            failed = compile_into(folder, objects or Path(passing))
        write_record(folder, failed)
    except FAILURES as error:
        for unfinished in folder.iterdir():
            unfinished.unlink()
        (folder / REASON).write_text(str(error))
        say(f"without its compiled CPU kernels: {error}")
        return str(error)
    return None


def rebuild(objects: Path | None = None) -> str | None:
    """Compile the library of this machine in its place; the answer is None, or why there is none now. A folder of
    objects is for who compiles often: what is there is not compiled again.

    Files are moved to their place when they are whole: another process may have the old ones open.
    """
    with tempfile.TemporaryDirectory(dir=HERE, prefix="lib-") as temporary:
        reason = fill(Path(temporary), objects)
        LIBRARIES.mkdir(exist_ok=True)
        for old in LIBRARIES.iterdir():
            old.unlink()
        for file in Path(temporary).iterdir():
            file.replace(LIBRARIES / file.name)
    return reason


def is_current(name: str) -> bool:
    """Whether the library of a level is there, as it was compiled from the sources as they are now."""
    return library(name).exists() and misfit(name) is None


def is_up_to_date() -> bool:
    """Whether compiling would change nothing: what failed is not tried again with the same compiler."""
    if not is_current(DETECTOR):
        return False
    failed = failures()
    try:
        for names in attempts(machine_level):
            if not all(is_current(name) or name in failed for name in names):
                return False
            if not failed.keys() >= {*names}:
                return True
    except FAILURES:
        pass
    return False


class Hook(Interface):
    """With libraries the wheel is this platform's, without them it is anybody's.

    What goes into a wheel is compiled beside the checkout, whose own library stays.
    """

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            rebuild()
            return
        self.folder = tempfile.TemporaryDirectory()
        folder = Path(self.folder.name)
        if fill(folder) is None:
            platform_name = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data |= {"pure_python": False, "tag": f"py3-none-{platform_name}"}
        for path in folder.iterdir():
            build_data["force_include"][str(path)] = (LIBRARIES / path.name).relative_to(HERE.parents[2]).as_posix()

    def finalize(self, version: str, build_data: dict[str, object], artifact_path: str) -> None:
        if version != "editable":
            self.folder.cleanup()


def main(*arguments: str) -> int:
    """Bring this machine's library up to date; nothing happens where it is. `--levels` names those that it has."""
    if arguments == ("--levels",):
        print(*(name for name, (number, _) in levels().items() if number <= machine_level()))
    elif not is_up_to_date():
        reason = rebuild()
        print(f"attnkit: no CPU kernels: {reason}" if reason else f"attnkit: CPU kernels compiled into {LIBRARIES}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
