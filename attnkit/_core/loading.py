"""What is to be done once another package is imported, without importing it for that."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_loaded(name: str, then: Callable[[], None]) -> None:
    """Call `then` at once if a module is loaded, else at the end of its first import, before anyone can use it."""
    if name in sys.modules:
        then()
        return
    _WAITING.setdefault(name, []).append(then)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


_WAITING: dict[str, list[Callable[[], None]]] = {}


class _Finder(MetaPathFinder):
    """Finds what the other finders do, and has their loader tell when it has run a module that is waited for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _WAITING:
            return None
        specs = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            _follow(spec.loader, fullname)
        return spec


_FINDER = _Finder()


def _follow(loader: Any, name: str) -> None:  # a Loader, to which mypy lets nobody give a method
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        if module.__name__ == name:  # a loader may be that of several modules
            for then in _WAITING.pop(name, ()):
                then()

    loader.exec_module = exec_module
