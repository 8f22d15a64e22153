"""The ViT: shapes, initialisation, what qk-norm and the gate add, and the counted operations."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attnkit_experiments.engine.counting import by_formula
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.images.model import SIZES, ViT, ViTConfig, forward_flops
from tests.library.arrays import LAYER, assert_close

CONFIG = ViTConfig(size="d64", patch=4, image=16, channels=3, classes=7)
MODEL = SIZES["d64"][1] * (LAYER + 2) + 2  # ops that follow one another: blocks with their MLP, embedding, head
RELU = dataclasses.replace(CONFIG, op="pointwise_attention", options={"activation": "relu", "alpha": 1.0})


def parameters(config: ViTConfig) -> int:
    return sum(parameter.numel() for parameter in ViT(config).parameters())


@pytest.fixture
def images():
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_tokens_are_the_patches_row_by_row():
    model = ViT(dataclasses.replace(CONFIG, channels=1))
    image = torch.zeros(1, 1, 16, 16)
    image[0, 0, 4:8, 8:12] = 1
    blank = model.tokens(torch.zeros_like(image))
    changed = (model.tokens(image) != blank).any(-1).nonzero()[:, 1]
    assert changed.tolist() == [1 * 4 + 2]


@pytest.mark.parametrize("config", [CONFIG, RELU, dataclasses.replace(CONFIG, pool="tok")])
def test_a_new_model_answers_zero_and_inspection_changes_nothing(config, images):
    model = ViT(config)
    assert torch.equal(model(images), torch.zeros(2, 7))
    torch.nn.init.normal_(model.head.weight)
    logits, records = model.inspect(images, fields=("total", "entropy"))
    assert_close(logits, model(images), MODEL)
    assert len(records) == 4
    tokens = 17 if config.pool == "tok" else 16
    assert config.tokens == tokens
    assert records[0].weights.shape == (2, 2, tokens, tokens)
    assert_close(records[0].statistics.total, records[0].weights.sum(-1))


def test_initialisation_follows_big_vision():
    model = ViT(CONFIG)
    limit = (6 / (64 + 256)) ** 0.5
    hidden = model.blocks[0].mlp[0].weight
    assert 0.95 * limit < hidden.abs().max() <= limit
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert float(module.bias.detach().abs().max()) < 1e-5
            assert bool(module.bias.any()) == ("mlp" in name)
    assert 0.9 * 64**-0.5 < model.position.std() < 1.1 * 64**-0.5


def test_softmax_and_pointwise_have_equal_parameters_and_the_extras_are_counted():
    width, depth, _, heads = SIZES["d64"]
    assert parameters(CONFIG) == parameters(RELU)
    assert parameters(RELU) - parameters(dataclasses.replace(RELU, qk_norm=False)) == depth * 2 * width // heads
    assert parameters(dataclasses.replace(RELU, gate="silu")) - parameters(RELU) == depth * (width * width + width)


@pytest.mark.parametrize("changes", [{}, {"gate": "silu"}, {"pool": "tok"}, {"size": "w96"}])
def test_counted_operations_are_those_that_torch_sees(changes, images):
    config = dataclasses.replace(RELU, **changes)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        by_formula(ViT(config))(images)
    assert counter.get_total_flops() == 2 * forward_flops(config)


def test_published_sizes():
    assert {name: SIZES[name] for name in ("S", "B", "L")} == {
        "S": (384, 12, 1536, 6),
        "B": (768, 12, 3072, 12),
        "L": (1024, 24, 4096, 16),
    }
    with torch.device("meta"):
        small = ViT(ViTConfig(size="S", patch=16, image=224, channels=3, classes=1000, qk_norm=False))
    assert sum(parameter.numel() for parameter in small.parameters()) == 22_050_664 - 2 * 384, (
        "no class token, no position for it"
    )


def test_a_patch_that_does_not_fit_and_an_unknown_size_are_errors():
    with pytest.raises(ValueError, match="images of 16 pixels cannot be cut into patches of 5"):
        dataclasses.replace(CONFIG, patch=5)
    with pytest.raises(UserError, match="unknown model size 'd46'; did you mean 'd64'"):
        dataclasses.replace(CONFIG, size="d46")
