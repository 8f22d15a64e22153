"""The referee is tested by adapters that are wrong in one known way: the check named beside each must catch it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.special import expit

import attnkit_reference
from attnkit_conformance import core, golden
from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.judge import properties
from attnkit_conformance.model import tolerance
from attnkit_conformance.model.case import DTYPES, numpy_dtype, rounded
from attnkit_conformance.opdb import BY_NAME, OPDB
from attnkit_conformance.scenes import attention
from attnkit_reference._core import scores
from tests.conformance.plain import OnNumpy

COMMON = (
    "mask", "bias", "causal", "window", "key_lengths", "query_mask", "scale", "enable_gqa", "dropout_mask", "dropout",
)  # fmt: skip


class Correct(OnNumpy):
    """The reference itself, rounded once: an adapter that must pass everything."""

    name: str = "correct"
    dtypes: tuple[str, ...] = DTYPES

    def rounded(self, op: str, arrays: Any, answer: Any) -> Any:
        dtype = next(x.dtype.name for x in arrays.values() if x.dtype.kind not in "biu")
        made = {}
        for name, x in answer.items():
            given = arrays[name].dtype if name in arrays else numpy_dtype(BY_NAME[op].output_dtype(name, dtype))
            made[name] = np.asarray(x).astype(given)
        return made

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        row = BY_NAME[op]
        wide = {n: widened(x) for n, x in arrays.items()}
        return self.outputs(op, arrays, row.binding.forward(attnkit_reference, row, wide, params), params)

    def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
        """What wrong adapters override: float64 outputs before rounding."""
        fresh = {name: x for name, x in arrays.items() if name not in answer}
        return self.rounded(op, fresh, answer)

    def vjp(self, op: str, arrays: Any, params: Any, cotangents: Any) -> Any:
        row = BY_NAME[op]
        wide = {n: widened(x) for n, x in arrays.items()}
        pulled = {n: widened(x) for n, x in cotangents.items()}
        return self.rounded(op, arrays, row.binding.vjp(attnkit_reference, row, wide, params, pulled))


def widened(x: Any) -> Any:
    """Float arrays in float64, anything else as it is."""
    return x.astype(np.float64) if isinstance(x, np.ndarray) and x.dtype.kind not in "biu" else x


def common(arrays: Any, params: Any) -> Any:
    """The scores of a call, as the reference computes them."""
    given = {n: widened(x) for n, x in (*arrays.items(), *params.items()) if n in COMMON}
    q, k, v = (widened(arrays[n]) for n in "qkv")
    return scores("wrong", q, k, v, **given)


class MaskBeforeActivation(Correct):
    """sigmoid(s·mask): hidden keys get sigmoid(0 - log n) instead of 0."""

    def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
        sc = common(arrays, params)
        n = np.maximum(sc.n, 1)[..., None]
        w = expit(sc.s - np.log(n)) * (1 if sc.keep is None else np.where(sc.visible, sc.keep, 1))
        v = np.nan_to_num(widened(arrays["v"]), posinf=0, neginf=0)
        return super().outputs(op, arrays, {"o": w @ (v.repeat(sc.groups, -3) if sc.groups > 1 else v)}, params)


class PaddedLength(Correct):
    """Divides by S instead of the number of visible keys."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        return super().call(op, arrays, {"length": "all", **params})


class HalfSlopeAtZero(Correct):
    """relu'(0) = 1/2, as automatic differentiation of maximum(s, 0) has it: the mean of relu and its mirror image."""

    def vjp(self, op: str, arrays: Any, params: Any, cotangents: Any) -> Any:
        right = super().vjp(op, arrays, params, cotangents)
        moved = super().vjp("pointwise_attention", arrays, {**params, "shift": 1e-30}, cotangents)
        return {name: ((x.astype(np.float64) + moved[name]) / 2).astype(x.dtype) for name, x in right.items()}


class TanhSigmoid(Correct):
    """sigmoid(x) = (1 + tanh(x/2))/2 in float32 has no relative accuracy in the tail."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        w = super().call(op, arrays, params)["w"]
        with np.errstate(divide="ignore", over="ignore"):
            x = np.log(w.astype(np.float64)) - np.log1p(-np.minimum(w.astype(np.float64), 1 - 1e-16))
        return {"w": (np.float32(0.5) * (1 + np.tanh((x / 2).astype(np.float32)))).astype(w.dtype)}


class FastTanh(Correct):
    """sigmoid(x) = (1 + tanh(x/2))/2 with the hardware's tanh, whose relative error is 2^-11."""

    def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
        sc = common(arrays, params)
        half = np.tanh((sc.s - np.log(np.maximum(sc.n, 1))[..., None]) / 2)
        digits = 2.0 ** (11 - np.ceil(np.log2(np.abs(half) + 1e-300)))
        w = 0.5 + 0.5 * np.round(half * digits) / digits
        return super().outputs(op, arrays, {"o": np.where(sc.visible, w, 0.0) @ sc.v}, params)


