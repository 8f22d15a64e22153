"""How many parts of a step fit into a device: from counted memory, and the same run whatever their number."""

import gc
import json

import pytest
import torch

from attnkit_experiments.engine import memory
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.memory import bytes_per_sample, parts_that_fit, peak_bytes
from attnkit_experiments.engine.train import Run
from attnkit_experiments.engine.world import World

from .conftest import TINY
from .doubles import in_float64
from .smallest import first_run
from .test_activation_checkpointing import SOFT

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("samples", "processes", "room", "parts"),
    [
        (4096, 8, 512, 1),  # a process's whole share
        (4096, 8, 511, 2),
        (4096, 8, 200, 4),  # three would do, but not be equal
        (4096, 1, 200, 32),  # 21
        (4096, 3, 200, 7),  # no number of parts for each of three processes divides 4096
        (5, 8, 3, 1),  # fewer samples than processes
        (7, 1, 1, 7),
    ],
)
def test_parts_fit_and_are_equal_where_they_can_be(samples, processes, room, parts):
    assert parts_that_fit(samples, processes, 10.0, 10.0 * room + 5) == parts
    worlds = [World(rank, processes) for rank in range(processes)]
    sizes = {part.stop - part.start for world in worlds for part in world.parts(samples, parts)}
    assert max(sizes) <= room
    assert len(sizes) == 1 or samples % processes


def test_where_not_even_a_sample_fits_an_error_says_what_it_needs():
    with pytest.raises(UserError, match=r"one sample needs 3.00 GB of 2.00 GB that weights leave"):
        parts_that_fit(64, 1, 3e9, 2e9)


def prepared(out, *settings: str, recipe: str = "000-fig4") -> Run:
    few = ("activations=relu", "alphas=1", *TINY) if recipe == "000-fig4" else ()
    return first_run(recipe, "digits", out, *few, *settings)


def leave_room(monkeypatch, parameters: int, room: int) -> None:
    """Pretend a device that has so many bytes beside weights, gradients and moments."""
    monkeypatch.setattr(memory, "of_device", lambda device: int((4 * parameters + room) / memory.SAFE))


@pytest.mark.parametrize("recomputed", ["false", "true"])
def test_a_sample_needs_what_a_batch_needs_by_sample(recomputed, tmp_path):
    """From batches of 8 and 16 the peak of 64 is told to a tenth."""
    run = prepared(tmp_path, "batch=64", "image_size=16", f"activation_checkpointing={recomputed}")
    ids = run.task.sample_ids(0)

    def passes(count):
        run.share(ids, 0, slice(0, count)).backward()

    each = bytes_per_sample(passes, 8, CPU)
    peaks = [peak_bytes(lambda count=count: passes(count), CPU) for count in (16, 64)]
    assert peaks[1] == pytest.approx(peaks[0] + 48 * each, rel=0.1)


def test_what_earlier_work_left_is_no_release_of_this_one():
    """Garbage of an earlier recording, collected within a later one, was taken off its peak."""

    def leave():
        circle = [torch.zeros(3000)]
        circle.append(circle)

    def work():
        held = torch.zeros(1000)
        gc.collect()  # wherever Python happens to
        return held + 1

    alone = peak_bytes(work, CPU)
    gc.disable()
    try:
        peak_bytes(leave, CPU)
        assert peak_bytes(work, CPU) == alone
    finally:
        gc.enable()


def test_a_cpu_has_one_part_and_a_small_device_more(tmp_path, monkeypatch):
    run = prepared(tmp_path, "accumulate=0")
    assert run.accumulate == 1
    leave_room(monkeypatch, sum(p.nbytes for p in run.task.model.parameters()), 200_000)
    found = [
        prepared(tmp_path, "accumulate=0", f"activation_checkpointing={each}").accumulate for each in (False, True)
    ]
    assert found[0] > found[1] > 1
    assert 12 % found[0] == 0
    leave_room(monkeypatch, sum(p.nbytes for p in run.task.model.parameters()), 10_000)
    with pytest.raises(UserError, match="one sample needs"):
        prepared(tmp_path, "accumulate=0")
    with pytest.raises(UserError, match="how this task is split changes its loss"):
        prepared(tmp_path, *SOFT, "full_scale=false", "methods=soft", "accumulate=0", recipe="002-table1")


def test_a_run_that_goes_on_with_other_memory_is_the_same_up_to_rounding(tmp_path, monkeypatch):
    with in_float64():
        whole, parts = prepared(tmp_path, "accumulate=0"), []
        for room in (400_000, 800_000):
            leave_room(monkeypatch, sum(p.nbytes for p in whole.task.model.parameters()), room)
            parts.append(prepared(tmp_path, "accumulate=0"))
        before, after = parts
        assert whole.accumulate == 1 < after.accumulate < before.accumulate
        wanted = [float(whole.step(step).loss) for step in range(4)]
        found = [float(before.step(step).loss) for step in range(2)]
        after.task.model.load_state_dict(before.task.model.state_dict())
        after.optimizer.load_state_dict(before.optimizer.state_dict())
        found += [float(after.step(step).loss) for step in (2, 3)]
    assert found == pytest.approx(wanted, rel=1e-6), "a loss is float32 even here"
    assert found != wanted


def test_a_result_says_how_many_parts_there_were_where_it_was_left_open(tiny, tmp_path):
    out = tiny(tmp_path, "accumulate=0", "points=d64/8", recipe="000-fig1")
    for folder in (out / "cells").iterdir():
        assert json.loads((folder / "result.json").read_text())["accumulate"] == 1
