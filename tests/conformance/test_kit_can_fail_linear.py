"""Adapters of ops with states that are wrong in one known way, each caught by the property named beside it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attnkit_conformance.judge import properties

from .planting import verdict
from .test_kit_can_fail import WRONG, Correct


class ForgetsKeySum(Correct):
    """Resumes from S and starts z anew."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        fresh = {"initial_z": np.zeros_like(arrays["initial_z"])} if "initial_z" in arrays else {}
        return super().call(op, {**arrays, **fresh}, params)


class ForgetsLevel(Correct):
    """Resumes as if the sums of the state had been scaled by exp(0)."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        level = {name: np.zeros_like(arrays[name]) for name in ("initial_c", "initial_m") if name in arrays}
        return super().call(op, {**arrays, **level}, params)


class ForgetsBetweenChunks(Correct):
    """Each chunk begins without a state: a query sees the keys of its own chunk only."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        keys = np.arange(arrays["k"].shape[-2]) // params.get("chunk_size", 64)
        queries = keys[-arrays["q"].shape[-2] :]
        return super().call(op, {**arrays, "mask": queries[:, None] == keys}, params)


class CutsGradientsBetweenChunks(Correct):
    """The outputs are right; the gradient of a chunk ends at its first token."""

    def vjp(self, op: str, arrays: Any, params: Any, cotangents: Any) -> Any:
        keys = np.arange(arrays["k"].shape[-2]) // params.get("chunk_size", 64)
        queries = keys[-arrays["q"].shape[-2] :]
        return super().vjp(op, {**arrays, "mask": queries[:, None] == keys}, params, cotangents)


class LooksBeforeItAdds(Correct):
    """A step answers from the state that it was given: its own token has features exp(-1000) = 0."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        right = super().call(op, arrays, params)
        if not op.endswith("_step"):
            return right
        before = super().call(op, {**arrays, "k_t": np.full_like(arrays["k_t"], -1000)}, params)
        return {**right, "o_t": before["o_t"]}


class StepsKeepTheirLevel(Correct):
    """A step returns sums relative to the largest exponent so far and says that it was 0."""

    def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
        level = {"m": np.zeros_like(answer["m"])} if op.endswith("_step") else {}
        return super().outputs(op, arrays, {**answer, **level}, params)


class SubtractsTheFuture(Correct):
    """Sums of the past as the sum of everything minus that of the future: rounding lets the future through."""

    def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
        everything = arrays["v"].sum(axis=-2, keepdims=True)
        return super().outputs(op, arrays, {**answer, "o": answer["o"] + everything - everything}, params)


class MasksValuesOnly(Correct):
    """v of padding is 0; its φ(k) stays in the denominator."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        kept = {name: x for name, x in arrays.items() if name != "mask"}
        mask = arrays.get("mask", np.ones(1, bool))
        return super().call(op, {**kept, "v": np.where(mask[:, None], arrays["v"], 0)}, params)


class Decays(Correct):
    """A token counts a little less with each one after it."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        weights = 0.99 ** np.arange(arrays["v"].shape[-2])[::-1, None]
        return super().call(op, {**arrays, "v": (arrays["v"] * weights).astype(arrays["v"].dtype)}, params)


class ClampOfTheBatch(Correct):
    """The least denominator grows with what the items of a batch differ by."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        return super().call(op, arrays, {**params, "eps": 1e-6 + float(np.std(arrays["k"], axis=0).max())})


class CentresOverTheBatch(Correct):
    """k minus its mean over the batch: softmax over the tokens cancels any constant, but this one is none."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        moved = arrays["k"] - arrays["k"].mean(axis=0, keepdims=True) * (len(arrays["k"]) > 1)
        return super().call(op, {**arrays, "k": moved}, params)


class ClampOfThePadding(Correct):
    """The least denominator counts every token, padding included."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        padding = arrays["k"].shape[-2] - arrays.get("key_lengths", arrays["k"].shape[-2])
        return super().call(op, arrays, {**params, "eps": 1e-6 * float(1 + padding)})


class CountsPadding(Correct):
    """The n in the denominator of cosine attention is the length of the array; its weights shrink by n / S."""

    def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
        S = arrays["k"].shape[-2]
        return super().outputs(op, arrays, {**answer, "o": answer["o"] * (arrays.get("key_lengths", S) / S)}, params)


class FeaturesHideNaN(Correct):
    """φ by fmax: a NaN becomes 0."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        return super().call(op, {**arrays, "k": np.nan_to_num(arrays["k"])}, params)


class AddsInAnyOrder(Correct):
    """Every other run adds the keys up from the end, as parallel additions to one place do."""

    runs = 0

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        self.runs += 1
        if self.runs % 2:
            return super().call(op, arrays, params)
        axes = {name: axis for name, axis in (("k", -2), ("v", -2), ("mask", -1)) if name in arrays}
        return super().call(op, {**arrays, **{n: np.flip(arrays[n], axis) for n, axis in axes.items()}}, params)


PLANTED: tuple[tuple[type[Correct], str, str, str], ...] = (
    (ForgetsKeySum, "linear_attention", "float32", "resumed"),
    (ForgetsKeySum, "cosine_attention", "float32", "resumed"),
    (ForgetsLevel, "performer_attention", "float32", "resumed"),
    (ForgetsLevel, "efficient_attention", "bfloat16", "resumed"),
    (ForgetsBetweenChunks, "linear_attention", "float32", "chunked"),
    (ForgetsBetweenChunks, "cosine_attention", "float16", "chunked"),
    (CutsGradientsBetweenChunks, "performer_attention", "float32", "chunked"),
    (LooksBeforeItAdds, "linear_attention", "float32", "step_by_step"),
    (StepsKeepTheirLevel, "efficient_attention", "float32", "step_by_step"),
    (SubtractsTheFuture, "linear_attention", "float64", "causal_prefix"),
    (SubtractsTheFuture, "efficient_attention", "float64", "causal_prefix"),
    (MasksValuesOnly, "linear_attention", "float32", "padding_contents"),
    (MasksValuesOnly, "performer_attention", "float32", "padding_contents"),
    (Decays, "linear_attention", "float32", "key_permutation"),
    (Decays, "efficient_attention", "bfloat16", "key_permutation"),
    (ClampOfTheBatch, "linear_attention", "float32", "batch_mates"),
    (CentresOverTheBatch, "efficient_attention", "float32", "batch_mates"),
    (ClampOfThePadding, "linear_attention", "float64", "padding_amount"),
    (CountsPadding, "cosine_attention", "float32", "padding_amount"),
    (FeaturesHideNaN, "linear_attention", "float32", "visible_nan"),
    (FeaturesHideNaN, "efficient_attention", "float32", "visible_nan"),
    (AddsInAnyOrder, "linear_attention", "float64", "rerun"),
    (AddsInAnyOrder, "cosine_attention", "float64", "rerun"),
)


@pytest.mark.parametrize(("wrong", "op", "dtype", "name"), PLANTED, ids=lambda x: getattr(x, "__name__", x))
def test_wrong_adapter_is_caught_and_the_correct_one_passes(
    wrong: Callable[[], Correct], op: str, dtype: str, name: str
) -> None:
    assert verdict(wrong(), op, dtype, name).checks == {name}
    right = verdict(Correct(), op, dtype, name)
    assert right.status == "pass", right.message


def test_every_property_is_known_to_fail() -> None:
    planted = {check for *_, check in (*WRONG, *PLANTED)}
    assert [item.name for item in properties.PROPERTIES if item.name not in planted] == []
