"""Leases: one holder, ended by release, by the death of its process, by silence; never taken from one that is alive."""

import json
import os

import pytest

from attnkit_experiments.commands import runner
from attnkit_experiments.commands.queue import LEASES
from attnkit_experiments.engine import leases
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.leases import PATIENCE, claim, held, holder


def test_one_holds_a_lease_until_it_is_released(tmp_path):
    with claim(tmp_path, "cell0.5-seed0") as lease:
        assert claim(tmp_path, "cell0.5-seed0") is None
        assert held(tmp_path) == {"cell0.5-seed0": holder(tmp_path, "cell0.5-seed0")}
        assert holder(tmp_path, "cell0.5-seed0").startswith(f"process {os.getpid()} on ")
        with claim(tmp_path, "cell0") as other:
            assert other.number == lease.number == 1
        lease.check()
    assert held(tmp_path) == {}
    assert not list(tmp_path.iterdir())


def test_a_silent_lease_ends_and_its_holder_notices(tmp_path):
    with claim(tmp_path, "cell") as first:
        os.utime(first.path, (1, 1))
        with claim(tmp_path, "cell") as second:
            assert second.number == 2
            with pytest.raises(UserError, match="another one has taken over"):
                first.check()
            first.release()
            second.check()
        with pytest.raises(UserError, match="another one has taken over"):
            second.check()


def test_a_lease_is_renewed_while_its_holder_lives(tmp_path):
    with claim(tmp_path, "cell", patience=0.1) as lease:
        os.utime(lease.path, (1, 1))
        for _ in range(1000):
            if lease.path.stat().st_mtime > 1:
                break
            lease._done.wait(0.01)
        assert lease.path.stat().st_mtime > 1


def test_a_lease_ends_with_its_process_on_this_machine_and_by_silence_on_others(tmp_path):
    with claim(tmp_path, "cell") as lease:
        about = json.loads(lease.path.read_text())
        assert about["patience"] == PATIENCE
        lease.path.write_text(json.dumps(about | {"born": "another process of this number"}))
        assert holder(tmp_path, "cell") == ""
        lease.path.write_text(json.dumps(about | {"host": "elsewhere", "born": ""}))
        assert holder(tmp_path, "cell") == f"process {os.getpid()} on elsewhere"
        os.utime(lease.path, (1, 1))
        assert holder(tmp_path, "cell") == ""


def test_a_clock_that_is_set_back_keeps_no_lease(tmp_path, monkeypatch):
    """It would last for the hour; who waits for it has a clock of its own. One that is touched stays."""
    (tmp_path / "cell.1").write_text(json.dumps({"host": "elsewhere", "process": 1, "born": "", "patience": 300}))
    clock, hour = [1000.0], (tmp_path / "cell.1").stat().st_mtime + 3600
    monkeypatch.setattr(leases.time, "monotonic", lambda: clock[0])
    for seconds, touched, held_by in ((0, hour, True), (290, hour, True), (20, hour + 1, True), (301, hour + 1, False)):
        clock[0] += seconds
        os.utime(tmp_path / "cell.1", (touched, touched))
        assert bool(holder(tmp_path, "cell")) == held_by


def test_of_two_who_see_an_ended_lease_only_one_takes_over(tmp_path, monkeypatch):
    """The other one comes between the look at the lease and the next."""
    (tmp_path / "cell.3").write_text(json.dumps({"host": "", "process": 1, "born": "", "patience": 1}))
    os.utime(tmp_path / "cell.3", (1, 1))
    look, others = leases._holder, []

    def look_and_wait(folder, name, number):
        found = look(folder, name, number)
        monkeypatch.setattr(leases, "_holder", look)
        others.append(claim(folder, name))
        return found

    monkeypatch.setattr(leases, "_holder", look_and_wait)
    assert claim(tmp_path, "cell") is None
    assert others[0].number == 4
    others[0].release()
    assert not list(tmp_path.iterdir())


def test_run_is_refused_by_name_where_something_runs(tiny, tmp_path):
    for name, text in (("run", "runs there"), ("relu-alpha1-seed0", "trains relu-alpha1-seed0 there")):
        with (
            claim(tmp_path / "out" / LEASES, name),
            pytest.raises(UserError, match=f"process {os.getpid()} on .*{text}"),
        ):
            tiny(tmp_path / "out")
    assert not (tmp_path / "out" / "study.json").exists()
    assert held(tmp_path / "out" / LEASES) == {}
    with claim(tmp_path / "rows" / LEASES, "run"), pytest.raises(UserError, match="runs there"):
        runner.run(runner.Request("002-table3", "smoke", "", tmp_path / "rows", device="cpu", threads=1))
