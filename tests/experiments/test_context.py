"""Sequences cut over processes while a model is trained: equal to one process within rounding, and refused by name."""

import json
import threading
from contextlib import nullcontext
from itertools import chain
from pathlib import Path

import pytest
import torch

from attnkit_experiments.commands import runner
from attnkit_experiments.data.text.bytes import load_text
from attnkit_experiments.engine.world import Context, World
from attnkit_experiments.language import task as language
from attnkit_experiments.language.domain import require_parts
from attnkit_experiments.language.model import LanguageConfig
from attnkit_experiments.language.task import LanguageTask
from attnkit_experiments.report.results import read_study
from tests.library.arrays import assert_close

from .doubles import in_float64
from .forks import forked
from .stopping import stopped_after
from .test_language import MODEL
from .test_processes import assert_equal_runs

CPU = torch.device("cpu")
CELLS = {
    "000-causal": ("softmax-seed0", "relu-alpha0.5-seed0"),
    "000-masked": ("softmax-seed0", "relu-alpha0.5-seed0"),
    "003-copying": ("linear-seed0", "efficient-seed0"),
}


def request(out, recipe, *settings, **options):
    """Windows of 16 bytes, six in a step and seven to judge by."""
    own = ("methods=linear,efficient",) if recipe == "003-copying" else ("alphas=0.5",)
    few = ("length=16", "tokens=96", "steps=4", "tested=7", "evaluate_every=2", "checkpoint_every=2", "warmup=1")
    data = "generated" if recipe == "003-copying" else "pydoc"
    given = {"recipe": recipe, "preset": "cpu", "data": data, "device": "cpu", "threads": 1, "out": str(out)}
    return given | {"settings": (*few, *own, *settings)} | options


def study(given):
    """Run a study as one of several processes, or alone."""
    given |= {"out": Path(given["out"]), "settings": tuple(given["settings"]), "seeds": (0,)}
    with in_float64():
        return runner.run(runner.Request(**given))


def process(words):
    given = json.loads(words)
    with stopped_after(given.pop("stop")) if "stop" in given else nullcontext():
        study(given)


JOBS = {
    4: [("000-causal", ("context=4",), "ddp"), ("000-causal", ("context=4", "accumulate=2"), "fsdp")],
    8: [
        ("000-causal", ("context=4",), "ddp"),
        ("000-masked", ("context=4", "activation_checkpointing=true"), "fsdp"),
        ("003-copying", ("context=2",), "fsdp"),
    ],
}


@pytest.mark.survival
@pytest.mark.parametrize("size", JOBS)
def test_parts_of_windows_on_several_processes_equal_wholes_on_one(size, tmp_path):
    """Four and eight processes: eight with a context of four are a mesh of two rows."""
    jobs = [(job, tmp_path / f"{number}") for number, job in enumerate(JOBS[size])]
    asked = [request(out, recipe, *settings, sharding=sharding) for (recipe, settings, sharding), out in jobs]
    forked(__name__, *((size, (json.dumps(each),)) for each in asked))
    for (recipe, _, _), out in jobs:
        assert not read_study(out).uninspected
        one = tmp_path / recipe
        if not one.exists():
            study(request(one, recipe))
        for cell in CELLS[recipe]:
            assert_equal_runs(out, one, Path("cells", cell))


@pytest.mark.survival
def test_a_run_with_a_context_goes_on_on_another_number_of_processes(tmp_path):
    """Stopped by two processes, of which each has half of every window, and resumed by four in two rows, sharded."""
    one = study(request(tmp_path / "one", "000-causal"))
    asked = request(tmp_path / "out", "000-causal", "context=2")
    forked(__name__, (2, (json.dumps(asked | {"stop": 2}),)))
    forked(__name__, (4, (json.dumps(asked | {"sharding": "fsdp", "resume": True}),)))
    for cell in CELLS["000-causal"]:
        assert_equal_runs(tmp_path / "out", one, Path("cells", cell))


