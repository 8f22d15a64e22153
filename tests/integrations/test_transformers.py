"""Stock models of transformers whose config names an op: padding, caches, windows, and what is refused."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    Gemma2Config,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5Model,
)
from transformers.models.gemma2.modeling_gemma2 import Gemma2Model

import attnkit
import attnkit_reference as reference
from attnkit.integrations import transformers as integration
from attnkit.nn import capture
from tests.integrations.counting import count
from tests.library.arrays import LAYER, assert_close

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
LENGTH, PADDING = 7, 3
CAUSAL = [name for name in integration.VARIANTS if name != "attnkit_efficient"]

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True, scope="module")
def registered():
    integration.register()
    integration.register()


def seeded(model: type[nn.Module], config: object, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    made = model(config).to(dtype).eval()
    with torch.no_grad():
        for p in made.parameters():
            if p.ndim == 2:
                p.mul_(8)  # at the initial 0.02 all scores are near 0, and attention near a mean
    return made


def llama(attention: str, dtype: torch.dtype = torch.float64, **config) -> LlamaForCausalLM:
    given = SIZES | {"num_key_value_heads": 2, "attn_implementation": attention} | config
    return seeded(LlamaForCausalLM, LlamaConfig(**given), dtype)


def bert(attention: str, dtype: torch.dtype = torch.float64, **config) -> BertModel:
    return seeded(BertModel, BertConfig(**SIZES, attn_implementation=attention, **config), dtype)


def padded(left: bool) -> dict[str, Tensor]:
    """Two sequences, the second PADDING tokens shorter; positions as `generate` counts them."""
    ids = torch.arange(2 * LENGTH).reshape(2, LENGTH) * 5 % 37 + 1
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, slice(None, PADDING) if left else slice(-PADDING, None)] = 0
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def alone(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The shorter sequence without its padding."""
    tokens = batch["attention_mask"][1].bool()
    return {name: batch[name][1:, tokens] for name in ("input_ids", "position_ids")}


def close(actual: Tensor, expected: Tensor) -> None:
    """Through two layers, each of attention with its projections, a network of two or three, and two norms."""
    assert_close(actual, expected, 2 * (LAYER + 3 + 2))


