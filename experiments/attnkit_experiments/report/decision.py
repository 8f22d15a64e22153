"""What decides which of two trained models is better, and what stands beside it: the same on all pages."""

from __future__ import annotations

from attnkit_experiments.study.recipe import Measure

TEST_LOSS = Measure("test_loss", "test loss", digits=3, unit="nats", better="less")
VALID_LOSS = Measure("valid_loss", "validation loss", digits=3, unit="nats", better="less")

DECIDING = {"accuracy": TEST_LOSS, "bleu": VALID_LOSS}
"""What decides in the place of a task's metric: the loss over the test set, of which single answers lose less. That of
translations is over the 1,014 pairs of valid, by which nothing was chosen; BLEU is over 300 captions."""


def deciding(metric: Measure) -> Measure:
    """What decides where a task has this metric."""
    return DECIDING.get(metric.key, metric)


def in_order(metric: Measure) -> list[Measure]:
    """The measure that decides, and the task's metric beside it if that is another."""
    return list(dict.fromkeys((deciding(metric), metric)))