class Together:
    """Calls of attention in two threads, answered together: each gives half of the tokens and gets half of the output.

    It stands for `parallelize`, which has tests of its own.
    """

    def __init__(self):
        self.barrier, self.given = threading.Barrier(2), [None, None]

    def parallelize(self, model, rank, lengths):
        assert lengths == [6, 6]
        for layer in model.modules():
            if hasattr(layer, "attend"):
                layer.attend = lambda *x, op=layer.op, **options: self.attend(op, rank, x, options)

    def exchanged(self, rank, mine):
        self.given[rank] = mine
        self.barrier.wait()
        both = [*self.given]
        self.barrier.wait()
        return both

    def attend(self, op, rank, x, options):
        whole = [torch.cat(parts, -2) for parts in zip(*self.exchanged(rank, x), strict=True)]
        return op(*whole, **options)[..., rank * 6 : rank * 6 + 6, :]

    def world(self, rank):
        """A world of the two, for evaluations."""
        world = World(rank, 2, context=Context(rank, 2, rank))
        object.__setattr__(world, "gathered", lambda results: [*chain(*self.exchanged(rank, results))])
        return world

    def call(self, function):
        """The results of a function in both threads."""
        results = [None, None]

        def run(rank):
            results[rank] = function(rank)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return results


@pytest.mark.parametrize("kind", ["next", "masked", "copying"])
def test_halves_add_up_to_loss_gradients_and_scores(kind, monkeypatch):
    config = LanguageConfig("d64", 12, causal=kind != "masked")
    data = load_text("pydoc", "")
    how = {"kind": kind, "batch": 3, "tested": 3, "precision": "float32", "seed": 0, "device": CPU}
    with in_float64():
        whole, *halves = (LanguageTask(data, config, **how) for _ in range(3))
    together = Together()
    monkeypatch.setattr(language, "parallelize", together.parallelize)
    for rank, half in enumerate(halves):
        half.divide(Context(rank, 2, rank))
    for task in (whole, *halves):
        torch.nn.init.normal_(task.model.head.weight, generator=torch.Generator().manual_seed(0))
    ids = whole.sample_ids(1)
    loss = whole.loss(ids, 1, slice(1, 3))
    losses = together.call(lambda rank: halves[rank].loss(ids, 1, slice(1, 3)))
    assert_close(sum(losses), loss, MODEL)
    loss.backward()
    sum(losses).backward()
    for name, x in whole.model.named_parameters():
        parts = [half.model.get_parameter(name).grad for half in halves]
        assert_close(sum(parts), x.grad, 2 * MODEL)
    expected = whole.evaluate()
    assert ("last_quarter" in expected) == (kind == "next")
    for found in together.call(lambda rank: halves[rank].evaluate(together.world(rank))):
        assert found == pytest.approx(expected, rel=1e-12)


def test_processes_of_a_context_have_the_same_samples():
    worlds = [
        World(rank, 8, sharding, context=Context(rank % 4, 4)) for rank in range(8) for sharding in ("ddp", "fsdp")
    ]
    for samples in (1, 5):
        for world in worlds:
            other = World(world.rank // 4, 2, world.sharding)
            assert world.parts(samples, 2) == other.parts(samples, 2)
            assert world.own(range(samples)) == other.own(range(samples))


@pytest.mark.parametrize(
    ("context", "said"),
    [
        (4, "context=4 needs a number of processes that is a multiple of 4, got 1"),
        (0, "context must be at least 1, got 0"),
    ],
)
def test_a_number_of_processes_that_does_not_divide_leaves_no_study(context, said, tmp_path, refusal):
    out = tmp_path / "out"
    assert said in refusal("run", "000-causal", "--set", f"context={context}", "--data", "pydoc", "--out", str(out))
    assert not (out / "study.json").exists()


@pytest.mark.parametrize(
    ("op", "length", "compiled", "said"),
    [
        ("softmax", 18, False, "length must be a multiple of context, 4, got 18"),
        ("sparsemax", 16, False, "context=4: sparsemax_attention has no context parallelism; those that have: softmax"),
        ("softmax", 16, True, "context=4: a block in which processes exchange is no one graph; --set compile=false"),
    ],
)
def test_what_cannot_be_cut_is_said(op, length, compiled, said):
    with pytest.raises(ValueError, match=said):
        require_parts(LanguageConfig("d64", length, op=f"{op}_attention"), 4, compiled=compiled)
