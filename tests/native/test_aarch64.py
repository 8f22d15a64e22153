"""The library for 64-bit Arm: compiled by a cross compiler, its answers held to formulas by an emulator."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from attnkit.backends.native import build

from .test_driver import PROGRAM

pytestmark = pytest.mark.emulated
COMPILER, EMULATOR, SYSTEM = "aarch64-linux-gnu-g++", "qemu-aarch64-static", "/usr/aarch64-linux-gnu"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    """A folder with the library and the program that calls it."""
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    folder = tmp_path_factory.mktemp("aarch64")
    flags = [COMPILER, *build.FLAGS, "-Werror", '-DATTNKIT_SOURCES="none"']

    def object_of(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        subprocess.run([*flags, "-c", str(source), "-o", str(target)], check=True)
        return target

    sources = [path for path in build.source_files() if path.suffix == ".cpp" and path.stem != build.DETECTOR]
    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(object_of, sources))
    subprocess.run([*flags, "-shared", *map(str, objects), "-o", str(folder / "attnkit.so")], check=True)
    options = ["-std=c++17", "-O2", f"-I{build.SOURCES}", str(PROGRAM), "-o", str(folder / "driver"), "-ldl"]
    subprocess.run([COMPILER, *options], check=True)
    return folder


def complaints(folder: Path, *arguments: str) -> str:
    command = [EMULATOR, "-L", SYSTEM, str(folder / "driver"), str(folder / "attnkit.so"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_outputs_and_gradients_are_those_of_the_formulas(compiled):
    assert complaints(compiled) == ""


def test_the_program_would_notice_a_key_too_many(compiled):
    assert "causal 1" in complaints(compiled, "fault")
