"""Image classification with SOFT's models (Lu et al. 2021): settings, cells, and what is looked at after training.

A variant's `op` is a key of `models.soft_attention.METHODS`; its `options` are what the published model of its row has
other than Tiny at 224 pixels, for the columns of full scale.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from attnkit_experiments.cost.counting import multiply_adds, parameters
from attnkit_experiments.data.images import augment
from attnkit_experiments.data.images.dataset import ImageData, in_turn
from attnkit_experiments.data.images.lazy import LazyImages
from attnkit_experiments.engine.files import written_aside
from attnkit_experiments.engine.memory import peak_bytes
from attnkit_experiments.engine.optim import TrainConfig
from attnkit_experiments.engine.sampler import seeded
from attnkit_experiments.images import domain
from attnkit_experiments.images.settings import ImageSettings, augmentation, load
from attnkit_experiments.images.task import ImageTask
from attnkit_experiments.soft.attention import Soft
from attnkit_experiments.soft.model import OPTIONS, SoftConfig, SoftVisionTransformer, Stage
from attnkit_experiments.study.recipe import Cell, Domain, Measure, Section, Variant, from_study

MAP_IMAGES, MAP_HEADS = 4, 2
RESIDUAL_IMAGES = 32
TIMED_PASSES = 3


@dataclass(frozen=True)
class SoftStudy(ImageSettings):
    """The settings every recipe of SOFT on images shares.

    `sampling` "" is that of the options. `full_scale`: count parameters and multiply-adds of each row's published model
    too; `measured_batch`: and measure its memory and speed with so many random images of 224 pixels, on the device of
    the run (0: do not).
    """

    size: str = "mini"
    options: Literal["official", "paper"] = "official"
    sampling: Literal["", "convolution", "random", "biased", "average_pool"] = ""
    landmarks: int = 4
    stem_stride: int = 2
    overlap: bool = True
    drop_path: float = 0.0
    weight_decay: float = 0.05
    smallest_crop: float = 0.08
    full_scale: bool = True
    measured_batch: int = 0


def cell(settings: SoftStudy, variant: Variant, seed: int, data: ImageData | LazyImages, checksum: str) -> Cell:
    options = OPTIONS[settings.options]
    if settings.sampling:
        options = dataclasses.replace(options, sampling=settings.sampling)
    own: dict[str, Any] = {"method": variant.op, "options": options}
    model = from_study(SoftConfig, settings, image=data.size, channels=data.channels, classes=len(data.classes), **own)
    full = {"size": "tiny", "image": 224, "channels": 3, "classes": 1000, **own}
    parts = {
        "batch": settings.batch,
        "model": model,
        "augmentation": augmentation(settings),
        "full": SoftConfig(**(full | dict(variant.options))) if settings.full_scale else None,
        "measured_batch": settings.measured_batch,
    }
    return Cell(variant, seed, from_study(TrainConfig, settings), parts, checksum)


class SoftImageTask(ImageTask):
    """An `ImageTask` whose drop_path is drawn from (seed, step, first sample of the share), the same after a resume.

    Batch normalisation takes the statistics of a share: cut in other shares, a batch has another loss.
    """

    def loss(self, ids: np.ndarray, step: int, own: slice) -> Tensor:
        first = range(len(ids))[own].start
        with seeded(self.seed, step, f"drop_path/{first}", self.device):
            return super().loss(ids, step, own)


def task(cell: Cell, data: ImageData | LazyImages, device: torch.device) -> SoftImageTask:
    of = cell.settings
    return SoftImageTask(
        data, of["model"], of["augmentation"], batch=of["batch"], precision=cell.train.precision, seed=cell.seed,
        device=device, build=SoftVisionTransformer,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- what is counted


@functools.cache
def cost(config: SoftConfig) -> tuple[int, int]:
    """(parameters, multiply-adds of one image)."""

    def build() -> SoftVisionTransformer:
        return SoftVisionTransformer(config)

    return parameters(build), multiply_adds(build, (1, config.channels, config.image, config.image))


def facts(cell: Cell) -> dict[str, Any]:
    model, full = cell.settings["model"], cell.settings["full"]
    flops = 2 * cost(model)[1]
    found: dict[str, Any] = {
        "tokens": model.grids[0] ** 2,
        "flops_per_sample": flops,
        "training_flops": 3 * flops * cell.train.steps * cell.settings["batch"],
    }
    if full:
        found["full_parameters"], products = cost(full)
        found["full_multiply_adds"] = products
        found["full_multiply_adds_without_inverse"] = products - full.newton_multiply_adds
    return found


def shape(cell: Cell) -> SoftConfig:
    """All of the model: methods differ in their parameters."""
    model: SoftConfig = cell.settings["model"]
    return model


# ---------------------------------------------------------------------------------------------- what is looked at


def inspect(task: SoftImageTask, initial: SoftImageTask, cell: Cell, folder: Path) -> dict[str, Any]:
    """Heat maps to look at, residuals of the inverse before and after training, and cost at full scale."""
    order = in_turn(task.test_labels.tolist())
    shown = task.pixels.test(order[:MAP_IMAGES])
    # hooks need a model that is not compiled
    plain = SoftVisionTransformer(cell.settings["model"]).to(task.device)
    plain.load_state_dict(task.model.state_dict())
    if cell.variant.op != "linformer":
        with written_aside(folder / "maps.safetensors") as aside:
            save_file({"images": shown.cpu(), "maps": heat_maps(plain, augment.normalise(shown)).cpu()}, aside)
    found: dict[str, Any] = {}
    if cell.variant.op == "soft":
        images = augment.normalise(task.pixels.test(order[:RESIDUAL_IMAGES]))
        found["residuals"] = residuals(plain, images)
        found["initial_residuals"] = residuals(initial.model, images)
    if cell.settings["full"] and cell.settings["measured_batch"]:
        found |= full_scale(cell.settings["full"], cell.settings["measured_batch"], task.device)
    return found


def attention_inputs(model: SoftVisionTransformer, images: Tensor) -> list[list[tuple[torch.nn.Module, Tensor, int]]]:
    """For every stage and block its attention layer, what it is given, and tokens a side; in evaluation mode."""
    model.eval()
    seen: dict[int, Tensor] = {}
    hooks = []
    found: list[list[tuple[torch.nn.Module, Tensor, int]]] = []
    layers = [(stage, block.attention) for stage in model.stages for block in stage.blocks]  # type: ignore[union-attr]
    for _, layer in layers:
        hooks.append(layer.register_forward_pre_hook(lambda module, given: seen.__setitem__(id(module), given[0])))
    try:
        with torch.no_grad():
            model(images)
    finally:
        for hook in hooks:
            hook.remove()
    for stage in model.stages:
        assert isinstance(stage, Stage)
        found.append([(block.attention, seen[id(block.attention)], stage.grid) for block in stage.blocks])  # type: ignore[misc]
    return found


@torch.no_grad()
def heat_maps(model: SoftVisionTransformer, images: Tensor) -> Tensor:
    """Weights of the token in the middle in the last block of stage 1, first two heads: (images, heads, grid, grid)."""
    layer, x, grid = attention_inputs(model, images)[0][-1]
    weights: Tensor = layer.weights(x, grid, grid)  # type: ignore[operator]
    middle = (grid // 2) * grid + grid // 2
    return weights[:, :MAP_HEADS, middle].unflatten(-1, (grid, grid)).float().contiguous()


@torch.no_grad()
def residuals(model: SoftVisionTransformer, images: Tensor) -> list[dict[str, list[float]]]:
    """‖A A_k A - A‖₂/‖A‖₂ for k = 0..20 in each stage of SOFT attention: median and largest over blocks, heads, images.

    A is the matrix that the layer inverts, its ridge included.
    """
    found = []
    for blocks in attention_inputs(model, images):
        layers = [(layer, x, grid) for layer, x, grid in blocks if isinstance(layer, Soft)]
        if not layers:
            continue
        traces = torch.cat([layer.residuals(x, grid, grid).flatten(0, 1).double() for layer, x, grid in layers])
        found.append({"median": traces.median(0).values.tolist(), "largest": traces.amax(0).tolist()})
    return found


def full_scale(config: SoftConfig, batch: int, device: torch.device) -> dict[str, Any]:
    """Peak memory of a training step and images a second in training and prediction, float32, random images."""
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


def images_per_second(compute: Any, batch: int, device: torch.device) -> float:
    """By the median pass."""
    seconds = []
    for _ in range(TIMED_PASSES):
        start = time.perf_counter()
        compute()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return batch / sorted(seconds)[len(seconds) // 2]


def sections(study: Any, show_images: bool) -> list[Section]:
    from attnkit_experiments.soft import page  # draws: nothing that training needs to load

    return page.sections(study, show_images)


def row(name: str, *, baseline: str = "", full: Mapping[str, Any] | None = None, **changes: Any) -> Variant:
    """A row of SOFT itself, with what it changes in the study and in the published model."""
    return Variant(name=name, series=name, op="soft", baseline=baseline, changes=changes, options=full or {})


SOFT_IMAGES = Domain(
    name="soft images",
    source=domain.source,
    load=load,
    about=domain.about,
    cell=cell,
    task=task,
    inspect=inspect,
    facts=facts,
    shape=shape,
    measure=Measure("accuracy", "accuracy", factor=100, unit="%"),
    sections=sections,
)
