"""Bugs planted in one honest adapter of softmax attention, and which rules notice them.

`python -m attnkit_conformance run attnkit_conformance.studies.planted:head_gt_64` judges the adapter with the bug of
that name, `...planted:honest` the adapter itself.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.studies.planted.bugs import BUGS, text_with

HONEST = "honest"
BY_NAME = {bug.name: bug for bug in BUGS}


def planted(name: str) -> Adapter:
    """A new adapter with the bug of this name, or the honest one; it shares nothing with others."""
    changes = () if name == HONEST else BY_NAME[name].changes
    path = Path(__file__).with_name("softmax.py")
    module = ModuleType(f"{__name__}.softmax_{name}")
    sys.modules[module.__name__] = module  # dataclasses look for it there
    exec(compile(text_with(path.read_text(), changes), f"{path} with {name}", "exec"), module.__dict__)
    softmax = module.Softmax()
    softmax.name = name
    adapter: Adapter = softmax
    return adapter


def __getattr__(name: str) -> Adapter:
    if name == HONEST or name in BY_NAME:
        return planted(name)
    raise AttributeError(f"{__name__} has no bug {name!r}; they are {', '.join(BY_NAME)}")
