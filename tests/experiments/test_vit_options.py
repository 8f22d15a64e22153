"""What the ViT recipes choose: fixed positions, pre-logits, head bias, learned scales, sigmoid loss, judged classes."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from attnkit_experiments.data.images import digits
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.images.learned_scale import ScaledValues, factors_of
from attnkit_experiments.images.model import SIZES, ViT, ViTConfig, sincos_2d
from attnkit_experiments.images.task import AugmentConfig, ImageTask, sigmoid_loss, softmax_loss
from tests.library.arrays import LAYER, assert_agrees, assert_close

RELU = ViTConfig(
    size="d64", patch=4, image=8, channels=1, classes=10, op="pointwise_attention",
    options={"activation": "relu", "alpha": 1.0},
)  # fmt: skip
KINDS = ("gain-layer", "gain-head", "alpha-layer", "alpha-head")
MODEL = SIZES["d64"][1] * (LAYER + 2) + 3  # ops that follow one another: blocks with their MLP, embedding, head


@pytest.fixture
def images():
    return torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def vit(**changes) -> ViT:
    torch.manual_seed(0)
    model = ViT(dataclasses.replace(RELU, **changes))
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    return model


def test_positions_are_sines_and_cosines_of_column_then_row():
    table = sincos_2d(3, 16)
    assert table.shape == (9, 16)
    omega = 10_000.0 ** -(np.arange(4) / 3)
    row, column = 2, 1
    wanted = [np.sin(column * omega), np.cos(column * omega), np.sin(row * omega), np.cos(row * omega)]
    assert_agrees(table[row * 3 + column], np.concatenate(wanted))


def test_fixed_positions_are_no_parameter_and_no_weight():
    model = vit(position="sincos2d")
    assert "position" not in dict(model.named_parameters())
    assert "position" not in model.state_dict()
    with pytest.raises(ValueError, match="position sincos2d needs a width of 8 or more that is a multiple of 4"):
        dataclasses.replace(RELU, size="odd", position="sincos2d")


@pytest.fixture(autouse=True)
def odd_size(monkeypatch):
    monkeypatch.setitem(__import__("attnkit_experiments.images.model", fromlist=["SIZES"]).SIZES, "odd", (6, 1, 8, 1))


def test_pre_logits_are_the_tanh_that_the_head_reads(images):
    model, images = vit(pre_logits=True, pool="tok").double(), images.double()
    x = model.tokens(images)
    for block in model.blocks:
        x = block(x)
    wanted = torch.tanh(model.norm(x)[:, 0] @ model.pre_logits.weight.T + model.pre_logits.bias)
    assert_close(model.features(images), wanted, MODEL)
    assert_close(model(images), wanted @ model.head.weight.T, MODEL)
    spread = model.pre_logits.weight.detach()
    assert 0.9 < float(spread.std() * math.sqrt(64)) < 1.1
    assert float(spread.abs().max()) > 2 * math.sqrt(6 / 128), "normal, not Xavier-uniform"


def test_a_class_token_of_zeros_learns_under_relu(images):
    """It is at the kink of relu: only the MLPs' tiny biases move it, as in big_vision."""
    model = vit(pool="tok")
    assert float(model.features(images).detach().std()) > 0.1
    for block in model.blocks:
        torch.nn.init.zeros_(block.mlp[0].bias)
        torch.nn.init.zeros_(block.mlp[2].bias)
    assert not model.features(images).any()


def test_a_head_bias_is_where_the_answers_begin(images):
    assert torch.equal(ViT(dataclasses.replace(RELU, head_bias=-6.9))(images), torch.full((3, 10), -6.9))


@pytest.mark.parametrize("kind", KINDS)
def test_a_learned_scale_begins_as_the_fixed_one(kind, images):
    plain, learned = vit(), vit(learned_scale=kind)
    assert torch.equal(plain(images), learned(images))
    values = [m.value for m in learned.modules() if isinstance(m, ScaledValues)]
    assert [len(v) for v in values] == [2 if kind.endswith("head") else 1] * 4
    learned(images).sum().backward()
    assert all(v.grad is not None and v.grad.abs().sum() > 0 for v in values)


