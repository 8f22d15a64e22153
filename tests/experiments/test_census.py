"""Every file of a data set is used, or passed over for a reason that is counted, and too many that may be data are
refused; what is held in memory and what is decoded on demand are one listing.
"""

import gzip
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from attnkit_experiments.__main__ import main
from attnkit_experiments.commands.opening import request_of
from attnkit_experiments.data.images.decoding.views import CentralCrop, rgb
from attnkit_experiments.data.images.index import build_index
from attnkit_experiments.data.images.lazy import LazyRequest, load_lazily
from attnkit_experiments.data.images.loading import ImageRequest, load_images
from attnkit_experiments.data.sequences import text as text_sequences
from attnkit_experiments.data.text.bytes import load_text
from attnkit_experiments.data.text.lines import read_lines
from attnkit_experiments.data.text.pairs import FileChoice, PairRequest, load_pairs
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.terms import Terms
from tests.attacks.data import samples
from tests.attacks.data.samples import fill


def allowed(*dropped: str, one_class: bool = False, skip: bool = False):
    return {"terms": Terms(skip_unreadable=skip, dropped=dropped, one_class=one_class)}


def load(source, tmp_path, request=None, **options):
    return load_images(str(source), request or ImageRequest(), cache=tmp_path / "cache", **options)


def lazily(source, tmp_path, request=None, **options):
    return load_lazily(str(source), request or LazyRequest(8), cache=tmp_path / "cache", **options)


def images(root: Path, names) -> Path:
    """Images of different colours with these names."""
    colours = np.random.default_rng(0).permutation(200)
    return fill(root, {name: samples.image(colour=(int(c), 0, 0)) for name, c in zip(names, colours, strict=False)})


def layout(train: int = 3, test: int = 2, classes=("ant", "bee"), splits=("train", "test")) -> list[str]:
    counts = zip(splits, (train, test), strict=True)
    return [f"{split}/{name}/{n}.png" for split, count in counts for name in classes for n in range(count)]


def test_a_class_folder_that_is_a_link_is_read(tmp_path):
    root = images(tmp_path / "data", layout())
    for split in ("train", "test"):
        (root / split / "bee").rename(tmp_path / f"{split}-bee")
        (root / split / "bee").symlink_to(tmp_path / f"{split}-bee")
    assert load(root, tmp_path).classes == lazily(root, tmp_path).classes == ("ant", "bee")
    assert len(load(root, tmp_path).train_labels) == 6


def test_links_that_lead_back_or_nowhere_are_counted_and_refused(tmp_path):
    root = images(tmp_path / "data", layout())
    (root / "train" / "ant" / "again").symlink_to(root)
    (root / "train" / "ant" / "gone.png").symlink_to(root / "nothing.png")
    with pytest.raises(UserError, match=r"2 of 12 files .* links that lead nowhere, or back .*--allow-dropped"):
        load(root, tmp_path)
    assert lazily(root, tmp_path, **allowed("link")).census.passed == {"link": 2}


def test_a_single_class_is_refused_unless_it_is_allowed(tmp_path):
    root = images(tmp_path / "data", layout(classes=("ant",)))
    for loaded in (load, lazily):
        with pytest.raises(UserError, match=r"all files are of one class, ant, .*--allow-one-class"):
            loaded(root, tmp_path)
        assert loaded(root, tmp_path, **allowed(one_class=True)).classes == ("ant",)


def sixteen_bits(kind: str) -> bytes:
    return samples.saved(Image.fromarray(np.full((8, 8), 0x8080, np.uint16)), kind)


@pytest.mark.parametrize(("kind", "suffix"), [("PNG", ".png"), ("TIFF", ".tif"), ("PPM", ".pgm")])
def test_images_of_16_bits_are_scaled(kind, suffix, tmp_path):
    root = fill(tmp_path / "data", samples.tree(sixteen_bits(kind), suffix))
    assert (load(root, tmp_path).train_images == 128).all()
    data = lazily(root, tmp_path)
    pixels = np.empty((2, 8, 8, 3), np.uint8)
    for job in data.decode([(int(i), CentralCrop(8)) for i in data.train], pixels):
        job.result()
    assert (pixels == 128).all()


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_images_of_32_bits_are_refused_by_name(dtype, tmp_path):
    root = images(tmp_path / "data", layout())
    for name in ("x", "y"):
        picture = Image.fromarray(np.full((8, 8), 70, dtype))
        (root / "train" / "ant" / f"{name}.tif").write_bytes(samples.saved(picture, "TIFF"))
    with pytest.raises(UserError, match=r"train/ant/x.tif cannot be read as an image \(mode [IF]: pixels of 32 bits"):
        load(root, tmp_path)
    for loaded in (load, lazily):
        with pytest.raises(UserError, match=r"2 of 12 .*--allow-dropped mode"):
            loaded(root, tmp_path, **allowed(skip=True))
        assert loaded(root, tmp_path, **allowed("mode", skip=True)).census.passed == {"mode": 2}


