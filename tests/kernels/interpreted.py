"""Triton kernels in Triton's interpreter, which is a mode of a whole process."""

import os
import subprocess
import sys
from pathlib import Path

from attnkit_conformance.adapters.worker import WorkerAdapter

MODE = {"TRITON_INTERPRET": "1"}
ROOT = Path(__file__).parents[2]
TRITON = "attnkit_conformance.adapters.triton_interpreted"
TARGETS = {
    "triton_interpreted": f"{TRITON}:Interpreted",
    "triton_interpreted-ordered": f"{TRITON}:Ordered",
    "triton_interpreted-split": f"{TRITON}:Split",
    "jax_triton_interpreted": "attnkit_conformance.adapters.jax_triton_interpreted:Interpreted",
}


def worker(target: str, name: str = "planted", **environment: str) -> WorkerAdapter:
    """An adapter in a process of its own."""
    return WorkerAdapter(name, target, MODE | environment)


def interpreted(*command: str) -> str:
    """What a module prints that is run in a process of its own."""
    command = (sys.executable, "-m", *command)
    done = subprocess.run(command, cwd=ROOT, env=os.environ | MODE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pass_interpreted(name: str, *options: str) -> None:
    """The tests of a module beside this one pass in a process of their own."""
    path = str(Path(__file__).with_name(f"{name}.py"))
    interpreted("pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *options, path)
