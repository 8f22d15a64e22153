"""The wheels of the three distributions: what is in them, and that they work from any directory where only hard
dependencies are installed."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import attnkit
from docs import readme
from tests.repository.projects import FOLDERS, INSTALLED, PROJECTS, ROOT, build
from tests.repository.wheel_extras import IMPORTS

HOLD = {
    "attnkit": {"attnkit"},
    "attnkit-conformance": {"attnkit_conformance", "attnkit_reference"},
    "attnkit-experiments": {"attnkit_experiments"},
}
built = partial(build, level="none")  # tests/native builds a wheel with kernels


def distribution(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0]


@pytest.fixture(scope="session")
def wheels(tmp_path_factory) -> dict[str, Path]:
    return {name: built(folder, tmp_path_factory.mktemp("wheel")) for name, folder in FOLDERS.items()}


def assert_holds(wheel: Path, packages: set[str]) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == packages
    assert {f"{package}/py.typed" for package in packages} <= {*names}
    licence = zipfile.ZipFile(wheel).read(next(name for name in names if name.endswith("LICENSE")))
    assert licence == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("name", FOLDERS)
def test_a_wheel_holds_its_packages_and_nothing_else(name, wheels):
    assert_holds(wheels[name], HOLD[name])


def test_the_kit_s_source_distribution_makes_its_wheel(tmp_path):
    """Where nothing lies beside it: the reference is in it."""
    with tarfile.open(built(FOLDERS["attnkit-conformance"], tmp_path / "sdist", "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.glob("attnkit_conformance-*")
    assert_holds(built(folder, tmp_path / "wheel"), HOLD["attnkit-conformance"])


def metadata_of(wheel: Path) -> str:
    archive = zipfile.ZipFile(wheel)
    return archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA"))).decode()


def test_distributions_have_one_version_and_need_each_other_in_it(wheels):
    assert {wheel.name.split("-")[1] for wheel in wheels.values()} == {attnkit.__version__}
    ours, same = re.compile(r"^Requires-Dist: (attnkit.*)$", re.MULTILINE), f"attnkit=={attnkit.__version__}"
    kit = same.replace("attnkit", "attnkit-conformance")
    needs = {name: ours.findall(metadata_of(wheel)) for name, wheel in wheels.items()}
    assert needs == {"attnkit": [], "attnkit-conformance": [], "attnkit-experiments": [kit, same]}


@pytest.mark.parametrize("name", FOLDERS)
def test_an_index_shows_a_readme_whose_links_can_be_followed(name, wheels):
    text = metadata_of(wheels[name])
    assert "Description-Content-Type: text/markdown" in text
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert all(target.startswith(("https://", "#")) for target in targets), targets
    assert len(text.partition("\n\n")[2]) > 500


def test_relative_links_of_the_readme_become_texts_or_links_into_the_repository():
    assert readme.readable("[a](docs/a.md#b) [c](https://c) [d](#d)") == "a [c](https://c) [d](#d)"
    assert readme.readable("[a](docs/a.md)", "https://x") == "[a](https://x/blob/main/docs/a.md)"
    assert readme.readable("a\n\n![b](docs/b.svg)\n\n*what b\nis*\n\nc\n") == "a\n\nc\n"
    assert readme.readable("![b](docs/b.svg)\n\n*is*\n", "https://x") == "![b](https://x/raw/main/docs/b.svg)\n\n*is*\n"


def test_the_links_of_the_package_follow_from_the_address_of_the_repository(tmp_path):
    for repository, links in (("", {}), ("https://x/y/", {"Source": "https://x/y", "Issues": "https://x/y/issues"})):
        metadata: dict[str, Any] = {}
        readme.Hook(str(ROOT), {"repository": repository}).update(metadata)
        assert links.items() <= metadata["urls"].items()
        assert bool(metadata["urls"]) == bool(repository)
        assert ("](https://x/y/blob/main/docs/tutorial.md)" in metadata["readme"]["text"]) == bool(repository)


def site_packages(environment: Path) -> Path:
    return next(environment.glob("lib/python*/site-packages"))


def needed(names: Iterable[str]) -> set[str]:
    """Distributions with what they need themselves, without extras."""
    found: set[str] = set()
    for name in names:
        own = (Requirement(text) for text in metadata.requires(name) or ())
        found |= {
            name,
            *needed(need.name for need in own if need.marker is None or need.marker.evaluate({"extra": ""})),
        }
    return found


def environment(folder: Path, wheels: dict[str, Path], *names: str) -> Path:
    """The Python of a new virtual environment with the wheels of these names, installed by pip, which finds nothing but
    links to the hard dependencies of this environment: one that a wheel's metadata names beside them would be missing.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site, python = site_packages(folder), folder / "bin" / "python"
    for need in needed(distribution(need) for name in names for need in PROJECTS[name]["dependencies"]):
        held = metadata.distribution(need)
        for top in {path.parts[0] for path in held.files if path.parts[0] not in ("..", "__pycache__")}:
            (site / top).symlink_to(held.locate_file(top))
    install(python, *(wheels[name] for name in names))
    return python


