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
PACKAGES = ("attnkit", "benchmarks", "reference/attnkit_reference", "conformance/attnkit_conformance")
OPS = ("cosine_softmax_attention", "cosine_softmax_attention_weights", "row_statistics")
JUDGE = """
import collections, json, sys

import torch
from attnkit.integrations import transformers
from attnkit.nn import MultiHeadAttention
from attnkit_conformance import core, selection
from attnkit_conformance.judge import judge
from benchmarks import variants

seen = collections.defaultdict(collections.Counter)
for adapter in selection.find(["numpy-generic", "torch-generic", "numpy-blocked", "torch-blocked"]):
    served = OPS[:1] if adapter.name.endswith("blocked") else OPS
    for sample in (sample for op in served for sample in core.samples(op, "quick", ("float32", "float64"))):
        if OPS[0] in sample.id:
            case = core.draw_case(sample)
            seen[case.op][core.check(adapter, case).status] += 1
layer = MultiHeadAttention(8, 2, op="cosine_softmax_attention", causal=True)
assert layer(torch.randn(2, 5, 8)).shape == (2, 5, 8)
assert "attnkit_cosine_softmax" in transformers.VARIANTS
assert "cosine_softmax_attention" in variants.BY_OP
print(json.dumps(seen))
"""
BODY = "attnkit/ops/cosine_softmax.py"
RIGHT, WRONG = "return (g - hat * ", "return (g - 0.9 * hat * "


def judged(copy: Path) -> dict[str, dict[str, int]]:
    paths = os.pathsep.join(str(copy / part) for part in ("", "reference", "conformance"))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", f"{OPS = }\n{JUDGE}"],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    verdicts: dict[str, dict[str, int]] = json.loads(done.stdout)
    return verdicts


def test_the_variant_of_the_page_is_judged_and_passes(tmp_path):
    """In three new files and lines of three `__init__`: statistics, blocks, nn, transformers and benchmarks follow."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    new = [name for name, _ in EDITS if not (tmp_path / name).exists()]
    assert len(new) == 3
    assert {Path(name).name for name, _ in EDITS if name not in new} == {"__init__.py"}
    for name, code in EDITS:
        path = tmp_path / name
        path.write_text(f"{path.read_text() if path.exists() else ''}\n\n{code}")
    right = judged(tmp_path)
    body = (tmp_path / BODY).read_text()
    assert body.count(RIGHT) == 1
    (tmp_path / BODY).write_text(body.replace(RIGHT, WRONG))
    wrong = judged(tmp_path)
    for op in OPS:
        assert {*right[op]} == {"pass"}, right
        assert right[op]["pass"] > (10 if op == OPS[0] else 3)
    assert wrong[OPS[0]]["fail"] > 0, "a planted error passes"
    assert wrong["row_statistics"]["fail"] > 0, "a planted error passes through statistics"
