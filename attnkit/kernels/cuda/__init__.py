"""CUDA C++ sources. `attnkit.backends.cupy` describes their launches, for whoever has a device or its emulation."""

from pathlib import Path

SOURCES = Path(__file__).parent
"""The folder that `Launch.source` lies in."""
