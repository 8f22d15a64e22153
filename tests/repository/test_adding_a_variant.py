"""docs/adding-a-variant.md followed to the letter, in a copy of the three packages, and judged."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding-a-variant.md"
EDITS = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
PACKAGES = ("attnkit", "reference/attnkit_reference", "conformance/attnkit_conformance")
BODY, ROW = "attnkit/softmax.py", "conformance/attnkit_conformance/families/softmax.py"


def judged(root: Path, expression: str) -> subprocess.CompletedProcess[str]:
    """What the kit of a copy says of the generic body on NumPy."""
    paths = os.pathsep.join(str(root / part) for part in ("", "reference", "conformance"))
    command = [sys.executable, "-m", "attnkit_conformance", "run", "numpy-generic", "-k", expression, "--workers", "1"]
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


def test_the_variant_of_the_page_is_judged_and_passes(tmp_path):
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    assert {name for name, _ in EDITS} >= {BODY, ROW}
    for name, code in EDITS:
        path = tmp_path / name
        path.write_text(f"{path.read_text()}\n\n{code}")

    done = judged(tmp_path, "quiet and not float16")
    assert done.returncode == 0, done.stdout + done.stderr
    passed = {op: int(n) for op, n in re.findall(r"^(quiet_\w+) .* (\d+) pass$", done.stdout, flags=re.MULTILINE)}
    assert passed.keys() == {"quiet_attention", "quiet_attention_weights"}
    assert min(passed.values()) > 10

    body = (tmp_path / BODY).read_text()
    assert body.count("xp.exp(-top) + z") == 1
    (tmp_path / BODY).write_text(body.replace("xp.exp(-top) + z", "2 * xp.exp(-top) + z"))
    wrong = judged(tmp_path, "quiet and float64")
    assert wrong.returncode == 1, wrong.stdout + wrong.stderr
    assert "FAIL" in wrong.stdout
