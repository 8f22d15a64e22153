"""The search: what it finds becomes small and can be run again; it is the same every time; it finds nothing where
nothing is wrong.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.errors import NoSuchExample, Unsatisfiable

import attnkit_reference
from attnkit_conformance import core
from attnkit_conformance.__main__ import main
from attnkit_conformance.model import golden
from attnkit_conformance.model.case import Case, numpy_dtype
from attnkit_conformance.opdb import BY_NAME, OPDB
from attnkit_conformance.scenes import rows
from attnkit_conformance.search import SETTINGS, Search, saved
from attnkit_conformance.search.strategies import cases

Arrays = Mapping[str, Any]


class Reference:
    """The reference as an adapter: in the compute dtype of float64, then rounded to the dtype of the result."""

    name, dtypes = "the-reference", ("float64", "float32")

    def array(self, x: np.ndarray, dtype: str) -> np.ndarray:
        return x

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return x

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


class Planted(Reference):
    """One percent too much, where there are more than 5 keys."""

    name = "planted"

    def call(self, op: str, arrays: Arrays, params: Arrays) -> dict[str, Any]:
        found = super().call(op, arrays, params)
        return found if arrays["k"].shape[-2] <= 5 else {**found, "o": found["o"] * found["o"].dtype.type(1.01)}


ADAPTER = Planted()
SOFTMAX = "softmax_attention/"


def searched(adapter: Any, folder: Path, ops: str, seed: int = 0) -> Search:
    """One turn of each op, however long that takes."""
    made = Search([adapter], 0.0, seed, folder, ("float64", "float32"), lambda text: f"::{ops}" in text, lambda: 0.0)
    made.end = 1.0
    for op in OPDB:
        if made.targets(op):
            made.look(op, 0)
    return made


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Search:
    return searched(Planted(), tmp_path_factory.mktemp("found"), SOFTMAX)


def test_a_planted_bug_is_found_and_made_small(planted: Search) -> None:
    (finding,) = planted.findings
    case = saved.load(finding.path)
    assert finding.result.checks == {"bound"}
    assert case.arrays["k"].shape[-2] == 6, "not as small as the bug allows"
    assert sum(x.size for x in case.arrays.values()) <= 30
    assert len(case.tags) == 1, "options that it does not need"
    planted.look(BY_NAME["softmax_attention"], 1)
    assert len(planted.findings) == 1, "the same again"


def test_a_saved_sample_is_run_again(planted: Search, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(planted.findings[0].path)
    assert main(["run", f"{__name__}:ADAPTER", "--samples", path]) == 1
    assert "[bound] o: off by" in capsys.readouterr().out
    assert main(["run", "numpy-generic", "--samples", path]) == 0
    assert "1 pass, 0 fail" in capsys.readouterr().out


def test_the_command_says_how_to_run_a_finding_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    select = ["-k", SOFTMAX, "--dtype", "float64", "--seed", "3", "--save", str(tmp_path)]
    assert main(["run", f"{__name__}:ADAPTER", "--search", "3", *select]) == 1
    text = capsys.readouterr().out
    (path,) = tmp_path.iterdir()
    assert f"found by seed 3; again: python -m attnkit_conformance run {__name__}:ADAPTER --samples {path}" in text
    assert "FAIL planted::softmax_attention/float64/search-" in text
    assert main(["run", f"{__name__}:ADAPTER", "--samples", str(tmp_path / "none")]) == 2


def test_the_same_seed_draws_the_same_cases(tmp_path: Path) -> None:
    one, two, other = (searched(Reference(), tmp_path, "qk_layernorm/", seed) for seed in (1, 1, 2))
    drawn = [({place: result.id for place, result in s.worst.items()}, s.examples, s.silent) for s in (one, two, other)]
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[2][0]
    assert len(drawn[0][0]) == 2


def test_nothing_is_found_where_nothing_is_wrong_and_every_op_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnkit_conformance.search.SETTINGS", settings(SETTINGS, max_examples=3))
    found = searched(Reference(), tmp_path, "")
    assert [finding.result for finding in found.findings] == []
    assert [op.name for op in OPDB if not found.examples[op.name]] == []
    assert sum(found.silent.values()) < sum(found.examples.values()) / 4


class Off(Reference):
    """A gradient is off by a multiple of its bound."""

    def __init__(self, case: Case, name: str, times: float) -> None:
        self.of, self.error = name, times * golden.golden(case).gradients[name].allowed

    def vjp(self, op: str, arrays: Arrays, params: Arrays, cotangents: Arrays) -> dict[str, Any]:
        grads = super().vjp(op, arrays, params, cotangents)
        return {**grads, self.of: (grads[self.of] + self.error).astype(np.float32)}


OPPOSITE, ACROSS = [-1.0, 0.01], [0.1, 1.0]


@pytest.mark.parametrize(("k", "times", "silent"), [(OPPOSITE, 2.5, True), (OPPOSITE, 10, False), (ACROSS, 2.5, False)])
def test_a_gradient_that_has_no_digits_left_may_be_a_few_bounds_off(
    k: list[float], times: float, silent: bool, tmp_path: Path
) -> None:
    """The weight of nearly opposite vectors is 1 + cos: all implementations were off by twice a bound."""
    arrays = {"q_t": [[4.0, 0.0]], "k_t": [k], "v_t": [[0.5, -1.0]]}
    plain = next(core.cases("cosine_attention_step", "quick", ("float32",)))
    rounded = {n: np.array(x, np.float32).astype(np.float64) for n, x in arrays.items()}
    case = replace(plain, arrays=rounded, params={}, cotangents={"o_t": np.array([[1.0, 0.3]])})
    search = Search([Off(case, "v_t", times)], 1.0, 0, tmp_path, ("float32",), lambda text: True)
    found = search.judge(case, search.adapters, None)
    assert (found is None) == silent
    assert search.silent[case.op] == silent


def test_a_saved_case_is_the_case(tmp_path: Path) -> None:
    for name in ("entmax_attention", "performer_attention", "linear_attention_packed"):
        case = saved.named_by_content(next(core.cases(name, "quick", ("bfloat16",))))
        saved.save(tmp_path / "case.safetensors", case, {})
        again = saved.load(tmp_path / "case.safetensors")
        assert (again.id, again.params, again.dtypes, again.tags) == (case.id, case.params, case.dtypes, case.tags)
        assert saved.named_by_content(again).id == case.id
        allowed, before = (golden.compute(x).outputs["o"].allowed for x in (again, case))
        assert np.array_equal(allowed, before)
        for array in case.arrays:
            assert again.typed(array).tobytes() == case.typed(array).tobytes()
    (tmp_path / "other.safetensors").write_bytes(b"other")
    with pytest.raises(ValueError, match="no sample that a search saved"):
        saved.load(tmp_path / "other.safetensors")


def test_the_draws_of_an_op_with_factors_of_its_own_have_other_sizes_than_its_rows() -> None:
    op, sizes = BY_NAME["soft_attention"], set()
    with contextlib.suppress(NoSuchExample, Unsatisfiable):
        hypothesis.find(cases(op, ("float64",)), lambda case: bool(case and sizes.add(case.arrays["q"].shape[-2])))
    assert len(sizes - {rows.sizes(shape)[0] for shape in (*op.levels["shape"], *op.tiles)}) > 2
