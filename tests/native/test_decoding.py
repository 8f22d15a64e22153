"""A cache of keys that grows by a token meets a new signature in every call: what one costs, counted."""

from typing import Any

import numpy as np
import pytest
import torch

import attnkit
from attnkit._core import check
from attnkit.backends.native import lower

pytestmark = pytest.mark.usefixtures("library")
OPS = (attnkit.softmax_attention, attnkit.reluformer_attention, attnkit.linear_attention)


@pytest.mark.parametrize("make", [np.ones, torch.ones], ids=["numpy", "torch"])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_a_token_more_is_one_check_and_one_plan(op: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"check": 0, "prepare": 0}

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return function(*arguments, **options)

        return call

    def decode(keys: int) -> None:
        op(make((1, 2, 1, 8)), make((1, 2, keys, 8)), make((1, 2, keys, 8)), impl="native")

    decode(20)
    monkeypatch.setattr(check, "call", counted("check", check.call))
    monkeypatch.setattr(lower, "prepare", counted("prepare", lower.prepare))
    for keys in range(21, 25):
        decode(keys)
    assert counts["check"] == counts["prepare"] == 4
