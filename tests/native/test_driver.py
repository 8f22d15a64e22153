"""The library without Python: a program that loads it and compares outputs and gradients with formulas written out."""

import subprocess
from pathlib import Path

import pytest

import attnkit
from attnkit.backends.native import build

PROGRAM = Path(__file__).parent / "driver.cpp"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    try:
        compiler = build.compiler()
    except LookupError as error:
        pytest.skip(str(error))
    program = tmp_path_factory.mktemp("driver") / "driver"
    command = [*compiler, "-std=c++17", "-O2", f"-I{build.SOURCES}", str(PROGRAM), "-o", str(program), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return program


def complaints(driver: Path, *arguments: str) -> str:
    level = attnkit.native_status().level
    done = subprocess.run(
        [driver, build.library(level), *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_outputs_and_gradients_are_those_of_the_formulas(library, driver):
    assert complaints(driver) == ""


def test_the_program_would_notice_a_key_too_many(library, driver):
    assert "causal 1" in complaints(driver, "fault")