def test_images_below_a_subfolder_of_their_class_are_refused_and_named(tmp_path):
    root = images(tmp_path / "data", [*layout(train=5), *(f"train/ant/more/{n}.png" for n in range(5))])
    for loaded in (load, lazily):
        with pytest.raises(UserError, match=r"5 of 19 .*too deep.*train/ant/more/0.png.*--allow-dropped depth"):
            loaded(root, tmp_path)
        data = loaded(root, tmp_path, **allowed("depth"))
        assert data.classes == ("ant", "bee")
        assert data.census.passed == {"depth": 5}


@pytest.mark.parametrize("suffix", [".jfif", ".avif", ".jp2"])
def test_newer_suffixes_are_read(suffix, tmp_path):
    root = fill(tmp_path / "data", samples.tree(samples.image(samples.IMAGES[suffix]), suffix))
    assert len(load(root, tmp_path).train_labels) == len(lazily(root, tmp_path).train) == 2


def test_a_format_that_is_not_read_is_refused(tmp_path):
    root = images(tmp_path / "data", [*layout(), "train/ant/a.heic", "train/ant/b.HEIC"])
    with pytest.raises(UserError, match=r"2 of 12 .*of a format that is not read.*--allow-dropped suffix"):
        load(root, tmp_path)


def test_one_file_or_one_percent_is_passed_over_and_counted(tmp_path):
    root = images(tmp_path / "data", [*layout(), "train/ant/a.heic", "train/ant/.b.png", "notes/read.me"])
    assert load(root, tmp_path).census.text() == ("13 files seen, 10 used; passed over: 1 hidden, 1 other, 1 suffix")


@pytest.mark.parametrize("loaded", [load, lazily])
def test_val_beside_test_is_refused_until_one_is_named(loaded, tmp_path):
    root = images(tmp_path / "data", [*layout(), *layout(0, 2, splits=("train", "val"))])
    with pytest.raises(UserError, match="holds test and val, each a split to test on; --set test_split=test"):
        loaded(root, tmp_path)
    request = ImageRequest(test_split="val") if loaded is load else LazyRequest(8, test_split="val")
    data = loaded(root, tmp_path, request)
    assert (len(data.test_labels), data.census.passed) == (4, {"settings": 4})


def test_a_folder_beside_its_archive_is_refused(tmp_path):
    root = images(tmp_path / "data", layout())
    (root / "train.zip").write_bytes(samples.zipped({"ant/0.png": samples.image()}))
    with pytest.raises(UserError, match=r"holds train images in folders and in archives \(train.zip\)"):
        load(root, tmp_path)
    for name in ("all.zip", "all.tar"):
        (tmp_path / "twins" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "twins" / name).write_bytes(b"")
    with pytest.raises(UserError, match=r"holds all.tar and all.zip, the same twice"):
        load(tmp_path / "twins", tmp_path)


def reviews(root: Path, beside: str = "") -> Path:
    for split in ("train", "test"):
        for sentiment in ("neg", "pos"):
            for n in range(5):
                fill(root, {f"{split}/{sentiment}/{n}_7.txt": b"good or bad"})
                if beside:
                    fill(root, {f"{split}/{sentiment}/{beside.format(n)}": b"no review"})
    return root


def test_resource_forks_are_no_reviews(tmp_path):
    data = text_sequences.load_reviews(reviews(tmp_path / "data", "._{}_7.txt"))
    assert len(data.train) == len(data.test) == 10
    assert data.census.passed == {"hidden": 20}


def test_reviews_elsewhere_are_refused_and_unlabelled_ones_counted(tmp_path):
    root = reviews(tmp_path / "data")
    fill(root, {f"train/unsup/{n}_0.txt": b"a review" for n in range(9)})
    assert text_sequences.load_reviews(root).census.passed == {"unlabelled": 9}
    reviews(root, "more/{}.txt")
    with pytest.raises(UserError, match=r"20 of 40 .*--allow-dropped depth"):
        text_sequences.load_reviews(root)


