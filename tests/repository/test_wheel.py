"""The wheel: what is in it, and that it works from any directory where only its hard dependencies are installed."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from docs import readme
from tests.repository.wheel_extras import IMPORTS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def distribution(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """Without the compiled kernels: tests/native builds one with them."""
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"ATTNKIT_CPU_LEVEL": "none"}, check=True, capture_output=True)
    return next(target.glob("attnkit-*.whl"))


def test_the_wheel_holds_its_packages_and_nothing_else(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    packages = {"attnkit", "attnkit_reference", "attnkit_conformance", "attnkit_experiments"}
    assert {t for t in tops if not t.endswith(".dist-info")} == packages
    assert {f"{package}/py.typed" for package in packages} <= {*names}
    assert any(name.endswith("LICENSE") for name in names)


def test_an_index_shows_a_readme_whose_links_can_be_followed(wheel):
    archive = zipfile.ZipFile(wheel)
    text = archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA"))).decode()
    assert "Description-Content-Type: text/markdown" in text
    assert "Attention variants that replace softmax, each defined **once**" in text
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert all(target.startswith(("https://", "#")) for target in targets), targets
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


@pytest.fixture(scope="session")
def clean(wheel, tmp_path_factory) -> Path:
    """The Python of a new virtual environment with the wheel, installed by pip, which finds nothing but links to the
    hard dependencies of this environment: one that the wheel's metadata names beside them would be missing.
    """
    folder = tmp_path_factory.mktemp("clean") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site, python = site_packages(folder), folder / "bin" / "python"
    for requirement in PROJECT["dependencies"]:
        held = metadata.distribution(distribution(requirement))
        for top in {path.parts[0] for path in held.files if path.parts[0] not in ("..", "__pycache__")}:
            (site / top).symlink_to(held.locate_file(top))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    done = subprocess.run([*pip, "install", "--no-index", str(wheel)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return python


def run(python: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(python), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_with_hard_dependencies_alone_the_judge_runs_from_any_directory(clean, tmp_path):
    """Without rich a line for each op, without ml_dtypes no bfloat16, and libraries that are not there are counted."""
    page = tmp_path / "page.html"
    expression = "qk_layernorm and not property"
    done = run(clean, tmp_path, "-m", "attnkit_conformance", "run", "-k", expression, "--ops", "--html", str(page))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bfloat16 is left out: it needs ml_dtypes" in done.stdout
    assert "pip install 'attnkit[conformance]'" in done.stdout
    assert re.search(r"qk_layernorm +numpy-generic +f64 .* f32 .* f16 .* \d+ pass\n", done.stdout)
    assert re.search(r"^torch is not installed: torch$", done.stdout, re.MULTILINE)
    assert re.search(r"^[1-9]\d* pass, 0 fail, ", done.stdout, re.MULTILINE)
    assert "numpy_readonly" in page.read_text()


def test_what_an_extra_brings_is_named_where_it_is_missing(clean, tmp_path):
    for arguments, text in (
        (("run", "--dtype", "bfloat16"), "--dtype bfloat16 needs ml_dtypes, which is not installed: pip install"),
        (
            ("export", "there"),
            "writing or reading golden vectors needs safetensors and ml_dtypes, not installed here: pip install",
        ),
    ):
        done = run(clean, tmp_path, "-m", "attnkit_conformance", *arguments)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False)
        assert text in done.stderr


def test_console_scripts_are_the_command_lines(clean, tmp_path):
    """That of the experiments needs its extra, and says so."""
    kit = run(clean.parent / "attnkit-conformance", tmp_path, "run", "-k", "qk_layernorm/float32/cross")
    assert (kit.returncode, "numpy-generic" in kit.stdout) == (0, True), kit.stderr
    study = run(clean.parent / "attnkit-experiments", tmp_path, "list")
    assert study.returncode == 2
    assert study.stderr == "error: experiments need torch, which is not installed: pip install 'attnkit[experiments]'\n"


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


@pytest.mark.parametrize("extra", [pytest.param(extra, marks=ON_DEMAND.get(extra, ())) for extra in EXTRAS])
def test_what_the_extras_name_is_what_is_imported(extra):
    """That its packages are those of this environment, in versions it allows; `wheel_extras` installs each anew."""
    missing = []
    for text in EXTRAS[extra]:
        requirement = Requirement(text)
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            missing.append(text)
            continue
        assert requirement.specifier.contains(version, prereleases=True), f"{extra}: {text}, but {version} is installed"
    assert not missing, f"{extra}: not installed here: {missing}"
    assert all(find_spec(name) for name in IMPORTS.get(extra, ()))
