"""Functions that may not be called while an adapter answers: a baseline, or the reference that is the judge's."""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, CodeType, FrameType

REFERENCE = "attnkit_reference"


class Watch:
    """Notices calls of "package.module:function" and of "package.module", all that is defined in it or below it.

    Functions are recognised by their code, whatever name they are called by, methods of a class included; compiled
    ones if Python calls them. ValueError for a name that leads to neither.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.modules = tuple(name for name in names if ":" not in name)
        self.codes: dict[CodeType, str] = {}
        self.builtins: dict[object, str] = {}
        self.seen: set[str] = set()
        for name in names:
            if ":" in name:
                self.add(name)

    def add(self, name: str) -> None:
        """Watch one function or class."""
        module, _, attribute = name.partition(":")
        try:
            value: object = importlib.import_module(module)
            for part in attribute.split("."):
                value = getattr(value, part)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"--calls {name}: {type(error).__name__}: {error}") from None
        functions = vars(value).values() if inspect.isclass(value) else (value,)
        codes = [getattr(inspect.unwrap(f), "__code__", None) for f in functions if callable(f)]
        self.codes |= {code: name for code in codes if code is not None}
        if isinstance(value, BuiltinFunctionType):
            self.builtins[value] = name
        elif not any(codes):
            raise ValueError(f"--calls {name}: expected a function or a class of Python's, or a builtin; got {value!r}")

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Add to `seen` what is called meanwhile, here or in threads that start meanwhile."""
        loaded = {name for name in self.modules if name in sys.modules}
        if not (loaded or self.codes or self.builtins):
            yield
        else:
            threading.setprofile(self.note)
            sys.setprofile(self.note)
            try:
                yield
            finally:
                sys.setprofile(None)
                threading.setprofile(None)
        self.seen |= {f"{name} (imported)" for name in self.modules if name in sys.modules and name not in loaded}

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        """A profile function of Python."""
        if event == "call":
            if (code := frame.f_code) in self.codes:
                self.seen.add(self.codes[code])
            module = str(frame.f_globals.get("__name__"))
            for name in self.modules:
                if module == name or module.startswith(f"{name}."):
                    self.seen.add(f"{module}:{code.co_name}")
        elif event == "c_call" and isinstance(argument, BuiltinFunctionType) and argument in self.builtins:
            self.seen.add(self.builtins[argument])

    def new_calls(self) -> list[str]:
        """What was called since this was last asked."""
        seen = sorted(self.seen)
        self.seen.clear()
        return seen
