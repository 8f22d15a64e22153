"""A run over processes holds no memory that it no longer needs."""

import mmap
import multiprocessing
import queue
from functools import partial
from typing import Any

import pytest

from attnkit_conformance import judge as judging
from attnkit_conformance.judge import judge, memory, processes
from attnkit_conformance.opdb import OPDB

ADAPTERS = {"first": "qk_layernorm", "second": "newton_inverse"}  # families and the ops that are judged on them


class Closing:
    """An adapter of no op, with what happened to it and others."""

    dtypes, ops = ("float32",), ()

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told
        told.append(f"{name} found")

    def close(self) -> None:
        self.told.append(f"{self.name} closed")


def ran(told: list[str], jobs: list[str]) -> tuple[list[Any], int]:
    """What a process sent that worked at jobs of these families, and how many it left."""
    waiting: queue.Queue[Any] = queue.Queue()
    verdicts, here = multiprocessing.Pipe(duplex=False)
    for name in jobs:
        waiting.put(((name,), ADAPTERS[name]))
    waiting.put(None)
    processes.work(lambda names: [Closing(names[0], told)], waiting, here, "quick", None, ("float32",))
    here.close()
    sent = []
    while True:
        try:
            sent.append(verdicts.recv())
        except EOFError:
            return sent, waiting.qsize()


def test_adapters_are_closed_before_those_of_other_families_are_created() -> None:
    told: list[str] = []
    ran(told, ["first", "first", "second"])
    assert told == ["first found", "first closed", "second found", "second closed"]


def test_a_process_that_has_grown_large_ends_after_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "resident", lambda: memory.LARGE + 1)
    told: list[str] = []
    sent, left = ran(told, ["first", "first"])
    assert isinstance(sent[-1], processes.Large)
    assert (left, told[-1]) == (2, "first closed")


def test_one_process_forgets_between_ops_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in this process ended by a segmentation fault after 32,500 verdicts on JAX."""
    forgotten: list[bool] = []
    monkeypatch.setattr(memory, "forget_compiled", lambda: forgotten.append(True))
    for size, count in ((0, 0), (memory.LARGE + 1, 2)):
        monkeypatch.setattr(memory, "resident", lambda size=size: size)
        assert not list(judge([Closing("first", [])], ops=tuple(ADAPTERS.values())))
        assert len(forgotten) == count


def test_one_process_forgets_within_an_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of JAX ended by a segmentation fault within an op of 3,000 cases: its table of memory was full."""
    forgotten: list[bool] = []
    monkeypatch.setattr(memory, "forget_compiled", lambda: forgotten.append(True))
    monkeypatch.setattr(judging, "judge_op", lambda *_: range(2 * judging.OFTEN + 1))
    for count, times in ((0, 0), (memory.MANY + 1, 3)):
        monkeypatch.setattr(memory, "pieces", lambda count=count: count)
        assert len([*judging.judge_lane([], "quick", lambda _: True, ("float32",), OPDB[:1])]) == 2 * judging.OFTEN + 1
        assert len(forgotten) == times


def test_pieces_of_memory_are_counted() -> None:
    before = memory.pieces()
    held = [mmap.mmap(-1, 4096, prot=prot) for prot in (mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE) * 50]
    assert memory.pieces() - before > len(held) / 2


def test_another_process_takes_the_place_of_a_large_one() -> None:
    def running(*sent: Any) -> processes.Running:
        verdicts, here = multiprocessing.Pipe(duplex=False)
        for item in sent:
            here.send(item)
        return processes.Running(multiprocessing.current_process(), verdicts)

    others = iter([running((("first",), "qk_layernorm"), None)])
    assert list(processes.collect([running(processes.Large())], partial(next, others))) == []
    assert next(others, None) is None


def test_memory_is_that_of_this_process() -> None:
    before, held = memory.resident(), b"1" * (64 << 20)
    assert memory.resident() - before > len(held) / 2
