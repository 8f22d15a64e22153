"""Images decoded for the step: layouts, workers, shares and resumption give the same; what cannot be read is named."""

import json
import os
import pickle
import shutil
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image

from attnkit_experiments.__main__ import main
from attnkit_experiments.data.images.decoding import decoders
from attnkit_experiments.data.images.decoding.decoders import Decoders
from attnkit_experiments.data.images.decoding.views import CentralCrop, RandomCrop, decode, inception_box
from attnkit_experiments.data.images.index import build_index, open_index
from attnkit_experiments.data.images.lazy import LazyRequest, load_lazily
from attnkit_experiments.data.images.listing import Entry
from attnkit_experiments.data.prepare import imagenet
from attnkit_experiments.data.unpacking import Unreadable
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.metrics import read_metrics
from attnkit_experiments.engine.terms import Terms
from attnkit_experiments.engine.transfer import upload
from attnkit_experiments.images import task as classify
from attnkit_experiments.images.model import ViTConfig
from attnkit_experiments.images.task import AugmentConfig, ImageTask
from tests.attacks.data.samples import METHODS, files_of, fill, tarred, write, zipped
from tests.library.arrays import assert_close

SIDE = 16
SKIPPING = Terms(skip_unreadable=True, dropped=("unreadable",))


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Three classes of 5 train and 2 val images, each of another size, in JPEG and PNG, grey and with transparency."""
    rng = np.random.default_rng(0)
    root = tmp_path_factory.mktemp("lazy") / "images"
    for split, count in (("train", 5), ("val", 2)):
        for label, name in enumerate(("ant", "bee", "cow")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                coarse = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
                size = (40 + 8 * label + index, 30 + 5 * index)
                image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
                mode, ending = (("RGB", "JPEG"), ("L", "jpg"), ("RGBA", "png"))[index % 3]
                image.convert(mode).save(folder / f"{name}_{index}.{ending}")
    return root


@pytest.fixture(scope="module")
def layouts(directory) -> dict[str, str]:
    """The same images as a directory, a zip, a folder with a zip for each split, shards, and shards by a pattern."""
    beside = directory.parent
    write(beside / "images.zip", zipped(files_of(directory, "top/"), METHODS["deflated"]))
    fill(beside / "zips", {f"{split}.zip": zipped(files_of(directory / split)) for split in ("train", "val")})
    manifest = imagenet.prepare(directory, beside / "shards", expected=None, per_shard=4)
    assert manifest["counts"] == {"classes": 3, "train": 15, "val": 6}
    assert manifest["files"] == {"train": {"images": 15, "shards": 4}, "val": {"images": 6, "shards": 2}}
    return {
        "directory": str(directory),
        "zip": str(beside / "images.zip"),
        "zips": str(beside / "zips"),
        "shards": str(beside / "shards"),
        "pattern": str(beside / "shards" / "{train,val}-000000.tar"),
    }


def load(data, tmp_path, *, size=SIDE, train=0, test=0, window=0, **options):
    return load_lazily(str(data), LazyRequest(size, train, test, window), cache=tmp_path / "cache", **options)


def task(data, *, batch: int = 6, seed: int = 0, **augmentation) -> ImageTask:
    model = ViTConfig(size="d64", patch=8, image=data.size, channels=3, classes=len(data.classes))
    wanted = AugmentConfig(**{"crop": "inception"} | augmentation)
    return ImageTask(data, model, wanted, batch=batch, precision="float32", seed=seed, device=torch.device("cpu"))


@pytest.fixture(scope="module", autouse=True)
def tiny_model():
    """Nothing here looks at the model: it is the batches that are compared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classify, "ViT", lambda config: torch.nn.Linear(1, 1))
        yield


def batches(trained: ImageTask, steps: range) -> list[torch.Tensor]:
    found = []
    for step in steps:
        ids = trained.sample_ids(step)
        found += trained.training_batch(ids, step, slice(0, len(ids)))
    return found


def pictures(trained: ImageTask) -> list[torch.Tensor]:
    """The six test images, four at a time."""
    return list(trained.pixels.test_batches([0, 4], 4))


