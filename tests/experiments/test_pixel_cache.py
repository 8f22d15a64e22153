"""Images that are decoded once: the same crops as without, whole after a kill, and never other than was written."""

import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from attnkit_experiments.__main__ import main
from attnkit_experiments.data.images import pixel_cache
from attnkit_experiments.data.images.decoding import views
from attnkit_experiments.data.images.lazy import LazyRequest, load_lazily
from attnkit_experiments.data.images.pixels import DecodedPixels, cut
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.sampler import sample_ids
from attnkit_experiments.engine.terms import Terms
from tests.experiments.forks import PATIENCE, environment

SIDE, KEPT = 16, 24
TRAIN, TEST = 10, 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Two classes; red grows to the right and green downwards, so that a crop shows where it was cut."""
    root = tmp_path_factory.mktemp("once") / "images"
    for split, count in (("train", TRAIN), ("test", TEST)):
        for number in range(count):
            width, height = 60 + 12 * (number % 3), 90 - 14 * (number % 4)
            pixels = np.zeros((height, width, 3), dtype=np.uint8)
            pixels[..., 0] = np.arange(width)[None] * 255 / (width - 1)
            pixels[..., 1] = np.arange(height)[:, None] * 255 / (height - 1)
            pixels[..., 2] = 20 * number
            folder = root / split / ("ant", "bee")[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


def load(data, cache, *, side=KEPT, cropped=True, check=False, decoder="pillow", **options):
    request = LazyRequest(SIDE, decoded_side=side, cropped=cropped, decoder=decoder, check=check)
    return load_lazily(str(data), request, cache=Path(cache), **options)


@pytest.fixture(scope="module")
def made(directory, tmp_path_factory) -> Path:
    """A cache that nobody changes."""
    cache = tmp_path_factory.mktemp("made")
    load(directory, cache)
    return cache


@pytest.fixture
def copied(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "cache"))


def pixels_of(data, smallest: float | None = 0.05, seed: int = 3) -> DecodedPixels:
    def ids(step: int) -> np.ndarray:
        return sample_ids(seed, step, 7, len(data.train))

    return DecodedPixels(data, torch.device("cpu"), ids, seed, smallest)


def batches(pixels: DecodedPixels) -> list[torch.Tensor]:
    rows = np.arange(7)
    return [pixels.train(step, rows) for step in range(3)] + list(pixels.test_batches([0, 3], 3))


def folder_of(cache: Path, view: str) -> Path:
    (found,) = (each.parent for each in cache.glob("*/cache.json") if view in each.read_text())
    return found


def test_crops_are_those_without_a_cache(directory, made, tmp_path, monkeypatch):
    boxes, drawn = [], views.inception_box
    monkeypatch.setattr(views, "inception_box", lambda *asked: boxes.append(drawn(*asked)) or boxes[-1])
    runs = [batches(pixels_of(load(directory, cache, side=side))) for cache, side in ((made, KEPT), (tmp_path, 0))]
    assert len(boxes) == 42
    assert boxes[:21] == boxes[21:]
    for kept, decoded in zip(runs[0][:3], runs[1][:3], strict=True):
        difference = (kept.int() - decoded.int()).abs()
        assert difference[:, 1:-1, 1:-1].max() <= 4  # of 255; at the rim filters see beyond the crop or do not
        assert difference.float().mean() < 1
    for kept, decoded in zip(runs[0][3:], runs[1][3:], strict=True):
        assert torch.equal(kept, decoded), "test images are kept as they are judged"


def test_without_inception_crops_nothing_changes(directory, tmp_path):
    runs = [
        batches(pixels_of(load(directory, tmp_path, side=side, cropped=False), smallest=None)) for side in (SIDE, 0)
    ]
    for kept, decoded in zip(*runs, strict=True):
        assert torch.equal(kept, decoded)


def test_any_number_of_workers_and_any_share_gives_the_same(directory, made):
    whole = batches(pixels_of(load(directory, made)))
    data = load(directory, made, workers=2)
    pixels = pixels_of(data)
    for one, other in zip(whole, batches(pixels), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(pixels.train(1, np.array([5, 2])), whole[1][[5, 2]])
    data.decoders.close()


def test_a_crop_is_bilinear_between_the_centres_of_pixels():
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (3, KEPT, KEPT, 3), dtype=np.uint8))
    boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.1, 0.3, 0.4, 0.7], [0.5, 0.5, 1.0, 0.9]])
    found = cut(images, boxes, 40).int()
    for image, box, one in zip(images, boxes, found, strict=True):
        box = [KEPT * float(share) for share in box]
        expected = Image.fromarray(image.numpy()).resize((40, 40), Image.Resampling.BILINEAR, box=box)
        assert np.abs(np.asarray(expected).astype(int) - one.numpy()).max() <= 1  # Pillow rounds twice


def load_and_end(directory: str, cache: str, ending: str, image: str) -> None:
    """Load, and end within the writing of an image, of which half is there: by a signal, or an exception."""
    written, pwrite = [], os.pwrite

    def write(file, data, offset):
        written.append(offset)
        if len(written) <= int(image):
            return pwrite(file, data, offset)
        pwrite(file, bytes(data)[: KEPT**2], offset)
        if ending == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", write)
        load(directory, cache)


@pytest.mark.parametrize(
    ("killed_at", "ending"),
    [(1, "exception"), (6, "exception"), pytest.param(6, "signal", marks=pytest.mark.survival)],
)
def test_a_builder_that_was_killed_goes_on(directory, made, tmp_path, killed_at, ending, capsys):
    asked = (str(directory), str(tmp_path), ending, str(killed_at))
    if ending == "signal":
        call = f"from {__name__} import load_and_end; load_and_end(*{asked})"
        done = subprocess.run([sys.executable, "-c", call], env=environment(), timeout=PATIENCE, check=False)
        assert done.returncode == -signal.SIGKILL
    else:
        with pytest.raises(KeyboardInterrupt):
            load_and_end(*asked)
    folder = folder_of(tmp_path, "WholeImage")
    assert json.loads((folder / "cache.json").read_text())["contents"] == ""
    capsys.readouterr()
    load(directory, tmp_path)
    assert f"{TRAIN - killed_at} of {TRAIN} images decoded" in capsys.readouterr().out
    for name in ("pixels.bin", "rows.npy", "cache.json"):
        assert (folder / name).read_bytes() == (folder_of(made, "WholeImage") / name).read_bytes()


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_a_changed_pixel_is_found_when_it_is_read_and_mended(directory, copied, capsys):
    folder = folder_of(copied, "WholeImage")
    good = (folder / "pixels.bin").read_bytes()
    flip(folder / "pixels.bin", 4 * KEPT**2 * 3 + 100)
    with pytest.raises(UserError, match=r"damaged \(image 4 is not what was written\); `python -m experiments cache`"):
        batches(pixels_of(load(directory, copied)))
    capsys.readouterr()
    mended = load(directory, copied, check=True)
    assert f"1 of {TRAIN} images decoded" in capsys.readouterr().out
    assert (folder / "pixels.bin").read_bytes() == good
    batches(pixels_of(mended))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda folder: os.truncate(folder / "pixels.bin", 99), r"pixels.bin has 99 bytes, expected 17,280"),
        (lambda folder: flip(folder / "rows.npy", -1), "rows.npy is not what was written"),
        (lambda folder: os.truncate(folder / "rows.npy", 9), "rows.npy is not what was written"),
        (lambda folder: (folder / "cache.json").write_text("{"), "cannot be read as JSON"),
        (
            lambda folder: (folder / "cache.json").write_text(
                (folder / "cache.json").read_text().replace("WholeImage(side=24)", "WholeImage(side=32)")
            ),
            r"its view is 'WholeImage\(side=32\)', expected 'WholeImage\(side=24\)'; delete it",
        ),
    ],
)
def test_a_cache_that_is_not_what_was_sealed_is_refused(change, text, directory, copied):
    change(folder_of(copied, "WholeImage"))
    with pytest.raises(UserError, match=text):
        load(directory, copied)


def test_a_file_cut_short_while_a_run_reads_it_is_an_error(directory, copied):
    data = load(directory, copied)
    os.truncate(folder_of(copied, "WholeImage") / "pixels.bin", 5 * KEPT**2 * 3 + 7)
    with pytest.raises(UserError, match=r"damaged \(pixels.bin ends within image [5-9]\)"):
        batches(pixels_of(data))


def test_images_that_changed_are_noticed(directory, tmp_path):
    source = Path(shutil.copytree(directory, tmp_path / "images"))
    load(source, tmp_path / "cache")
    os.utime(source / "train" / "ant" / "0.png", (1, 1))
    with pytest.raises(UserError, match="made before the images were changed or copied; delete it"):
        load(source, tmp_path / "cache")


def test_two_decoders_are_not_mixed(directory, copied, monkeypatch):
    monkeypatch.setattr(pixel_cache, "version", lambda _: "another one")
    assert load(directory, copied).caches.train.about["decoder"].startswith("Pillow")
    with pytest.raises(UserError, match=r"its decoder is 'Pillow .*', expected 'another one'; delete it"):
        load(directory, copied, check=True)


def test_eight_readers_at_once_read_the_same(directory, made):
    data = load(directory, made, workers=0)
    cache = data.caches.train
    expected = np.fromfile(cache.folder / "pixels.bin", dtype=np.uint8).reshape(TRAIN, KEPT, KEPT, 3)[cache.place]

    def reader(seed: int) -> bool:
        ids = np.random.default_rng(seed).integers(0, TRAIN, 200)
        into = np.empty((200, KEPT, KEPT, 3), dtype=np.uint8)
        for job in cache.read(ids, into):
            job.result()
        return np.array_equal(into, expected[ids])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(reader, range(8)))


def test_a_disk_that_is_too_small_is_refused_before_anything_is_decoded(directory, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 10_000))
    monkeypatch.setattr(pixel_cache, "decode_with_sizes", lambda _: pytest.fail("decoded"))
    with pytest.raises(UserError, match=r"10 images of 24×24 pixels need 0.00 GB more.* a smaller side"):
        load(directory, tmp_path)


def test_who_finds_another_at_it_waits_and_takes_what_that_made(directory, copied, tmp_path, monkeypatch):
    folder = folder_of(copied, "WholeImage")
    sealed = (folder / "cache.json").read_text()
    (folder / "cache.json").unlink()
    waiting = threading.Event()
    monkeypatch.setattr(pixel_cache, "say", lambda text: waiting.set() if "waiting for the process" in text else None)
    monkeypatch.setattr(pixel_cache, "decode_with_sizes", lambda _: pytest.fail("decoded again"))
    with (folder / "pixels.bin").open("r+b") as file, ThreadPoolExecutor(1) as pool:
        fcntl.flock(file, fcntl.LOCK_EX)
        job = pool.submit(load, directory, copied)
        assert waiting.wait(20)
        (folder / "cache.json").write_text(sealed)
        fcntl.flock(file, fcntl.LOCK_UN)
        assert len(job.result().caches.train.rows) == TRAIN


def test_what_cannot_be_decoded_is_named_or_left_out_and_counted(directory, tmp_path):
    source = Path(shutil.copytree(directory, tmp_path / "images"))
    (source / "train" / "ant" / "4.png").write_bytes(b"no picture")
    with pytest.raises(
        UserError, match=r"train/ant/4.png cannot be read as an image \(unknown format\); --skip-unread"
    ):
        load(source, tmp_path / "cache")
    data = load(source, tmp_path / "cache", terms=Terms(skip_unreadable=True, dropped=("unreadable",)))
    assert data.census.passed == {"unreadable": 1}
    assert len(data.caches.train.rows) == len(data.train) == TRAIN - 1


SETTINGS = ("lazy=true", f"image_size={SIDE}", "patch=8", "crop=inception", f"decoded_side={KEPT}")


def test_a_study_says_that_its_images_were_decoded_once(directory, tmp_path, tiny, capsys):
    words = ["--data", str(directory), "--cache", str(tmp_path / "cache"), "--set", *SETTINGS]
    limits = ("train_images=0", "test_images=0")
    assert main(["cache", "000-fig4", "--preset", "cpu", *words, *limits]) == 0
    assert f"decoded: {TRAIN} images in" in capsys.readouterr().out
    found = {}
    for name, more in (("kept", {}), ("decoded", {"settings": ("decoded_side=0",)})):
        settings = (*SETTINGS, *limits, *more.get("settings", ()))
        out = tiny(tmp_path / name, *settings, data=str(directory), cache=tmp_path / "cache", enqueue=True)
        found[name] = json.loads((out / "study.json").read_text())
    assert "images decoded" not in capsys.readouterr().out, "the cache was there"
    kept, decoded = found["kept"]["data"], found["decoded"]["data"]
    assert kept["text"].endswith(f"; training crops cut, without averaging, out of images resized to {KEPT}×{KEPT}")
    assert kept["decoded"]["train"]["view"] == f"WholeImage(side={KEPT})"
    assert kept["decoded"]["test"]["images"] == TEST
    assert "decoded" not in decoded
    assert kept["checksum"] != decoded["checksum"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["decoded_side=8"], "--set decoded_side: expected 16, the image_size, or more, got 8"),
        (["crop=pad"], "--set decoded_side: expected 16, the image_size (without crop=inception), got 24"),
        (["lazy=false"], "decode"),
        (["decoded_side=0"], "this study decodes for every step; --set lazy=true decoded_side=256"),
    ],
)
def test_settings_that_keep_nothing_are_refused(settings, text, directory, tmp_path, refusal):
    words = ["--data", str(directory), "--cache", str(tmp_path), "--set", *SETTINGS, *settings]
    assert text in refusal("cache", "000-fig4", "--preset", "cpu", *words)


class Codec(ModuleType):
    """nvImageCodec as far as it is used, on the CPU: what it decodes is Pillow's."""

    __version__ = "0.0"
    NVIMGCODEC_DEVICE_CURRENT, NVIMGCODEC_DEVICE_CPU_ONLY = -1, -99999
    BackendKind = SimpleNamespace(CPU_ONLY="cpu")
    ColorSpec = SimpleNamespace(SRGB="rgb")
    ImageBufferKind = SimpleNamespace(STRIDED_DEVICE="device")
    Backend = staticmethod(str)

    def CodeStream(self, raw):
        with Image.open(io.BytesIO(raw)) as image:
            channels = len(image.getbands())
            return SimpleNamespace(
                raw=raw, codec_name="jpeg", num_channels=channels, width=image.width, height=image.height
            )

    def DecodeParams(self, *, apply_exif_orientation, color_spec):
        assert (apply_exif_orientation, color_spec) == (False, "rgb")

    def Decoder(self, *, device_id, backends):
        assert (device_id, backends) == (self.NVIMGCODEC_DEVICE_CPU_ONLY, ["cpu"])
        self.decoded = []

        def decode(streams, params):
            self.decoded += [stream.num_channels for stream in streams]
            return [self.image(stream) for stream in streams]

        return SimpleNamespace(decode=decode)

    def image(self, stream):
        try:
            pixels = np.asarray(Image.open(io.BytesIO(stream.raw)).convert("RGB"))
        except OSError:
            return None
        array = pixels.__array_interface__
        return SimpleNamespace(
            width=stream.width, height=stream.height, buffer_kind="host", __array_interface__=array, pixels=pixels
        )


