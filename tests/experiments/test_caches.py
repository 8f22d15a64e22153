"""What a cache holds is used if it is what was written, and made again if it was edited: never other data."""

import json

import numpy as np
import pytest

from attnkit_experiments.data.images import folder
from attnkit_experiments.data.images.index import open_index
from attnkit_experiments.data.images.lazy import LazyRequest, load_lazily
from attnkit_experiments.data.sequences import listops
from attnkit_experiments.data.text import bpe
from attnkit_experiments.engine.arrays import conform_arrays
from attnkit_experiments.engine.terms import Terms

SKIPPING = Terms(skip_unreadable=True)
COLUMNS = ("names", "labels", "train", "archives", "offsets", "sizes")


def edited_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edited_arrays(path, **changes):
    """The file is torn where nothing is named."""
    if not changes:
        path.write_bytes(path.read_bytes()[:50])
        return
    with np.load(path) as stored:
        arrays = dict(stored)
    np.savez(path, **arrays | {name: change(arrays[name]) for name, change in changes.items()})


@pytest.mark.parametrize(
    "changes",
    [
        {"classes": []},
        {"classes": ["cat"]},
        {"files": [3]},
        {"files": []},
        {"census": {"seen": 18, "used": 17, "passed over": {}}},
        {"census": None},
        {"stamps": [[1, 2, 3]]},
        {"stamps": {}},
    ],
    ids=str,
)
def test_what_is_beside_an_index(changes, image_zip, tmp_path):
    first = open_index(str(image_zip), cache=tmp_path / "cache")
    (beside,) = (tmp_path / "cache").glob("index-*.json")
    good = beside.read_text()
    edited_json(beside, **changes)
    again = open_index(str(image_zip), cache=tmp_path / "cache")
    assert (again.classes, again.files, again.census) == (first.classes, first.files, first.census)
    assert beside.read_text() == good


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: {**rows, "labels": rows["labels"] + 2},
        lambda rows: {**rows, "archives": rows["archives"] + 1},
        lambda rows: {**rows, "offsets": rows["offsets"] - 2**40},
        lambda rows: {**rows, "train": np.ones_like(rows["train"])},
        lambda rows: {name: x.astype(np.int32) if name == "labels" else x for name, x in rows.items()},
        lambda rows: {name: x[:0] for name, x in rows.items()},
        lambda rows: {name: x for name, x in rows.items() if name != "sizes"},
    ],
)
def test_the_rows_of_an_index(change, image_zip, tmp_path):
    index = open_index(str(image_zip), cache=tmp_path / "cache")
    first = {name: np.array(getattr(index, name)) for name in COLUMNS}  # the file is written to below
    (path,) = (tmp_path / "cache").glob("index-*.npy")
    rows = np.load(path)
    columns = change({name: rows[name] for name in rows.dtype.names})
    other = np.empty(len(columns["names"]), [(name, x.dtype) for name, x in columns.items()])
    for name, x in columns.items():
        other[name] = x
    np.save(path, other)
    again = open_index(str(image_zip), cache=tmp_path / "cache")
    for name in COLUMNS:
        assert np.array_equal(getattr(again, name), first[name])


def test_decoded_images(image_folder, tmp_path):
    def read():
        return folder.load(image_folder, size=8, train_images=0, test_images=0, cache=tmp_path / "cache")

    first = read()
    (path,) = (tmp_path / "cache").glob("images-*.npz")
    for changes in (
        {"images": lambda x: x[:, :4, :4]},
        {"images": lambda x: x.astype(np.float32)},
        {"images": lambda x: x[:-1]},
        {"kept": lambda x: x[::-1]},
        {"kept": lambda x: x + 100},
        {"skipped": lambda x: np.array([0])},
        {},
    ):
        edited_arrays(path, **changes)
        again = read()
        assert np.array_equal(again.train_images, first.train_images)
        assert np.array_equal(again.test_labels, first.test_labels)


def test_what_was_found_unreadable(image_folder, tmp_path):
    (image_folder / "train" / "cat" / "0000.png").write_bytes(b"none")

    def read():
        request = LazyRequest(8, 0, 0, 0)
        return load_lazily(str(image_folder), request, cache=tmp_path / "cache", terms=SKIPPING)

    first = read()
    (path,) = (tmp_path / "cache").glob("unreadable-*.json")
    assert len(first.skipped) == 1
    for changes in (
        {"unreadable": []} | {"images": 3},
        {"unreadable": [[99, "torn", "unreadable"]]},
        {"unreadable": [[0, None, "unreadable"]]},
        {"unreadable": 7},
    ):
        edited_json(path, **changes)
        assert read().skipped == first.skipped


def test_generated_expressions(tmp_path):
    rules = listops.ListOpsRules(longer_than=5, shorter_than=20, depth=3)

    def read():
        return listops.load(rules, train=4, valid=2, test=2, seed=0, cache=tmp_path)

    first = read()
    (path,) = tmp_path.glob("listops-*.npz")
    for changes in (
        {"tokens": lambda x: np.zeros_like(x)},
        {"tokens": lambda x: x[:-1]},
        {"starts": lambda x: x[::-1]},
        {"starts": lambda x: x[:-1]},
        {"values": lambda x: x + 10},
        {},
    ):
        edited_arrays(path, **changes)
        again = read()
        assert np.array_equal(again.tokens, first.tokens)
        assert np.array_equal(again.train.labels, first.train.labels)


def test_tokens_and_their_tokenizer(tmp_path):
    lines = ["a dog runs", "", "and barks across the street"]

    def read():
        tokenizer = bpe.trained(lines, lines, 300, tmp_path)
        return tokenizer, *bpe.encoded(lines, tokenizer, tmp_path)

    tokenizer, ids, starts = read()
    (path,), (stored,) = tmp_path.glob("tokens-*.npz"), tmp_path.glob("bpe-*.json")
    for changes in (
        {"ids": lambda x: x + 10_000},
        {"ids": lambda x: x * 0},
        {"ids": lambda x: x.astype(np.int64)},
        {"starts": lambda x: x[:-1]},
        {"starts": lambda x: x + 1},
        {},
    ):
        edited_arrays(path, **changes)
        _, again, begin = read()
        assert np.array_equal(again, ids)
        assert np.array_equal(begin, starts)
    for text in ("{}", tokenizer[: len(tokenizer) // 2], "\x00"):
        stored.write_text(text)
        assert read()[0] == tokenizer


@pytest.mark.parametrize(
    ("kinds", "says"),
    [
        ({"a": "float32 n 2"}, ""),
        ({"a": "float32 n+1 2"}, ""),
        ({"a": "float32 n m", "b": "int64 m+1"}, ""),
        ({"a": "float64 n 2"}, r"a must be float64 n 2, got float32 3 2"),
        ({"a": "float32 n"}, "a must be float32 n, got float32 3 2"),
        ({"a": "float32 n 3"}, "3 is not"),
        ({"a": "float32 n n"}, "n is not"),
        ({"a": "float32 n m", "b": "int64 m"}, "b must be int64 m, got int64 3"),
        ({"c": "text n"}, "has no array c"),
        ({"b": "text n"}, "b must be text n, got int64 3"),
    ],
)
def test_arrays_have_the_dtypes_and_lengths_of_a_kind(kinds, says):
    arrays = {"a": np.zeros((3, 2), np.float32), "b": np.zeros(3, np.int64)}
    if not says:
        conform_arrays(arrays, kinds, {})
        return
    with pytest.raises(ValueError, match=says):
        conform_arrays(arrays, kinds, {})