def no_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a registration in AttentionInterface alone leaves."""
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, name)


# ------------------------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@pytest.mark.parametrize("make", [llama, bert])
def test_softmax_is_eager(make, left):
    """In float32: eager Llama turns the mask of float64 into -inf, and rows that see nothing into NaN."""
    batch = padded(left)
    ours, theirs = (make(name, torch.float32)(**batch)[0] for name in ("attnkit_softmax", "eager"))
    tokens = batch["attention_mask"].bool()
    close(ours[tokens], theirs[tokens])


def gpt_oss(attention: str) -> GptOssForCausalLM:
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8, "num_key_value_heads": 2}
    config = GptOssConfig(**SIZES, **sizes, sliding_window=4, attn_implementation=attention)
    made = seeded(GptOssForCausalLM, config, torch.float32)
    for layer in made.model.layers:
        layer.self_attn.sinks.data.copy_(torch.tensor([0.5, -2.0, 3.0, 0.0]))
    return made


def test_sinks_of_gpt_oss_reach_softmax():
    """With a window in every second layer, groups of heads and padding."""
    batch, results = padded(True), {}
    tokens = batch["attention_mask"].bool()
    for name in ("attnkit_softmax", "eager"):
        model = gpt_oss(name)
        with attnkit.implementations() as ran:
            logits = model(**batch).logits[tokens]
        logits.square().mean().backward()
        results[name] = (logits, *(layer.self_attn.sinks.grad for layer in model.model.layers))
        assert bool(ran.get("softmax_attention")) == (name != "eager")
    for ours, theirs in zip(*results.values(), strict=True):
        assert theirs.abs().max() > 1e-6
        assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()
    with pytest.raises(NotImplementedError, match="attnkit_relu: attnkit does not serve the argument 's_aux'"):
        gpt_oss("attnkit_relu")(**batch)


@pytest.mark.parametrize("make", [llama, bert])
def test_without_the_mask_registration_padding_is_seen(make, monkeypatch):
    """The check above can fail: transformers drops a padding mask for which nobody answers."""
    batch = padded(True)
    tokens = batch["attention_mask"].bool()
    right = make("attnkit_softmax")(**batch)[0][tokens]
    no_mask("attnkit_softmax", monkeypatch)
    wrong = make("attnkit_softmax")(**batch)[0][tokens]
    assert float((wrong - right).abs().max().detach()) > 1e-3


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@pytest.mark.parametrize(
    ("make", "name"),
    [(llama, n) for n in CAUSAL] + [(bert, n) for n in integration.VARIANTS],
    ids=lambda given: getattr(given, "__name__", given),
)
def test_padding_changes_nothing(make, name, left):
    batch, model = padded(left), make(name)
    with torch.no_grad():
        out = model(**batch)[0][1][batch["attention_mask"][1].bool()]
        close(out, model(**alone(batch))[0][0])


def heads(model: nn.Module, batch: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """What the named module's projections made of a batch, and what reached its output projection."""
    seen: dict[str, Tensor] = {}
    layer = model.get_submodule(name)
    parts = {"q": "query", "k": "key", "v": "value"}
    hooks = [
        layer.get_submodule(part).register_forward_hook(lambda m, a, out, key=key: seen.update({key: out}))
        for key, part in parts.items()
    ]
    hooks.append(layer.register_forward_hook(lambda m, a, out: seen.update(o=out[0])))
    with torch.no_grad():
        model(**batch)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("name", ["attnkit_relu", "attnkit_sigmoid", "attnkit_entmax15", "attnkit_linear"])
