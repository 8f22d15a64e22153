"""CUDA C++ sources. `attnkit.backends.cupy` describes their launches, for a GPU or its emulation."""

from pathlib import Path

SOURCES = Path(__file__).parent
"""The folder of `Launch.source`."""
