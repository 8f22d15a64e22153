"""The build hook: what a wheel holds with a compiler and without one."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from attnkit.backends.native import build, load, manylinux

ROOT = Path(__file__).parents[2]
LEVEL = next(iter(build.levels()))


def wheel(folder: Path, **environment: str) -> tuple[Path, str]:
    """The wheel, and what was said while it was built."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=True)
    return next(folder.glob("*.whl")), done.stdout + done.stderr


@pytest.fixture
def fake_compiler(tmp_path) -> Path:
    """Says which files and flags it was given; what it makes is empty."""
    script = tmp_path / "c++"
    script.write_text('#!/bin/sh\necho "$@" >> "$0.calls"\nfor last; do true; done\necho made > "$last"\n')
    script.chmod(0o755)
    return script


def test_the_hook_needs_nothing_that_is_installed():
    """pip runs it where attnkit is not there yet."""
    command = [sys.executable, "-I", "-S", build.__file__, "--levels"]
    assert LEVEL in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_without_a_compiler_the_wheel_is_anybodys_and_says_why(tmp_path):
    made, said = wheel(tmp_path, CXX="/no/such/compiler")
    assert made.name.endswith("-py3-none-any.whl")
    assert "without its compiled CPU kernels: CXX=/no/such/compiler is not there" in said
    with zipfile.ZipFile(made) as archive:
        names = [name for name in archive.namelist() if name.startswith("attnkit/backends/native/lib/")]
        assert names == [f"attnkit/backends/native/lib/{build.REASON}"]
        assert archive.read(names[0]) == b"CXX=/no/such/compiler is not there"


def test_a_portable_wheel_says_how_to_get_what_it_lacks(tmp_path, fake_compiler):
    made, _ = wheel(tmp_path, CXX=str(fake_compiler), ATTNKIT_CPU_LEVEL="portable")
    assert made.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(made) as archive:
        reason = archive.read(f"attnkit/backends/native/lib/{build.REASON}").decode()
    assert reason == build.WITHOUT
    assert not (tmp_path / "c++.calls").exists()
    assert reason != load.UNWANTED  # so that the first slow call says so


def test_a_compiler_that_fails_is_quoted(tmp_path):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'warning: no' >&2\necho 'x.cpp:1: error: what is this' >&2\nexit 1\n")
    broken.chmod(0o755)
    made, said = wheel(tmp_path, CXX=str(broken))
    assert made.name.endswith("-py3-none-any.whl")
    assert "c++ failed: x.cpp:1: error: what is this" in " ".join(said.split())


def test_a_wheel_holds_every_level_and_the_checkout_keeps_its_own(tmp_path, fake_compiler):
    before = {path: path.stat().st_mtime_ns for path in build.LIBRARIES.glob("*")}
    made, _ = wheel(tmp_path, CXX=str(fake_compiler), ATTNKIT_CPU_LEVEL="all")
    assert "-py3-none-any" not in made.name
    assert "-py3-none-" in made.name
    names = {name.rpartition("/")[2] for name in zipfile.ZipFile(made).namelist() if "/native/lib/" in name}
    assert names == {build.RECORD, *(f"attnkit-{level}.so" for level in (build.DETECTOR, *build.levels()))}
    calls = (tmp_path / "c++.calls").read_text().splitlines()
    for _, flags in build.levels().values():
        compiled = [call for call in calls if "pointwise.cpp" in call and all(flag in call.split() for flag in flags)]
        assert compiled
    assert {path: path.stat().st_mtime_ns for path in build.LIBRARIES.glob("*")} == before


@pytest.fixture
def old_compiler(fake_compiler, monkeypatch) -> Path:
    """Does not know AVX-512, on a machine that has it."""
    if "x86-64-v4" not in build.levels():
        pytest.skip("this machine has one level")
    script = fake_compiler.read_text()
    refuses = 'case "$*" in *x86-64-v4*) echo "error: bad value for -march" >&2; exit 1;; esac'
    fake_compiler.write_text(script.replace("\n", f"\n{refuses}\n", 1))
    monkeypatch.setenv("CXX", str(fake_compiler))
    monkeypatch.delenv("ATTNKIT_CPU_LEVEL", raising=False)
    monkeypatch.setattr(build, "machine_level", lambda *folder: build.levels()["x86-64-v4-bf16"][0])
    return fake_compiler