@pytest.fixture
def photographs(tmp_path) -> Path:
    """JPEGs of one, three and four channels, and a PNG."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 8), ("test", 2)):
        for number in range(count):
            coarse = rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)
            image = Image.fromarray(coarse).resize((43, 31), Image.Resampling.BICUBIC)
            folder = tmp_path / "photographs" / split / ("ant", "bee")[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            mode, ending = (("RGB", "jpg"), ("L", "jpg"), ("CMYK", "jpg"), ("RGB", "png"))[number // 2]
            image.convert(mode).save(folder / f"{number}.{ending}")
    return tmp_path / "photographs"


def install(codec: ModuleType | None, patch: pytest.MonkeyPatch) -> None:
    package = ModuleType("nvidia")
    if codec:
        package.nvimgcodec = codec
    patch.delitem(sys.modules, "nvidia.nvimgcodec", raising=False)
    patch.setitem(sys.modules, "nvidia", package)


def test_jpegs_are_decoded_by_nvimagecodec_where_asked_for(photographs, tmp_path, monkeypatch):
    codec = Codec("nvidia.nvimgcodec")
    install(codec, monkeypatch)
    ours = load(photographs, tmp_path / "cache")
    theirs = load(photographs, tmp_path / "cache", decoder="nvimgcodec")
    assert sorted(codec.decoded) == [1, 1, 3, 3], "four channels and PNGs are Pillow's"
    about = theirs.caches.train.about
    assert about["decoder"] == "nvImageCodec 0.0 on a CPU"
    assert theirs.caches.test.about["decoder"].startswith("Pillow")
    assert theirs.caches.train.sizes(np.arange(8)).tolist() == [[43, 31]] * 8
    found = [np.fromfile(each.caches.train.folder / "pixels.bin", dtype=np.uint8) for each in (ours, theirs)]
    assert np.abs(found[0].astype(int) - found[1]).max() <= 1  # the same filter, rounded once
    assert ours.checksum() != theirs.checksum()
    cut_short = photographs / "train" / "ant" / "0.jpg"
    cut_short.write_bytes(cut_short.read_bytes()[:-60])
    with pytest.raises(
        UserError, match=r"train/ant/0.jpg cannot be read as an image \(nvImageCodec cannot decode it\)"
    ):
        load(photographs, tmp_path / "again", decoder="nvimgcodec")


def test_nvimagecodec_that_is_not_there_is_named(photographs, tmp_path, monkeypatch):
    install(None, monkeypatch)
    with pytest.raises(UserError, match=r"jpeg_decoder=nvimgcodec: .*; pip install nvidia-nvimgcodec-cu12"):
        load(photographs, tmp_path, decoder="nvimgcodec")
    with pytest.raises(UserError, match=r"it decodes once, for crops; --set decoded_side=256 crop=inception"):
        load(photographs, tmp_path, decoder="nvimgcodec", cropped=False, side=SIDE)
