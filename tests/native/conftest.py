"""The library of this machine, compiled from the sources as they are; without a compiler its tests are skipped."""

import pytest

import attnkit
from attnkit.backends.native import build, load


@pytest.fixture(scope="session")
def library():
    build.main()
    reason = attnkit.native_status().reason
    if reason is not None and "no C++ compiler was found" in reason:
        pytest.skip(reason)
    return load.library()
