"""The README's examples as mypy sees them where attnkit is installed: `make types`."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> int:
    """mypy's exit code. With the settings of the project, so that what it knows of torch and attnkit is taken."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    with tempfile.TemporaryDirectory() as base:
        (folder := Path(base) / "readme").mkdir()
        for n, code in enumerate(blocks):
            (folder / f"block_{n}.py").write_text(code)
        command = [sys.executable, "-m", "mypy", *map(str, sorted(folder.iterdir()))]
        return subprocess.run(command, cwd=ROOT, env=os.environ | {"MYPYPATH": base}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
