"""A compiler for wheels that run on older systems: zig's clang, for glibc 2.17 and later.

CXX="python attnkit/backends/native/manylinux.py" python -m hatchling build -t wheel
"""

import os
import platform
import sys

GLIBC = "2.17"
MARCH = "-march="


def command(*arguments: str) -> list[str]:
    """What is run instead of `c++ arguments`: zig spells the levels of x86-64 with underscores."""
    spelled = [MARCH + x.removeprefix(MARCH).replace("-", "_") if x.startswith(MARCH) else x for x in arguments]
    return [sys.executable, "-m", "ziglang", "c++", "-target", f"{platform.machine()}-linux-gnu.{GLIBC}", *spelled]


if __name__ == "__main__":
    os.execv(sys.executable, command(*sys.argv[1:]))
