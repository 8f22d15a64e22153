"""Stock models of transformers train, generate with an assistant and compile as they do with eager attention."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from attnkit.integrations import transformers as integration
from tests.integrations.counting import Calls, count
from tests.integrations.test_transformers import close, llama, padded

LAYERS = 2

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The ops that run; variants get theirs when they are registered."""
    counted = count(monkeypatch, "softmax_attention", "pointwise_attention")
    integration.register_variant("counted_softmax", "softmax")
    integration.register_variant("counted_relu", "relu")
    return counted


def pair() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """The same weights with eager attention and with attnkit's; each has a config of its own."""
    eager, ours = llama("eager", torch.float32), llama("counted_softmax", torch.float32)
    assert eager.config is not ours.config
    assert eager.model.layers[0].self_attn.config is not ours.model.layers[0].self_attn.config
    return eager, ours


def gradients(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    model(**batch, labels=batch["input_ids"]).loss.backward()
    return [p.grad for p in model.parameters()]


def test_gradient_checkpointing(calls):
    eager, ours = pair()
    expected = gradients(eager.train(), padded(False))
    assert not calls
    ours.activation_checkpointing_enable()
    actual = gradients(ours.train(), padded(False))
    assert calls == ["softmax_attention"] * 2 * LAYERS, "once forward, and once more before the gradient of a layer"
    for a, b in zip(actual, expected, strict=True):
        close(a, b)


def trained_in_bfloat16(variant: str) -> tuple[list[float], list[Tensor]]:
    """The losses of two steps under autocast with checkpointed layers, and the last gradients."""
    model = llama(variant, torch.float32, use_cache=False).train()
    model.activation_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ids, losses = padded(False)["input_ids"], []
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.grad for p in model.parameters()]


def test_training_under_autocast_with_checkpointing():
    """Rotary embeddings make query and key float32, but not value; torch's own function gets them in one dtype."""
    integration.register()
    losses, expected = trained_in_bfloat16("sdpa")
    by_op, grads = trained_in_bfloat16("attnkit_softmax")
    assert by_op == pytest.approx(losses, rel=1e-2)
    for a, b in zip(grads, expected, strict=True):
        assert (a - b).norm() <= 0.05 * b.norm()
    for variant in ("attnkit_relu", "attnkit_linear"):
        by_op, grads = trained_in_bfloat16(variant)
        assert torch.tensor(by_op).isfinite().all()
        assert all(grad.isfinite().all() and grad.any() for grad in grads)


def test_assisted_generation(calls):
    """Several tokens at a time are checked against the cache; the assistant attends with another variant."""
    eager, ours = pair()
    assistant = llama("counted_relu", torch.float32, num_hidden_layers=1)
    batch = {"input_ids": padded(True)["input_ids"][:1], "attention_mask": torch.ones(1, 7, dtype=torch.long)}
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = eager.generate(**batch, **settings)
    assert not calls
    actual = ours.generate(**batch, **settings, assistant_model=assistant)
    assert torch.equal(actual, expected)
    assert set(calls) == {"softmax_attention", "pointwise_attention"}


def test_a_compiled_model_is_the_model(calls):
    eager, ours = pair()
    batch = padded(False)
    tokens = batch["attention_mask"].bool()
    with torch.no_grad():
        expected = eager(**batch).logits
        compiled = torch.compile(copy.deepcopy(ours), backend="eager", fullgraph=True)
        actual = compiled(**batch).logits
    assert calls == ["softmax_attention"] * LAYERS
    close(actual[tokens], expected[tokens])


class Sequences(Dataset):
    """Eight rows of tokens, each its own labels."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, n: int) -> dict[str, Tensor]:
        ids = (torch.arange(7) * (n + 1) + n) % 37 + 1
        return {"input_ids": ids, "labels": ids}


def losses(model: nn.Module, folder: str) -> list[float]:
    arguments = TrainingArguments(
        folder, max_steps=4, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=1, save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True, seed=0,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Sequences())
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.peers
def test_trainer(calls, tmp_path):
    eager, ours = pair()
    expected = losses(eager, str(tmp_path))
    assert not calls
    actual = losses(ours, str(tmp_path))
    assert calls == ["softmax_attention"] * LAYERS * 4
    assert actual == pytest.approx(expected, rel=1e-4)
    assert len(set(actual)) == 4
