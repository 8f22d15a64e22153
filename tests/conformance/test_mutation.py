"""Mutation testing, in a process of its own: its forks may not have the threads of other tests."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.referee
def test_mutants() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    cases = Path(__file__).with_name("mutation_cases.py")
    done = subprocess.run([*command, str(cases)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
