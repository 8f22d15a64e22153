"""What trainings do for speed changes nothing but time; and how fast they were is counted, not guessed."""

import dataclasses
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from attnkit_experiments.data.images import digits
from attnkit_experiments.data.images.pixels import ResidentPixels
from attnkit_experiments.engine import metrics
from attnkit_experiments.engine.environment import describe
from attnkit_experiments.engine.optim import TrainConfig, adamw, make_optimizer
from attnkit_experiments.engine.speed import Speed, Work, peak_tflops
from attnkit_experiments.engine.train import Run, reproducible, tensor_float32
from attnkit_experiments.engine.world import ALONE
from attnkit_experiments.images.task import AugmentConfig
from attnkit_experiments.soft.model import SoftConfig, SoftVisionTransformer
from attnkit_experiments.soft.task import SoftImageTask

CPU = torch.device("cpu")
BFLOAT16, FLOAT32 = TrainConfig(steps=1, precision="bfloat16"), TrainConfig(steps=1)


def flags():
    products, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    filled = torch.utils.deterministic.fill_uninitialized_memory
    return products.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, filled


def test_a_run_chooses_what_torch_does_and_leaves_it_as_it_was():
    before = flags()
    with reproducible(1):
        assert flags() == (False, False, False, False)
        with tensor_float32(True):
            assert flags() == (True, True, False, False)
        assert flags() == (False, False, False, False)
    with reproducible(1, deterministic=False, poison=True):
        assert flags() == (False, False, True, True)
    assert flags() == before


def test_choices_are_recorded():
    keys = ("adamw", "cudnn_benchmark", "fill_uninitialized_memory")
    for deterministic in (True, False):
        facts = describe(CPU, 1, deterministic)
        assert tuple(facts[key] for key in keys) == ("plain", not deterministic, False)


def learn(model, optimizer, steps=5):
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_fused_adamw_is_adamw_up_to_rounding():
    """Ten thousandths of the longest way that a weight can have gone, lr a step."""
    config, weights = TrainConfig(steps=1, lr=1e-2), []
    for fused in (None, True):
        torch.manual_seed(9)
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
        optimizer = make_optimizer(model, config)
        assert all(group["fused"] is None for group in optimizer.param_groups)
        for group in optimizer.param_groups:
            group["fused"] = fused
        weights.append(learn(model, optimizer))
    for plain, other in zip(*weights, strict=True):
        assert (plain - other).abs().max() <= 1e-4 * 5 * config.lr


def test_adamw_is_fused_on_a_gpu():
    with FakeTensorMode():
        parameter = nn.Parameter(torch.empty(2, 2, device="cuda"))
        (group,) = adamw([{"params": [parameter]}], FLOAT32).param_groups
    assert group["fused"]


@pytest.mark.parametrize("overlap", [True, False])
def test_channels_last_are_the_same_pictures(overlap):
    torch.manual_seed(0)
    config = SoftConfig(size="mini", image=32, channels=3, classes=5, landmarks=4, stem_stride=2, overlap=overlap)
    model, seen = SoftVisionTransformer(config).double(), []
    pictures = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    convolution = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    convolution.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].stride()))
    runs = []
    for channels_last in (False, True):
        model.config = dataclasses.replace(config, channels_last=channels_last)
        model.zero_grad()
        logits = model.train()(pictures)
        logits.square().sum().backward()
        runs.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
    assert seen == [(3 * 32 * 32, 32 * 32, 32, 1), (3 * 32 * 32, 1, 3 * 32, 3)]
    largest = max(float(x.abs().max()) for x in runs[0])  # some gradients are 0 but for rounding
    for ours, theirs in zip(*runs, strict=True):
        assert (ours - theirs).abs().max() <= 1e-9 * largest


@pytest.mark.parametrize(
    ("name", "peaks"),
    [
        ("NVIDIA H100 80GB HBM3", (989.5, 494.5, 67.0)),
        ("NVIDIA H100 PCIe", (756.5, 378.0, 51.0)),
        ("NVIDIA H200", (989.5, 494.5, 67.0)),
        ("NVIDIA H200 NVL", (835.5, 417.5, 60.0)),
        ("NVIDIA A100-SXM4-80GB", (312.0, 156.0, 19.5)),
        ("NVIDIA L40S", (362.05, 183.0, 91.6)),
        ("NVIDIA L40", (None, None, None)),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", (None, None, None)),
        ("NVIDIA A10G", (None, None, None)),
        ("AMD Instinct MI300X", (None, None, None)),
    ],
)
def test_peaks_are_those_of_the_device_and_the_precision(name, peaks):
    configs = (BFLOAT16, TrainConfig(steps=1, tf32=True), FLOAT32)
    assert tuple(peak_tflops(name, config) for config in configs) == peaks


