"""Implementations that nobody here wrote agree with the reference wherever xfails/ does not say why not."""

import importlib.metadata
import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnkit_conformance import core, peers
from attnkit_conformance.adapters import families
from attnkit_conformance.adapters.absent import Absent
from attnkit_conformance.judge import judge
from attnkit_conformance.judge.selection import find
from attnkit_conformance.peers.further import FURTHER, Further
from attnkit_conformance.report.peers_page import VISIBLE

PROFILES = dict.fromkeys(  # the quick profile has little that they serve
    ("numpy_pinv", "nystrom_attention", "performer_pytorch", "linear_attention_transformer"), ("scenes",)
) | {"fla": ("scenes", "small")}  # and scenes have no gates that are a number
OP = "softmax_attention"
DOUBLE_AND_SINGLE = ("float64", "float32")
SINGLE = {"flex_attention": ("float32",), "transformers": ("float32",)}  # slow, and the same in float64
NOTHING_QUICK = ("transformers-nystromformer", "transformers-reformer", "commonly_written-softplus_zeroed")


def installed(family: str) -> list:
    missing = [name for name in peers.REQUIRES[family] if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (extra `peers` or `more-peers`)")
    return find([family])


def judged(chosen: list, profile: str, dtypes: tuple[str, ...]) -> Counter:
    """Verdicts with a number, by adapter; nothing fails but for what is written down."""
    ops = tuple({op: None for adapter in chosen for op in adapter.ops})
    results = list(judge(chosen, profile, None, dtypes, ops))
    failures = [f"{result.adapter}::{result.id}\n{result.message}" for result in results if result.status == "fail"]
    assert not failures, "\n".join(failures)
    return Counter(result.adapter for result in results if result.measured)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize("family", [name for name in peers.REQUIRES if name != "keras"])
def test_peer_agrees_but_for_what_is_written_down(family: str) -> None:
    chosen = [adapter for adapter in installed(family) if adapter.name not in NOTHING_QUICK]
    assert all(hasattr(adapter, "source") for adapter in chosen), "the page shows a program of a disagreement"
    dtypes = SINGLE.get(family, DOUBLE_AND_SINGLE)
    passed = sum((judged(chosen, profile, dtypes) for profile in PROFILES.get(family, ("small",))), Counter())
    assert set(passed) == {adapter.name for adapter in chosen}, "an adapter was judged on nothing"


@pytest.mark.peers
def test_keras_agrees_on_what_is_no_sparsemax() -> None:
    if importlib.util.find_spec("keras") is None:
        pytest.skip("not installed: keras (extra `peers`)")
    from attnkit_conformance.peers.keras import Keras

    adapter = Keras("numpy")
    try:
        assert judged([adapter], "small", ("float32",))["keras-numpy"]
    finally:
        adapter.close()


@pytest.mark.peers
@pytest.mark.parametrize("name", NOTHING_QUICK)
def test_peer_that_serves_nothing_of_the_quick_profile(name: str) -> None:
    chosen = [adapter for adapter in installed(name.partition("-")[0]) if adapter.name == name]
    assert judged(chosen, "scenes", ("float32",))[name]


@pytest.mark.peers
def test_entmax_in_bfloat16_loses_sums_over_many_keys() -> None:
    exact = installed("entmax")[0]
    case = next(case for case in core.cases("entmax_attention", "scenes", ("bfloat16",)) if "many-keys" in case.id)
    failures = core.check(exact, case).failures
    assert any(check == "bound" and text.startswith("o: ") for check, text in failures)


def test_names_select_one_function_or_a_library_or_all() -> None:
    assert [adapter.name for adapter in find(["numpy_pinv"])] == ["numpy_pinv"]
    assert [adapter.name for adapter in find(["torch_sdpa-math"])] == ["torch_sdpa-math"]
    assert not set(families.default()) & {*peers.FAMILIES, peers.ALL}
    assert [adapter.reason for adapter in find(["adasplash"])] == ["needs a GPU: Triton kernels"]
    assert {adapter.ops for adapter in find(["fla_triton"])} == {
        (op,) for op in ("linear_attention", "softmax_attention", "gated_linear_attention", "delta_attention",
                         "forgetting_attention", "stick_breaking_attention")
    }  # fmt: skip
    with pytest.raises(ValueError, match="torch_sdpa has torch_sdpa-auto, torch_sdpa-math, torch_sdpa-flash"):
        find(["torch_sdpa-cudnn"])


def test_a_library_that_is_not_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "REQUIRES", {**peers.REQUIRES, "fla": ("torch", "no_such_module")})
    (absent,) = peers.family("fla")
    assert isinstance(absent, Absent)
    assert absent.reason == "no_such_module is not installed"


def test_every_family_says_what_it_needs_where_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for family, modules in peers.REQUIRES.items():
        (absent,) = peers.family(family)
        assert isinstance(absent, Absent)
        assert absent.reason == f"{', '.join(modules)} is not installed"


def test_every_family_has_a_module_of_its_name() -> None:
    folder = Path(peers.__file__).parent
    assert all((folder / f"{family}.py").exists() for family in peers.REQUIRES)


def test_onnx_reference_agrees_on_a_cross() -> None:
    """One of the further families, whose package the library needs anyway."""
    results = list(judge(installed("onnx_reference"), "quick", "softmax_attention/float32/cross", ("float32",), (OP,)))
    assert [result.status for result in results] == ["pass"]


@pytest.mark.parametrize("one", FURTHER, ids=lambda one: one.reason[:40])
def test_a_disagreement_beyond_the_cases_is_a_program_of_a_known_family(one: Further) -> None:
    assert one.family in peers.REQUIRES
    assert {"got", "expected"} <= set(compile(one.program, one.family, "exec").co_names)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("one", FURTHER, ids=lambda one: one.reason[:40])
def test_a_disagreement_beyond_the_cases_is_there(one: Further, capsys: pytest.CaptureFixture[str]) -> None:
    installed(one.family)
    told: dict[str, Any] = {}
    exec(one.program, told)
    assert np.max(np.abs(told["got"] - told["expected"])) > VISIBLE
    assert f"{one.package} {importlib.metadata.version(one.package)} is off by" in capsys.readouterr().out
