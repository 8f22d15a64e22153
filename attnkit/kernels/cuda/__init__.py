"""CUDA C++ sources, and how they are launched: no CUDA library is imported here.

`launch.py` describes a launch; modules with the names of families make launches of a call. Whoever has a
device, a GPU or its emulation, compiles `Launch.name` from the folder `SOURCES` and runs it.
"""

from pathlib import Path

SOURCES = Path(__file__).parent
