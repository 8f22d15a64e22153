"""Half types: sums rounded on the way are rejected, weights rounded for their product with v are not."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from attnkit_conformance import core
from attnkit_conformance.golden import draw_case
from attnkit_conformance.model.case import Case, rounded
from attnkit_conformance.opdb import BY_NAME, OPDB
from attnkit_conformance.scenes.attention import HALF_TYPES, Scene, scene_sample

from .test_kit_can_fail import Correct, HalfAccumulator, common, weights_of, widened

OPS = [op.name for op in OPDB if op.group in ("a", "b") and op.vjp and op.weights and not op.joined]
LEVEL = [name for name in OPS if not BY_NAME[name].falling]  # others have weight on few keys, whose sums are short
SIZE = 0.1  # of scores: sparse attention has weights on all keys
FEW = Scene("few", 64, 64, size=SIZE, options=("positive_values",))
MANY = Scene("many", 64, 257, size=SIZE, options=("positive_values",))
SATURATED = Scene("saturated", 33, 65, size=4.0)


class AfterEvery16(HalfAccumulator):
    chunk = 16


class RoundsWeights(Correct):
    """Weights rounded to the dtype of the inputs for the products with v and with do (semantics A7)."""

    def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
        w = rounded(weights_of(op, arrays, params), arrays["q"].dtype.name)
        return super().outputs(op, arrays, {**answer, "o": w @ common(arrays, params).v}, params)

    def vjp(self, op: str, arrays: Any, params: Any, cotangents: Any) -> Any:
        w = rounded(weights_of(op, arrays, params), arrays["q"].dtype.name)
        dv = np.swapaxes(w, -1, -2) @ widened(cotangents["o"])
        return {**super().vjp(op, arrays, params, cotangents), **self.rounded(op, arrays, {"v": dv})}


class RoundsOutputFirst(Correct):
    """ds = w (dw - do·o) with o after its rounding, as kernels that keep nothing else of the forward pass have it."""

    def vjp(self, op: str, arrays: Any, params: Any, cotangents: Any) -> Any:
        sc, do = common(arrays, params), widened(cotangents["o"])
        w = weights_of(op, arrays, params)
        o = w @ sc.v
        ds = w * (do @ np.swapaxes(sc.v, -1, -2) - np.sum(do * self.kept(o, arrays), axis=-1, keepdims=True))
        dq, dk = sc.scale * (ds @ sc.k), sc.scale * (np.swapaxes(ds, -1, -2) @ sc.q)
        return {**super().vjp(op, arrays, params, cotangents), **self.rounded(op, arrays, {"q": dq, "k": dk})}

    def kept(self, o: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        return rounded(o, arrays["q"].dtype.name)


class KeepsOutput(RoundsOutputFirst):
    """The same with o in the compute dtype."""

    def kept(self, o: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        return rounded(o, "float32")


def case_of(op: str, scene: Scene, dtype: str) -> Case:
    return draw_case(scene_sample(BY_NAME[op], scene, {}, dtype))


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("op", LEVEL)
def test_sums_in_a_half_type_are_rejected(op: str, dtype: str) -> None:
    for scene, wrong in ((FEW, HalfAccumulator()), (MANY, HalfAccumulator()), (MANY, AfterEvery16())):
        found = core.check(wrong, case_of(op, scene, dtype))
        assert found.checks == {"bound"}, (scene.name, wrong.chunk, found.ratio)
        assert {m.output for m in found.measured if m.failures} == {"o"}


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("op", OPS)
def test_weights_rounded_for_a_product_pass(op: str, dtype: str) -> None:
    for scene in (FEW, MANY, SATURATED):
        found = core.check(RoundsWeights(), case_of(op, scene, dtype))
        assert found.status == "pass", (scene.name, found.message)
        assert found.ratio < 0.7, scene.name


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_a_gradient_from_a_rounded_output_is_rejected(dtype: str) -> None:
    case = case_of("softmax_attention", SATURATED, dtype)
    assert "dq" in {m.output for m in core.check(RoundsOutputFirst(), case).measured if m.failures}
    assert core.check(KeepsOutput(), case).status == "pass"
