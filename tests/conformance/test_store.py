"""Goldens that are kept in a folder from run to run."""

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from attnkit_conformance import golden
from attnkit_conformance.model import store
from attnkit_conformance.model.scene import Scene
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.scenes.attention import scene_sample

CASE = scene_sample(BY_NAME["softmax_attention"], Scene("kept", 5, 7), {"return_lse": True}, "float32").draw(0)


class Counted:
    """Makes a number, and counts how often."""

    times = 0

    def __call__(self) -> int:
        self.times += 1
        return self.times


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.FOLDER, str(tmp_path))
    return tmp_path


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_made_once_as_long_as_the_sources_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Counted()
    assert [store.remember("abc", make) for _ in range(3)] == [1, 1, 1]
    assert store.remember("abd", make) == 2
    assert len(files(folder)) == 2
    monkeypatch.setattr(store, "state", lambda: "other")
    assert store.remember("abc", make) == 3


def test_the_name_of_the_sources_follows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.py").write_text("x = 1")
    monkeypatch.setattr(store, "SOURCES", (tmp_path,))
    name: Callable[[], str] = store.state.__wrapped__
    before = name()
    assert name() == before
    (tmp_path / "model.py").write_text("x = 2")
    assert name() != before


@pytest.mark.parametrize("content", [b"", pickle.dumps(7)[:-2], b"text"])
def test_what_cannot_be_read_is_made_again(folder: Path, content: bytes) -> None:
    make = Counted()
    store.remember("abc", make)
    (path,) = files(folder)
    path.write_bytes(content)
    assert [store.remember("abc", make) for _ in range(2)] == [2, 2]


def test_nothing_is_kept_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(store.FOLDER, raising=False)
    monkeypatch.chdir(tmp_path)
    make = Counted()
    assert [store.remember("abc", make) for _ in range(2)] == [1, 2]
    assert not files(tmp_path)


def test_goldens_come_back_as_they_were(folder: Path) -> None:
    made, read = (golden.of_content.__wrapped__(golden.Content(CASE.digest, CASE)) for _ in range(2))
    assert made is not read
    assert len(files(folder)) == 1
    for one, other in ((made.outputs, read.outputs), (made.gradients, read.gradients)):
        assert one.keys() == other.keys()
        for name, limit in one.items():
            assert np.array_equal(limit.golden, other[name].golden)
            assert np.array_equal(limit.allowed, other[name].allowed)
            assert (limit.dtype, limit.largest) == (other[name].dtype, other[name].largest)
    for mine, same in ((made.zero_outputs, read.zero_outputs), (made.zero_gradients, read.zero_gradients)):
        assert {n: x.tobytes() for n, x in mine.items()} == {n: x.tobytes() for n, x in same.items()}
    assert made.blind_spots == read.blind_spots
