"""Files of kernel benchmarks, which are no modules of a package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def module_at(path: str) -> ModuleType:
    """The module in a file, whose folder it may import from; FileNotFoundError if there is no file."""
    file = Path(path).resolve()
    if not file.is_file():
        raise FileNotFoundError(f"no file {path}")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(f"attnkit_judged_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a file of Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Triton and dataclasses look for it
    spec.loader.exec_module(module)
    return module
