"""The pool of threads, in a program of its own, also under the sanitizers that this compiler has."""

import subprocess
from pathlib import Path

import pytest

from attnkit.backends.native import build

PROGRAM = Path(__file__).parent / "pool.cpp"
SANITIZERS = {"plain": (), "address": ("-fsanitize=address,undefined",), "thread": ("-fsanitize=thread",)}


def compiled(tmp_path: Path, *flags: str) -> Path:
    try:
        compiler = build.compiler()
    except LookupError as error:
        pytest.skip(str(error))
    places = [f"-I{tmp_path}", f"-I{build.SOURCES}"]
    command = [*compiler, "-std=c++17", "-O1", "-pthread", *places, *flags, str(PROGRAM), "-o", str(tmp_path / "pool")]
    subprocess.run(command, check=True, capture_output=True)
    return tmp_path / "pool"


def complaints(program: Path, *arguments: str) -> str:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=100, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "sanitizer", [name if name == "plain" else pytest.param(name, marks=pytest.mark.emulated) for name in SANITIZERS]
)
def test_every_task_is_done_once(tmp_path, sanitizer):
    program = compiled(tmp_path, *SANITIZERS[sanitizer])
    assert complaints(program, *(["without fork"] if sanitizer == "thread" else [])) == ""


@pytest.mark.emulated  # each is a program of its own
@pytest.mark.parametrize(
    ("line", "planted", "complaint"),
    [
        ("next_.fetch_add(1, std::memory_order_relaxed)", "next_++ + (next_ == 60)", "a task was not done once"),
        ("pthread_atfork(nullptr, nullptr, [] { pool_ = new Pool; });", "", "a forked child hangs, fails or is alone"),
        ("        --threads_;\n        return;", "", "helpers did not end when calls allowed fewer"),
        ("if (error_) std::rethrow_exception(error_);", "", "what a task threw was lost"),
        ("return clock_gettime(clock_, &after) == 0 &&", "return true ||", "a sleeping team was asked"),
        ("return clock_gettime(clock_, &after) == 0 &&", "return false &&", "a spinning team was not asked"),
        ("has_clock ? kMember : kAlone", "has_clock ? kMember : kNothing", "a team of one was asked"),
    ],
)
def test_the_program_would_notice(tmp_path, line, planted, complaint, monkeypatch):
    monkeypatch.setenv("PATIENCE", "3")  # seconds until a child hangs
    text = {name: (build.SOURCES / name).read_text() for name in ("pool.h", "team.h")}  # one includes the other
    (header,) = [name for name, code in text.items() if code.count(line) == 1]
    text[header] = text[header].replace(line, planted)
    for name in text:
        (tmp_path / name).write_text(text[name])
    assert complaint in complaints(compiled(tmp_path))
