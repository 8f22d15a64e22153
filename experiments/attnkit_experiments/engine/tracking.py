"""The rows of metrics.jsonl shown elsewhere too: in TensorBoard or Weights & Biases, where these are installed."""

from __future__ import annotations

import importlib
import secrets
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypedDict

from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import read_json, write_json
from attnkit_experiments.engine.schema import read_as

Tracking = Literal["tensorboard", "wandb"]
MODULES: dict[Tracking, str] = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


def installed(name: Tracking) -> ModuleType:
    """The module of a tracker; UserError if its package is not installed."""
    try:
        return importlib.import_module(MODULES[name])
    except ImportError as error:
        raise UserError(f"--track {name}: expected the package {name} to be installed, got: {error}") from None


OF_TRAINING = ("loss", "lr", "grad_norm", "samples")


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row of metrics by name, in the groups of both trackers: train/loss and what else a step has,
    perf/samples_per_s and what else `Speed` has, eval/NAME.
    """
    groups = {f"{'train' if key in OF_TRAINING else 'perf'}/{key}": value for key, value in row.items()}
    groups |= {f"eval/{name}": value for name, value in row.get("evaluation", {}).items()}
    return {name: value for name, value in groups.items() if isinstance(value, int | float) and name != "perf/step"}


class TensorBoard:
    """Event files in FOLDER/tensorboard; those of steps after `start`, of a run that was killed, are hidden."""

    def __init__(self, folder: Path, start: int) -> None:
        self._writer = installed("tensorboard").SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)

    def write(self, row: dict[str, Any]) -> None:
        for name, value in numbers(row).items():
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class Known(TypedDict):
    """What wandb.json says."""

    id: str


class WeightsAndBiases:
    """A run named after the cell, whose id is kept in FOLDER/wandb.json, so that a resumed training continues it.

    Where it goes is up to wandb's own variables, such as WANDB_PROJECT and WANDB_MODE.
    """

    def __init__(self, folder: Path, start: int) -> None:
        wandb, about = installed("wandb"), folder / "wandb.json"
        if not about.exists():
            write_json(about, {"id": secrets.token_hex(8)})
        config = read_json(folder / "config.json")
        try:
            self._run = wandb.init(
                name=folder.name, id=read_as(about, Known)["id"], resume="allow", dir=str(folder), config=config
            )
        except wandb.Error as error:
            raise UserError(f"--track wandb: {error}") from None
        # its own step only grows, but a resumed training begins before the last step that was shown
        self._run.define_metric("*", step_metric="step")

    def write(self, row: dict[str, Any]) -> None:
        self._run.log({"step": row["step"], **numbers(row)})

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[Tracking, type[TensorBoard] | type[WeightsAndBiases]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}
