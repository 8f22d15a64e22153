"""The search: it finds what is planted, what it finds becomes small and can be run again, it is the same every time,
and it finds nothing where nothing is wrong.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnkit
import attnkit_reference
from attnkit.backends.native import lower
from attnkit_conformance import core
from attnkit_conformance.__main__ import main
from attnkit_conformance.golden import golden
from attnkit_conformance.judge.selection import find
from attnkit_conformance.model.case import NoDraw, numpy_dtype
from attnkit_conformance.model.layout import DENSE, MAKERS
from attnkit_conformance.opdb import BY_NAME, OPDB
from attnkit_conformance.scenes import rows
from attnkit_conformance.search import Search, recipe, replay, screen, several_threads
from attnkit_conformance.search.recipe import Recipe, drawn, smaller
from tests.conformance.plain import OnNumpy

Arrays = Mapping[str, Any]
DTYPES = ("float64", "float32")


class Reference(OnNumpy):
    """The reference as an adapter: in the compute dtype of float64, then rounded to the dtype of the result."""

    name, dtypes = "the-reference", DTYPES

    def dtype(self, arrays: Arrays) -> str:
        return "float32" if any(x.dtype == np.float32 for x in arrays.values()) else "float64"

    def call(self, op: str, arrays: Arrays, params: Arrays) -> dict[str, Any]:
        row, dtype = BY_NAME[op], self.dtype(arrays)
        found = row.binding.forward(attnkit_reference, row, wide(arrays), params)
        return {n: np.asarray(x).astype(numpy_dtype(row.output_dtype(n, dtype))) for n, x in found.items()}

    def vjp(self, op: str, arrays: Arrays, params: Arrays, cotangents: Arrays) -> dict[str, Any]:
        row = BY_NAME[op]
        found = row.binding.vjp(attnkit_reference, row, wide(arrays), params, wide(cotangents))
        return {name: np.asarray(x).astype(arrays[name].dtype) for name, x in found.items()}


def wide(arrays: Arrays) -> dict[str, Any]:
    return {name: x.astype(np.float64) if x.dtype.kind == "f" else x for name, x in arrays.items()}


class OnePercent(Reference):
    """One percent too much, where there are more than 5 keys."""

    name = "planted"

    def call(self, op: str, arrays: Arrays, params: Arrays) -> dict[str, Any]:
        found = super().call(op, arrays, params)
        return found if arrays["k"].shape[-2] <= 5 else {**found, "o": found["o"] * found["o"].dtype.type(1.01)}


class OneMember(Reference):
    """The gradient of keys that are expanded is that of the first of them, the others are never written."""

    def vjp(self, op: str, arrays: Arrays, params: Arrays, cotangents: Arrays) -> dict[str, Any]:
        grads = super().vjp(op, arrays, params, cotangents)
        for axis in range(arrays["k"].ndim - 2):
            if arrays["k"].strides[axis] == 0 and arrays["k"].shape[axis] > 1:
                np.moveaxis(grads["k"], axis, 0)[1:] = np.nan
        return grads


class Instead(Reference):
    """Calls with other options than asked for."""

    def __init__(self, name: str, value: Any = None) -> None:
        self.option, self.value = name, value

    def call(self, op: str, arrays: Arrays, params: Arrays) -> dict[str, Any]:
        return super().call(op, *self.changed(arrays, params))

    def vjp(self, op: str, arrays: Arrays, params: Arrays, cotangents: Arrays) -> dict[str, Any]:
        changed = super().vjp(op, *self.changed(arrays, params), cotangents)
        return {name: changed.get(name, np.zeros_like(x)) for name, x in arrays.items() if name in self.given(op)}

    def given(self, op: str) -> tuple[str, ...]:
        return BY_NAME[op].differentiable

    def changed(self, arrays: Arrays, params: Arrays) -> tuple[Arrays, Arrays]:
        others = {name: value for name, value in params.items() if name != self.option}
        if self.value is not None and self.option in params:
            others |= {self.option: self.value}
        return {name: x for name, x in arrays.items() if name != self.option}, others


class OffByOne(Instead):
    """Causality lets every query see the next key, too."""

    def changed(self, arrays: Arrays, params: Arrays) -> tuple[Arrays, Arrays]:
        if params.get("causal") is not True or "window" in params:
            return arrays, params
        ahead = max(0, arrays["k"].shape[-2] - arrays["q"].shape[-2]) if params["causal"] == "upper_left" else 0
        return arrays, {**super().changed(arrays, params)[1], "window": (None, 1 + ahead)}


ADAPTER = OnePercent()
SOFTMAX = "softmax_attention/"


def searched(adapter: Any, folder: Path, ops: str, cases: int, seed: int = 0) -> Search:
    """A search of so many cases, or until it finds something."""
    search = Search([adapter], 0.0, seed, folder, DTYPES, lambda text: f"::{ops}" in text)
    n = 0
    while search.examples.total() < cases and not search.findings:
        search.look(drawn(seed, n), n)
        n += 1
    return search


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Search:
    return searched(ADAPTER, tmp_path_factory.mktemp("found"), SOFTMAX, 50)


def test_a_planted_bug_is_found_and_made_small(planted: Search) -> None:
    (finding,) = planted.findings
    found = recipe.read(json.loads(finding.path.read_text()))
    assert finding.result.checks == {"bound"}
    assert (found.row["shape"], found.row["width"]) == ("1x6", "1x1"), "not as small as the bug allows"
    assert found.layouts == {}, "layouts that it does not need"
    assert found.threads == 1
    options = {"shape", "width", "dtype"}
    plain = rows.grammar(BY_NAME[found.op]).plain
    assert {name: x for name, x in found.row.items() if name in plain and name not in options} == {
        name: x for name, x in plain.items() if name not in options
    }, "options that it does not need"
    assert "o should be" in finding.result.program
    for n in range(200):
        planted.look(drawn(1, n), n)
    assert len(planted.findings) == 1, "the same again"


@pytest.mark.parametrize(
    ("adapter", "needs"),
    [(OneMember(), "expanded"), (OffByOne("causal"), "lower_right"), (Instead("bias"), "bias"),
     (Instead("key_lengths"), "key_lengths")],
    ids=("the first of expanded keys", "causality off by one", "no bias", "no lengths"),
)  # fmt: skip
def test_bugs_are_found_within_a_few_hundred_cases(adapter: Any, needs: str, tmp_path: Path) -> None:
    search = searched(adapter, tmp_path, SOFTMAX, 300)
    (finding,) = search.findings
    record = json.loads(finding.path.read_text())
    plain = rows.grammar(BY_NAME[record["op"]]).plain
    words = [*record["layouts"].values(), *(f"{n} {x}" for n, x in record["row"].items() if x != plain.get(n, x))]
    assert any(needs in word for word in words), "what is left is not what fails"
    assert core.BY_NAME[record["op"]].row_case is None
    sizes = {name: rows.sizes(record["row"][name]) for name in ("shape", "width", "lead")}
    assert max(max(of) for of in sizes.values()) <= 3


def test_a_kept_recipe_is_run_again(planted: Search, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(planted.findings[0].path)
    assert main(["run", f"{__name__}:ADAPTER", "--here", "--samples", path]) == 1
    assert "[bound] o: off by" in capsys.readouterr().out
    assert main(["run", "numpy-generic", "--samples", path]) == 0
    assert "1 pass, 0 fail" in capsys.readouterr().out


def test_the_command_says_how_to_run_a_finding_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    select = ["-k", SOFTMAX, "--dtype", "float64", "--seed", "3", "--save", str(tmp_path)]
    assert main(["run", f"{__name__}:ADAPTER", "--here", "--search", "2", *select]) == 1
    text = capsys.readouterr().out
    (path,) = tmp_path.iterdir()
    assert f"found by seed 3; again: python -m attnkit_conformance run {__name__}:ADAPTER --samples {path}" in text
    assert "FAIL planted::softmax_attention/float64/drawn-" in text
    assert main(["run", f"{__name__}:ADAPTER", "--samples", str(tmp_path / "none")]) == 2
    (tmp_path / "other.json").write_text('{"op": "softmax_attention"}')
    with pytest.raises(ValueError, match=r"other\.json: no case that a search kept: no recipe"):
        replay([ADAPTER], [tmp_path / "other.json"], DTYPES)


def test_a_case_that_ends_the_process_leaves_its_recipe(tmp_path: Path) -> None:
    class Dying(Reference):
        def call(self, op: str, arrays: Arrays, params: Arrays) -> dict[str, Any]:
            raise KeyboardInterrupt

    search = Search([Dying()], 5.0, 4, tmp_path, DTYPES, lambda text: True)
    with pytest.raises(KeyboardInterrupt):
        search.run(lambda search, op: None)
    left = recipe.read(json.loads((tmp_path / "unfinished-4.json").read_text()))
    assert left.text in [drawn(4, n).text for n in range(50)]


def test_the_same_seed_draws_the_same_cases() -> None:
    assert [drawn(1, n) for n in range(60)] == [drawn(1, n) for n in range(60)]
    assert not {drawn(1, n).text for n in range(60)} & {drawn(2, n).text for n in range(60)}
    one = next(made for made in map(drawn, [1] * 60, range(60)) if made.op.endswith("_attention"))
    first, again = one.case(), recipe.read(json.loads(one.text)).case()
    assert (first.id, first.digest) == (again.id, again.digest)


def test_nothing_is_found_where_nothing_is_wrong_and_every_op_is_drawn(tmp_path: Path) -> None:
    found = searched(Reference(), tmp_path, "", 250)
    assert [finding.result for finding in found.findings] == []
    assert found.silent.total() < found.examples.total() / 20
    assert {drawn(0, n).op for n in range(2000)} == {op.name for op in OPDB}


class Off(Reference):
    """A gradient is off by a multiple of its bound."""

    def __init__(self, of: str, error: np.ndarray) -> None:
        self.of, self.error = of, error

    def vjp(self, op: str, arrays: Arrays, params: Arrays, cotangents: Arrays) -> dict[str, Any]:
        grads = super().vjp(op, arrays, params, cotangents)
        return {**grads, self.of: (grads[self.of] + self.error).astype(np.float32)}


OPPOSITE, ACROSS = [-1.0, 0.01], [0.1, 1.0]


@pytest.mark.parametrize(("k", "times", "silent"), [(OPPOSITE, 2.5, True), (OPPOSITE, 10, False), (ACROSS, 2.5, False)])
def test_a_gradient_that_has_no_digits_left_may_be_a_few_bounds_off(k: list[float], times: float, silent: bool) -> None:
    """The weight of nearly opposite vectors is 1 + cos: all implementations were off by twice a bound."""
    arrays = {"q_t": [[4.0, 0.0]], "k_t": [k], "v_t": [[0.5, -1.0]]}
    plain = next(core.cases("cosine_attention_step", "small", ("float32",)))
    rounded = {n: np.array(x, np.float32).astype(np.float64) for n, x in arrays.items()}
    case = replace(plain, arrays=rounded, params={}, cotangents={"o_t": np.array([[1.0, 0.3]])})
    adapter = Off("v_t", times * golden(case).gradients["v_t"].allowed)
    assert (screen.check(adapter, case) is None) == silent


def test_an_adapter_has_the_threads_of_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    lower.threads_of_environment.cache_clear()
    with several_threads(find(["numpy-generic"])[0], 3):
        assert lower.threads_of_environment() == 3
    assert lower.threads_of_environment() == 2
    monkeypatch.undo()
    lower.threads_of_environment.cache_clear()
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    with several_threads(find(["torch-generic"])[0], before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_where_the_reference_jumps_a_result_tells_nothing() -> None:
    """A score is so near to the kink of relu that rounding decides its slope."""
    plain = next(core.cases("pointwise_attention", "small", ("float32",)))
    arrays = {"q": [[[[1.0, 1.0]]]], "k": [[[[1.0, -1.0 + 1e-7]]]], "v": [[[[1.0]]]]}
    case = replace(plain, arrays={n: np.array(x) for n, x in arrays.items()}, cotangents={"o": np.ones((1, 1, 1, 1))})
    case = replace(case, params={}, tags=frozenset())

    class Other(Reference):
        def vjp(self, op: str, arrays: Arrays, params: Arrays, cotangents: Arrays) -> dict[str, Any]:
            return {name: np.zeros_like(x) for name, x in super().vjp(op, arrays, params, cotangents).items()}

    assert screen.check(Other(), case) is None
    away = replace(case, arrays={**case.arrays, "k": np.array([[[[1.0, -0.9]]]])})
    result = screen.check(Other(), away)
    assert result is not None
    assert result.status == "fail"


def test_one_percent_is_seen_in_every_output_and_gradient_of_plain_cases() -> None:
    """The bound of half types is that of D, whose rounding is as large as that."""
    judged = 0
    for n in range(120):
        made = drawn(3, n)
        if made.dtype not in DTYPES or made.row.get("values", "normal") != "normal" or BY_NAME[made.op].row_case:
            continue
        with np.errstate(all="ignore"):
            try:
                truth = screen.Truth(made.case())
            except NoDraw:
                continue
            for limits in truth.cheap:
                for name, limit in limits.items():
                    seen = np.abs(limit.golden) > 1e-3 * limit.largest
                    if limit.dtype in DTYPES and np.all(np.isfinite(limit.golden)):
                        assert np.all((0.01 * np.abs(limit.golden) > limit.allowed)[seen]), (made.text, name)
                        judged += 1
    assert judged > 50


def test_sizes_shrink_number_by_number_and_equal_ones_together() -> None:
    assert [*smaller("2x2")] == ["1x1", "1x2", "2x1"]
    assert "4+6+0x8+0+2" in [*smaller("4+6+0x8+0+3")]
    assert [*smaller("1")] == []


def test_a_recipe_is_of_other_sizes_than_its_row() -> None:
    made = [drawn(0, n) for n in range(300)]
    sizes = {one.row["shape"] for one in made if "lead" in one.row}
    numbers = {n for shape in sizes for n in rows.sizes(shape)}
    assert {0, 1, 2}.issubset(numbers)
    assert max(numbers) > 128
    assert {one.row.get("integers") for one in made} == {None, *recipe.INTEGER_DTYPES}
    assert {layout for one in made for layout in one.layouts.values()} == {*MAKERS} - {DENSE}
    assert {one.threads for one in made} == {1, 2, 3}


def test_lengths_have_the_dtype_that_the_recipe_says_if_they_fit() -> None:
    plain = {**rows.grammar(BY_NAME["softmax_attention"]).plain, "key_lengths": "some", "lead": "2x2x2"}
    for shape, dtype, expected in (("9x9", "uint64", "uint64"), ("9x9", "int8", "int8"), ("9x300", "int8", "int64")):
        case = Recipe("softmax_attention", {**plain, "shape": shape, "integers": dtype}).case()
        assert case.arrays["key_lengths"].dtype == expected


@pytest.mark.parametrize(
    "op",
    [op.name for op in OPDB if op.statistics and op.ties and op.group == "a" and "key_permutation" not in op.declines],
)
def test_equal_scores_have_equal_weights_where_ties_are_drawn(op):
    """In every library: otherwise rounding decides which key has the maximum. Rows of 129 end in what no vector fills,
    where torch's sigmoid is another function.
    """
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((50, 4, 1)), rng.integers(-3, 4, (50, 129, 1)) * 1.0
    sides = np.where(q * np.swapaxes(k, -1, -2) > 0, np.swapaxes(k, -1, -2), np.nan)  # the largest scores are positive
    for make in (np.float32, partial(torch.tensor, dtype=torch.float32), partial(jnp.asarray, dtype=np.float32)):
        attend = getattr(attnkit, f"{op}_weights")
        w = np.stack(
            [np.asarray(attend(make(a), make(b), scale=0.25, impl="generic")) for a, b in zip(q, k, strict=True)]
        )
        farthest = np.abs(sides) == np.nanmax(np.abs(sides), axis=-1, keepdims=True)
        for row, equal in zip(w.reshape(-1, 129), farthest.reshape(-1, 129), strict=True):
            assert len(np.unique(row[equal])) == 1, (op, make)


def test_no_scene_of_statistics_has_ties_that_rounding_decides():
    without = [op.name for op in OPDB if op.statistics and not op.ties]
    assert {"sigmoid_attention", "ssmax_attention"} <= {*without}
    for op in ("row_statistics", "attention_with_statistics"):
        tied = [sample.id for sample in core.samples(op, "scenes", ("float32",)) if "/kinks" in sample.id]
        assert tied
        assert not [name for name in tied if any(f".{subject}" in name for subject in without)]
