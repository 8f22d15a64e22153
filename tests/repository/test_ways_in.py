"""What `make ways-in` runs is there; the target itself makes environments, and takes minutes."""

from tests.repository import ways_in
from tests.repository.projects import FOLDERS


def test_every_way_has_programs():
    for needs, programs in ways_in.WAYS.values():
        assert {*needs} <= FOLDERS.keys()
        for _, code, *_ in programs():
            assert "import" in code or code == "attnkit_conformance", "a heading of the page is gone"


def test_what_is_no_way_is_refused(capsys):
    assert ways_in.main(["tourist"]) == 2
    assert "expected some of torch, kernels, models, student; got tourist" in capsys.readouterr().err
