"""docs/adding-a-variant.md followed to the letter, in a copy of the three packages, and judged."""

import json
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
JUDGE = """
import collections, json
from attnkit_conformance import selection
from attnkit_conformance.judge import judge

OPS = ("quiet_attention", "quiet_attention_weights")
verdicts = list(judge(selection.find(["numpy-generic"]), dtypes=("float32",), ops=OPS))
print(json.dumps({op: collections.Counter(v.status for v in verdicts if v.op == op) for op in OPS}))
"""
BODY = "attnkit/ops/softmax.py"
RIGHT, WRONG = "return u, fade / (xp.exp(-top) + z * fade)", "return u, fade / (2.0 * xp.exp(-top) + z * fade)"


def judged(copy: Path) -> dict[str, dict[str, int]]:
    paths = os.pathsep.join(str(copy / part) for part in ("", "reference", "conformance"))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", JUDGE], cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    verdicts: dict[str, dict[str, int]] = json.loads(done.stdout)
    return verdicts


def test_the_variant_of_the_page_is_judged_and_passes(tmp_path):
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    assert {name.split("/")[0] for name, _ in EDITS} == {"attnkit", "reference", "conformance"}
    for name, code in EDITS:
        path = tmp_path / name
        path.write_text(f"{path.read_text()}\n\n{code}")
    right = judged(tmp_path)
    body = (tmp_path / BODY).read_text()
    assert body.count(RIGHT) == 1
    (tmp_path / BODY).write_text(body.replace(RIGHT, WRONG))
    wrong = judged(tmp_path)
    for op in ("quiet_attention", "quiet_attention_weights"):
        assert right[op].keys() == {"pass"}
        assert right[op]["pass"] > 10
        assert wrong[op]["fail"] > 0, f"{op}: a planted error passes"