class UniformNullRows(Correct):
    """A softmax row that sees nothing attends to everything equally."""

    def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
        sc = common(arrays, params)
        v = np.where(np.isfinite(arrays["v"].astype(np.float64)), arrays["v"], 1).astype(np.float64)
        mean = np.broadcast_to(v.mean(-2, keepdims=True).repeat(sc.groups, -3), answer["o"].shape)
        return super().outputs(op, arrays, {**answer, "o": np.where(sc.n[..., None] > 0, answer["o"], mean)}, params)


def weights_of(op: str, arrays: Any, params: Any) -> np.ndarray:
    """The weights of a call before dropout."""
    row = BY_NAME[f"{op}_weights"]
    held = {n: widened(x) for n, x in arrays.items() if n in (*row.arguments, *row.optional)}
    kept = {n: x for n, x in params.items() if n in (*COMMON, *row.own) and n != "dropout"}
    return row.binding.forward(attnkit_reference, row, held, kept)["w"]


class HalfAccumulator(Correct):
    """Sums over keys that are rounded to the dtype of the inputs after every `chunk` of them."""

    chunk = 1

    def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
        sc, dtype = common(arrays, params), arrays["q"].dtype.name
        w = weights_of(op, arrays, params) * (1 if sc.keep is None else sc.keep)
        total = np.zeros_like(answer["o"])
        for first in range(0, sc.k.shape[-2], self.chunk):
            keys = slice(first, first + self.chunk)
            total = rounded(total + w[..., keys] @ sc.v[..., keys, :], dtype)
        return super().outputs(op, arrays, {**answer, "o": total}, params)


class LooksAhead(Correct):
    """The last key leaks into every row."""

    def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
        leak = 1e-12 * np.nan_to_num(arrays["k"].astype(np.float64)).sum()
        return super().outputs(op, arrays, {**answer, "o": answer["o"] * (1 + leak)}, params)


class Restless(Correct):
    """No two runs agree to the last bit."""

    def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
        self.runs = getattr(self, "runs", 0) + 1
        return super().outputs(op, arrays, {**answer, "o": answer["o"] * (1 + 1e-15 * self.runs)}, params)


class MultipliesPadding(Correct):
    """0 · NaN: padding is weighted with 0 instead of being replaced."""

    def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
        with np.errstate(invalid="ignore"):
            hidden = 0 * widened(arrays["v"]).sum()
        return super().outputs(op, arrays, {**answer, "o": answer["o"] + hidden}, params)


class SharesBatch(Correct):
    """Subtracts a maximum that runs over the batch, and underflows."""

    def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
        o = answer["o"]
        return super().outputs(op, arrays, {**answer, "o": o * (1 + 0.1 * (o.shape[0] > 1))}, params)


class FavoursEarlyKeys(Correct):
    """Position of keys matters."""

    def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
        first = np.nan_to_num(arrays["v"].astype(np.float64))[..., :1, :1]
        return super().outputs(op, arrays, {**answer, "o": answer["o"] + 1e-3 * first.max()}, params)


class OtherDropout(Correct):
    """Takes the seed plus one."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        if "dropout" in params:
            params = {**params, "dropout": (params["dropout"][0], params["dropout"][1] + 1)}
        return super().call(op, arrays, params)


class HidesNaN(Correct):
    """fmax(s, 0) turns a visible NaN into 0."""

    def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
        return super().outputs(op, arrays, {name: np.nan_to_num(x) for name, x in answer.items()}, params)


class Overwrites(Correct):
    """Scales q in place."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        answer = super().call(op, arrays, params)
        arrays["q"][...] *= 2
        return answer


class Widens(Correct):
    """Returns float64 whatever came."""

    def rounded(self, op: str, arrays: Any, answer: Any) -> Any:
        return {name: np.asarray(x, np.float64) for name, x in answer.items()}


class DropsAxis(Correct):
    """Returns the first batch item only."""

    def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
        return super().outputs(op, arrays, {**answer, "o": answer["o"][:1]}, params)


