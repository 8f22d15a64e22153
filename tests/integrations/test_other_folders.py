"""timm and peft, each in a process of its own and in a folder that nothing else looks into: `make install` fills them.

timm needs torchvision, beside which transformers no longer imports where torch was built for CPUs alone, and
transformers imports peft wherever it is.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.peers
@pytest.mark.parametrize(("package", "cases"), [("timm", 10), ("peft", 5)])
def test_cases(package: str, cases: int) -> None:
    folder = Path(sys.prefix) / package
    if not folder.exists():
        pytest.skip(f"{package} is not in {folder}: `make install` puts it there")
    file = Path(__file__).with_name(f"{package}_cases.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(file)]
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"{cases} passed" in done.stdout
