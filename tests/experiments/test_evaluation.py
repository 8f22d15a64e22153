"""An evaluation shared by processes: the numbers of one process bit for bit, every batch computed once."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from attnkit_experiments.engine.world import World, blocks_of, joined
from attnkit_experiments.images import task as images
from attnkit_experiments.language import task as language
from tests.shared import made_once

from .conftest import TINY as IMAGES
from .forks import forked
from .smallest import first_run
from .test_activation_checkpointing import SOFT
from .test_table6 import TINY as SEQUENCES
from .translation_cases import TINY as TRANSLATION

SIZE, CPU = 3, torch.device("cpu")
STUDIES = {
    "000-fig1": ("digits", (*IMAGES, "points=d32/4", "fewshot=digits", "shots=1")),
    "000-causal": ("pydoc", ("tokens=64", "length=16", "tested=20")),
    "001-table4": ("pairs", (*TRANSLATION, "methods=reluformer", "tokens=64")),
    "002-table1": ("digits", (*SOFT, "methods=soft", "full_scale=false", "measured_batch=0")),
    "002-table6": ("generated", (*SEQUENCES, "methods=transformer")),
}


def process(recipe: str, corpus: str, out: str) -> None:
    """Write what a process finds in a study together with the others, and then alone."""
    images.EVALUATION_BATCH, language.EVALUATION_TOKENS = 2, 64
    with joined(CPU, "ddp") as world:
        found = evaluations(recipe, corpus, Path(out) / str(world.rank), world)
        order = {str(count): world.gathered([*world.own(range(count))]) for count in range(8)}
    (Path(out) / f"{world.rank}.json").write_text(json.dumps({"found": found, "order": order}))


def evaluations(recipe: str, corpus: str, out: Path, world: World) -> list[tuple[dict[str, float], int]]:
    """The evaluation after a step, and how often it called a block: shared, and of this process alone."""
    place, settings = STUDIES[recipe]
    place = str(Path(corpus) / place) if place == "pairs" else place
    run = first_run(recipe, place, out, *settings, world=world)
    run.step(0)
    calls: list[int] = []
    blocks_of(run.task.model)[-1].register_forward_hook(lambda *_: calls.append(1))
    shared = run.evaluate() | each_sample(run.outcomes), len(calls)
    run.task.model.eval()
    alone = run.task.evaluate() | each_sample(run.task.outcomes), len(calls) - shared[1]
    for values, _ in (shared, alone):
        values.pop("decode_seconds", None)
    return [shared, alone]


def each_sample(outcomes: dict[str, np.ndarray]) -> dict[str, list]:
    assert outcomes
    return {f"{name} of each sample": x.tolist() for name, x in outcomes.items()}


@pytest.fixture(scope="module")
def evaluated(corpus, tmp_path_factory):
    """What each process found of a study."""

    def of(recipe):
        out = made_once(
            tmp_path_factory,
            f"evaluated-{recipe}",
            lambda out: forked(__name__, (SIZE, (recipe, str(corpus), str(out)))),
        )
        return [json.loads((out / f"{rank}.json").read_text()) for rank in range(SIZE)]

    return of


def test_results_are_gathered_in_the_order_of_the_items(evaluated):
    for each in evaluated("000-fig1"):
        assert each["order"] == {str(count): [*range(count)] for count in range(8)}


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=() if name == "000-fig1" else pytest.mark.survival) for name in STUDIES]
)
def test_processes_find_together_what_each_finds_alone(recipe, evaluated):
    """With statistics of batch normalisation that were those of each process's samples."""
    shared, alone = zip(*(each["found"] for each in evaluated(recipe)), strict=True)
    assert all(each[0] == shared[0][0] for each in (*shared, *alone))
    assert sum(calls for _, calls in shared) == alone[0][1]
    assert max(calls for _, calls in shared) < alone[0][1]
    if recipe == "000-fig1":
        assert "fewshot_accuracy" in shared[0][0]
