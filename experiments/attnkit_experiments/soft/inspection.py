"""Measurements of a trained SOFT model: heat maps, residuals of the inverse, cost at full scale."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import torch
from safetensors.torch import save_file
from torch import Tensor

from attnkit_experiments.data.images import augment
from attnkit_experiments.data.images.dataset import in_turn
from attnkit_experiments.engine.files import written_aside
from attnkit_experiments.engine.memory import peak_bytes
from attnkit_experiments.engine.schema import Filled
from attnkit_experiments.soft.attention import Soft
from attnkit_experiments.soft.model import SoftConfig, SoftVisionTransformer, Stage
from attnkit_experiments.soft.task import SoftImageTask
from attnkit_experiments.study.recipe import Cell
from attnkit_experiments.study.stored import MAPS_FILE

MAP_IMAGES, MAP_HEADS = 4, 2
RESIDUAL_IMAGES = 32
TIMED_PASSES = 3


class Residuals(TypedDict):
    """Of one stage, by the steps of Newton's iteration."""

    median: Annotated[list[float], Filled()]
    largest: Annotated[list[float], Filled()]


class Inspected(TypedDict):
    """What the inspection of a cell leaves in its result."""

    residuals: NotRequired[list[Residuals]]
    initial_residuals: NotRequired[list[Residuals]]
    full_memory: NotRequired[float]
    full_training_rate: NotRequired[float]
    full_prediction_rate: NotRequired[float]


def inspect(task: SoftImageTask, initial: SoftImageTask, cell: Cell, folder: Path) -> dict[str, Any]:
    """Heat maps, residuals of the inverse before and after training, and cost at full scale."""
    order = in_turn(task.test_labels.tolist()).tolist()
    sample = task.pixels.test(order[:MAP_IMAGES])
    # hooks need a model that is not compiled
    plain = SoftVisionTransformer(cell.settings["model"]).to(task.device)
    plain.load_state_dict(task.model.state_dict())
    if cell.variant.op != "linformer":
        with written_aside(folder / MAPS_FILE) as aside:
            save_file({"images": sample.cpu(), "maps": heat_maps(plain, augment.normalise(sample)).cpu()}, aside)
    numbers: dict[str, Any] = {}
    if cell.variant.op == "soft":
        images = augment.normalise(task.pixels.test(order[:RESIDUAL_IMAGES]))
        numbers["residuals"] = residuals(plain, images)
        numbers["initial_residuals"] = residuals(initial.model, images)
    if cell.settings["full"] and cell.settings["measured_batch"]:
        numbers |= full_scale(cell.settings["full"], cell.settings["measured_batch"], task.device)
    return numbers


def attention_inputs(model: SoftVisionTransformer, images: Tensor) -> list[list[tuple[torch.nn.Module, Tensor, int]]]:
    """For every stage and block its attention layer, its input, and tokens per side; in evaluation mode."""
    model.eval()
    x_of: dict[int, Tensor] = {}
    hooks = []
    of_stages: list[list[tuple[torch.nn.Module, Tensor, int]]] = []
    layers = [(stage, block.attention) for stage in model.stages for block in stage.blocks]  # type: ignore[union-attr]
    for _, layer in layers:
        hooks.append(layer.register_forward_pre_hook(lambda module, inputs: x_of.__setitem__(id(module), inputs[0])))
    try:
        with torch.no_grad():
            model(images)
    finally:
        for hook in hooks:
            hook.remove()
    for stage in model.stages:
        assert isinstance(stage, Stage)
        of_stages.append([(block.attention, x_of[id(block.attention)], stage.grid) for block in stage.blocks])  # type: ignore[misc]
    return of_stages


@torch.no_grad()
def heat_maps(model: SoftVisionTransformer, images: Tensor) -> Tensor:
    """Weights of the middle token in the last block of stage 1, first two heads: (images, heads, grid, grid)."""
    layer, x, grid = attention_inputs(model, images)[0][-1]
    weights: Tensor = layer.weights(x, grid, grid)  # type: ignore[operator]
    middle = (grid // 2) * grid + grid // 2
    return weights[:, :MAP_HEADS, middle].unflatten(-1, (grid, grid)).float().contiguous()


@torch.no_grad()
def residuals(model: SoftVisionTransformer, images: Tensor) -> list[Residuals]:
    """‖A A_k A - A‖₂/‖A‖₂ for k = 0..20 in each stage of SOFT attention: median and largest over blocks, heads, images.

    A is the matrix that the layer inverts, its ridge included.
    """
    rows: list[Residuals] = []
    for blocks in attention_inputs(model, images):
        layers = [(layer, x, grid) for layer, x, grid in blocks if isinstance(layer, Soft)]
        if not layers:
            continue
        traces = torch.cat([layer.residuals(x, grid, grid).flatten(0, 1).double() for layer, x, grid in layers])
        ordered = traces.sort(0).values  # torch.median has no deterministic algorithm on a GPU
        rows.append({"median": ordered[(len(ordered) - 1) // 2].tolist(), "largest": ordered[-1].tolist()})
    return rows


def full_scale(config: SoftConfig, batch: int, device: torch.device) -> dict[str, Any]:
    """Peak memory of a training step and images per second in training and prediction, float32, random images."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SoftVisionTransformer(config).to(device)
        pictures = torch.randn(batch, config.channels, config.image, config.image, device=device)

    def step() -> None:
        model(pictures).square().sum().backward()
        model.zero_grad(set_to_none=True)

    def predict() -> None:
        with torch.no_grad():
            model(pictures)

    model.train()
    step()
    memory, training = peak_bytes(step, device), images_per_second(step, batch, device)
    model.eval()
    return {
        "full_memory": memory,
        "full_training_rate": training,
        "full_prediction_rate": images_per_second(predict, batch, device),
    }


def images_per_second(compute: Callable[[], None], batch: int, device: torch.device) -> float:
    """By the median pass."""
    seconds = []
    for _ in range(TIMED_PASSES):
        start = time.perf_counter()
        compute()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return batch / sorted(seconds)[len(seconds) // 2]