def test_lines_that_end_as_on_old_macs_are_lines(tmp_path):
    (tmp_path / "old.de").write_bytes(b"".join(b"zeile %d\r" % n for n in range(300)))
    assert len(read_lines(tmp_path / "old.de")) == 300
    (tmp_path / "dos.de").write_bytes(b"one\rhalf\r\ntwo\r\n")
    assert [line.split() for line in read_lines(tmp_path / "dos.de")] == [["one", "half"], ["two"]]


def pairs(folder: Path, sets=("train", "val", "test")) -> Path:
    folder.mkdir()
    for name in sets:
        for language in ("de", "en"):
            (folder / f"{name}.{language}").write_bytes(b"ein hund\n" * 30)
    return folder


def pairs_of(folder: Path, tmp_path: Path, **options):
    return load_pairs(str(folder), PairRequest(vocabulary=300), cache=tmp_path / "cache", **options)


def test_a_file_beside_its_compressed_twin_is_refused_until_one_is_named(tmp_path):
    folder = pairs(tmp_path / "data")
    (folder / "train.en.gz").write_bytes(gzip.compress(b"a dog\n" * 20))
    with pytest.raises(UserError, match=r"holds train.en and train.en.gz; --set twin=plain or twin=gz"):
        pairs_of(folder, tmp_path)
    assert len(pairs_of(folder, tmp_path, files=FileChoice(twin="plain")).train.source) == 30
    with pytest.raises(UserError, match=r"has 30 lines and .*train.en.gz has 20"):
        pairs_of(folder, tmp_path, files=FileChoice(twin="gz"))
    with pytest.raises(UserError, match=r"holds train.en and train.en.gz, the same twice"):
        load_text(str(folder), "*")