def test_a_layer_computes_the_op_of_the_reference(name):
    """The heads of BERT's first layer: scaling, padding and the length of each row as the reference has them."""
    batch, (op, options) = padded(False), integration.VARIANTS[name]
    seen = heads(bert(name), batch, "encoder.layer.0.attention.self")
    q, k, v = (seen[x].unflatten(-1, (4, 8)).transpose(1, 2).numpy() for x in "qkv")
    mask = batch["attention_mask"].bool()[:, None, None, :].numpy()
    golden = torch.from_numpy(getattr(reference, op.__name__)(q, k, v, mask=mask, **options))
    close(seen["o"], golden.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("name", integration.VARIANTS)
def test_decoding_with_a_cache_is_the_full_forward(name):
    """Token by token after a prefill; with padding on the left where the op takes a mask of pairs."""
    model, batch = llama(name), padded(True)
    if name not in CAUSAL:
        batch = alone(batch) | {"attention_mask": torch.ones(1, LENGTH - PADDING, dtype=torch.long)}
    start = PADDING + 1 if name in CAUSAL else 1
    with torch.no_grad():
        whole = model(**batch).logits
        cut = {key: x[:, :start] for key, x in batch.items()}
        step = model(**cut, use_cache=True)
        steps = [step.logits]
        for n in range(start, whole.shape[1]):
            one = {key: x[:, n : n + 1] for key, x in batch.items()} | {
                "attention_mask": batch["attention_mask"][:, : n + 1]
            }
            step = model(**one, past_key_values=step.past_key_values)
            steps.append(step.logits)
    tokens = batch["attention_mask"].bool()
    close(torch.cat(steps, 1)[tokens], whole[tokens])


@pytest.mark.parametrize("left", [True, None], ids=["left", "unpadded"])
@pytest.mark.parametrize("options", [{"use_cache": False}, {"cache_implementation": "static"}], ids=["none", "static"])
def test_generate(options, left):
    """A static cache is longer than what it holds: its empty slots are no keys, and count in no length."""
    model, given = llama("attnkit_relu"), {"input_ids": padded(True)["input_ids"]}
    if left:
        given["attention_mask"] = padded(True)["attention_mask"]
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    settings |= {"return_dict_in_generate": True, "disable_compile": True}
    plain, other = model.generate(**given, **settings), model.generate(**given, **settings, **options)
    assert torch.equal(plain.sequences, other.sequences)
    close(torch.stack(other.logits), torch.stack(plain.logits))


def test_sliding_windows_are_masks():
    given = SIZES | {"num_key_value_heads": 2, "sliding_window": 3}
    batch = padded(True)
    tokens = batch["attention_mask"].bool()
    out = {}
    for name in ("eager", "attnkit_softmax", "attnkit_relu"):
        config = MistralConfig(**given, attn_implementation=name)
        model = seeded(MistralForCausalLM, config, torch.float32)
        out[name] = model(**batch).logits
        if name != "eager":
            close(out[name][1][tokens[1]], model(**alone(batch)).logits[0])
    close(out["attnkit_softmax"][tokens], out["eager"][tokens])
    config = MistralConfig(**(given | {"sliding_window": None}), attn_implementation="attnkit_softmax")
    wide = seeded(MistralForCausalLM, config, torch.float32)(**batch).logits
    assert float((wide - out["eager"])[tokens].abs().max().detach()) > 1e-3


def test_relative_positions_and_cross_attention():
    """T5: position_bias, scaling 1, a decoder that sees an encoder's padded tokens."""
    sizes = {"vocab_size": 40, "d_model": 32, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    batch = padded(False)
    given = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    given["decoder_input_ids"] = batch["input_ids"][:, :4]
    out = []
    for name in ("eager", "attnkit_softmax"):
        config = T5Config(**sizes, attn_implementation=name, dropout_rate=0.0)
        out.append(seeded(T5Model, config, torch.float32)(**given).last_hidden_state)
    close(out[1], out[0])


def test_gradients_and_dropout():
    batch, model = padded(False), bert("attnkit_relu", attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0)
    still = model(**batch)[0]
    model.train()
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(model(**batch)[0])
    runs[0].square().sum().backward()
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert not torch.equal(runs[0], still)
    gradient = model.encoder.layer[0].attention.self.query.weight.grad
    assert bool(gradient.isfinite().all())
    assert float(gradient.abs().max()) > 0
    with pytest.raises(
        NotImplementedError, match=r"attnkit_linear: linear_attention takes no dropout; got dropout=0.5"
    ):
        bert("attnkit_linear", attention_probs_dropout_prob=0.5).train()(**batch)


def test_attentions_on_demand():
    batch = padded(False)
    ours, theirs = (
        bert(name, torch.float32)(**batch, output_attentions=True).attentions for name in ("attnkit_softmax", "eager")
    )
    assert len(ours) == 2
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)


def test_a_mask_of_floats_hides_and_adds():
    """A prepared mask of four axes: below half its minimum a pair is hidden, so that relu's n does not count it."""
    ids, length = padded(False)["input_ids"], LENGTH
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    additive = torch.zeros(length, length, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    model = llama("attnkit_relu")
    plain = model(ids).logits
    close(model(ids, attention_mask=additive[None, None]).logits, plain)
    close(model(ids, attention_mask=seen[None, None]).logits, plain)
    shifted = model(ids, attention_mask=(additive + 0.5)[None, None]).logits
    assert float((shifted - plain).abs().max().detach()) > 1e-3


# ------------------------------------------------------------------------------------- saved models


def test_a_saved_model_comes_back_with_its_variant(tmp_path, monkeypatch):
    """Saved, loaded, saved and loaded again; the op is what runs, and softmax would give other numbers."""
    calls = count(monkeypatch, "entmax_attention")
    integration.register_variant("entmax_steep", "entmax", alpha=1.75)
    model, ids = llama("entmax_steep", torch.float32), padded(False)["input_ids"]
    model.save_pretrained(tmp_path / "first")
    AutoModelForCausalLM.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "second")
    with torch.no_grad():
        found, golden = loaded(ids).logits, model(ids).logits
        assert calls == ["entmax_attention"] * 4
        close(found, golden)
        softmax = LlamaForCausalLM.from_pretrained(tmp_path / "second", attn_implementation="sdpa")(ids).logits
    assert calls == ["entmax_attention"] * 4
    assert float((softmax - golden).abs().max()) > 1e-3
    monkeypatch.delitem(AttentionInterface._global_mapping, "entmax_steep")
    with pytest.raises(ValueError, match='Specified `attn_implementation="entmax_steep"` is not supported'):
        LlamaForCausalLM.from_pretrained(tmp_path / "second")


def test_a_config_of_other_implementations_is_written_as_ever():
    assert "attn_implementation" not in LlamaConfig(**SIZES, attn_implementation="sdpa").to_dict()
    assert "attn_implementation" not in LlamaConfig(**SIZES).to_diff_dict()


def test_parts_of_a_model_come_back_with_variants_of_their_own(tmp_path):
    """A copy of a config in between: configs are shared by the models that are made of them."""
    sizes = {
        name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    }
    parts = {"text_config": sizes | {"vocab_size": 40}, "vision_config": sizes | {"image_size": 4, "patch_size": 2}}
    config = CLIPConfig(**parts, projection_dim=8, attn_implementation={"text_config": "attnkit_relu"})
    CLIPModel(copy.deepcopy(config)).save_pretrained(tmp_path)
    loaded = CLIPModel.from_pretrained(tmp_path)
    assert loaded.text_model.config._attn_implementation == "attnkit_relu"
    assert loaded.vision_model.config._attn_implementation == "sdpa"


# ------------------------------------------------------------------------------------- capture


def test_capture():
    """Rows are those of the op on the layer's own q and k; padding is left out; nothing changes."""
    batch, model = padded(False), bert("attnkit_relu")
    tokens = batch["attention_mask"].bool()
    with torch.no_grad():
        plain = model(**batch)[0]
        with capture(integration.observable(model)) as record:
            record.token_masks = {"encoder.*": tokens}
            assert torch.equal(model(**batch)[0], plain)
    seen = heads(model, batch, "encoder.layer.0.attention.self")
    q, k = (seen[x].unflatten(-1, (4, 8)).transpose(1, 2).numpy() for x in "qk")
    masks = {"mask": tokens[:, None, None, :].numpy(), "query_mask": tokens[:, None, :].numpy()}
    found = reference.row_statistics("pointwise_attention", q, k, **masks)
    valid = found.nonzero > 0
    layer = record["encoder.layer.0.attention.self"]
    assert [x.name for x in record.layers] == [f"encoder.layer.{n}.attention.self" for n in range(2)]
    assert (layer.rows, layer.null) == (2 * 4 * LENGTH, 4 * PADDING)
    for name, values in found._asdict().items():
        assert_close(layer.means[name], values[valid].mean())


def test_capture_sees_nothing_that_attnkit_does_not_compute():
    model = bert("sdpa")
    with torch.no_grad(), capture(integration.observable(model)) as record:
        model(**padded(False))
    assert [layer.rows for layer in record.layers] == [0, 0]
    with pytest.raises(ValueError, match="observable: transformers names no attention modules of Linear"):
        integration.observable(nn.Linear(2, 2))


# ------------------------------------------------------------------------------------- what is refused


def attend(name: str, mask: Tensor | None = None, keys: int = 5, **given) -> Tensor:
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, keys, 8)
    op, options = integration.VARIANTS[name]
    served = integration.attention_function(name, op, **options)
    return served(nn.Identity(), q, k, k, mask, **({"dropout": 0.0, "scaling": 8**-0.5} | given))[0]


