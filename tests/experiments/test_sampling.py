"""The sampler and the augmentation are functions of (seed, step), and do what they say to the pixels."""

import numpy as np
import pytest
import torch

from attnkit_experiments.data.images import augment
from attnkit_experiments.engine.sampler import ShuffledShards, generator, ids_hash, sample_ids
from tests.library.arrays import assert_close


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


@pytest.mark.parametrize("window", [1, 2, 5, 9])
def test_shards_are_shuffled_and_samples_within_a_window_of_shards(window):
    shards = np.repeat([7, 3, 3, 9, 1, 7, 5], 20)
    order = ShuffledShards(shards, window)
    epochs = [order(4, epoch, len(shards)) for epoch in range(3)]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(len(shards)))
        seen = [list(dict.fromkeys(shards[epoch]))[start : start + window] for start in range(0, 5, window)]
        for part in seen:  # every shard is used up before the next window begins
            where = np.flatnonzero(np.isin(shards[epoch], part))
            assert where.max() - where.min() + 1 == len(where)
    assert not np.array_equal(*epochs[:2])
    assert len({tuple(dict.fromkeys(shards[epoch])) for epoch in epochs}) > 1
    if window > 1:
        assert (np.diff(shards[epochs[0]]) != 0).sum() > len(set(shards)), "samples of a window are mixed"
    np.testing.assert_array_equal(ShuffledShards(shards, window)(4, 2, len(shards)), epochs[2])
    stream = np.concatenate([sample_ids(4, step, 35, len(shards), order) for step in range(8)])
    np.testing.assert_array_equal(stream, np.concatenate(epochs)[: len(stream)])


def test_an_order_of_shards_knows_how_many_samples_it_orders():
    with pytest.raises(ValueError, match="an order of 4 samples cannot order 5"):
        ShuffledShards(np.zeros(4), 1)(0, 0, 5)


def draws(seed: int = 0, step: int = 0, batch: int = 6, rows: slice = slice(None)) -> augment.Draws:
    return augment.Draws(seed, step, batch, np.arange(batch)[rows])


@pytest.fixture
def images():
    return torch.arange(6 * 2 * 8 * 8, dtype=torch.float32).reshape(6, 2, 8, 8)


OPERATIONS = {
    "crop": lambda x, draws: augment.random_crop(x, 2, draws),
    "inception": lambda x, draws: augment.inception_crop(x, 0.2, draws),
    "flip": augment.random_flip,
    "erase": lambda x, draws: augment.random_erase(x, 0.5, draws),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_augmentation_is_a_function_of_seed_and_step(name, images):
    def at(seed: int, step: int) -> torch.Tensor:
        return OPERATIONS[name](images, draws(seed, step))

    first = at(0, 5)
    torch.manual_seed(123)
    assert torch.equal(at(0, 5), first)
    assert any(not torch.equal(at(0, step), first) for step in range(6, 12))
    assert any(not torch.equal(at(seed, 5), first) for seed in range(1, 7))
    for rows in (slice(0, 2), slice(2, 5), slice(5, 6)):
        assert torch.equal(OPERATIONS[name](images[rows], draws(0, 5, rows=rows)), first[rows]), "rows need no others"


def test_crop_cuts_windows_of_the_padded_image(images):
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2), mode="reflect")
    windows = [padded[:, :, i : i + 8, j : j + 8] for i in range(5) for j in range(5)]
    cropped = augment.random_crop(images, 2, draws())
    for index, image in enumerate(cropped):
        assert any(torch.equal(image, window[index]) for window in windows)


def test_flip_mirrors_some_images_and_leaves_the_others(images):
    flipped = augment.random_flip(images, draws(step=1))
    kinds = [torch.equal(a, b) for a, b in zip(flipped, images, strict=True)]
    assert any(kinds)
    assert not all(kinds)
    for index, same in enumerate(kinds):
        assert same or torch.equal(flipped[index], images[index].flip(-1))


def test_inception_crop_of_everything_is_the_identity(images):
    same = augment.inception_crop(images, 1.0, draws(), widest=1.0)
    assert_close(same, images)


