"""What a stranger may rely on: public names, file sizes, the wheel, no machine's paths."""

import ast
import inspect
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

import attnkit
import attnkit_reference
from attnkit.ops.recurrent.record import RECURRENT
from tests.repository.trees import statements

ROOT = Path(__file__).parents[2]


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


def test_dir_shows_the_public_names_and_they_are_documented():
    assert {*dir(attnkit)} == {*attnkit.__all__, "__version__"}
    for name in attnkit.__all__:
        if callable(getattr(attnkit, name)):
            assert getattr(attnkit, name).__doc__, f"{name} has no docstring"


def test_a_new_engineer_finds_few_doors():
    """Files and folders on the top floor of each package."""
    doors = {
        "attnkit": 12,
        "conformance/attnkit_conformance": 16,  # pytest.py: pytest is told its name
        "experiments": 8,
        "experiments/attnkit_experiments": 14,
    }
    for package, most in doors.items():
        entries = {path.relative_to(ROOT / package).parts[0] for path in tracked() if ROOT / package in path.parents}
        entries.discard("py.typed")  # a marker for type checkers
        assert len(entries) <= most, f"{package}: {sorted(entries)}"


def test_every_op_has_a_gradient_and_weights_or_a_step_beside_it():
    for name in attnkit.__all__:
        if name.endswith("_attention"):
            assert f"{name}_vjp" in attnkit.__all__
            other = "step" if name in RECURRENT else "weights"  # what a recurrence corrects is no sum of values
            assert f"{name}_{other}" in attnkit.__all__


SHAPE = re.compile(r"\(\)|\((\.\.\.|[\w·]+( \+ 1)?,|[A-Z]\))")
ARRAY = {"Array", "Tensor", "OfLibrary", "Factor", "np.ndarray", "jax.Array", "list[Array]"}


def fields_without_a_shape(source: str) -> list[str]:
    """The fields of the named tuples of a file that are arrays, and have no comment with a shape."""
    lines, found = source.split("\n"), []
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "NamedTuple" for base in node.bases):
            fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
            arrays = [field for field in fields if ARRAY & {*ast.unparse(field.annotation).split(" | ")}]
            bare = [field for field in arrays if not SHAPE.search(lines[field.end_lineno - 1].partition("  # ")[2])]
            found += [f"{node.name}.{field.target.id}" for field in bare]
    return found


def test_arrays_in_named_tuples_have_shapes():
    rooms = ("attnkit", "attnkit_reference", "attnkit_conformance")
    files = [path for path in tracked() if path.suffix == ".py" and {*rooms} & {*path.relative_to(ROOT).parts[:2]}]
    assert len(files) > 300
    for path in files:
        assert not fields_without_a_shape(path.read_text()), path
    planted = "class A(NamedTuple):\n    x: Array | None\n    y: float | Array = 1.0  # (..., n)\n    z: Tensor  # of q"
    assert fields_without_a_shape(planted) == ["A.x", "A.z"]


def says_shapes(package: ModuleType, name: str) -> bool:
    """Whether the docstring of a function has a shape, or that of a function named in it or of the op whose gradients,
    weights or magnitudes it gives."""
    text = inspect.getdoc(getattr(package, name)) or ""
    others = {*re.findall(r"`(\w+)`", text), *(name.removesuffix(end) for end in ("_vjp", "_weights", "_magnitudes"))}
    return bool(SHAPE.search(text)) or any(says_shapes(package, n) for n in others - {name} if hasattr(package, n))


def says_shape_of(array: str, text: str) -> bool:
    """Whether the list of arguments in a docstring has the shape of one, or where that is; True without a list."""
    _, listed, rest = text.partition("\nArgs:\n")
    entry = re.search(rf"\b{array}\b[\w, *]*: ((?:.|\n        )*)", rest.partition("\n\n")[0])
    return not listed or (entry is not None and re.search(rf"{SHAPE.pattern}|`|likewise|same", entry[1]) is not None)