def test_every_layout_holds_the_same_samples_and_trains_the_same_batches(layouts, tmp_path):
    expected = task(load(layouts["directory"], tmp_path))
    for layout in ("zip", "zips", "shards"):
        data = load(layouts[layout], tmp_path)
        assert data.classes == ("ant", "bee", "cow")
        assert data.train_labels.tolist() == [0, 1, 2] * 5
        assert data.test_labels.tolist() == [0, 1, 2] * 2
        other = task(data)
        for a, b in zip(batches(expected, range(3)), batches(other, range(3)), strict=True):
            assert torch.equal(a, b), layout
        for a, b in zip(pictures(expected), pictures(other), strict=True):
            assert torch.equal(a, b), layout
    assert len(load(layouts["pattern"], tmp_path).train) == 4


def test_what_is_read_is_what_was_encoded(layouts):
    for layout in layouts.values():
        index = build_index(layout)
        for i in range(len(index.names)):
            name = Path(index.names[i].decode())
            split = "train" if index.train[i] else "val"
            (file,) = (Path(layouts["directory"]) / split / name.parent.name).glob(f"{name.stem}.*")
            assert index.place(i).read() == file.read_bytes()
            assert index.classes[index.labels[i]] == file.parent.name


def test_any_number_of_workers_decodes_the_same(layouts, tmp_path):
    runs = []
    for workers in (0, 1, 2):
        trained = task(load(layouts["shards"], tmp_path, workers=workers), randaug="2,15", erase=0.5, cutmix=1.0)
        runs.append([*batches(trained, range(4)), *pictures(trained), trained.pixels.test([5, 0])])
        trained.pixels.data.decoders.close()
    for run in runs[1:]:
        for a, b in zip(runs[0], run, strict=True):
            assert torch.equal(a, b)


def test_a_step_is_the_same_wherever_a_run_begins(layouts, tmp_path):
    data = load(layouts["shards"], tmp_path, window=2)
    whole, resumed = batches(task(data), range(6)), batches(task(data), range(4, 6))
    for a, b in zip(whole[8:], resumed, strict=True):
        assert torch.equal(a, b)
    other = batches(task(data, seed=1), range(1))
    assert not torch.equal(whole[0], other[0])
    assert not torch.equal(whole[0], whole[2])


@pytest.mark.parametrize(
    "changes",
    [{}, {"mixup": 0.0}, {"cutmix": 1.0, "mixup": 0.0, "randaug": "2,10"}, {"cutmix": 1.0, "erase": 1.0}],
)
def test_processes_decode_their_own_share_and_together_the_batch(layouts, tmp_path, monkeypatch, changes):
    trained = task(load(layouts["zip"], tmp_path), **changes)
    for step in range(3):
        ids = trained.sample_ids(step)
        images, targets = trained.training_batch(ids, step, slice(0, 6))
        assert images.shape == (6, 3, SIDE, SIDE)
        assert_close(targets.sum(1), torch.ones(6))
        for own in (slice(0, 2), slice(2, 3), slice(3, 6)):
            with monkeypatch.context() as patch:
                asked = []
                patch.setattr(trained.pixels, "train", lambda step, rows, asked=asked: asked.append(rows))
                with pytest.raises(AttributeError):
                    trained.training_batch(ids, step, own)
            mixed = trained.augmentation.mixup > 0 or trained.augmentation.cutmix > 0
            assert len(asked[0]) == own.stop - own.start + mixed
            part = trained.training_batch(ids, step, own)
            assert torch.equal(part[0], images[own])
            assert torch.equal(part[1], targets[own])


