"""swap on models of timm, in a process of its own.

timm needs torchvision, beside which transformers no longer imports where torch was built for CPUs alone. So both are in
a folder that nothing else looks into, where `make install` puts them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(sys.prefix) / "timm"


@pytest.mark.peers
@pytest.mark.skipif(not FOLDER.exists(), reason=f"timm is not in {FOLDER}: `make install` puts it there")
def test_models_of_timm() -> None:
    cases = Path(__file__).with_name("timm_cases.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(cases)]
    paths = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "10 passed" in done.stdout
