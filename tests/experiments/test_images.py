"""Digits, ImageFolder directories and zips, the cache, and the texts for data that is not there or not readable."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from attnkit_experiments.data.images.folder import square
from attnkit_experiments.data.images.loading import ImageRequest, load_images
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.terms import Terms
from tests.attacks.data import samples


def load(source, tmp_path, *, size=0, train=0, test=0, **options):
    return load_images(str(source), ImageRequest(size, train, test), cache=tmp_path / "cache", **options)


def test_digits_are_split_by_class_and_enlarged(tmp_path):
    small, large = load("digits", tmp_path), load("digits", tmp_path, size=16)
    assert small.train_images.shape[1:] == (8, 8, 1)
    assert large.train_images.shape[1:] == (16, 16, 1)
    assert len(small.train_labels) + len(small.test_labels) == 1797
    assert small.train_images.max() == 255
    assert small.checksum() != large.checksum()
    assert np.bincount(small.test_labels).min() > 30


def test_limits_take_the_classes_in_turn(tmp_path):
    data = load("digits", tmp_path, train=40, test=20)
    assert np.bincount(data.train_labels).tolist() == [4] * 10
    assert np.bincount(data.test_labels).tolist() == [2] * 10


def test_directory_and_zip_hold_the_same_images(image_folder, image_zip, tmp_path):
    folder, archive = load(image_folder, tmp_path), load(image_zip, tmp_path)
    assert folder.classes == archive.classes == ("cat", "dog")
    assert folder.checksum() == archive.checksum()
    assert folder.train_images.shape == (12, 8, 8, 3)
    for image, label in zip(folder.test_images, folder.test_labels, strict=True):
        assert image[..., label].mean() > image[..., 1 - label].mean()


def test_names_of_splits_and_endings_are_read_in_any_case_and_what_is_no_image_is_passed_over(image_folder, tmp_path):
    plain = load(image_folder, tmp_path)
    (image_folder / "train").rename(image_folder / "Train")
    picture = image_folder / "Train" / "cat" / "0000.png"
    picture.rename(picture.with_suffix(".PNG"))
    names = ("Train/cat/._0000.png", "Train/cat/notes.txt", "Train/0001.png", "other/cat/0003.png")
    samples.fill(image_folder, dict.fromkeys(names, b"no image"))
    assert load(image_folder, tmp_path).checksum() == plain.checksum()


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_split_of_which_no_image_is_readable_is_named(split, image_folder, tmp_path):
    for file in (image_folder / split).rglob("*.png"):
        file.write_bytes(b"")
    with pytest.raises(UserError, match=f"no readable {split} images are left"):
        load(image_folder, tmp_path, terms=Terms(skip_unreadable=True, dropped=("unreadable",)))


def test_images_are_resized_to_a_square(image_folder, tmp_path):
    Image.new("RGB", (20, 10), (255, 0, 0)).save(image_folder / "train" / "cat" / "wide.png")
    with pytest.raises(UserError, match=r"wide.png is 20×10; images of several sizes .* --set image_size=64"):
        load(image_folder, tmp_path)
    assert load(image_folder, tmp_path, size=6).train_images.shape == (13, 6, 6, 3)


def test_a_square_is_the_middle_of_a_picture():
    pixels = np.zeros((4, 12), dtype=np.uint8)
    pixels[:, 4:8] = 255
    for whole in (pixels, pixels.T):
        assert np.asarray(square(Image.fromarray(whole), 4)).min() == 255


def test_decoding_happens_once_until_a_file_changes(image_folder, tmp_path, monkeypatch):
    first = load(image_folder, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", lambda *_: pytest.fail("decoded again"))
        assert load(image_folder, tmp_path).checksum() == first.checksum()
    Image.new("RGB", (8, 8)).save(image_folder / "train" / "cat" / "0000.png")
    assert load(image_folder, tmp_path).checksum() != first.checksum()


def test_an_unreadable_image_is_named_and_skipped_only_with_the_flag(image_folder, tmp_path):
    (image_folder / "train" / "cat" / "broken.jpg").write_bytes(b"not a picture")
    expected = r"train/cat/broken.jpg cannot be read as an image \(unknown format\); --skip-unreadable"
    with pytest.raises(UserError, match=expected):
        load(image_folder, tmp_path)
    data = load(image_folder, tmp_path, terms=Terms(skip_unreadable=True))
    assert data.skipped == ("train/cat/broken.jpg (unknown format)",)
    assert len(data.train_labels) == 12


def test_a_truncated_image_is_unreadable(image_folder, tmp_path):
    file = image_folder / "test" / "dog" / "0001.png"
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(UserError, match=r"test/dog/0001.png cannot be read as an image"):
        load(image_folder, tmp_path)


WRONG = {
    "nothing": (None, "no such file or directory"),
    "a text": (b"hello", "neither a directory nor a zip archive"),
    "an empty folder": ({}, "holds no images; expected train/CLASS/image and test/CLASS/image"),
    "an empty zip": (samples.zipped({"README": b"no images here"}), "holds no images"),
    "only train": ({"train/cat/0.png": samples.image()}, "holds no test images"),
}


@pytest.mark.parametrize(("content", "text"), WRONG.values(), ids=WRONG)
def test_what_a_person_reads_when_the_data_is_wrong(content, text, tmp_path, refusal):
    source, out = tmp_path / "data", tmp_path / "out"
    if content is not None:
        (samples.write if isinstance(content, bytes) else samples.fill)(source, content)
    said = refusal("run", "000-fig2", "--preset", "smoke", "--data", str(source), "--out", str(out))
    assert said.startswith(f"error: --data {source}: ")
    assert text in said
    assert not (out / "study.json").exists()


@pytest.mark.skipif("ATTNKIT_DATA" not in os.environ, reason="ATTNKIT_DATA names no folder of real data")
def test_the_cifar_subset_can_be_read(tmp_path):
    data = load(Path(os.environ["ATTNKIT_DATA"]) / "cifar10-subset.zip", tmp_path, train=50, test=50)
    assert data.train_images.shape == (50, 32, 32, 3)
    assert np.bincount(data.train_labels).tolist() == [5] * 10
    assert "airplane" in data.classes
