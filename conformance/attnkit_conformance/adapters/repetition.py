"""A call repeated in the adapter's process: between calls with other values, many times, and beside busy threads."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import numpy as np

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.adapters.calls import Call, Fault, Former, poison
from attnkit_conformance.adapters.wire import Question, pack

ROUND = 16  # calls, after which there is one with the other values
BUSY = 6  # of so many rounds one is beside busy threads
THREADS = 2
SWITCH = 1e-4  # seconds after which busy threads give way
SIDE = 128  # of the matrices that they multiply

Arrays = Mapping[str, np.ndarray]


def repeat_call(adapter: Adapter, question: Question, faults: list[Fault]) -> dict[str, object]:
    """The results of a call, of one with other values, and of the repeat that is farthest from the first; how many
    calls there were and which was the first to differ in a bit, 0 if none did.
    """
    again = question.again
    assert again is not None
    one, other = Call(adapter, question, question.arrays, question.others), Call(adapter, question, *again[:2])
    first, raw = one.run()
    results = {"first": copy_results(first), "other": copy_results(other.run()[0])}
    kept = Former(adapter, question.method, raw, results["first"])
    sizes, farthest, differs, calls = [x.nbytes for x in first.values()], 0.0, 0, 2
    worked, ended = time.thread_time() + again.seconds, time.monotonic() + again.longest

    def enough() -> bool:
        late = calls >= again.least and time.thread_time() > worked
        return late or calls >= again.most or time.monotonic() > ended

    for n in itertools.count():
        poison(sizes)
        with busy_threads() if n % BUSY == BUSY - 1 else nullcontext():
            for _ in range(ROUND):
                got, _ = one.run()
                calls += 1
                if difference := distance_of(got, results["first"]):
                    differs = differs or calls
                    if difference > farthest:
                        results["farthest"], farthest = copy_results(got), difference
                if enough():
                    break
        other.run()  # the last call too: what it overwrites are results with other values
        calls += 1
        if enough():
            break
    faults += [*one.changes(), *other.changes(), *kept.changes()]
    return {"calls": calls, "differs": differs, "results": {name: pack(arrays) for name, arrays in results.items()}}


def copy_results(arrays: Arrays) -> dict[str, np.ndarray]:
    """Results in memory of their own."""
    return {name: x.copy() for name, x in arrays.items()}


def distance_of(got: Arrays, first: Arrays) -> float:
    """How far results are from the first ones: 0 if no bit differs, infinite if they have other names or shapes, or NaN
    elsewhere."""
    if got.keys() != first.keys():
        return np.inf
    return max((distance(x, first[name]) for name, x in got.items()), default=0.0)


def distance(x: np.ndarray, y: np.ndarray) -> float:
    """The same for an array; a difference in bits alone is the smallest number there is."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return np.inf
    if x.tobytes() == y.tobytes():
        return 0.0
    wide, expected = x.astype(np.float64), y.astype(np.float64)
    with np.errstate(all="ignore"):
        off = np.abs(wide - expected)
    off[(wide == expected) | (np.isnan(wide) & np.isnan(expected))] = 0.0
    return float(max(np.nan_to_num(off, nan=np.inf).max(initial=0.0), 5e-324))


@contextmanager
def busy_threads() -> Iterator[None]:
    """Threads that multiply matrices and fill memory."""
    done, before = threading.Event(), sys.getswitchinterval()
    x = np.ones((SIDE, SIDE), np.float32)

    def work() -> None:
        while not done.is_set():
            np.full(x.shape, np.nan, np.float32)[...] = x @ x

    threads = [threading.Thread(target=work, daemon=True) for _ in range(THREADS)]
    sys.setswitchinterval(SWITCH)
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
