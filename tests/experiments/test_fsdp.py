"""FSDP2 with a policy of mixed precision: what is gathered and what is summed, and where that is refused."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.optim import TrainConfig
from attnkit_experiments.engine.world import World, blocks_of, joined

from .conftest import TINY as IMAGES
from .forks import forked
from .smallest import first_run
from .test_activation_checkpointing import SOFT

CPU = torch.device("cpu")
STUDIES = {
    "000-fig1": (*IMAGES, "points=d64/4"),
    "002-table1": (*SOFT, "methods=soft", "full_scale=false", "measured_batch=0"),
}
POLICIES = [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")]


class Sums(TorchDispatchMode):
    """The dtypes of gradients that are summed over processes and scattered."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "reduce_scatter" in str(function):
            self.dtypes.add(str(args[0].dtype))
        return function(*args, **(kwargs or {}))


def process(out: str) -> None:
    """Write what each policy gathers and sums in the blocks of a step, and its loss."""
    with joined(CPU, "fsdp") as world:
        found = [
            (recipe, policy, observed(recipe, policy, Path(out) / str(world.rank), world))
            for recipe in STUDIES
            for policy in POLICIES
        ]
    (Path(out) / f"{world.rank}.json").write_text(json.dumps(found))


def observed(recipe: str, policy: tuple[str, str], out: Path, world: World) -> dict[str, object]:
    parameters, gradients = policy
    chosen = f"fsdp_parameters={parameters}", f"fsdp_gradients={gradients}"
    settings = (*STUDIES[recipe], "precision=bfloat16", *chosen)
    run = first_run(recipe, "digits", out, *settings, world=world)
    weights: set[str] = set()
    attention = blocks_of(run.task.model)[0].attention
    attention.register_forward_hook(lambda module, *_: weights.update(str(p.dtype) for p in module.parameters()))

    with Sums() as sums:
        losses = [run.step(step).loss.item() for step in range(2)]
    kept = {str(x.dtype) for p in run.task.model.parameters() for x in (p, p.grad) if x is not None}
    return {"weights": sorted(weights), "sums": sorted(sums.dtypes), "kept": sorted(kept), "losses": losses}


@pytest.mark.survival
def test_policies_gather_and_sum_in_their_dtypes_and_keep_float32(tmp_path):
    forked(__name__, (2, (str(tmp_path),)))
    found, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert found == other
    for recipe, (parameters, gradients), seen in found:
        assert seen["weights"] == [f"torch.{parameters}"]
        assert f"torch.{gradients}" in seen["sums"]
        # batch normalisation is never sharded in less than the precision of its statistics
        assert seen["sums"] == sorted({f"torch.{gradients}", *(["torch.float32"] if recipe == "002-table1" else [])})
        assert seen["kept"] == ["torch.float32"]
        plain = found[0 if recipe == "000-fig1" else len(POLICIES)][2]["losses"]
        assert seen["losses"] == pytest.approx(plain, rel=0.02)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_a_policy_without_parts_is_refused(sharding, tiny, tmp_path):
    with pytest.raises(UserError, match=f"need --sharding fsdp on several processes, got --sharding {sharding} on 1"):
        tiny(tmp_path / "out", "fsdp_gradients=bfloat16", sharding=sharding)


def test_weights_are_not_gathered_in_less_than_the_precision():
    with pytest.raises(ValueError, match="fsdp_parameters=bfloat16 needs the same precision, got precision=float32"):
        TrainConfig(steps=1, fsdp_parameters="bfloat16")