def test_rates_are_counted(monkeypatch):
    """10¹² FLOPs forward in 2 s on two H100: 1.5 TFLOP/s of 1,979."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    row = Speed(Work("images", 1), BFLOAT16, torch.device("cuda"), 2).row(100, 1e12, 2.0, 0.5)
    assert row == {
        "samples_per_s": 50.0, "input_share": 0.25, "tflops_per_s": 1.5, "mfu": 0.000758, "peak_bytes": 7,
    }  # fmt: skip
    there = Speed(Work("tokens", 64), BFLOAT16, torch.device("cuda"), 1)
    assert there.text({"samples_per_s": 50.0}) == "3,200 tokens/s"
    here = Speed(Work("images", 1), BFLOAT16, CPU, 1)
    assert here.row(100, 1e12, 2.0, 0.0).keys() == {"samples_per_s", "input_share", "tflops_per_s"}


def test_a_summary_has_what_all_rows_have(tmp_path):
    """Shares of the time of all steps but the first five, the median of rates, the largest peak."""
    row = {"step": 1, "loss": 1.0, "grad_norm": 1.0, "samples": 2, "samples_per_s": 1.0}
    rows = [row | {"input_share": 1.0, "tflops_per_s": 9.0, "peak_bytes": 1}] * 5
    for rate, share, tflops, peak in ((2.0, 0.5, 1.0, 5), (1.0, 0.0, 3.0, 7), (2.0, 0.5, 2.0, 6)):
        more = {"samples_per_s": rate, "input_share": share, "tflops_per_s": tflops, "peak_bytes": peak}
        rows.append(row | more)
    with metrics.Metrics(tmp_path / "m.jsonl", keep_until=0) as file:
        for each in (*rows, {"step": 8, "evaluation": {}}):
            file.write(each)
    found = metrics.summary(tmp_path / "m.jsonl", 1.0)
    assert (found["input_share"], found["tflops_per_s"], found["peak_bytes"]) == (0.25, 2.0, 7)
    assert "mfu" not in found


def small_run():
    model = SoftConfig("mini", image=16, channels=1, classes=10, landmarks=4, stem_stride=1)
    augmentation = AugmentConfig(padding=1, flip=False, mixup=0.2)
    make = partial(
        SoftImageTask, digits.load(16), model, augmentation, batch=8, precision="float32", seed=0, device=CPU,
        build=SoftVisionTransformer,
    )  # fmt: skip
    return Run(make, TrainConfig(steps=2), CPU, ALONE)


def test_nothing_reads_memory_before_it_is_written():
    """With NaN in all memory that torch allocates the numbers are the same."""
    losses = []
    for poison in (False, True):
        with reproducible(1, poison=poison):
            assert bool(torch.empty(100).isnan().all()) >= poison
            run = small_run()
            losses.append([(step.loss.item(), step.norm.item()) for step in map(run.step, range(2))])
    assert losses[0] == losses[1]


def test_waiting_for_samples_is_told_from_learning(tiny, tmp_path, monkeypatch):
    train, pause = ResidentPixels.train, 0.05

    def slow(self, *of):
        time.sleep(pause)
        return train(self, *of)

    monkeypatch.setattr(ResidentPixels, "train", slow)
    out = tiny(tmp_path / "out", "steps=2")
    rows = metrics.read_metrics(out / "cells" / "relu-alpha1-seed0" / "metrics.jsonl")
    for row in (row for row in rows if "loss" in row):
        assert row["input_share"] * row["samples"] / row["samples_per_s"] >= 0.99 * pause


def test_a_process_that_torch_lets_change_no_flag_trains_too(monkeypatch):
    """torch's own test utilities call `torch.backends.disable_global_flags()`."""
    monkeypatch.setitem(torch.backends.disable_global_flags.__globals__, "__allow_nonbracketed_mutation_flag", False)
    with pytest.raises(RuntimeError, match="flags"):
        torch.backends.cudnn.benchmark = True
    before = torch.are_deterministic_algorithms_enabled(), flags()
    with reproducible(1), tensor_float32(True):
        assert flags() == (True, True, False, False)
    assert (torch.are_deterministic_algorithms_enabled(), flags()) == before