def test_a_run_is_killed_and_resumed_with_other_workers_and_ends_the_same(layouts, tmp_path, tiny):
    settings = ("lazy=true", "image_size=16", "patch=8", "train_images=0", "test_images=0", "steps=5", "order=shards")
    settings = (*settings, "window=2", "crop=inception", "augreg=medium2", "cutmix=1", "erase=0.25", "batch=6")
    settings = (*settings, "warmup=1")
    given = {"data": layouts["shards"]}
    runs = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classify, "ViT", VIT)
        whole = tiny(tmp_path / "whole", *settings, **given)
        training_batch = ImageTask.training_batch

        def killed(self, ids, step, own):
            if step == 3:
                raise KeyboardInterrupt
            return training_batch(self, ids, step, own)

        with pytest.MonkeyPatch.context() as bomb:
            bomb.setattr(ImageTask, "training_batch", killed)
            with pytest.raises(KeyboardInterrupt):
                tiny(tmp_path / "killed", *settings, **given)
        again = tiny(tmp_path / "killed", *settings, **given, workers=1, resume=True)
    for name, out in (("whole", whole), ("killed", again)):
        rows = read_metrics(out / "cells" / "relu-alpha1-seed0" / "metrics.jsonl")
        runs[name] = [[row.get(key) for key in ("step", "loss", "grad_norm", "ids", "evaluation")] for row in rows]
    assert len(runs["whole"]) == 6
    assert runs["killed"] == runs["whole"]
    about = json.loads((whole / "study.json").read_text())["data"]
    assert (about["train"], about["test"], about["size"], about["channels"]) == (15, 6, 16, 3)


VIT = classify.ViT