@pytest.mark.parametrize(
    ("name", "given", "error", "text"),
    [
        ("attnkit_relu", {"softcap": 50.0}, NotImplementedError, "'softcap'"),
        ("attnkit_relu", {"s_aux": torch.zeros(2)}, NotImplementedError, "'s_aux'"),
        ("attnkit_relu", {"cache": object()}, NotImplementedError, "'cache'"),
        ("attnkit_relu", {"cu_seq_lens_q": torch.tensor([0, 5])}, NotImplementedError, "packed"),
        ("attnkit_relu", {"sliding_window": 3}, ValueError, "sliding_window=3 with 5 keys needs attention_mask"),
        ("attnkit_relu", {"keys": 6}, ValueError, "causal attention from 5 tokens to 6"),
        ("attnkit_relu", {"mask": torch.ones(1, 5, dtype=torch.bool)}, ValueError, r"shape \(1, 5\)"),
        ("attnkit_relu", {"mask": torch.ones(1, 1, 5, 5, dtype=torch.long)}, TypeError, "torch.int64"),
        ("attnkit_linear", {"scaling": 1.0}, NotImplementedError, r"expected 1/√d; got 1.0"),
        ("attnkit_linear", {"position_bias": torch.zeros(1, 2, 5, 5)}, NotImplementedError, "position_bias"),
        ("attnkit_linear", {"mask": torch.zeros(1, 1, 5, 5)}, NotImplementedError, "make it boolean"),
        ("attnkit_efficient", {"mask": torch.ones(1, 1, 5, 5).bool()}, ValueError, "key mask"),
    ],
)
def test_what_is_not_served_is_an_error(name, given, error, text):
    with pytest.raises(error, match=text) as raised:
        attend(name, **given)
    assert name in str(raised.value) or "efficient_attention" in str(raised.value)


