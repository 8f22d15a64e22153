"""Nothing is left out: names, signatures, gradients, samples, kernels and the table in the documentation."""

import inspect
import re
from operator import attrgetter
from typing import Any

import numpy as np
import pytest

import attnkit
import attnkit_reference
from attnkit._core.family import RECORDS
from attnkit_conformance import core, golden
from attnkit_conformance.adapters.base import AttnkitAdapter, kernels
from attnkit_conformance.judge import XFAILS, ids_of, properties, read_xfails, refuse_unmatched, selection
from attnkit_conformance.model import tolerance
from attnkit_conformance.model.case import DTYPES
from attnkit_conformance.model.layout import ALIGNMENT
from attnkit_conformance.model.op import FURTHER
from attnkit_conformance.opdb import BY_NAME, OPDB, PUBLIC
from attnkit_conformance.report import table

ONLY_IN_ATTNKIT = {"explain", "implementations", "native_status", "NativeStatus", "using"}
WITHOUT_RECORD = {
    "sima_attention": "q and k are normalised over their tokens",
    "soft_attention": "weights are a product of three matrices",
    "nystrom_attention": "weights are a product of three matrices",
    "linformer_attention": "weights are of combinations of keys",
    "lsh_attention": "weights are of chunks of sorted tokens",
    "gated_linear_attention": "weights are what a state gives, all queries at once",
    "delta_attention": "weights are what a state gives, all queries at once",
}
WITHOUT_ROW = {"ACTIVATIONS", "RowStatistics", "analysis", "landmarks", "orthogonal_features", "random_rotations"}


def reference_names() -> set[str]:
    return {name for name in attnkit_reference.__all__ if not name.endswith("_magnitudes")}


def test_public_names_are_equal() -> None:
    ours, theirs = set(attnkit.__all__) - ONLY_IN_ATTNKIT, reference_names()
    assert ours == theirs, f"add to attnkit: {sorted(theirs - ours)}; add to the reference: {sorted(ours - theirs)}"


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    found = inspect.signature(function).parameters.values()
    kept = [p for p in found if p.name != "impl" and p.kind is not p.VAR_KEYWORD]
    return [(p.name, p.kind, p.default) for p in kept]


@pytest.mark.parametrize("name", sorted(reference_names() - WITHOUT_ROW))
def test_signatures_are_equal_but_for_impl(name: str) -> None:
    ours, theirs = parameters(getattr(attnkit, name)), parameters(getattr(attnkit_reference, name))
    missing = [p for p in theirs if p not in ours]
    extra = [p for p in ours if p not in theirs]
    assert ours == theirs, f"attnkit.{name}: add or correct {missing}, remove {extra}, keep the order of the reference"


def test_every_public_op_has_a_row_a_gradient_and_magnitudes() -> None:
    flat = [op for op in OPDB if "." not in op.name]  # the others live in a submodule, such as landmarks.random
    rows = {op.name for op in flat} | {f"{op.name}_vjp" for op in flat if op.vjp}
    assert reference_names() - WITHOUT_ROW == rows, "add a row to conformance/attnkit_conformance/opdb.py"
    for op in OPDB:
        measures = op.name.startswith("analysis.") or op.integer_outputs
        assert op.vjp or measures or op.name.endswith("_weights"), (
            f"{op.name}: write {op.name}_vjp in the reference and in attnkit"
        )
        products = "product" in WITHOUT_RECORD.get(op.name.removesuffix("_weights"), "")
        if op.vjp or products:
            assert attrgetter(f"{op.name}_magnitudes")(attnkit_reference), f"write {op.name}_magnitudes"


def test_every_op_with_weights_has_a_record_or_a_reason() -> None:
    """Statistics and blocks serve what has a record."""
    weighted = {op.name for op in PUBLIC if op.weights}
    assert weighted - {*RECORDS} == {*WITHOUT_RECORD}, (
        "make a record of it (attnkit/_core/family.py), or give a reason here"
    )
    assert {op.name for op in PUBLIC if op.statistics} == {*RECORDS}
    assert [name for name, record in RECORDS.items() if record.op is not getattr(attnkit, name)] == []


@pytest.mark.parametrize("op", OPDB, ids=lambda op: op.name)
def test_own_parameters_are_those_of_the_signature(op: Any) -> None:
    accepted = inspect.signature(attrgetter(op.name)(attnkit)).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        own = set(op.own) - ({*FURTHER} if op.name.endswith("_weights") else set())
        assert own <= set(accepted), f"{op.name}: opdb names parameters that attnkit does not take"
        optional = {"initial_state" if name.startswith("initial_") else name for name in op.optional}
        assert optional <= set(accepted), f"{op.name}: opdb names arrays that attnkit does not take"


