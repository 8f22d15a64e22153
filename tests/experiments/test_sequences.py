"""Sequences: the container, and the loaders of texts and pictures on data made on the spot."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from attnkit_experiments.data.sequences import pictures
from attnkit_experiments.data.sequences import text as text_sequences
from attnkit_experiments.data.sequences.dataset import SequenceData, Split, flat, single, split_off
from attnkit_experiments.data.sequences.listops import ListOpsRules
from attnkit_experiments.data.sequences.lra import SequenceRequest, load_sequences
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.terms import Terms
from tests.attacks.data import samples

WORDS = ("good", "bad", "film", "dull", "plot", "the", "a", "actor", "scene", "never")


def tiny(**changed) -> SequenceData:
    tokens, starts = flat([np.array(ids, dtype=np.uint8) for ids in ([1, 2], [3], [2, 2, 1], [1])])
    labels = np.array([0, 1, 1])
    data = SequenceData(
        "tiny", 4, ("no", "yes"), tokens, starts, single(0, labels), single(3, labels[:0]), single(3, labels[:1])
    )
    return replace(data, **changed)


@pytest.fixture
def reviews(tmp_path):
    """An aclImdb folder of 12 + 8 reviews of random words, sizes 20 to 400 bytes, and its texts by name."""
    rng = np.random.default_rng(0)
    texts = {}
    for split, count in (("train", 12), ("test", 8)):
        for index in range(count):
            name = f"{split}/{('neg', 'pos')[index % 2]}/{index}_7.txt"
            texts[name] = " ".join(rng.choice(WORDS, rng.integers(5, 80))).encode()
    return samples.fill(tmp_path / "aclImdb", texts | {"train/unsup/0_0.txt": b"unlabelled"}), texts


def text_of(data: SequenceData, index: int) -> bytes:
    return bytes((data.sequence(index) - 1).astype(np.uint8))


def test_a_container_refuses_what_does_not_fit():
    data = tiny()
    assert data.sequence(2).tolist() == [2, 2, 1]
    assert data.lengths.tolist() == [2, 1, 3, 1]
    assert (data.towers, len(data.train), len(data.valid), len(data.test)) == (1, 3, 0, 1)
    empty = Split(np.empty((0, 1), dtype=np.int64), np.empty(0, dtype=np.int64))
    for changed, match in (
        ({"tokens": data.tokens.astype(np.int64)}, "uint8 or int16, got int64"),
        ({"tokens": data.tokens - 1}, r"ids must lie in 1..3, got 0..2"),
        ({"vocabulary": 3}, r"ids must lie in 1..2, got 1..3"),
        ({"starts": np.array([0, 2, 2, 6, 7])}, "no sequence being empty"),
        ({"train": empty}, "train has no samples"),
        ({"test": single(3, np.array([0, 1]))}, "rows of test must be 1 of the 4 sequences"),
        ({"test": Split(np.array([[0, 1]]), np.array([0]))}, "rows of test must be 1 of"),
        ({"test": single(0, np.array([2]))}, r"labels of test must lie in 0..1"),
        ({"test": Split(np.array([[0], [1]]), np.array([-1, 1]))}, r"labels of test must lie in 0..1"),
        ({"test": Split(np.array([[0], [1]]), np.array([0]))}, r"rows \(N, towers\) and labels \(N,\)"),
    ):
        with pytest.raises(ValueError, match=match):
            tiny(**changed)


def test_the_majority_is_that_of_train():
    data = tiny(test=single(0, np.array([0, 0, 1])))
    assert data.majority() == 1 / 3  # train says 1
    assert data.majority("train") == 2 / 3


def test_the_checksum_covers_tokens_and_splits():
    data = tiny()
    others = [
        tiny(tokens=np.array([1, 2, 3, 2, 2, 1, 2], dtype=np.uint8)),
        tiny(starts=np.array([0, 1, 3, 6, 7])),
        tiny(train=single(0, np.array([1, 1, 1]))),
        tiny(valid=single(0, np.array([1]))),
    ]
    assert len({data.checksum(), *(other.checksum() for other in others)}) == 5
    assert tiny().checksum() == data.checksum()
    two = tiny(train=Split(np.array([[0], [1]]), np.array([0, 1])))
    one_of_each = tiny(train=Split(np.array([[0]]), np.array([1])), valid=Split(np.array([[0]]), np.array([1])))
    assert two.checksum() != one_of_each.checksum()  # one after the other they are the same bytes


def test_taking_a_few_takes_classes_in_turn():
    labels = np.array([0, 0, 0, 1, 1, 1])
    split = single(10, labels).take(4)
    assert split.labels.tolist() == [0, 1, 0, 1]
    assert split.rows[:, 0].tolist() == [10, 13, 11, 14]
    data = tiny().take(2, 0, 1)
    assert (len(data.train), len(data.test)) == (2, 1)


def test_splitting_off_keeps_classes_balanced_and_loses_nothing():
    labels = np.array([0] * 40 + [1] * 20)
    rest, held = split_off(single(0, labels), 0.1)
    assert np.bincount(held.labels).tolist() == [4, 2]
    assert sorted([*rest.rows[:, 0], *held.rows[:, 0]]) == list(range(60))
    assert held.rows[:, 0].tolist() == [0, 10, 20, 30, 40, 50]
    mixed = np.array([0, 1, 2, 2, 2, 1, 2, 2])
    assert split_off(single(0, mixed), 0.5)[1].rows[:, 0].tolist() == [0, 1, 2, 4, 7]
    assert len(split_off(single(0, labels), 0)[1]) == 0
    with pytest.raises(ValueError, match=r"share must lie in 0..0.5, got 0.9"):
        split_off(single(0, labels), 0.9)


def test_texts_are_bytes(reviews, capsys):
    path, texts = reviews
    data = text_sequences.load_reviews(path, length=100)
    assert (len(data.train), len(data.valid), len(data.test)) == (12, 0, 8)
    cut = sum(len(text) > 100 for text in texts.values())
    assert 0 < cut == data.truncated
    assert f"{cut} of 20 texts are longer than 100 bytes and were cut there" in capsys.readouterr().out
    for split, name in ((data.train, "train"), (data.test, "test")):
        for sentiment, label in (("neg", 0), ("pos", 1)):
            found = {text_of(data, row) for row in split.rows[split.labels == label, 0]}
            assert found == {text[:100] for key, text in texts.items() if key.startswith(f"{name}/{sentiment}")}
    held = text_sequences.load_reviews(path, valid_share=0.5)
    assert (len(held.train), len(held.valid), held.truncated > 0) == (6, 6, False)


def test_a_zip_of_texts_gives_the_same(reviews, tmp_path):
    path, texts = reviews
    backwards = {f"top/{name}": texts[name] for name in sorted(texts, reverse=True)}
    archive = samples.write(tmp_path / "imdb.zip", samples.zipped(backwards))
    assert text_sequences.load_reviews(archive).checksum() == text_sequences.load_reviews(path).checksum()


def test_texts_that_are_not_there(reviews, tmp_path):
    path, _ = reviews
    with pytest.raises(UserError, match="no such file"):
        text_sequences.load_reviews(tmp_path / "nothing")
    (path / "train/pos/1_7.txt").write_bytes(b"")
    with pytest.raises(UserError, match=r"1_7\.txt: cannot be read \(0 bytes; a review has at least 2\)"):
        text_sequences.load_reviews(path)
    (path / "train/pos/1_7.txt").write_bytes(b"good")
    for file in (path / "test" / "pos").iterdir():
        file.unlink()
    with pytest.raises(UserError, match="holds no test/pos reviews; expected train/pos"):
        text_sequences.load_halves(path)


def check_halves(data: SequenceData, texts: dict[bytes, str], length: int) -> None:
    """Halves are of one review exactly where the label says so, never of two sentiments, never of two lengths."""
    used = []
    for split, name in ((data.train, "train"), (data.test, "test")):
        assert 0.3 < split.labels.mean() < 0.7
        for (first, second), label in zip(split.rows, split.labels, strict=True):
            one, two = text_of(data, first), text_of(data, second)
            assert len(one) == len(two) <= length
            (whole,) = [key for text, key in texts.items() if text.startswith(one) and key.startswith(name)]
            (other,) = [key for text, key in texts.items() if two in text[len(text) // 2 :] and key.startswith(name)]
            assert (whole == other) == bool(label)
            assert whole.split("/")[:2] == other.split("/")[:2]
            used += [(whole, 0), (other, 1)]
    assert len(set(used)) == len(used) == 2 * len(texts)


def test_reviews_of_one_length_are_paired_as_they_were_drawn():
    """A sort that is not stable pairs them otherwise on other machines."""
    reviews = text_sequences.Reviews([b"long" * (n % 3) for n in range(400)], np.zeros(400))
    drawn = np.random.default_rng(0).permutation(400)[:200].tolist()
    pairs = np.array(sorted(drawn, key=lambda n: n % 3)).reshape(-1, 2)
    partner = text_sequences._partners(reviews, np.random.default_rng(0))
    assert np.array_equal(partner[pairs], pairs[:, ::-1])


def test_halves_of_reviews(reviews, capsys, monkeypatch):
    path, texts = reviews
    by_text = {text: name for name, text in texts.items()}
    data = text_sequences.load_halves(path)
    assert "bytes were left out so that the halves of a sample are of one length" in capsys.readouterr().out
    check_halves(data, by_text, 4000)
    assert data.towers == 2
    assert text_sequences.load_halves(path).checksum() == data.checksum()
    assert text_sequences.load_halves(path, seed=1).checksum() != data.checksum()

    def not_cut(split, rng):
        halves, labels = [], np.arange(len(split.texts)) % 2
        for review, other in zip(split.texts, split.texts[::-1], strict=True):
            halves += [review[: len(review) // 2], other[len(other) // 2 :]]
        return halves, labels

    monkeypatch.setattr(text_sequences, "_halves", not_cut)
    with pytest.raises(AssertionError):
        check_halves(text_sequences.load_halves(path), by_text, 4000)


def test_retrieval_reads_the_files_of_the_release(tmp_path, capsys):
    lines = ["1.0\ta\tb\tfirst text\tsecond text", '0.0\ta\tc\tfirst text\tthird, "quoted" text']
    for name in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{name}.tsv").write_text("\n".join(lines) + "\n")
        lines = lines[::-1]
    data = text_sequences.load_retrieval(tmp_path, length=11)
    assert [len(s) for s in (data.train, data.valid, data.test)] == [2, 2, 2]
    assert len(data.starts) - 1 == 3  # each text once
    assert data.truncated == 1
    assert "1 of 3 texts are longer than 11 bytes" in capsys.readouterr().out
    assert data.train.labels.tolist() == [1, 0]
    assert data.valid.labels.tolist() == [0, 1]
    pairs = [[text_of(data, row) for row in rows] for rows in data.train.rows]
    assert pairs == [[b"first text", b"second text"], [b"first text", b'third, "quo']]
    (tmp_path / "new_aan_pairs.eval.tsv").write_text("1.0\ta\tb\tonly one text\n")
    with pytest.raises(UserError, match=r"eval.tsv, line 1: not a pair of texts \('1.0"):
        text_sequences.load_retrieval(tmp_path)
    (tmp_path / "new_aan_pairs.eval.tsv").write_bytes(b"\xff\ta\tb\tonly one text\n")
    with pytest.raises(UserError, match="line 1: not a pair of texts"):
        text_sequences.load_retrieval(tmp_path)
    (tmp_path / "new_aan_pairs.eval.tsv").unlink()
    with pytest.raises(UserError, match=r"holds 0 files \*.eval.tsv; expected lra_release/tsv_data"):
        text_sequences.load_retrieval(tmp_path)


def test_grey_images_become_rows_of_levels(image_folder, tmp_path):
    data = pictures.load_grey_images(image_folder, cache=tmp_path / "cache", size=8, valid_share=0.5)
    assert (len(data.train), len(data.valid), len(data.test)) == (6, 6, 6)
    assert set(data.lengths) == {64}
    assert (data.vocabulary, data.classes) == (257, ("cat", "dog"))
    pixels = np.asarray(Image.open(image_folder / "train/cat/0000.png")).astype(float)
    wanted = np.rint(0.2989 * pixels[..., 0] + 0.587 * pixels[..., 1] + 0.114 * pixels[..., 2])
    held = [data.sequence(row).astype(float) - 1 for row in range(12)]
    assert sum(np.array_equal(levels, wanted.ravel()) for levels in held) == 1
    white = np.full((1, 2, 2, 3), 255, dtype=np.uint8)
    assert pictures.grey(white).tolist() == [[[255, 255], [255, 255]]]
    one = np.arange(4, dtype=np.uint8).reshape(1, 2, 2, 1)
    assert pictures.grey(one).tolist() == [[[0, 1], [2, 3]]]


@pytest.fixture
def pathfinder(tmp_path):
    """The release's folders with 12 images of one level, 2 metadata files; image 5 is an empty file."""
    level = tmp_path / "pathfinder32" / "curv_contour_length_14"
    (level / "metadata").mkdir(parents=True)
    for number in (0, 10):
        lines = []
        for index in range(6):
            image = np.full((4, 4), number + index, dtype=np.uint8)
            folder = level / "imgs" / str(number)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"sample_{index}.png")
            lines.append(f"imgs/{number} sample_{index}.png {index} {index % 2} 1 2 3")
        (level / "metadata" / f"{number}.npy").write_text("\n".join(lines) + "\n")
    (level / "imgs" / "0" / "sample_5.png").write_bytes(b"")
    return tmp_path / "pathfinder32"