def test_a_side_may_be_compressed_and_the_other_not(tmp_path):
    folder = pairs(tmp_path / "data")
    for name in ("train", "val", "test"):
        file = folder / f"{name}.en"
        (folder / f"{name}.en.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    data = pairs_of(folder, tmp_path)
    assert len(data.train.source) == 30
    assert (data.census.used, data.census.passed) == (6, {})


@pytest.mark.parametrize(("more", "setting"), [("dev", "valid_set"), ("test2016", "test_set")])
def test_several_sets_of_one_split_are_refused_until_one_is_named(more, setting, tmp_path):
    folder = pairs(tmp_path / "data", ("train", "val", "test", more))
    with pytest.raises(UserError, match=f"holds .* and {more}; --set {setting}="):
        pairs_of(folder, tmp_path)


def test_texts_below_a_folder_are_refused(tmp_path):
    fill(tmp_path / "data", {"a.txt": b"text " * 9, "._a.txt": b"fork", "b/c.txt": b"text", "b/d.txt": b"text"})
    with pytest.raises(UserError, match=r"2 of 3 .*--allow-dropped depth"):
        load_text(str(tmp_path / "data"), "*.txt")
    data = load_text(str(tmp_path / "data"), "*.txt", *allowed("depth").values())
    assert (data.files, data.census.passed) == (1, {"depth": 2, "hidden": 1})


def test_the_first_line_of_a_run_and_its_study_say_what_was_passed_over(tmp_path, capsys, refusal):
    root = images(tmp_path / "data", [*layout(5, 2), "train/ant/more/0.png", "train/ant/more/1.png"])
    settings = ("image_size=8", "patch=4", "steps=1", "train_images=8", "activations=relu", "alphas=1", "warmup=1")
    words = ["run", "000-fig4", "--preset", "cpu", "--data", str(root), "--out", str(tmp_path / "out"), "--enqueue"]
    words += ["--seeds", "0", *(word for setting in settings for word in ("--set", setting))]
    assert "--allow-dropped depth goes on without them" in refusal(*words)
    assert "unknown --allow-dropped 'deep'; did you mean 'depth'?" in refusal(*words, "--allow-dropped", "deep")
    assert main([*words, "--allow-dropped", "depth"]) == 0
    assert "; 16 files seen, 12 used; passed over: 2 depth, 2 settings; cpu" in capsys.readouterr().out.splitlines()[0]
    record = json.loads((tmp_path / "out" / "study.json").read_text())["data"]["census"]
    assert (record["seen"], record["used"]) == (16, 12)
    assert record["passed over"]["depth"] == {"files": 2, "first": "train/ant/more/0.png"}
    assert request_of(tmp_path / "out").terms() == Terms(dropped=("depth",))
    assert main(["work", str(tmp_path / "out"), "--data", str(root)]) == 0, "what the run allows is allowed"


@pytest.mark.parametrize(
    "words",
    [
        ("decode", "--images", "64", "--rounds", "1", "--workers", "0", "--size", "8"),
        ("profile", "000-fig4", "--repeats", "1", "--set", "steps=1", "--set", "image_size=8", "--set", "patch=4"),
    ],
    ids=lambda words: words[0],
)
def test_every_command_that_reads_data_may_be_allowed_to_leave_some_out(words, tmp_path, refusal):
    root = images(tmp_path / "data", [*layout(5, 2), "train/ant/more/0.png", "train/ant/more/1.png"])
    words = [*words, "--data", str(root), "--cache", str(tmp_path / "cache")]
    assert "--allow-dropped depth goes on without them" in refusal(*words)
    assert main([*words, "--allow-dropped", "depth"]) == 0


NAMES = ("a", "B", "a.b", "a-b", "ü", "x y", "0", "00", ".hidden", "é" * 3, "train", "test")


def random_tree(root: Path, seed: int) -> None:
    """Folders and images with odd names at any depth, links to folders and files, and files that are none of these."""
    rng = np.random.default_rng(seed)
    colour = iter(rng.permutation(256))

    def name() -> str:
        return NAMES[rng.integers(len(NAMES))]

    for split in ("train", "test"):
        for label in {name() for _ in range(4)} | {"ant", "bee"}:
            folder = root / split / label
            for _ in range(rng.integers(1, 5)):
                depth = rng.choice([0, 0, 0, 0, 1, 2])
                inside = folder.joinpath(*(name() for _ in range(depth)))
                suffix = rng.choice([".png", ".PNG", ".bmp", ".txt", ".heic", ""])
                path = inside / f"{name()}{suffix}"
                if not path.exists() and not any(above.is_file() for above in path.parents):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    kind = "BMP" if suffix == ".bmp" else "PNG"
                    path.write_bytes(samples.image(kind, (int(next(colour, 0)), int(rng.integers(256)), 0)))
    outside = root.parent / f"outside-{seed}"
    images(outside, ["p.png", "q.png"])
    (root / "train" / "linked").symlink_to(outside)
    (root / "test" / "linked").symlink_to(outside)
    (root / "train" / "linked.png").symlink_to(outside / "p.png")
    (root / "train" / "ant" / "link.png").symlink_to(outside / "p.png")
    (root / "train" / "ant" / "loop").symlink_to(root / "train")
    (root / "train" / "ant" / "gone.png").symlink_to(outside / "nothing")
    if seed % 2:
        (root / "train" / "ant" / os.fsdecode(b"\xff\xfe.png")).write_bytes(samples.image())


def archived(root: Path, path: Path) -> None:
    """What a tree consists of, links followed, but for those that a zip cannot hold."""
    with zipfile.ZipFile(path, "w") as archive:
        for folder, folders, files in os.walk(root, followlinks=True):
            folders[:] = [name for name in folders if name != "loop"]
            for name in files:
                file = Path(folder) / name
                if file.exists():
                    archive.write(file, file.relative_to(root))


def rows(index) -> list[tuple]:
    return [
        (name, index.classes[label], train)
        for name, label, train in zip(index.names.tolist(), index.labels, index.train.tolist(), strict=True)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_any_tree_is_one_listing_for_both_loaders_and_in_a_zip(seed, tmp_path):
    root = tmp_path / "data"
    random_tree(root, seed)
    everything = allowed("suffix", "depth", "split", "link", "mode", "unreadable")
    eager, lazy = load(root, tmp_path, **everything), lazily(root, tmp_path, **everything)
    assert eager.classes == lazy.classes
    for split in ("train", "test"):
        assert getattr(eager, f"{split}_labels").tolist() == getattr(lazy, f"{split}_labels").tolist()
        shown = [lazy.index.place(int(i)).read() for i in getattr(lazy, split)]
        assert len(shown) == len(getattr(eager, f"{split}_images"))
        for picture, encoded in zip(getattr(eager, f"{split}_images"), shown, strict=True):
            path = tmp_path / "picture"
            path.write_bytes(encoded)
            with Image.open(path) as opened:
                assert np.array_equal(np.asarray(rgb(opened)), picture)
    assert eager.census == lazy.census
    files = sum(len(files) for _, _, files in os.walk(root))
    outside = 2 * 2  # the folder that two links lead to
    assert eager.census.seen == files + outside + 1, "every file is counted once, and the link that leads back"
    if not seed % 2:
        archived(root, tmp_path / "data.zip")
        assert rows(build_index(str(tmp_path / "data.zip"))) == rows(build_index(str(root)))