def broken(directory: Path, to: Path) -> Path:
    """A copy with a train image cut short and a test image that is none."""
    shutil.copytree(directory, to)
    whole = (to / "train" / "bee" / "bee_3.JPEG").read_bytes()
    (to / "train" / "bee" / "bee_3.JPEG").write_bytes(whole[: len(whole) // 2])
    (to / "val" / "cow" / "cow_1.jpg").write_bytes(b"not a picture")
    return to


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_cannot_be_read_ends_the_run_with_its_name(directory, tmp_path, workers):
    trained = task(load(broken(directory, tmp_path / "broken"), tmp_path, workers=workers), batch=15)
    with pytest.raises(UserError, match=r"train/bee/bee_3.JPEG cannot be read as an image \(.*[Tt]runcated.*--skip"):
        batches(trained, range(1))
    with pytest.raises(UserError, match=r"val/cow/cow_1.jpg cannot be read as an image \(unknown format\)"):
        list(trained.pixels.test_batches([0], 6))


def test_unreadable_images_are_found_once_left_out_and_counted(directory, tmp_path, monkeypatch):
    source = broken(directory, tmp_path / "broken")
    data = load(source, tmp_path, terms=SKIPPING)
    assert [name.partition(" (")[0] for name in data.skipped] == ["train/bee/bee_3.JPEG", "val/cow/cow_1.jpg"]
    assert (len(data.train), len(data.test)) == (14, 5)
    assert batches(task(data, batch=14), range(1))[0].shape == (14, 3, SIDE, SIDE)
    assert data.checksum() != load(source, tmp_path).checksum()
    monkeypatch.setattr(Decoders, "submit", lambda *_: pytest.fail("decoded again"))
    assert load(source, tmp_path, terms=SKIPPING).skipped == data.skipped


def test_a_flipped_bit_in_a_zip_and_a_shard_cut_short_are_unreadable(layouts, tmp_path):
    for layout, reason in (("zip", "."), ("zips", "its checksum is not the one in the zip")):
        index = build_index(layouts[layout])
        place = index.place(0)
        raw = bytearray(Path(place.path).read_bytes())
        raw[place.offset + place.size // 2] ^= 1
        copy = tmp_path / f"{layout}.zip"
        copy.write_bytes(raw)
        with pytest.raises(Unreadable, match=reason):
            type(place)(str(copy), place.name, place.offset, place.size, place.packing, place.crc).read()
    place = build_index(layouts["shards"]).place(0)
    (tmp_path / "cut.tar").write_bytes(Path(place.path).read_bytes()[: place.offset + 5])
    with pytest.raises(Unreadable, match=f"ends after 5 of its {place.size} bytes"):
        type(place)(str(tmp_path / "cut.tar"), place.name, place.offset, place.size).read()


def test_the_index_is_kept_until_something_changes(directory, tmp_path, monkeypatch):
    source = tmp_path / "images"
    shutil.copytree(directory, source)
    first = open_index(str(source), cache=tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr("attnkit_experiments.data.images.listing.Listing.entries", lambda _: pytest.fail("indexed again"))
        again = open_index(str(source), cache=tmp_path / "cache")
    assert again.names.tolist() == first.names.tolist()
    kept = sorted((tmp_path / "cache").iterdir())
    assert [file.suffix for file in kept] == [".json", ".npy"]
    for file in kept:
        file.write_bytes(file.read_bytes()[:50])
        assert open_index(str(source), cache=tmp_path / "cache").classes == first.classes
        assert len(open_index(str(source), cache=tmp_path / "cache").names) == 21
    shutil.copy(source / "train" / "ant" / "ant_0.JPEG", source / "train" / "ant" / "new.jpeg")
    assert len(open_index(str(source), cache=tmp_path / "cache").names) == 22


class Told:
    """Says that it was unpickled."""

    def __reduce__(self):
        return pytest.fail, ("a cache was unpickled",)


def test_a_cache_is_not_unpickled(directory, tmp_path):
    open_index(str(directory), cache=tmp_path / "cache")
    (cached,) = (tmp_path / "cache").glob("*.npy")
    cached.write_bytes(pickle.dumps(Told()))
    assert len(open_index(str(directory), cache=tmp_path / "cache").names) == 21


def test_a_folder_with_the_name_of_an_image_is_none(directory, tmp_path):
    shutil.copytree(directory, tmp_path / "images")
    (tmp_path / "images" / "train" / "ant" / "folder.jpeg").mkdir()
    assert build_index(str(tmp_path / "images")).names.tolist() == build_index(str(directory)).names.tolist()


@pytest.mark.parametrize("at_once", [1, 4, 7, 21])
def test_an_index_is_the_same_however_many_rows_are_listed_at_a_time(at_once, layouts, monkeypatch):
    whole = {name: build_index(place) for name, place in layouts.items()}
    monkeypatch.setattr("attnkit_experiments.data.images.index.AT_ONCE", at_once)
    for name, place in layouts.items():
        index = build_index(place)
        for column in ("names", "labels", "train", "archives", "offsets", "sizes", "packings", "crcs"):
            assert np.array_equal(getattr(index, column), getattr(whole[name], column)), column


def test_an_index_is_mapped_not_held(tmp_path, monkeypatch):
    """An image costs the 8 bytes of its number and the 8 of its place in an epoch, and its row nothing."""
    count, module = 100_000, "attnkit_experiments.data.images.index"
    entries = [
        Entry("train" if n % 100 else "test", f"n{n % 9}", -1, f"n{n % 9}_{n}.JPEG", 0, n, n) for n in range(count)
    ]

    def opened(listing):
        listing.files.append("a.tar")
        return iter(entries)

    monkeypatch.setattr(f"{module}._places", lambda _: (tmp_path, ("a.tar",)))
    monkeypatch.setattr("attnkit_experiments.data.images.listing.Listing.entries", opened)
    open_index("made up", cache=tmp_path / "cache")
    tracemalloc.start()
    try:
        data = load("made up", tmp_path)
        data.checksum()
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(data.train) * 16 <= held < count * 18
    assert peak < count * 25


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves shards open
def test_webdataset_reads_our_shards_and_we_read_webdatasets(layouts, tmp_path):
    shards = sorted(Path(layouts["shards"]).glob("train-*.tar"))
    samples = list(webdataset.WebDataset([str(shard) for shard in shards], shardshuffle=False, empty_check=False))
    ours = build_index(layouts["shards"])
    assert len(samples) == 15
    by_key = {str(Path(ours.names[i].decode()).with_suffix("")): i for i in range(15)}
    for sample in samples:
        i = by_key[sample["__key__"]]
        assert int(sample["cls"]) == ours.labels[i]
        assert ours.place(i).read() == next(sample[end] for end in ("jpeg", "jpg", "png") if end in sample)
    (tmp_path / "theirs").mkdir()
    for split, count in (("train", 6), ("val", 2)):
        with webdataset.ShardWriter(str(tmp_path / "theirs" / f"im-{split}-%03d.tar"), maxcount=4, verbose=0) as writer:
            for number in range(count):
                pixels = np.full((9, 9, 3), 20 * number, dtype=np.uint8)
                writer.write({"__key__": f"{number:05d}", "png": pixels / 255.0, "cls": number % 2, "json": {"a": 1}})
    data = load(tmp_path / "theirs", tmp_path, size=8)
    assert data.classes == ("0", "1")
    assert data.train_labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert len(data.index.files) == 3
    shown = torch.cat(list(task(data).pixels.test_batches([0], 2)))
    assert shown[:, 0, 0, 0].tolist() == [0, 20]


def test_limits_take_the_classes_in_turn(layouts, tmp_path):
    data = load(layouts["zip"], tmp_path, train=6, test=3)
    assert Counter(data.train_labels.tolist()) == {0: 2, 1: 2, 2: 2}
    assert Counter(data.test_labels.tolist()) == {0: 1, 1: 1, 2: 1}


def test_crops_have_the_areas_and_aspects_that_were_asked_for():
    rng = np.random.default_rng(0)
    boxes = np.array([inception_box(500, 375, 0.05, rng) for _ in range(2000)])
    wide, tall = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    areas, aspects = wide * tall / (500 * 375), wide / tall
    assert boxes.min() >= 0
    assert boxes[:, 2].max() == 500
    assert boxes[:, 3].max() == 375
    assert areas.min() >= 0.05
    assert 0.74 < aspects.min() < 0.76
    assert 1.32 < aspects.max() < 1.35
    assert abs(np.mean(aspects) - 25 / 24) < 0.02
    # the height is uniform from √(0.05·A/aspect) to 375, whose mean over aspects is (95.8 + 375)/2 = 235.4
    assert abs(np.mean(tall) - 235.4) < 8
    assert inception_box(2000, 10, 0.5, rng) == (0, 0, 2000, 10), "nothing fits: the whole image"


def test_a_crop_is_cut_from_the_original_pixels(tmp_path):
    gradient = np.zeros((200, 300, 3), dtype=np.uint8)
    gradient[..., 0], gradient[..., 1] = np.arange(300)[None] * 255 / 299, np.arange(200)[:, None] * 255 / 199
    for ending, options in (("png", {}), ("jpg", {"quality": 95, "subsampling": 0})):
        Image.fromarray(gradient).save(tmp_path / f"x.{ending}", **options)
        with Image.open(tmp_path / f"x.{ending}") as image:
            for row in range(10):
                view = RandomCrop(16, 0.05, 3, 4, row)
                key = np.random.Philox(key=[3, 4], counter=[0, 0, 1, row])
                left, top, right, bottom = inception_box(300, 200, 0.05, np.random.Generator(key))
                with Image.open(tmp_path / f"x.{ending}") as image:
                    found = np.asarray(view(image)).astype(float)
                across = left + (np.arange(16) + 0.5) * (right - left) / 16 - 0.5
                down = top + (np.arange(16) + 0.5) * (bottom - top) / 16 - 0.5
                assert np.abs(found[1:-1, 1:-1, 0] - across[None, 1:-1] * 255 / 299).max() < 3
                assert np.abs(found[1:-1, 1:-1, 1] - down[1:-1, None] * 255 / 199).max() < 3
    with Image.open(tmp_path / "x.png") as image:
        middle = np.asarray(CentralCrop(56)(image)).astype(float)
    # 200 → 64: the middle 56 columns are 62.5 to 237.5 of 300
    assert np.abs(middle[0, :, 0] - (62.5 + (np.arange(56) + 0.5) * 200 / 64 - 0.5) * 255 / 299).max() < 2


def test_a_decoding_process_that_dies_says_so_and_errors_keep_their_traceback():
    made = Decoders(1)
    with pytest.raises(RuntimeError, match=r"(?s)decoding process:.*AttributeError"):
        made.submit(decode, [(3, None)]).result()
    with pytest.raises(RuntimeError, match="a decoding process ended with status 7"):
        made.submit(os._exit, 7).result()
    with pytest.raises(RuntimeError, match="ended with status 7"):
        made.submit(decode, []).result()
    made.close()
    with pytest.raises(ValueError, match="workers must be at least 0, got -1"):
        Decoders(-1)


def test_pixels_come_through_shared_memory(layouts, tmp_path, monkeypatch):
    """What a decoding process says is the shape alone, and what it wrote for another job is no part of the answer."""
    said, load_pickle = [], pickle.load

    def listen(stream):
        said.append(load_pickle(stream))
        return said[-1]

    monkeypatch.setattr(decoders.pickle, "load", listen)
    data = load(layouts["zip"], tmp_path, workers=1)
    items = [(int(i), CentralCrop(SIDE)) for i in data.train[:9]]
    pixels = np.zeros((9, SIDE, SIDE, 3), dtype=np.uint8)
    for job in data.decode(items, pixels):
        job.result()
    data.decoders.close()
    assert said == [((8, SIDE, SIDE, 3), None), ((1, SIDE, SIDE, 3), None)]
    assert np.array_equal(pixels, decode([(data.index.place(i), view) for i, view in items]))


def test_arrays_of_another_shape_are_refused():
    made = Decoders(1)
    with pytest.raises(ValueError, match=r"images of \(2, 3\) were expected, \(3,\) came"):
        made.submit(np.asarray, [1, 2, 3], np.zeros((2, 3))).result()
    made.close()


def test_batches_for_a_gpu_are_page_locked_and_not_waited_for(layouts, tmp_path, monkeypatch):
    """As far as it can be seen without one: what torch is asked for."""
    locked, empty = [], torch.empty

    def lock(*shape, pin_memory, **options):
        locked.append(empty(*shape, **options))
        assert pin_memory
        return locked[-1]

    def copy(tensor, device, *, non_blocking):
        assert any(tensor is each for each in locked)
        assert (device.type, non_blocking) == ("cuda", True)
        return tensor

    expected = task(load(layouts["zip"], tmp_path))
    trained = task(load(layouts["zip"], tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lock)
        patch.setattr(torch.Tensor, "to", copy)
        trained.pixels.device = torch.device("cuda")
        found = trained.pixels.train(0, np.arange(6))
        sent = upload(np.arange(3), torch.device("cuda"))
    assert torch.equal(found, expected.pixels.train(0, np.arange(6)))
    assert sent.tolist() == [0, 1, 2]
    assert len(locked) == 2


NUMBERED = tarred({"x.png": b"-", "x.cls": b"1"})
SHARD = tarred({"a/x.png": b"-"})
WRONG = {
    "nothing": ({}, "holds no images; expected train/CLASS/image and test/CLASS/image"),
    "only train": ({"train-0.tar": SHARD}, "holds no test images"),
    "text for a class": (
        {"train-0.tar": tarred({"x.png": b"-", "x.cls": b"bee"})},
        "x.cls holds 'bee', expected a class as a number",
    ),
    "some without class": (
        {"train-0.tar": tarred({"a/x.png": b"-", "a/x.cls": b"0", "a/y.png": b"-"})},
        "train-0.tar: the sample a/y has no label, and others have",
    ),
    "no tar": ({"train.tar": b"x" * 2000}, "train.tar: cannot be read ("),
    "one class": (
        {"train-0.tar": SHARD, "val-0.tar": SHARD},
        "all files are of one class, a, and every answer would be right; --allow-one-class",
    ),
    "without class": (
        {"train-0.tar": tarred({"x.png": b"-"})},
        "train-0.tar: x.png has neither a label nor a folder that is its class",
    ),
    "more classes than names": (
        {"train-0.tar": NUMBERED, "val-0.tar": NUMBERED, "classes.txt": b"ant\n"},
        "classes.txt names classes 0 to 0, a label says 1",
    ),
}


def test_what_a_person_reads_when_there_is_no_folder(tmp_path, refusal):
    write(tmp_path / "data", b"text")
    for name, text in (
        ("data", "neither a directory nor a zip archive or tar; expected train/CLASS/image"),
        ("a-{00..02}.tar", "no such file or directory"),
    ):
        words = ["--preset", "smoke", "--data", str(tmp_path / name), "--out", str(tmp_path / "out")]
        assert text in refusal("run", "000-fig2", *words, "--set", "lazy=true", "--set", "image_size=8")


@pytest.mark.parametrize(("files", "text"), WRONG.values(), ids=WRONG)
def test_what_a_person_reads_when_the_data_is_wrong(files, text, tmp_path, refusal):
    words = ["--preset", "smoke", "--data", str(fill(tmp_path / "data", files)), "--out", str(tmp_path / "out")]
    assert text in refusal("run", "000-fig2", *words, "--set", "lazy=true", "--set", "image_size=8")


@pytest.mark.parametrize("end", ["", "\n"])
def test_classes_are_named_by_the_lines_of_a_file(end: str, tmp_path: Path) -> None:
    for split in ("train", "val"):
        files = {f"{label}.{kind}": b"%d" % label for label in (0, 1) for kind in ("png", "cls")}
        write(tmp_path / f"{split}-0.tar", tarred(files | {"notes/read.me": b"no image"}))
    (tmp_path / "classes.txt").write_text(f"ant\nbee{end}")
    index = build_index(str(tmp_path))
    assert list(index.classes) == ["ant", "bee"]
    assert index.labels.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["lazy=true", "image_size=0"], "images that are decoded lazily need a size: --set image_size=224"),
        (["lazy=true", "image_size=8", "order=shards"], "order=shards needs shards (tar or zip); a directory has none"),
        (["order=shards"], "--set order=shards: images that are held in memory have none; --set lazy=true"),
        (["lazy=true", "image_size=8", "randaug=2x10"], "randaug: expected layers,magnitude such as 2,15"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, text, directory, tmp_path, refusal):
    words = [word for setting in settings for word in ("--set", setting)]
    out = ["--data", str(directory), "--out", str(tmp_path / "out")]
    assert text in refusal("run", "000-fig2", "--preset", "cpu", *out, *words)


def test_shards_are_checked_before_they_are_written(directory, tmp_path):
    with pytest.raises(UserError, match=r"classes: 3 instead of 1,000; train: 15 instead of 1,281,167"):
        imagenet.prepare(directory, tmp_path / "out", expected=imagenet.EXPECTED | {"val": 6})
    shutil.copytree(directory, tmp_path / "more")
    shutil.copy(directory / "val" / "cow" / "cow_0.JPEG", tmp_path / "more" / "val" / "cow" / "again.JPEG")
    with pytest.raises(UserError, match=r"2 of 3 classes have not 3 validation images \(ant: 2, bee: 2\); --any-count"):
        imagenet.prepare(tmp_path / "more", tmp_path / "out", expected={"classes": 3, "train": 15, "val": 9})
    assert not (tmp_path / "out").exists()
    counts = {"classes": 3, "train": 15, "val": 6}
    for name in ("a", "b"):
        imagenet.prepare(directory, tmp_path / name, expected=counts, per_shard=8)
    for file in sorted((tmp_path / "a").iterdir()):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    assert json.loads((tmp_path / "a" / "manifest.json").read_text())["expected"] == counts
    with pytest.raises(UserError, match="holds tar files; choose another directory"):
        imagenet.prepare(directory, tmp_path / "a", expected=None)


def test_throughput_is_measured_by_workers_and_by_operation(layouts, tmp_path, capsys, refusal):
    words = ["--data", layouts["zip"], "--workers", "0", "--size", "16", "--images", "64", "--rounds", "1"]
    assert main(["decode", *words, "--device", "cpu", "--cache", str(tmp_path / "cache")]) == 0
    said = capsys.readouterr().out
    for word in ("decoding 64 images to 16 pixels", "rand-m9-mstd0.5-inc1", "solarize_add", "cutmix"):
        assert word in said
    assert "expected at least 64 images" in refusal("decode", *words[:-3], "8", "--cache", str(tmp_path / "cache"))
