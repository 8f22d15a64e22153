"""Multi-query associative recall: the domain of language models on generated pairs of keys and values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from attnkit_experiments.data.text.bytes import TextData
from attnkit_experiments.data.text.keys_values import RecallRules, generate
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.language.domain import GENERATED, LanguageDomain
from attnkit_experiments.language.methods import MethodStudy
from attnkit_experiments.language.methods import variants as plain_variants
from attnkit_experiments.study.recipe import Measure, Source, Variant, from_study


@dataclass(frozen=True)
class RecallStudy(MethodStudy):
    """`pairs` of a window; `vocabulary`: keys, values and a filler; `train_windows`, `test_windows`: their numbers.

    `shift`: whether keys see the token before too (`layers.Shifted`), so that a value is found by its key in one layer.
    """

    task: Literal["recall"] = "recall"  # type: ignore[assignment]
    pairs: int = 8
    vocabulary: int = 8192
    train_windows: int = 100_000
    test_windows: int = 3_000
    shift: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        rules(self)


def rules(study: RecallStudy) -> RecallRules:
    return from_study(RecallRules, study, train=study.train_windows, test=study.test_windows)


def variants(study: RecallStudy) -> tuple[Variant, ...]:
    found = plain_variants(study)
    if not study.shift:
        return found
    return tuple(dataclasses.replace(each, options={**each.options, "shift": True}) for each in found)


class RecallDomain(LanguageDomain):
    measure = Measure("accuracy", "accuracy at queries", factor=100, unit="%", better="more")

    def source(self) -> str:
        return GENERATED

    def load(self, source: Source) -> TextData:
        if source.place != GENERATED:
            raise UserError(f"--data {source.place}: the task recall needs {GENERATED}")
        try:
            return generate(rules(source.study))
        except ValueError as error:
            raise UserError(f"recall: {error}") from None


DOMAIN = RecallDomain()
