"""Memory layouts: each level is what it promises, cases carry it to every adapter, and bugs that only layouts show are
found by the quick profile."""

import functools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnkit_conformance import core
from attnkit_conformance.golden import draw_case
from attnkit_conformance.judge import declared
from attnkit_conformance.model.case import DTYPES, Case, numpy_dtype
from attnkit_conformance.model.grammar import Grammar
from attnkit_conformance.model.layout import DENSE, MAKERS, TIED, WHOLE, align, laid_out, suits, tie
from attnkit_conformance.model.memory import memory_of
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.report import axes, files
from attnkit_conformance.scenes import layouts, rows
from attnkit_conformance.search import smallest
from tests.conformance.test_kit_can_fail import Correct

OP = "softmax_attention"
LAYOUTS = axes.all_axes({})[0]
ROOT = Path(__file__).parents[2]
SHAPE = (2, 3, 4, 5)
KEEPS = {DENSE, "read_only", "unaligned"}  # the strides of a dense array


def drawn(layout: str, shape: tuple[int, ...] = SHAPE, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """Values that a layout can hold, and an array that has it."""
    x = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 9, shape).astype(numpy_dtype(dtype))
    values = tie(x, layout)
    return values, laid_out(align(values), layout)


def places(x: np.ndarray) -> int:
    """How many places in memory the entries of an array are in."""
    offsets: Any = np.zeros((), np.int64)
    for axis, (n, stride) in enumerate(zip(x.shape, x.strides, strict=True)):
        offsets = offsets + (np.arange(n) * stride).reshape(-1, *(1 for _ in x.shape[axis + 1 :]))
    return len(np.unique(offsets))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int64", "bool"])
@pytest.mark.parametrize("layout", MAKERS)
def test_a_layout_has_the_same_values_in_any_shape(layout: str, dtype: str) -> None:
    for shape in (SHAPE, (3, 4, 5), (4, 5), (5,), (), (2, 1, 1, 1), (0, 3), (2, 0, 3)):
        values, x = drawn(layout, shape, dtype)
        assert (x.shape, x.dtype, x.tobytes()) == (shape, values.dtype, values.tobytes())
        plain = align(values)
        same = (x.strides, x.flags.writeable, x.flags.aligned) == (plain.strides, True, True)
        assert suits(values, layout) != same or layout in KEEPS or x.size < 2


