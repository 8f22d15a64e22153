"""The Transformer of the translation experiments: its parts, padding, caches, packing, statistics of rows."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import attnkit
import attnkit.nn.attention
from attnkit.nn import MultiHeadAttention
from attnkit_experiments.data.text.pairs import PAD
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.translation.methods import METHODS, Method, everywhere
from attnkit_experiments.translation.model import MEMORIES, TranslationConfig, Translator, sinusoids
from tests.experiments.translation_cases import CAUSAL, TRANSLATOR, VOCABULARY, Tokens, config, tokens, translator
from tests.library.arrays import LAYER, assert_agrees, assert_close

# ---------------------------------------------------------------------------------------------- padding, batches


@pytest.mark.parametrize("method", CAUSAL)
def test_padding_and_batch_mates_change_nothing(method):
    model, batch = translator(method), tokens()
    logits, wider = model(*batch), model(*batch.wider(3))
    for item in range(len(batch.source)):
        alone = batch.only(item)
        length = alone.target_in.shape[1]
        assert_close(logits[item, :length], model(*alone)[0], TRANSLATOR)
        assert_close(wider[item, :length], logits[item, :length], TRANSLATOR)


def test_a_model_that_attends_to_padding_is_noticed(monkeypatch):
    model, batch = translator(), tokens()
    right = model(*batch)
    forward = MultiHeadAttention.forward
    monkeypatch.setattr(MultiHeadAttention, "forward", lambda *args, key_mask=None, **rest: forward(*args, **rest))
    with pytest.raises(AssertionError):
        assert_close(model(*batch)[1], right[1], TRANSLATOR)


@pytest.mark.parametrize("method", CAUSAL)
def test_no_token_sees_those_behind_it(method):
    model, batch = translator(method), tokens()
    changed = batch.target_in.clone()
    changed[:, 4:] = 4
    assert_close(model(batch.source, batch.mask, changed)[0, :4], model(*batch)[0, :4], TRANSLATOR)


def test_compiled_layers_serve_batches_of_any_size():
    """One graph for all layers, and another as soon as sizes change; then no more."""
    torch.manual_seed(0)
    model, graphs = Translator(config("reluformer", attention_dropout=0.0)).train(), []

    def count(graph, examples):
        graphs.append(graph)
        return graph

    for layer in model.encoder:
        layer.compile(backend=count)
    counts = []
    for lengths in (((7, 6), (3, 5)), ((9, 8), (8, 4), (4, 7)), ((6, 9),) * 4, ((12, 5),) * 5):
        with torch.no_grad():
            model(*tokens(lengths), fields=("total",))
        counts.append(len(graphs))
    assert counts == [1, 2, 2, 2]


# ---------------------------------------------------------------------------------------------- caches


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("method", CAUSAL)
def test_decoding_with_caches_is_the_whole_sequence(method, norm):
    model, batch = translator(method, norm=norm), tokens(((7, 6), (3, 6), (5, 6)))
    state = model.start(batch.source, batch.mask, 6)
    steps = [model.decode_step(batch.target_in[:, [t]], state) for t in range(6)]
    assert_close(torch.cat(steps, 1), model(*batch), TRANSLATOR)


@pytest.mark.parametrize("method", CAUSAL)
def test_hypotheses_follow_their_parents_and_items_leave(method):
    model, batch = translator(method), tokens(((7, 2), (3, 2), (5, 2)))
    state = model.start(batch.source, batch.mask, 4)
    model.decode_step(batch.target_in[:, :1], state)
    state.follow(torch.zeros(3, 2, dtype=torch.long))
    words = torch.tensor([[5, 6], [7, 8], [9, 10]])
    model.decode_step(words, state)
    state.keep(torch.tensor([0, 2]))
    parents = torch.tensor([[1, 1, 0], [0, 1, 0]])
    state.follow(parents)
    last = torch.tensor([[11, 12, 13], [14, 15, 16]])
    logits = model.decode_step(last, state)
    for row, item in enumerate((0, 2)):
        for beam in range(3):
            history = [batch.target_in[item, 0], words[item, parents[row, beam]], last[row, beam]]
            alone = Tokens(batch.source[[item]], batch.mask[[item]], torch.tensor([history]))
            assert_close(logits[row, beam], model(*alone)[0, -1], TRANSLATOR)


# ---------------------------------------------------------------------------------------------- packed sequences

# how a packed op spells the method: MultiHeadAttention itself takes padded batches only
PACKED = {
    "vanilla": (attnkit.softmax_attention_packed, {}),
    "reluformer": (attnkit.pointwise_attention_packed, {"activation": "relu", "alpha": 0.5, "gain": math.sqrt(2)}),
    "relu_over_length": (attnkit.pointwise_attention_packed, {"activation": "relu", "alpha": 1.0}),
    "linear": (attnkit.linear_attention_packed, {}),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", PACKED)
def test_packed_is_padded(method, causal):
    model, lengths = translator(method), (7, 3, 5)
    attention = model.attentions()["decoder.0.attention" if causal else "encoder.0.attention"]
    x = torch.randn(3, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    there = torch.arange(7) < torch.tensor(lengths)[:, None]
    padded = attention(x, key_mask=there, query_mask=there)[there]

    op, options = PACKED[method]
    q, k, v = (
        projection(x[there]).view(-1, 2, 8) for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    edges = tuple(itertools.accumulate((0, *lengths)))
    heads = op(q, k, v, edges, edges, causal=causal, **options)
    assert_close(attention.out_proj(heads.flatten(1)), padded, LAYER)


# ---------------------------------------------------------------------------------------------- the parts


def copy_attention(theirs, ours):
    theirs.in_proj_weight.copy_(torch.cat([ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight]))
    theirs.in_proj_bias.copy_(torch.cat([ours.q_proj.bias, ours.k_proj.bias, ours.v_proj.bias]))
    theirs.out_proj.load_state_dict(ours.out_proj.state_dict())


def copy_rest(theirs, ours, norms):
    theirs.linear1.weight.copy_(ours.memory.keys)
    theirs.linear1.bias.copy_(ours.memory.key_bias)
    theirs.linear2.weight.copy_(ours.memory.values.T)
    theirs.linear2.bias.copy_(ours.memory.value_bias)
    for number, norm in enumerate(norms, 1):
        getattr(theirs, f"norm{number}").load_state_dict(norm.state_dict())


@pytest.mark.parametrize("norm", ["post", "pre"])
@torch.no_grad()
def test_vanilla_is_torchs_transformer(norm):
    model, batch = translator(norm=norm), tokens()
    for p in model.parameters():  # norms and biases that are not trivial
        p += 0.1 * torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(p.numel()))
    options = {"dropout": 0.0, "batch_first": True, "norm_first": norm == "pre", "dtype": torch.float64}
    scale = model.config.dim**0.5

    x = model.source(batch.source) * scale + model.positions[: batch.source.shape[1]]
    for ours in model.encoder:
        theirs = nn.TransformerEncoderLayer(16, 2, 24, **options)
        copy_attention(theirs.self_attn, ours.attention)
        copy_rest(theirs, ours, (ours.attention_norm, ours.memory_norm))
        x = theirs(x, src_key_padding_mask=~batch.mask)
    memory = model.encoder_norm(x)
    y = model.source(batch.target_in) * scale + model.positions[: batch.target_in.shape[1]]
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    for ours in model.decoder:
        theirs = nn.TransformerDecoderLayer(16, 2, 24, **options)
        copy_attention(theirs.self_attn, ours.attention)
        copy_attention(theirs.multihead_attn, ours.cross)
        copy_rest(theirs, ours, (ours.attention_norm, ours.cross_norm, ours.memory_norm))
        y = theirs(y, memory, tgt_mask=future, memory_key_padding_mask=~batch.mask)
    there = batch.target_in != PAD
    logits = model.decoder_norm(y) @ model.source.weight.T
    assert_close(model(*batch)[there], logits[there], TRANSLATOR)


def test_positions_are_sines_and_cosines():
    table = sinusoids(9, 6)
    for t, i in itertools.product(range(9), range(3)):
        angle = t / 10000 ** (2 * i / 6)
        assert_agrees(table[t, [i, 3 + i]], [math.sin(angle), math.cos(angle)])


@pytest.mark.parametrize("slots", [1, 7])
@pytest.mark.parametrize("memory", MEMORIES)
def test_memories_of_any_size(memory, slots):
    model = translator(memory=memory, slots=slots)
    layer = model.encoder[0].memory
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    scores = x @ layer.keys.T / MEMORIES[memory].get("temperature", 1.0) + layer.key_bias
    weights = scores.relu() if memory == "relu" else scores.softmax(-1)
    out = weights @ layer.values + layer.value_bias
    if memory == "softmax_norm":
        out = nn.functional.layer_norm(out, (16,), layer.norm_weight, layer.norm_bias, layer.eps)
    assert_close(layer(x), out, LAYER)
    assert model(*tokens()).isfinite().all()


def test_initial_weights():
    torch.manual_seed(0)
    model = Translator(config(dim=64, heads=4, vocabulary=2000))
    assert model.source.weight[PAD].eq(0).all()
    # 128,000 draws: the standard deviation is known to 0.2 %, so 1 % is five times that
    assert model.source.weight[1:].std().item() == pytest.approx(64**-0.5, rel=0.01)
    attention = model.encoder[0].attention
    bound = math.sqrt(6 / 128)
    for name, gain in (("q_proj", 2**-0.5), ("k_proj", 2**-0.5), ("v_proj", 2**-0.5), ("out_proj", 1.0)):
        weight = getattr(attention, name).weight
        assert 0.99 * gain * bound < weight.abs().max() <= gain * bound
        assert getattr(attention, name).bias.eq(0).all()


def test_embeddings_are_one_matrix_or_three():
    shared, apart = Translator(config()), Translator(config(shared=False))
    size = VOCABULARY * 16
    count = [sum(p.numel() for p in model.parameters()) for model in (shared, apart)]
    assert count[1] - count[0] == 2 * size
    batch = tokens()
    assert apart(*batch).shape == shared(*batch).shape == (3, 6, VOCABULARY)
    pointers = [x.data_ptr() for x in shared.state_dict().values()]
    assert len(set(pointers)) == len(pointers), "safetensors refuses tensors that share memory"


def test_methods_may_differ_by_place():
    nystrom = Method("nystrom_attention", {"num_landmarks": 3})
    mixed = config(encoder=nystrom, decoder=METHODS["reluformer"], attention_dropout=0.0)
    model = Translator(mixed).double().eval()
    names = {name: module.op.__name__ for name, module in model.attentions().items()}
    assert names == {
        "encoder.0.attention": "nystrom_attention",
        "encoder.1.attention": "nystrom_attention",
        "decoder.0.attention": "reluformer_attention",
        "decoder.0.cross": "softmax_attention",
        "decoder.1.attention": "reluformer_attention",
        "decoder.1.cross": "softmax_attention",
    }
    assert model(*tokens()).isfinite().all()
    weight = METHODS["reluformer"].regulariser
    assert weight > 0
    assert model.regularised() == {"decoder.0.attention": weight, "decoder.1.attention": weight}


def test_mistakes_are_named():
    with pytest.raises(UserError, match="unknown method 'reluforma'; did you mean 'reluformer'"):
        everywhere("reluforma")
    with pytest.raises(UserError, match="unknown memory 'softmaxnorm'; did you mean 'softmax_norm'"):
        TranslationConfig(100, memory="softmaxnorm")
    with pytest.raises(ValueError, match="dim must be even for sinusoidal positions; got 15"):
        TranslationConfig(100, dim=15)
    with pytest.raises(ValueError, match="regulariser must not be negative; got -1"):
        Method(regulariser=-1)
    with pytest.raises(ValueError, match="nystrom_attention has no option causal"):
        Translator(config(decoder=Method("nystrom_attention", {"num_landmarks": 3})))
    with pytest.raises(ValueError, match=r"linear_attention takes no dropout; got 0\.1"):
        Translator(config("linear", attention_dropout=0.1))
    with pytest.raises(ValueError, match="Translator: 7 tokens; made for max_length=6"):
        translator(max_length=6)(*tokens())


# ---------------------------------------------------------------------------------------------- statistics of rows


def test_observing_changes_nothing_and_names_layers():
    model, batch = translator("reluformer"), tokens()
    logits, rows = model(*batch, fields=("total",))
    assert_close(logits, model(*batch), TRANSLATOR)
    assert list(rows) == list(model.attentions())
    _, few = model(*batch, fields=("total", "visible"), layers=("decoder.1.cross",))
    assert list(few) == ["decoder.1.cross"]
    statistics, queries = few["decoder.1.cross"]
    assert_close(statistics.total, rows["decoder.1.cross"].statistics.total, TRANSLATOR)
    assert torch.equal(queries, batch.target_in != PAD)
    assert torch.equal(statistics.visible[:, 0, 0], batch.mask.sum(1).double())


def saved_shapes(run):
    """Shapes of what autograd keeps for the backward pass of run()."""
    shapes = []

    def pack(x):
        shapes.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run().backward()
    return shapes


def saved_for_the_regulariser(length, **changes):
    """Those of a loss of the rows of encoder, decoder and cross-attention with that many tokens."""
    model = translator("reluformer", encoder_layers=1, decoder_layers=1, max_length=length, **changes).train()
    words = torch.randint(4, VOCABULARY, (2, 1, length), generator=torch.Generator().manual_seed(0))
    there = torch.ones(1, length, dtype=torch.bool)

    def loss():
        logits, rows = model(words[0], there, words[1], fields=("total", "entropy", "visible"))
        assert len(rows) == 3
        return logits.mean() + sum(attnkit.attention_regulariser(found)[0] for found, _ in rows.values())

    return saved_shapes(loss)


@pytest.mark.skipif(attnkit.native_status().level is None, reason="the CPU library was not compiled")
@pytest.mark.parametrize("attention_dropout", [0.0, 0.1])
def test_autograd_keeps_no_weights_for_the_regulariser(attention_dropout):
    shapes = saved_for_the_regulariser(60, attention_dropout=attention_dropout)
    assert shapes
    assert not [shape for shape in shapes if math.prod(shape) >= 60 * 60]


def test_weights_that_autograd_keeps_are_noticed():
    shapes = saved_for_the_regulariser(60, statistics="generic")
    assert [shape for shape in shapes if shape[-2:] == (60, 60)]


def test_statistics_of_rows_are_those_of_the_weights():
    model, batch = translator("reluformer"), tokens()
    attention, seen = model.attentions()["encoder.0.attention"], []
    attention.observers.append(lambda op, q, k, options: seen.append((q, k)))
    _, rows = model(*batch, fields=("total", "entropy"), layers=("encoder.0.attention",))
    q, k = (x.detach().numpy() for x in seen[0])
    there = batch.mask.numpy()
    n = there.sum(1)[:, None, None, None]
    weights = np.maximum(q @ k.swapaxes(-1, -2) / math.sqrt(8), 0) * there[:, None, None, :] / np.sqrt(n / 2)
    found = rows["encoder.0.attention"].statistics
    valid = there[:, None, :] & (weights.sum(-1) > 0)
    assert valid.any()
    assert_close(found.total.detach().numpy()[valid], weights.sum(-1)[valid])
    share = weights[valid] / weights[valid].sum(-1, keepdims=True)
    entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(-1)
    assert_close(found.entropy.detach().numpy()[valid], entropy)
