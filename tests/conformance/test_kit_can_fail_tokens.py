"""Adapters of low-rank, hashed, gated, memory and packed attention that are wrong in one known way."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from attnkit_conformance.opdb import BY_NAME

from .planting import verdict
from .test_kit_can_fail import Correct, Restless


def first(axes: Mapping[str, int], arrays: Any) -> str:
    """The first array that holds the queries, or the keys."""
    return next(name for name in axes if name in arrays)


class NormOverTheBatch(Correct):
    """Nyström's first iterate is divided by the largest norm of all matrices of the batch."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        return super().call(op, arrays, {**params, "init": "batch_max"})


class CentresOverTheBatch(Correct):
    """Queries minus their mean over the batch."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        name = first(BY_NAME[op].tokens.queries, arrays)
        x = arrays[name]
        return super().call(op, {**arrays, name: x - x.mean(axis=0, keepdims=True) * (len(x) > 1)}, params)


class RotationsOfTheLast(Correct):
    """Every item is hashed with the rotations of the last one."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        shared = np.broadcast_to(arrays["rotations"][-1:], arrays["rotations"].shape)
        return super().call(op, {**arrays, "rotations": shared}, params)


class ForgetsBoundaries(Correct):
    """All sequences of a pack are one."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        edges = {name: x[[0, -1]] for name, x in arrays.items() if name.startswith("cu_seqlens")}
        return super().call(op, {**arrays, **edges}, params)


class MasksValuesOnly(Correct):
    """v of padding is 0; among queries and keys, in norms, means and hashes, padding is there."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        held = {name: x for name, x in arrays.items() if name not in ("mask", "key_lengths", "query_mask")}
        tokens = np.arange(arrays["v"].shape[-2])
        there = arrays.get("mask", tokens < arrays.get("key_lengths", len(tokens)))
        return super().call(op, {**held, "v": np.where(there[:, None], arrays["v"], 0)}, params)


class PaddingInTheGradient(Correct):
    """The outputs are right; the gradient of a projection takes 0 times what padding holds."""

    def vjp(self, op: str, arrays: Any, params: Any, cotangents: Any) -> Any:
        found = super().vjp(op, arrays, params, cotangents)
        return {**found, "proj_k": found["proj_k"] + 0 * arrays["k"].sum()}


class PaddedLength(Correct):
    """Divides by the number of all tokens, padding included."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        return super().call(op, arrays, {**params, "length": "all"})


class NormOverTheSequence(Correct):
    """The output relative to the size of all tokens, and back: rounding lets the future through."""

    def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
        size = np.abs(arrays[first(BY_NAME[op].tokens.keys, arrays)]).sum()
        return super().outputs(op, arrays, {**answer, "o": answer["o"] / size * size}, params)


class Decays(Correct):
    """A key counts a little less with each one after it."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        axes = BY_NAME[op].tokens.keys
        name = first({n: axis for n, axis in axes.items() if n in ("v", "values", "x")}, arrays)
        x = np.moveaxis(arrays[name], axes[name], -1)
        decayed = (x * 0.99 ** np.arange(x.shape[-1])).astype(x.dtype)
        return super().call(op, {**arrays, name: np.moveaxis(decayed, -1, axes[name])}, params)


class HidesNaN(Correct):
    """A NaN in a key becomes 0."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        name = first(BY_NAME[op].tokens.keys, arrays)
        return super().call(op, {**arrays, name: np.nan_to_num(arrays[name])}, params)


PLANTED: tuple[tuple[type[Correct], str, str, str], ...] = (
    (NormOverTheBatch, "nystrom_attention", "float32", "batch_mates"),
    (CentresOverTheBatch, "soft_attention", "float32", "batch_mates"),
    (CentresOverTheBatch, "linformer_attention", "float32", "batch_mates"),
    (CentresOverTheBatch, "sima_attention", "bfloat16", "batch_mates"),
    (CentresOverTheBatch, "key_value_memory", "float32", "batch_mates"),
    (CentresOverTheBatch, "gated_attention_unit", "float32", "batch_mates"),
    (RotationsOfTheLast, "lsh_attention", "float32", "batch_mates"),
    (ForgetsBoundaries, "softmax_attention_packed", "float32", "batch_mates"),
    (ForgetsBoundaries, "linear_attention_packed", "float16", "batch_mates"),
    (MasksValuesOnly, "linformer_attention", "float32", "padding_contents"),
    (PaddingInTheGradient, "linformer_attention", "float32", "padding_contents"),
    (MasksValuesOnly, "lsh_attention", "float32", "padding_contents"),
    (MasksValuesOnly, "sima_attention", "float32", "padding_contents"),
    (MasksValuesOnly, "sima_attention", "float32", "padding_amount"),
    (MasksValuesOnly, "soft_attention", "float32", "padding_contents"),
    (MasksValuesOnly, "nystrom_attention", "float32", "padding_amount"),
    (PaddedLength, "gated_attention_unit", "float32", "padding_amount"),
    (NormOverTheSequence, "gated_attention_unit", "float64", "causal_prefix"),
    (NormOverTheSequence, "softmax_attention_packed", "float64", "causal_prefix"),
    (Decays, "soft_attention", "float32", "key_permutation"),
    (Decays, "linformer_attention", "float32", "key_permutation"),
    (Decays, "sima_attention", "float32", "key_permutation"),
    (Decays, "key_value_memory", "float32", "key_permutation"),
    (Decays, "gated_attention_unit", "float32", "key_permutation"),
    (Decays, "pointwise_attention_packed", "float32", "key_permutation"),
    (HidesNaN, "soft_attention", "float32", "visible_nan"),
    (HidesNaN, "nystrom_attention", "float32", "visible_nan"),
    (HidesNaN, "linformer_attention", "float32", "visible_nan"),
    (HidesNaN, "sima_attention", "float32", "visible_nan"),
    (HidesNaN, "key_value_memory", "float32", "visible_nan"),
    (HidesNaN, "gated_attention_unit", "float32", "visible_nan"),
    (HidesNaN, "linear_attention_packed", "float32", "visible_nan"),
    (Restless, "lsh_attention", "float64", "rerun"),
    (Restless, "softmax_attention_packed", "float64", "rerun"),
)
NOT_ASKED: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("nystrom_attention", "key_permutation", {}),
    ("nystrom_attention", "batch_mates", {"init": "batch_max"}),
    ("lsh_attention", "causal_prefix", {}),
    ("lsh_attention", "key_permutation", {}),
    ("lsh_attention", "visible_nan", {}),
)


@pytest.mark.parametrize(("wrong", "op", "dtype", "name"), PLANTED, ids=lambda x: getattr(x, "__name__", x))
def test_wrong_adapter_is_caught_and_the_correct_one_passes(
    wrong: Callable[[], Correct], op: str, dtype: str, name: str
) -> None:
    assert name in BY_NAME[op].invariances
    assert verdict(wrong(), op, dtype, name).checks == {name}
    right = verdict(Correct(), op, dtype, name)
    assert right.status == "pass", right.message


@pytest.mark.parametrize(("op", "name", "params"), NOT_ASKED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_does_not_hold_is_not_asked_for(op: str, name: str, params: Mapping[str, Any]) -> None:
    assert verdict(Correct(), op, "float64", name, params).checks == {name}
    assert params or name not in BY_NAME[op].invariances
