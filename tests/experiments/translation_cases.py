"""What the tests of translation share: models of a few thousand weights, random batches, sentence pairs of numbers."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnkit_experiments.data.text.pairs import BOS, EOS, PAD, Sentences, Split, TranslationData
from attnkit_experiments.translation.methods import METHODS, everywhere
from attnkit_experiments.translation.model import TranslationConfig, Translator
from tests.library.arrays import LAYER

VOCABULARY = 23
# ops that follow one another in two layers of encoder and of decoder, with their memories, and the logits
TRANSLATOR = 2 * (LAYER + 2) + 2 * (2 * LAYER + 2) + 1
NO_DROPOUT = {"linear", "cosine", "efficient", "performer"}  # ops that take none
CAUSAL = tuple(METHODS)  # every method of the table has a causal form: the tests run all of them as decoder


def config(method: str = "vanilla", **changes) -> TranslationConfig:
    sizes = {"vocabulary": VOCABULARY, "encoder_layers": 2, "decoder_layers": 2, "dim": 16, "heads": 2, "slots": 24}
    dropout = {"attention_dropout": 0.0} if method in NO_DROPOUT else {}
    return TranslationConfig(**{**sizes, "max_length": 40, **dropout, **everywhere(method), **changes})


def translator(method: str = "vanilla", seed: int = 0, **changes) -> Translator:
    """In float64 and without dropout."""
    torch.manual_seed(seed)
    return Translator(config(method, **changes)).double().eval()


def talker(method: str = "vanilla", seed: int = 1, **changes) -> Translator:
    """A translator that does not repeat its last token, as one with one embedding does, and that may stop."""
    model, generator = translator(method, seed, shared=False, **changes), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, dtype=p.dtype, generator=generator)
        assert model.output is not None
        model.output.weight[EOS] *= 1.3
    return model


class Tokens(NamedTuple):
    source: Tensor
    mask: Tensor
    target_in: Tensor

    def only(self, item: int) -> "Tokens":
        """One item as a batch of its own, without padding."""
        source, target = self.source[item], self.target_in[item]
        source, target = source[source != PAD][None], target[target != PAD][None]
        return Tokens(source, source != PAD, target)

    def wider(self, by: int) -> "Tokens":
        """The same with more padding behind."""
        source, target = (torch.nn.functional.pad(x, (0, by), value=PAD) for x in (self.source, self.target_in))
        return Tokens(source, source != PAD, target)


def tokens(lengths: Sequence[tuple[int, int]] = ((7, 6), (3, 6), (5, 2)), seed: int = 0) -> Tokens:
    """Random sentences of these lengths, sources with EOS and targets with BOS counted."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(4, VOCABULARY, (2, len(lengths), max(map(max, lengths))), generator=generator)
    source, target = (x[:, : max(pair[side] for pair in lengths)].clone() for side, x in enumerate(drawn))
    target[:, 0] = BOS
    for item, (of_source, of_target) in enumerate(lengths):
        source[item, of_source - 1], source[item, of_source:] = EOS, PAD
        target[item, of_target:] = PAD
    return Tokens(source, source != PAD, target)


class Numbers(TranslationData):
    """Pairs whose text is the numbers of their tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(f"w{token}" for token in ids)


def sentences(rows: Sequence[Sequence[int]]) -> Sentences:
    starts = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return Sentences(np.concatenate([np.asarray(row, dtype=np.int32) for row in rows]), starts)


def split(pairs: int, seed: int, longest: int = 7) -> Split:
    """The target is the source backwards."""
    generator = np.random.default_rng(seed)
    rows = [generator.integers(4, VOCABULARY, generator.integers(1, longest)).tolist() for _ in range(pairs)]
    turned = [row[::-1] for row in rows]
    texts = [tuple(" ".join(f"w{token}" for token in row) for row in side) for side in (rows, turned)]
    return Split(sentences(rows), sentences(turned), *texts)


def numbers(train: int = 20, valid: int = 9, test: int = 7) -> Numbers:
    splits = (split(count, seed) for seed, count in enumerate((train, valid, test)))
    return Numbers("numbers", "a", "b", *splits, VOCABULARY, "", {})


TINY = (
    *("subwords=300", "layers=1", "dim=16", "heads=2", "slots=24", "positions=128", "dropout=0", "steps=4"),
    *("tokens=128", "warmup=2", "lr=0.01", "beam=2", "analysed=1", "test_pairs=0"),
)
"""Settings of a study of translation that takes a moment."""
