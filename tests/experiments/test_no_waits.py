"""A training batch is made on the device in few launches, with the pixels of the CPU, and nobody waits for it."""

import numpy as np
import pytest
import torch
from torch import nn

from attnkit_experiments.data.images import augment
from attnkit_experiments.data.images.augment import Draws
from attnkit_experiments.data.images.dataset import ImageData
from attnkit_experiments.data.images.randaugment import named
from attnkit_experiments.images.model import ViTConfig
from attnkit_experiments.images.task import AugmentConfig, ImageTask

from .elsewhere import DEVICE, Elsewhere, There

SIDE, BATCH = 16, 48


@pytest.fixture(scope="module")
def images() -> ImageData:
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (64, SIDE, SIDE, 3), dtype=np.uint8), np.arange(64) % 4
    return ImageData("noise", ("a", "b", "c", "d"), pixels, labels, pixels[:4], labels[:4])


def task(images: ImageData, options: AugmentConfig, device: torch.device) -> ImageTask:
    model = ViTConfig("d64", 4, SIDE, 3, 4)
    return ImageTask(images, model, options, batch=BATCH, precision="float32", seed=0, device=device,
                     build=lambda model: nn.Identity())  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        AugmentConfig(),
        AugmentConfig(crop="none", randaug="2,15", mixup=0.2),
        AugmentConfig(crop="inception", randaug="rand-m9-mstd0.5-inc1", cutmix=1.0, erase=0.5),
    ],
    ids=["plain", "big_vision", "soft"],
)
def test_a_training_batch_is_that_of_the_cpu_and_nothing_waits(options, images):
    here = task(images, options, torch.device("cpu"))
    with Elsewhere() as device:
        there = task(images, options, DEVICE)
        device.waits.clear()  # the images were copied once
        for step in range(2):
            parts = [each.training_batch(each.sample_ids(step), step, slice(8, 40)) for each in (there, here)]
            for found, wanted in zip(*parts, strict=True):
                assert isinstance(found, There)
                assert torch.equal(found.here, wanted)
    assert not device.waits


@pytest.mark.parametrize(("text", "most"), [("2,15", 130), ("rand-m9-mstd0.5-inc1", 140)])
def test_randaugment_needs_one_copy_and_few_launches(text, most):
    pixels = torch.randint(0, 256, (BATCH, 3, SIDE, SIDE), dtype=torch.uint8)
    for step in range(2):
        with Elsewhere() as device:
            named(text)(There(pixels), Draws(0, step, BATCH, np.arange(BATCH)))
        assert device.copies == 1
        assert sum(device.launches.values()) <= most, device.launches


def test_what_waits_is_seen(images, monkeypatch):
    monkeypatch.setattr(augment, "upload", lambda array, device: torch.from_numpy(array).to(device))
    with Elsewhere() as device:
        augment.random_flip(There(torch.rand(BATCH, 3, SIDE, SIDE)), Draws(0, 0, BATCH, np.arange(BATCH)))
    assert device.waits == {"copy": 1}


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (lambda x: x.cpu(), "copy"),
        (lambda x: x.max().item(), "_local_scalar_dense"),
        (lambda x: float(x.sum()), "_local_scalar_dense"),
        (lambda x: x[x > 3], "index"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x.bincount(), "bincount"),
        (lambda x: x.copy_(torch.zeros(5, dtype=torch.int64)), "copy"),
    ],
)
def test_the_device_counts_what_is_planted(compute, name):
    with Elsewhere() as device:
        compute(There(torch.arange(5)))
    assert device.waits == {name: 1}
    with pytest.raises(AssertionError, match="copies its numbers and waits"), Elsewhere():
        torch.tensor([1, 2], device=DEVICE) + 1