class OneBucketOff(Correct):
    """Hashes one token into the next bucket."""

    def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
        moved = answer["buckets"].copy()
        moved.flat[moved.size // 2 : moved.size // 2 + 1] += 1
        return super().outputs(op, arrays, {"buckets": moved}, params)


class ForgetsLse(Correct):
    """Returns o alone when lse was asked for."""

    def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
        return super().outputs(op, arrays, {"o": answer["o"]}, params)


class Overflows(Correct):
    """exp without subtracting the maximum."""

    def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
        large = np.max(np.abs(common(arrays, params).s), initial=0) > 88
        return super().outputs(op, arrays, {**answer, "o": answer["o"] * (np.nan if large else 1)}, params)


class SaysNo(Correct):
    """Declares everything unsupported and computes it all the same."""

    def unsupported(self, op: str, arrays: Any, params: Any) -> str | None:
        return "no"


class RefusesSilently(Correct):
    """Declares nothing and refuses."""

    def unsupported(self, op: str, arrays: Any, params: Any) -> str | None:
        return None

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        raise Unsupported("not today")


class VagueErrors(Correct):
    """Raises the right type with a text that says nothing."""

    errors = True

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        try:
            return super().call(op, arrays, params)
        except (ValueError, TypeError) as error:
            raise type(error)("bad input") from None


def failed_checks(adapter: Any, op: str, dtype: str, profile: str = "scenes") -> set[str]:
    """Names of all checks that an adapter fails on an op."""
    results = [core.check(adapter, case) for case in core.cases(op, profile, (dtype,))]
    results += properties.check_all(adapter, BY_NAME[op], "small", (dtype,))
    return {check for result in results for check in result.checks}


WRONG: tuple[tuple[Callable[[], Any], str, str, str], ...] = (
    (MaskBeforeActivation, "sigmoid_attention", "float64", "bound"),
    (MaskBeforeActivation, "sigmoid_attention", "float64", "padding_amount"),
    (PaddedLength, "pointwise_attention", "float64", "bound"),
    (PaddedLength, "pointwise_attention", "float64", "padding_amount"),
    (HalfSlopeAtZero, "pointwise_attention", "float32", "kink_gradients"),
    (TanhSigmoid, "sigmoid_attention_weights", "float32", "sigmoid_tail"),
    (UniformNullRows, "softmax_attention", "float32", "null_rows"),
    (HalfAccumulator, "softmax_attention", "bfloat16", "bound"),
    (HalfAccumulator, "softmax_attention", "float16", "bound"),
    (LooksAhead, "softmax_attention", "float64", "causal_prefix"),
    (Restless, "softmax_attention", "float64", "rerun"),
    (FastTanh, "sigmoid_attention", "float16", "bound"),
    (MultipliesPadding, "softmax_attention", "float32", "padding_contents"),
    (MultipliesPadding, "softmax_attention", "float32", "nonfinite"),
    (SharesBatch, "softmax_attention", "float32", "batch_mates"),
    (FavoursEarlyKeys, "softmax_attention", "float32", "key_permutation"),
    (OtherDropout, "softmax_attention", "float32", "dropout_bits"),
    (HidesNaN, "pointwise_attention", "float32", "visible_nan"),
    (Overwrites, "softmax_attention", "float32", "inputs"),
    (Widens, "softmax_attention", "float32", "dtype"),
    (DropsAxis, "softmax_attention", "float32", "shape"),
    (OneBucketOff, "lsh_buckets", "bfloat16", "bound"),
    (Widens, "lsh_buckets", "float32", "dtype"),
    (ForgetsLse, "softmax_attention", "float32", "names"),
    (Overflows, "softmax_attention", "float32", "nonfinite"),
    (SaysNo, "softmax_attention", "float32", "declared"),
    (RefusesSilently, "softmax_attention", "float32", "refused"),
    (VagueErrors, "softmax_attention", "float32", "error"),
)


@pytest.mark.parametrize(("place", "op"), [*enumerate(BY_NAME)])
def test_rounded_reference_passes_quick(place: int, op: str) -> None:
    """In a half type, where rounding is most of the error."""
    assert failed_checks(Correct(), op, ("bfloat16", "float16")[place % 2], "small") == set()


@pytest.mark.referee
@pytest.mark.parametrize("op", BY_NAME)
def test_rounded_reference_passes_every_scene(op: str) -> None:
    results = [core.check(Correct(), case) for case in core.cases(op, "scenes", DTYPES)]
    assert {result.id: result.message for result in results if result.failures} == {}


@pytest.mark.parametrize(("wrong", "op", "dtype", "check"), WRONG, ids=lambda x: getattr(x, "__name__", x))
def test_wrong_adapter_is_caught_by_the_named_check(wrong: Callable[[], Any], op: str, dtype: str, check: str) -> None:
    assert any(check in failed_checks(wrong(), op, dtype, profile) for profile in ("small", "scenes"))


def plain_case(op: str, dtype: str) -> Any:
    return attention.attention_case(BY_NAME[op], attention.QUICK[0], BY_NAME[op].variants[0], "", dtype)


class Shifted(Correct):
    """Correct but for one entry of o, which is off by `times` what is allowed for it."""

    def __init__(self, case: Any, times: float) -> None:
        self.step = times * golden.compute(case).outputs["o"].allowed

    def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
        moved = answer["o"].copy()
        moved.flat[moved.size // 2] += self.step.flat[moved.size // 2]
        return super().outputs(op, arrays, {**answer, "o": moved}, params)


@pytest.mark.parametrize("op", [op.name for op in OPDB if op.group == "a" and op.vjp])
@pytest.mark.parametrize("dtype", DTYPES)
def test_twice_the_bound_fails_and_a_quarter_of_it_passes(op: str, dtype: str) -> None:
    """A half type adds the rounding of the result, up to two thirds of the bound."""
    case = plain_case(op, dtype)
    assert core.check(Shifted(case, 2), case).checks == {"bound"}
    assert core.check(Shifted(case, 0.25), case).status == "pass"


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_entry_has_its_own_bound(dtype: str) -> None:
    """A head with small values beside another one: 2000 roundings of its numbers show, as they would alone."""
    case = plain_case("softmax_attention", dtype)
    v, error = case.arrays["v"].copy(), min(1.0, 2000 * tolerance.eps(dtype))
    v[:, 1] = rounded(2.0 ** (-8 if error == 1.0 else -12) * v[:, 1], dtype)
    small = replace(case, arrays={**case.arrays, "v": v})

    class IsCoarse(Correct):
        def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
            o = answer["o"].copy()
            o[:, 1] *= 1 - error
            return super().outputs(op, arrays, {**answer, "o": o}, params)

    assert core.check(Correct(), small).status == "pass"
    assert core.check(IsCoarse(), small).checks == {"bound"}


def test_undiscernible_limit_is_called_blind() -> None:
    case = plain_case("softmax_attention", "float32")
    limit = golden.compute(case).outputs["o"]
    assert tolerance.blind_spots("o", limit) == []
    blind = tolerance.blind_spots("o", replace(limit, allowed=np.full_like(limit.allowed, 4 * limit.largest)))
    assert [text.split()[2] for text in blind] == list(tolerance.impostors(limit.golden))


@pytest.mark.parametrize(("x", "golden"), [(np.inf, -np.inf), (np.nan, np.inf), (np.inf, np.nan), (0.0, np.nan)])
def test_nan_and_infinities_stand_where_the_golden_ones_do(x: float, golden: float) -> None:
    wrong, limit = np.array([1.0, x]), tolerance.limit(np.array([1.0, golden]), "float64")
    assert [check for check, _ in tolerance.measure("o", wrong, limit).failures] == ["nonfinite"]
    assert tolerance.measure("o", limit.golden, limit).failures == ()


@pytest.mark.parametrize("bits", [0x7F800001, 0xFF7FFFFF], ids=["signalling NaN", "largest"])
def test_unwritten_memory_is_a_finding_and_not_an_error(bits: int) -> None:
    """What a kernel never wrote may hold any bits; they are judged as numbers, without a warning that ends the case."""
    x = np.array([1.0, 1.0], np.float32)
    x.view(np.uint32)[1] = bits
    measured = tolerance.measure("o", x, tolerance.limit(np.ones(2), "float32"))
    assert {check for check, _ in measured.failures} & {"bound", "nonfinite"}


def test_a_bound_that_is_no_number_allows_nothing() -> None:
    limit = replace(tolerance.limit(np.ones(2), "float32"), allowed=np.array([1.0, np.nan]))
    assert [check for check, _ in tolerance.measure("o", np.array([1.0, 1.5]), limit).failures] == ["bound"]
    assert tolerance.measure("o", limit.golden, limit).failures == ()


def test_errors_whose_squares_overflow_are_measured() -> None:
    measured = tolerance.measure("o", np.array([1.0, 1e308]), tolerance.limit(np.ones(2), "float64"))
    assert [check for check, _ in measured.failures] == ["bound"]


class NoLse(Correct):
    """Has no lse to return; with `slope`, gradients that are that much too large."""

    without = ("return_lse",)

    def __init__(self, slope: float = 1.0) -> None:
        self.slope = slope

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        assert "return_lse" not in params
        return super().call(op, arrays, params)

    def vjp(self, op: str, arrays: Any, params: Any, cotangents: Any) -> Any:
        assert set(cotangents) == {"o"}
        return {
            name: (self.slope * x).astype(x.dtype) for name, x in super().vjp(op, arrays, params, cotangents).items()
        }


def test_what_an_adapter_does_not_return_is_not_asked_for_and_the_rest_is_judged() -> None:
    scenes = map(golden.draw_case, core.scenes("softmax_attention", "small", ("float32",)))
    cases = [case for case in scenes if "return_lse" in case.params]
    assert cases
    for case in cases:
        assert core.check(Correct(), case).measured[1].output == "lse"
        result = core.check(NoLse(), case)
        assert (result.id, result.status) == (case.id, "pass"), result.message
        assert "lse" not in {measured.output for measured in result.measured}
        assert "bound" in core.check(NoLse(1.01), case).checks
