"""Checkpoints without pickles: a safetensors file (tensors and a JSON header), then a JSON file, which seals it.

A checkpoint is written to a temporary file and renamed; its seal, written after it, has its SHA-256. A process killed
at any moment leaves the previous checkpoint sealed. The last two at least are kept: where the newest is damaged, the
run continues from the one before it, and says so. One of another configuration is refused with its name and the reason;
nothing is ever unpickled.

The file contains whole tensors, independent of the number of processes and the sharding, so a run can continue with
another number of processes. Gathering them is affordable: the largest model of the recipes, with the two moments of
AdamW, is under 4 GB.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import read_json, sha256, write_json, written_aside
from attnkit_experiments.engine.progress import say
from attnkit_experiments.engine.world import World

FORMAT = "attnkit-experiments-checkpoint-1"
WHOLE = StateDictOptions(full_state_dict=True)
WRITTEN = StateDictOptions(full_state_dict=True, cpu_offload=True)
"""Whole tensors in the main process alone."""


def save(
    folder: Path,
    *,
    step: int,
    seconds: float,
    config_hash: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    average: nn.Module | None = None,
    keep: int = 1,
) -> None:
    """Write the state after `step` steps, including the moving `average` of the weights if there is one.

    All but the last `keep` checkpoints are removed once the new one is sealed. Collective; the main process writes.
    """
    weights, state = get_state_dict(model, optimizer, options=WRITTEN)
    moments: dict[str, Any] = dict(state)
    averaged = get_model_state_dict(average, options=WRITTEN) if average else {}
    if not world.main:
        return
    tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
    tensors |= {f"average.{name}": tensor for name, tensor in averaged.items()}
    for owner, values in moments["state"].items():
        tensors |= {f"optimizer.{owner}.{key}": value for key, value in values.items()}
    header = {"format": FORMAT, "config": config_hash, "step": step, "seconds": seconds}
    path = folder / f"step-{step:08d}.safetensors"
    _write(path, tensors, header)
    write_json(path.with_suffix(".json"), {"format": FORMAT, "sha256": sha256(path), "step": step})
    for seal in seals(folder)[:-keep]:
        seal.unlink()
        seal.with_suffix(".safetensors").unlink(missing_ok=True)


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """The whole weights of a possibly sharded model. Collective."""
    weights: dict[str, Any] = get_model_state_dict(model, options=WHOLE)
    return weights


def seals(folder: Path) -> list[Path]:
    """The seals of the checkpoints in a folder, the oldest first."""
    return sorted(folder.glob("step-*.json"))


def restore(
    folder: Path,
    *,
    config_hash: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    average: nn.Module | None = None,
) -> tuple[int, float]:
    """Load the newest intact checkpoint into `model`, `optimizer` and `average`; returns (steps done, seconds spent).

    The main process reads it and distributes it. Errors: UserError, in every process, naming the newest file and what
    is wrong with it if all are damaged or missing, or if it is foreign or of another configuration.
    """
    tensors: dict[str, torch.Tensor] = {}

    def header_of() -> dict[str, Any]:
        header, saved = read(folder, config_hash=config_hash)
        tensors.update(saved)
        return header

    header = world.agreed(header_of)
    device = next(model.parameters()).device
    _load(world.shared(tensors, device), model, optimizer, average)
    return int(header["step"]), float(header["seconds"])


def read(folder: Path, *, config_hash: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Header and tensors of the newest intact checkpoint; UserError as in `restore`."""
    reasons: list[UserError] = []
    for seal in reversed(seals(folder)):
        try:
            header, tensors = _read_one(seal)
        except Damaged as damage:
            reasons.append(damage)
            continue
        path = seal.with_suffix(".safetensors")
        if header["config"] != config_hash:
            reason = f"it belongs to another configuration ({header['config'][:12]}, wanted {config_hash[:12]})"
            raise UserError(_refusal(path, reason))
        for reason_before in reasons:
            say(f"{reason_before}; going on from step {header['step']}")
        return header, tensors
    raise UserError(f"{reasons[0]}; --overwrite {folder.parent.name} starts the cell anew")


class Damaged(UserError):
    """A checkpoint that cannot be loaded."""


def _read_one(seal: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Header and tensors of a checkpoint; Damaged with its name and the reason."""
    path = seal.with_suffix(".safetensors")
    try:
        latest = read_json(seal)
    except UserError as error:
        raise Damaged(_refusal(seal, str(error))) from None
    if latest.get("format") != FORMAT:
        raise Damaged(_refusal(seal, "it was not written by this program"))
    if not path.is_file():
        raise Damaged(_refusal(path, f"{seal.name} seals it, but it is not there"))
    try:
        with safe_open(path, framework="pt") as stored:
            header = json.loads((stored.metadata() or {}).get("attnkit", "{}"))
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, ValueError, OSError) as error:
        raise Damaged(_refusal(path, f"it is torn or not a checkpoint ({error})")) from None
    if header.get("format") != FORMAT:
        raise Damaged(_refusal(path, "it was not written by this program"))
    if sha256(path) != latest.get("sha256"):
        raise Damaged(_refusal(path, f"it is damaged: its SHA-256 differs from the one in {seal.name}"))
    return header, tensors


def _load(
    tensors: dict[str, torch.Tensor], model: nn.Module, optimizer: torch.optim.Optimizer, average: nn.Module | None
) -> None:
    """Load whole tensors into a possibly sharded model and optimiser."""
    _, fresh = get_state_dict(model, optimizer, options=WHOLE)
    weights: dict[str, Any] = {}
    averaged: dict[str, Any] = {}
    state: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "model":
            weights[rest] = value
        elif kind == "average":
            averaged[rest] = value
        else:
            owner, _, key = rest.rpartition(".")
            state.setdefault(owner, {})[key] = value
    set_state_dict(
        model,
        optimizer,
        model_state_dict=weights,
        optim_state_dict={"state": state, "param_groups": fresh["param_groups"]},  # type: ignore[dict-item]
        options=WHOLE,
    )
    if average:
        set_model_state_dict(average, averaged, options=WHOLE)


def _refusal(path: Path, reason: str) -> str:
    return f"{path}: refused: {reason}"


def _on_cpu(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}


def write_weights(path: Path, weights: dict[str, Any], about: dict[str, Any]) -> None:
    """Write the final weights alone, readable with safetensors."""
    _write(path, weights, about)


def _write(path: Path, tensors: dict[str, Any], about: dict[str, Any]) -> None:
    """UserError naming the file if it cannot be written, as on a full disk."""
    try:
        with written_aside(path) as aside:
            save_file(_on_cpu(tensors), aside, metadata={"attnkit": json.dumps(about)})
    except SafetensorError as error:
        raise UserError(f"{path}: cannot be written ({error})") from None
