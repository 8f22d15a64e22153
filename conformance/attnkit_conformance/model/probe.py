"""D's probe: what conditioning costs an entry, that is how far it moves when the inputs move by their last digits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

import attnkit_reference
from attnkit_conformance.model.case import Case
from attnkit_conformance.model.op import Op

Array = np.ndarray
Arrays = Mapping[str, Array]

DRAWS = 8
STEP = 1e-7  # relative change of an input: so small that curvature, and so large that float64, adds nothing
STRETCH = 2.0**-23  # relative change of exact scores, as exact as they are
FLOOR = 0.1  # of the rms of a row: the rms of eight draws may be small by chance
FINEST = 2.0**-10  # of the steps between exact scores
EXACT = {"integers", "grid"}  # options of scenes whose scores are exact: on kinks, thresholds and ties by intention
OF_FEATURES = ("b", "c", "d")  # groups whose kinks are at 0 of an input, which no factor crosses
OF_SCORES = {"q", "k", "bias", "qk", "scale", "shift"}
SUMMANDS = {"q", "bias", "shift"}  # of scores; the keys stay
AT_ENDS = {"alpha", "beta", "beta_t"}  # of entmax, which may be 1 or 2; of the delta rule, which may be 2


def explicit(op: Op, case: Case) -> tuple[dict[str, Array], dict[str, Array]]:
    """The reference's outputs and gradients."""
    call = (attnkit_reference, op, case.arrays, case.params)
    outputs = op.binding.forward(*call)
    gradients = op.binding.vjp(*call, case.cotangents) if op.vjp else {}
    return in_double(outputs), in_double(gradients)


def in_double(arrays: Arrays) -> dict[str, Array]:
    return {name: np.asarray(x, np.float64) for name, x in arrays.items()}


def probes(op: Op, case: Case, golden: tuple[Arrays, Arrays]) -> tuple[dict[str, Array], dict[str, Array]]:
    """The rms change of every entry of outputs and gradients over random changes of the inputs, relative to theirs."""
    rng = np.random.default_rng(0)
    rms = tuple({name: np.zeros(x.shape) for name, x in results.items()} for results in golden)
    for _ in range(DRAWS):
        with np.errstate(all="ignore"):
            moved = explicit(op, shaken(op, case, rng))
            for sums, results, truth in zip(rms, moved, golden, strict=True):
                for name, x in results.items():
                    change = (x - truth[name]) / (STEP * np.sqrt(DRAWS))
                    sums[name] = np.hypot(sums[name], np.where(np.isfinite(change), change, 0.0))
    if may_be_on_kinks(op, case):
        for sums, moves in zip(rms, of_exact_scores(op, case, golden), strict=True):
            for name, x in moves.items():
                sums[name] = np.hypot(sums[name], x)
    outputs, gradients = ({name: floor_entries(x) for name, x in sums.items()} for sums in rms)
    if op.falling and "w" in outputs:
        size = np.abs(golden[0]["w"])
        outputs["w"] = size * floor_entries(np.divide(rms[0]["w"], size, out=np.zeros(size.shape), where=size > 0))
    return outputs, gradients


@np.errstate(all="ignore")
def of_exact_scores(op: Op, case: Case, golden: tuple[Arrays, Arrays]) -> tuple[dict[str, Array], ...]:
    """How far every entry moves where all scores grow or shrink by one factor, relative to it. Ties stay ties and zeros
    zeros, while a threshold moves, and with it what is left of a score beside it. Where a slope jumps, it does so on
    one side: the smaller of the two changes counts.
    """
    grown, shrunk = (explicit(op, stretch(case, 1.0 + change)) for change in (STRETCH, -STRETCH))

    def moves(truth: Arrays, *moved: Arrays) -> dict[str, Array]:
        return {name: smaller(*(np.abs(each[name] - x) / STRETCH for each in moved)) for name, x in truth.items()}

    return tuple(map(moves, golden, grown, shrunk))


def smaller(x: Array, y: Array) -> Array:
    """Of two changes; 0 where one is not finite."""
    least: Array = np.nan_to_num(np.minimum(x, y), nan=0.0, posinf=0.0)
    return least


def stretch(case: Case, factor: float) -> Case:
    """The case with every summand of its scores scale·q·k + bias + shift times `factor`, exactly."""
    arrays = {name: np.asarray(x * factor) for name, x in case.arrays.items() if name in SUMMANDS}
    params = {"shift": x * factor} if isinstance(x := case.params.get("shift"), float) else {}
    return replace(case, arrays={**case.arrays, **arrays}, params={**case.params, **params})


def floor_entries(x: Array) -> Array:
    """No entry below a tenth of the rms of its row."""
    if x.ndim == 0:
        return x
    rows = np.hypot.reduce(x, axis=-1, keepdims=True) / np.sqrt(max(1, x.shape[-1]))
    raised: Array = np.maximum(x, FLOOR * rows)
    return raised


def may_be_on_kinks(op: Op, case: Case) -> bool:
    """Whether scores are exact, and ties, thresholds or kinks are among them."""
    of_features = op.group in OF_FEATURES or "feature_map" in op.own
    smooth = (op.exponent(case.params) or of_features) and not op.subjects  # statistics have a maximum
    return bool(EXACT & case.tags) and not smooth and not are_beside(case)


def are_beside(case: Case) -> bool:
    """Whether exact scores are shifted by what is not: by -log n, but for n = 1, which may be the number of visible
    keys, or by numbers such as 0.3.
    """
    shift = case.arrays.get("shift", case.params.get("shift", 0.0))
    if isinstance(shift, str):
        return shift == "-log_length" and ("length" in case.arrays or case.params.get("length", "visible") != "visible")
    return bool(np.all(np.asarray(shift) / FINEST % 1.0 != 0.0))


def shaken(op: Op, case: Case, rng: np.random.Generator, step: float = STEP) -> Case:
    """The case with every float input and cotangent moved by a relative step, but not those that put it on a kink by
    intention."""
    left = AT_ENDS | (OF_SCORES if may_be_on_kinks(op, case) else set())

    def moved(name: str, x: Array) -> Array:
        if x.dtype.kind != "f" or name in left:
            return x
        return np.asarray(x * (1.0 + step * rng.choice([-1.0, 1.0], x.shape)))

    arrays, cotangents = (
        {name: moved(name, x) for name, x in sorted(held.items())} for held in (case.arrays, case.cotangents)
    )
    return replace(case, arrays=arrays, cotangents=cotangents)
