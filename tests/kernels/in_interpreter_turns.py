"""Programs that take turns to add to the gradients of queries, in any order in which a GPU may run them. Run by
test_triton_interpreted.py with TRITON_INTERPRET=1.

The interpreter runs one program after the other: what each waits for, adds to and says is recorded, and then repeated
at random, a few programs at once, started in order.
"""

import random
from collections import defaultdict
from typing import Any, NamedTuple

import pytest
import torch
import triton.language as tl

import attnkit
from attnkit.backends.torch.triton import pointwise
from attnkit.kernels.triton import pointwise as kernels
from attnkit.kernels.triton import sizes

from .in_interpreter import agree, draw


class Event(NamedTuple):
    """A program waits until the number at a place is as large, adds to the rows there, or stores the number."""

    kind: str
    at: object
    number: int = 0


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Event]]:
    """What the programs of the next call do, in small blocks."""
    found: dict[int, list[Event]] = defaultdict(list)
    added = kernels.add_rows

    def note(*event: Any) -> None:
        found[int(tl.program_id(0))].append(Event(*event))

    def wait_for_turn(turn: Any, done: Any) -> None:
        note("wait", int(turn[1]), int(done) * int(turn[2]))

    def end_turn(turn: Any, done: Any) -> None:
        note("end", int(turn[0]), int(done))

    def add_rows(view: Any, item: Any, head: Any, first: Any, *rest: Any) -> None:
        note("add", (int(item), int(head), int(first)))
        added(view, item, head, first, *rest)

    for replacement in (wait_for_turn, end_turn, add_rows):
        monkeypatch.setattr(kernels, replacement.__name__, replacement)
    monkeypatch.setattr(sizes, "pointwise", lambda *of: sizes.Tile(16, 16, 4, 1))
    return found


def additions(events: dict[int, list[Event]], at_once: int, seed: int) -> dict[object, list[int]]:
    """The programs that add to each block of rows, in the order in which they do."""
    choice = random.Random(seed)
    left = {program: list(reversed(events[program])) for program in sorted(events)}
    numbers: dict[object, int] = defaultdict(int)
    found: dict[object, list[int]] = defaultdict(list)
    while left:
        running = list(left)[:at_once]
        able = [n for n in running if left[n][-1].kind != "wait" or numbers[left[n][-1].at] >= left[n][-1].number]
        assert able, f"programs {running} wait for one another"
        program = choice.choice(able)
        kind, at, number = left[program].pop()
        if kind == "end":
            numbers[at] = number
        elif kind == "add":
            found[at].append(program)
        if not left[program]:
            del left[program]
    return found


CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "windows": {"window": (20, 3)},
    "heads that share keys": {"causal": True, "enable_gqa": True},
    "lengths": {"causal": True, "key_lengths": torch.tensor([[40, 0], [70, 9]])},
    "masks": {"mask": draw(5, 2, 2, 60, 70) > 0.5, "query_mask": draw(6, 2, 2, 60) > 0.0},
}


def pull(**options: Any) -> dict[str, torch.Tensor]:
    heads = 4 if "enable_gqa" in options else 2
    q, k, v, do = draw(1, 2, heads, 60, 8), draw(2, 2, 2, 70, 8), draw(3, 2, 2, 70, 8), draw(4, 2, heads, 60, 8)
    found = pointwise.pull(q, k, v, do, ordered=True, **options)
    for name, grad in attnkit.pointwise_attention_vjp(q, k, v, do, impl="generic", **options).items():
        agree(found[name], grad)
    return found


@pytest.mark.parametrize("options", CALLS.values(), ids=list(CALLS))
def test_every_order_of_programs_adds_in_one_order(options: dict[str, Any], events: dict[int, list[Event]]) -> None:
    pull(**options)
    blocks = additions(events, 1, 0)
    assert max(len(programs) for programs in blocks.values()) > 2
    for seed in range(20):
        for rows, programs in additions(events, 2 + seed, seed).items():
            assert programs == blocks[rows] == sorted(programs)


def test_programs_that_do_not_wait_add_in_many_orders(events: dict[int, list[Event]]) -> None:
    """What the test above would see."""
    pull(causal=True)
    hasty = {program: [x for x in own if x.kind != "wait"] for program, own in events.items()}
    assert any(programs != sorted(programs) for programs in additions(hasty, 8, 0).values())
    silent = {program: [x for x in own if x.kind != "end"] for program, own in events.items()}
    with pytest.raises(AssertionError, match="wait for one another"):
        additions(silent, 8, 0)
