"""What is done when another package is imported."""

import importlib
import importlib.util
import subprocess
import sys
import zipfile

import pytest

from attnkit._core import loading


@pytest.fixture
def package(tmp_path, monkeypatch) -> str:
    """A package that was not imported yet, with a module `inner` that may be made to fail."""
    name = "attnkit_test_of_loading"
    (folder := tmp_path / name).mkdir()
    (folder / "__init__.py").write_text("there = True\n")
    (folder / "inner.py").write_text("import os\nif 'ATTNKIT_FAILS' in os.environ: raise ImportError('not now')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield name
    for loaded in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[loaded]


def test_what_waits_for_a_module_is_called_once_at_the_end_of_its_import(package):
    seen = []
    for n in range(2):
        loading.when_loaded(package, lambda n=n: seen.append((n, sys.modules[package].there)))
    assert importlib.util.find_spec(package).name == package
    assert seen == []
    module = importlib.import_module(package)
    assert seen == [(0, True), (1, True)]
    assert module.__loader__ is module.__spec__.loader
    assert "there = True" in module.__loader__.get_source(package)
    importlib.reload(module)
    assert len(seen) == 2
    loading.when_loaded(package, lambda: seen.append("at once"))
    assert seen[2:] == ["at once"]


def test_an_import_that_fails_is_waited_for_again(package, monkeypatch):
    seen = []
    loading.when_loaded(f"{package}.inner", lambda: seen.append(1))
    monkeypatch.setenv("ATTNKIT_FAILS", "1")
    with pytest.raises(ImportError, match="not now"):
        importlib.import_module(f"{package}.inner")
    assert seen == []
    monkeypatch.delenv("ATTNKIT_FAILS")
    importlib.import_module(f"{package}.inner")
    assert seen == [1]


def test_of_modules_that_share_a_loader_the_one_that_is_waited_for_counts(tmp_path, monkeypatch):
    names = ("attnkit_test_waited_for", "attnkit_test_beside")
    with zipfile.ZipFile(tmp_path / "both.zip", "w") as archive:
        archive.writestr(f"{names[0]}.py", f"import {names[1]}\n")
        archive.writestr(f"{names[1]}.py", "")
    monkeypatch.syspath_prepend(str(tmp_path / "both.zip"))
    seen = []
    loading.when_loaded(names[0], lambda: seen.append({*sys.modules} >= {*names}))
    importlib.import_module(names[0])
    assert seen == [True]
    for name in names:
        del sys.modules[name]


def test_kernels_that_load_their_library_are_not_asked_for_in_the_midst():
    """The library was loaded by its kernels, and told attnkit to load them."""
    program = "import attnkit.backends.jax, attnkit.backends.torch"
    done = subprocess.run([sys.executable, "-W", "error:attnkit", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
