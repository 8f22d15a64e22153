"""Damaged, encrypted, lying and overlarge files: each is read, left out, or refused in one sentence with its name."""

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from attnkit_experiments.__main__ import main
from attnkit_experiments.data import archives
from attnkit_experiments.data.images.decoding.views import CentralCrop, rgb, viewed
from attnkit_experiments.data.images.index import build_index
from attnkit_experiments.data.images.lazy import LazyRequest, load_lazily
from attnkit_experiments.data.images.loading import ImageRequest, load_images
from attnkit_experiments.data.sequences import text as text_sequences
from attnkit_experiments.data.text.lines import read_lines
from attnkit_experiments.data.unpacking import Place, Unreadable, read_file
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.terms import LIMITS, Limits, Terms
from tests.attacks.data import samples
from tests.attacks.data.samples import fill

WHOLE = samples.whole_files()
SKIPPING = Terms(skip_unreadable=True, dropped=("unreadable", "mode"))
SMALL = Limits(pixels=10_000, size=20_000, header=2_000)


def outcome(name: str, content: bytes, folder: Path) -> list[str] | str:
    """What a file holds, as names or lines, or the sentence that refuses it or a part of it."""
    try:
        if name.startswith("image"):
            return [str(viewed(name, content, rgb, SMALL).size)]
        path = folder / name
        path.write_bytes(content)
        if name.startswith(("plain.txt", "text")):
            return read_lines(path, SMALL)
        index = build_index(str(path), limits=SMALL, cache=folder / "cache")
        for i in range(len(index.names)):
            place = index.place(i)
            viewed(place.name, place.read(), rgb, SMALL)
        return sorted(index.names.astype(str).tolist())
    except UserError as error:
        sentence = str(error)
    assert sentence
    assert "\n" not in sentence
    return sentence


def require_whole_or_refused(name: str, damaged: list[bytes], folder: Path) -> None:
    """An archive that is read must hold all of its images: what is cut off is never passed over."""
    whole = outcome(name, WHOLE[name], folder)
    assert isinstance(whole, list), whole
    for content in damaged:
        found = outcome(name, content, folder)
        if isinstance(found, list) and Path(name).suffix in (".zip", ".tar"):
            assert found == whole


@pytest.mark.parametrize("name", WHOLE)
def test_a_file_that_is_cut_short_or_flipped_is_read_or_refused(name, tmp_path):
    content, rng = WHOLE[name], np.random.default_rng(0)
    lengths = rng.choice(len(content), size=min(8, len(content)), replace=False)
    require_whole_or_refused(name, [content[:length] for length in lengths] + flips(content, 8), tmp_path)


def flips(content: bytes, count: int) -> list[bytes]:
    rng = np.random.default_rng(1)
    flipped = []
    for _ in range(count):
        raw = bytearray(content)
        raw[rng.integers(len(raw))] ^= int(rng.integers(1, 256))
        flipped.append(bytes(raw))
    return flipped


@pytest.mark.survival
@pytest.mark.parametrize("name", WHOLE)
def test_every_prefix_and_200_flips_are_read_or_refused(name, tmp_path):
    content = WHOLE[name]
    require_whole_or_refused(name, [content[:length] for length in range(len(content))], tmp_path)
    require_whole_or_refused(name, flips(content, 200), tmp_path)


def loads(source: Path, tmp_path: Path, terms: Terms = SKIPPING):
    """The data by both loaders, which leave out the same."""
    cache = tmp_path / "cache"
    eager = load_images(str(source), ImageRequest(8), cache=cache, terms=terms)
    lazy = load_lazily(str(source), LazyRequest(8), cache=cache, terms=terms)
    assert lazy.skipped == eager.skipped
    assert lazy.census == eager.census
    return eager


def refused_and_left_out(source: Path, tmp_path: Path, reason: str) -> None:
    """An image of `source` is refused for a reason by name, and left out of both loaders with --skip-unreadable."""
    with pytest.raises(UserError, match=reason):
        load_images(str(source), ImageRequest(8), cache=tmp_path / "cache")
    data = loads(source, tmp_path)
    assert len(data.skipped) == 1
    assert len(data.train_labels) == 2


def test_an_image_of_too_many_pixels_is_left_out(tmp_path, monkeypatch):
    before = Image.MAX_IMAGE_PIXELS
    root = fill(tmp_path / "data", samples.tree() | {"train/ant/bomb.png": samples.bomb()})
    refused_and_left_out(root, tmp_path, r"train/ant/bomb.png .*more than 178,956,970 pixels; --max-pixels allows")
    assert before == Image.MAX_IMAGE_PIXELS
    large = Limits(pixels=1 << 40)
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("it was decoded"))
    assert viewed("bomb", samples.bomb(200), lambda image: image, large).size == (200, 200)


def test_a_long_narrow_image_is_not_blown_up(tmp_path):
    narrow = samples.saved(Image.new("L", (200_000, 1)))
    with pytest.raises(Unreadable, match="more than 178,956,970 pixels"):
        viewed("narrow", narrow, CentralCrop(224), LIMITS)


def test_an_encrypted_member_is_left_out(tmp_path):
    files = {"train/ant/secret.png": samples.image()} | samples.tree()
    (tmp_path / "data.zip").write_bytes(samples.marked_encrypted(samples.zipped(files)))
    refused_and_left_out(
        tmp_path / "data.zip", tmp_path, r"train/ant/secret.png cannot be read as an image \(encrypted"
    )