def test_each_layout_is_what_it_promises() -> None:
    item = 4
    by_name = {layout: drawn(layout)[1] for layout in MAKERS}
    strides = {layout: tuple(n // item for n in x.strides) for layout, x in by_name.items()}
    assert strides["dense"] == strides["unaligned"] == strides["read_only"] == (60, 20, 5, 1)
    assert strides["turned"] == (60, 5, 15, 1)
    assert strides["stepped"] == (240, 80, 20, 2)
    assert strides["negative"] == (60, 20, -5, -1)
    assert strides["overlapping"] == (51, 17, 4, 1)
    assert strides["expanded_first"] == (0, 20, 5, 1)
    assert strides["expanded_last"] == (20, 0, 5, 1)
    assert strides["expanded_all"] == (0, 0, 5, 1)
    assert strides[WHOLE] == (0, 0, 0, 0)
    assert [layout for layout, x in by_name.items() if not x.flags.writeable] == ["read_only"]
    assert [layout for layout, x in by_name.items() if not x.flags.aligned] == ["unaligned"]
    assert {layout for layout, x in by_name.items() if places(x) < x.size} == {*TIED}


def test_what_a_step_leaves_out_is_nan() -> None:
    memory = memory_of(drawn("stepped")[1]).content.view(np.float32)
    assert np.isnan(memory).sum() > memory.size // 2


def test_masks_and_lengths_are_expanded_along_all_but_their_last_axis() -> None:
    assert drawn("expanded_all", (2, 3, 4, 5), "bool")[1].strides == (0, 0, 0, 1)
    assert drawn("expanded_first", (2, 3), "int64")[1].strides == (0, 8)
    assert drawn("expanded_first", (4, 5))[1].strides == (20, 4), "a matrix of weights has no leading axes"


@pytest.mark.parametrize("layout", TIED)
def test_a_layout_refuses_values_that_it_cannot_hold(layout: str) -> None:
    with pytest.raises(ValueError, match=f"layout {layout}: entries in one place"):
        laid_out(np.arange(120.0).reshape(SHAPE), layout)


@pytest.mark.parametrize("layout", MAKERS)
def test_memory_is_sent_with_its_layout(layout: str) -> None:
    x = drawn(layout, dtype="bfloat16")[1]
    y = memory_of(x).array()
    assert (x.strides, x.flags.writeable, x.flags.aligned) == (y.strides, y.flags.writeable, y.flags.aligned)
    assert x.tobytes() == y.tobytes()
    assert not np.shares_memory(x, y)


@pytest.mark.parametrize("axis", range(3))
def test_memory_without_elements_is_sent(axis: int) -> None:
    """Strides of JAX's arrays without elements are those of arrays with some."""
    x = np.ones((4, 3, 2))[tuple(slice(0) if n == axis else slice(None) for n in range(3))]
    assert memory_of(x).array().shape == x.shape


def plain_case(**levels: str) -> Case:
    """A plain call with some other levels."""
    row = {**rows.grammar(BY_NAME[OP]).plain, **levels}
    (sample,) = rows.samples_of(BY_NAME[OP], "pair.", [row])
    return sample.draw(0)


@pytest.mark.parametrize(
    ("laid", "names"),
    [
        ("all", {"q", "k", "v", "mask", "do"}),
        ("arguments", {"q", "k", "v"}),
        ("options", {"mask"}),
        ("cotangents", {"do"}),
        ("k", {"k"}),
    ],
)
def test_a_level_lays_out_a_group_of_arrays(laid: str, names: set[str]) -> None:
    case = plain_case(layout="stepped", laid=laid, mask="pairs")
    assert {*case.layouts} == names
    strided = {name for name in case.arrays if not case.typed(name).flags.c_contiguous}
    strided |= {f"d{name}" for name in case.cotangents if not case.typed_cotangent(name, "float32").flags.c_contiguous}
    assert strided == names


def test_the_cotangent_of_an_expanded_call_is_one_number() -> None:
    case = plain_case(layout="expanded_all")
    assert case.layouts == {**dict.fromkeys("qkv", "expanded_all"), "do": WHOLE}
    assert case.typed_cotangent("o", "float32").strides == (0, 0, 0, 0)


class Looking(Correct):
    """What the kit hands over."""

    copied: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.strides: list[tuple[int, ...]] = []

    def array(self, x: np.ndarray, dtype: str) -> Any:
        self.strides.append(x.strides)
        return x


def test_an_adapter_is_given_the_layout_unless_its_library_has_none() -> None:
    case, adapter = plain_case(layout="expanded_last", laid="k"), Looking()
    result = core.check(adapter, case)
    assert (result.status, result.axes["layout"]) == ("pass", ("expanded_last",))
    assert [strides[1] for strides in adapter.strides[:3]].count(0) == 1
    adapter.strides.clear()
    adapter.copied = ("expanded_last",)
    result = core.check(adapter, case)
    assert (result.status, result.axes["layout"]) == ("pass", (DENSE,))
    assert not any(0 in strides for strides in adapter.strides)


def test_torch_has_every_layout_but_those_that_it_cannot_have() -> None:
    adapters = pytest.importorskip("attnkit_conformance.adapters.torch")
    bases = pytest.importorskip("attnkit_conformance.adapters.bases.torch")
    adapter = next(one for one in adapters.adapters() if one.name == "torch-generic")
    for layout in MAKERS:
        tensor = adapter.array(drawn(layout)[1], "float32") if layout not in adapter.copied else None
        if tensor is not None:
            assert tuple(n * 4 for n in tensor.stride()) == drawn(layout)[1].strides
            assert (tensor.data_ptr() % 4 != 0) == (layout == "unaligned")
    memory = bases.on_device(drawn("expanded_last")[1], adapter.device)
    assert memory.stride() == (20, 0, 5, 1)


# --------------------------------------------------------------------------------------------- planted bugs


class IgnoresStrides(Correct):
    """Reads the memory of v row after row, as if it were dense."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        memory = memory_of(arrays["v"])
        inside = memory.content[memory.start : memory.start + arrays["v"].nbytes]
        v = np.resize(inside.copy().view(arrays["v"].dtype), arrays["v"].shape)
        return super().call(op, {**arrays, "v": v}, params)


class IgnoresOneStride(Correct):
    """Reads an argument with one stride of a dense array; what lies outside its memory is 0."""

    def __init__(self, argument: str, axis: int) -> None:
        self.argument, self.axis = argument, axis

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        x, axis = arrays[self.argument], self.axis
        if x.ndim < -axis or not x.size:
            return super().call(op, arrays, params)
        memory, strides = memory_of(x), list(x.strides)
        strides[axis] = np.empty(x.shape, x.dtype).strides[axis]
        first = memory.start + sum(np.ix_(*(np.arange(n) * stride for n, stride in zip(x.shape, strides, strict=True))))
        places = np.asarray(first)[..., None] + np.arange(x.itemsize)
        inside = (places >= 0) & (places < memory.content.size)
        read = np.where(inside, memory.content[np.where(inside, places, 0)], 0).astype(np.uint8).view(x.dtype)[..., 0]
        return super().call(op, {**arrays, self.argument: read}, params)


class WritesTheFirstMember(Correct):
    """Gradients of k and v that are expanded over heads are those of the first head, and memory as it was elsewhere."""

    def vjp(self, op: str, arrays: Any, params: Any, cotangents: Any) -> Any:
        grads = super().vjp(op, arrays, params, cotangents)
        for name in ("k", "v"):
            x = arrays[name]
            if x.ndim > 2 and x.shape[-3] > 1 and x.strides[-3] == 0:
                grads[name][..., 1:, :, :] = 3.0
        return grads


class WritesToArguments(Correct):
    """Scales q in place where it may."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        answer = super().call(op, arrays, params)
        arrays["q"] *= 2
        return answer


@functools.cache
def quick_cases() -> list[Case]:
    return [draw_case(sample) for dtype in DTYPES for sample in rows.row_samples(BY_NAME[OP], dtype, "small")]


def failing(adapter: Any) -> set[str]:
    """The layouts of quick cases that an adapter fails."""
    results = (core.check(adapter, case) for case in quick_cases())
    return {layout for result in results if result.status == "fail" for layout in result.axes["layout"]}


def test_the_reference_passes_in_every_layout() -> None:
    assert failing(Correct()) == set()
    assert {layout for case in quick_cases() for layout in case.layouts.values()} == {*MAKERS} - {DENSE}


def test_an_implementation_that_ignores_strides_fails_where_there_are_some() -> None:
    failed = failing(IgnoresStrides())
    assert {"turned", "stepped", "negative", "overlapping", "expanded_last"} <= failed
    assert DENSE not in failed


@pytest.mark.parametrize("axis", [-1, -2, -3, -4])
@pytest.mark.parametrize("argument", ["q", "k", "v"])
def test_one_stride_that_is_ignored_is_told_by_six_verdicts(argument: str, axis: int) -> None:
    adapter = IgnoresOneStride(argument, axis)
    laid_out = [case for case in quick_cases() if argument in case.layouts]
    failed = [case for case in laid_out if core.check(adapter, case).status == "fail"]
    assert len(failed) >= 6
    plain = [case.id for case in failed if {part.partition("=")[0] for part in options(case)} <= {"layout", "laid"}]
    assert len(plain) >= 2, "kernels that take no options are asked too"


def options(case: Case) -> list[str]:
    """The levels in a case's name."""
    return case.id.rpartition("/")[2].removeprefix("pair.").split(",")


def test_a_gradient_of_which_one_member_is_written_fails() -> None:
    failed = failing(WritesTheFirstMember())
    assert {"expanded_last", "expanded_all"} <= failed <= {"expanded_first", "expanded_last", "expanded_all", WHOLE}


def test_a_write_to_an_argument_fails_in_every_layout() -> None:
    assert {DENSE, "read_only", "expanded_all", "overlapping"} <= failing(WritesToArguments())


def test_a_failure_of_a_layout_shrinks_to_that_layout() -> None:
    adapter, case = WritesTheFirstMember(), plain_case(layout="expanded_last")
    (result,) = smallest.with_programs([core.check(adapter, case)], [adapter])
    told: dict[str, Any] = {}
    exec(result.program, told)
    assert 0 in (told["k"].strides[-3], told["v"].strides[-3])
    assert "laid_out(q" not in result.program
    assert told["k"].size <= 4


AGAIN = """
from tests.conformance.test_layouts import OP, Correct, IgnoresOneStride

arrays = {"q": q, "k": k, "v": v}
wrong, right = (adapter.call(OP, arrays, {})["o"] for adapter in (IgnoresOneStride("v", %d), Correct()))
print([x.strides for x in arrays.values()], not np.allclose(wrong, right))
"""


@pytest.mark.parametrize(
    ("axis", "layout"),
    [
        (-1, "stepped"),
        pytest.param(-3, "turned", marks=pytest.mark.referee),
        pytest.param(-4, "expanded_last", marks=pytest.mark.referee),
    ],
)
def test_a_program_has_the_strides_of_its_case_in_a_process_of_its_own(axis: int, layout: str) -> None:
    adapter, case = IgnoresOneStride("v", axis), plain_case(layout=layout, laid="v")
    (result,) = smallest.with_programs([core.check(adapter, case)], [adapter])
    told: dict[str, Any] = {}
    exec(result.program, told)
    strides = [told[name].strides for name in "qkv"]
    assert strides[2] != np.empty(told["v"].shape, told["v"].dtype).strides
    text = result.program + AGAIN % axis
    process = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=ROOT, check=False)
    assert process.stdout == f"{strides} True\n", process.stderr


# ------------------------------------------------------------------------------------- grammar and reports


def test_layouts_go_over_rows_without_more_of_them() -> None:
    small = Grammar(
        {"a": (0, 1, 2), "poison": ("no", "yes"), "layout": layouts.LAYOUTS, "laid": ("all", "k")},
        frozenset(map(frozenset, layouts.FORBIDDEN[: len(TIED)])),
    )
    dense = tuple({"a": a, "poison": p, "layout": DENSE, "laid": "all"} for a in (0, 1, 2) for p in ("no", "yes")) * 3
    array = layouts.with_layouts(small, dense, dense[:1])
    assert len(array) == len(dense)
    assert {row["layout"] for row in array} == {*layouts.LAYOUTS}
    assert all(map(small.allows, array))
    assert array[0] == small.plain
    few = layouts.with_layouts(small, dense[:2], dense[:1])
    assert {row["layout"] for row in few} == {*layouts.LAYOUTS}, "rows are added where there are too few"


class Declared(Correct):
    name = "declared"
    dtypes = ("float32",)
    serves = {OP: {"batch": ("none",), "layout": ("turned",)}}  # noqa: RUF012

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        assert all(0 not in x.strides for x in arrays.values())
        return super().call(op, arrays, params)


def test_a_declaration_may_name_layouts() -> None:
    adapter = Declared()
    samples = list(declared.samples(adapter, BY_NAME[OP], "full", adapter.dtypes))
    found = {part for sample in samples for part in sample.id.split(",") if part.startswith("layout=")}
    assert found == {"layout=turned"}
    assert not [choice for choice in declared.outside(adapter, BY_NAME[OP]) if choice[0] == "laid"]
    (line,) = declared.summary(adapter, [core.check(adapter, samples[0].draw(0))])
    assert "layout (stepped" in line


def verdict(adapter: str, status: str, *levels: str) -> core.CaseResult:
    return core.CaseResult(f"{OP}/float32/x", adapter, OP, "float32", status, axes={"layout": levels})


def test_the_page_has_a_table_of_layouts_with_its_conclusion() -> None:
    results = [verdict("numpy-generic", "pass", DENSE), verdict("numpy-native", "unsupported", "turned")]
    results += [verdict("numpy-generic", "pass", "turned", "negative"), verdict("jax", "pass", DENSE)]
    assert axes.conclusion(results[:1], LAYOUTS) == ""
    assert axes.conclusion(results, LAYOUTS).startswith("1 verdicts on arrays and cotangents that are not dense, none")
    assert axes.conclusion(results, LAYOUTS).endswith("1 calls were refused by name.")
    bad = [*results, replace(results[2], status="fail", axes={"layout": ("expanded_all",)})]
    assert axes.conclusion(bad, LAYOUTS).startswith(
        "1 of 2 verdicts on arrays and cotangents that are not dense failed"
    )
    page = files.as_html(bad, files.header([], "small"))
    static = page.rpartition("<noscript>")[2].partition("</noscript>")[0]
    assert "<td>✓ 1</td><td>✓ 1</td>" in static, "dense, on numpy and jax"
    assert "<td>✓ 1 ⊘ 1</td><td>–</td>" in static, "turned"
    assert "<td>✗ 1</td><td>–</td>" in static, "expanded_all"
