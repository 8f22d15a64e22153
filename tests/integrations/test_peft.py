"""Adapters of peft, in a process of its own: transformers would import peft in every other where it is there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(sys.prefix) / "peft"


@pytest.mark.peers
@pytest.mark.skipif(not FOLDER.exists(), reason=f"peft is not in {FOLDER}: `make install` puts it there")
def test_adapters() -> None:
    cases = Path(__file__).with_name("peft_cases.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(cases)]
    paths = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(FOLDER)])
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "5 passed" in done.stdout
