"""Jobs of several processes, forked: `forked(MODULE, (size, words), ...)` calls MODULE.process(*words) in `size`
processes, one job after the other.

All come from one process of the session, which imports once what trainings need: `python -m tests.experiments.forks`
reads lines [MODULE, jobs, the file for what they say], and answers each with the status that the jobs end with.
"""

import atexit
import functools
import importlib
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

PATIENCE = 300  # seconds after which a job that hangs is ended
# What trainings import as they go: a process that has it gives it to all that it forks.
IMPORTED = (
    *("pytest", "attnkit_experiments.commands.runner"),
    *("torch._inductor.config", "torch.distributed.checkpoint", "torch.distributed.fsdp", "attnkit.backends.torch"),
    *("rich.progress", "sacrebleu", "sacremoses", "sklearn.datasets", "tokenizers", "tests.experiments.doubles"),
)


def environment() -> dict[str, str]:
    """Of a subprocess, which finds the same packages."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(str(root / part) for part in ("", "reference", "conformance", "experiments"))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


@functools.cache
def server() -> subprocess.Popen[bytes]:
    """The process that forks, which ends with this one."""
    words, pipe = [sys.executable, "-m", "tests.experiments.forks"], subprocess.PIPE
    process = subprocess.Popen(words, env=environment(), stdin=pipe, stdout=pipe, start_new_session=True)
    atexit.register(end, process)
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    """It, and whatever it forked."""
    with process:
        os.killpg(process.pid, signal.SIGKILL)


def forked(module: str, *jobs: tuple[int, tuple[str, ...]]) -> None:
    """Call `process(*words)` of a test module in `size` processes, for each (size, words)."""
    process = server()
    with tempfile.NamedTemporaryFile() as said:
        process.stdin.write(json.dumps([module, jobs, said.name]).encode() + b"\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], PATIENCE)[0]:
            atexit.unregister(end)
            end(process)
            server.cache_clear()
            raise TimeoutError(f"{module}: {jobs} took more than {PATIENCE} s: {said.read().decode()}")
        status = process.stdout.readline()
        assert status == b"0\n", said.read().decode()


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


def run_all(module: str, jobs: list[tuple[int, list[str]]], said: str) -> None:
    """Run jobs of which all that they say goes to a file."""
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND), stream.fileno())
    for size, words in jobs:
        run(size, module, words)


def main() -> None:
    share_imports()
    for line in sys.stdin:
        module, jobs, said = json.loads(line)
        process = multiprocessing.get_context("fork").Process(target=run_all, args=(module, jobs, said))
        process.start()
        process.join()
        print(process.exitcode, flush=True)


if __name__ == "__main__":
    main()
