"""The way into attnkit of somebody who has torch: a wheel is built and installed, and five lines run from anywhere."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from attnkit.backends.native import build

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.emulated  # compiles for a minute of a core

FIVE_LINES = """
import torch
from attnkit.integrations.torch import swap
block = torch.nn.TransformerEncoderLayer(384, 6, 1536, batch_first=True, norm_first=True).eval()
vit = torch.nn.Sequential(block)
swap(vit, "relu")
"""

MEASURED = """
import json, statistics, sys, time
import attnkit

torch.set_num_threads(1)
x, (q, k, v) = torch.randn(2, 196, 384), torch.randn(3, 2, 6, 1024, 64)
assert attnkit.__file__.startswith(sys.prefix), attnkit.__file__

def formula():
    return torch.relu(q @ k.mT / 8) / 1024 @ v

def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start

with torch.no_grad(), attnkit.implementations() as ran:
    vit(x)
calls = {"block": lambda: vit(x), "formula": formula, "attnkit": lambda: attnkit.pointwise_attention(q, k, v)}
with torch.no_grad():
    torch.testing.assert_close(calls["attnkit"](), formula())
    rounds = [{name: seconds(call) for name, call in calls.items()} for _ in range(15)]
found = {name: statistics.median(times[name] for times in rounds) for name in calls}
print(json.dumps({"level": attnkit.native_status().level, "ran": sorted(ran["pointwise_attention"]), **found}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, float]:
    """The Python of an environment that sees the libraries of this one and has attnkit; what pip said, and seconds."""
    folder = tmp_path_factory.mktemp("way-in")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    site = next(folder.glob("venv/lib/python*/site-packages"))
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    environment = {name: x for name, x in os.environ.items() if name not in ("PYTHONPATH", build.FORCED)}
    start = time.monotonic()
    command = [*pip, "install", "-v", "--no-deps", "--no-index", "--no-build-isolation", str(ROOT)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return python, done.stdout + done.stderr, time.monotonic() - start


def test_an_installation_compiles_one_level_and_shows_how_far_it_is(installed):
    python, said, seconds = installed
    folder = next(python.parents[1].glob("lib/python*/site-packages/attnkit/backends/native/lib"))
    libraries = {path.stem.removeprefix("attnkit-") for path in folder.glob("*.so")} - {build.DETECTOR}
    assert len(libraries) == 1
    assert len(re.findall(rf"attnkit: {libraries.pop()}: \w+\.cpp, \d+ s", said)) > 10
    print(f"installed in {seconds:.0f} s")


def test_five_lines_swap_a_block_and_the_call_takes_less_time_than_the_formula(installed, tmp_path):
    environment = {name: x for name, x in os.environ.items() if not name.startswith(("PYTHON", "ATTNKIT"))}
    command = [str(installed[0]), "-W", "error::RuntimeWarning", "-c", FIVE_LINES + MEASURED]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["level"] is not None
    assert found["ran"] == ["native"]
    assert found["attnkit"] < found["formula"]
    print(found)
