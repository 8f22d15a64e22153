"""The sampler and the augmentation are functions of (seed, step), and do what they say to the pixels."""

import numpy as np
import pytest
import torch

from experiments.data import augment
from experiments.data.sampler import ids_hash, sample_ids


@pytest.mark.parametrize(("batch", "count"), [(4, 12), (5, 12), (7, 3), (1, 1)])
def test_every_epoch_visits_every_sample_once(batch, count):
    steps = 3 * count
    stream = np.concatenate([sample_ids(1, step, batch, count) for step in range(steps)])
    epochs = stream.reshape(-1, count)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(count), (len(epochs), 1)))
    if count > 4:
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs), "epochs are shuffled anew"


def test_ids_depend_on_seed_and_step_only():
    late = sample_ids(3, 40, 16, 100)
    for step in (41, 0, 7):
        sample_ids(3, step, 16, 100)
    np.testing.assert_array_equal(sample_ids(3, 40, 16, 100), late)
    assert ids_hash(late) != ids_hash(sample_ids(4, 40, 16, 100))
    assert ids_hash(late) != ids_hash(sample_ids(3, 41, 16, 100))


@pytest.fixture
def images():
    return torch.arange(6 * 2 * 8 * 8, dtype=torch.float32).reshape(6, 2, 8, 8)


OPERATIONS = {
    "crop": lambda x, rng: augment.random_crop(x, 2, rng),
    "inception": lambda x, rng: augment.inception_crop(x, 0.2, rng),
    "flip": augment.random_flip,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_augmentation_is_a_function_of_seed_and_step(name, images):
    def at(seed: int, step: int) -> torch.Tensor:
        return OPERATIONS[name](images, augment.generator(seed, step, name))

    first = at(0, 5)
    torch.manual_seed(123)
    assert torch.equal(at(0, 5), first)
    assert any(not torch.equal(at(0, step), first) for step in range(6, 12))
    assert any(not torch.equal(at(seed, 5), first) for seed in range(1, 7))


def test_crop_cuts_windows_of_the_padded_image(images):
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2), mode="reflect")
    windows = [padded[:, :, i : i + 8, j : j + 8] for i in range(5) for j in range(5)]
    cropped = augment.random_crop(images, 2, augment.generator(0, 0, "crop"))
    for index, image in enumerate(cropped):
        assert any(torch.equal(image, window[index]) for window in windows)


def test_flip_mirrors_some_images_and_leaves_the_others(images):
    flipped = augment.random_flip(images, augment.generator(0, 1, "flip"))
    kinds = [torch.equal(a, b) for a, b in zip(flipped, images, strict=True)]
    assert any(kinds)
    assert not all(kinds)
    for index, same in enumerate(kinds):
        assert same or torch.equal(flipped[index], images[index].flip(-1))


def test_inception_crop_of_everything_is_the_identity(images):
    same = augment.inception_crop(images, 1.0, augment.generator(0, 0, "crop"), widest=1.0)
    torch.testing.assert_close(same, images)


def test_mixup_mixes_neighbours_and_keeps_distributions():
    share = augment.mixup_share(0.2, augment.generator(0, 3, "mixup"))
    assert 0.5 <= share <= 1
    images, targets = torch.eye(4).reshape(4, 1, 2, 2), torch.eye(4)
    mixed, distribution = augment.mixup(images, targets, share)
    torch.testing.assert_close(distribution.sum(1), torch.ones(4))
    torch.testing.assert_close(mixed.flatten(1), distribution)
    assert distribution[1, 0] == 1 - share or share == 1


def test_mixup_shares_follow_the_beta_distribution():
    shares = np.array([augment.mixup_share(0.5, augment.generator(0, step, "mixup")) for step in range(2000)])
    # Beta(½, ½) folded to ½..1 has the distribution function (4/π)·asin(√x) - 1
    ranks = 4 / np.pi * np.arcsin(np.sqrt(np.sort(shares))) - 1
    gap = np.abs(ranks - (np.arange(2000) + 0.5) / 2000).max()
    assert gap < 1.63 / np.sqrt(2000), "Kolmogorov-Smirnov at 1 %"


def test_pixels_are_scaled_to_minus_one_to_one():
    images = torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1)
    assert augment.normalise(images).flatten().tolist() == [-1.0, 1.0]
