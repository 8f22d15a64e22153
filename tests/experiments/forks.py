"""Processes of one job, forked: `python -m tests.experiments.forks MODULE SIZE …` calls MODULE.process(…) in each."""

import importlib
import multiprocessing
import os
import socket
import sys


def ranked(rank: int, size: int, port: int, module: str, words: list[str]) -> None:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()})
    importlib.import_module(module).process(*words)


def main(module: str, size: int, words: list[str]) -> None:
    importlib.import_module(module)  # once for all
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


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
