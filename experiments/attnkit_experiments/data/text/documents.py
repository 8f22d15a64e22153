"""Long inputs made of consecutive sentences, and results by length.

Shen et al. 2023, "A Study on ReLU and Softmax in Transformer", Appendix B: of a document of sentences with
l_1, l_2, …, l_K tokens, the first m with Σ_{i≤m} l_i ≤ L and Σ_{i≤m+1} l_i > L become one new document; the next one
starts with sentence m + 1. The paper does not say which side l counts; here both sides must fit, since both are
attended over. It puts nothing between the sentences, and neither do we.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PAPER_LIMITS = (128, 256, 512, 1024, 2048)


def concatenation(
    source_lengths: np.ndarray, target_lengths: np.ndarray, documents: np.ndarray, limit: int
) -> np.ndarray:
    """Starts (g + 1,) of the new documents: group k is the sentence pairs starts[k] … starts[k + 1] - 1.

    source_lengths, target_lengths: (n,) tokens without BOS and EOS. documents: (n,) the document that a pair is in; a
    group never crosses from one to another. limit: L in tokens. Each group is as long as it can be: with the next pair
    of its document one side would exceed L. A pair that exceeds L by itself is a separate group, the only kind that
    does; the caller decides what to do with it.
    """
    if not len(source_lengths) == len(target_lengths) == len(documents):
        raise ValueError(
            "concatenation: source_lengths, target_lengths and documents must have one length, got "
            f"{len(source_lengths)}, {len(target_lengths)} and {len(documents)}"
        )
    if limit < 1:
        raise ValueError(f"concatenation: limit must be at least 1 token, got {limit}")
    starts: list[int] = []
    source = target = 0
    inside = None
    rows = zip(source_lengths.tolist(), target_lengths.tolist(), documents.tolist(), strict=True)
    for index, (more_source, more_target, document) in enumerate(rows):
        source, target = source + more_source, target + more_target
        if document != inside or max(source, target) > limit:
            starts.append(index)
            source, target, inside = more_source, more_target, document
    return np.array([*starts, len(documents)], dtype=np.int64)


def length_buckets(lengths: np.ndarray, edges: Sequence[int] = PAPER_LIMITS) -> dict[str, np.ndarray]:
    """Indices of the samples by length in tokens: "1-128", "129-256", …, ">2048"; every sample is in exactly one.

    lengths: (n,). edges: the longest length of each bucket, increasing. Empty buckets are included, so
    that every run reports the same rows.
    """
    if not edges or list(edges) != sorted(set(edges)) or edges[0] < 1:
        raise ValueError(f"length_buckets: edges must increase from at least 1, got {tuple(edges)}")
    which = np.searchsorted(np.asarray(edges), lengths, side="left")
    lowest = [1, *(edge + 1 for edge in edges[:-1])]
    names = [f"{low}-{high}" for low, high in zip(lowest, edges, strict=True)] + [f">{edges[-1]}"]
    return {name: np.flatnonzero(which == index) for index, name in enumerate(names)}
