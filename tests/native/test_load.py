"""Which library is loaded, and what is said where none is."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnkit
from attnkit.backends.native import build, load, lower

ASK = "import attnkit; status = attnkit.native_status(); print(status.level, '|', status.reason)"


def told(code: str = ASK, **environment: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_highest_level_of_this_machine_serves(library):
    level = attnkit.native_status().level
    assert build.levels()[level][0] == build.machine_level()
    x = np.ones((2, 3))
    assert attnkit.explain(attnkit.softmax_attention, x, x, x)["native"] is None


@pytest.mark.parametrize(
    ("level", "reason"),
    [
        ("none", "None | ATTNKIT_CPU_LEVEL=none"),
        ("x86-64-v9", "None | ATTNKIT_CPU_LEVEL=x86-64-v9 is none of "),
    ],
)
def test_a_level_that_is_not_to_be_had(library, level, reason):
    assert told(ATTNKIT_CPU_LEVEL=level).startswith(reason)


def test_without_the_library_calls_are_served_by_others_and_explained(library):
    code = (
        "import numpy as np, attnkit; x = np.ones((2, 3)); attnkit.softmax_attention(x, x, x)\n"
        "print(attnkit.explain(attnkit.softmax_attention, x, x, x)['native'])\n"
        "try: attnkit.softmax_attention(x, x, x, impl='native')\n"
        "except NotImplementedError as error: print(error)"
    )
    answers = told(code, ATTNKIT_CPU_LEVEL="none").splitlines()
    assert answers[0] == "ATTNKIT_CPU_LEVEL=none"
    assert "native: ATTNKIT_CPU_LEVEL=none" in answers[1]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Another folder of libraries and nothing loaded yet."""
    monkeypatch.setattr(build, "LIBRARIES", tmp_path)
    for function in (build.library, build.machine_level, build.misfit):
        monkeypatch.setattr(function, "__defaults__", (tmp_path,))
    forget = (load.load, load.warn_of, lower.refusal)
    for function in forget:
        function.cache_clear()
    yield tmp_path
    for function in forget:
        function.cache_clear()


@pytest.mark.parametrize(("machine", "level"), [(1, "low"), (2, "high"), (3, "high")])
def test_of_several_levels_the_highest_that_the_machine_has_is_taken(machine, level, elsewhere, monkeypatch):
    monkeypatch.delenv("ATTNKIT_CPU_LEVEL", raising=False)
    monkeypatch.setattr(build, "levels", lambda: {"high": (2, ("-a",)), "low": (1, ("-b",)), "higher": (4, ("-c",))})
    monkeypatch.setattr(build, "machine_level", lambda: machine)
    for name in (build.DETECTOR, "low", "high", "higher"):
        build.library(name).touch()
    build.write_record(elsewhere)
    assert load._level() == level
    monkeypatch.setenv("ATTNKIT_CPU_LEVEL", "all")  # as when they were compiled
    assert load._level() == level


def test_a_level_that_is_asked_for_is_the_one_compiled(monkeypatch):
    for level in build.levels():
        monkeypatch.setenv("ATTNKIT_CPU_LEVEL", level)
        assert build.attempts(lambda: pytest.fail("asked")) == [[level]]


def test_a_current_library_is_left_alone_and_its_levels_are_named(library, monkeypatch, capsys):
    monkeypatch.setattr(build, "rebuild", lambda: pytest.fail("compiled again"))
    assert (build.main(), build.main("--levels")) == (0, 0)
    assert attnkit.native_status().level in capsys.readouterr().out.split()


def cut_short(folder: Path) -> None:
    for file in folder.glob("*.so"):
        file.write_bytes(file.read_bytes()[:-4096])


def of_another_build(folder: Path) -> None:
    for file in folder.glob("*.so"):
        shutil.copy(folder / f"attnkit-{build.DETECTOR}.so", file.with_suffix(".copy"))
        file.with_suffix(".copy").replace(file)


def of_other_sources(folder: Path) -> None:
    record = folder / build.RECORD
    record.write_text(record.read_text().replace(build.fingerprint(), "0" * 32))