@pytest.mark.parametrize("op", OPDB, ids=lambda op: op.name)
def test_every_output_has_a_sample_that_tells_right_from_wrong(op: Any) -> None:
    for dtype in op.dtypes:
        seen = dict.fromkeys((f"d{name}" for name in op.differentiable if name != "bias"), 0)
        quick = [sample.id for sample in core.samples(op.name, "small", (dtype,))]
        for sample in (*core.samples(op.name, "small", (dtype,)), *core.samples(op.name, "scenes", (dtype,))):
            if (
                sample.id not in quick
            ):  # half types are so coarse that quick may be blind to a gradient: then scenes tell
                missing = {name for name, count in seen.items() if count == 0}
                if not missing:
                    break
                drawn = sample.draw(0)
                if not missing & {*op.outputs(drawn.params), *(f"d{name}" for name in drawn.arrays)}:
                    continue
            case = golden.draw_case(sample)
            assert case.id == sample.id
            truth = golden.golden(case)
            assert truth.blind_spots == (), case.id
            for name, limit in {**truth.outputs, **{f"d{n}": x for n, x in truth.gradients.items()}}.items():
                seen[name] = seen.get(name, 0) + tolerance.discerning(limit)
        assert [name for name, count in seen.items() if count == 0] == [], dtype


def test_ids_are_unique_and_quick_is_part_of_full() -> None:
    every = [identity for op in OPDB for identity in ids_of(op.name)]
    quick = [sample.id for op in OPDB for sample in core.samples(op.name, "small")]
    quick += [identity for op in OPDB for identity in properties.identities(op, "small")]
    assert len(every) == len({*every})
    assert {*quick} <= {*every}
    full = [sample.id for sample in core.samples("softmax_attention", "full")]
    assert len(full) == len({*full})
    assert {sample.id for sample in core.samples("softmax_attention", "small")} <= {*full}


@pytest.mark.parametrize("op", ["pointwise_attention", "pointwise_attention_packed"])
def test_every_score_function_is_met_by_the_quick_profile(op: str) -> None:
    """In every dtype: those of the reference's table, whatever is added to it. The default needs no mention."""
    for dtype in DTYPES:
        words = {word for sample in core.samples(op, "small", (dtype,)) for word in re.findall(r"\w+", sample.id)}
        assert {*attnkit_reference.ACTIVATIONS} - words == {"relu"} - words


@pytest.mark.parametrize("op", OPDB, ids=lambda op: op.name)
def test_samples_are_the_same_every_time(op: Any) -> None:
    once, again = (core.cases(op.name, "small", op.dtypes[:1]) for _ in range(2))  # other dtypes round the same draws
    for one, two in zip(once, again, strict=True):
        for held, again in ((one.arrays, two.arrays), (one.cotangents, two.cotangents)):
            assert {n: x.tobytes() for n, x in held.items()} == {n: x.tobytes() for n, x in again.items()}


def test_arrays_and_cotangents_begin_where_memory_is_aligned() -> None:
    class Looking(AttnkitAdapter):
        def array(self, x: np.ndarray, dtype: str) -> np.ndarray:
            places.append(x.ctypes.data % ALIGNMENT)
            return x

    places: list[int] = []
    for case in core.cases("softmax_attention", "scenes", ("float32",)):
        if not case.layouts:
            core.gradients(Looking("looking", ("float32",)), case)
    assert len(places) > 100
    assert set(places) == {0}


@pytest.mark.parametrize("op", [op for op in OPDB if op.group == "a"], ids=lambda op: op.name)
def test_error_samples_cover_own_parameters(op: Any) -> None:
    texts = " ".join(f"{sample.pattern} {list(sample.params)}" for sample in op.errors(op))
    numbers = set(op.own) - {*FURTHER}
    assert [name for name in numbers if name not in texts] == [], f"{op.name}: add error samples"


EMULATED = {("cupy", "cuda"): "cuda_cpu"}
"""Where kernels are judged whose library has no arrays without a GPU."""


@pytest.mark.parametrize(
    "library", [pytest.param(x, marks=pytest.mark.referee if x in ("jax", "cupy") else ()) for x in table.LIBRARIES]
)  # those compile each sample
def test_every_kernel_has_a_sample_that_it_serves(library: str) -> None:
    found = kernels(library)
    assert set(found) <= set(BY_NAME), "a kernel for an op that the op database does not know"
    for op, names in found.items():
        for name in names:
            for adapter in selection.find([EMULATED.get((library, name), f"{library}-{name}")]):
                results = (core.check(adapter, case) for case in core.cases(op, "small", adapter.dtypes))
                assert any(map(served_here_or_elsewhere, results)), f"{adapter.name} serves no sample of {op}"


def served_here_or_elsewhere(result: core.CaseResult) -> bool:
    """Kernels for GPUs are judged by tests/kernels."""
    return result.status == "pass" or any(text in result.reason for text in ("run on CUDA", "run on GPUs"))


def test_expected_failures_match_cases() -> None:
    refuse_unmatched({path.stem: read_xfails(path.stem) for path in XFAILS.glob("*.txt")})


def test_every_dtype_is_judged_for_every_attention_op() -> None:
    for op in OPDB:
        assert {sample.id.split("/")[1] for sample in core.samples(op.name, "small")} == set(op.dtypes)
        assert op.group == "" or op.dtypes == DTYPES
