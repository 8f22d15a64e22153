"""Who may import whom, read from the syntax trees; and what importing attnkit loads."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.repository.trees import statements

ROOT = Path(__file__).parents[2]
STANDARD = frozenset(sys.stdlib_module_names)
CONFORMANCE = ROOT / "conformance" / "attnkit_conformance"

NATIVE = "attnkit.backends.native attnkit.kernels.plan"
# Room -> what its modules import, of attnkit and of others, beside the standard library and the room itself: a lower
# floor at most. "attnkit" is the public names.
FLOORS = {
    "attnkit/_core": "array_api_compat",
    "attnkit/ops": "attnkit._core",
    "attnkit/landmarks.py": "attnkit._core attnkit.ops",
    "attnkit/analysis": "attnkit._core attnkit.ops",
    "attnkit/kernels/strides.py": "",
    "attnkit/kernels/plan.py": "attnkit._core",
    "attnkit/kernels/linear_calls.py": "attnkit._core attnkit.kernels",
    "attnkit/kernels/predicted.py": "",
    "attnkit/kernels/verdicts.py": "",
    "attnkit/kernels/triton": "triton",
    "attnkit/kernels/cuda": "",
    "attnkit/backends/__init__.py": "attnkit._core attnkit.backends",
    "attnkit/backends/native": "hatchling attnkit._core attnkit.kernels attnkit.ops",
    "attnkit/backends/numpy": f"numpy array_api_compat attnkit._core attnkit.ops {NATIVE}",
    "attnkit/backends/torch": f"torch array_api_compat attnkit._core attnkit.ops attnkit.kernels {NATIVE}",
    "attnkit/backends/jax": f"jax numpy jax_triton attnkit._core attnkit.ops attnkit.kernels {NATIVE}",
    "attnkit/backends/cupy": "cupy numpy array_api_compat attnkit._core attnkit.ops attnkit.kernels",
    "attnkit/__init__.py": (
        "attnkit._core attnkit.ops attnkit.analysis attnkit.landmarks attnkit.backends attnkit.kernels.verdicts"
    ),
    "attnkit/nn": "torch attnkit",
    "attnkit/integrations": "torch jax transformers flax attnkit",
}
# Room of experiments -> the rooms that it imports; what it imports of others is in RULES.
EXPERIMENTS = {
    "engine": "",
    "data": "engine",
    "study": "engine",
    "report": "engine study",
    "images": "engine study report data",
    "sequences": "engine study report data",
    "translation": "engine study report data",
    "soft": "engine study report data images",
    "language": "engine study report data images",
    "recipes": "engine study report data images sequences translation soft language",
    "commands": "engine study report data images sequences translation soft language recipes evidence",
    "evidence": "engine study report images language soft translation recipes",
    "__main__.py": "engine data recipes commands evidence",
}
# Room of the kit -> the rooms that it imports.
KIT = {
    "model": "",
    "scenes": "model",
    "families": "model scenes",
    "opdb.py": "model families",
    "golden": "model opdb",
    "adapter.py": "model",
    "core.py": "model scenes opdb golden adapter",
    "adapters": "model scenes families opdb adapter",
    "peers": "model opdb adapter adapters",
    "judge": "model scenes opdb golden adapter core adapters peers",
    "search": "model scenes opdb golden adapter core adapters peers judge",
    "report": "model scenes opdb golden adapter core adapters peers judge search",
    "studies": "model scenes families opdb golden adapter core adapters judge report",
    "pytest.py": "model opdb adapter core peers judge search",
    "__main__.py": "model opdb adapter core adapters peers judge search report studies",
}
ROOMS = {"experiments/attnkit_experiments": EXPERIMENTS, "conformance/attnkit_conformance": KIT}
# Other folders -> what their modules import. adapters and peers import what they judge.
RULES = {
    "reference/attnkit_reference": "numpy scipy attnkit_reference",
    "conformance/attnkit_conformance": "numpy scipy ml_dtypes rich safetensors attnkit_reference attnkit_conformance",
    "conformance/attnkit_conformance/report/pages": "jinja2 markupsafe matplotlib attnkit_conformance.report.pages",
    "conformance/attnkit_conformance/peers": (
        "numpy scipy torch jax entmax keras transformers einops attnkit_reference attnkit_conformance"
        " equinox flash_attention_jax flax linear_attention_transformer local_attention"
        " memory_efficient_attention_pytorch mlx nystrom_attention onnx onnxruntime openvino performer_pytorch"
        " reformer_pytorch ring_attention_pytorch x_transformers"
    ),
    "conformance/attnkit_conformance/pytest.py": "pytest attnkit_conformance",
    "benchmarks": (
        "torch triton jax cupy numpy PIL matplotlib attnkit attnkit_conformance attnkit_experiments benchmarks rich"
        " entmax"
    ),
    "experiments": (
        "torch numpy scipy attnkit attnkit_experiments tyro rich PIL matplotlib sacrebleu sacremoses safetensors"
        " sklearn tokenizers webdataset nvidia attnkit_conformance.report.pages"
    ),
}
EXEMPT = [
    ROOT / "conformance/attnkit_conformance" / room
    for room in ("adapters", "peers", "pytest.py", "studies", "report/pages")
]
PACKAGES = {
    "attnkit": ".",
    "attnkit_reference": "reference",
    "attnkit_conformance": "conformance",
    "attnkit_experiments": "experiments",
}
"""Package -> the folder that it lies in."""
# Inside functions: the few that the array API lacks are taken from the library at hand; what is a tensor is asked of
# torch.
INSIDE_FUNCTIONS = {
    ROOT / "attnkit/_core/special.py": {"torch", "jax", "cupyx", "scipy", "numpy"},
    ROOT / "attnkit/_core/library.py": {"torch"},
    ROOT / "attnkit/_core/autograd.py": {"torch"},
}
LIBRARIES = {"numpy", "torch", "jax", "cupy", "scipy"}


def imported(tree: ast.AST) -> list[str]:
    names = []
    for node in statements(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@cache
def imported_by(path: Path) -> list[str]:
    return imported(ast.parse(path.read_text()))


def allowed(name: str, rule: set[str]) -> bool:
    """Whether a module, or something in it, is in the standard library or named by the rule."""
    parts = name.split(".")
    return parts[0] in STANDARD or any(".".join(parts[:n]) in rule for n in range(1, len(parts) + 1))


@pytest.mark.parametrize("folder", RULES)
def test_import_rules(folder):
    rule, place = {*RULES[folder].split()}, ROOT / folder
    files = [path for path in modules(place) if place in EXEMPT or not {path, *path.parents} & {*EXEMPT}]
    assert files, f"no module below {folder}"
    for path in files:
        for name in imported_by(path):
            assert allowed(name, rule), f"{path.relative_to(ROOT)} must not import {name}"


@pytest.mark.parametrize("room", FLOORS)
def test_a_room_of_attnkit_imports_its_own_and_lower_floors(room):
    """Lazy imports and imports of types too."""
    rule = {*FLOORS[room].split()} | {room.removesuffix(".py").removesuffix("/__init__").replace("/", ".")} - {
        "attnkit"
    }
    for path in modules(ROOT / room):
        extra = INSIDE_FUNCTIONS.get(path, set())
        for name in imported_by(path):
            assert allowed(name, rule | extra), f"{path.relative_to(ROOT)} must not import {name}"


def test_every_module_of_attnkit_is_on_a_floor():
    rooms = [path for room in FLOORS for path in modules(ROOT / room)]
    assert len(rooms) == len(set(rooms))
    homeless = {*modules(ROOT / "attnkit")} - {*rooms}
    assert {path.relative_to(ROOT / "attnkit").as_posix() for path in homeless} == {"kernels/__init__.py"}


@pytest.mark.parametrize(("package", "room"), [(package, room) for package in ROOMS for room in ROOMS[package]])
def test_a_room_of_the_kit_or_of_experiments_imports_its_own_and_lower_floors(package, room):
    """Lazy imports and imports of types too."""
    name, files = Path(package).name, modules(ROOT / package / room)
    rule = {f"{name}.{each.removesuffix('.py')}" for each in (room, *ROOMS[package][room].split())}
    assert files, f"no module below {room}"
    for path in files:
        for found in imported_by(path):
            own = found.startswith(f"{name}.")
            assert not own or allowed(found, rule), f"{path.relative_to(ROOT)} must not import {found}"


@pytest.mark.parametrize("package", ROOMS)
def test_every_room_of_the_kit_and_of_experiments_is_on_a_floor(package):
    rooms = {room.removesuffix(".py"): {*lower.split()} for room, lower in ROOMS[package].items()}
    assert {path.relative_to(ROOT / package).parts[0] for path in modules(ROOT / package)} == {
        "__init__.py",
        *ROOMS[package],
    }
    assert circle(rooms) == set()


def modules(place: Path) -> list[Path]:
    return sorted(place.rglob("*.py")) if place.is_dir() else [place]


def arrows(base: Path, package: str) -> dict[str, set[str]]:
    """Which modules of a package each of them imports, by name; of what is imported from a package, the module."""
    files = {".".join(path.relative_to(base).with_suffix("").parts): path for path in modules(base / package)}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        targets = set()
        for name in imported_by(path):
            while name and name not in files:
                name = name.rpartition(".")[0]
            while name and name != package:  # the __init__ of every package on the way runs first
                targets |= {name} & {*files}
                name = name.rpartition(".")[0]
        graph[module] = {target for target in targets if not f"{module}.".startswith(f"{target}.")}
    return graph


def circle(graph: dict[str, set[str]]) -> set[str]:
    """The nodes that are left when those that import, or are imported by, none of the rest are taken away again."""
    while True:
        imported_ones = {target for targets in graph.values() for target in targets}
        ends = {node for node, targets in graph.items() if not targets or node not in imported_ones}
        if not ends:
            return {*graph}
        graph = {node: targets - ends for node, targets in graph.items() if node not in ends}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circle_of_imports(package):
    graph = arrows(ROOT / PACKAGES[package], package)
    assert len(graph) > 20
    assert circle(graph) == set()


def test_the_rules_would_notice():
    assert circle({"a": {"b"}, "b": {"a", "c"}, "c": set()}) == {"a", "b"}
    rule = {*FLOORS["attnkit/ops"].split()}
    assert not any(
        allowed(name, rule) for name in ("attnkit_reference", "numpy", "attnkit.nn", "attnkit.softmax_attention")
    )
    assert allowed("attnkit._core.check", rule)


def test_libraries_are_imported_inside_functions_alone():
    """Of what `import attnkit` loads."""
    for room in ("_core", "ops", "analysis", "landmarks.py"):
        for path in modules(ROOT / "attnkit" / room):
            tree = ast.parse(path.read_text())
            top_level = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
            for name in imported(ast.Module(body=top_level, type_ignores=[])):
                assert name.partition(".")[0] not in LIBRARIES, f"{path.name} imports {name} at import"


CALL = "import numpy as np; x = np.ones((3, 2)); attnkit.pointwise_attention(x, x, x)"


@pytest.mark.parametrize("statement", ["", "attnkit.explain", "attnkit.softmax_attention.__doc__", CALL])
def test_attnkit_loads_no_array_library_but_the_one_of_a_call(statement):
    code = f"import sys, attnkit\n{statement}\nprint(sorted({LIBRARIES!r} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ("['numpy']" if statement == CALL else "[]")


WITHOUT = ("torch", "jax", "jaxlib", "rich", "pytest", "ml_dtypes", "safetensors")
"""What the kit does without, where nobody asks for it."""


def test_the_kit_imports_without_other_libraries():
    """In a process that has none of them; what is of one of them says so, which shows that it has none."""
    code = (
        f"import importlib, sys\nfor name in {WITHOUT!r}: sys.modules[name] = None\n"
        "for module in ('__main__', 'peers.like.c', 'adapters.bases.torch', 'adapters.bases.jax', 'pytest'):\n"
        "    try: importlib.import_module(f'attnkit_conformance.{module}')\n"
        "    except ImportError as error: print(error)\n"
        "    else: print(module)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "__main__", "peers.like.c",
        *(f"import of {name} halted; None in sys.modules" for name in ("torch", "jax", "pytest")),
    ]  # fmt: skip
