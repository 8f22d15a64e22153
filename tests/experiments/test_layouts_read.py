"""Data sets in the forms in which others publish, write and pack them."""

import gzip
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from attnkit_experiments.__main__ import main
from attnkit_experiments.data.images.index import build_index, open_index
from attnkit_experiments.data.images.loading import ImageRequest, load_images
from attnkit_experiments.data.sequences import listops
from attnkit_experiments.data.sequences.lra import SequenceRequest, load_sequences
from attnkit_experiments.engine.errors import UserError
from tests.attacks.data import samples
from tests.attacks.data.samples import fill, write


def coloured(names) -> dict[str, bytes]:
    return {name: samples.image(colour=(n, 0, 0)) for n, name in enumerate(names)}


def listed(index) -> list[tuple[str, str, bool]]:
    names = [Path(name.decode()).name for name in index.names]
    return [
        (name, index.classes[label], bool(train))
        for name, label, train in zip(names, index.labels, index.train, strict=True)
    ]


SOURCES = ("( ( ( [MAX 2 ) 9 ) ] )", "( ( ( [MIN ( ( ( [SM 5 ) 6 ) ] ) ) 3 ) ] )", "7")


@pytest.mark.parametrize("ending", ["tsv", "tsv.gz"])
def test_listops_of_the_benchmark_is_read(ending, tmp_path):
    for name, values in (("train", (9, 1, 7)), ("val", (9, 1)), ("test", (9,))):
        rows = zip(SOURCES, values, strict=False)
        text = "Source\tTarget\n" + "".join(f"{source}\t{value}\n" for source, value in rows)
        content = text.encode()
        write(tmp_path / f"basic_{name}.{ending}", gzip.compress(content) if ending.endswith("gz") else content)
    data = load_sequences(str(tmp_path), SequenceRequest("listops"), cache=tmp_path / "cache")
    assert [listops.text(data.sequence(n)) for n in range(3)] == ["[MAX 2 9 ]", "[MIN [SM 5 6 ] 3 ]", "7"]
    assert [split.labels.tolist() for split in (data.train, data.valid, data.test)] == [[9, 1, 7], [9, 1], [9]]
    (tmp_path / f"basic_val.{ending}").unlink()
    write(tmp_path / "basic_val.tsv", b"Source\tTarget\n( [MAX 2 ) x ]\t9\n")
    with pytest.raises(UserError, match=r"basic_val.tsv, line 2: not an expression of ListOps and its value"):
        listops.read(tmp_path)


@pytest.mark.parametrize("ending", ["tar.gz", "tgz"])
def test_compressed_shards_are_unpacked_once(ending, tmp_path, monkeypatch):
    data = tmp_path / "data"
    for split in ("train", "val"):
        files = {"ant/0.png": samples.image(), "bee/1.png": samples.image()}
        write(data / f"{split}-000.{ending}", samples.tarred(files, "w:gz"))
    index = open_index(str(data), cache=tmp_path / "cache")
    assert listed(index) == [
        (name, label, train) for train in (True, False) for name, label in (("0.png", "ant"), ("1.png", "bee"))
    ]
    assert index.place(3).read() == samples.image()
    monkeypatch.setattr("attnkit_experiments.data.images.listing._unpack", lambda *_: pytest.fail("unpacked again"))
    assert listed(build_index(str(data), cache=tmp_path / "cache")) == listed(index)
    assert len(load_images(str(data), ImageRequest(), cache=tmp_path / "cache").train_labels) == 2


@pytest.mark.parametrize(("labels", "classes"), [((0, 1), ("0", "1")), (("ant", "bee"), ("ant", "bee"))])
def test_webdatasets_with_labels_in_json_and_second_images_are_read(labels, classes, tmp_path):
    for split in ("train", "val"):
        files = {}
        for n, label in enumerate(labels):
            files |= {f"{n}.jpg": samples.image("JPEG"), f"{n}.mask.png": samples.image()}
            files |= {f"{n}.json": json.dumps({"label": label, "width": 8}).encode(), f"{n}.txt": b"a caption"}
        write(tmp_path / "data" / f"{split}-0.tar", samples.tarred(files))
    data = load_images(str(tmp_path / "data"), ImageRequest(), cache=tmp_path / "cache")
    assert data.classes == classes
    assert data.train_labels.tolist() == data.test_labels.tolist() == [0, 1]
    assert data.census.passed == {"labels": 4, "other": 4, "second": 4}
    assert {name for name, *_ in listed(build_index(str(tmp_path / "data")))} == {"0.jpg", "1.jpg"}


@pytest.mark.parametrize("label", [True, 1.5, "", -1, 10**12, None])
def test_a_label_in_json_that_is_none_is_refused(label, tmp_path):
    files = {"0.jpg": samples.image("JPEG"), "0.json": json.dumps({"label": label}).encode()}
    path = write(tmp_path / "train-0.tar", samples.tarred(files))
    with pytest.raises(UserError, match=r"train-0.tar: 0.json holds the (label|class) "):
        build_index(str(path))


