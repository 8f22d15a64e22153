"""What a model costs block by block: known times, known peaks, and the command."""

import json

import pytest
import torch
from torch import nn

from attnkit_experiments.__main__ import main
from attnkit_experiments.commands import cost
from attnkit_experiments.commands.cost import block_times, named_blocks
from attnkit_experiments.images.model import Block

from .translation_cases import TINY

CPU = torch.device("cpu")
VIT = ("image_size=8", "patch=4", "train_images=60", "test_images=30", "batch=12", "steps=6")


class Clock:
    """A clock that only blocks move on: seconds, which a machine's load cannot change."""

    def __init__(self):
        self.seconds = 0.0

    def perf_counter(self):
        return self.seconds


class Slow(torch.autograd.Function):
    """x, `forward` seconds later, and `backward` seconds later on the way back."""

    @staticmethod
    def forward(ctx, x, clock, forward, backward):
        ctx.clock, ctx.backward_seconds = clock, backward
        clock.seconds += forward
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.seconds += ctx.backward_seconds
        return gradient, None, None, None


class Sleeper(nn.Module):
    def __init__(self, *given):
        super().__init__()
        self.given = given

    def forward(self, x):
        return Slow.apply(x, *self.given)


def test_times_are_those_of_each_block_in_its_passes(monkeypatch):
    """A block that is called twice has the sum."""
    clock = Clock()
    monkeypatch.setattr(cost, "time", clock)
    blocks = nn.ModuleList([Sleeper(clock, 0.25, 0.0625), Sleeper(clock, 0.5, 4.0)])
    x = torch.ones(3, requires_grad=True)

    def step():
        clock.seconds += 1.0
        blocks[1](blocks[0](blocks[0](x))).sum().backward()

    found = block_times(step, {"first": blocks[0], "second": blocks[1]}, CPU, 3)
    assert found == {"first": (500.0, 125.0), "second": (500.0, 4000.0)}
    assert not any(block._forward_hooks or block._backward_hooks for block in blocks)


def test_of_blocks_in_blocks_the_outer_ones_are_named():
    inner = nn.Sequential(nn.ModuleList([nn.Linear(1, 1)]))
    assert list(named_blocks(nn.ModuleDict({"layers": nn.ModuleList([inner, nn.Linear(1, 1)])}))) == [
        "layers.0",
        "layers.1",
    ]


@pytest.fixture
def profiled(tmp_path, capsys):
    """Run the command; what it wrote, and what it said."""

    def run(recipe, *settings, words=()):
        out = tmp_path / "profile.json"
        given = ["--preset", "cpu", "--device", "cpu", "--threads", "1", "--repeats", "2", "--set", *settings]
        assert main(["profile", recipe, *given, "--cache", str(tmp_path), "--out", str(out), *words]) == 0
        return json.loads(out.read_text()), capsys.readouterr().out

    return run


def test_a_vision_transformer_block_by_block(profiled):
    found, said = profiled("000-fig4", *VIT, words=("--data", "digits", "--variant", "relu-alpha1-gate"))
    step, blocks = found["step"], found["blocks"]
    assert found["variant"] == "relu-alpha1-gate"
    assert [block["name"] for block in blocks] == [f"blocks.{n}" for n in range(4)]
    one = Block(
        "d64", op="pointwise_attention", options={"activation": "relu", "alpha": 1.0}, qk_norm=True, gate="silu"
    )
    assert {block["parameters"] for block in blocks} == {sum(p.numel() for p in one.parameters())}
    assert step["samples"] == 12
    assert step["fastest_ms"] <= step["ms"] <= step["slowest_ms"]
    # gradients of its weights in float32 and the hidden layer of its MLP, of 12 images of 4 tokens
    least = 4 * blocks[0]["parameters"] + 4 * 12 * 4 * 256
    assert all(least < block["peak_bytes"] < 4 * least for block in blocks)
    assert step["peak_bytes"] > 4 * step["parameters"]
    assert f"{step['samples_per_s']:,.1f} samples a second" in said
    assert said.count("blocks.") == 4


def test_blocks_that_share_a_state_have_no_peak_of_their_own(profiled, corpus):
    words = ("--data", str(corpus / "pairs"), "--variant", "vanilla")
    found, said = profiled("001-table4", *TINY, words=words)
    peaks = {block["name"].partition(".")[0]: block["peak_bytes"] for block in found["blocks"]}
    assert None in peaks.values()
    assert "not alone" in said


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["000-fig4", "--variant", "relu"], "unknown variant of 000-fig4 'relu'"),
        (["000-fig4", "--set", "compile=true"], "--set compile=false"),
        (["002-fig1b"], "unknown recipe that trains '002-fig1b'"),
        (["000-fig4", "--repeats", "0"], "--repeats must be at least 1, got 0"),
    ],
)
def test_a_mistake_is_answered_in_one_line(words, text, tmp_path, refusal):
    given = ["--data", "digits", "--preset", "cpu", "--cache", str(tmp_path), "--set", *VIT]
    assert text in refusal("profile", *words, *given)