def test_a_learned_alpha_is_the_op_at_that_alpha(images):
    fixed, learned = vit(options=RELU.options | {"alpha": 0.25}).double(), vit(learned_scale="alpha-head").double()
    for module in learned.modules():
        if isinstance(module, ScaledValues):
            torch.nn.init.constant_(module.value, 0.25)
    assert_close(learned(images.double()), fixed(images.double()), MODEL)


def test_a_learned_gain_is_the_ops_gain_per_head(images):
    images = images.double()
    learned, one = vit(learned_scale="gain-head").double(), vit(options=RELU.options | {"gain": 3.0}).double()
    for module in learned.modules():
        if isinstance(module, ScaledValues):
            torch.nn.init.constant_(module.value, math.log(3))
    assert_close(learned(images), one(images), MODEL)
    assert_close(factors_of(learned.blocks[0].attention), torch.full((2,), 3.0, dtype=torch.float64))
    fields = ("total", "entropy")
    (_, ours), (_, theirs) = (model.inspect(images, fields=fields) for model in (learned, one))
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a.weights, b.weights, MODEL)
        assert_close(a.statistics.total, b.statistics.total, MODEL)
        assert_close(a.statistics.entropy, b.statistics.entropy, MODEL)


def test_a_learned_scale_is_for_pointwise_attention():
    with pytest.raises(ValueError, match="learned_scale is for pointwise_attention"):
        dataclasses.replace(RELU, op="softmax_attention", options={}, learned_scale="gain-layer")


def test_losses_by_hand():
    z = np.random.default_rng(0).standard_normal((4, 5))
    t = np.eye(5)[[0, 3, 3, 1]] * 0.7 + np.eye(5)[[1, 1, 2, 4]] * 0.3
    log_sigma = -np.log1p(np.exp(-z))
    by_hand = -(t * log_sigma + (1 - t) * (log_sigma - z)).sum()
    assert_close(sigmoid_loss(torch.tensor(z), torch.tensor(t)), by_hand)
    log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
    assert_close(softmax_loss(torch.tensor(z), torch.tensor(t)), -(t * log_p).sum())
    with pytest.raises(ValueError, match="the sigmoid loss has no label smoothing"):
        sigmoid_loss(torch.tensor(z), torch.tensor(t), 0.1)


def test_only_judged_classes_are_answers():
    data = digits.load().take(20, 37)  # 4 images of each digit below 7, 3 of the others
    task = ImageTask(
        data, RELU, AugmentConfig(crop="none"), batch=4, precision="float32", seed=0, device=torch.device("cpu"),
        judged=(8, 5),
    )  # fmt: skip
    with torch.no_grad():
        task.model.head.bias.copy_(torch.tensor([9.0, 0, 0, 0, 0, 2, 0, 0, 1, 0]))
    assert_agrees(task.evaluate()["accuracy"], (data.test_labels == 5).mean(), dtype="float32")
    task.judged = torch.arange(10)
    assert_agrees(task.evaluate()["accuracy"], (data.test_labels == 0).mean(), dtype="float32")


def test_the_recipe_of_big_vision_trains(tiny, tmp_path):
    settings = ("loss=sigmoid", "smoothing=0", "head_bias=-2.3", "pool=tok", "pre_logits=yes", "mlp_gelu=tanh")
    out = tiny(tmp_path / "out", *settings, "position=sincos2d", "learned_scale=alpha-head", "optimizer=adafactor")
    found = json.loads((out / "cells" / "relu-alpha1-seed0" / "result.json").read_text())
    assert found["first_loss"] == pytest.approx(10 * math.log1p(math.exp(-2.3)) + 2.3, rel=0.05)


def test_a_sigmoid_loss_with_smoothing_is_refused_before_training(tiny, tmp_path):
    with pytest.raises(UserError, match=r"smoothing must be 0, got 0\.1"):
        tiny(tmp_path / "out", "loss=sigmoid")