def test_pathfinder_reads_the_folders_of_the_release(pathfinder, capsys):
    data = pictures.load_pathfinder(pathfinder, size=4)
    assert "1 of 12 image files are empty or unreadable and were left out" in capsys.readouterr().out
    assert (len(data.train), len(data.valid), len(data.test), data.skipped) == (8, 1, 2, 1)
    rows = np.concatenate([split.rows[:, 0] for split in (data.train, data.valid, data.test)])
    labels = np.concatenate([split.labels for split in (data.train, data.valid, data.test)])
    assert sorted(rows) == list(range(11))
    levels = np.array([data.sequence(row)[0] - 1 for row in rows])
    assert sorted(levels) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14, 15]
    np.testing.assert_array_equal(labels, (levels % 10) % 2)
    assert pictures.load_pathfinder(pathfinder, size=4).checksum() == data.checksum()
    assert pictures.load_pathfinder(pathfinder, size=4, seed=1).checksum() != data.checksum()
    assert rows.tolist() == [0, 7, 6, 1, 9, 3, 8, 10, 5, 2, 4]  # no version may train on what another one tests on


def test_pathfinder_needs_an_image_for_every_split(pathfinder):
    images = pathfinder / "curv_contour_length_14" / "imgs"
    (images / "0" / "sample_4.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"2 of 12 files .* --allow-dropped unreadable"):
        pictures.load_pathfinder(pathfinder, size=4)
    allowed = Terms(dropped=("unreadable",))
    data = pictures.load_pathfinder(pathfinder, size=4, terms=allowed)
    assert (len(data.train), len(data.valid), len(data.test)) == (8, 1, 1)
    (images / "0" / "sample_3.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"9 images in curv_contour_length_14; a split needs at least 10"):
        pictures.load_pathfinder(pathfinder, size=4, terms=allowed)


def test_pathfinder_that_is_not_there(pathfinder):
    with pytest.raises(UserError, match="did you mean 'hard'"):
        pictures.load_pathfinder(pathfinder, level="hrd")
    with pytest.raises(UserError, match="no curv_baseline/metadata"):
        pictures.load_pathfinder(pathfinder, level="easy")
    with pytest.raises(UserError, match=r"4×4 pixels; expected 32×32"):
        pictures.load_pathfinder(pathfinder)
    file = pathfinder / "curv_contour_length_14" / "metadata" / "0.npy"
    file.write_text("imgs/0 sample_0.png 0\n")
    with pytest.raises(UserError, match=r"0.npy, line 1: not an image and its label"):
        pictures.load_pathfinder(pathfinder, size=4)


@pytest.mark.skipif("ATTNKIT_DATA" not in os.environ, reason="ATTNKIT_DATA names no folder of real data")
def test_real_reviews():
    data = text_sequences.load_halves(Path(os.environ["ATTNKIT_DATA"]) / "imdb-subset.zip", valid_share=0.1)
    assert (len(data.train), len(data.valid), len(data.test)) == (5400, 600, 4000)
    lengths = data.lengths[data.train.rows]
    np.testing.assert_array_equal(lengths[:, 0], lengths[:, 1])
    medians = [np.median(lengths[data.train.labels == label]) for label in (0, 1)]
    assert 0.93 < medians[0] / medians[1] < 1.07
    assert data.majority() == 0.5


def test_tasks_by_name(reviews, image_folder, pathfinder, tmp_path):
    path, _ = reviews
    rules = ListOpsRules(longer_than=3, shorter_than=30, depth=5)
    cases = (
        ("generated", SequenceRequest("listops", 40, 5, 10, listops=rules), (40, 5, 10), (10, 1)),
        (path, SequenceRequest("text", 8, test=4, valid_share=0.25), (8, 4, 4), (2, 1)),
        (path, SequenceRequest("imdb-halves"), (12, 0, 8), (2, 2)),
        (image_folder, SequenceRequest("image", test=2, image_side=8, valid_share=0.5), (6, 6, 2), (2, 1)),
        (pathfinder, SequenceRequest("pathfinder", image_side=4), (8, 1, 2), (2, 1)),
    )
    for source, request, sizes, (classes, towers) in cases:
        data = load_sequences(str(source), request, cache=tmp_path / "cache")
        assert (len(data.train), len(data.valid), len(data.test)) == sizes, request.task
        assert (len(data.classes), data.towers) == (classes, towers), request.task
        assert data.name.startswith(request.task)


def test_tasks_that_cannot_be(reviews, tmp_path):
    path, _ = reviews
    with pytest.raises(UserError, match="did you mean 'listops'"):
        SequenceRequest("listop")
    for source, request, match in (
        ("generated", SequenceRequest("text"), "the task text needs a path"),
        (str(path), SequenceRequest("listops"), "expected one file .*_train.tsv, as basic_train.tsv, found none"),
        (str(path), SequenceRequest("text", 13), "text has 12 samples in train, 13 were asked for"),
        (str(path), SequenceRequest("text", valid=1), "text has 0 samples in valid, 1 were asked for"),
    ):
        with pytest.raises(UserError, match=match):
            load_sequences(source, request, cache=tmp_path)