def test_a_member_that_is_elsewhere_is_left_out(tmp_path):
    files = {"train/ant/moved.png": samples.image()} | samples.tree()
    (tmp_path / "data.zip").write_bytes(samples.misplaced(samples.zipped(files)))
    refused_and_left_out(tmp_path / "data.zip", tmp_path, r"moved.png .*\(not where the zip says it is\)")


@pytest.mark.parametrize("method", samples.METHODS)
def test_every_method_of_zips_is_read_by_both_loaders(method, tmp_path):
    (tmp_path / "data.zip").write_bytes(samples.zipped(samples.tree(), samples.METHODS[method]))
    assert len(loads(tmp_path / "data.zip", tmp_path, Terms()).train_labels) == 2


def test_a_method_that_is_not_read_is_named(tmp_path):
    with pytest.raises(Unreadable, match=r"x: cannot be read \(packed by method 9 of zip, which is not read\)"):
        Place(__file__, "x", 0, 10, packing=9).read()


@pytest.mark.parametrize("method", ["deflated", "bzip2", "lzma"])
def test_a_member_that_inflates_to_too_much_is_not_inflated(method, tmp_path):
    content = samples.zipped({"a": bytes(4_000_000)}, samples.METHODS[method])
    (tmp_path / "large.zip").write_bytes(content)
    with pytest.raises(Unreadable, match=r"a: cannot be read \(more than 20,000 bytes; --max-bytes allows more\)"):
        archives.read(tmp_path / "large.zip", ["a"], SMALL)
    assert len(archives.read(tmp_path / "large.zip", ["a"])["a"]) == 4_000_000


def test_a_text_that_inflates_to_too_much_is_not_inflated(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes(1_000_000)))
    with pytest.raises(Unreadable, match=r"a.gz: cannot be read \(more than 20,000 bytes"):
        read_file(tmp_path / "a.gz", SMALL)
    (tmp_path / "a.tgz").write_bytes(samples.tarred({"a": bytes(1_000_000)}, "w:gz"))
    with pytest.raises(Unreadable, match=r"a: cannot be read \(more than 20,000 bytes"):
        archives.read(tmp_path / "a.tgz", ["a"], SMALL)


def test_a_header_of_a_tar_may_not_be_too_long(tmp_path):
    (tmp_path / "train.tar").write_bytes(samples.long_header(3_000_000))
    with pytest.raises(Unreadable, match=r"a header of 3,000,320 bytes; --max-header allows more than 1,048,576"):
        build_index(str(tmp_path / "train.tar"))


def test_a_tar_with_a_damaged_header_loses_nothing_in_silence(tmp_path):
    whole = samples.tarred(samples.tree())
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        third = archive.getmembers()[2].offset
    for content, reason in (
        (whole[:third], "is missing: the tar was cut short"),
        (whole[:third] + b"x" + whole[third + 1 :], "is damaged"),
    ):
        (tmp_path / "data.tar").write_bytes(content)
        with pytest.raises(Unreadable, match=f"the header at byte {third:,} {reason}"):
            build_index(str(tmp_path / "data.tar"))


def test_names_that_are_not_utf_8_are_read_by_both_loaders(tmp_path, capsys):
    root = fill(tmp_path / "data", samples.tree())
    for name, content in ((b"\xfcber.png", samples.image()), (b"\xfc.png", b"no image")):
        Path(str(root / "train/ant") + "/" + name.decode("utf-8", "surrogateescape")).write_bytes(content)
    (root / "train/ant").rename(root / "train" / b"\xe4nt".decode("utf-8", "surrogateescape"))
    data = loads(root, tmp_path)
    assert len(data.train_labels) == 3
    assert data.skipped == (r"train/\udce4nt/\udcfc.png (unknown format)",)
    out = ["--out", str(tmp_path / "out"), "--enqueue", "--seeds", "0", "--skip-unreadable"]
    settings = ("image_size=8", "patch=4", "steps=1", "warmup=1", "activations=relu", "alphas=1", "lazy=true")
    words = [*out, "--allow-dropped", "unreadable", *(word for each in settings for word in ("--set", each))]
    assert main(["run", "000-fig2", "--preset", "cpu", "--data", str(root), *words]) == 0
    assert "; 6 files seen, 5 used; passed over: 1 unreadable" in capsys.readouterr().out


def test_an_encrypted_review_is_left_out(tmp_path):
    reviews = {
        f"{split}/{of}/{n}.txt": b"good" for split in ("train", "test") for of in ("neg", "pos") for n in range(3)
    }
    (tmp_path / "data.zip").write_bytes(samples.marked_encrypted(samples.zipped(reviews)))
    with pytest.raises(Unreadable, match=r"train/neg/0.txt: cannot be read \(encrypted\)"):
        text_sequences.load_reviews(tmp_path / "data.zip")
    data = text_sequences.load_reviews(tmp_path / "data.zip", terms=Terms(skip_unreadable=True))
    assert (len(data.train), data.skipped, data.census.passed) == (5, 1, {"unreadable": 1})


def test_limits_below_one_are_refused(tmp_path, refusal):
    words = ["run", "000-fig2", "--out", str(tmp_path / "out"), "--max-pixels", "0"]
    assert "--max-pixels must be at least 1, got 0" in refusal(*words)