def without_record(folder: Path) -> None:
    (folder / build.RECORD).unlink()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (cut_short, "is not the file that was compiled"),
        (of_another_build, "is not the file that was compiled"),
        (of_other_sources, "compiled from other C++ sources"),
        (without_record, "no record of its build"),
    ],
)
def test_a_library_that_is_not_what_was_compiled_is_not_loaded_with_one_warning(library, elsewhere, spoil, reason):
    shutil.copytree(Path(build.__file__).parent / "lib", elsewhere, dirs_exist_ok=True)
    spoil(elsewhere)
    x = np.ones((2, 3))
    with pytest.warns(RuntimeWarning, match=re.escape(reason)):
        refusal = attnkit.explain(attnkit.softmax_attention, x, x, x)["native"]
    assert np.array_equal(attnkit.softmax_attention(x, x, x), x)  # another warning would be an error
    assert reason in refusal
    assert "python -m attnkit.backends.native.build" in refusal


def test_a_library_of_other_sources_is_not_current(library, monkeypatch):
    level = attnkit.native_status().level
    assert build.is_current(level)
    assert not build.is_current("x86-64-v0")
    monkeypatch.setattr(build, "fingerprint", lambda: "of other sources")
    assert not build.is_current(level)


def test_every_source_and_the_flags_are_part_of_the_fingerprint(tmp_path, monkeypatch):
    sources = {path.relative_to(build.SOURCES): path.read_bytes() for path in build.source_files()}
    assert {Path("attnkit.h"), Path("pool.h"), Path("attnkit.cpp")} <= {*sources}
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    for path, content in sources.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    before = build.fingerprint()
    for path, content in sources.items():
        (tmp_path / path).write_bytes(content + b"\n")
        assert build.fingerprint() != before
        (tmp_path / path).write_bytes(content)
    assert build.fingerprint() == before
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O1"))
    assert build.fingerprint() != before


def test_what_hindered_the_build_is_told_later(elsewhere):
    assert attnkit.native_status() == (None, "it was not compiled; run python -m attnkit.backends.native.build")
    load.load.cache_clear()
    (elsewhere / build.REASON).write_text("no C++ compiler was found (c++, g++, clang++)")
    assert attnkit.native_status().reason.startswith("no C++ compiler was found (c++, g++, clang++); run python -m")


def of_numpy() -> Any:
    return np.ones((2, 7, 11))


def of_torch() -> Any:
    return pytest.importorskip("torch").ones((2, 7, 11))


def of_jax() -> Any:
    return pytest.importorskip("jax").numpy.ones((2, 7, 11))


@pytest.mark.parametrize("array", [of_numpy, of_torch, of_jax])
def test_a_call_that_lacks_the_library_warns_once(elsewhere, array):
    x = array()
    attnkit.explain(attnkit.pointwise_attention, x, x, x)  # a warning would be an error
    attnkit.pointwise_attention(x, x, x, impl="generic")
    attnkit.sima_attention(x, x, x)
    with pytest.warns(RuntimeWarning, match="it was not compiled; run python -m attnkit.backends.native.build") as said:
        attnkit.pointwise_attention(x, x, x, alpha=0.75)
    assert len(said) == 1
    attnkit.pointwise_attention(x, x, x, alpha=0.625)


def test_who_wants_no_library_is_not_told(elsewhere, monkeypatch):
    monkeypatch.setenv("ATTNKIT_CPU_LEVEL", "none")
    x = of_numpy()
    attnkit.pointwise_attention(x, x, x, alpha=0.375)


def test_torchs_own_softmax_is_not_slow(elsewhere):
    torch = pytest.importorskip("torch")
    x = torch.ones((1, 2, 17, 3))
    attnkit.softmax_attention(x, x, x)
    with pytest.warns(RuntimeWarning, match="it was not compiled"):
        attnkit.softmax_attention(x, x, x, bias=torch.zeros(17, 17))


def test_without_a_level_of_this_machine_the_build_is_named(library, monkeypatch):
    real = build.library
    monkeypatch.setattr(
        build, "library", lambda name, *folder: real(name, *folder) if name == build.DETECTOR else Path("nowhere")
    )
    load.load.cache_clear()
    try:
        assert attnkit.native_status().reason.startswith("no level of this machine was compiled; run python -m")
    finally:
        load.load.cache_clear()
