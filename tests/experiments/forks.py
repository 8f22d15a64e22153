"""Jobs of several processes, forked: for each [size, words] of JOBS, `python -m tests.experiments.forks MODULE JOBS`
calls MODULE.process(*words) in `size` processes, one job after the other.
"""

import importlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
from pathlib import Path

PATIENCE = 300  # seconds after which a job that hangs is ended
# What trainings import as they go: a process that has it gives it to all that it forks.
IMPORTED = (
    *("torch._inductor.config", "torch.distributed.checkpoint", "torch.distributed.fsdp", "attnkit.backends.torch"),
    *("rich.progress", "sacrebleu", "sacremoses", "sklearn.datasets", "tokenizers"),
)


def environment() -> dict[str, str]:
    """Of a subprocess, which finds the same packages."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(str(root / part) for part in ("", "reference", "conformance", "experiments"))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def forked(module: str, *jobs: tuple[int, tuple[str, ...]]) -> None:
    """Call `process(*words)` of a test module in `size` processes, for each (size, words)."""
    words = [sys.executable, "-m", "tests.experiments.forks", module, json.dumps(jobs)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr


def ranked(rank: int, size: int, port: int, module: str, words: list[str]) -> None:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()})
    importlib.import_module(module).process(*words)


def run(size: int, module: str, words: list[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=ranked, args=(rank, size, port, module, words)) for rank in range(size)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert not any(each.exitcode for each in ranks)


def share_imports() -> None:
    for name in IMPORTED:
        importlib.import_module(name)


def main(module: str, jobs: str) -> None:
    importlib.import_module(module)
    share_imports()
    for size, words in json.loads(jobs):
        run(size, module, words)


if __name__ == "__main__":
    main(*sys.argv[1:])
