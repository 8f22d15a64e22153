"""`python -m benchmarks training`: the plain loop does the same work, learns, and takes turns with experiments."""

import json

import torch
from torch.utils.flop_counter import FlopCounterMode

from attnkit_experiments.images.model import SIZES, ViT, ViTConfig
from benchmarks import plain_vit, training
from benchmarks.__main__ import main


def plain_model(size: str, patch: int, side: int) -> plain_vit.ViT:
    width, depth, hidden, heads = SIZES[size]
    return plain_vit.ViT(width, depth, hidden, heads, patch, side, training.CLASSES)


def test_both_models_have_the_same_weights_and_products():
    config = ViTConfig("d64", 4, 16, 3, training.CLASSES)
    ours, plain = ViT(config), plain_model("d64", 4, 16)
    count = [sum(p.numel() for p in model.parameters()) for model in (ours, plain)]
    assert count[0] == count[1]
    flops = []
    for model in (ours, plain):
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(2, 3, 16, 16))
        flops.append(counter.get_total_flops())
    attention = 4 * 2 * 2 * 2 * 16 * 16 * 64  # q·kᵀ and w·v of SDPA; a kernel of attnkit is not counted
    assert flops[1] - flops[0] in (0, attention)


def test_the_plain_loop_learns():
    torch.manual_seed(0)
    images = torch.zeros(64, 8, 8, 3, dtype=torch.uint8)
    labels = torch.arange(64) % 2
    images[labels == 1] = 255
    loop = plain_vit.training(plain_model("d64", 4, 8), images, labels, 32)
    losses = [next(loop) for _ in range(12)]
    assert losses[-1] < losses[0] / 2


def test_an_image_is_shifted_and_half_of_them_are_flipped():
    torch.manual_seed(0)
    images = torch.zeros(200, 8, 8, 3, dtype=torch.uint8)
    images[:, 3, 2] = 255
    rows, columns = (plain_vit.augmented(images)[:, 0] == 1).nonzero()[:, 1:].T
    assert set(rows.tolist()) == set(range(8))
    assert set(columns.tolist()) == set(range(8))


def test_contenders_take_turns_and_are_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training, "STEPS", 1)
    monkeypatch.setattr(training, "BATCH", 2)
    monkeypatch.setattr(training.measure, "__defaults__", (("d64",),))
    path = tmp_path / "found.json"
    assert main(["training", "--rounds", "2", "--threads", "1", "--out", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["contender"] for row in rows] == [training.PLAIN, *training.OPS]
    assert rows[0]["of_plain"]["median"] == 1
    assert all(row["seconds"]["lowest"] > 0 for row in rows)
    assert "of the plain loop" in capsys.readouterr().out
