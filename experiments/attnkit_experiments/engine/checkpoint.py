"""Checkpoints without pickles: one safetensors file (tensors and a JSON header), then LATEST, which seals it.

A checkpoint is written to a temporary file and renamed; LATEST, written last, names it with its SHA-256. A process
killed at any moment leaves the previous LATEST valid. A damaged file or a foreign one (another configuration, another
program) is refused with its name and the reason; nothing is ever unpickled.

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
from attnkit_experiments.engine.world import World

FORMAT = "attnkit-experiments-checkpoint-1"
LATEST = "LATEST"
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


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
    weights, state = get_state_dict(model, optimizer, options=WHOLE)
    moments: dict[str, Any] = dict(state)
    averaged = whole_weights(average) if average else {}
    if not world.main:
        return
    tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
    tensors |= {f"average.{name}": tensor for name, tensor in averaged.items()}
    for owner, values in moments["state"].items():
        tensors |= {f"optimizer.{owner}.{key}": value for key, value in values.items()}
    header = {"format": FORMAT, "config": config_hash, "step": step, "seconds": seconds}
    path = folder / f"step-{step:08d}.safetensors"
    with written_aside(path) as aside:
        save_file(_on_cpu(tensors), aside, metadata={"attnkit": json.dumps(header)})
    write_json(folder / LATEST, {"format": FORMAT, "file": path.name, "sha256": sha256(path), "step": step})
    for older in sorted(folder.glob("step-*.safetensors"))[:-keep]:
        older.unlink()


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """The whole weights of a possibly sharded model. Collective; only the main process gets them."""
    weights: dict[str, Any] = get_model_state_dict(model, options=WHOLE)
    return weights


def exists(folder: Path) -> bool:
    return (folder / LATEST).exists()


def restore(
    folder: Path,
    *,
    config_hash: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    average: nn.Module | None = None,
) -> tuple[int, float]:
    """Load the sealed checkpoint into `model`, `optimizer` and `average`; returns (steps done, seconds spent).

    The main process reads it and distributes it. Errors: UserError, in every process, naming the file if
    it is missing, damaged, foreign, or of another configuration.
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
    """Header and tensors of the sealed checkpoint; UserError as in `restore`."""
    latest = read_json(folder / LATEST)
    if latest.get("format") != FORMAT or "file" not in latest:
        raise _refusal(folder / LATEST, "it was not written by this program")
    path = folder / str(latest["file"])
    if not path.is_file():
        raise _refusal(path, f"{LATEST} names it, but it is not there")
    try:
        with safe_open(path, framework="pt") as stored:
            header = json.loads((stored.metadata() or {}).get("attnkit", "{}"))
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, ValueError, OSError) as error:
        raise _refusal(path, f"it is torn or not a checkpoint ({error})") from None
    if header.get("format") != FORMAT:
        raise _refusal(path, "it was not written by this program")
    if sha256(path) != latest.get("sha256"):
        raise _refusal(path, f"it is damaged: its SHA-256 differs from the one in {LATEST}")
    if header["config"] != config_hash:
        raise _refusal(
            path, f"it belongs to another configuration ({header['config'][:12]}, wanted {config_hash[:12]})"
        )
    return header, tensors


def _load(
    tensors: dict[str, torch.Tensor], model: nn.Module, optimizer: torch.optim.Optimizer, average: nn.Module | None
) -> None:
    """Load whole tensors into a possibly sharded model and optimiser."""
    _, fresh = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
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
        options=StateDictOptions(full_state_dict=True),
    )
    if average:
        set_model_state_dict(average, averaged, options=StateDictOptions(full_state_dict=True))


def _refusal(path: Path, reason: str) -> UserError:
    return UserError(f"{path}: refused: {reason}; start anew with --overwrite or choose another --out")


def _on_cpu(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}


def write_weights(path: Path, weights: dict[str, Any], about: dict[str, Any]) -> None:
    """Write the final weights alone, readable with safetensors."""
    with written_aside(path) as aside:
        save_file(_on_cpu(weights), aside, metadata={"attnkit": json.dumps(about)})
