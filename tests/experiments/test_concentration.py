"""The measures of Shen et al. 2023 on a Translator, each against its formula written out."""

import math

import numpy as np
import pytest
import torch

from attnkit.analysis import anisotropy
from attnkit_experiments.data.text.pairs import PAD
from attnkit_experiments.translation.concentration import analyse, attention_maps, residuals
from attnkit_experiments.translation.model import MEMORIES
from tests.experiments.translation_cases import TRANSLATOR, tokens, translator
from tests.library.arrays import assert_close

SECOND = ((4, 3), (6, 5))  # lengths of another batch


def top_share(weights: np.ndarray, percent: float) -> float:
    """Mean over rows of what the largest percent of a row hold."""
    count = max(1, math.ceil(percent * weights.shape[1] / 100 - 1e-9))
    ordered = -np.sort(-weights, axis=1)
    total = ordered.sum(1)
    return float((ordered[:, :count].sum(1)[total > 0] / total[total > 0]).mean())


def seen_by_memories(model, batches) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """{memory: inputs and outputs (tokens, dim)}, without padding."""
    found = {}
    for source, mask, target_in in batches:
        hooks = []
        for name, module in model.named_modules():
            if not name.endswith(".memory"):
                continue
            there = mask if name.startswith("encoder") else target_in != PAD

            def keep(module, args, output, name=name, there=there):
                found.setdefault(name, []).append((args[0][there].numpy(), output[there].numpy()))

            hooks.append(module.register_forward_hook(keep))
        model(source, mask, target_in)
        for hook in hooks:
            hook.remove()
    return {name: tuple(np.concatenate(side) for side in zip(*parts, strict=True)) for name, parts in found.items()}


@pytest.mark.parametrize("memory", MEMORIES)
@torch.no_grad()
def test_memories_are_measured_over_the_tokens_of_all_batches(memory):
    model, batches = translator(memory=memory), [tokens(), tokens(SECOND, seed=1)]
    found = analyse(model, batches, percents=(0.2, 10, 50))
    for name, (x, out) in seen_by_memories(model, batches).items():
        layer = model.get_submodule(name)
        scores = x / MEMORIES[memory].get("temperature", 1.0) @ layer.keys.numpy().T + layer.key_bias.numpy()
        weights = np.maximum(scores, 0) if memory == "relu" else np.exp(scores - scores.max(1, keepdims=True))
        for percent, share in found.slots[name].items():
            assert_close(share, top_share(weights, percent))
        assert_close(found.layers[name].variance_ratio, out.var() / x.var())
    assert list(found.slots) == [f"{stack}.{n}.memory" for stack in ("encoder", "decoder") for n in (0, 1)]


@torch.no_grad()
def test_the_residual_of_a_pre_norm_memory_is_what_comes_before_its_norm():
    model, batches = translator(norm="pre"), [tokens()]
    seen = []
    hook = model.encoder[1].memory_norm.register_forward_hook(lambda m, args, out: seen.append(args[0]))
    found = analyse(model, batches)
    hook.remove()
    _, out = seen_by_memories(model, batches)["encoder.1.memory"]
    residual = seen[0][batches[0].mask].numpy()
    assert_close(found.layers["encoder.1.memory"].variance_ratio, out.var() / residual.var())
    assert set(residuals(model.config).values()) == {f"{branch}_norm" for branch in residuals(model.config)}


def test_anisotropy_of_slots_is_the_mean_of_all_pairs():
    model = translator()
    values = model.encoder[0].memory.values.detach()
    unit = values / values.norm(dim=1, keepdim=True)
    cosines = unit @ unit.T
    m = len(values)
    pairs = (cosines.sum() - cosines.trace()) / (m * (m - 1))
    found = analyse(model, [tokens()]).layers["encoder.0.memory"].slot_anisotropy
    assert_close(found, float(pairs), magnitude=1.0)  # a mean of cosines that cancel
    assert_close(anisotropy(torch.eye(5, dtype=torch.float64))[0], torch.tensor(0.0, dtype=torch.float64))
    same = torch.ones(5, 3, dtype=torch.float64)
    assert_close(anisotropy(same)[0], torch.tensor(1.0, dtype=torch.float64))


@torch.no_grad()
def test_entropy_and_concentration_of_attention_leave_padding_out():
    model, batch = translator(), tokens()
    found = analyse(model, [batch], percents=(25,))
    alone = [analyse(model, [batch.only(item)], percents=(25,)) for item in range(3)]
    for name in model.attentions():
        rows = [one.layers[name].rows for one in alone]
        layer = found.layers[name]
        assert layer.rows - layer.null == sum(rows)
        for measure in (lambda a: a.means["entropy"], lambda a: a.concentration[25.0]):
            each = [measure(one.layers[name]) for one in alone]
            assert_close(measure(layer), np.average(each, weights=rows), TRANSLATOR)


@pytest.mark.parametrize("method", ["vanilla", "reluformer"])
@torch.no_grad()
def test_maps_are_the_weights_that_statistics_are_made_of(method):
    model, batch = translator(method), tokens()
    maps = attention_maps(model, *batch)
    _, rows = model(*batch, fields=("total",))
    assert list(maps) == list(rows)
    for name, weights in maps.items():
        assert_close(weights.sum(-1), rows[name].statistics.total)
    assert maps["decoder.0.cross"].shape == (3, 2, 6, 7)
    assert (maps["decoder.0.cross"].movedim(1, -1).movedim(1, -1)[~batch.mask] == 0).all()
    assert not any(attention.observers for attention in model.attentions().values())


@torch.no_grad()
def test_one_number_per_measure():
    found = analyse(translator("reluformer"), [tokens()])
    means = found.means()
    entropies = [layer.means["entropy"] for name, layer in found.layers.items() if name not in found.slots]
    assert_close(means["entropy"], np.mean(entropies))
    assert_close(means["variance_ratio"], np.mean([found.layers[n].variance_ratio for n in found.slots]))
    cosines = [found.layers[n].slot_anisotropy for n in found.slots]
    assert_close(means["slot_anisotropy"], np.mean(cosines), magnitude=cosines)
    assert set(found.to_dict()) == {"layers", "slots"}
    assert math.isnan(found._replace(slots={}, layers={}).means()["entropy"])


@torch.no_grad()
def test_softmax_memories_add_little_until_they_are_normalised():
    """At the start (Shen et al. 2023 Table 1 after training: 0.27, 0.01, 0.34), at the paper's width and slots."""
    ratios = {}
    for memory in MEMORIES:
        model = translator(memory=memory, dim=512, heads=4, slots=1024, encoder_layers=1, decoder_layers=1).float()
        ratios[memory] = analyse(model, [tokens()], percents=()).means()["variance_ratio"]
    assert ratios["softmax"] < 0.001 < 0.05 < ratios["relu"]
    assert ratios["softmax_norm"] == pytest.approx(1, rel=0.05)