def test_inception_crop_cuts_windows_all_over_the_image():
    """An image of its own coordinates, from -1 to 1, tells where a window is."""
    at = (torch.arange(32) + 0.5) / 16 - 1
    columns, rows = torch.broadcast_tensors(at, at[:, None])
    cut = augment.inception_crop(torch.stack([columns, rows]).expand(200, 2, 32, 32), 0.2, draws(batch=200))
    for ramp in (cut[:, 0, 16, :], cut[:, 1, :, 16]):
        middle, free = (ramp[:, 15] + ramp[:, 16]) / 2, 1 - 16 * (ramp[:, 16] - ramp[:, 15])
        assert (middle.abs() <= free + 1e-5).all(), "every window lies in the image"
        where = (middle / free)[free > 0.2]
        assert (where.min(), where.max()) == pytest.approx((-1, 1), abs=0.1)
        assert where.mean().abs() < 0.2
    width, height = cut[:, 0, 16, 16] - cut[:, 0, 16, 15], cut[:, 1, 16, 16] - cut[:, 1, 15, 16]
    across, down = (cut[:, 0, 16, 15:17].mean(1) / (1 - 16 * width), cut[:, 1, 15:17, 16].mean(1) / (1 - 16 * height))
    free = (16 * torch.maximum(width, height)) < 0.8
    assert torch.corrcoef(torch.stack([across[free], down[free]]))[0, 1].abs() < 0.3, "both places are drawn"
    aspect = width / height
    assert (aspect.min(), aspect.max()) == pytest.approx((3 / 4, 4 / 3), abs=0.02)


def test_mixup_mixes_neighbours_and_keeps_distributions():
    share = augment.mixup_share(0.2, generator(0, 3, "mixup"))
    assert 0.5 <= share <= 1
    images, targets = torch.eye(4).reshape(4, 1, 2, 2), torch.eye(4)
    mixed, distribution = augment.mixup(images, targets, share)
    assert_close(distribution.sum(1), torch.ones(3))
    assert_close(mixed.flatten(1), distribution)
    assert_close(distribution[0], torch.tensor([1 - share, share, 0, 0]))


def test_cutmix_takes_a_rectangle_of_the_image_before_and_counts_its_area():
    images = torch.arange(5.0)[:, None, None, None].expand(5, 2, 12, 8)
    shares = []
    for step in range(200):
        mixed, targets = augment.cutmix(images, torch.eye(5), 1.0, generator(0, step, "cutmix"))
        assert mixed.shape == (4, 2, 12, 8)
        foreign = mixed[2, 0] == 2
        assert ((mixed[2, 0] == 3) | foreign).all()
        rows, columns = foreign.any(1), foreign.any(0)
        assert torch.equal(foreign, rows[:, None] & columns), "a rectangle"
        assert not rows.any() or int(rows.diff().sum() + columns.diff().sum()) <= 4
        assert_close(targets[2], torch.tensor([0, 0, foreign.float().mean(), 1 - foreign.float().mean(), 0]))
        assert torch.equal(mixed[1:], mixed[:-1] + 1)
        shares.append(float(foreign.float().mean()))
    # E[side²] = ½ with the rectangle inside; borders cut it to E[(side - side²/4)²] = ½ - 2/5·½ + 1/48 = 0.3208
    assert abs(np.mean(shares) - 0.3208) < 0.05


def test_erasing_replaces_a_rectangle_of_the_given_share_of_images_by_noise():
    images = torch.full((400, 3, 20, 30), 100.0)
    erased = augment.random_erase(images, 0.25, draws(batch=400))
    noise = erased != 100
    hit = noise.flatten(1).any(1)
    assert abs(hit.float().mean() - 0.25) < 0.07
    areas = noise[hit][:, 0].float().mean((1, 2))
    assert areas.min() > 0.01
    assert areas.max() < 0.36
    assert areas.std() > 0.06
    for image in noise[hit]:
        assert torch.equal(image[0], image[0].any(1)[:, None] & image[0].any(0)), "a rectangle, in all channels"
        assert torch.equal(image[0], image[2])
    values = erased[noise]
    assert abs(values.mean()) < 0.05
    assert abs(values.std() - 1) < 0.05
    assert torch.equal(augment.random_erase(images, 0.0, draws(batch=400)), images)


def test_mixup_shares_follow_the_beta_distribution():
    shares = np.array([augment.mixup_share(0.5, generator(0, step, "mixup")) for step in range(2000)])
    # Beta(½, ½) folded to ½..1 has the distribution function (4/π)·asin(√x) - 1
    ranks = 4 / np.pi * np.arcsin(np.sqrt(np.sort(shares))) - 1
    gap = np.abs(ranks - (np.arange(2000) + 0.5) / 2000).max()
    assert gap < 1.63 / np.sqrt(2000), "Kolmogorov-Smirnov at 1 %"


def test_pixels_are_scaled_to_minus_one_to_one():
    images = torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1)
    assert augment.normalise(images).flatten().tolist() == [-1.0, 1.0]
    every = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16, 1)
    assert torch.equal(augment.to_bytes(augment.normalise(every)).permute(0, 2, 3, 1), every)
