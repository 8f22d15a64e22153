"""docs/adding-a-variant.md followed to the letter, in a copy of the three packages, and judged."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import attnkit

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding-a-variant.md"
EDITS = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
ROWS = re.findall(r"```python\n# (\S+\.py), in (\w+)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
TABLES = re.findall(r"`([A-Z]\w+)`\s\(`(\S+\.py)`", PAGE.read_text())
PACKAGES = ("attnkit", "benchmarks", "reference/attnkit_reference", "conformance/attnkit_conformance")
NEW, NEIGHBOURS = "mish", ("relu6", "sigmoid", "silu")
"""The score function of the page, which goes first in its tables; and others, which it moves there."""
OPS = ("cosine_softmax_attention", "cosine_softmax_attention_weights", "row_statistics")
JUDGED = ["numpy-generic", "torch-generic", "numpy-blocked", "torch-blocked"]
ADAPTERS = ["numpy-generic", "torch-blocked", "numpy-native"]
JUDGE = """
import collections, json

from attnkit_conformance import core
from attnkit_conformance.judge import selection

seen = collections.defaultdict(collections.Counter)
for adapter in selection.find(JUDGED):
    served = OPS[:1] if adapter.name.endswith("blocked") else OPS
    for sample in (sample for op in served for sample in core.samples(op, "small", ("float32", "float64"))):
        if OPS[0] in sample.id:
            case = core.draw_case(sample)
            seen[case.op][core.check(adapter, case).status] += 1
"""
USED = """
import torch
from attnkit.integrations import transformers
from attnkit.nn import MultiHeadAttention
from benchmarks import variants

layer = MultiHeadAttention(8, 2, op="cosine_softmax_attention", causal=True)
assert layer(torch.randn(2, 5, 8)).shape == (2, 5, 8)
assert "attnkit_cosine_softmax" in transformers.VARIANTS
assert "cosine_softmax_attention" in variants.BY_OP
"""
SCORE_FUNCTIONS = """
for adapter in selection.find(ADAPTERS):
    for op in ("pointwise_attention", "pointwise_attention_packed"):
        for sample in core.samples(op, "small", ("float32",)):
            if any(h in sample.id for h in (NEW, *NEIGHBOURS)):
                result = core.check(adapter, core.draw_case(sample))
                h = NEW if NEW in sample.id else "neighbours"
                seen[f"{h}, {adapter.name}"][result.status] += 1
"""
REPORT = "print(json.dumps(seen))"
BODY = "attnkit/ops/cosine_softmax.py"
RIGHT, WRONG = "return (g - hat * ", "return (g - 0.9 * hat * "


def judged(copy: Path, *code: str, adapters: list[str] = JUDGED) -> dict[str, dict[str, int]]:
    paths = os.pathsep.join(str(copy / part) for part in ("", "reference", "conformance"))
    environment = {**os.environ, "PYTHONPATH": paths}
    given = f"{OPS = }\n{NEW = }\n{NEIGHBOURS = }\n{ADAPTERS = }\nJUDGED = {adapters}"
    words = [sys.executable, "-c", "\n".join((given, *code, REPORT))]
    done = subprocess.run(words, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    verdicts: dict[str, dict[str, int]] = json.loads(done.stdout)
    return verdicts


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The packages with the edits of the page."""
    folder = tmp_path_factory.mktemp("copy")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package)  # with what Python compiled of them
    new = [name for name, _ in EDITS if not (folder / name).exists()]
    assert len(new) == 3
    assert {Path(name).name for name, _ in EDITS if name not in new} == {"__init__.py"}
    for name, code in EDITS:
        path = folder / name
        path.write_text(f"{path.read_text() if path.exists() else ''}\n\n{code}")
    for name, table, row in ROWS:
        text, start = (folder / name).read_text(), f"\n{table} = (\n"
        assert text.count(start) == 1
        (folder / name).write_text(text.replace(start, start + row))
    return folder


@pytest.fixture(scope="module")
def right(copy):
    return judged(copy, JUDGE, USED, SCORE_FUNCTIONS)


@pytest.mark.parametrize(("table", "path"), TABLES)
def test_the_tables_of_the_page_are_where_it_says(table, path):
    assert re.search(rf"^{table}\b.* = ", (ROOT / path).read_text(), flags=re.MULTILINE)


def test_the_variant_of_the_page_is_judged_and_passes(copy, right):
    """In three new files and lines of three `__init__`: statistics, blocks, nn, transformers and benchmarks follow."""
    body = (copy / BODY).read_text()
    assert body.count(RIGHT) == 1
    (copy / BODY).write_text(body.replace(RIGHT, WRONG))
    wrong = judged(copy, JUDGE, adapters=JUDGED[:1])
    for op in OPS:
        assert {*right[op]} == {"pass"}, right
        assert right[op]["pass"] > (10 if op == OPS[0] else 3)
    assert wrong[OPS[0]]["fail"] > 0, "a planted error passes"
    assert wrong["row_statistics"]["fail"] > 0, "a planted error passes through statistics"


def test_the_score_function_of_the_page_is_met_by_the_kit_and_refused_by_the_library(right):
    """In a row of each package: it passes where h is called, and what it moves in the tables is as before."""
    assert len(ROWS) == 2
    assert {*right["mish, numpy-generic"]} == {"pass"}
    assert right["mish, torch-blocked"]["pass"] > 0
    assert {*right["mish, numpy-native"]} == {"unsupported"}
    for name, verdicts in right.items():
        if name.startswith("neighbours"):
            assert {*verdicts} <= {"pass", "unsupported"}, right
            compiled = "native" not in name or attnkit.native_status().reason is None
            assert verdicts.get("pass", 0) > 3 or not compiled, right