def test_a_tar_of_folders_may_have_names_with_dots(tmp_path):
    names = [f"{split}/{of}/img.v{n}.png" for split in ("train", "test") for of in ("ant", "bee") for n in (1, 2)]
    write(tmp_path / "data.tar", samples.tarred(coloured(names) | {"train/notes.json": b"[]"}))
    fill(tmp_path / "data", coloured(names))
    assert listed(build_index(str(tmp_path / "data.tar"))) == listed(build_index(str(tmp_path / "data")))


def test_a_zip_with_backslashes_is_read(tmp_path):
    write(tmp_path / "data.zip", samples.zipped({name.replace("/", "\\"): c for name, c in samples.tree().items()}))
    data = load_images(str(tmp_path / "data.zip"), ImageRequest(), cache=tmp_path / "cache")
    assert (data.classes, len(data.train_labels), data.census.passed) == (("ant", "bee"), 2, {})


def test_a_class_without_training_images_is_read_and_said(tmp_path, capsys):
    fill(tmp_path / "data", samples.tree() | {"test/cow/0.png": samples.image()})
    data = load_images(str(tmp_path / "data"), ImageRequest(), cache=tmp_path / "cache")
    assert (data.classes, data.test_labels.tolist()) == (("ant", "bee", "cow"), [0, 1, 2])
    settings = ("patch=4", "steps=1", "warmup=1", "activations=relu", "alphas=1", "train_images=0", "test_images=0")
    words = ["--out", str(tmp_path / "out"), "--enqueue", *(word for each in settings for word in ("--set", each))]
    assert main(["run", "000-fig2", "--preset", "cpu", "--data", str(tmp_path / "data"), "--seeds", "0", *words]) == 0
    assert "3 classes; 1 class with test images and no train images; 5 files seen, 5 used" in capsys.readouterr().out


def whole(classes: dict[str, dict[str, bytes]]) -> bytes:
    """A tar of a tar for each class."""
    return samples.tarred({f"{name}.tar": samples.tarred(files) for name, files in classes.items()})


@pytest.fixture
def imagenet21k(tmp_path) -> Path:
    """Three synsets as published, and folders of validation for two of them."""
    root = tmp_path / "published"
    synsets = {name: coloured(f"{name}_{n}.JPEG" for n in range(3)) for name in ("n01", "n02", "n03")}
    write(root / "fall11_whole.tar", whole(synsets))
    return fill(root, coloured(f"val/{name}/ILSVRC2012_val_{n}.JPEG" for name in ("n01", "n03") for n in range(2)))


def test_imagenet21k_beside_folders_of_validation(imagenet21k, tmp_path, capsys):
    index = build_index(str(imagenet21k))
    assert (index.classes, int(index.train.sum()), len(index.names)) == (("n01", "n02", "n03"), 9, 13)
    assert np.bincount(index.labels[~index.train], minlength=3).tolist() == [2, 0, 2]
    out = tmp_path / "shards"
    assert main(["prepare", "imagenet21k", str(imagenet21k), str(out)]) == 2
    assert "classes: 3 instead of 21,841; train: 9 instead of 14,197,122; val: 4 instead of" in capsys.readouterr().err
    assert main(["prepare", "imagenet21k", str(imagenet21k), str(out), "--any-count"]) == 0
    again = build_index(str(out))
    assert again.classes == index.classes
    pictures = [sorted((i.labels[n], i.place(n).read()) for n in range(len(i.names))) for i in (index, again)]
    assert pictures[0] == pictures[1]
    assert json.loads((out / "manifest.json").read_text())["census"] == index.census.record()
    assert not list(tmp_path.glob(".shards.*"))


def test_a_class_of_a_whole_that_is_cut_short_loses_nothing_in_silence(imagenet21k):
    path = imagenet21k / "fall11_whole.tar"
    inner = samples.tarred(coloured(["a.JPEG", "b.JPEG"]))
    with tarfile.open(fileobj=io.BytesIO(inner)) as archive:
        second = archive.getmembers()[1].offset
    for content in (inner[:second], inner[: second + 700]):
        write(path, samples.tarred({"n01.tar": content, "n02.tar": inner}))
        with pytest.raises(UserError, match=r"fall11_whole.tar: cannot be read"):
            build_index(str(imagenet21k))


def test_shards_are_not_written_where_a_name_would_be_lost(tmp_path, refusal):
    for name, text in (("0.jpg", "another image of its class has the same name"), ("a.b.png", "a name with two dots")):
        root = fill(tmp_path / name, samples.tree() | {f"train/ant/{name}": samples.image("JPEG")})
        assert text in refusal("prepare", "imagenet-shards", str(root), str(tmp_path / "out"), "--any-count")
    deep = {f"train/ant/more/{n}.png": samples.image() for n in range(2)}
    root = fill(tmp_path / "deep", samples.tree() | deep)
    words = ["prepare", "imagenet-shards", str(root), str(tmp_path / "out"), "--any-count"]
    assert "--allow-dropped depth goes on without them" in refusal(*words)
    assert main([*words, "--allow-dropped", "depth"]) == 0
    assert main(["prepare", "wmt14", str(root), str(tmp_path / "text"), "--allow-dropped", "depth"]) == 2