@pytest.mark.parametrize("package", [attnkit, attnkit_reference])
def test_public_functions_say_the_shapes_of_their_arrays(package):
    for name in package.__all__:
        function = getattr(package, name)
        if inspect.isfunction(function):
            parameters = inspect.signature(function).parameters.values()
            arrays = [p.name for p in parameters if re.search(r"\bArray\b|~A\b", str(p.annotation))]
            assert not arrays or says_shapes(package, name), name
            silent = [array for array in arrays if not says_shape_of(array, inspect.getdoc(function) or "")]
            assert not silent, f"{name}: {silent}"


def test_files_stay_small():
    sizes = {p: len(p.read_text().splitlines()) for p in tracked() if p.suffix == ".py"}
    long = {str(p.relative_to(ROOT)): n for p, n in sizes.items() if n > 800}
    assert not long, f"files over 800 lines: {long}"


def test_no_machine_paths():
    pattern = re.compile(r"(^|[^A-Za-z0-9_.])/(work|farm|root|tmp|home)/[A-Za-z.]")
    for path in tracked():
        if path.suffix in (".py", ".md", ".toml", ".txt", ".html", "") and path.name != "LICENSE":
            found = [line for line in path.read_text().splitlines() if pattern.search(line)]
            assert not found or path == Path(__file__), f"{path.relative_to(ROOT)}: {found[0][:120]}"


LARGE = 300 * 1024
LARGER = {
    f"experiments/attnkit_experiments/commands/trained/{name}/model.safetensors"
    for name in ("copying-linear", "digits-relu", "digits-softmax")
}
PICTURES = {
    "docs/_static/logo.svg",
    "docs/cost-of-paper.svg",
    "docs/families/pictures/overview.svg",  # of the README and the index
    "docs/families/pictures/speed.svg",
    "docs/results/pictures/beside-softmax.svg",
    "docs/reports/000-fig2-digits/attention-of-the-middle-patch.svg",  # of weights that no CSV has
    "docs/reports/000-fig2-digits/weight-by-layer.svg",
    "docs/reports/002-fig3-digits/heat-maps.svg",
}
TEMPLATES = {
    "benchmarks/page.html",
    *(f"conformance/attnkit_conformance/report/pages/{name}.html" for name in ("document", "parts")),
    *(f"conformance/attnkit_conformance/report/{name}.html" for name in ("peers", "report", "scoreboard")),
    "conformance/attnkit_conformance/report/badge.svg",
    *(
        f"experiments/attnkit_experiments/report/{name}.html"
        for name in ("claims", "comparison", "experiment", "measurement", "study")
    ),
}


def unwanted(names: list[str], sizes: dict[str, int]) -> dict[str, str]:
    """Files that the repository does not keep, with the reason: what is made of others, and what is large."""
    drawn = {".svg", ".png", ".jpg", ".jpeg", ".gif", ".pdf", ".webp"}
    others = [name for name in names if name not in PICTURES | TEMPLATES]
    why = {name: "is a page: `make site` makes it" for name in others if name.endswith(".html")}
    why |= {name: "is a picture, not one of PICTURES" for name in others if Path(name).suffix in drawn}
    return why | {name: f"has {size:,} bytes" for name, size in sizes.items() if size > LARGE and name not in LARGER}


def test_what_is_made_of_other_files_is_not_kept():
    names = [path.relative_to(ROOT).as_posix() for path in tracked()]
    assert not unwanted(names, {name: (ROOT / name).stat().st_size for name in names})
    assert len(PICTURES) <= 10
    assert set(names) >= PICTURES | LARGER | TEMPLATES, "a list names what is gone"


def test_a_page_a_picture_and_a_large_file_are_noticed():
    names = ["docs/reports/peers.html", "docs/results/pictures/a.svg", "README.md"]
    assert set(unwanted(names, {"README.md": LARGE + 1})) == set(names)
    assert not unwanted(["README.md", *PICTURES, *TEMPLATES], dict.fromkeys(LARGER, 10**6))
