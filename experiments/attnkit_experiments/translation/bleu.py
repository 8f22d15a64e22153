"""Corpus BLEU by sacrebleu, always with the signature of the computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class Bleu(NamedTuple):
    """`score` in 0..100, hypothesis tokens over reference tokens, and sacrebleu's signature."""

    score: float
    length_ratio: float
    signature: str


def corpus_bleu(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "13a", lowercase: bool = False
) -> Bleu:
    """BLEU of one hypothesis and one reference per sentence (Papineni et al. 2002; Post 2018).

    tokenize="13a" on detokenised text is comparable between papers. tokenize="none" takes the texts as they
    are: on Moses-tokenised ones it is the tokenised BLEU that Shen et al. 2023 report.

    Raises:
        ValueError: no sentences, or not as many references.
    """
    if not hypotheses or len(hypotheses) != len(references):
        raise ValueError(f"corpus_bleu: {len(hypotheses)} hypotheses and {len(references)} references")
    from sacrebleu.metrics import BLEU  # only needed for translation

    # force: sacrebleu would warn about tokenised text, the purpose of "none"
    metric = BLEU(tokenize=tokenize, lowercase=lowercase, force=tokenize == "none")
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return Bleu(score.score, score.sys_len / score.ref_len, str(metric.get_signature()))


def sentence_statistics(hypotheses: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """What corpus BLEU sums over sentences, by 13a: (n, 10) int32 as `engine.outcomes` has it."""
    from sacrebleu.metrics import BLEU  # only needed for translation

    metric = BLEU(effective_order=True)  # changes the score of a sentence, which is not used, and no count
    found = [metric.sentence_score(one, [other]) for one, other in zip(hypotheses, references, strict=True)]
    return np.array([[each.sys_len, each.ref_len, *each.counts, *each.totals] for each in found], dtype=np.int32)


def paired_bootstrap(
    baseline: Sequence[str], systems: Sequence[Sequence[str]], references: Sequence[str]
) -> list[float]:
    """p-values of systems beside a baseline by sacrebleu's paired bootstrap (Koehn 2004): 1,000 test sets drawn with
    replacement, the same for all, by sacrebleu's own seed.
    """
    from sacrebleu.metrics import BLEU  # only needed for translation
    from sacrebleu.significance import PairedTest, Result

    named: list[tuple[str, Sequence[str]]] = [(str(n), each) for n, each in enumerate((baseline, *systems))]
    _, scores = PairedTest(named, {"BLEU": BLEU(references=[list(references)])}, None, test_type="bs")()
    found = (each for each in scores["BLEU"][1:] if isinstance(each, Result))
    return [each.p_value for each in found if each.p_value is not None]


def moses(language: str) -> Callable[[str], str]:
    """Moses' tokenisation of a language, without escapes, by sacremoses, on which papers compute BLEU."""
    from sacremoses import MosesTokenizer

    tokenizer = MosesTokenizer(lang=language)
    return lambda text: str(tokenizer.tokenize(text, return_str=True, escape=False))
