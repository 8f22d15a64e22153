"""The environment of a result, in a checkout that is not installed too."""

import importlib.metadata

import numpy as np
import torch

import attnkit
from attnkit_experiments.engine.environment import describe


def test_versions_do_not_need_an_installed_package(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    facts = describe(torch.device("cpu"), 1)
    assert (facts["attnkit"], facts["numpy"]) == (attnkit.__version__, np.__version__)


def test_the_library_that_serves_on_cpus_is_named(monkeypatch):
    for level, name in (("x86-64-v4", "x86-64-v4"), (None, "none")):
        monkeypatch.setattr(attnkit, "native_status", lambda level=level: attnkit.NativeStatus(level, None))
        assert describe(torch.device("cpu"), 1)["native"] == name
