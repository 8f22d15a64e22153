"""`python -m benchmarks input`: every path is measured, and what a model needs is counted operations over a peak."""

import json

import pytest

from attnkit_experiments.images.model import ViTConfig, forward_flops
from benchmarks.__main__ import main


def test_every_path_is_measured_and_a_need_predicted(tmp_path, capsys):
    path = tmp_path / "found.json"
    words = ["--images", "5", "--rounds", "2", "--workers", "1", "--size", "32", "--side", "40", "--share", "0.5"]
    assert main(["input", *words, "--out", str(path)]) == 0
    found = json.loads(path.read_text())
    rate = {row["path"]: row["images_per_second"]["median"] for row in found["rows"]}
    assert [*rate] == [
        "decode once into the cache", "decode, inception crop", "decode, test image", "read from the cache, first time",
        "read from the cache", "draw crops", "cut crops, cpu", "decode, inception crop, 1 worker",
        "read from the cache and draw crops, 1 worker",
    ]  # fmt: skip
    assert min(rate.values()) > 0
    assert rate["read from the cache"] > 3 * rate["decode, inception crop"]
    assert found["about"]["encoded_bytes"] > 10_000
    (needed,) = (row for row in found["predicted"]["rows"] if (row["preset"], row["model"]) == ("paper", "S/16"))
    flops = 3 * forward_flops(ViTConfig("S", 16, 224, 3, 21_843))
    assert needed["images_per_second"] == pytest.approx(0.5 * 989.4e12 / flops, abs=1)
    cores = needed["images_per_second"] / rate["decode, inception crop"]
    assert needed["cores_decoding"] == pytest.approx(cores, rel=0.01)
    assert "predicted for one H100 at 50% of its peak" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--rounds", "1"], ["--share", "0"], ["--images", "1"]])
def test_what_cannot_be_measured_is_refused(words, capsys):
    assert main(["input", *words]) == 2
    assert "must" in capsys.readouterr().err
