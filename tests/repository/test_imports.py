"""Who may import whom, read from the syntax trees; and what importing attnkit loads."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STANDARD = frozenset(sys.stdlib_module_names)
CONFORMANCE = ROOT / "conformance" / "attnkit_conformance"

# Folder -> (what its modules may import beside the standard library, folders inside it that have a rule of their own).
RULES: dict[str, tuple[set[str], tuple[str, ...]]] = {
    "reference/attnkit_reference": ({"numpy", "scipy", "attnkit_reference"}, ()),
    "attnkit": ({"array_api_compat", "attnkit._", "attnkit.own"}, ("backends", "nn", "integrations", "kernels")),
    "attnkit/backends/torch": (
        {"torch", "array_api_compat", "attnkit._", "attnkit.own", "attnkit.backends", "attnkit.kernels"},
        (),
    ),
    "attnkit/backends/cupy": (
        {"cupy", "numpy", "attnkit._", "attnkit.own", "attnkit.backends", "attnkit.kernels"},
        (),
    ),
    "attnkit/backends/numpy": ({"numpy", "array_api_compat", "attnkit._", "attnkit.own", "attnkit.backends"}, ()),
    "attnkit/backends/jax": (
        {"jax", "jax_triton", "array_api_compat", "attnkit._", "attnkit.own", "attnkit.backends", "attnkit.kernels"},
        (),
    ),
    "attnkit/kernels/pallas": ({"jax", "attnkit.kernels.pallas"}, ()),
    "attnkit/kernels/triton": ({"triton", "attnkit.kernels.triton"}, ()),
    "attnkit/kernels/cuda": ({"array_api_compat", "attnkit.kernels.cuda", "attnkit.kernels.strides"}, ()),
    "attnkit/nn": ({"torch", "attnkit"}, ()),
    "attnkit/integrations": ({"torch", "jax", "transformers", "flax", "attnkit"}, ()),
    "conformance/attnkit_conformance": (
        {
            "numpy",
            "scipy",
            "ml_dtypes",
            "rich",
            "safetensors",
            "hypothesis",
            "attnkit_reference",
            "attnkit_conformance",
        },
        ("adapters", "peers"),
    ),
    "conformance/attnkit_conformance/peers": (
        {
            "numpy",
            "scipy",
            "torch",
            "jax",
            "entmax",
            "keras",
            "transformers",
            "einops",
            "attnkit_reference",
            "attnkit_conformance",
        },
        (),
    ),
    "benchmarks": (
        {"torch", "jax", "cupy", "numpy", "attnkit", "attnkit_conformance", "benchmarks", "rich", "entmax"},
        (),
    ),
    "experiments": (
        {
            "torch",
            "numpy",
            "scipy",
            "attnkit",
            "experiments",
            "tyro",
            "rich",
            "PIL",
            "matplotlib",
            "sacrebleu",
            "sacremoses",
            "safetensors",
            "sklearn",
            "tokenizers",
            "webdataset",
        },
        (),
    ),
}
# The few functions that the array API lacks are taken from the library at hand, inside the function that needs them.
SPECIAL = {"torch", "jax", "cupyx", "scipy", "numpy"}
LIBRARIES = {"numpy", "torch", "jax", "cupy", "scipy"}


def imported(tree: ast.AST) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def allowed(name: str, rule: set[str], family_names: set[str]) -> bool:
    top = name.partition(".")[0]
    if top in STANDARD or top in rule:
        return True
    if top != "attnkit":
        return False
    rest = name.partition(".")[2]
    first = rest.partition(".")[0]
    private = "attnkit._" in rule and (first.startswith("_") or not rest)
    own = "attnkit.own" in rule and (first in family_names or first == "backends")
    return private or own or any(name.startswith(prefix) for prefix in rule if prefix.startswith("attnkit."))


@pytest.mark.parametrize("folder", RULES)
def test_import_rules(folder):
    rule, exempt = RULES[folder]
    families = {path.stem for path in (ROOT / "attnkit").glob("*.py")}
    checked = 0
    for path in sorted((ROOT / folder).rglob("*.py")):
        if path.relative_to(ROOT / folder).parts[0] in exempt:
            continue
        extra = SPECIAL if path == ROOT / "attnkit" / "_special.py" else set()
        for name in imported(ast.parse(path.read_text())):
            assert allowed(name, rule | extra, families), f"{path.relative_to(ROOT)} must not import {name}"
        checked += 1
    assert checked, f"no module below {folder}"


def test_the_rule_would_notice():
    rule, _ = RULES["attnkit"]
    assert not allowed("attnkit_reference", rule, {"softmax"})
    assert not allowed("numpy", rule, {"softmax"})
    assert not allowed("attnkit.nn", rule, {"softmax"})
    assert allowed("attnkit._core.check", rule, {"softmax"})


def test_only_the_special_functions_import_a_library_and_only_when_called():
    for path in (ROOT / "attnkit").glob("*.py"):
        tree = ast.parse(path.read_text())
        top_level = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        for name in imported(ast.Module(body=top_level, type_ignores=[])):
            assert name.partition(".")[0] not in LIBRARIES, f"{path.name} imports {name} at import"


@pytest.mark.parametrize("statement", ["", "attnkit.explain", "attnkit.softmax_attention.__doc__"])
def test_importing_attnkit_loads_no_array_library(statement):
    code = f"import sys, attnkit\n{statement}\nprint(sorted({LIBRARIES!r} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_numpy_call_loads_only_numpy():
    code = (
        "import sys, numpy as np, attnkit\nx = np.ones((3, 2))\nattnkit.pointwise_attention(x, x, x)\n"
        f"print(sorted({LIBRARIES!r} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "['numpy']"