def test_a_model_with_softcap_is_refused():
    config = Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, attn_implementation="attnkit_softmax")
    with pytest.raises(NotImplementedError, match=r"attnkit_softmax: .*'softcap'"):
        seeded(Gemma2Model, config, torch.float32)(input_ids=torch.ones(1, 3, dtype=torch.long))


def test_harmless_arguments_and_decoding_steps_pass():
    attend("attnkit_relu", position_ids=torch.arange(5), num_items_in_batch=3, softcap=None, cu_seq_lens_q=None)
    attend("attnkit_relu", keys=6, is_causal=False)
    attend("attnkit_relu", sliding_window=5)


# ------------------------------------------------------------------------------------- variants of one's own


def test_own_variants():
    projection = torch.from_numpy(attnkit.orthogonal_features(16, 8, 0))
    integration.register_variant("own", attnkit.performer_attention, projection=projection)
    with torch.no_grad():
        close(llama("own")(**padded(True)).logits[1, PADDING:], llama("own")(**alone(padded(True))).logits[0])
    integration.register_variant("own", attnkit.pointwise_attention, alpha=0.0, scale=1.0)
    seen = heads(bert("own"), padded(False), "encoder.layer.0.attention.self")
    q, k, v = (seen[x].unflatten(-1, (4, 8)).transpose(1, 2) for x in "qkv")
    mask = padded(False)["attention_mask"].bool()[:, None, None, :]
    golden = attnkit.pointwise_attention(q, k, v, alpha=0.0, scale=1.0, mask=mask)
    close(seen["o"], golden.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("name", "op", "options", "text"),
    [
        ("own", attnkit.rela_attention, {}, "op must be one of"),
        ("own", attnkit.lsh_attention, {}, "op must be one of"),
        ("own", torch.relu, {}, "op must be one of .*; got 'relu'"),
        ("own", attnkit.entmax_attention, {"beta": 1}, "takes the options .*alpha.*; got 'beta'"),
        ("own", attnkit.entmax_attention, {"causal": True}, "got 'causal'"),
        ("sdpa", attnkit.entmax_attention, {}, "another implementation; got 'sdpa'"),
        ("eager", attnkit.entmax_attention, {}, "another implementation; got 'eager'"),
    ],
)
def test_variants_that_cannot_be(name, op, options, text):
    with pytest.raises(ValueError, match=rf"register_variant: .*{text}"):
        integration.register_variant(name, op, **options)