def install(python: Path, *arguments: Path | str) -> None:
    """What is imported is compiled then, most of a distribution never."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--no-index"]
    words = [*pip, "--no-compile", *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def clean(wheels, tmp_path_factory) -> Path:
    """attnkit and the kit. The experiments have too many needs; what they say without them, their package says here."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    python = environment(folder, wheels, "attnkit", "attnkit-conformance")
    install(python, "--no-deps", wheels["attnkit-experiments"])
    return python


@pytest.fixture(scope="session")
def kit_alone(wheels, tmp_path_factory) -> Path:
    return environment(tmp_path_factory.mktemp("kit") / "venv", wheels, "attnkit-conformance")


def run(python: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(python), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_with_hard_dependencies_alone_the_judge_runs_from_any_directory(clean, tmp_path):
    """Without rich a line for each op, without ml_dtypes no bfloat16, and libraries that are not there are counted."""
    page = tmp_path / "page.html"
    expression = "qk_layernorm/ and not property"  # with a stroke, other ops are not drawn
    done = run(clean, tmp_path, "-m", "attnkit_conformance", "run", "-k", expression, "--ops", "--html", str(page))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bfloat16 is left out: it needs ml_dtypes" in done.stdout
    assert "pip install 'attnkit-conformance[full]'" in done.stdout
    assert re.search(r"qk_layernorm +numpy-generic +f64 .* f32 .* f16 .* \d+ pass\n", done.stdout)
    assert re.search(r"^torch is not installed: torch$", done.stdout, re.MULTILINE)
    assert re.search(r"^[1-9]\d* pass, 0 fail, ", done.stdout, re.MULTILINE)
    assert "numpy_readonly" in page.read_text()


def test_what_an_extra_brings_is_named_where_it_is_missing(clean, tmp_path):
    for arguments, text in (
        (("run", "--dtype", "bfloat16"), "--dtype bfloat16 needs ml_dtypes, which is not installed: pip install"),
        (
            ("export", "there"),
            "writing or reading golden vectors needs ml_dtypes, not installed here: pip install",
        ),
    ):
        done = run(clean, tmp_path, "-m", "attnkit_conformance", *arguments)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False)
        assert text in done.stderr


def test_the_kit_judges_the_kernels_of_others_without_attnkit(kit_alone, tmp_path):
    """What is of attnkit says that it is not there; the commands that ask for it say so too."""
    shutil.copy(ROOT / "docs" / "examples" / "ci" / "mine.py", tmp_path)
    done = run(
        kit_alone, tmp_path, "-m", "attnkit_conformance", "run", "mine:ADAPTER", "--profile", "small", "-k", "plain"
    )
    assert (done.returncode, " 0 fail, " in done.stdout) == (0, True), done.stdout + done.stderr
    done = run(kit_alone, tmp_path, "-m", "attnkit_conformance", "run", "numpy", "-k", "qk_layernorm/float32/cross")
    assert "attnkit is not installed: numpy" in done.stdout
    for command in ("mutate", "transforms"):
        done = run(kit_alone, tmp_path, "-m", "attnkit_conformance", command)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False)
        assert "needs attnkit" in done.stderr


def test_console_scripts_are_the_command_lines(clean, tmp_path):
    """That of the experiments needs its extra, and says so."""
    kit = run(clean.parent / "attnkit-conformance", tmp_path, "run", "-k", "qk_layernorm/float32/cross")
    assert (kit.returncode, "numpy-generic" in kit.stdout) == (0, True), kit.stderr
    study = run(clean.parent / "attnkit-experiments", tmp_path, "list")
    assert study.returncode == 2
    assert study.stderr == "error: experiments need torch, which is not installed: pip install attnkit-experiments\n"


def test_the_wheel_is_imported_from_where_it_was_installed(clean, tmp_path):
    code = (
        "import sys, attnkit, attnkit_reference, attnkit_conformance, numpy as np\n"
        "assert all(m.__file__.startswith(sys.prefix) for m in (attnkit, attnkit_reference, attnkit_conformance))\n"
        "x = np.eye(3)\n"
        "found, golden = (module.softmax_attention(x, x, x) for module in (attnkit, attnkit_reference))\n"
        "print(np.abs(found - golden).max() <= 64 * np.finfo(float).eps * golden.max())"
    )
    done = run(clean, tmp_path, "-P", "-c", code)
    assert done.stdout.strip() == "True", done.stderr


ON_DEMAND = {"more-peers": pytest.mark.peers}  # installed by `make peers` alone


@pytest.mark.parametrize("extra", [pytest.param(extra, marks=ON_DEMAND.get(extra, ())) for extra in INSTALLED])
def test_what_the_extras_name_is_what_is_imported(extra):
    """That its packages are those of this environment, in versions it allows; `wheel_extras` installs each anew."""
    missing = []
    for text in INSTALLED[extra][1]:
        requirement = Requirement(text)
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            missing.append(text)
            continue
        assert requirement.specifier.contains(version, prereleases=True), f"{extra}: {text}, but {version} is installed"
    assert not missing, f"{extra}: not installed here: {missing}"
    assert all(find_spec(name) for name in IMPORTS.get(extra, ()))
