"""FLOPs of a step of every domain: by hand, and as torch sees them where it computes what is counted and no more."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import attnkit
from attnkit_experiments.engine.counting import OF_PAIRS, attention_multiply_adds, by_formula
from attnkit_experiments.language.methods import METHODS as NEWER
from attnkit_experiments.language.model import LanguageConfig
from attnkit_experiments.language.model import forward_flops as of_text
from attnkit_experiments.sequences.model import ClassifierConfig
from attnkit_experiments.sequences.model import forward_flops as of_sequence
from attnkit_experiments.translation.methods import METHODS, everywhere
from attnkit_experiments.translation.model import TranslationConfig, Translator
from attnkit_experiments.translation.model import forward_flops as of_pairs

GAUSSIAN = attnkit.gaussian_attention.__name__  # whose formula has the squares of keys besides
SMALL = {"vocabulary": 7, "encoder_layers": 1, "decoder_layers": 1, "dim": 2, "heads": 1, "slots": 3}


def test_translation_by_hand():
    """Two pairs, of 3 and 2 tokens and of 1 and 4, in layers of width 2 with memories of 3 slots, for 7 subwords."""
    encoder = 4 * 4 * (3 + 1) + 2 * 2 * (9 + 1) + 2 * 2 * 3 * (3 + 1)  # four projections, pairs, the memory
    decoder = 4 * 4 * (2 + 4) + 2 * 2 * (3 + 10) + 2 * 2 * 3 * (2 + 4)  # each token sees itself and those before
    cross = 2 * 4 * (2 + 4) + 2 * 4 * (3 + 1) + 2 * 2 * (2 * 3 + 4 * 1)  # q and out, k and v, pairs
    assert of_pairs(TranslationConfig(**SMALL), np.array([3, 1]), np.array([2, 4])) == 2 * (
        encoder + decoder + cross + 2 * 7 * (2 + 4)
    )


@pytest.mark.parametrize("method", [name for name, each in METHODS.items() if each.op in OF_PAIRS - {GAUSSIAN}])
def test_translation_as_torch_sees_it(method):
    """What is computed by formula beyond what is counted are the pairs that causality hides."""
    config = TranslationConfig(**SMALL | {"dim": 8, "heads": 2}, **everywhere(method))
    model, source, target = by_formula(Translator(config).eval()), 5, 6
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        tokens = (torch.ones(1, length, dtype=torch.long) for length in (source, target))
        model(next(tokens), torch.ones(1, source, dtype=torch.bool), next(tokens))
    hidden = 2 * 2 * 8 * (target * (target - 1) // 2)
    assert counter.get_total_flops() == of_pairs(config, np.array([source]), np.array([target])) + hidden


@pytest.mark.parametrize("op", ["linear_attention", "performer_attention"])
def test_features_as_torch_sees_them(op):
    """A denominator is a column of ones beside the values."""
    heads, head, queries, keys = 2, 4, 5, 7
    q, k, v = (torch.ones(1, heads, n, head) for n in (queries, keys, keys))
    features, given = (3, {"projection": torch.ones(3, head)}) if op == "performer_attention" else (head, {})
    with FlopCounterMode(display=False) as counter:
        getattr(attnkit, op)(q, k, v, impl="generic", **given)
    sizes = {"queries": queries, "keys": keys, "pairs": queries * keys, "width": heads * head, "heads": heads}
    found = attention_multiply_adds(op, {"num_features": features}, **sizes)
    assert counter.get_total_flops() == 2 * (found + heads * features * (queries + keys))


@pytest.mark.parametrize("method", NEWER)
def test_every_method_of_language_models_is_counted(method):
    op, options = NEWER[method]
    softmax = of_text(LanguageConfig("d64", 12))
    assert 0.5 < of_text(LanguageConfig("d64", 12, op=op, options=options)) / softmax < 2


def test_a_sequence_by_hand():
    """Two layers of width 4 with an MLP of 6, of 5 tokens; the head has 6 hidden features and 3 classes."""
    config = ClassifierConfig(vocabulary=9, classes=3, length=5, width=4, hidden=6, heads=2)
    block = 5 * (4 * 4 * 4 + 2 * 4 * 6) + 2 * 5 * 5 * 4
    assert of_sequence(config, 5) == 2 * (2 * block + 4 * 6 + 6 * 3)
    assert of_sequence(config, 3) == 2 * (2 * (3 * (4 * 4 * 4 + 2 * 4 * 6) + 2 * 3 * 3 * 4) + 4 * 6 + 6 * 3)


def test_features_by_hand():
    """Four heads of 3 features: keys times values and queries times their sums, for Performer also 5 projections."""
    sizes = {"queries": 7, "keys": 11, "pairs": 77, "width": 12, "heads": 4}
    assert attention_multiply_adds("linear_attention", {}, **sizes) == 4 * 3 * 3 * (7 + 11)
    projected, summed = 4 * 3 * 5 * (7 + 11), 4 * 3 * 5 * (7 + 11)
    assert attention_multiply_adds("performer_attention", {"num_features": 5}, **sizes) == projected + summed
    assert attention_multiply_adds("softmax_attention", {}, **sizes) == 2 * 4 * 3 * 77
    assert attention_multiply_adds("gated_linear_attention", {}, **sizes) == 4 * 3 * 3 * (7 + 11)
    assert attention_multiply_adds("delta_attention", {}, **sizes) == 4 * 3 * 3 * (7 + 11 + 11)
    pairs, features = (of_text(LanguageConfig("d64", 12, op=op)) for op in ("softmax_attention", "efficient_attention"))
    assert pairs - features == 2 * 4 * (2 * 64 * 12 * 13 // 2 - 64 * 32 * 2 * 12)  # four layers, two heads of 32
    with pytest.raises(ValueError, match="linformer_attention: there is no formula of its multiply-adds"):
        attention_multiply_adds("linformer_attention", {}, **sizes)
