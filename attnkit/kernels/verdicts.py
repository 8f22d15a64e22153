"""Classes of devices whose kernels have been judged, and the warning on all others."""

import sys
import warnings

JUDGED = frozenset({"9.0"})
"""Compute capabilities of which verdicts are committed: benchmarks/results/verdicts-*.json."""
_warned: set[str] = set()


def warn_once(capability: str) -> None:
    """Warn of the first call of a process that `auto` gives to kernels of a class without verdicts."""
    if capability in JUDGED or capability in _warned:
        return
    _warned.add(capability)
    warnings.warn(
        f"attnkit's GPU kernels have not been judged on compute capability {capability} yet: "
        "`python -m attnkit_conformance verify` judges them on this device in about two minutes, and "
        'impl="generic" does without them',
        UserWarning,
        stacklevel=_levels(),
    )


def _levels() -> int:
    """How many frames up from `warn_once` the first one outside attnkit is."""
    frame, levels = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("attnkit."):
        frame, levels = frame.f_back, levels + 1
    return levels