def libraries(folder: Path) -> set[str]:
    return {path.stem.removeprefix("attnkit-") for path in folder.glob("*.so")} - {build.DETECTOR}


def test_an_installation_holds_the_level_of_the_machine_and_says_what_it_does(
    tmp_path, fake_compiler, monkeypatch, capsys
):
    monkeypatch.setenv("CXX", str(fake_compiler))
    monkeypatch.delenv("ATTNKIT_CPU_LEVEL", raising=False)
    name, (number, _) = [*build.levels().items()][-1]
    monkeypatch.setattr(build, "machine_level", lambda *folder: number)
    (folder := tmp_path / "lib").mkdir()
    assert build.fill(folder) is None
    assert libraries(folder) == {name}
    said = capsys.readouterr().err
    assert f"attnkit: compiling {name}: " in said
    assert f"attnkit: {name}: pointwise.cpp, " in said


def test_of_the_levels_that_the_compiler_lacks_the_next_lower_one_stands_in(tmp_path, old_compiler, capsys):
    (folder := tmp_path / "lib").mkdir()
    assert build.fill(folder) is None
    assert libraries(folder) == {"x86-64-v3"}
    left_out = build.failures(folder)
    assert [*left_out] == ["x86-64-v4-bf16", "x86-64-v4"]
    assert "bad value for -march" in left_out["x86-64-v4"]
    assert "x86-64-v4 are left out: " in capsys.readouterr().err


def test_a_level_that_fails_leaves_the_others_of_a_wheel(tmp_path, old_compiler, monkeypatch):
    monkeypatch.setenv("ATTNKIT_CPU_LEVEL", "all")
    (folder := tmp_path / "lib").mkdir()
    assert build.fill(folder) is None
    assert libraries(folder) == {"x86-64", "x86-64-v3"}
    assert {*build.failures(folder)} == {name for name in build.levels() if "v4" in name}


def test_where_every_level_fails_nothing_is_left_but_the_reasons(tmp_path, old_compiler, monkeypatch):
    monkeypatch.setenv("ATTNKIT_CPU_LEVEL", "x86-64-v4")
    (folder := tmp_path / "lib").mkdir()
    assert "bad value for -march" in build.fill(folder)
    assert [path.name for path in folder.iterdir()] == [build.REASON]


def test_what_failed_is_tried_again_by_another_compiler_alone(tmp_path, old_compiler, monkeypatch):
    (folder := tmp_path / "lib").mkdir()
    monkeypatch.setattr(build, "LIBRARIES", folder)
    for function in (build.library, build.misfit, build.failures):
        monkeypatch.setattr(function, "__defaults__", (folder,))
    assert build.fill(folder) is None
    assert build.is_up_to_date()
    old_compiler.write_text(old_compiler.read_text() + "# newer\n")
    assert not build.is_up_to_date()


def test_what_includes_an_edited_header_alone_is_compiled_again(tmp_path, fake_compiler, monkeypatch):
    sources, objects, calls = tmp_path / "cpu", tmp_path / "objects", tmp_path / "c++.calls"
    for folder in (sources, objects):
        folder.mkdir()
    texts = {"deep.h": "", "near.h": '#include "deep.h"\n', "one.cpp": '#include "near.h"\n', "two.cpp": "int two;\n"}
    for name, text in {**texts, "detect.cpp": ""}.items():
        (sources / name).write_text(text)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("CXX", str(fake_compiler))
    monkeypatch.setenv("ATTNKIT_CPU_LEVEL", LEVEL)

    def compiled() -> set[str]:
        calls.write_text("")
        build.compile_into(tmp_path, objects)
        words = [call.split() for call in calls.read_text().splitlines() if "-c" in call.split()]
        return {Path(call[call.index("-c") + 1]).stem for call in words}

    assert compiled() == {"one", "two", "detect"}
    assert compiled() == set()
    (sources / "deep.h").write_text("int deep;\n")
    assert compiled() == {"one"}
    (sources / "deep.h").write_text("")
    assert compiled() == set()


def test_the_compiler_of_wheels_knows_the_levels_by_its_own_names():
    for _, flags in build.levels().values():
        command = manylinux.command(*flags, "-c", "x86-64.cpp")
        assert command[-1] == "x86-64.cpp"
        assert not any("-" in flag.removeprefix("-march=") for flag in command if flag.startswith("-march="))
    assert command[1:4] == ["-m", "ziglang", "c++"]
    assert command[5].endswith(f".{manylinux.GLIBC}")
