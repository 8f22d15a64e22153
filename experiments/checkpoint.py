"""Checkpoints without pickles: one safetensors file (tensors and a JSON header), then LATEST, which seals it.

A checkpoint is written aside and renamed; LATEST, written last, names it with its SHA-256. A process killed at any
moment leaves the previous LATEST in force. A torn file (truncated, damaged) or a foreign one (another configuration,
another program) is refused by name and with the reason; nothing is ever unpickled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from experiments.errors import UserError
from experiments.files import read_json, sha256, write_json, written_aside

FORMAT = "attnkit-experiments-checkpoint-1"
LATEST = "LATEST"


def save(
    folder: Path,
    *,
    step: int,
    seconds: float,
    config_hash: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Write the state after `step` steps; older checkpoints go once the new one is sealed."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            tensors[f"optimizer.{names[parameter]}.{key}"] = value
    header = {"format": FORMAT, "config": config_hash, "step": step, "seconds": seconds}
    path = folder / f"step-{step:08d}.safetensors"
    with written_aside(path) as aside:
        save_file(
            {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()},
            aside,
            metadata={"attnkit": json.dumps(header)},
        )
    write_json(folder / LATEST, {"format": FORMAT, "file": path.name, "sha256": sha256(path), "step": step})
    for older in folder.glob("step-*.safetensors"):
        if older != path:
            older.unlink()


def exists(folder: Path) -> bool:
    return (folder / LATEST).exists()


def restore(folder: Path, *, config_hash: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
    """Load the sealed checkpoint into `model` and `optimizer`; returns (steps done, seconds spent).

    Errors: UserError naming the file if it is missing, torn, not ours, or of another configuration.
    """
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
    _load(tensors, model, optimizer)
    return int(header["step"]), float(header["seconds"])


def _load(tensors: dict[str, torch.Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(
        {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    )
    parameters = dict(model.named_parameters())
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            owner, key = name.removeprefix("optimizer.").rsplit(".", 1)
            parameter = parameters[owner]
            # AdamW counts its steps on the CPU whatever the device of the parameter
            optimizer.state[parameter][key] = value if key == "step" else value.to(parameter.device)


def _refusal(path: Path, reason: str) -> UserError:
    return UserError(f"{path}: refused: {reason}; start anew with --overwrite or choose another --out")


def write_weights(path: Path, model: nn.Module, about: dict[str, Any]) -> None:
    """The final weights alone, for others to read with safetensors."""
    with written_aside(path) as aside:
        save_file(
            {name: tensor.detach().contiguous().cpu() for name, tensor in model.state_dict().items()},
            aside,
            metadata={"attnkit": json.dumps(about)},
        )
